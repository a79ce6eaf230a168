"""`Options` holds and checks the options of `stepgraph.capture`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.errors import InvalidArgument
from stepgraph.optim.optimizer import MODES
from stepgraph.padding import Buckets


@dataclass(frozen=True, slots=True)
class Options:
    """How a step is captured."""

    warmup: int = 3
    """Eager calls before a signature is captured; at least one, because the first shows what the step touches."""
    max_graphs: int = 8
    """Signatures that are captured; calls with further ones run eagerly and are counted."""
    strict: bool = False
    """Raise instead of running eagerly (warm-up aside)."""
    on_error: str = "raise"
    """A capture that fails: "raise", or "eager" to go on without graphs, with a warning."""
    optimizer: str = "auto"
    """Where optimizers run: "auto", "inside", "outside", or "capturable" to switch them to that form first."""
    outputs: str = "copy"
    """Results: "copy" is safe to keep, "static" is overwritten by the next call."""
    generators: tuple[torch.Generator, ...] = ()
    """Random generators that the step uses besides the device's default one."""
    ignore: tuple[str, ...] = ()
    """Host values that may change without harm, by the name that the warning gives them: "self.steps"."""
    safe_hooks: tuple[Any, ...] = ()
    """Module hooks that may be recorded (their tensor work replays, their Python does not): functions or names."""

    audit: str | int = "auto"
    """When the step is recorded again and compared: "auto" (replays 1, 2, 4, ...), each so many replays, or False."""

    nan_check: str | bool = "off"
    """Whether losses and gradients are watched for NaN and inf: "device" computes a flag in the graph, read later."""

    buckets: Buckets | None = None
    """Sizes that batches are padded to, each a graph."""

    @property
    def goes_on_eagerly(self) -> bool:
        """Whether a step that cannot be captured stays eager; else that is an error."""
        return self.on_error == "eager" and not self.strict

    def __post_init__(self) -> None:
        _at_least_one("warmup", self.warmup)
        _at_least_one("max_graphs", self.max_graphs)
        _one_of("on_error", self.on_error, ("raise", "eager"))
        _one_of("optimizer", self.optimizer, MODES)
        _one_of("outputs", self.outputs, ("copy", "static"))
        check_audit(self.audit)
        if self.nan_check is True:
            raise InvalidArgument(
                "nan_check=True would read the loss on the host at each step",
                rule="option",
                why="a host read stops the queue and cannot be captured.",
                fix="nan_check='device' keeps a flag on the device, which is read one call later.",
            )
        _one_of("nan_check", self.nan_check, ("off", "device"))
        if self.buckets is not None:
            self.buckets.check_limit(self.max_graphs)
        for generator in self.generators:
            if not isinstance(generator, torch.Generator):
                raise InvalidArgument(
                    f"generators: {generator!r} is no torch.Generator",
                    rule="option",
                    why="each is registered with every graph, so that replays advance it.",
                    fix="pass a list of torch.Generator objects.",
                )


def listed(name: str, value: Iterable[Any]) -> tuple[Any, ...]:
    """What an option lists. A single name is no list: it would be taken for its letters."""
    if not isinstance(value, (str, bytes)) and isinstance(value, Iterable):
        return tuple(value)
    name_of = str(getattr(value, "__name__", ""))
    one = repr(value) if isinstance(value, (str, bytes)) else name_of if name_of.isidentifier() else "..."
    raise InvalidArgument(
        f"{name}={value!r} is not a list",
        rule="option",
        why="it takes any number of them, and a string by itself would be taken for a list of letters.",
        fix=f"{name}=[{one}].",
    )


def check_audit(audit: str | int) -> None:
    """Refuse what is no value of the option `audit`."""
    if audit is not False and audit != "auto" and (not isinstance(audit, int) or isinstance(audit, bool) or audit < 1):
        raise InvalidArgument(
            f"audit={audit!r} is not 'auto', a whole number of at least 1, or False",
            rule="option",
            why="it says after how many replays the step is recorded again and compared.",
            fix="audit='auto' is the default; audit=1000 does it each thousand replays, audit=False never.",
        )


def _at_least_one(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(
            f"{name}={value!r} is not a whole number of at least 1",
            rule="option",
            why="the first eager call shows what the step touches, and at least one graph must fit.",
            fix=f"{name}=3, for example.",
        )


def _one_of(name: str, value: str | bool, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        raise InvalidArgument(
            f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}",
            rule="option",
            why="a misspelt option must not be taken for another one.",
            fix=f"did you mean {near[0]!r}?" if near else f"{name}={allowed[0]!r} is the default.",
        )
