"""`ModuleOptions` are the options of `graph_modules`; they can be read from a Megatron configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from stepgraph.modules.megatron_settings import MegatronSettings
from stepgraph.session.options import PairOptions


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
    settings = MegatronSettings.of(config)
    found = {
        "warmup": settings.warmup_steps,
        "max_runners": settings.max_runners,
        "single_mempool": settings.single_mempool,
        "eager_reason": settings.reason_for_eager,
    }
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    return ModuleOptions(**given)
