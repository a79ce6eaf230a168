"""A line that writes while a step or module is recorded is named once, and so is a step that is defined anew."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.core.errors import StepgraphWarning
from stepgraph.engine.observe.output import Output

LOG = logging.getLogger("a user's")


def said(call: Callable[[], Any]) -> list[str]:
    """What a call warns of, as to writes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if "[host-print]" in str(each.message)]


def times(step: Callable[..., Any], count: int, device: torch.device) -> None:
    for _ in range(count):
        step(torch.ones(3, device=device))


def test_print_in_a_step_is_named_once(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    def train_step(x: torch.Tensor) -> torch.Tensor:
        print("shape", x.shape)
        sys.stderr.write("stderr\n")
        return x * 2

    step = stepgraph.capture(train_step, audit=2)
    before = sys.stdout.write, sys.stderr.write
    found = said(lambda: times(step, 12, device))
    assert (sys.stdout.write, sys.stderr.write) == before
    assert "write" not in vars(sys.stdout)
    assert len(found) == 1
    assert 'in train_step: `print("shape", x.shape)`' in found[0]
    assert r'in train_step: `sys.stderr.write("stderr\n")`' in found[0]
    assert "Fix: return the value from the step" in found[0]
    assert step.audits > 0
    output = capsys.readouterr()
    assert output.out.count("shape") == 4 + step.audits  # warm-up, capture, audits
    assert output.err.count("stderr") == 4 + step.audits


def test_message_of_a_logger_in_a_step_is_named(device: torch.device) -> None:
    handler = logging.StreamHandler(sys.stderr)
    LOG.addHandler(handler)
    try:
        step = stepgraph.capture(lambda x: (LOG.warning("loss"), x * 2)[1])
        found = said(lambda: times(step, 6, device))
        quiet = stepgraph.capture(lambda x: (LOG.debug("loss"), x * 2)[1])
        assert not said(lambda: times(quiet, 6, device))
    finally:
        LOG.removeHandler(handler)
    assert len(found) == 1
    assert f"{__file__}:" in found[0]


def test_step_that_prints_at_eager_calls_only_is_not_named(device: torch.device) -> None:
    def train_step(x: torch.Tensor) -> torch.Tensor:
        if not stepgraph.is_graph_capturing():
            print("eager")
        return x * 2

    step = stepgraph.capture(train_step, on_error="eager")
    assert not said(lambda: times(step, 6, device))


def test_text_of_a_python_warning_is_not_named(device: torch.device) -> None:
    """Python shows a warning once by itself. Here a function stands for the one that shows it, which pytest takes."""
    place: dict[str, Any] = {"sys": sys}
    file = Path(warnings.__file__)
    exec(compile("def show(text): sys.stderr.write(text)", str(file), "exec"), place)
    step = stepgraph.capture(lambda x: (place["show"]("a warning"), x * 2)[1])
    assert not said(lambda: times(step, 6, device))
    exec(compile("def show(text): sys.stderr.write(text)", str(file.with_name("pprint.py")), "exec"), place)
    step = stepgraph.capture(lambda x: (place["show"]("pretty"), x * 2)[1])
    assert len(said(lambda: times(step, 6, device))) == 1


def test_output_of_another_thread_is_not_named(device: torch.device) -> None:
    def train_step(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: print("progress"))
        other.start()
        other.join()
        return x * 2

    assert not said(lambda: times(stepgraph.capture(train_step), 6, device))


def test_streams_are_put_back_after_recordings_in_two_threads() -> None:
    one, two = Output().noticed(), Output().noticed()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    print("seen by the second")
    two.__exit__(None, None, None)
    assert "write" not in vars(sys.stdout)
    assert "write" not in vars(sys.stderr)


class Printing(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward")
        return super().forward(x)


def test_print_in_graphed_modules_is_named_once(device: torch.device) -> None:
    model = torch.nn.Sequential(Printing(3, 3), Printing(3, 3)).to(device)
    with stepgraph.graph_modules(model, scope=["0", "1"], warmup=1, audit=2) as handle:
        found = said(lambda: times(lambda x: model(x).sum().backward(), 8, device))
        assert handle.report().rows[0].forwards > 0
    assert len(found) == 1
    assert "Printing writes to stdout or stderr" in found[0]
    assert 'in forward: `print("forward")`' in found[0]


def test_streams_without_attributes_are_left_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slotted:
        __slots__ = ()

        def write(self, text: str) -> int:
            return len(text)

    monkeypatch.setattr(sys, "stdout", Slotted())
    monkeypatch.setattr(sys, "stderr", None)
    step = stepgraph.capture(lambda x: (print("x"), x * 2)[1])
    assert not said(lambda: times(step, 6, device))


# -- a step that is defined anew


def named(call: Callable[[], Any]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return sum("[defined-anew]" in str(each.message) for each in caught)


def step_of(model: torch.nn.Module) -> Any:
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    return stepgraph.capture(train_step, warmup=1)


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_step_that_is_defined_anew_is_named_once(epochs: int, device: torch.device) -> None:
    model = torch.nn.Linear(3, 3).to(device)

    def train() -> None:
        for _ in range(epochs):
            step = step_of(model)
            times(step, 4, device)

    assert named(train) == (epochs > 1)


def test_steps_beside_each_other_are_not_named(device: torch.device) -> None:
    models = [torch.nn.Linear(3, 3).to(device) for _ in range(3)]
    steps = [step_of(model) for model in (models[0], *models)]

    def train() -> None:
        for step in steps:
            times(step, 4, device)
        steps[0].reset()
        times(steps[0], 4, device)

    assert not named(train)


def test_steps_of_one_model_after_another_are_not_named(device: torch.device) -> None:
    def train() -> None:
        for _ in range(3):
            times(step_of(torch.nn.Linear(3, 3).to(device)), 4, device)

    assert not named(train)


def test_steps_that_are_closed_are_not_named(device: torch.device) -> None:
    model = torch.nn.Linear(3, 3).to(device)

    def train() -> None:
        for _ in range(3):
            with step_of(model) as step:
                times(step, 4, device)

    assert not named(train)


def test_comparison_of_a_step_is_no_new_definition(device: torch.device) -> None:
    model = torch.nn.Linear(3, 3).to(device)
    step = step_of(model)
    times(step, 4, device)

    def compare() -> None:
        for _ in range(2):
            copy = step.fresh_copy()
            times(copy, 4, device)
            del copy
            gc.collect()
        stepgraph.verify(step, [(torch.ones(3, device=device),)] * 4)

    assert not named(compare)


def test_warning_of_another_definition_is_a_stepgraph_warning(device: torch.device) -> None:
    model = torch.nn.Linear(3, 3).to(device)
    times(step_of(model), 4, device)
    with pytest.warns(StepgraphWarning, match="defined anew, and was captured a second time") as caught:
        times(step_of(model), 4, device)
    assert caught[0].filename == __file__
