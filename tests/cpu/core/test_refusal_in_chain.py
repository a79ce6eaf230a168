"""A refusal that a library has put into an exception of its own is found, and shown with its rule, line and fix."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import stepgraph
from stepgraph.commands.cli import app
from stepgraph.core.errors import refusal_in
from stepgraph.tools.script.child import script_traceback

REFUSED = stepgraph.InvalidArgument("no", rule="option", why="why.", fix="fix.")


class LibraryError(Exception):
    """What a library raises for whatever goes wrong in the code that it calls."""


def wrapped(read: Any, *, how: str) -> float:
    try:
        return float(read())
    except Exception as error:
        if how == "cause":
            raise LibraryError("the training step failed") from error
        if how == "context":
            raise LibraryError("the training step failed")  # noqa: B904 (as libraries do)
        raise LibraryError("the training step failed") from None


@pytest.mark.parametrize("how", ["cause", "context"])
def test_refusal_in_finds_a_wrapped_refusal(how: str) -> None:
    def refuse() -> float:
        raise REFUSED

    with pytest.raises(LibraryError) as caught:
        wrapped(lambda: wrapped(refuse, how=how), how=how)
    assert refusal_in(caught.value) is REFUSED


def test_refusal_in_finds_nothing_that_was_hidden_or_in_a_circle() -> None:
    def refuse() -> float:
        raise REFUSED

    with pytest.raises(LibraryError) as caught:
        wrapped(refuse, how="hidden")
    assert refusal_in(caught.value) is None
    one, two = LibraryError("one"), LibraryError("two")
    one.__cause__, two.__cause__ = two, one
    assert refusal_in(one) is None
    assert refusal_in(None) is None


@pytest.mark.parametrize("how", ["cause", "context"])
def test_capture_shows_a_refusal_that_the_step_wrapped(how: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * wrapped(lambda: x.sum().item(), how=how)

    captured = stepgraph.capture(step)
    with pytest.raises(stepgraph.CaptureError) as caught:
        for _ in range(5):
            captured(torch.ones(3))
    assert caught.value.rule == "host-read"
    assert caught.value.where is not None
    assert ".item()" in caught.value.where.source


def test_modules_count_a_refusal_that_the_module_wrapped() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * wrapped(lambda: x.sum().item(), how="cause")

    model = nn.Sequential(Reads(3, 3))
    x = torch.ones(2, 3)
    with stepgraph.graph_modules(model, scope=["0"]) as handle:
        for _ in range(3):
            model(x).sum().backward()
        with pytest.warns(stepgraph.StepgraphWarning, match=r"\.item\(\)"):
            model(x)
        (row,) = handle.report().rows
    assert "capture failed: [host-read]" in row.eager_reasons


@pytest.mark.parametrize("how", ["cause", "context"])
def test_script_traceback_ends_with_a_wrapped_refusal(how: str) -> None:
    def refuse() -> float:
        raise REFUSED

    with pytest.raises(LibraryError) as caught:
        wrapped(refuse, how=how)
    text = script_traceback(caught.value)
    assert text.endswith(f"InvalidArgument: {REFUSED}")
    assert "LibraryError: the training step failed" in text
    assert script_traceback(REFUSED).count(str(REFUSED)) == 1


def test_command_reports_a_wrapped_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        try:
            raise REFUSED
        except stepgraph.StepgraphError as error:
            raise LibraryError("the library's") from error

    monkeypatch.setattr("stepgraph.commands.explain.explain_text", refuse)
    result = CliRunner().invoke(app, ["explain", "901", "--json"])
    assert isinstance(result.exception, SystemExit)
    assert json.loads(result.stdout)["error"]["rule"] == "option"
