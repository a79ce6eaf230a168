"""Configuration objects that are given to the engines: ours, or Megatron's, checked by the same rules.

`TECudaGraphHelper`, `CudaGraphManager`, `FullCudaGraphWrapper` and `graph_modules` take a configuration object. It may
be a `ConfigContainer`, its `model` section, or any object with Megatron's fields. Of the last, the fields that a model
section has are read; what is missing breaks no rule. There are two exceptions. An object that turns graphs on by
`cuda_graph_impl` must have `use_te_rng_tracker=True`, because Megatron makes its random states by that flag. And its
experts are taken to be dispatched with host reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from stepgraph.config.base import ConfigSections
from stepgraph.config.environment import Environment
from stepgraph.config.model import ModelSection
from stepgraph.config.rules import broken_rules, data_parallel_size, finalised
from stepgraph.config.spellings import GraphSettings, model_of
from stepgraph.config.values import fitted, types_of
from stepgraph.core import catalogue
from stepgraph.core.errors import ConfigError, InvalidArgument, Violation

_ITERATION = "full_iteration"
_OF_WHOLE_RUNS = (
    *("config-value", "batch-size"),
    *("moe-scope-without-experts", "mlp-scope-without-dense", "scope-without-layers"),
)
"""Rules about data, which a model's configuration does not have, and about layers, which engines find in the model."""

_NOT_CAPTURED: Mapping[str, Any] = MappingProxyType(
    {
        "fp8": False,
        "fp4": False,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "moe_paged_stash": False,
    }
)
"""Settings that graphs do not carry out, and the value besides None that leaves each of them off."""
_MIXED_PRECISION = "mixed_precision"


def checked_settings(config: Any, environment: Environment | None = None) -> GraphSettings:
    """What a configuration object says about graphs, or an error with all rules that it breaks."""
    known = environment if environment is not None else Environment.read()
    if isinstance(config, ConfigSections):
        violations = broken_rules(finalised(config, known), known)
    else:
        is_ours = isinstance(config, ModelSection)
        sections = finalised(ConfigSections(model=config), known) if is_ours else _sections_of(config)
        violations = [broken for broken in broken_rules(sections, known) if broken.rule not in _OF_WHOLE_RUNS]
    settings = GraphSettings.of(config)
    if settings.impl != "none" and (turned_on := [*_not_captured(config)]):
        entry = catalogue.entry("not-captured")
        violations.append(Violation(entry.id, entry.what, tuple(turned_on), entry.why, entry.fix))
    if violations:
        raise ConfigError(violations)
    return replace(settings, num_microbatches=_num_microbatches(config, known))


def _not_captured(config: Any) -> Iterator[str]:
    """The settings of an object, or of the parts of a container, that graphs do not carry out."""
    model, precision = model_of(config), getattr(config, _MIXED_PRECISION, None)
    in_model = "" if model is config else "model."
    for prefix, part in ((in_model, model), (f"{_MIXED_PRECISION}.", precision)):
        for name, off in _NOT_CAPTURED.items():
            value = getattr(part, name, None)
            if value is not None and value != off:
                yield f"{prefix}{name}={value!r}"
    if isinstance(precision, str) and any(word in precision for word in ("fp8", "fp4")):  # the name of a known mix
        yield f"{_MIXED_PRECISION}={precision!r}"


def _num_microbatches(config: Any, environment: Environment) -> int:
    """How often layers run in a step, one microbatch after the other; 1 where that is not known."""
    if not isinstance(config, ConfigSections) or config.model.pipeline_model_parallel_size > 1:
        return 1
    ranks = data_parallel_size(config.model, environment)
    return max(1, config.train.global_batch_size // (config.train.micro_batch_size * ranks))


def _sections_of(config: Any) -> ConfigSections:
    """The settings of another configuration object, as far as rules ask for them."""
    settings, config = GraphSettings.of(config), model_of(config)
    found = ConfigSections()
    if settings.impl in (None, "none"):
        return found
    for name, hint in types_of(ModelSection).items():
        value = getattr(config, name, None)
        if value is not None and not name.startswith("cuda_graph"):
            try:
                object.__setattr__(found.model, name, fitted(name, value, hint))
            except InvalidArgument:  # a function for an activation, and others that no rule asks for
                continue
    is_iteration = settings.impl == _ITERATION
    found.model.cuda_graph_impl = "local" if is_iteration or settings.impl == "local" else "transformer_engine"
    scope = [_ITERATION] if is_iteration else [*settings.scope]
    object.__setattr__(found.model, "cuda_graph_scope", scope)  # may have paths, which rules pass over
    found.comm_overlap.delay_wgrad_compute = found.model.delay_wgrad_compute
    is_tracked = getattr(config, "use_te_rng_tracker", None)
    if is_tracked is None and getattr(config, "cuda_graph_impl", None) is not None:
        is_tracked = False  # Megatron's default; the older switches turned it on by themselves
    found.model.use_te_rng_tracker = None if is_tracked is None else bool(is_tracked)
    if getattr(config, "moe_token_dispatcher_type", None) is None:
        found.model.moe_token_dispatcher_type = "alltoall"
    return found
