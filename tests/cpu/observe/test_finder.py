"""What a step can reach: bounded, and without tensors that have no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepgraph.observe.finder import devices, reachable


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
