"""A runner's states: one table of transitions, and graphs that are freed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.core.errors import StaleMemoryError
from stepgraph.engine.record.pair.runner import _TRANSITIONS, Runner, RunnerState


def replayed() -> tuple[stepgraph.GraphedModules, Runner, Callable[[], torch.Tensor]]:
    """A graphed layer that is ready, its runner, and a call of it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    handle = stepgraph.graph_modules(model, "0", warmup=1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    (runner,) = [r for m in handle._shared.managers for site in m.sites.values() for r in site.runners]
    return handle, runner, lambda: model(torch.ones(2, 4))


def test_runner_states_have_a_row_each_and_freed_is_the_last() -> None:
    assert set(_TRANSITIONS) == set(RunnerState)
    assert set(_TRANSITIONS[RunnerState.FREED]) == {RunnerState.FREED}


def test_runner_is_ready_for_the_backward_between_the_passes() -> None:
    handle, runner, call = replayed()
    with handle:
        assert runner.state is RunnerState.FWD_READY
        result = call()
        assert runner.state is RunnerState.BWD_READY
        assert runner.is_live()
        result.sum().backward()
        del result
        assert runner.state is RunnerState.FWD_READY
        assert not runner.is_live()


@pytest.mark.parametrize("ends", [lambda result: result.sum().backward(), lambda result: None])
def test_runner_retired_in_a_call_is_freed_after_it(ends: Callable[[Any], None]) -> None:
    handle, runner, call = replayed()
    with handle:
        result = call()
        handle.reset()
        assert runner.state is RunnerState.RETIRED
        assert handle._shared.session.num_graphs == 2
        ends(result)
        del result
        assert runner.state is RunnerState.FREED
        assert handle._shared.session.num_graphs == 0
        assert not runner.can_take([])


def test_runner_freed_in_a_call_refuses_the_backward() -> None:
    handle, runner, call = replayed()
    with handle:
        result = call()
        runner.free()
        runner.retire()
        runner.free()
        assert runner.is_freed
        with pytest.raises(StaleMemoryError, match="whose graphs were freed"):
            result.sum().backward()
        del result
        assert runner.state is RunnerState.FREED
        assert not runner.lane.is_busy
