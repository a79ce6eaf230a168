"""An `CallObserver` observes one eager call for what no replay could repeat.

A replay runs no Python. A call that draws from a random generator of the host or from an iterator, seeds a generator of
the device, resizes a storage, or changes a value that its own code reads would do so once, at capture. Each such thing
is an `Obstacle`.
Steps, modules and callables are observed alike. What only a first call does (a cache that is filled, a lazy
initialization) is no obstacle, so the latest call decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.catalogue import entry
from stepgraph.core.errors import CaptureError, Location
from stepgraph.core.executed_code import ExecutedCode
from stepgraph.core.frames import user_location
from stepgraph.engine.backends.random.host_random import GeneratorWatch, HostRandomWatch
from stepgraph.engine.backends.resizing import Resize, described, resized_by
from stepgraph.engine.guards.host_values.watch import Watch
from stepgraph.engine.guards.protocol import Change
from stepgraph.engine.observe.lines import line_of_change
from stepgraph.engine.observe.module_attributes import ModuleAttributes

_MAX_TOLD = 4
_MANY = 4
"""Names past which a message spells the containers instead."""

_OR_IGNORE = ", or, if nothing depends on it, name it in ignore=[...]"
"""How some fixes of the catalogue end; an obstacle says what to name, or leaves it out."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something that a call does and no replay could repeat."""

    rule: str
    what: str
    names: tuple[str, ...] = ()
    """The values in question, as `ignore=` takes them."""
    whose: str = "step"
    where: Location | None = None
    """The user's line, if it is known."""

    def error(self, name: str) -> CaptureError:
        """The error for a step or module of this name."""
        why, fix = entry(self.rule).reason_and_fix(self.whose)
        ignoring = f", or, if nothing depends on it, {to_ignore(self.names)}" if self.names else ""
        fix = fix.replace(_OR_IGNORE, ignoring)
        return CaptureError(f"{name}: {self.what}", rule=self.rule, where=self.where, why=why, fix=fix)


class CallObserver:
    """Observes one eager call, from its construction on."""

    def __init__(
        self,
        device: torch.device,
        values: Watch | None,
        generators: Iterable[torch.Generator] = (),
        attributes: ModuleAttributes | None = None,
        ignore: Iterable[str] = (),
        *,
        ran: ExecutedCode | None = None,
        whose: str = "step",
    ) -> None:
        """`values` are watched, and so are the device's `generators`, and the `attributes` of modules.

        `ran` is the code that the call is seen to run.
        """
        self._random, self.generators = HostRandomWatch(device), GeneratorWatch(generators)
        self._values, self._attributes, self._ignore = values, attributes, frozenset(ignore)
        self._whose, self._ran = whose, ran
        self._resized: Obstacle | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Surround the call: note what is seen only while it runs."""

        def see(resize: Resize, storage: torch.UntypedStorage, num_bytes: int) -> Any:
            if self._resized is None:
                what = f"the {self._whose} resizes a tensor's storage: {described(storage, num_bytes)}"
                self._resized = Obstacle("storage-resize", what, whose=self._whose, where=user_location())
            return resize(storage, num_bytes)

        with resized_by(see):
            yield

    @classmethod
    def of_module(
        cls,
        function: Callable[..., Any],
        modules: Mapping[str, torch.nn.Module],
        ignore: Iterable[str],
        device: torch.device,
        ran: ExecutedCode,
    ) -> CallObserver:
        """Observe a call of a module, or of a function around modules."""
        values = Watch(function, frozenset(ignore), modules, ran=ran)
        return cls(device, values, (), ModuleAttributes(modules), ignore, ran=ran, whose="module")

    def obstacles(self) -> list[Obstacle]:
        """What it did so far."""
        return list(self._found())

    def finding(self, name: str) -> CaptureError | None:
        """The error for the first obstacle."""
        return next((obstacle.error(name) for obstacle in self._found()), None)

    def _found(self) -> Iterator[Obstacle]:
        whose = self._whose
        if self._resized is not None:
            yield self._resized
        if self.generators.was_set():
            yield Obstacle("reseed", f"the {whose} seeds a random generator, or sets its state", whose=whose)
        for source in self._random.advanced():
            yield Obstacle("host-random", f"the {whose} draws from {source}", whose=whose)
        for name in self._attributes.changed() if self._attributes is not None else ():
            if not {name, name.rpartition(".")[2]} & self._ignore:
                what = f"the {whose} sets `{name}` to something else at each call"
                yield Obstacle("module-attribute", what, (name,), whose)
        if self._values is None:
            return
        changes = self.changed_values()
        if changes:
            told = "; ".join(map(str, changes[:_MAX_TOLD])) + (" ..." if len(changes) > _MAX_TOLD else "")
            names = tuple(change.name for change in changes)
            where = line_of_change(names[0], self._ran.codes()) if self._ran is not None else None
            yield Obstacle("host-value", f"the {whose} itself changes {told}", names, whose, where)
        if sources := (*self._values.drawn(), *self._values.unseen()):
            told, names = ", ".join(map(str, sources)), tuple(source.name for source in sources)
            yield Obstacle("iterator", f"the {whose} draws from {told}", names, whose)

    def changed_values(self, *, users: bool = True) -> list[Change]:
        """The values of the user's that the call itself has changed, or those of installed libraries."""
        found = self._values.changed() if self._values is not None else []
        return [change for change in found if change.is_users is users]


def to_ignore(names: Sequence[str]) -> str:
    """The option that makes a change of these values harmless; of very many it names the containers."""
    if len(names) > _MANY:
        names = list(dict.fromkeys(name.partition("[")[0] for name in names))
    return f"ignore={list(names)!r}"
