"""More of the random orders that the contract suite tries a few of."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import test_module_orders as orders

SEEDS = st.integers(0, 10**6)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=SEEDS)
def test_random_interleavings_equal_eager(device: torch.device, seed: int) -> None:
    orders.test_random_interleavings_equal_eager.hypothesis.inner_test(device, seed)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=SEEDS)
def test_random_steps_that_repeat_share_memory_by_order(device: torch.device, seed: int) -> None:
    orders.test_random_steps_that_repeat_share_memory_by_order.hypothesis.inner_test(device, seed)
