"""A call site: all graphs for calls that look alike from outside, told apart by the state they were captured in.

The arguments and the process's flags find the site by one dictionary look-up. Within it, graphs differ by what the
step's own modules and gradients are like: train or eval, `.grad` None or not. Which modules those are is only known
once the step has run, and may differ between train and eval, so each graph carries its own list and is asked whether
it fits.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepgraph.buffers.static import StaticInputs, StaticOutputs, is_copied_in
from stepgraph.grads.step_grads import Attachment, can_carry_in, carry_in, carry_out
from stepgraph.guards.gradients import GradientGuard
from stepgraph.guards.hooks import with_hooks
from stepgraph.guards.layout import Layouts, layouts_of
from stepgraph.guards.model import ModelGuard
from stepgraph.guards.optimizer import NumbersGuard, ParametersGuard, StateGuard
from stepgraph.native.row import GuardRow
from stepgraph.observe.ddp import Replicas
from stepgraph.observe.nonfinite import Flags
from stepgraph.observe.step_objects import StepObjects, numbered
from stepgraph.optim.effects import OptimizerEffects
from stepgraph.optim.optimizer import HostCounters
from stepgraph.optim.scaler import ScalerGuard
from stepgraph.rng.tracker import NamesGuard
from stepgraph.signature import Signature
from stepgraph.signature.fast_match import FastMatch
from stepgraph.signature.memory import keys_apart
from stepgraph.step.chain import Chain
from stepgraph.tree import Structure
from stepgraph.values.watch import Watch
from stepgraph.values.watch_values import is_users

_MAX_ROWS = 8
"""How often what the guards come down to is written down anew in short succession."""
_ROW_PAYS_AFTER = 16
"""Replays after which it is worth it in any case."""
_grad = operator.attrgetter("grad")
_training = operator.itemgetter("training")


@dataclass(frozen=True, slots=True)
class Guards:
    """What is asked before each replay, each kind with a remedy of its own."""

    numbers: tuple[NumbersGuard, ...]
    """Optimizers inside the graph, whose numbers are baked in: one that changes leaves the graph."""
    states: tuple[StateGuard | ScalerGuard | NamesGuard, ...]
    """The same optimizers' state, and recorded GradScalers: loaded anew, the step is captured anew."""
    parameters: tuple[ParametersGuard, ...]
    """Which parameters all optimizers have that it can name: changed, the step is looked at and captured anew."""
    model: ModelGuard
    """Modules, parameters and buffers: the same."""
    values: Watch
    """Host values that the step reads: changed, the step is captured anew, or stays eager if they keep changing."""
    random: NamesGuard
    """The named random state that the call is made under: each has a graph of its own."""
    replicas: Replicas
    """DDP modules, whose flags tell graphs apart, and are left by a replay as by the step."""


class CapturedCall:
    """One captured signature: static inputs, the chain, static outputs, and what must hold for a replay."""

    def __init__(
        self,
        signature: Signature,
        modules: Sequence[torch.nn.Module],
        parameters: Sequence[torch.Tensor],
        inputs: StaticInputs,
        chain: Chain,
        outputs: StaticOutputs,
        carried_in: Attachment,
        added_to: Container[int],
        guards: Guards,
        counters: HostCounters,
        flags: Flags | None,
        modes_left: Sequence[tuple[torch.nn.Module, bool]],
        hand_out: Callable[[], Any],
    ) -> None:
        self.signature = signature
        self.replays = 0
        self.flags = flags
        self.inputs, self.chain, self.outputs = inputs, chain, outputs
        self.hand_out = hand_out
        """Gives the caller the results of a replay."""
        self.guards = guards
        self._parameters = tuple(parameters)
        self._modes = [vars(module) for module in modules if "training" in vars(module)]
        self._training = list(map(_training, self._modes))
        self._others = [(m, m.training) for m in modules if "training" not in vars(m)]  # TorchScript's
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
        grads = (grad for _, grad in (*chain.final, *carried_in) if grad is not None)
        self._grads = Layouts(layouts_of({id(grad): grad for grad in grads}.values()))
        self._row: Callable[[], bool] | None = None
        self._rows_left, self._row_made_at = _MAX_ROWS, -_ROW_PAYS_AFTER
        self._launch, self._follow = chain.single_launch, chain.follow
        self._is_steady = self._is_known = False
        self._before_replay = [part.advance for part in (counters, guards.replicas) if part.is_needed]
        self._writes_back = inputs.writes_back
        self._modes_left = modes_left
        self.straight: Callable[[Sequence[Any]], Any] | None = None
        """From the inputs to the results in one go: the replay of an untouched call, where there is no more to it."""
        is_all = flags is None and not self._before_replay and not self._writes_back and not modes_left
        if self._launch is not None and is_all and self._may_be_steady:
            self.straight = _straight(inputs, self._follow, self._launch, hand_out)

    def fits(self) -> bool:
        """Whether modules and gradients are as they were before the capture."""
        guards = self.guards
        if not self._modes_hold() or not guards.random.fits():
            return False
        if guards.replicas.is_needed and not guards.replicas.fit():
            return False
        self._is_known = (self._may_be_steady or self._finds_none) and self._steady.hold()
        self._is_steady = self._is_known and self._may_be_steady
        return self._is_known or (
            [grad is None for grad in map(_grad, self._parameters)] == self._no_grad and can_carry_in(self._carried_in)
        )

    def write_row(self, replays: int) -> None:
        """After `fits` and every guard have found nothing: write down what they come down to now.

        `replays` are those of the step so far. What changes all the time is not worth a new row each time.
        """
        is_cheap = replays - self._row_made_at >= _ROW_PAYS_AFTER
        if self._is_known and (is_cheap or self._rows_left):
            self._rows_left -= not is_cheap
            self._row, self._row_made_at = self._expectations(), replays

    def is_untouched(self) -> bool:
        """Whether a replay would find all as the last one left it: `fits` and every guard, in one row.

        It may say no where all is well, as it does before the first replay; what is not as it was is for `fits` and
        the guards to tell. Asked of calls that look like an earlier one, gradients enabled.
        """
        self._is_known = self._row is not None and self._row()
        self._is_steady = self._is_known and self._may_be_steady
        return self._is_known

    def _modes_hold(self) -> bool:
        if list(map(_training, self._modes)) != self._training:
            return False
        return not self._others or all(module.training == mode for module, mode in self._others)

    def _expectations(self) -> Callable[[], bool]:
        row, guards = GuardRow(), self.guards
        row.column(self._modes, "training", self._training)
        if self._others:
            row.ask(self._modes_hold)
        guards.random.expect_fork(row)
        optimizers = (*guards.parameters, *guards.numbers, *guards.states)
        for guard in (guards.replicas, self._steady, guards.model, *optimizers, guards.values):
            guard.expect(row)
        self._grads.expect(row, seen={id(grad) for grad in self._left})
        return row.question()

    def model_changed(self) -> str | None:
        """What is another about the model than at capture, after `fits` has looked at the parameters."""
        changed = self.guards.model.changed(flags_seen=self._is_known)
        moved = self._grads.changed() if changed is None else None
        if moved is not None:
            changed = f"a gradient of shape {list(moved[0].shape)} {moved[1]} (`.grad.data = ...`)"
        for guard in self.guards.parameters if changed is None else ():
            changed = changed or guard.changed()
        return changed

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
    inputs: StaticInputs,
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


@dataclass(frozen=True, slots=True)
class LastCall:
    """How the calls of a site look, for a call that looks the same to find it without a signature."""

    fast_match: FastMatch
    ambient: tuple[Hashable, ...]
    structure: Structure
    site: Site


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something in a step that no replay could repeat."""

    what: str
    names: tuple[str, ...] = ()
    """The values in question, as `ignore=` takes them."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The model and the host values as an eager call has left them: a recording that finds others knows nothing."""

    model: ModelGuard
    parameters: tuple[ParametersGuard, ...]
    values: Watch

    def rebuilt(self) -> str | None:
        """What is another about the model, or about what optimizers step."""
        changed = self.model.changed()
        for guard in self.parameters:
            changed = changed or guard.changed()
        return changed


class Site:
    """The graphs and the warm-up of calls with the same arguments and flags."""

    def __init__(self, call: Signature) -> None:
        self._call = call
        """The part of the signature that all calls here share: the arguments and the flags."""
        self.touched = StepObjects()
        self.calls: list[CapturedCall] = []
        self.seen = 0
        """How many calls came here that no graph fitted."""
        self.was_captured = False
        self.obstacle: str | None = None
        """Why calls here stay eager for good."""
        self.changes: Counter[str] = Counter()
        """How often a host value changed that soon after its capture that the capture was not worth it."""
        self.hold_grads = False
        """Whether a recording has shown that the step uses the gradients it finds."""
        self.cut_scalers = False
        """Whether a recording has shown that a GradScaler of the step cannot be recorded."""
        self.scaled: set[int] = set()
        """Optimizers that a GradScaler steps, by id: they run with it, between graphs."""
        self.written: set[int] = set()
        """Arguments that the step was seen to write to, by leaf index."""
        self.renewed: set[int] = set()
        """DDPs, by id, that were given new accumulators."""
        self.surprises = 0
        """How many recordings in a row have shown what no eager call has."""
        self.last_eager_state: Seen | None = None
        """What the last eager call went by."""
        self._unmoved: dict[frozenset[int], list[torch.Generator]] = {}
        self.effects = OptimizerEffects()
        """What optimizers did in the last eager call besides their update."""
        self.obstacles: dict[str, Obstacle] = {}
        """What warm-up found that no replay could repeat, by rule."""
        self.results: tuple[object, list[object]] | None = None
        """The static part of an earlier call's results."""
        self.keep_alive: dict[str, object] = {}
        """Arguments that are told by identity, by name, kept so that no other object takes their identity.

        Of a tensor of another class than torch's, that class: the step may read its attributes.
        """
        self._warm: Counter[frozenset[int]] = Counter()
        self._credit = self._watched = 0
        self._fast_match: FastMatch | None = None

    def sign(self) -> Signature:
        """The signature of a call at this moment, over all that the step is known to touch."""
        return replace(
            self._call,
            training=tuple(m.training for m in self.touched.all_modules),
            no_grad=tuple(p.grad is None for p in self.touched.parameters),
        )

    def with_keys(self, leaves: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
        """The leaves of a call here, each with its name before it and its key after it."""
        return zip(self._call.names(), leaves, self._call.leaves, strict=True)

    def sign_as(self, leaves: tuple[Hashable, ...]) -> Signature:
        """The signature of calls like these with other leaves."""
        return replace(self._call, leaves=leaves)

    def keep(self, leaves: Sequence[Any]) -> None:
        """Keep what a call is given besides data."""
        named = [(name, leaf) for name, leaf, _ in self.with_keys(leaves) if type(leaf) is not torch.Tensor]
        self.keep_alive = {name: type(leaf) if is_copied_in(leaf) else leaf for name, leaf in named}

    def with_objects(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, the objects passed to it, the hooks that run with it and the modules it makes, to look into.

        What they hold is baked in as a closure's values are.
        """
        others: dict[str, Any] = {}
        for kind in filter(is_users, self.touched.ended_kinds):
            name = numbered(kind.__qualname__, others)
            others |= {name: kind, f"{name}.__init__": inspect.getattr_static(kind, "__init__")}
        given = functools.partial(step, **self.keep_alive, **others) if self.keep_alive or others else step
        return with_hooks(given, self.touched.modules, self.touched.parameters, everywhere=True)

    def sibling(self, call: Signature, credit: int) -> Site:
        """A site for calls of another shape that touch the same things, warm as this one is."""
        other = Site(call)
        other.touched, other.results, other.keep_alive = self.touched, self.results, self.keep_alive
        other.hold_grads, other.cut_scalers, other.scaled = self.hold_grads, self.cut_scalers, set(self.scaled)
        other.obstacles, other.written, other.effects = dict(self.obstacles), self.written, self.effects
        other.last_eager_state, other._credit, other._watched = self.last_eager_state, credit, self._watched
        return other

    def last_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: tuple[Hashable, ...], structure: Structure
    ) -> LastCall | None:
        """How a call of this site looks, or None where that cannot be told at once."""
        if self._fast_match is None:
            self._fast_match = FastMatch.of(args, kwargs, written=self.written)
        return None if self._fast_match is None else LastCall(self._fast_match, ambient, structure, self)

    def keys_apart(self, keys: tuple[Hashable, ...], leaves: Sequence[Any]) -> tuple[Hashable, ...] | None:
        """The keys of a call that no graph here fits, for one argument lies in the memory of one that is written to."""
        return keys_apart(keys, leaves, self.written) if self.calls else None

    def find(self) -> CapturedCall | None:
        """The graph for the state of this moment."""
        for call in self.calls:
            if call.fits():
                return call
        return None

    def _mode(self) -> frozenset[int]:
        return frozenset(id(m) for m in self.touched.all_modules if m.training)

    @property
    def warm_calls(self) -> int:
        """Eager calls so far with the modules in their present modes.

        None counts as long as what was found in the only one that was watched is in the way: what just a first call
        does, such as filling a cache, is in nobody's.
        """
        return 0 if self.obstacles and self._watched < 2 else self._warm[self._mode()] + self._credit

    @property
    def is_warming(self) -> bool:
        """Whether nothing is captured yet."""
        return not self.calls

    @property
    def most_replays(self) -> int:
        """Replays of the graph here that was replayed most."""
        return max((call.replays for call in self.calls), default=0)

    @property
    def may_give_way(self) -> bool:
        """Whether another signature may have its place: one that had a graph will have one again."""
        return self.is_warming and not self.was_captured and self.obstacle is None

    def start_over(self, credit: int) -> None:
        """The model is another one: look at the step again, as if it had been called `credit` times."""
        self.was_captured = self.was_captured or bool(self.calls)
        self.touched, self.calls, self.hold_grads = StepObjects(), [], False
        self.results = self.last_eager_state = None
        self._warm.clear()
        self._credit, self._watched = credit, 0

    def warm_up_again(self) -> None:
        """In an eager call: what it has warmed up is gone, and all calls after it count."""
        self._warm.clear()
        self._credit = -1

    def drop_graphs(self) -> None:
        """Give all graphs back."""
        self.was_captured = self.was_captured or bool(self.calls)
        for call in self.calls:
            call.chain.free()
        self.calls.clear()

    @property
    def unmoved(self) -> list[torch.Generator]:
        """The generators that the last eager call with the modules in these modes has left where they were."""
        return self._unmoved.get(self._mode(), [])

    def note_unmoved(self, generators: list[torch.Generator]) -> None:
        self._unmoved[self._mode()] = generators

    def modes(self) -> dict[int, bool]:
        """Which modules are in training, as far as they are known."""
        return {id(m): m.training for m in self.touched.all_modules}

    def count_warm_call(self, before: dict[int, bool]) -> None:
        """Count an eager call that began in these modes."""
        self._watched += 1
        self._warm[frozenset(id(m) for m in self.touched.all_modules if before.get(id(m), m.training))] += 1
