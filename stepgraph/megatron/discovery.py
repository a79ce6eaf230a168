"""Discovery finds the parts of model chunks that are captured ahead of time, with their sample arguments.

Which parts is a scope's matter; which words a class of layer knows is the registry's. A chunk that has nothing of what
the scope means is no error: with pipelines, the chunk of one rank has layers of a kind that another's has not. A word
that there is not stays an error everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.errors import InvalidArgument
from stepgraph.megatron.samples import Sample, Sizes, sample_of_layer, samples_of_parts
from stepgraph.modules.scopes import WORDS, Part, ScopeRegistry

SampleArguments = Callable[[torch.nn.Module], tuple[Sequence[Any], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Found:
    """A part to capture, and what it is called with."""

    part: Part
    sample: Sample


def parts_of(chunk: torch.nn.Module, scope: Sequence[str], registry: ScopeRegistry) -> list[Part]:
    """The parts of a chunk that a scope means, in the order of the model; none where it means nothing here."""
    if not scope:
        known = any(registry.words_of(module) is not None for module in chunk.modules())
        return registry.resolve(chunk, []) if known else []
    meant = [entry for entry in scope if _means_anything(chunk, entry, registry)]
    return registry.resolve(chunk, meant) if meant else []


def _means_anything(chunk: torch.nn.Module, entry: str, registry: ScopeRegistry) -> bool:
    try:
        return bool(registry.resolve(chunk, [entry]))
    except InvalidArgument:
        if entry not in WORDS and "." not in entry and "*" not in entry:
            raise  # neither a word nor a path to layers that another rank may have
        return False


def with_samples(
    chunk: torch.nn.Module,
    parts: Sequence[Part],
    registry: ScopeRegistry,
    sizes: Sizes,
    sample_arguments: SampleArguments | None,
) -> list[Found]:
    """The parts of a chunk in the order in which they are called, each with a sample."""
    found: list[Found] = []
    of_layer: dict[str, list[Part]] = {}
    for part in parts:
        of_layer.setdefault(_layer_of(chunk, part, registry), []).append(part)
    for path, inside in of_layer.items():
        layer = Part(path, chunk.get_submodule(path)) if path != inside[0].path else inside[0]
        if sample_arguments is None:
            sample = sample_of_layer(chunk, layer, sizes)
        else:
            args, kwargs = sample_arguments(layer.module)
            sample = Sample(tuple(args), dict(kwargs))
        if layer is inside[0]:
            found.append(Found(layer, sample))
        else:
            found += [Found(*pair) for pair in samples_of_parts(layer.module, sample, inside)]
    return found


def _layer_of(chunk: torch.nn.Module, part: Part, registry: ScopeRegistry) -> str:
    """The path of the layer of a known class that a part is in; of the part itself where there is none."""
    path, method = part.path, part.method
    if method != "forward":
        path = path.rpartition(".")[0]  # the module's own
    around = path
    while True:
        if registry.words_of(chunk.get_submodule(around)) is not None:
            return around
        if not around:
            return part.path
        around = around.rpartition(".")[0]
