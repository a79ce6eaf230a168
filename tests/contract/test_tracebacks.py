"""The traceback of a refusal: the user's line comes last, with at most one frame of the engine."""

import itertools
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import torch

import stepgraph
from stepgraph import StepgraphError

ENGINE = str(Path(stepgraph.__file__).parent)


def refused(call: Callable[[], object]) -> StepgraphError:
    with pytest.raises(StepgraphError) as caught:
        call()
    return caught.value


def engine_frames(trace: TracebackType | None) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(trace) if frame.filename.startswith(ENGINE)]


def last_line(error: StepgraphError) -> str:
    """The last line of the traceback that is in this file."""
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    return lines[-1] or ""


def host_read(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def closed_step(x: torch.Tensor) -> None:
    step = stepgraph.capture(lambda x: x * 2)
    step(x)
    step.close()
    step(x)


def known_failure(x: torch.Tensor) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if stepgraph.is_graph_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return x * 2

    captured = stepgraph.capture(step)
    for _ in range(4):
        captured(x)


def host_reading_step(x: torch.Tensor) -> None:
    step = stepgraph.capture(host_read)
    for _ in range(4):
        step(x)


def another_shape(x: torch.Tensor) -> None:
    graphed = stepgraph.make_graphed_callables(lambda x: x * 2, (x.clone().requires_grad_(),))
    graphed(x[:1])


def backward_after_reset(x: torch.Tensor) -> None:
    graphed = stepgraph.make_graphed_callables(lambda x: x * x, (x.clone().requires_grad_(),))
    result = graphed(x.clone().requires_grad_())
    graphed.reset()
    result.backward(x)


def strict_module(x: torch.Tensor) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to(x.device)
    stepgraph.graph_modules(model, ["0"], strict=True, max_signatures=1)
    model(x)
    model(x[:1])


REFUSALS: list[tuple[Callable[[torch.Tensor], object], str]] = [
    (lambda x: stepgraph.capture(host_read, warmup=-1), "warmup=-1"),
    (lambda x: stepgraph.graph_modules(torch.nn.Linear(4, 4), ["nope"]), "graph_modules(torch.nn.Linear"),
    (lambda x: stepgraph.make_graphed_callables([], ()), "make_graphed_callables([], ())"),
    (lambda x: stepgraph.order.validate_order([1, -1, -1]), "validate_order([1, -1, -1])"),
    (lambda x: stepgraph.backend_for("meta"), 'backend_for("meta")'),
    (closed_step, "step(x)"),
    (host_reading_step, "return x * x.sum().item()"),
    (known_failure, "raise RuntimeError("),
    (another_shape, "graphed(x[:1])"),
    (backward_after_reset, "result.backward(x)"),
    (strict_module, "model(x[:1])"),
]


@pytest.mark.parametrize(("call", "line"), REFUSALS)
def test_refusal_ends_at_the_users_line(
    device: torch.device, call: Callable[[torch.Tensor], object], line: str
) -> None:
    error = refused(lambda: call(torch.ones(2, 4, device=device)))
    assert len(engine_frames(error.__traceback__)) <= 1
    assert line in last_line(error)
    if error.__cause__ is not None:
        assert len(engine_frames(error.__cause__.__traceback__)) <= 1


def test_full_traceback_is_kept_on_demand(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_FULL_TRACEBACK", "1")
    error = refused(lambda: host_reading_step(torch.ones(2, device=device)))
    assert len(engine_frames(error.__traceback__)) > 2
    assert error.__cause__ is not None


def test_error_of_the_users_own_stays_whole(device: torch.device) -> None:
    def raises_at_capture(x: torch.Tensor) -> torch.Tensor:
        if stepgraph.is_graph_capturing():
            raise ValueError("mine")
        return x * 2

    step = stepgraph.capture(raises_at_capture)
    x = torch.ones(2, device=device)
    error = refused(lambda: [step(x) for _ in range(4)])
    assert error.rule == "step-raised"
    assert engine_frames(error.__traceback__) == []
    cause = error.__cause__
    assert isinstance(cause, ValueError)
    assert len(engine_frames(cause.__traceback__)) > 2
    assert traceback.extract_tb(cause.__traceback__)[-1].line == 'raise ValueError("mine")'


class _Counting:
    def __init__(self) -> None:
        self.steps, self.table, self.history = 0, {"n": 0}, [0]

    def attribute(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1  # the line
        return x * 2

    def item(self, x: torch.Tensor) -> torch.Tensor:
        self.table["n"] += 1  # the line
        return x * 2

    def list(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(1)  # the line
        return x * 2

    def result(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        time.sleep(0)
        return x * 2, next(_NUMBERS)  # the line


_NUMBERS = itertools.count()


@pytest.mark.parametrize(
    ("method", "rule"),
    [("attribute", "host-value"), ("item", "host-value"), ("list", "host-value"), ("result", "varying-output")],
)
def test_error_of_a_changing_value_names_the_line(method: str, rule: str, device: torch.device) -> None:
    step = stepgraph.capture(getattr(_Counting(), method), ignore=["_NUMBERS"])
    with step, pytest.raises(stepgraph.CaptureError) as caught:
        for _ in range(8):
            step(torch.ones(2, device=device))
    assert caught.value.rule == rule
    assert caught.value.where is not None
    assert (caught.value.where.file, caught.value.where.function) == (__file__, method)
    assert caught.value.where.source.endswith("# the line")
