"""A call of a step has arguments (`CallArgs`); a captured call (`CapturedCall`) replays its graphs.

`CallArgs` holds the arguments twice: as leaves, to be compared and copied, and as the caller passed them. A step that
stays eager runs on the caller's own containers, so that the caller sees what the step puts into them. A warm-up call
uses the caller's containers only if the step may go on in eager after an obstacle. Otherwise it gets new containers, as
the recording does, and a step that puts something into them is refused at the first call.

`CapturedCall` replays a recorded step. It fits a call that finds modules and gradients as they were before the capture.
Then its guards are asked (`guards.protocol`). Once neither found a change, both are written down as one row, so that
the next call needs one fast check.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepgraph.core.tree import Structure, unflatten
from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.call.proof import CallProof
from stepgraph.engine.grads.step_grads import Attachment, can_carry_in, carry_in, carry_out
from stepgraph.engine.guards.gradients import GradientGuard
from stepgraph.engine.guards.host_values.decisions import HostValues
from stepgraph.engine.guards.host_values.parts import Place
from stepgraph.engine.guards.host_values.watch import Watch
from stepgraph.engine.guards.layout import GradientLayoutGuard
from stepgraph.engine.guards.outside_memory import OutsideMemory
from stepgraph.engine.guards.protocol import Change, FastCheck, Guard, GuardSet
from stepgraph.engine.guards.random_names import NamesGuard
from stepgraph.engine.guards.signature import Signature
from stepgraph.engine.memory.outputs import StaticOutputs
from stepgraph.engine.observe.ddp import Replicas
from stepgraph.engine.oplog import Log
from stepgraph.engine.record.chain import Chain
from stepgraph.engine.step.arguments import StepArguments
from stepgraph.engine.step.nonfinite import Flags

_grad = operator.attrgetter("grad")
_training = operator.itemgetter("training")


@dataclass(frozen=True, slots=True)
class CallArgs:
    """A call's arguments."""

    leaves: Sequence[Any]
    structure: Structure
    own: tuple[tuple[Any, ...], dict[str, Any]] | None
    """The caller's `args` and `kwargs`. None if the leaves are padded: the caller does not have those."""

    def with_leaves(self, leaves: Sequence[Any], *, own: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments to call the step with: the caller's `own` if they have these leaves, else new containers."""
        if own and self.own is not None and all(map(operator.is_, leaves, self.leaves)):
            return self.own
        args, kwargs = unflatten(self.structure, leaves)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class Guards:
    """The guards of a captured step, ordered by remedy."""

    model: tuple[Guard, ...]
    """Modules, parameters, buffers, gradients, and the parameters of all optimizers in reach."""
    values: Watch
    """Host values that the step reads."""
    others: tuple[Guard, ...]
    """State and numbers of optimizers inside the graph, recorded GradScalers, named random states."""
    outside: OutsideMemory

    def as_set(self) -> GuardSet:
        return GuardSet((*self.model, self.values, *self.others, self.outside))


class _Modes:
    """Compares the `training` flags of modules with those at capture."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._attributes = [vars(module) for module in modules if "training" in vars(module)]
        self._training = list(map(_training, self._attributes))
        self._others = [(m, m.training) for m in modules if "training" not in vars(m)]  # TorchScript's

    def hold(self) -> bool:
        if list(map(_training, self._attributes)) != self._training:
            return False
        return not self._others or all(module.training == mode for module, mode in self._others)

    def expect(self, row: GuardRow) -> None:
        """Add the check of `hold` to a row."""
        row.column(self._attributes, "training", self._training)
        if self._others:
            row.ask(self.hold)


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded step, ready to run."""

    inputs: StepArguments
    chain: Chain
    outputs: StaticOutputs
    hand_out: Callable[[], Any]
    """Returns the results for the caller."""
    carried_in: Attachment
    """Gradients that must be stored where the graphs read them."""
    added_to: Container[int]
    before: tuple[Callable[[], None], ...]
    """Functions that advance counters on the host, called at each step."""
    modes_left: Sequence[tuple[torch.nn.Module, bool]]
    """Modules whose `training` flag the step changes, and the new value."""
    flags: Flags | None
    """Flags of `nan_check`."""

    def run(self, leaves: Sequence[object], *, steady: bool) -> None:
        """Run the step once on these inputs. `steady`: the gradients are those left by the last replay."""
        chain = self.chain
        if chain.follow is not None:
            chain.follow()
        self.inputs.load(leaves)
        carried = None if steady else carry_in(self.carried_in, chain.note_loaded)
        for advance in self.before:
            advance()
        if steady and chain.single_launch is not None:
            chain.single_launch()
        else:
            chain.replay(steady=steady)
        if carried is not None:
            carry_out(carried, self.added_to, chain.note_loaded)
        if self.inputs.writes_back:
            self.inputs.store(leaves)
        for module, mode in self.modes_left:
            module.training = mode

    def straight(self) -> Callable[[Sequence[Any]], Any] | None:
        """Return one function for a whole steady replay, or None if it takes more than copy, launch and results."""
        launch, only = self.chain.single_launch, self.inputs.only
        if launch is None or only is None or self.before or self.modes_left or self.flags or self.inputs.writes_back:
            return None
        (index, copy), follow, hand_out = only, self.chain.follow, self.hand_out

        def replay(leaves: Sequence[Any]) -> Any:
            if follow is not None:
                follow()
            copy(leaves[index])
            launch()
            return hand_out()

        return replay


class StartState:
    """What a call finds when it begins: modes, gradients, the named random state, the flags of DDP modules."""

    def __init__(
        self,
        signature: Signature,
        modules: Sequence[torch.nn.Module],
        parameters: Sequence[torch.Tensor],
        replay: Replay,
        random: NamesGuard,
        replicas: Replicas,
    ) -> None:
        self._parameters, self._random, self._replicas = tuple(parameters), random, replicas
        self._modes = _Modes(modules)
        self._no_grad = list(signature.no_grad)
        self._carried_in = replay.carried_in
        left = {id(p): grad for p, grad in replay.chain.final}
        self.left = [left.get(id(p)) for p in parameters]
        """The gradients that a replay leaves. A call that finds exactly these skips the check of each gradient."""
        self.may_be_steady = [grad is None for grad in self.left] == self._no_grad and all(
            left.get(id(p)) is kept for p, kept in replay.carried_in
        )
        finds_none = not self.may_be_steady and all(self._no_grad)  # the user calls `zero_grad()` outside the step
        self._may_be_known = self.may_be_steady or finds_none
        self._steady = GradientGuard(parameters, [None] * len(parameters) if finds_none else self.left)
        self.is_known = False
        """True if this call found exactly the expected gradient tensors."""

    def fits(self) -> bool:
        """Check that the state at the start of this call is the one before the capture."""
        if not self._modes.hold() or not self._random.fits():
            return False
        if self._replicas.is_needed and not self._replicas.fit():
            return False
        self.is_known = self._may_be_known and self._steady.hold()
        return self.is_known or (
            [grad is None for grad in map(_grad, self._parameters)] == self._no_grad and can_carry_in(self._carried_in)
        )

    def expect(self, row: GuardRow) -> None:
        """Add the check of `fits` to a row, for a call whose gradients are known."""
        self._modes.expect(row)
        self._random.expect_fork(row)
        self._replicas.expect(row)
        self._steady.expect(row)

    def take_steady(self) -> bool:
        """Return whether this call found the gradients left by the last replay, and forget it."""
        steady, self.is_known = self.is_known and self.may_be_steady, False
        return steady


class CapturedCall:
    """One captured signature: its replay, the state that a call must start from, and the guards."""

    def __init__(
        self, signature: Signature, replay: Replay, start: StartState, guards: Guards, proof: CallProof
    ) -> None:
        self.signature, self.parts, self.start, self.proof = signature, replay, start, proof
        self.answers = guards.values.answers
        """The answers to what the recording has asked of host values."""
        self.replays = 0
        self.flags, self.hand_out = replay.flags, replay.hand_out
        pairs = (*replay.chain.final, *replay.carried_in)
        grads = GradientLayoutGuard((grad for _, grad in pairs if grad is not None), start.left)
        self._guards = replace(guards, model=(*guards.model, grads))
        self.guards = self._guards.as_set()
        self._fast = FastCheck()
        self.straight = replay.straight() if start.may_be_steady else None
        """The replay of an untouched call as one function (`Replay.straight`), or None."""

    def traceable(self, changes: Sequence[Change]) -> list[Place]:
        """Return the places to trace in a new recording: the changed numbers, and those traced before."""
        return self._guards.values.traceable(changes)

    def host_values(self) -> HostValues:
        """Note the present host values, to be restored if a recording is dropped."""
        return self._guards.values.host_values()

    def noted(self, place: Place) -> Any:
        """Return the value of a place that the graph was recorded with."""
        return self._guards.values.noted(place)

    def own_changes(self, known: Sequence[Change], usual: Collection[str]) -> list[Change]:
        """Return the values that the step itself changed in one more run, except those `known` before.

        Values of these `usual` names, counters of libraries, change at each call.
        """
        before, now = {str(change) for change in known}, self._guards.values.changed()
        found = [change for change in now if str(change) not in before and change.name not in usual]
        counts = self._guards.values.counts_of_libraries if found else ()
        return [change for change in found if change.name not in counts]

    @property
    def unlooked(self) -> str | None:
        """A sentence about what the watch did not cover, or None."""
        return self._guards.values.unlooked

    @property
    def labels(self) -> set[str]:
        """The names of all values that the step can reach."""
        return self._guards.values.labels

    def watch(self, values: Watch, log: Log) -> None:
        """Expect these values from now on, and the tensors of a new recording."""
        self._guards = replace(self._guards, values=values, outside=OutsideMemory(log, values.tensors))
        self.guards = self._guards.as_set()
        self._fast.drop()

    def write_row(self, replays: int) -> None:
        """Write the row, after `fits` and all guards found no change. `replays` counts the step's replays so far."""
        if self.start.is_known:
            self._fast.write(self._expect, replays)

    def is_untouched(self) -> bool:
        """Check the start state and all guards in one row, for a call that looks like an earlier one.

        False is inconclusive. Gradients are enabled in such a call.
        """
        self.start.is_known = found = self._fast.holds()
        return found

    def _expect(self, row: GuardRow) -> None:
        self.start.expect(row)
        self.guards.expect(row)

    def replay(self, leaves: Sequence[object]) -> None:
        """Run the captured step once on these inputs, after `fits` or `is_untouched` has checked the gradients."""
        self.parts.run(leaves, steady=self.start.take_steady())
