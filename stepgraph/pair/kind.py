"""A `CallKind` holds what is known of the calls of one module that look alike.

Warm-up is watched for what no replay could repeat. What only a first call does (a cache that is filled, a lazy
initialization) is in nobody's way, so the latest call decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from stepgraph.buffers.outputs import StaticOutputs, another_leaf
from stepgraph.errors import CaptureError
from stepgraph.pair.guard import SiteGuard
from stepgraph.pair.proof import EagerProof
from stepgraph.ran import ExecutedCode
from stepgraph.signature import Signature, is_plain
from stepgraph.tree import Structure, paths


class CallKind:
    """Calls of one signature: what their eager calls have shown, and the guard of their graphs."""

    def __init__(self, signature: Signature, leaves: Iterable[Any]) -> None:
        self.signature = signature
        self.keep_alive = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self.ran = ExecutedCode()
        """The code that the calls have run."""
        self.proof = EagerProof()
        self.seen: CaptureError | None = None
        """What the latest eager call did that no replay could repeat."""
        self.guard: SiteGuard | None = None
        self.obstacle: str | None = None
        """Why the calls stay eager."""
        self._result: tuple[Structure, list[Any]] | None = None

    def compare_result(self, result: StaticOutputs) -> CaptureError | None:
        """Compare what no replay computes again with the result of the call before."""
        before, now = self._result, (result.structure, result.plain_values)
        self._result, varies = now, None
        if before is None:
            return None
        if before[0] != now[0]:
            return _varying("the structure of its result is another at each call")
        for path, one, two in zip(paths(now[0], "result"), before[1], now[1], strict=True):
            if one is not two and (not is_plain(one) or one != two):
                is_leaf = isinstance(one, weakref.ref) and isinstance(two, weakref.ref)
                varies = another_leaf() if is_leaf else _varying(f"{path} was {one!r}, then {two!r}")
        return varies


def _varying(what: str) -> CaptureError:
    return CaptureError(
        what,
        rule="varying-output",
        fix="return a tensor (count.detach(), not count.item()), or compute the value outside the module.",
    )
