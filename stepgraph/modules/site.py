"""A module's site holds all its calls that look alike: their runners, and what their warm-up has shown.

Warm-up is watched for what no replay could repeat. What only a first call does (a cache that is filled, a lazy
initialization) is in nobody's way, so the latest call decides.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from stepgraph.buffers.inputs import ArgMetadata
from stepgraph.buffers.outputs import StaticOutputs, another_leaf
from stepgraph.errors import CaptureError
from stepgraph.frames import warn_user
from stepgraph.modules.options import ModuleOptions
from stepgraph.oplog import Log
from stepgraph.pair.cached_casts import CastWatch, shared_cast
from stepgraph.pair.call import RecordedCall
from stepgraph.pair.guard import SiteGuard
from stepgraph.pair.proof import EagerProof
from stepgraph.pair.record import PairCapture
from stepgraph.pair.runner import Runner
from stepgraph.ran import ExecutedCode
from stepgraph.signature import Signature, is_plain
from stepgraph.signature.fast_match import FastMatch
from stepgraph.tree import Structure, paths


class SiteOwner(Protocol):
    """What is asked of the manager that a site belongs to."""

    name: str
    module: torch.nn.Module
    options: ModuleOptions
    sites: dict[Hashable, ModuleSite]
    eager_reasons: Counter[str]
    recapture_reasons: Counter[str]
    forwards: int
    backwards: int

    @property
    def fork(self) -> str | None:
        """The named random state that is forked right now."""

    def pair(self) -> PairCapture:
        """What records the module's graphs."""

    def guard(self, site: ModuleSite, runner: Runner) -> None:
        """Note what the graphs of a site have baked in."""

    def holds(self, site: ModuleSite, *, audited: bool = False) -> bool:
        """Whether nothing that the graphs have baked in has changed; if it has, they are dropped."""

    def check_capturable(self) -> None:
        """Raise for what would not run at replays."""

    def failed(self, site: ModuleSite, error: Exception) -> None:
        """A capture failed: the module stays eager for these calls."""

    def note_returned(self, leaves: list[torch.Tensor]) -> None:
        """Calls return these parameters, or other leaves, as such."""

    def state_by_id(self) -> dict[int, torch.Tensor]:
        """The module's parameters and buffers, by id."""

    def look_for_replays(self) -> None:
        """A backward came to an eager call under autocast with its cache."""

    def drop(self) -> None:
        """Free the module's graphs; its calls warm up again."""

    def forget(self) -> None:
        """Free the module's graphs, and forget what was in the way of others."""


@dataclass(eq=False, slots=True)
class ModuleCall(RecordedCall):
    """One eager call of a module that is to be graphed, and its backward."""

    site: ModuleSite = field(kw_only=True)
    slot: int = field(kw_only=True)
    """The first lane that no other call of the module, and no replayed call, was under way in."""
    born_at: int = 0
    """How many backwards there had been."""
    made_by: dict[int, tuple[ModuleCall, int]] = field(default_factory=dict)
    """Arguments that are another call's result: which call, which of its tensors."""
    shared: dict[int, int] = field(default_factory=dict)
    """Arguments that other calls were given too, by leaf index: a number for the tensor."""
    grads: dict[int, ArgMetadata] = field(default_factory=dict)
    """The results that gradients came back to."""
    backward_ambient: tuple[Hashable, ...] | None = None
    num_results: int = 0
    is_differentiable: bool = False
    log: Log | None = None
    """The operations of its forward."""

    @property
    def metas(self) -> list[ArgMetadata | None]:
        """The gradient's geometry for each result."""
        return [self.grads.get(index) for index in range(self.num_results)]


@dataclass(frozen=True, slots=True)
class LastModuleCall:
    """How a site's calls look, for a call that looks the same to find it without a signature."""

    fast_match: FastMatch
    structure: Structure
    around: tuple[Hashable, ...]
    """Flags, modes and what else tells kinds of calls apart, beside the arguments."""
    site: ModuleSite


class ModuleSite:
    """All calls of one module that look alike, and their runners."""

    def __init__(self, manager: SiteOwner, call: Signature) -> None:
        self.manager, self.call = manager, call
        self.runners: list[Runner] = []
        self.recorded: ModuleCall | None = None
        self.had_backward = self.is_passed_by = False
        """Whether a backward has come to one of its calls, and whether one has run while a call waited for it."""
        self.most_under_way = 0
        """Calls that were under way at a time in warm-up."""
        self.obstacle: str | None = None
        """Why calls here stay eager."""
        self.seen: CaptureError | None = None
        """What the latest eager call did that no replay could repeat."""
        self.casts = CastWatch()
        self.knows_several = False
        """Whether a backward of the warm-up came to several calls of the module."""
        self.again: str | None = None
        """Why calls have to warm up again."""
        self.results = EagerResults()
        self.proof = EagerProof()
        self.guard: SiteGuard | None = None
        self.copied: set[int] = set()
        """Results that callers were found to hold, so that they are handed out as copies."""
        self._copies_grads = False
        self._last_call: LastModuleCall | None = None
        self.keep_alive: list[Any] = []
        self.ran = ExecutedCode()
        """The code that calls here have run."""

    @property
    def finding(self) -> CaptureError | None:
        """What its eager calls did that no replay could repeat."""
        return self.seen or self.proof.wavers or self.casts.found()

    @property
    def is_open(self) -> bool:
        """Whether graphs could be captured now."""
        return not self.runners and self.obstacle is None and self.finding is None

    def last_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], structure: Structure, around: tuple[Hashable, ...]
    ) -> LastModuleCall | None:
        """How a call of this site looks, or None where that cannot be told at once, or need not be."""
        if self._last_call is None and self.runners:
            fast_match = FastMatch.of(args, kwargs, tell_computed=False)
            if fast_match is not None:
                self._last_call = LastModuleCall(fast_match, structure, around, self)
        return self._last_call

    def add(self, runner: Runner) -> None:
        """Take a runner in."""
        runner.result.copy(self.copied)
        runner.backwards.are_copied = self._copies_grads
        if not self.knows_several:
            runner.tell_several = self.tell_several
        self.runners.append(runner)

    def tell_several(self) -> None:
        """One backward comes to several calls, which warm-up has not seen: it looks again whether they share casts."""
        if self.again is None and not self.knows_several:
            self.again = "several calls in one backward, under autocast with its cache   [autocast-cache]"
            self.knows_several = True
            warn_user(f"{self.manager.name}: {self.again}\n{shared_cast('it possibly')}\nIts calls warm up again.")

    def copy_results(self, indices: Iterable[int]) -> None:
        """Hand out copies of these results."""
        self.copied.update(indices)
        for runner in self.runners:
            runner.result.copy(self.copied)

    def copy_grads(self) -> None:
        """Hand out copies of all gradients."""
        self._copies_grads = True
        for runner in self.runners:
            runner.backwards.are_copied = True

    def note_kept(self, slot: int) -> None:
        """Before an eager call: results of the last one in its place that are still held are handed out as copies."""
        if self.manager.options.outputs == "guarded":
            self.copied |= self.results.kept(slot)


class EagerResults:
    """Compares the results of eager calls, and tells which of them are held."""

    def __init__(self) -> None:
        self.varies: CaptureError | None = None
        """How the latest was unlike that of the call before."""
        self._result: tuple[Structure, list[Any]] | None = None
        self._handed_out: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}

    def kept(self, slot: int) -> set[int]:
        """The results of the last call in this place that are still held."""
        return {index for index, storage in enumerate(self._handed_out.pop(slot, ())) if storage() is not None}

    def note(self, result: StaticOutputs, slot: int) -> None:
        """Compare what no replay computes again with the call before."""
        self._handed_out[slot] = [weakref.ref(tensor.untyped_storage()) for tensor in result.tensors]
        now = (result.structure, result.plain_values)
        self.varies = None
        if self._result is not None:
            structure, values = self._result
            if structure != now[0]:
                self.varies = _varying("the structure of its result is another at each call")
            else:
                for path, one, two in zip(paths(structure, "result"), values, now[1], strict=True):
                    if one is not two and (not is_plain(one) or one != two):
                        is_leaf = isinstance(one, weakref.ref) and isinstance(two, weakref.ref)
                        self.varies = another_leaf() if is_leaf else _varying(f"{path} was {one!r}, then {two!r}")
        self._result = now


def _varying(what: str) -> CaptureError:
    return CaptureError(
        what,
        rule="varying-output",
        why="a replay computes tensors; a plain value in the result would be that of the capture for ever.",
        fix="return a tensor (count.detach(), not count.item()), or compute the value outside the module.",
    )
