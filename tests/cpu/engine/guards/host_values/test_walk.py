"""The walk finds numbers at any depth, in whatever holds them, and names them as code would spell them."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import itertools
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stepgraph.core.executed_code import ExecutedCode
from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.guards.host_values import walk
from stepgraph.engine.guards.host_values.watch import Watch

Held = tuple[Any, str, Callable[[], Any], Callable[[Any], None]]
"""What a variable `cfg` stands for, how the number in it is spelled, how it is read and how it is changed."""


@dataclasses.dataclass
class Data:
    w: Any


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w


class Open:
    """Has its attributes in a dict, as configurations of libraries do."""

    def __init__(self, w: Any) -> None:
        self._content = {"w": w}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_content"][name]
        except KeyError:
            raise AttributeError(name) from None


class Computed:
    def __init__(self, w: Any) -> None:
        self._w = w

    @property
    def w(self) -> Any:
        return self._w


class Layer(nn.Module):
    def __init__(self, w: Any) -> None:
        super().__init__()
        self.w = w


def attribute(cfg: Any) -> Any:
    return cfg.w


def item(cfg: Any) -> Any:
    return cfg["w"]


def first(cfg: Any) -> Any:
    return next(iter(cfg))


def current(cfg: contextvars.ContextVar[Any]) -> Any:
    return cfg.get()


def in_context(w: Any) -> contextvars.ContextVar[Any]:
    variable = contextvars.ContextVar[Any]("variable")
    variable.set(w)
    return variable


def python_module(w: Any) -> types.ModuleType:
    made = types.ModuleType("some_settings")
    vars(made)["w"] = w
    return made


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str, Callable[[Any, Any], object]]] = {
    "dataclass": (Data, attribute, ".w", lambda held, w: setattr(held, "w", w)),
    "namespace": (lambda w: types.SimpleNamespace(w=w), attribute, ".w", lambda held, w: setattr(held, "w", w)),
    "slots": (Slotted, attribute, ".w", lambda held, w: setattr(held, "w", w)),
    "open": (Open, attribute, ".w", lambda held, w: held._content.update(w=w)),
    "property": (Computed, attribute, "._w", lambda held, w: setattr(held, "_w", w)),
    "nn.Module": (Layer, attribute, ".w", lambda held, w: setattr(held, "w", w)),
    "Python module": (python_module, attribute, ".w", lambda held, w: vars(held).update(w=w)),
    "dict": (lambda w: {"w": w}, item, "['w']", lambda held, w: held.update(w=w)),
    "list": (lambda w: [w], first, "[0]", lambda held, w: held.__setitem__(0, w)),
    "deque": (lambda w: collections.deque([w]), first, "[0]", lambda held, w: held.__setitem__(0, w)),
    "ContextVar": (in_context, current, ".get()", lambda held, w: held.set(w)),
}
"""By name: how it is made, how code reads it, how that is spelled, and how it is changed."""


def noted(step: Callable[[], Any]) -> ExecutedCode:
    ran = ExecutedCode()
    with ran.noting():
        step()
    return ran


def changes(step: Callable[[], Any], change: Callable[[], object], *, is_noted: bool = True) -> list[str]:
    """What a watch tells after a change; its row holds before, and never where there is something to tell."""
    watch, row = Watch(step, ran=noted(step) if is_noted else None), GuardRow()
    watch.expect(row)
    assert row.holds()
    assert watch.changed() == []
    change()
    told = list(map(str, watch.changed()))
    assert not (told and row.holds())
    return told


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize("depth", range(1, 5))
@pytest.mark.parametrize("holder", HOLDERS)
def test_walk_finds_a_number_at_any_depth(holder: str, depth: int, is_noted: bool) -> None:
    make, read, spelled, change = HOLDERS[holder]
    innermost = cfg = make(1.0)
    for _ in range(depth - 1):
        cfg = make(cfg)

    def step() -> Any:
        found = cfg
        for _ in range(depth):
            found = read(found)
        return found

    assert step() == 1.0
    assert changes(step, lambda: change(innermost, 2.0), is_noted=is_noted) == [f"cfg{spelled * depth}: 1.0 -> 2.0"]


@pytest.mark.parametrize("first_holder", HOLDERS)
@pytest.mark.parametrize("second_holder", HOLDERS)
def test_walk_finds_a_number_in_one_holder_in_another(first_holder: str, second_holder: str) -> None:
    outer, inner = HOLDERS[first_holder], HOLDERS[second_holder]
    held = inner[0](1.0)
    cfg = outer[0](held)

    def step() -> Any:
        return inner[1](outer[1](cfg))

    told = changes(step, lambda: inner[3](held, 2.0))
    assert told == [f"cfg{outer[2]}{inner[2]}: 1.0 -> 2.0"]


class Trainer:
    def __init__(self) -> None:
        self.cfg = {"w": 1.0}
        self.parts = [types.SimpleNamespace(w=1.0)]

    def make(self) -> Callable[[], float]:
        return lambda: self.cfg["w"] + sum(part.w for part in self.parts)


def test_walk_finds_what_a_closure_over_self_reads() -> None:
    trainer = Trainer()
    assert changes(trainer.make(), lambda: trainer.cfg.update(w=2.0)) == ["self.cfg['w']: 1.0 -> 2.0"]
    assert changes(trainer.make(), lambda: setattr(trainer.parts[0], "w", 2.0)) == ["self.parts[0].w: 1.0 -> 2.0"]


@pytest.mark.parametrize("is_there", [True, False])
def test_walk_finds_environment_variables_that_code_spells(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("STEPGRAPH_TEST_OTHER", "1")
    if is_there:
        monkeypatch.setenv("STEPGRAPH_TEST_WEIGHT", "1.0")

    def step() -> float:
        return float(os.environ.get("STEPGRAPH_TEST_WEIGHT", 0))

    assert changes(step, lambda: monkeypatch.setenv("STEPGRAPH_TEST_OTHER", "2")) == []
    told = changes(step, lambda: monkeypatch.setenv("STEPGRAPH_TEST_WEIGHT", "2.0"))
    assert told == [f"os.environ['STEPGRAPH_TEST_WEIGHT']: {repr(b'1.0') if is_there else 'absent'} -> b'2.0'"]


# -- what is drawn from


SOURCES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "random": (lambda: random.Random(0), lambda source: source.random()),
    "numpy": (lambda: np.random.default_rng(0), lambda source: source.random()),
    "old numpy": (lambda: np.random.RandomState(0), lambda source: source.rand()),
    "iterator": (lambda: iter([1, 2, 3]), next),
    "count": (itertools.count, next),
    "generator": (lambda: (n for n in (1, 2)), next),
    "loader": (lambda: iter(torch.utils.data.DataLoader([1, 2])), next),
}


@pytest.mark.parametrize("holder", [name for name in HOLDERS if name != "ContextVar"])
@pytest.mark.parametrize("source", SOURCES)
def test_walk_finds_what_is_drawn_from_in_objects(source: str, holder: str) -> None:
    made, draw = SOURCES[source][0](), SOURCES[source][1]
    make, read, spelled, _ = HOLDERS[holder]
    cfg = make(make(made))
    watch = Watch(lambda: draw(read(read(cfg))))
    assert watch.drawn() == []
    draw(made)
    assert [found.name for found in watch.drawn()] == [f"cfg{spelled * 2}"]


def test_walk_leaves_generators_of_torchs_to_the_backend() -> None:
    generator = torch.Generator()
    watch = Watch(lambda: generator)
    torch.rand(1, generator=generator)
    assert watch.drawn() == []


# -- bounds


def test_walk_ends_where_a_decorated_function_did_not_run() -> None:
    @functools.wraps(attribute)
    def around(cfg: Any) -> Any:
        return attribute(cfg)

    step = lambda cfg=None: around(cfg) if cfg else 0  # noqa: E731
    assert Watch(step, ran=noted(step)).changed() == []


def test_walk_that_is_cut_short_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [types.SimpleNamespace(w=1.0) for _ in range(50)]
    step = lambda: sum(one.w for one in many)  # noqa: E731
    assert Watch(step).unlooked is None
    monkeypatch.setattr(walk, "MAX_OBJECTS", 20)
    told = Watch(step).unlooked
    assert told is not None
    assert "not watched" in told


@pytest.mark.parametrize("make", [list, collections.deque, lambda items: dict(enumerate(items))])
def test_walk_takes_a_large_container_for_data(make: Callable[[Any], Any]) -> None:
    data = make([float(index) for index in range(10_000)])
    watch = Watch(lambda: data)
    assert len(watch) < 100
    data[0] = -1.0
    assert [change.name for change in watch.changed()] == ["data[0]"]
    watch.renew()
    data[9000] = -1.0
    assert watch.changed() == []
    data.append(0.0) if hasattr(data, "append") else data.update(x=1)
    assert [change.name for change in watch.changed()] == ["len(data)"]


# -- what follows


def test_watch_drops_values_and_renews() -> None:
    cfg = types.SimpleNamespace(a=1.0, b=[1.0], c={"x": types.SimpleNamespace(d=1.0)})
    watch = Watch(lambda: (cfg.a, cfg.b, cfg.c["x"].d))
    cfg.a = 2.0
    cfg.b.append(1.0)
    cfg.c["x"] = types.SimpleNamespace(d=5.0)
    assert {change.name for change in watch.changed()} == {"cfg.a", "len(cfg.b)", "cfg.c['x']"}
    watch.drop(["cfg.a"])
    assert {change.name for change in watch.changed()} == {"len(cfg.b)", "cfg.c['x']"}
    watch.renew()
    assert watch.changed() == []
    cfg.a, cfg.c["x"].d, row = 3.0, 6.0, GuardRow()
    assert list(map(str, watch.changed())) == ["cfg.c['x'].d: 5.0 -> 6.0"]
    watch.drop(["cfg.c['x'].d"])
    watch.expect(row)
    cfg.a = 4.0
    cfg.c["x"].d = 7.0
    assert row.holds()


def test_watch_separates_the_users_values_from_a_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    lines = ["LIMIT = 1.0", "class Config:", "    def __init__(self):", "        self.w, self.table = 1.0, {'k': 1.0}"]
    (folder / "some_library.py").write_text("\n".join([*lines, "def limit():", "    return LIMIT"]))
    monkeypatch.syspath_prepend(folder)
    import some_library  # type: ignore[import-not-found]

    class Own(some_library.Config):  # type: ignore[misc]
        pass

    theirs, own, plain = some_library.Config(), Own(), Data(1.0)
    step = lambda: (theirs.w, theirs.table, own.w, plain.w, some_library.limit())  # noqa: E731
    watch = Watch(step, ran=noted(step))
    theirs.w = own.w = plain.w = theirs.table["k"] = some_library.LIMIT = 2.0
    told = {change.name: change.is_users for change in watch.changed()}
    del sys.modules["some_library"]
    assert {"theirs.w": False, "theirs.table['k']": False, "own.w": True, "plain.w": True}.items() <= told.items()
    assert [is_users for name, is_users in told.items() if "LIMIT" in name] == [False]


def test_walk_asks_for_no_attributes_of_the_users() -> None:
    class Touchy:
        def __init__(self) -> None:
            self.w = 1.0

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("the user's code ran")

        __eq__ = __bool__ = __hash__ = __len__ = __iter__ = __repr__ = __getattribute__  # type: ignore[assignment]
        __class__ = property(__getattribute__)  # type: ignore[assignment]

    touchy = object.__new__(Touchy)
    object.__setattr__(touchy, "w", 1.0)
    held = types.SimpleNamespace(touchy=touchy)
    told = changes(lambda: [held.touchy, "w"], lambda: object.__setattr__(touchy, "w", 2.0), is_noted=False)
    assert told == ["held.touchy.w: 1.0 -> 2.0"]
