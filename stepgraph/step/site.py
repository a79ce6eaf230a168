"""A call site holds all graphs for calls with the same arguments and flags, one for each state of the model.

The arguments and the process's flags find the site by one dictionary look-up. Within it, graphs differ by what the
step's own modules and gradients are like: train or eval, `.grad` None or not. Which modules those are is only known
once the step has run, and may differ between train and eval, so each graph carries its own list and is asked whether
it fits.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stepgraph.buffers.inputs import is_copied_in
from stepgraph.frames import is_users
from stepgraph.guards.hooks import with_hooks
from stepgraph.guards.optimizer import NumbersGuard
from stepgraph.guards.protocol import GuardSet
from stepgraph.observe.ddp import flags_of_replicas
from stepgraph.observe.eager_call import Obstacle
from stepgraph.observe.step_objects import StepObjects, numbered
from stepgraph.optim.effects import OptimizerEffects
from stepgraph.session.proof import EagerLogs
from stepgraph.signature import Signature
from stepgraph.signature.fast_match import FastMatch
from stepgraph.signature.memory import keys_apart
from stepgraph.step.call import CapturedCall
from stepgraph.tree import Structure
from stepgraph.values.watch import Watch

_MAX_SURPRISES = 3
"""How often a recording may show what no eager call has."""


@dataclass(frozen=True, slots=True)
class LastCall:
    """How the calls of a site look, for a call that looks the same to find it without a signature."""

    fast_match: FastMatch
    ambient: tuple[Hashable, ...]
    structure: Structure
    site: Site


@dataclass(frozen=True, slots=True)
class EagerState:
    """The model as an eager call has left it: a recording that finds another one knows nothing."""

    model: GuardSet
    numbers: tuple[NumbersGuard, ...]


class LastEager:
    """What the last eager calls of a site have left."""

    def __init__(self) -> None:
        self.state: EagerState | None = None
        """What the last one went by."""
        self.values: Watch | None = None
        """The host values that it has found, but for those that it has changed itself."""
        self.results: dict[Hashable, tuple[object, list[object]]] = {}
        """The static part of the results of each kind of call."""
        self.logs = EagerLogs()
        self.own_changes: set[str] = set()
        """Values of libraries that a call has changed itself: replays leave them."""


@dataclass(slots=True)
class Learnt:
    """What calls and recordings have shown about a step, for the next recording."""

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

    def may_be_surprised(self) -> bool:
        """Count that a recording has shown what no eager call has: one that does so each time never gets warm."""
        self.surprises += 1
        return self.surprises <= _MAX_SURPRISES


@dataclass(slots=True)
class Warmth:
    """Eager calls by the modules that were in training, by id."""

    calls: Counter[frozenset[int]] = field(default_factory=Counter)
    credit: int = 0
    """Calls that count in all modes."""
    watched: int = 0
    unmoved: dict[frozenset[int], list[torch.Generator]] = field(default_factory=dict)
    """The generators that the last call has left where they were."""

    def of(self, mode: frozenset[int]) -> int:
        return self.calls[mode] + self.credit


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
        self.learnt = Learnt()
        self.eager = LastEager()
        self.effects = OptimizerEffects()
        """What optimizers did in the last eager call besides their update."""
        self.obstacles: dict[str, Obstacle] = {}
        """What warm-up found that no replay could repeat, by rule."""
        self.keep_alive: dict[str, object] = {}
        """Arguments that are told by identity, by name, kept so that no other object takes their identity.

        Of a tensor of another class than torch's, that class: the step may read its attributes.
        """
        self._warmth = Warmth()
        self._fast_match: FastMatch | None = None

    def sign(self) -> Signature:
        """The signature of a call at this moment, over all that the step is known to touch."""
        return replace(
            self._call,
            training=tuple(m.training for m in self.touched.all_modules),
            no_grad=tuple(p.grad is None for p in self.touched.parameters),
        )

    def kind(self) -> Hashable:
        """What tells calls here apart: the modes, which parameters have gradients, and what DDP is to do."""
        signature = self.sign()
        return signature.training, signature.no_grad, flags_of_replicas(self.touched.all_modules)

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
        other.touched, other.keep_alive = self.touched, self.keep_alive
        other.learnt = replace(self.learnt, scaled=set(self.learnt.scaled), renewed=set(), surprises=0)
        other.obstacles, other.effects = dict(self.obstacles), self.effects
        other.eager.values = self.eager.values
        other.eager.state, other.eager.results = self.eager.state, dict(self.eager.results)
        other._warmth = Warmth(credit=credit, watched=self._warmth.watched)
        return other

    def last_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: tuple[Hashable, ...], structure: Structure
    ) -> LastCall | None:
        """How a call of this site looks, or None where that cannot be told at once."""
        if self._fast_match is None:
            self._fast_match = FastMatch.of(args, kwargs, written=self.learnt.written)
        return None if self._fast_match is None else LastCall(self._fast_match, ambient, structure, self)

    def keys_apart(self, keys: tuple[Hashable, ...], leaves: Sequence[Any]) -> tuple[Hashable, ...] | None:
        """The keys of a call that no graph here fits, for one argument lies in the memory of one that is written to."""
        return keys_apart(keys, leaves, self.learnt.written) if self.calls else None

    def find(self) -> CapturedCall | None:
        """The graph for the state of this moment."""
        for call in self.calls:
            if call.start.fits():
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
        return 0 if self.obstacles and self._warmth.watched < 2 else self._warmth.of(self._mode())

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

    def is_last_warm_call(self, warmup: int) -> bool:
        """Whether the eager call that begins is the last one before the capture."""
        return self._warmth.of(self._mode()) + 1 >= warmup

    def start_over(self, credit: int) -> None:
        """The model is another one: look at the step again, as if it had been called `credit` times."""
        self.was_captured = self.was_captured or bool(self.calls)
        self.touched, self.calls, self.learnt.hold_grads = StepObjects(), [], False
        self.eager = LastEager()
        self._warmth = Warmth(credit=credit, unmoved=self._warmth.unmoved)

    def warm_up_again(self) -> None:
        """In an eager call: what it has warmed up is gone, and all calls after it count."""
        self._warmth.calls.clear()
        self._warmth.credit = -1

    def drop_graphs(self) -> None:
        """Give all graphs back."""
        self.was_captured = self.was_captured or bool(self.calls)
        for call in self.calls:
            call.parts.chain.free()
        self.calls.clear()

    @property
    def unmoved(self) -> list[torch.Generator]:
        """The generators that the last eager call with the modules in these modes has left where they were."""
        return self._warmth.unmoved.get(self._mode(), [])

    def note_obstacle(self, rule: str, what: str) -> None:
        """An eager call has shown what no replay could repeat."""
        self.obstacles[rule] = Obstacle(rule, what)

    def note_unmoved(self, generators: list[torch.Generator]) -> None:
        self._warmth.unmoved[self._mode()] = generators

    def modes(self) -> dict[int, bool]:
        """Which modules are in training, as far as they are known."""
        return {id(m): m.training for m in self.touched.all_modules}

    def count_warm_call(self, before: dict[int, bool]) -> None:
        """Count an eager call that began in these modes."""
        self._warmth.watched += 1
        self._warmth.calls[frozenset(id(m) for m in self.touched.all_modules if before.get(id(m), m.training))] += 1
