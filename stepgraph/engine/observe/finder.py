"""The finder lists what a step can reach: its modules, optimizers, schedulers, scalers, own tensors, and their devices.

It goes where the watch goes (`values.walk`), to any depth, and needs no call of the step. Objects of torch's own kinds
count whatever their name: a model in a dict of a trainer's configuration is a model. It also knows how the step's code
would spell the containers that it meets, for messages and for `ignore=`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from stepgraph.core.executed_code import ExecutedCode
from stepgraph.core.plain_values import attributes_of
from stepgraph.engine.guards.host_values.naming import Label
from stepgraph.engine.guards.host_values.parts import Place
from stepgraph.engine.guards.host_values.walk import Walk, Wants

_MODELS = (torch.nn.Module, torch.optim.Optimizer)
_FOUND = (*_MODELS, torch.Tensor, torch.amp.GradScaler, LRScheduler)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)

_CHANGEABLE = (dict, list, set, deque, functools._lru_cache_wrapper)


@dataclass(frozen=True, slots=True)
class Spot:
    """A container, an object or a variable, and its spelling."""

    label: Label
    is_object: bool = False
    """Whether it holds its contents as attributes."""
    is_models: bool = False
    """Whether it is a module or an optimizer, or an attribute of one."""

    def of(self, key: Any) -> Label:
        """The spelling of an item; keys that cannot be written, such as parameters, are all spelled `...`."""
        if self.is_object:
            return self.label.attribute(str(key))
        is_written = issubclass(type(key), (str, int))
        return self.label.item(key) if is_written else Label(f"{self.label.spelling}[...]", self.label.apart)


@dataclass(frozen=True, slots=True)
class Found:
    """What a callable can name."""

    objects: list[Any]
    """The most direct first; of nested modules the outermost."""
    containers: list[Any]
    """What may be given other items: dicts, lists, sets, functions with a cache, and the attributes of objects.

    Without those of modules and optimizers.
    """
    variables: list[Place]
    """Globals and closed-over variables."""


class _Finder:
    def __init__(self, function: Any, ran: ExecutedCode | None = None) -> None:
        self.values: list[Any] = []
        self.labels: list[str] = []
        """The spelling of each value."""
        self.spots: dict[int, Spot] = {}
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """The step's own tensors, and their spellings."""
        self.variables: list[Place] = []
        self.containers: list[Any] = []
        self._inside: set[int] = set()
        """Modules inside others that were found, and the attributes of modules and optimizers, by id."""
        Walk(self, ran).go(function, {})

    def put(self, place: Place) -> bool:
        if type(place.where) is types.CellType or (type(place.where) is dict and "__builtins__" in place.where):
            self.variables.append(place)
        return True

    def takes(self, value: Any) -> bool:
        return issubclass(type(value), _FOUND)

    def miss(self, label: Label, where: Mapping[Any, Any], wants: Wants) -> None:
        """Missing names are ignored."""

    def enter(self, label: Label, value: Any, owner: Any, own: bool, wants: Wants | None) -> None:
        kind, attributes = type(value), attributes_of(value)
        is_models = issubclass(kind, _MODELS)
        if issubclass(kind, torch.Tensor):
            self.tensors.append((str(label), value))
        if issubclass(kind, _CONTAINERS):
            self.spots[id(value)] = Spot(label, is_models=id(owner) in self._inside)
        elif is_models or (wants is not None and not issubclass(kind, (type, types.ModuleType))):
            self.spots[id(value)] = self.spots[id(attributes)] = Spot(label, is_object=True, is_models=is_models)
        if is_models:
            self._inside.add(id(attributes))
        elif issubclass(kind, _CHANGEABLE):
            self.containers += [] if id(owner) in self._inside else [value]
        elif attributes is not None and id(attributes) in self.spots:
            self.containers.append(attributes)
        if issubclass(kind, torch.optim.Optimizer):
            state: Any = (attributes or {}).get("state", {})  # not asked for: reading it is noted while recording
            spot = Spot(label.attribute("state"), is_models=True)
            self.spots |= {id(state): spot, **{id(one): Spot(spot.of(...)) for one in dict.values(state)}}
        if id(value) not in self._inside and not issubclass(kind, (type, types.ModuleType, types.CellType)):
            self.values.append(value)
            self.labels.append(str(label))
            if issubclass(kind, torch.nn.Module):
                self._inside.update(map(id, value.modules()))


def reachable(function: Any, ran: ExecutedCode | None = None) -> list[Any]:
    """The objects that a callable can name, the most direct first; of nested modules the outermost."""
    return _Finder(function, ran).values


def found_by(function: Any, ran: ExecutedCode | None = None) -> Found:
    """The objects, containers and variables that a callable can name."""
    found = _Finder(function, ran)
    return Found(found.values, found.containers, found.variables)


def named_reachable(function: Any) -> list[tuple[str, Any]]:
    """The same objects, each with the spelling of the code that names it."""
    found = _Finder(function)
    return list(zip(found.labels, found.values, strict=True))


def named_with_variables(function: Any) -> tuple[list[tuple[str, Any]], list[Place]]:
    """The same objects, and the variables that a callable can name."""
    found = _Finder(function)
    return list(zip(found.labels, found.values, strict=True)), found.variables


def spots_of(step: Any) -> dict[int, Spot]:
    """The containers and objects in a step's reach, by id."""
    return _Finder(step).spots


def tensors_in(step: Any, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    """The tensors under one of these names, as `ignore=` takes them, and their spellings."""
    if not names:
        return []
    parts = tuple(name + mark for name in names for mark in (".", "["))
    return [(label, tensor) for label, tensor in _Finder(step).tensors if label in names or label.startswith(parts)]


def is_compiled(value: Any) -> bool:
    """Whether a callable or module goes through torch.compile."""
    return any(True for _ in compilers(value))


def compilers(value: Any) -> Iterator[Any]:
    """torch.compile's object for each compiled callable that a value is or has, found by the marks that it leaves."""
    if issubclass(type(value), torch.nn.Module):
        optimized = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
        for module in value.modules():
            if issubclass(type(module), optimized):
                yield vars(module).get("dynamo_ctx")
        yield from own_compilers(value)
    elif issubclass(type(value), types.MethodType):
        yield from compilers(value.__func__)
    elif issubclass(type(value), types.FunctionType):
        marks = vars(value)
        if "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable"):
            yield _closed_over(value, "self")


def own_compilers(model: torch.nn.Module) -> Iterator[Any]:
    """torch.compile's object for each part of a model whose `compile()` was called."""
    for module in model.modules():
        if vars(module).get("_compiled_call_impl") is not None:
            yield _closed_over(vars(module)["_compiled_call_impl"], "self")


def _closed_over(function: Any, name: str) -> Any:
    """The value of a name in a function's closure, or None."""
    if not issubclass(type(function), types.FunctionType) or name not in function.__code__.co_freevars:
        return None
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents


def devices(values: Iterable[Any]) -> Iterator[torch.device]:
    """The devices of the tensors among these objects and in the modules and optimizers among them.

    Tensors on the meta device have no data and do not count.
    """
    return (tensor.device for tensor in _tensors(values) if not tensor.is_meta)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if issubclass(type(value), torch.Tensor):
            yield value
        elif issubclass(type(value), torch.nn.Module):
            yield from value.parameters()
        elif issubclass(type(value), torch.optim.Optimizer):
            yield from (p for group in value.param_groups for p in group["params"])
