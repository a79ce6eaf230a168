"""A call site holds all graphs for calls with the same arguments and flags, one for each state of the model.

One dictionary look-up by the arguments and the process's flags finds the site. Within it, graphs differ by the state of
the step's modules and gradients: train or eval, `.grad` None or not. The step's modules are known only once it has run,
and may differ between train and eval. So each graph has its own list of modules and checks whether it fits.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stepgraph.core.errors import Location
from stepgraph.core.frames import is_users
from stepgraph.core.tensor_memory import keys_apart
from stepgraph.core.tree import Structure
from stepgraph.engine.call.limits import Changes
from stepgraph.engine.call.proof import EagerLogs
from stepgraph.engine.guards.hooks import with_hooks
from stepgraph.engine.guards.host_values.decisions import Predicates
from stepgraph.engine.guards.host_values.parts import Place
from stepgraph.engine.guards.host_values.watch import Watch
from stepgraph.engine.guards.optimizer import NumbersGuard
from stepgraph.engine.guards.protocol import Change, GuardSet
from stepgraph.engine.guards.signature import Signature
from stepgraph.engine.guards.signature.fast_match import FastMatch
from stepgraph.engine.memory.inputs import is_copied_in
from stepgraph.engine.observe.ddp import flags_of_replicas
from stepgraph.engine.observe.eager_call import Obstacle
from stepgraph.engine.observe.step_objects import StepObjects, numbered
from stepgraph.engine.optim.effects import OptimizerEffects
from stepgraph.engine.step.call import CapturedCall

_MAX_SURPRISES = 3
"""Number of recordings in a row that may show something that no eager call has."""


@dataclass(frozen=True, slots=True)
class LastCall:
    """A description of a site's calls: a call that matches it finds the site without a signature."""

    fast_match: FastMatch
    ambient: tuple[Hashable, ...]
    structure: Structure
    site: Site


@dataclass(frozen=True, slots=True)
class EagerState:
    """The model as an eager call has left it. If it changed since, the warm-up does not count."""

    model: GuardSet
    numbers: tuple[NumbersGuard, ...]


class LastEager:
    """What is known from the last eager calls of a site."""

    def __init__(self) -> None:
        self.state: EagerState | None = None
        """The model and the optimizers' numbers after the last one."""
        self.values: Watch | None = None
        """Host values after the last eager call, without those that the step itself changes."""
        self.results: dict[Hashable, tuple[object, list[object]]] = {}
        """The static part of the results, by kind of call."""
        self.logs = EagerLogs()
        self.own_changes: list[tuple[Place | None, Change]] = []
        """Values of libraries that a call changes: replays do not change them."""


@dataclass(slots=True)
class Learnt:
    """Facts that calls and recordings have shown about a step, for the next recording."""

    hold_grads: bool = False
    """The step uses the gradients that it finds."""
    cut_scalers: bool = False
    """A GradScaler of the step cannot be recorded."""
    scaled: set[int] = field(default_factory=set)
    """Optimizers that a GradScaler steps, by id: they run with it, between graphs."""
    written: set[int] = field(default_factory=set)
    """Arguments that the step writes to, by leaf index."""
    renewed: set[int] = field(default_factory=set)
    """DDPs, by id, that were given new accumulators."""
    surprises: int = 0
    """Recordings in a row that have shown what no eager call has."""

    @contextlib.contextmanager
    def unsurprised(self) -> Iterator[None]:
        """Do not count surprises in this block: the recording is made again."""
        before = self.surprises
        try:
            yield
        finally:
            self.surprises = min(before, self.surprises)

    def may_be_surprised(self) -> bool:
        """Count a surprise; return False if there were too many in a row, since such a step never gets warm."""
        self.surprises += 1
        return self.surprises <= _MAX_SURPRISES


@dataclass(slots=True)
class Warmth:
    """Counts of eager calls, by the ids of the modules that were in training."""

    calls: Counter[frozenset[int]] = field(default_factory=Counter)
    credit: int = 0
    """Calls that count in all modes."""
    watched: int = 0
    unmoved: dict[Hashable, list[torch.Generator]] = field(default_factory=dict)
    """Generators that the last call of a kind did not advance."""

    def of(self, mode: frozenset[int]) -> int:
        return self.calls[mode] + self.credit


class Site:
    """The graphs and the warm-up of calls with the same arguments and flags."""

    def __init__(self, call: Signature) -> None:
        self._call = call
        """The part of the signature that all calls of the site share: the arguments and the flags."""
        self.touched = StepObjects()
        self.calls: list[CapturedCall] = []
        self.seen = 0
        """Number of calls that no graph fitted."""
        self.was_captured = False
        self.obstacle: str | None = None
        """Why calls of this site stay eager: for good, or until a pause of `changes` is over."""
        self.changes = Changes()
        """Changes that came so soon after a capture that the capture did not pay."""
        self.learnt = Learnt()
        self.eager = LastEager()
        self.predicates = Predicates()
        """What the step asks of host values."""
        self.effects = OptimizerEffects()
        """Effects of the optimizers in the last eager call, besides their update."""
        self.obstacles: dict[str, Obstacle] = {}
        """Things that warm-up found and no replay can repeat, by rule."""
        self.keep_alive: dict[str, object] = {}
        """Arguments compared by identity, by name, kept alive so that no new object gets their id.

        For a tensor of a subclass its class is kept: the step may read the attributes of the class.
        """
        self._warmth = Warmth()
        self._fast_match: FastMatch | None = None

    def sign(self) -> Signature:
        """Return the signature of a call now, over all objects that the step is known to touch."""
        return replace(
            self._call,
            training=tuple(m.training for m in self.touched.all_modules),
            no_grad=tuple(p.grad is None for p in self.touched.parameters),
        )

    def kind(self) -> Hashable:
        """Return the key that distinguishes calls of this site.

        It holds modes, parameters with gradients, flags of DDP, and the answers to what the step asks of host values.
        """
        signature, answers = self.sign(), self.predicates.answers()
        return signature.training, signature.no_grad, flags_of_replicas(self.touched.all_modules), answers

    def with_keys(self, leaves: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, leaf, key) for the leaves of a call of this site."""
        return zip(self._call.names(), leaves, self._call.leaves, strict=True)

    def arguments_with_grad(self, leaves: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the arguments that a call may leave with another gradient, except those from another device."""
        for name, leaf, key in self.with_keys(leaves):
            if issubclass(type(leaf), torch.Tensor) and leaf.is_leaf and leaf.device in key:
                yield name, leaf

    def sign_as(self, leaves: tuple[Hashable, ...]) -> Signature:
        """Return the signature of similar calls with other leaves."""
        return replace(self._call, leaves=leaves)

    @property
    def place(self) -> tuple[Structure, tuple[Hashable, ...], tuple[Hashable, ...]]:
        """The key by which a call finds it."""
        return self._call.structure, self._call.leaves, self._call.ambient

    def keep(self, leaves: Sequence[Any]) -> None:
        """Keep the arguments of a call that are not plain tensors."""
        named = [(name, leaf) for name, leaf, _ in self.with_keys(leaves) if type(leaf) is not torch.Tensor]
        self.keep_alive = {name: type(leaf) if is_copied_in(leaf) else leaf for name, leaf in named}

    def with_objects(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step with the objects passed to it, the hooks that run in it and the modules it makes.

        A watch looks into all of these: their values are baked into the graph, as those of a closure are.
        """
        others: dict[str, Any] = {}
        for kind in filter(is_users, self.touched.ended_kinds):
            name = numbered(kind.__qualname__, others)
            others |= {name: kind, f"{name}.__init__": inspect.getattr_static(kind, "__init__")}
        given = functools.partial(step, **self.keep_alive, **others) if self.keep_alive or others else step
        return with_hooks(given, self.touched.modules, self.touched.parameters, everywhere=True)

    def sibling(self, call: Signature, credit: int) -> Site:
        """Make a site for calls of another shape that touch the same objects, as warm as this one."""
        other = Site(call)
        other.touched, other.keep_alive = self.touched, self.keep_alive
        other.learnt = replace(self.learnt, scaled=set(self.learnt.scaled), renewed=set(), surprises=0)
        other.obstacles, other.effects = dict(self.obstacles), self.effects
        other.eager.values = self.eager.values
        other.eager.state, other.eager.results = self.eager.state, dict(self.eager.results)
        other._warmth = Warmth(credit=credit, watched=self._warmth.watched)
        return other

    def last_call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ambient: tuple[Hashable, ...],
        structure: Structure,
        on: str,
    ) -> LastCall | None:
        """Describe a call of this site for a fast match, or return None if there is no fast way to compare.

        `on`: the kind of device that the step runs on.
        """
        if self._fast_match is None:
            self._fast_match = FastMatch.of(args, kwargs, on, written=self.learnt.written)
        return None if self._fast_match is None else LastCall(self._fast_match, ambient, structure, self)

    def keys_apart(self, keys: tuple[Hashable, ...], leaves: Sequence[Any]) -> tuple[Hashable, ...] | None:
        """Return the keys of a call that fits no graph, because an argument shares memory with a written one."""
        return keys_apart(keys, leaves, self.learnt.written) if self.calls else None

    def find(self) -> CapturedCall | None:
        """Return the graph that fits the present state, or None. One that is known to be right goes first."""
        fitting = [call for call in self.calls if call.start.fits()]
        if len(fitting) < 2:
            return fitting[0] if fitting and not fitting[0].answers.are_refused() else None
        known = next((call for call in fitting if call.answers.hold()), None)
        return known or next((call for call in fitting if not call.answers.are_refused()), None)

    def traceable(self) -> list[Place]:
        """Return the numbers to trace in a first recording: what changed since the last eager call, or was asked of."""
        values, own = self.eager.values, [place for place, _ in self.eager.own_changes if place is not None]
        return values.traceable(values.changed(), [*self.predicates.places, *own]) if values is not None else []

    def _mode(self) -> frozenset[int]:
        return frozenset(id(m) for m in self.touched.all_modules if m.training)

    @property
    def warm_calls(self) -> int:
        """Eager calls so far with the modules in their present modes.

        If the only watched call found an obstacle, it does not count: the obstacle may be something that only a first
        call does, such as filling a cache.
        """
        return 0 if self.obstacles and self._warmth.watched < 2 else self._warmth.of(self._mode())

    @property
    def is_warming(self) -> bool:
        """True if nothing is captured yet."""
        return not self.calls

    @property
    def most_replays(self) -> int:
        """Replays of the site's most used graph."""
        return max((call.replays for call in self.calls), default=0)

    @property
    def may_give_way(self) -> bool:
        """True if another signature may take this site's place. A site that had a graph keeps its place."""
        return self.is_warming and not self.was_captured and self.obstacle is None

    def is_last_warm_call(self, warmup: int) -> bool:
        """Check whether the eager call that begins is the last one before the capture."""
        return self._warmth.of(self._mode()) + 1 >= warmup

    def start_over(self, credit: int) -> None:
        """Forget all about the step, since the model changed, as if it had been called `credit` times."""
        self.was_captured = self.was_captured or bool(self.calls)
        self.touched, self.calls, self.learnt.hold_grads = StepObjects(), [], False
        self.eager = LastEager()
        self._warmth = Warmth(credit=credit, unmoved=self._warmth.unmoved)

    def warm_up_again(self) -> None:
        """In an eager call: restart the count of warm-up calls after this one."""
        self._warmth.calls.clear()
        self._warmth.credit = -1

    def drop_graphs(self) -> None:
        """Free all graphs."""
        self.was_captured = self.was_captured or bool(self.calls)
        for call in self.calls:
            call.parts.chain.free()
        self.calls.clear()

    def unmoved(self, kind: Hashable) -> list[torch.Generator]:
        """Generators that the last eager call of this kind did not advance."""
        return self._warmth.unmoved.get(kind, [])

    def note_obstacle(self, rule: str, what: str, where: Location | None = None) -> None:
        """Note something that an eager call did and no replay can repeat."""
        self.obstacles[rule] = Obstacle(rule, what, where=where)

    def note_unmoved(self, generators: list[torch.Generator], kind: Hashable) -> None:
        """Note the generators that an eager call of this kind has not advanced."""
        self._warmth.unmoved[kind] = generators

    def modes(self) -> dict[int, bool]:
        """Return the `training` flag of each known module, by id."""
        return {id(m): m.training for m in self.touched.all_modules}

    def count_warm_call(self, before: dict[int, bool]) -> None:
        """Count an eager call that began in these modes."""
        self._warmth.watched += 1
        self._warmth.calls[self._mode_of(before)] += 1

    def _mode_of(self, before: dict[int, bool]) -> frozenset[int]:
        return frozenset(id(m) for m in self.touched.all_modules if before.get(id(m), m.training))
