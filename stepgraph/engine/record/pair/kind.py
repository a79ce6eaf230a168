"""A `CallKind` holds the facts known about the calls of one module that look alike.

Warm-up is observed for effects that no replay can repeat. Effects of a first call only (a cache that is filled, a lazy
initialization) do no harm, so the latest call decides.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.executed_code import ExecutedCode
from stepgraph.core.plain_values import is_compared_by_value
from stepgraph.core.tree import Structure, paths
from stepgraph.core.wording import counted
from stepgraph.engine.call.proof import Shown
from stepgraph.engine.guards.signature import Signature
from stepgraph.engine.memory.outputs import StaticOutputs, another_leaf
from stepgraph.engine.observe.eager_call import Obstacle
from stepgraph.engine.record.pair.eager_proof import EagerProof
from stepgraph.engine.record.pair.guard import SiteGuard


class CallKind:
    """Calls of one signature: the facts learnt from their eager calls, and the guard of their graphs."""

    def __init__(self, signature: Signature, leaves: Iterable[Any]) -> None:
        self.signature = signature
        self.keep_alive = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self.ran = ExecutedCode()
        """The code that the calls have run."""
        self.proof = EagerProof()
        self.seen: CaptureError | None = None
        """An effect of the latest eager call that no replay can repeat."""
        self.guard: SiteGuard | None = None
        self.obstacle: str | None = None
        """The reason why the calls stay eager."""
        self._result: tuple[Structure, list[Any]] | None = None

    def compare_result(self, name: str, result: StaticOutputs) -> CaptureError | None:
        """Compare the plain values of a result, which no replay computes again, with those of the call before."""
        before, now = self._result, (result.structure, result.plain_values)
        self._result, varies = now, None
        if before is None:
            return None
        if before[0] != now[0]:
            what = "the structure of its result changes from call to call"
            return Obstacle("varying-output", what, whose="module").error(name)
        for path, one, two in zip(paths(now[0], "result"), before[1], now[1], strict=True):
            if one is not two and (not is_compared_by_value(one) or one != two):
                is_leaf = isinstance(one, weakref.ref) and isinstance(two, weakref.ref)
                what = f"{path} was {one!r}, then {two!r}"
                varies = another_leaf() if is_leaf else Obstacle("varying-output", what, whose="module").error(name)
        return varies


def equality(kinds: Collection[CallKind], audits: int) -> str:
    """The facts known about equality with eager, and the values that are not watched, in one line."""
    if not kinds:
        return "nothing captured"
    counts = Counter(kind.proof.shown for kind in kinds)
    kinds_of_calls = counted(len(kinds), "kinds of calls", "kind of calls")
    told = [f"{counts[Shown.EQUAL]} of {kinds_of_calls} run the operations of their eager calls"]
    if counts[Shown.OTHER_PATH]:
        told.append(f"{counts[Shown.OTHER_PATH]} take another path [other-path]")
    if counts[Shown.NOT]:
        told.append(f"{counts[Shown.NOT]} had no eager call to compare with")
    unlooked = {kind.guard.unlooked for kind in kinds if kind.guard is not None} - {None}
    return "; ".join([", ".join(told), f"audits: {audits}", *sorted(map(str, unlooked))])
