"""More of the random orders that the contract suite tries a few of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import test_module_orders as orders

SEEDS = st.integers(0, 10**6)
FEW, MANY = (
    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    for count in (8, 40)
)


def interleaved(device: torch.device, seed: int) -> None:
    orders.test_random_interleavings_equal_eager.hypothesis.inner_test(device, seed)


def repeated(device: torch.device, seed: int) -> None:
    orders.test_random_steps_that_repeat_share_memory_by_order.hypothesis.inner_test(device, seed)


@FEW
@given(seed=SEEDS)
def test_random_interleavings_equal_eager(device: torch.device, seed: int) -> None:
    interleaved(device, seed)


@FEW
@given(seed=SEEDS)
def test_random_steps_that_repeat_share_memory_by_order(device: torch.device, seed: int) -> None:
    repeated(device, seed)


@pytest.mark.long
@pytest.mark.timeout(400)
@MANY
@given(seed=SEEDS)
def test_more_random_interleavings_equal_eager(device: torch.device, seed: int) -> None:
    interleaved(device, seed)


@pytest.mark.long
@pytest.mark.timeout(400)
@MANY
@given(seed=SEEDS)
def test_more_random_steps_share_memory_by_order(device: torch.device, seed: int) -> None:
    repeated(device, seed)
