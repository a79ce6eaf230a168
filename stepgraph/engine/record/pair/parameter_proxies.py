"""Proxies take the places of a module's parameters and buffers while its graphs are recorded.

A recorded backward must compute gradients without storing them in `.grad`. The parameter's own accumulator belongs to
the stream of an earlier eager pass, which a capture must not use, and its hooks would run once, at capture. So during a
recording a new tensor over the same memory replaces each tensor of the module. The graph computes gradients of these
proxies. The tensors themselves take no part in the recording, and later changes to them (an optimizer's step, a loaded
checkpoint) do not invalidate the tensors that autograd has saved. A tensor with two places in the module has one
proxy.

A module may also hold its parameters in lists, or weak references to them, as torch's RNNs do. There they are replaced,
too: an RNN that finds other parameters than in its list moves them to new memory, which only a replay would fill.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.storage import memory_of


class ParameterProxies:
    """The proxies of one module's tensors."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self._made: dict[int, torch.Tensor] = {}
        self._module = module
        self._listed: list[tuple[list[Any], int, Any, Any]] = []
        """Items of lists that are tensors of the module, or weak references to them, and what replaces them."""
        self.parameters: list[torch.Tensor] = []
        """The trainable parameters, each once."""
        for where, name, tensor in _places_in(module):
            self._places.append((where, name, tensor, self._stand_in(tensor)))
        for items in (items for owner in module.modules() for items in vars(owner).values() if type(items) is list):
            for index, item in enumerate(items):
                if issubclass(type(item), torch.Tensor) and self.has(item):
                    self._listed.append((items, index, item, self.of(item)))
                elif type(item) is weakref.ref and isinstance(held := item(), torch.Tensor) and self.has(held):
                    self._listed.append((items, index, item, weakref.ref(self.of(held))))

    @property
    def are_current(self) -> bool:
        """True if the module has the same tensors in the same places as when the proxies were made."""
        known = [(id(where), name, id(tensor)) for where, name, tensor, _ in self._places]
        return known == [(id(where), name, id(tensor)) for where, name, tensor in _places_in(self._module)]

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._made.get(id(tensor))
        if found is None:
            found = tensor.data.requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter) and type(found) is torch.Tensor:
                found = torch.nn.Parameter(found, tensor.requires_grad)
            found.__dict__.update(tensor.__dict__)  # main_grad and what else code has hung on it
            self._made[id(tensor)] = found
            if tensor.requires_grad:
                self.parameters.append(tensor)
        return found

    def has(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is one of the module's own."""
        return id(tensor) in self._made

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The proxy of a tensor; for a tensor that is not the module's, the tensor itself."""
        return self._made.get(id(tensor), tensor)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The proxies, in the order of `parameters`."""
        return [self._made[id(parameter)] for parameter in self.parameters]

    @property
    def originals(self) -> dict[int, torch.Tensor]:
        """The parameters and buffers by the ids of their proxies."""
        return {id(stand_in): tensor for _, _, tensor, stand_in in self._places}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the proxies into the module within a block. Afterwards every place holds what it held before."""
        held = [(where, name, where[name]) for where, name, _, _ in self._places if name in where]
        for where, name, _, stand_in in self._places:
            if name in where:  # a backward may be recorded after the program has taken a tensor away
                where[name] = stand_in
        listed = [entry for entry in self._listed if entry[1] < len(entry[0]) and entry[0][entry[1]] is entry[2]]
        for items, index, _, stand_in in listed:
            items[index] = stand_in
        try:
            yield
        finally:
            for where, name, tensor in held:
                where[name] = tensor
            for items, index, item, _ in listed:
                items[index : index + 1] = [item]

    def refuse_moved(self) -> None:
        """After a recording: refuse a module that has given a tensor of its own other memory, which is the proxy's."""
        for _, name, tensor, stand_in in self._places:
            if memory_of(stand_in) != memory_of(tensor):
                what = f"the module gives `{name}` other memory (`.data = ...`, flatten_parameters())"
                raise CaptureError(what, rule="own-change")


def _places_in(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The places of a module's tensors: a dict, a name, and the tensor."""
    for owner in module.modules():
        for where in (owner._parameters, owner._buffers):
            for name, tensor in where.items():
                if tensor is not None:
                    yield where, name, tensor


@contextlib.contextmanager
def without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Disable the hooks of tensors: they would run once, in the recording."""
    kept = [(hooks, dict(hooks)) for p in parameters if (hooks := p._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
