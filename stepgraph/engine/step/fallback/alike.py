"""Modules that look alike: the same class, state and attributes, all the way down. One trial judges them all.

The layers of a model differ in their weights' values and in their number (`self.layer_idx`), and in nothing else that a
capture could depend on. So an attribute that repeats a number of the module's own path counts as the same in all.
Attributes are compared by value if they are plain, and by identity otherwise: a configuration that all layers share is
the same, a list that each has for itself is compared item by item.

A wrong answer costs speed only. A module that is judged wrongly is refused later by the capture itself and stays eager,
or stays eager although it need not.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OWN = frozenset(("_parameters", "_buffers", "_modules", "training"))


def look_of(module: torch.nn.Module, path: str) -> Hashable:
    """Return a value that is equal for modules that look alike."""
    numbers = [int(segment) for segment in path.split(".") if segment.isdigit()]
    return _look(module, numbers)


def _look(module: torch.nn.Module, numbers: list[int]) -> Hashable:
    return (
        type(module),
        tuple((name, _value(value, numbers)) for name, value in vars(module).items() if name not in _OWN),
        tuple((name, _geometry(t)) for name, t in (*module._parameters.items(), *module._buffers.items())),
        tuple((name, part and _look(part, numbers)) for name, part in module._modules.items()),
    )


def _geometry(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _value(value: Any, numbers: list[int]) -> Hashable:
    kind = type(value)
    if kind is int and value in numbers:
        return "its number", numbers.index(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple, set, frozenset):
        return kind, tuple(_value(item, numbers) for item in value)
    if kind in (dict, OrderedDict):
        return kind, tuple((_value(key, numbers), _value(item, numbers)) for key, item in value.items())
    if isinstance(value, torch.Tensor):
        return _geometry(value)
    return id(value.__func__ if kind is types.MethodType else value)
