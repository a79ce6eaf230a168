"""A configuration with fewer layers: what depends on their number changes with it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from stepgraph.config.container import ConfigContainer

Kind = TypeVar("Kind")


def with_layers(cfg: ConfigContainer, num_layers: int) -> ConfigContainer:
    """A copy of a configuration with `num_layers` layers: the first ones, and then one of each kind that is missing."""
    cfg = cfg.copy()
    model = cfg.model
    model.num_layers = num_layers
    if not isinstance(model.moe_layer_freq, int):
        model.moe_layer_freq = _shortened(model.moe_layer_freq, num_layers)
    if model.hybrid_override_pattern is not None:
        model.hybrid_override_pattern = "".join(_shortened(model.hybrid_override_pattern, num_layers))
    return cfg


def fewest_layers(cfg: ConfigContainer) -> int:
    """The smallest number of layers in which each kind of layer occurs."""
    model = cfg.model
    least = len(set(model.hybrid_override_pattern or "-"))
    if not isinstance(model.moe_layer_freq, int):
        least = max(least, len(set(model.moe_layer_freq)))
    if model.window_size is not None and model.window_attn_skip_freq:
        least = max(least, model.window_attn_skip_freq)
    return min(least, model.num_layers)


def _shortened(kinds: Sequence[Kind], length: int) -> list[Kind]:
    """The longest beginning that, with one more of each kind that it lacks, is of this length."""
    for end in range(min(length, len(kinds)), -1, -1):
        begin = list(kinds[:end])
        lacking = [kind for kind in dict.fromkeys(kinds) if kind not in begin]
        if end + len(lacking) <= length:
            return begin + lacking
    return list(kinds[:length])
