"""Containers that a step changes: refused, or, where it stays eager, changed as without a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepgraph
from stepgraph import StepgraphWarning


def recur(state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    state["h"] = state["h"] * 0.5 + x
    return state["h"].sum()


def label(batch: dict[str, Any]) -> torch.Tensor:
    batch["logits"] = batch["x"] * 2
    return batch["logits"].sum()


def unpack(batch: dict[str, Any]) -> torch.Tensor:
    target = batch.pop("target")
    return (batch["x"] - target).sum()


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"strict": True, "on_error": "eager"}], ids=str)
def test_a_tensor_put_into_a_container_is_refused_at_the_first_call(
    options: dict[str, Any], device: torch.device
) -> None:
    with stepgraph.capture(recur, **options) as step:
        with pytest.raises(stepgraph.CaptureError, match=r"changes a container .*`state\['h'\]` is another") as caught:
            step({"h": torch.ones(2, device=device)}, torch.ones(2, device=device))
        assert caught.value.rule == "argument-changed"


def test_a_step_that_may_stay_eager_changes_the_callers_own_container(device: torch.device) -> None:
    state, expected = {"h": torch.ones(2, device=device)}, {"h": torch.ones(2, device=device)}
    with stepgraph.capture(recur, on_error="eager", warmup=2) as step:
        for index in range(6):
            x = torch.full((2,), float(index), device=device)
            if index == 2:  # where it would have been captured
                with pytest.warns(StepgraphWarning, match=r"(?s)`state\['h'\]` is another Tensor.*goes on in eager"):
                    result = step(state, x)
            else:
                result = step(state, x)
            assert result.equal(recur(expected, x))
            assert state["h"].equal(expected["h"])
        report = step.report()
        assert report.replays == 0
        assert report.eager_reasons == {"warm-up": 2, "capture failed: [argument-changed]": 4}


def test_a_key_that_a_step_adds_is_there_where_it_may_stay_eager(device: torch.device) -> None:
    with stepgraph.capture(label, on_error="eager", warmup=2) as step:
        for index in range(4):
            batch = {"x": torch.full((2,), float(index), device=device)}
            if index == 2:
                with pytest.warns(StepgraphWarning, match=r"`batch\['logits'\]` was added"):
                    step(batch)
            else:
                step(batch)
            assert batch["logits"].tolist() == [2.0 * index] * 2


@pytest.mark.parametrize("on_error", ["raise", "eager"])
def test_a_key_that_a_step_takes_out_is_in_no_ones_way(on_error: str, device: torch.device) -> None:
    with stepgraph.capture(unpack, on_error=on_error) as step:
        for index in range(6):
            x = torch.full((2,), float(index), device=device)
            assert step({"x": x, "target": torch.ones(2, device=device)}).item() == 2.0 * index - 2
        assert step.report().replays == 3


def test_calls_past_the_limit_change_the_callers_own_container(device: torch.device) -> None:
    """They are eager from the first one on, and nobody looks what they do."""

    def step(state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            state["h"] = x.sum()
        return x.mean() + state["h"]

    with stepgraph.capture(step, max_graphs=1) as captured:
        for _ in range(5):
            captured({"h": torch.zeros((), device=device)}, torch.ones(2, device=device))
        assert captured.report().replays == 2
        state = {"h": torch.zeros((), device=device)}
        with pytest.warns(StepgraphWarning, match="max_graphs"):
            assert captured(state, torch.ones(3, device=device)).item() == 4
        assert state["h"].item() == 3
