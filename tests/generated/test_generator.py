"""The generator itself: programs are reproducible, can be written and read, and failures are recognized."""

from __future__ import annotations

import ast
import faulthandler
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ROOT
from tests.generated import program as parts
from tests.generated.batch import run_all
from tests.generated.program import Condition, Event, Layer, Line, Optimizer, Program, Value, draw, literal
from tests.generated.shrink import shrink
from tests.generated.source import as_script, source

SMALL = Program(
    form="one",
    models=((Layer("Dense"),),),
    optimizers=(Optimizer("sgd"),),
    steps=((Line("zero"), Line("backward", form="square"), Line("step")),),
    order=(0,) * 6,
)


def test_draw_is_reproducible_from_its_seed() -> None:
    assert [draw(seed) for seed in range(20)] == [draw(seed) for seed in range(20)]
    assert len({draw(seed) for seed in range(20)}) == 20


@pytest.mark.parametrize("engine", ["capture", "stage"])
def test_source_of_each_program_is_python(engine: str) -> None:
    for seed in range(60):
        ast.parse(source(draw(seed, engine)))


def test_literal_is_the_program() -> None:
    names = vars(parts)
    for seed in range(40):
        assert eval(literal(draw(seed)), dict(names)) == draw(seed)


def test_each_kind_of_event_line_and_result_is_drawn() -> None:
    programs = [draw(seed) for seed in range(1000)]
    assert {event.kind for p in programs for event in p.events} == set(parts.EVENTS)
    assert {p.result for p in programs} == set(parts.RESULTS)
    assert {layer.kind for p in programs for net in p.models for layer in net} == {*parts.LAYERS, *parts.READING}
    assert {optimizer.kind for p in programs for optimizer in p.optimizers} == set(parts.OPTIMIZERS)


def test_shrink_keeps_what_fails() -> None:
    """A failure that needs one event and one line is left with these."""

    def judge(program: Program) -> dict[str, Any]:
        lines = [line.kind for line in program.steps[0]]
        fails = "clip" in lines and any(event.kind == "lr" for event in program.events)
        return {"outcome": "different" if fails else "equal"}

    line = Line("clip", condition=Condition(0))
    large = replace(
        SMALL,
        models=((Layer("Tied"), Layer("Scaled", 0)),),
        steps=((*SMALL.steps[0], line),),
        values=(Value("dict", "period", (2, 0)),),
        events=(Event("buffer"), Event("lr", ("every", 3, 1)), Event("mode")),
        scaler="enabled",
    )
    found, outcome = shrink(large, {"outcome": "different"}, judge)
    assert outcome == {"outcome": "different"}
    assert found.steps == ((Line("clip"),),)
    assert [event.kind for event in found.events] == ["lr"]
    assert found.models == ((Layer("Dense"),),)
    assert len(found.order) == 1


def test_run_all_reports_how_processes_end() -> None:
    def kill() -> dict[str, Any]:
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
        return {}

    def circle() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGXCPU)
        return {}

    def fail() -> dict[str, Any]:
        raise ValueError("no")

    jobs = {"good": lambda: {"outcome": "equal"}, "kill": kill, "circle": circle, "fail": fail}
    outcomes = {key: found["outcome"] for key, found in run_all(iter(jobs.items()), 2)}
    assert outcomes == {"good": "equal", "kill": "killed", "circle": "timeout", "fail": "broken"}


def test_script_shows_a_difference(tmp_path: Path) -> None:
    """With a capture that runs no step, every program differs."""
    file = tmp_path / "script.py"
    broken = as_script(SMALL, "capture").replace(
        "stepgraph.capture(function, **options)", "stepgraph.capture(lambda x: x.sum(), **options)"
    )
    outcomes = []
    for text in (as_script(SMALL, "capture"), broken):
        file.write_text(text)
        command = [sys.executable, str(file)]
        ended = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
        )
        outcomes.append(ast.literal_eval(ended.stdout)["outcome"])
    assert outcomes == ["equal", "different"]
