"""A call of a step has arguments (`CallArgs`); a captured call (`CapturedCall`) replays its graphs.

`CallArgs` holds the arguments twice: taken apart, to be compared and copied, and as the caller passed them. What runs
eagerly for good runs on the caller's own containers, so that what the step puts into them is there as without a
capture. Warm-up does so only where an obstacle may lead there; else it is given new ones, as the recording will be, and
a step that puts something into them is refused at the first call.

`CapturedCall` replays a recorded step. It fits a call that finds modules and gradients as they were before the capture;
then its guards are asked (`guards.protocol`). After both have found nothing changed, they are written down as one row,
so that the next call needs one fast check.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepgraph.buffers.outputs import StaticOutputs
from stepgraph.grads.step_grads import Attachment, can_carry_in, carry_in, carry_out
from stepgraph.guards.gradients import GradientGuard
from stepgraph.guards.layout import GradientLayoutGuard
from stepgraph.guards.protocol import Change, FastCheck, Guard, GuardSet
from stepgraph.guards.random_names import NamesGuard
from stepgraph.native.row import GuardRow
from stepgraph.observe.ddp import Replicas
from stepgraph.observe.nonfinite import Flags
from stepgraph.optim.optimizer import HostCounters
from stepgraph.session.proof import CallProof
from stepgraph.signature import Signature
from stepgraph.step.arguments import StepArguments
from stepgraph.step.chain import Chain
from stepgraph.tree import Structure, unflatten
from stepgraph.values.watch import Watch

_grad = operator.attrgetter("grad")
_training = operator.itemgetter("training")


@dataclass(frozen=True, slots=True)
class CallArgs:
    """A call's arguments."""

    leaves: Sequence[Any]
    structure: Structure
    own: tuple[tuple[Any, ...], dict[str, Any]] | None
    """`args` and `kwargs` of the caller, who knows nothing of these leaves if they are padded: then None."""

    def with_leaves(self, leaves: Sequence[Any], *, own: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments to call the step with: the caller's `own` if these are its leaves, else built anew around them."""
        if own and self.own is not None and all(map(operator.is_, leaves, self.leaves)):
            return self.own
        args, kwargs = unflatten(self.structure, leaves)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class Guards:
    """The guards of a captured step, in the order of their remedies."""

    model: tuple[Guard, ...]
    """Modules, parameters, buffers, gradients, and the parameters of all optimizers in reach."""
    values: Watch
    """Host values that the step reads."""
    others: tuple[Guard, ...]
    """State and numbers of optimizers inside the graph, recorded GradScalers, named random states."""

    def as_set(self) -> GuardSet:
        """All of them."""
        return GuardSet((*self.model, self.values, *self.others))


class _Modes:
    """Whether modules are in training, as they were."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._attributes = [vars(module) for module in modules if "training" in vars(module)]
        self._training = list(map(_training, self._attributes))
        self._others = [(m, m.training) for m in modules if "training" not in vars(m)]  # TorchScript's

    def hold(self) -> bool:
        if list(map(_training, self._attributes)) != self._training:
            return False
        return not self._others or all(module.training == mode for module, mode in self._others)

    def expect(self, row: GuardRow) -> None:
        """What `hold` comes down to."""
        row.column(self._attributes, "training", self._training)
        if self._others:
            row.ask(self.hold)


class CapturedCall:
    """One captured signature: static inputs, the chain, static outputs, and what must hold for a replay."""

    def __init__(
        self,
        signature: Signature,
        modules: Sequence[torch.nn.Module],
        parameters: Sequence[torch.Tensor],
        inputs: StepArguments,
        chain: Chain,
        outputs: StaticOutputs,
        carried_in: Attachment,
        added_to: Container[int],
        guards: Guards,
        random: NamesGuard,
        replicas: Replicas,
        counters: HostCounters,
        flags: Flags | None,
        modes_left: Sequence[tuple[torch.nn.Module, bool]],
        hand_out: Callable[[], Any],
        proof: CallProof,
    ) -> None:
        self.signature = signature
        self.replays = 0
        self.proof = proof
        self.flags = flags
        self.inputs, self.chain, self.outputs = inputs, chain, outputs
        self.hand_out = hand_out
        """Gives the caller the results of a replay."""
        self._random, self._replicas = random, replicas
        self._parameters = tuple(parameters)
        self._modes = _Modes(modules)
        self._no_grad = list(signature.no_grad)
        self._carried_in, self._added_to = carried_in, added_to
        left = {id(p): grad for p, grad in chain.final}
        self._left = [left.get(id(p)) for p in parameters]
        """The gradients that a replay leaves; a call that finds just these needs no look at each one."""
        self._may_be_steady = [grad is None for grad in self._left] == self._no_grad and all(
            left.get(id(p)) is kept for p, kept in self._carried_in
        )
        self._finds_none = not self._may_be_steady and all(self._no_grad)
        """Whether the call begins without gradients, and leaves some: `zero_grad()` is called outside."""
        self._steady = GradientGuard(parameters, [None] * len(parameters) if self._finds_none else self._left)
        grads = GradientLayoutGuard((g for _, g in (*chain.final, *carried_in) if g is not None), self._left)
        self._guards = replace(guards, model=(*guards.model, grads))
        self.guards = self._guards.as_set()
        self._fast = FastCheck()
        self._launch, self._follow = chain.single_launch, chain.follow
        self._is_steady = self._is_known = False
        self._before_replay = [part.advance for part in (counters, replicas) if part.is_needed]
        self._writes_back = inputs.writes_back
        self._modes_left = modes_left
        self.straight: Callable[[Sequence[Any]], Any] | None = None
        """From the inputs to the results in one go: the replay of an untouched call, where there is no more to it."""
        is_all = flags is None and not self._before_replay and not self._writes_back and not modes_left
        if self._launch is not None and is_all and self._may_be_steady:
            self.straight = _straight(inputs, self._follow, self._launch, hand_out)

    def fits(self) -> bool:
        """Whether modules and gradients are as they were before the capture."""
        if not self._modes.hold() or not self._random.fits():
            return False
        if self._replicas.is_needed and not self._replicas.fit():
            return False
        self._is_known = (self._may_be_steady or self._finds_none) and self._steady.hold()
        self._is_steady = self._is_known and self._may_be_steady
        return self._is_known or (
            [grad is None for grad in map(_grad, self._parameters)] == self._no_grad and can_carry_in(self._carried_in)
        )

    def own_changes(self, known: Sequence[Change]) -> list[Change]:
        """After the step's code has run once more: the user's values that it has changed, beside those that had been.

        What a library counts is its own business.
        """
        before = {str(change) for change in known}
        return [change for change in self._guards.values.changed() if change.is_users and str(change) not in before]

    @property
    def unlooked(self) -> str | None:
        """What the watch has not looked at, in a sentence."""
        return self._guards.values.unlooked

    def watch(self, values: Watch) -> None:
        """Watch these host values from now on."""
        self._guards = replace(self._guards, values=values)
        self.guards = self._guards.as_set()
        self._fast.drop()

    def write_row(self, replays: int) -> None:
        """After `fits` and all guards have found nothing changed: write the row. `replays` are the step's so far."""
        if self._is_known:
            self._fast.write(self._expect, replays)

    def is_untouched(self) -> bool:
        """One fast check of `fits` and all guards, for a call that looks like an earlier one; False is inconclusive.

        Gradients are enabled in such a call.
        """
        self._is_known = self._fast.holds()
        self._is_steady = self._is_known and self._may_be_steady
        return self._is_known

    def _expect(self, row: GuardRow) -> None:
        self._modes.expect(row)
        self._random.expect_fork(row)
        self._replicas.expect(row)
        self._steady.expect(row)
        self.guards.expect(row)

    def replay(self, leaves: Sequence[object]) -> None:
        """Run the captured step once on these inputs, after `fits` or `is_untouched` has looked at the gradients."""
        if self._follow is not None:
            self._follow()
        self.inputs.load(leaves)
        steady, self._is_steady = self._is_steady, False
        carried = carry_in(self._carried_in, self.chain.note_loaded) if not steady else None
        for advance in self._before_replay:
            advance()
        if steady and self._launch is not None:
            self._launch()
        else:
            self.chain.replay(steady=steady)
        if carried is not None:
            carry_out(carried, self._added_to, self.chain.note_loaded)
        if self._writes_back:
            self.inputs.store(leaves)
        for module, mode in self._modes_left:
            module.training = mode


def _straight(
    inputs: StepArguments,
    follow: Callable[[], None] | None,
    launch: Callable[[], Any],
    hand_out: Callable[[], Any],
) -> Callable[[Sequence[Any]], Any] | None:
    if inputs.only is None:
        return None
    index, copy = inputs.only

    def replay(leaves: Sequence[Any]) -> Any:
        copy(leaves[index])
        launch()
        return hand_out()

    def replay_in_order(leaves: Sequence[Any]) -> Any:
        follow()  # type: ignore[misc]
        copy(leaves[index])
        launch()
        return hand_out()

    return replay if follow is None else replay_in_order
