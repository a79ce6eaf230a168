"""Sessions: one owner of graphs and pool, closed once, in any way a program ends."""

import gc
import weakref
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.core.errors import ClosedError, InvalidArgument
from stepgraph.engine.backends.tape.mode import TapeBackend


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def called(step: Any, times: int = 3) -> list[float]:
    return [step(torch.full((2,), float(i))).sum().item() for i in range(times)]


EXPECTED = [2.0, 4.0, 6.0]


def test_session_is_shared_by_steps() -> None:
    with stepgraph.Session() as session:
        steps = [stepgraph.capture(f, session=session, warmup=1) for f in (plus_one, lambda x: x + 1)]
        for step in steps:
            assert called(step) == EXPECTED
        assert steps[0].report().pool_bytes == steps[1].report().pool_bytes == session.pool_bytes() > 0


def test_session_outlives_a_step_that_is_closed() -> None:
    with stepgraph.Session() as session:
        one, two = (stepgraph.capture(f, session=session, warmup=1) for f in (plus_one, lambda x: x + 1))
        called(one)
        called(two)
        one.close()
        assert not session.closed
        assert called(two) == EXPECTED
        with pytest.raises(ClosedError):
            one(torch.ones(2))


def test_session_closes_twice() -> None:
    session = stepgraph.Session()
    called(stepgraph.capture(plus_one, session=session, warmup=1))
    session.close()
    session.close()
    assert session.closed
    assert session.pool_bytes() == 0


def test_session_closed_before_use_closes() -> None:
    session = stepgraph.Session()
    session.close()
    assert session.closed


@pytest.mark.parametrize("calls", [0, 1, 3], ids=["never called", "warming up", "captured"])
def test_session_closed_refuses_its_steps(calls: int) -> None:
    session = stepgraph.Session()
    step = stepgraph.capture(plus_one, session=session, warmup=2)
    called(step, calls)
    session.close()
    with pytest.raises(ClosedError) as caught:
        step(torch.ones(2))
    assert caught.value.rule == "closed"
    assert caught.value.why
    assert caught.value.fix
    step.close()


def test_session_closed_refuses_its_stream() -> None:
    session = stepgraph.Session(backend="tape")
    with session.stream():
        pass
    session.close()
    with pytest.raises(ClosedError, match="session was closed"):
        session.stream()


def test_step_closes_twice_and_refuses_calls() -> None:
    step = stepgraph.capture(plus_one, warmup=1)
    called(step)
    step.close()
    step.close()
    with pytest.raises(ClosedError) as caught:
        step(torch.ones(2))
    assert "plus_one" in caught.value.what
    assert "capture" in caught.value.fix


def test_step_with_closes_also_after_an_exception() -> None:
    with pytest.raises(KeyError), stepgraph.capture(plus_one, warmup=1) as step:
        called(step)
        raise KeyError
    with pytest.raises(ClosedError):
        step(torch.ones(2))


def test_step_reset_captures_again() -> None:
    with stepgraph.capture(plus_one, warmup=1) as step:
        called(step)
        step.reset()
        assert step.report().graphs == 0
        assert called(step) == EXPECTED
        assert step.report().captures == 2


def test_sessions_live_side_by_side() -> None:
    one, two = stepgraph.Session(), stepgraph.Session()
    first = stepgraph.capture(plus_one, session=one, warmup=1)
    second = stepgraph.capture(plus_one, session=two, warmup=1)
    assert called(first) == called(second) == EXPECTED
    one.close()
    assert called(second) == EXPECTED
    assert two.pool_bytes() > 0
    two.close()


def test_session_gives_graphs_back_when_it_is_dropped() -> None:
    class Tracked(TapeBackend):
        def workspace(self) -> Any:
            made = super().workspace()
            spaces.append(weakref.ref(made))
            return made

    spaces: list[weakref.ref[Any]] = []
    session = stepgraph.Session(backend=Tracked())
    step = stepgraph.capture(plus_one, session=session, warmup=1)
    called(step)
    assert spaces[0]() is not None
    del step, session
    gc.collect()
    assert spaces[0]() is None


def test_session_refuses_a_step_of_another_backend() -> None:
    class Elsewhere(TapeBackend):
        def __init__(self) -> None:
            self.device = torch.device("meta")

    session = stepgraph.Session(backend="tape")
    step = stepgraph.capture(plus_one, session=session, backend=Elsewhere())
    with pytest.raises(InvalidArgument) as caught:
        step(torch.ones(2))
    error = caught.value
    assert error.rule == "backend"
    assert "cpu (tape)" in error.what
    assert "meta (tape)" in error.what
    assert error.why
    assert "Session" in error.fix


def test_session_refuses_an_unknown_backend() -> None:
    with pytest.raises(InvalidArgument, match="unknown backend"):
        stepgraph.Session(backend="cudda")
