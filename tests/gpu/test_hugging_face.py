"""Hugging Face's models as users train them: bit for bit as in eager, or the line that takes another path is named.

Their attention masks are made inside the step, by code that asks whether it is being captured. Where that leads to
other operations, a warning must say so and name the line. The results are then those of the other path: as right as
eager's, rounded differently.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import stepgraph
from tests.harness import Program, assert_same_history, run
from tests.hugging_face import MODELS, layers_of, program_of
from tests.seeding import seed

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu

CALLS = 10
DEVICE = torch.device("cuda")
OTHER_PATH = "[other-path]"
CLOSE, CLOSE_WITH_DROPOUT = 1e-3, 0.1
"""How far a loss on the other path may be from eager's, relative to it. Other kernels round otherwise, and Adam grows
what differs: ten steps of rounding stay below 1e-3. With dropout they also draw other masks: the losses are those of
another run of the same training."""


@contextmanager
def graphed(program: Program, way: str) -> Iterator[tuple[Any, Any]]:
    """The step to call, and what reports."""
    if way == "eager":
        yield program.step, None
    elif way == "whole step":
        with stepgraph.capture(program.step) as step:
            yield step, step
    else:
        (model,) = program.modules
        with stepgraph.graph_modules(model, layers_of(model)) as handle:
            yield program.step, handle


def train(name: str, way: str, *, dropout: bool) -> tuple[list[Any], int, list[str]]:
    """The history of a training, how often it replayed, and what it warned of."""
    seed(7)
    program = program_of(name, CALLS, dropout=dropout)(DEVICE)
    seed(11)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with graphed(program, way) as (step, handle):
            history = run(program, step, DEVICE)
            replays = handle.report().replays if handle is not None else 0
    told = [str(warning.message) for warning in caught if issubclass(warning.category, stepgraph.StepgraphWarning)]
    return history, replays, told


def losses_of(history: list[Any]) -> torch.Tensor:
    return torch.stack([results[0] for results, _ in history]).double().cpu()


def assert_line_is_named(told: list[str], what: str) -> None:
    for text in told:
        assert re.search(r"\S+\.py:\d+", text), f"{what}: {OTHER_PATH} names no line: {text}"


@pytest.mark.parametrize("way", ["whole step", "by layer"])
@pytest.mark.parametrize("dropout", [False, True], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_equals_eager_or_names_the_line(name: str, way: str, *, dropout: bool) -> None:
    what = f"{name}, {way}"
    expected, *_ = train(name, "eager", dropout=dropout)
    again, *_ = train(name, "eager", dropout=dropout)
    assert_same_history(expected, again, f"{name}: eager differs from eager")
    received, replays, told = train(name, way, dropout=dropout)
    assert replays > 0, f"{what}: nothing was replayed; warnings: {told}"
    elsewhere = [text for text in told if OTHER_PATH in text]
    if not elsewhere:
        assert_same_history(expected, received, f"{what}: no {OTHER_PATH} was given, so all bits must be eager's")
        print(f"{what}: equal to eager bit for bit, {replays} replays")
        return
    assert_line_is_named(elsewhere, what)
    bound = CLOSE_WITH_DROPOUT if dropout else CLOSE
    one, two = losses_of(expected), losses_of(received)
    gap = ((one - two).abs() / one.abs()).max().item()
    assert gap <= bound, f"{what}: {OTHER_PATH} was given, and the losses are {gap:.2g} apart: {one} and {two}"
    print(f"{what}: {OTHER_PATH}, losses within {gap:.2g} of eager's, {replays} replays: {elsewhere[0]}")
