"""Any order of any chunks, weight gradients split off or not: callables captured for it equal eager in every bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.callables_harness import Rank, assert_rank_equals_eager
from tests.cpu.engine.order.drawn import Drawn, orders

ANY = {
    "drawn": orders(),
    "reuse": st.sampled_from([True, True, False]),
    "zero": st.sampled_from(["none", "zero", "never"]),
}


@given(**ANY)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_callables_of_any_order_equal_eager(drawn: Drawn, reuse: bool, zero: str) -> None:
    check(drawn, reuse, zero)


@pytest.mark.long
@pytest.mark.timeout(400)
@given(**ANY)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_callables_of_more_orders_equal_eager(drawn: Drawn, reuse: bool, zero: str) -> None:
    check(drawn, reuse, zero)


def check(drawn: Drawn, reuse: bool, zero: str) -> None:
    assume(all(drawn.layers) and sum(drawn.layers) * drawn.num_microbatches <= 16)
    rank = assert_rank_equals_eager(
        lambda: Rank(torch.device("cpu"), drawn.order, drawn.layers, zero=zero),
        steps=3,
        reuse_buffers=reuse,
        num_warmup_iters=1,
    )
    assert rank.graphed is not None
    report = rank.graphed[0].report()
    assert report.forwards == report.backwards == 3 * report.num_samples
    rank.graphed[0].reset()
