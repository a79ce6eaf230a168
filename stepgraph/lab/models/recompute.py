"""Recomputing activations in the backward instead of storing them, with `torch.utils.checkpoint`.

`recompute_granularity="full"` recomputes whole layers: all of them, or `recompute_num_layers`. With the method
`"block"` the first N layers are recomputed one by one and the others store their activations; with `"uniform"` all
layers are recomputed, N at a time, so that only every N-th input is stored.

`"selective"` recomputes named parts of every layer: those that store much and compute little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODULES = ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj")
"""The parts of a layer that can be recomputed by name."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Which activations are recomputed in the backward."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Whole layers, named parts of them, or nothing."""
    recompute_method: Literal["block", "uniform"] = "block"
    """For `"full"`: the first `recompute_num_layers` layers one by one, or all layers in chunks of that many."""
    recompute_num_layers: int | None = None
    """For `"full"`: number of layers; None recomputes every layer by itself."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """For `"selective"`: the parts, of `stepgraph.lab.models.recompute.MODULES`."""

    def recompute_problem(self) -> str | None:
        """What is wrong with these settings, if anything."""
        if self.recompute_granularity not in (None, "full", "selective"):
            return f"`recompute_granularity` is {self.recompute_granularity!r}; it must be 'full', 'selective' or None"
        if self.recompute_method not in ("block", "uniform"):
            return f"`recompute_method` is {self.recompute_method!r}; it must be 'block' or 'uniform'"
        if self.recompute_num_layers is not None and self.recompute_num_layers < 1:
            return f"`recompute_num_layers` is {self.recompute_num_layers}; it must be at least 1, or None"
        unknown = [name for name in self.recompute_modules if name not in MODULES]
        return f"`recompute_modules` has {unknown[0]!r}; it knows {', '.join(MODULES)}" if unknown else None

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a layer draws random numbers, which a recomputation must draw again."""
        return bool(getattr(self, "dropout", 0.0) or getattr(self, "attention_dropout", 0.0))


def recomputed(config: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`, a part of a layer; recompute it in the backward if the config names it."""
    if getattr(config, "recompute_granularity", None) != "selective" or name not in config.recompute_modules:
        return function(*args)
    return _checkpointed(config, function, *args)


def run_layers(config: RecomputeConfig, layers: Sequence[nn.Module], x: Tensor, *args: Any) -> tuple[Tensor, list[Any]]:
    """Run layers one after the other, recomputed as the config says.

    A layer gives the residual stream, or a tuple that begins with it; what else the tuples hold is returned in order.
    """
    others: list[Any] = []
    for chunk, is_recomputed in _chunks(config, layers):
        if is_recomputed:
            x, found = _checkpointed(config, _run, chunk, x, *args)
        else:
            x, found = _run(chunk, x, *args)
        others += found
    return x, others


def _run(layers: Sequence[nn.Module], x: Tensor, *args: Any) -> tuple[Tensor, list[Any]]:
    others = []
    for layer in layers:
        out = layer(x, *args)
        if isinstance(out, tuple):
            x, *rest = out
            others.append(tuple(rest))
        else:
            x = out
    return x, others


def _chunks(config: RecomputeConfig, layers: Sequence[nn.Module]) -> Iterator[tuple[list[nn.Module], bool]]:
    """The layers in groups, and whether each group is recomputed."""
    if config.recompute_granularity != "full":
        yield list(layers), False
        return
    number = config.recompute_num_layers
    if config.recompute_method == "uniform":
        size = number or 1
        yield from ((list(layers[start : start + size]), True) for start in range(0, len(layers), size))
        return
    last = len(layers) if number is None else min(number, len(layers))
    yield from (([layer], True) for layer in layers[:last])
    yield list(layers[last:]), False


def _checkpointed(config: RecomputeConfig, function: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=config.draws_random_numbers)
