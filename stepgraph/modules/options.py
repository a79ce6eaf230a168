"""`ModuleOptions` says how modules are graphed, and reads the same from a configuration object of the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.errors import InvalidArgument
from stepgraph.modules.megatron_settings import MegatronSettings
from stepgraph.session.options import check_audit


@dataclass(frozen=True, slots=True)
class ModuleOptions:
    """How modules are graphed."""

    warmup: int = 3
    """Rounds that run eagerly before the graphs are captured."""
    strict: bool = False
    """Raise where a call would run eagerly, warm-up aside."""
    max_signatures: int = 8
    """Kinds of calls that a module gets graphs for; further ones run eagerly, counted."""
    max_runners: int = 16
    """Calls of one kind that may be under way at a time."""
    safe_hooks: tuple[Any, ...] = ()
    """Hooks inside graphed modules that may be recorded: functions or names."""
    ignore: tuple[str, ...] = ()
    """Host values that may change without harm."""
    outputs: str = "guarded"
    """"guarded": a result that is still held at the next call is copied; "static": it is overwritten."""
    generators: tuple[torch.Generator, ...] = ()
    single_mempool: bool = False
    """Share memory between calls by the order in which they were recorded, and check each replay against it."""
    audit: str | int = "auto"
    """Before which rounds all calls are recorded again and compared: "auto" (1, 2, 4, ...), each so many, or False."""
    eager_reason: str | None = None
    """Why nothing is captured at all: a configuration may say so."""

    def __post_init__(self) -> None:
        for name, least in (("warmup", 1), ("max_signatures", 1), ("max_runners", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidArgument(
                    f"{name}={value!r}",
                    rule="option",
                    why="it counts, and there is at least one.",
                    fix=f"pass an integer of {least} or more.",
                )
        check_audit(self.audit)
        if self.outputs not in ("guarded", "static"):
            raise InvalidArgument(
                f"outputs={self.outputs!r}",
                rule="option",
                why='results are either "guarded" (kept ones are copied) or "static" (the next call overwrites them).',
                fix='use outputs="guarded" or outputs="static".',
            )


def options_from(config: Any) -> ModuleOptions:
    """The options that a configuration object names as the field does."""
    if isinstance(config, ModuleOptions):
        return config
    settings = MegatronSettings.of(config)
    found = {
        "warmup": settings.warmup_steps,
        "max_runners": settings.max_runners,
        "single_mempool": settings.single_mempool,
        "eager_reason": settings.reason_for_eager,
    }
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    return ModuleOptions(**given)
