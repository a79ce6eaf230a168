"""A row of expectations says yes only where every object is the one it was."""

from __future__ import annotations

import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.guards.optimizer import NumbersGuard, ScalerGuard


def make_world() -> tuple[GuardRow, types.SimpleNamespace]:
    world = types.SimpleNamespace(name="a", table={"x": 1.5, "y": 2.5, "z": torch.zeros(2)}, row=[1, 2], open=True)
    expectations = GuardRow()
    expectations.attribute(world, "name", world.name)
    expectations.item(world.table, "z", world.table["z"])
    expectations.items(world.table, {"x": world.table["x"], "y": world.table["y"]})
    expectations.length(world.row, 2)
    expectations.ask(lambda: bool(world.open))
    return expectations, world


TOUCHES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda world: setattr(world, "name", "b"),
    "attribute gone": lambda world: delattr(world, "name"),
    "item": lambda world: world.table.update(z=torch.zeros(2)),
    "item gone": lambda world: world.table.pop("z"),
    "one of several items": lambda world: world.table.update(y=3.5),
    "one of several items gone": lambda world: world.table.pop("y"),
    "number became a tensor of the same value": lambda world: world.table.update(x=torch.tensor(1.5)),
    "length": lambda world: world.row.append(3),
    "question": lambda world: setattr(world, "open", False),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_row_says_no_once_anything_was_touched(name: str) -> None:
    row, world = make_world()
    assert row.holds()
    TOUCHES[name](world)
    assert not row.holds()


class Settings:
    """Attributes on a class and on an instance."""

    scale = object()

    def __init__(self) -> None:
        self.weight: object = object()
        self.count: object = None


def write(where: Any, name: str) -> None:
    setattr(where, name, object())


def write_directly(where: Any) -> None:
    where.weight = object()


HELD: dict[str, Callable[[Settings, dict[str, Any]], object]] = {
    "attribute of a class": lambda it, table: write(Settings, "scale"),
    "attribute of an object": lambda it, table: [write_directly(it) for _ in range(100)],  # Python specialises stores
    "attribute None gone": lambda it, table: delattr(it, "count"),
    "item": lambda it, table: table.update(a=object()),
    "item gone": lambda it, table: table.pop("a"),
    "item None gone": lambda it, table: table.pop("b"),
    "view of another mapping": lambda it, table: table["chain"].update(a=object()),
    "length": lambda it, table: table["longer"].update(c=1),
    "all cleared": lambda it, table: table.clear(),
}


@pytest.mark.parametrize("name", HELD)
def test_row_finds_each_write_to_a_dictionary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "scale", Settings.scale)  # put back afterwards
    it, table = Settings(), {"a": object(), "b": None, "other": 1, "chain": {"a": object()}, "longer": {}}
    row, view = GuardRow(), types.MappingProxyType(ChainMap(table["chain"]))
    row.held(vars(Settings), {"scale": Settings.scale})
    row.held(vars(it), dict(vars(it)))
    row.held(table, {"a": table["a"], "b": None})
    row.held(view, dict(view))
    row.held(table["longer"], {}, 0)
    assert row.holds()
    table["other"] = 2  # another item of the same dictionary
    assert row.holds()
    assert row.holds()
    HELD[name](it, table)
    assert not row.holds()
    assert not row.holds()


def test_row_without_expectations_holds() -> None:
    assert GuardRow().holds()


def test_row_compares_a_tensor_learning_rate_by_address() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=rate, fused=True)
    row = GuardRow()
    NumbersGuard(optimizer).expect(row)
    assert row.holds()
    rate.fill_(0.2)  # live: the kernel reads it where it is
    assert row.holds()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    assert not row.holds()


@pytest.mark.parametrize("setter", ["set_growth_factor", "set_backoff_factor", "set_growth_interval"])
def test_row_knows_the_numbers_of_a_grad_scaler(setter: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    row = GuardRow()
    ScalerGuard(scaler).expect(row)
    assert row.holds()
    getattr(scaler, setter)(3)
    assert not row.holds()
