"""Where programs keep a number that their step reads: holders of many kinds, nested to a depth."""

from __future__ import annotations

import contextvars
import os
import tempfile
import types
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass
class Held:
    """A number in its place: how the step's own code reads it, and how others change it."""

    read: Callable[[], float]
    write: Callable[[float], None]
    in_reach: bool = True


@dataclass
class Level:
    """A dataclass in a dataclass."""

    inner: Any = None
    w: float = 0.0


class Conf:
    """A configuration whose attributes are keys, as OmegaConf's are."""

    def __init__(self, content: dict[str, Any]) -> None:
        object.__setattr__(self, "_content", content)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_content")[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._content[name] = value


class Weighted:
    """A property before an attribute."""

    def __init__(self, w: float) -> None:
        self._w, self.inner = w, None

    @property
    def w(self) -> float:
        return self._w


class Scaled(nn.Module):
    """A module in a module, with a plain attribute."""

    def __init__(self, inner: nn.Module | None, w: float) -> None:
        super().__init__()
        self.inner, self.w = inner, w


def _nested(leaf: Any, wrap: Callable[[Any], Any], depth: int) -> Any:
    for _ in range(depth - 1):
        leaf = wrap(leaf)
    return leaf


def _attributes(leaf: Any, wrap: Callable[[Any], Any], depth: int, name: str = "w") -> Held:
    root = _nested(leaf, wrap, depth)
    reads: dict[int, Callable[[], float]] = {
        1: lambda: root.w,
        2: lambda: root.inner.w,
        3: lambda: root.inner.inner.w,
        4: lambda: root.inner.inner.inner.w,
    }
    return Held(reads[depth], lambda value: setattr(leaf, name, value))


def in_dataclass(depth: int, w: float) -> Held:
    return _attributes(Level(w=w), Level, depth)


def in_namespace(depth: int, w: float) -> Held:
    return _attributes(types.SimpleNamespace(w=w), lambda inner: types.SimpleNamespace(inner=inner), depth)


def in_conf(depth: int, w: float) -> Held:
    return _attributes(Conf({"w": w}), lambda inner: Conf({"inner": inner}), depth)


def in_property(depth: int, w: float) -> Held:
    leaf = Weighted(w)

    def wrap(inner: Any) -> Any:
        outer = Weighted(0.0)
        outer.inner = inner
        return outer

    return _attributes(leaf, wrap, depth, name="_w")


def in_module(depth: int, w: float) -> Held:
    return _attributes(Scaled(None, w), lambda inner: Scaled(inner, 0.0), depth)


def _item_reader(root: Any, depth: int) -> Callable[[], float]:
    """Code that spells the way to a number, as steps do."""
    reads: dict[int, Callable[[], float]] = {
        1: lambda: root["w"],
        2: lambda: root["inner"]["w"],
        3: lambda: root["inner"]["inner"]["w"],
        4: lambda: root["inner"]["inner"]["inner"]["w"],
    }
    return reads[depth]


def in_dict(depth: int, w: float) -> Held:
    leaf = {"w": w}
    root = _nested(leaf, lambda inner: {"inner": inner}, depth)
    return Held(_item_reader(root, depth), lambda value: leaf.update(w=value))


def in_user_dict(depth: int, w: float) -> Held:
    """A dict of the standard library that is written in Python."""
    leaf: Any = UserDict(w=w)
    root = _nested(leaf, lambda inner: UserDict(inner=inner), depth)
    return Held(_item_reader(root, depth), lambda value: leaf.update(w=value))


def in_method_of_a_dict(depth: int, w: float) -> Held:
    """Dicts of which the step has only a method."""
    leaf: Any = {"w": w}
    get = _nested(leaf.get, lambda inner: {"w": inner}.get, depth)

    def read() -> float:
        found = get("w")
        while callable(found):
            found = found("w")
        return float(found)

    return Held(read, lambda value: leaf.update(w=value))


def in_list(depth: int, w: float) -> Held:
    """Lists of objects that are iterated over."""
    leaf = Level(w=w)
    root = _nested([Level(w=0.0), leaf], lambda inner: [inner], depth)

    def read() -> float:
        items = root
        while isinstance(items[0], list):
            (items,) = items
        return sum(item.w for item in items)

    return Held(read, lambda value: setattr(leaf, "w", value))


def in_closure_over_self(depth: int, w: float) -> Held:
    """`self.cfg["w"]` read in a function that a method makes."""

    class Trainer:
        def __init__(self) -> None:
            self.cfg = _nested({"w": w}, lambda inner: {"inner": inner}, depth)

        def reader(self) -> Callable[[], float]:
            def read() -> float:
                found = self.cfg
                for _ in range(depth - 1):
                    found = found["inner"]
                return float(found["w"])

            return read

    trainer = Trainer()
    leaf = trainer.cfg
    for _ in range(depth - 1):
        leaf = leaf["inner"]
    return Held(trainer.reader(), lambda value: leaf.update(w=value))


def in_context_variable(depth: int, w: float) -> Held:
    variable = contextvars.ContextVar("w", default=w)
    holder = _nested(types.SimpleNamespace(w=variable), lambda inner: types.SimpleNamespace(inner=inner), depth)

    def read() -> float:
        found = holder
        for _ in range(depth - 1):
            found = found.inner
        return float(found.w.get())

    def write(value: float) -> None:
        variable.set(value)

    return Held(read, write)


def in_environment(depth: int, w: float) -> Held:
    os.environ["STEPGRAPH_TEST_W"] = str(w)
    return Held(
        lambda: float(os.environ["STEPGRAPH_TEST_W"]),
        lambda value: os.environ.update(STEPGRAPH_TEST_W=str(value)),
    )


def in_file(depth: int, w: float) -> Held:
    path = Path(tempfile.mkdtemp()) / "w"
    path.write_text(str(w))
    return Held(lambda: float(path.read_text()), lambda value: path.write_text(str(value)) and None, in_reach=False)


HOLDERS: dict[str, Callable[[int, float], Held]] = {
    "dataclass": in_dataclass,
    "dict": in_dict,
    "namespace": in_namespace,
    "list of objects": in_list,
    "attributes over a dict": in_conf,
    "property": in_property,
    "context variable": in_context_variable,
    "user dict": in_user_dict,
    "method of a dict": in_method_of_a_dict,
    "environment": in_environment,
    "file": in_file,
    "closure over self": in_closure_over_self,
    "module attribute": in_module,
}
DEPTHS = (1, 2, 3, 4)
FLAT = ("environment", "file")
"""Holders that cannot be nested."""
CASES = [(name, depth) for name in HOLDERS for depth in DEPTHS if depth == 1 or name not in FLAT]


class Net(nn.Module):
    """A model whose forward reads the number."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.__dict__["held"] = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)) * self.held.read())
        return out
