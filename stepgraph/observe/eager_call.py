"""An `CallObserver` observes one eager call for what no replay could repeat.

A replay runs no Python. A call that draws from a random generator of the host or from an iterator, seeds a generator of
the device, or changes a value that its own code reads would do so once, at capture. Each such thing is an `Obstacle`.
Steps, modules and callables are observed alike. What only a first call does (a cache that is filled, a lazy
initialization) is no obstacle, so the latest call decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.errors import CaptureError, Location, entry
from stepgraph.guards.protocol import Change
from stepgraph.observe.lines import line_of_change
from stepgraph.observe.module_attributes import ModuleAttributes
from stepgraph.ran import ExecutedCode
from stepgraph.rng.host_random import GeneratorWatch, HostRandomWatch
from stepgraph.values.watch import Watch

_MAX_TOLD = 4
_MANY = 4
"""Names past which a message spells the containers instead."""

CHANGED_CONTAINER = (
    "arguments are built again for a capture, and a replay runs no Python: the caller's own stays as it is.",
    "return the new value, copy into the tensor that is there (state['h'].copy_(new)), or, if nobody else uses it, "
    "change a copy (batch = dict(batch)).",
)
"""Why a container must not be changed by a call, and what to do instead."""
_OR_IGNORE = ", or, if nothing depends on it, name it in ignore=[...]"
_WHY = {
    "argument-changed": CHANGED_CONTAINER,
    "ddp-stream": (
        "its accumulators remember the stream that DDP was built on, and CUDA records nothing on the default one. New "
        "ones could not be made: a loss of before is kept with its graph, or DDP has more than a reducer (mixed "
        "precision, an optimizer in backward, a hook in C++).",
        "drop or .detach() losses kept from before, or build DDP on the session's stream: `with session.stream(): "
        "model = DistributedDataParallel(model)`, and stepgraph.capture(step, session=session).",
    ),
    "host-random": (
        "it would be drawn once, at capture, and frozen.",
        "draw on the {whose}'s device (torch.rand(..., device=x.device)), or draw outside and pass it as a tensor "
        "argument (a plain number gets a graph for each value).",
    ),
    "host-value": (
        "Python code runs only at capture, not at replay: the value would stand still.",
        "change it outside the {whose} (call scheduler.step() after it, count and append in the loop), make it a "
        "tensor that is changed in place (of tensors: old.copy_(new), or pass it in and return the new one)"
        f"{_OR_IGNORE}.",
    ),
    "inner-optimizer": (
        "it is made again at each call, so it has to run inside the graph.",
        "use SGD, RMSprop or a fused optimizer there (torch.optim.Adam(..., fused=True)), or make it once, outside the "
        "step.",
    ),
    "iterator": (
        "a replay runs no Python and draws nothing: every {whose} would compute with what the capture drew.",
        f"draw outside the {{whose}} and pass what was drawn as an argument{_OR_IGNORE}.",
    ),
    "kept-tensor": (
        "a replay runs no Python, so it would store nothing new there. The kept tensor would be memory of the graph, "
        "which each replay overwrites.",
        "copy into a tensor made before the {whose} (kept.copy_(new)), or return it and keep it outside the {whose}"
        f"{_OR_IGNORE}.",
    ),
    "module-attribute": (
        "a replay runs no Python; whoever reads the attribute would find that of the capture.",
        f"return the tensor, or change a buffer in place{_OR_IGNORE}.",
    ),
    "own-change": (
        "a replay runs no Python: the model would stay as the capture left it.",
        "change tensors in place (buffer.copy_(new), p.data.sub_(update)), and flags outside the {whose}.",
    ),
    "reseed": (entry("reseed").why, entry("reseed").fix),
    "varying-output": (
        "a replay computes tensors; a plain value in the result would be that of the capture for ever.",
        "return a tensor (loss.detach(), not loss.item()), or compute the value outside the {whose}.",
    ),
}


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
        why, fix = (text.replace("{whose}", self.whose) for text in _WHY[self.rule])
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
