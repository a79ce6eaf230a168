"""What a step can reach before it has run: the modules, optimizers and tensors in its closure.

Looks where Python looks names up: closure cells, defaults, the globals that the code names, the bound object, and one
level into containers and plain objects found there; into functions found there it follows. It decides which device a
step is for, and finds modules that only compiled code calls, where no hook sees them. None of the user's code runs for
that: an object that computes its attributes is asked for none.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

_MAX_FUNCTIONS = 1024
_MAX_ITEMS = 4096
"""Items of one container that are looked at. A larger one is data: its first items stand for the rest."""


def reachable(function: Any) -> Iterator[Any]:
    """Every object a callable can name, most direct first."""
    seen: set[int] = set()
    queue: deque[tuple[Any, int]] = deque([(function, 0)])
    functions = 0
    while queue:
        value, depth = queue.popleft()
        if id(value) in seen or value is None or isinstance(value, (str, bytes, int, float, type, types.ModuleType)):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
            continue
        if isinstance(value, (functools.partial, types.MethodType, types.FunctionType)) or depth == 0:
            functions += 1
            if functions <= _MAX_FUNCTIONS:
                behind = value.func if isinstance(value, functools.partial) else None  # as direct as the partial
                queue += [(v, 0 if v is behind else 1) for v in _of_callable(value)]
        elif depth == 1:
            queue += [(v, 2) for v in _of_container(value)]


def _of_callable(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, *_of_container(value.__self__), value.__func__]
    if not isinstance(value, types.FunctionType):
        call = vars(type(value)).get("__call__")
        return [*_of_container(value), *([call] if isinstance(call, types.FunctionType) else [])]
    found: list[Any] = []
    for cell in value.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a cell not filled yet
            continue
    found += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    found += [value.__globals__[name] for name in names_in(value.__code__) if name in value.__globals__]
    wrapped = getattr(value, "__wrapped__", None)
    return [*found, *([wrapped] if wrapped is not None else [])]


def names_in(code: types.CodeType) -> set[str]:
    """Every name that a function's code looks up, inner functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def _of_container(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(islice(dict.values(value), _MAX_ITEMS))
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(islice(value, _MAX_ITEMS))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_attribute(value, f.name) for f in dataclasses.fields(value)]
    return list((_attribute(value, "__dict__") or {}).values())


def _attribute(value: Any, name: str) -> Any:
    """What an object has under a name, or None; its own `__getattr__` is not asked."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def is_compiled(value: Any) -> bool:
    """Whether a callable or module goes through torch.compile."""
    return any(True for _ in compilers(value))


def compilers(value: Any) -> Iterator[Any]:
    """What torch.compile keeps for each compiled callable that a value is or has, told by the marks that it leaves."""
    if isinstance(value, torch.nn.Module):
        optimized = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
        for module in value.modules():
            if isinstance(module, optimized):
                yield vars(module).get("dynamo_ctx")
        yield from own_compilers(value)
    elif isinstance(value, types.MethodType):
        yield from compilers(value.__func__)
    elif isinstance(value, types.FunctionType):
        marks = vars(value)
        if "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable"):
            yield _closed_over(value, "self")


def own_compilers(model: torch.nn.Module) -> Iterator[Any]:
    """What torch.compile keeps for each part of a model whose `compile()` was called."""
    for module in model.modules():
        if vars(module).get("_compiled_call_impl") is not None:
            yield _closed_over(vars(module)["_compiled_call_impl"], "self")


def _closed_over(function: Any, name: str) -> Any:
    """What a function's closure has under a name, or None."""
    if not isinstance(function, types.FunctionType) or name not in function.__code__.co_freevars:
        return None
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents


def devices(values: Iterator[Any]) -> Iterator[torch.device]:
    """The devices of the tensors among these objects and in the modules and optimizers among them.

    A tensor on the meta device has a shape and no data: no work is done there.
    """
    return (tensor.device for tensor in _tensors(values) if not tensor.is_meta)


def _tensors(values: Iterator[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, torch.nn.Module):
            yield from value.parameters()
        elif isinstance(value, torch.optim.Optimizer):
            yield from (p for group in value.param_groups for p in group["params"])
