"""Replays on several streams: in order within a session, beside each other in two.

The first stream sleeps before its replay, as in torch's `test_graph_concurrent_replay`, so that the second one has its
work queued by the time that the first one's begins.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import stepgraph

pytestmark = pytest.mark.gpu

SIZE = 1_000_000
SHORT, LONG = 10_000_000, 2_000_000_000
"""Cycles to sleep: some milliseconds, about a second."""
WARM = 3
Call = Callable[[torch.Tensor], torch.Tensor]


def with_temporaries(value: float) -> Call:
    """Every intermediate result is memory that another graph of the pool may use, too; all numbers are exact."""

    def step(t: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = t.clone() + value
            y = t.clone() + value
            t = x + y
        return t

    return step


def drawing(value: float) -> Call:
    return lambda t: t + value * torch.rand_like(t)


def captured(function: Call, session: stepgraph.Session | None, sample: torch.Tensor) -> Call:
    step = stepgraph.capture(function, session=session, warmup=1, audit=False)  # an audit waits for the device
    for _ in range(WARM):
        step(sample)
    return step


def as_module(function: Call, session: stepgraph.Session | None, sample: torch.Tensor) -> Call:
    class Work(nn.Module):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return function(t)

    model = nn.Sequential(Work())
    stepgraph.graph_modules(model, scope=["0"], session=session, warmup=1)
    with torch.no_grad():
        for _ in range(WARM):
            model(sample)
    return torch.no_grad()(model)


def as_callable(function: Call, session: stepgraph.Session | None, sample: torch.Tensor) -> Call:
    class Work(nn.Module):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return function(t)

    return torch.no_grad()(stepgraph.make_graphed_callables(Work(), (sample,), pool=session))


def at_once(calls: tuple[Call, Call], inputs: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Two calls on two streams that both begin when the sleep is over."""
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(SHORT)
        streams[1].wait_stream(streams[0])
    results = []
    for stream, call, x in zip(streams, calls, inputs, strict=True):
        with torch.cuda.stream(stream):
            results.append(call(x))
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("way", [captured, as_module, as_callable])
@pytest.mark.parametrize("sessions", ["one session", "two sessions"])
def test_streams_give_each_call_its_own_results(way: Callable[..., Call], sessions: str) -> None:
    functions = (with_temporaries(1.0), with_temporaries(2.0))
    sample = torch.ones(SIZE, device="cuda")
    shared = stepgraph.Session() if sessions == "one session" else None
    first, second = (way(function, shared or stepgraph.Session(), sample) for function in functions)
    inputs = (torch.full_like(sample, 3.0), torch.full_like(sample, 5.0))
    expected = [function(x) for function, x in zip(functions, inputs, strict=True)]
    for _ in range(5):
        for one, two in zip(at_once((first, second), inputs), expected, strict=True):
            assert torch.equal(one, two)


def test_streams_share_one_step() -> None:
    function, sample = with_temporaries(1.0), torch.ones(SIZE, device="cuda")
    with stepgraph.capture(function, warmup=1) as step:
        for _ in range(WARM):
            step(sample)
        inputs = (torch.full_like(sample, 3.0), torch.full_like(sample, 5.0))
        for _ in range(5):
            one, two = at_once((step, step), inputs)
            assert torch.equal(one, function(inputs[0]))
            assert torch.equal(two, function(inputs[1]))
        assert step.report().eager_calls == 1


@pytest.mark.parametrize("sessions", ["one session", "two sessions"])
def test_streams_draw_the_random_numbers_of_eager(sessions: str) -> None:
    """torch has one place on the device for where a generator is, and graphs of all sessions read it."""
    functions, sample = (drawing(1.0), drawing(2.0)), torch.ones(SIZE, device="cuda")
    shared = stepgraph.Session() if sessions == "one session" else None
    first, second = (captured(function, shared or stepgraph.Session(), sample) for function in functions)
    for seed in range(5):
        torch.manual_seed(seed)
        expected = [function(sample) for function in functions]
        torch.manual_seed(seed)
        for one, two in zip(at_once((first, second), (sample, sample)), expected, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("sessions", ["one session", "two sessions"])
def test_streams_wait_within_a_session_only(sessions: str) -> None:
    sample = torch.ones(SIZE, device="cuda")
    shared = stepgraph.Session() if sessions == "one session" else None
    first, second = (captured(with_temporaries(value), shared or stepgraph.Session(), sample) for value in (1.0, 2.0))
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    for stream, call in zip(streams, (first, second), strict=True):  # each stream has memory for results
        with torch.cuda.stream(stream):
            call(sample)
        torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(LONG)
        first(sample)
        slow = streams[0].record_event()
    with torch.cuda.stream(streams[1]):
        second(sample)
        quick = streams[1].record_event()
    quick.synchronize()
    assert slow.query() is (sessions == "one session")
    torch.cuda.synchronize()
