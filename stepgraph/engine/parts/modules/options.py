"""`ModuleOptions` are the options of `graph_modules`; they can be read from a Megatron configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from stepgraph.config.objects import checked_settings
from stepgraph.config.spellings import GraphSettings, at_least_one_step
from stepgraph.engine.call.options import PairOptions


@dataclass(frozen=True, slots=True)
class ModuleOptions(PairOptions):
    """The options of `graph_modules`."""

    max_runners: Annotated[int, "Calls of one signature that may be under way at a time, waiting for backward."] = 16
    single_mempool: Annotated[bool, "Share memory between calls by their order, and check each replay against it."] = (
        False
    )
    eager_reason: str | None = None
    """The reason why nothing is captured, if a configuration turns graphs off."""


def options_from(config: Any) -> ModuleOptions:
    """Read the options from a configuration object with the usual field names."""
    if isinstance(config, ModuleOptions):
        return config
    settings = checked_settings(config)
    return ModuleOptions(**options_of(settings), eager_reason=settings.reason_for_eager)


def options_of(settings: GraphSettings) -> dict[str, Any]:
    """The options of `graph_modules` that settings name."""
    steps = settings.warmup_steps if settings.reason_for_eager is None else None
    found = {
        "warmup": None if steps is None else at_least_one_step(steps) * settings.num_microbatches,
        "max_runners": settings.max_runners,
        "single_mempool": settings.single_mempool,
    }
    return {name: value for name, value in found.items() if value}
