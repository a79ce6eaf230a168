"""Finds the parts of model chunks that are captured ahead of time, and makes sample arguments for them.

The scope decides which parts are captured; the registry knows the words of each class of layer. Layers at
`decoder.layers`, where Megatron has them, need no known class. A chunk without any
part that the scope means is no error: with pipelines, other ranks have layers of other kinds. An unknown word is.

A graph is recorded from arguments of the right geometry, before the model has been called. The arguments of a layer
come from the first of these that exists:

1. the layer itself: `get_layer_static_inputs(seq_length, micro_batch_size)` gives its arguments by name;
2. the signature of its forward: the first argument is the hidden states, [micro_batch_size, seq_length, hidden_size] in
   the type of the layer's own weights; other arguments without a default are looked up by name in the modules around
   the layer (a GPT's `rotary` is such a one).

A part of a layer, such as an attention or a router, is called from inside. So the layer is run once on its samples, and
the arguments of its parts are noted, in the order of the calls. State and random numbers are put back.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tree import flatten, unflatten
from stepgraph.engine.call.backend_choice import backend_of
from stepgraph.engine.oplog.optimizer_steps import shadowed
from stepgraph.engine.parts.callables.call_shape import detached
from stepgraph.engine.parts.callables.warm_up import as_before
from stepgraph.engine.parts.modules.scopes import WORDS, Part, ScopeRegistry
from stepgraph.engine.record.pair.module_method import called_method

SampleArguments = Callable[[torch.nn.Module], tuple[Sequence[Any], dict[str, Any]]]
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Sample:
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Found(NamedTuple):
    """A part to capture, and its arguments."""

    part: Part
    sample: Sample


class CallForm:
    """Writes a call in one of the ways that Python allows: by position first, defaults left out."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._signature = inspect.signature(function)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample:
        """The call in that form; unknown arguments are left for the function to refuse."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return Sample(args, kwargs)
        for name, value in list(bound.arguments.items()):
            if value is self._signature.parameters[name].default:
                del bound.arguments[name]
        return Sample(bound.args, bound.kwargs)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The geometry of hidden states."""

    seq_length: int
    micro_batch_size: int
    hidden_size: int | None


def sample_of_layer(chunk: torch.nn.Module, part: Part, sizes: Sizes) -> Sample:
    """The arguments of a layer of a model chunk."""
    function = getattr(part.module, part.method)
    told = getattr(part.module, "get_layer_static_inputs", None)
    if told is not None and part.method == "forward":
        return CallForm(function)((), dict(told(sizes.seq_length, sizes.micro_batch_size)))
    first, *others = inspect.signature(function).parameters.values()
    found = {first.name: _hidden_states(chunk, part, sizes)}
    for parameter in others:
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC:
            found[parameter.name] = _around(chunk, part, parameter.name)
    return CallForm(function)((), found)


def _hidden_states(chunk: torch.nn.Module, part: Part, sizes: Sizes) -> torch.Tensor:
    weight = next((p for m in (part.module, chunk) for p in m.parameters() if p.is_floating_point()), None)
    if weight is None or sizes.hidden_size is None:
        missing = "the config has no `hidden_size`" if sizes.hidden_size is None else "it has no weights"
        raise _no_sample(part, f"the hidden states of `{part.path}`: {missing}")
    shape = (sizes.micro_batch_size, sizes.seq_length, sizes.hidden_size)
    return torch.zeros(shape, dtype=weight.dtype, device=weight.device, requires_grad=True)


def _around(chunk: torch.nn.Module, part: Part, name: str) -> Any:
    """The attribute of this name in the modules around a part, the nearest first."""
    path = part.path
    while path:
        path = path.rpartition(".")[0]
        value = getattr(chunk.get_submodule(path), name, None)
        if value is not None and not inspect.ismethod(value):
            return value
    raise _no_sample(part, f"argument `{name}` of `{part.path}`")


def _no_sample(part: Part, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"no sample can be made for {what}",
        rule="layer-sample",
        why="graphs are captured before the layer is called, from samples of its arguments.",
        fix="pass sample_arguments=, a function from a layer to (args, kwargs), or give "
        f"{type(part.module).__name__} a method get_layer_static_inputs(seq_length, micro_batch_size).",
    )


# -- parts of a layer


def samples_of_parts(layer: torch.nn.Module, sample: Sample, parts: Sequence[Part]) -> list[Found]:
    """Run a layer once on its sample; its parts in the order in which they are called, with their arguments."""
    found: list[Found] = []
    backend = backend_of(tensor.device for tensor in (*layer.parameters(), *layer.buffers()))
    with as_before([layer], backend), contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(shadowed(part.module, called_method(part.module, part.method), _noting(part, found)))
        with torch.enable_grad():
            layer(*sample.args, **sample.kwargs)
    called = [part for part, _ in found]
    for part in parts:
        if called.count(part) != 1:
            raise InvalidArgument(
                f"`{part.path}` is called {called.count(part)} times in one forward of its layer",
                rule="layer-sample",
                why="an order has one forward of each part for each microbatch.",
                fix="graph the whole layer, or a part that is called once.",
            )
    return found


def _noting(part: Part, found: list[Found]) -> Callable[..., Any]:
    original, form = (
        getattr(part.module, called_method(part.module, part.method)),
        CallForm(getattr(part.module, part.method)),
    )

    def noted(*args: Any, **kwargs: Any) -> Any:
        call = form(args, kwargs)
        leaves, structure = flatten((call.args, call.kwargs))
        found.append(Found(part, Sample(*unflatten(structure, [detached(leaf) for leaf in leaves]))))
        return original(*args, **kwargs)

    return noted


# -- parts of a chunk

_LAYERS = ("decoder", "layers")
_WORDS_OF_LAYERS = (("attn", "self_attention"), ("mlp", "mlp"), ("mamba", "mixer"))
"""Where Megatron's models have their layers, and what the layers' parts are called."""


def with_decoder_layers(chunk: torch.nn.Module, registry: ScopeRegistry) -> ScopeRegistry:
    """A registry that also knows the classes of the layers at `decoder.layers`, by the names of their parts."""
    found = registry.copy()
    for path, layers in chunk.named_modules():
        if tuple(path.split(".")[-2:]) != _LAYERS:
            continue
        for layer in layers.children():
            if found.words_of(layer) is None:
                words = {word: name for word, name in _WORDS_OF_LAYERS if hasattr(layer, name)}
                found.register(type(layer), **words)
    return found


def parts_of(chunk: torch.nn.Module, scope: Sequence[str], registry: ScopeRegistry) -> list[Part]:
    """The parts of a chunk that a scope means, in the order of the model; none where it means nothing here."""
    if not scope:
        known = any(registry.words_of(module) is not None for module in chunk.modules())
        return registry.resolve(chunk, []) if known else []
    meant = [entry for entry in scope if _means_anything(chunk, entry, registry)]
    return registry.resolve(chunk, meant) if meant else []


def why_nothing(chunks: Sequence[torch.nn.Module], scope: Sequence[str]) -> str:
    """The reason why no part of these chunks is captured."""
    names = ", ".join(dict.fromkeys(type(chunk).__name__ for chunk in chunks)) or "no chunk"
    if scope:
        return f"the scope {','.join(scope)} matches nothing in {names}"
    return f"{names} has no layer of a known class, and none at decoder.layers"


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
            found += samples_of_parts(layer.module, sample, inside)
    return found


def _layer_of(chunk: torch.nn.Module, part: Part, registry: ScopeRegistry) -> str:
    """The path of the layer of a known class that a part is in; of the part itself where there is none."""
    around = part.path if part.method == "forward" else part.path.rpartition(".")[0]
    while True:
        if registry.words_of(chunk.get_submodule(around)) is not None:
            return around
        if not around:
            return part.path
        around = around.rpartition(".")[0]
