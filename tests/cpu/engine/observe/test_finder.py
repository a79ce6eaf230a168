"""What a step can reach: at any depth, bounded, and without tensors that have no data."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepgraph.engine.observe.finder import devices, is_compiled, reachable, spots_of


@pytest.mark.parametrize("make", [list, tuple, set, lambda items: dict(enumerate(items))])
def test_reachable_looks_at_the_first_items_of_a_large_container(make: Callable[[Any], Any]) -> None:
    weight, items = torch.ones(2), [object() for _ in range(20_000)]
    samples = make([weight, *items]) if make is not set else make(items)

    def step() -> None:
        print(samples, weight)

    found = list(reachable(step))
    assert sum(type(value) is object for value in found) <= 4096
    assert any(value is weight for value in found)


def test_devices_leave_out_meta_tensors() -> None:
    layer, shape = torch.nn.Linear(2, 2), torch.empty(2, device="meta")
    described = torch.nn.Linear(2, 2, device="meta")
    step = torch.optim.SGD(described.parameters(), lr=0.1)
    assert {device.type for device in devices(iter([shape, described, step, layer]))} == {"cpu"}
    assert not list(devices(iter([shape, described, step])))


def test_finder_finds_torchs_objects_at_any_depth() -> None:
    model, target = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler, own = torch.amp.GradScaler("cpu"), torch.ones(2)
    compiled = torch.compile(torch.sin, backend="eager")
    trainer = types.SimpleNamespace(
        config=types.SimpleNamespace(networks={"target": target}, functions=[compiled]),
        engine=types.SimpleNamespace(parts=[model, (own,)], plan=types.SimpleNamespace(scaler=scaler, late=scheduler)),
    )

    def step() -> Any:
        return trainer.config.networks, trainer.config.functions, trainer.engine.parts, trainer.engine.plan

    found = {id(value) for value in reachable(step)}
    assert found >= {id(value) for value in (model, target, optimizer, scheduler, scaler, own)}
    assert id(target[0]) not in found  # it is inside another one
    assert any(map(is_compiled, reachable(step)))


def test_finder_spells_containers_as_code_would() -> None:
    rows: list[Any] = []
    log = types.SimpleNamespace(tables={"loss": [rows]})
    step = lambda: log.tables["loss"][0].append(1)  # noqa: E731
    spots = spots_of(step)
    assert str(spots[id(rows)].label) == "log.tables['loss'][0]"
    assert str(spots[id(log.tables)].of("loss")) == "log.tables['loss']"
    assert str(spots[id(vars(log))].of("last")) == "log.last"
