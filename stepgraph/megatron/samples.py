"""`sample_of_layer` makes sample arguments for a layer before the model has been called.

A graph is recorded from arguments of the right geometry. What a layer is called with is told by one of these, the first
that there is:

1. the layer itself: `get_layer_static_inputs(seq_length, micro_batch_size)` gives its arguments by name;
2. the signature of its forward: the first argument is the hidden states, [micro_batch_size, seq_length, hidden_size] in
   the type of the layer's own weights; other arguments without a default are looked up by name in the modules around
   the layer (a GPT's `rotary` is such a one).

A part of a layer, an attention or a router, is called from inside. So the layer is run once on its samples, and what
its parts are called with is written down, in the order in which they are. State and random numbers are put back.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.errors import InvalidArgument
from stepgraph.modules.scopes import Part
from stepgraph.observe.module_attributes import ModuleAttributes
from stepgraph.rng.tracker import tracker_for
from stepgraph.session.backend_choice import backend_of
from stepgraph.signature.attributes import as_given
from stepgraph.tree import flatten, unflatten

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Sample:
    """What a part is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class CallForm:
    """One way to write a call, for all the ways that Python allows: by position first, defaults left out."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._signature = inspect.signature(function)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample:
        """The call in that form; arguments that the function does not have are left to it to refuse."""
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
    """What a layer of a model chunk is called with."""
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
        raise _untold(part, f"the hidden states of `{part.path}`: {missing}")
    shape = (sizes.micro_batch_size, sizes.seq_length, sizes.hidden_size)
    return torch.zeros(shape, dtype=weight.dtype, device=weight.device, requires_grad=True)


def _around(chunk: torch.nn.Module, part: Part, name: str) -> Any:
    """What a name stands for in the modules around a part, the nearest first."""
    path = part.path
    while path:
        path = path.rpartition(".")[0]
        value = getattr(chunk.get_submodule(path), name, None)
        if value is not None and not inspect.ismethod(value):
            return value
    raise _untold(part, f"argument `{name}` of `{part.path}`")


def _untold(part: Part, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"no sample can be made for {what}",
        rule="layer-sample",
        why="graphs are captured before the layer is called, from samples of what it will be called with.",
        fix="pass sample_arguments=, a function from a layer to (args, kwargs), or give "
        f"{type(part.module).__name__} a method get_layer_static_inputs(seq_length, micro_batch_size).",
    )


# -- parts of a layer


def samples_of_parts(layer: torch.nn.Module, sample: Sample, parts: Sequence[Part]) -> list[tuple[Part, Sample]]:
    """Run a layer once on its sample; its parts in the order in which they are called, with their arguments."""
    found: list[tuple[Part, Sample]] = []
    with _as_before(layer), contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(_noting(part, found))
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


def place_of(part: Part) -> str:
    """The attribute of a part's module that is called; after module.compile() it is another one."""
    compiled = part.method == "forward" and part.module._compiled_call_impl is not None
    return "_compiled_call_impl" if compiled else part.method


@contextlib.contextmanager
def _noting(part: Part, found: list[tuple[Part, Sample]]) -> Iterator[None]:
    place = place_of(part)
    original = getattr(part.module, place)
    form = CallForm(getattr(part.module, part.method))
    own = dict(vars(part.module))

    def noted(*args: Any, **kwargs: Any) -> Any:
        call = form(args, kwargs)
        leaves, structure = flatten((call.args, call.kwargs))
        found.append((part, Sample(*unflatten(structure, [_detached(leaf) for leaf in leaves]))))
        return original(*args, **kwargs)

    vars(part.module)[place] = noted
    try:
        yield
    finally:
        vars(part.module).pop(place)
        if place in own:
            vars(part.module)[place] = own[place]


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return as_given(leaf.detach().clone(), leaf).requires_grad_(leaf.requires_grad)


@contextlib.contextmanager
def _as_before(layer: torch.nn.Module) -> Iterator[None]:
    """Put attributes, buffers and random states back."""
    tensors = [*layer.parameters(), *layer.buffers()]
    backend = backend_of(tensor.device for tensor in tensors)
    tracker = tracker_for(backend)
    named = tracker.get_states()
    attributes = ModuleAttributes(dict(layer.named_modules()))
    buffers = [(buffer, buffer.detach().clone()) for buffer in layer.buffers()]
    devices = [backend.device] if backend.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            attributes.restore()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            tracker.set_states(named)
