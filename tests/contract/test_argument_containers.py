"""Containers that a step changes: refused, or, where it stays eager, changed as without a capture."""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from torch.utils import _pytree as torch_pytree

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
def test_container_given_a_new_tensor_is_refused_at_first_call(options: dict[str, Any], device: torch.device) -> None:
    with stepgraph.capture(recur, **options) as step:
        with pytest.raises(
            stepgraph.CaptureError, match=r"changes a container .*`state\['h'\]` was replaced"
        ) as caught:
            step({"h": torch.ones(2, device=device)}, torch.ones(2, device=device))
        assert caught.value.rule == "argument-changed"


@dataclasses.dataclass
class Batch:
    """A batch that may be given more attributes."""

    x: torch.Tensor

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)


class Named(dict[str, Any]):
    """A dict of the user's own class."""


class Fields(UserDict[str, torch.Tensor]):
    """Tensors by name, registered with torch's pytree."""


torch_pytree.register_pytree_node(
    Fields,
    lambda fields: (list(fields.values()), list(fields)),
    lambda values, names: Fields(zip(names, values, strict=True)),
)


class Label(torch.nn.Module):
    """The step as a module."""

    def forward(self, batch: Any) -> torch.Tensor:
        return label(batch)


def batch_of(kind: str, x: torch.Tensor) -> Any:
    return Batch(x) if kind == "dataclass" else {"dict": dict, "subclass": Named, "pytree": Fields}[kind](x=x)


@pytest.mark.parametrize("kind", ["dict", "subclass", "pytree", "dataclass"])
def test_something_new_in_a_container_is_refused_or_there(kind: str, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with stepgraph.capture(label) as step, pytest.raises(stepgraph.CaptureError) as caught:
        step(batch_of(kind, x))
    assert caught.value.rule == "argument-changed"
    with pytest.raises(stepgraph.CaptureError) as caught:
        stepgraph.make_graphed_callables(Label().to(device), (batch_of(kind, x),))
    assert caught.value.rule == "argument-changed"
    model = torch.nn.Sequential(Label()).to(device)
    with stepgraph.graph_modules(model, scope=["0"], warmup=1) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            batch = batch_of(kind, x)
            model[0](batch)
            assert batch["logits"].tolist() == [2.0] * 2
        assert "capture failed: [argument-changed]" in handle.report().rows[0].eager_reasons


def test_a_key_that_only_the_recording_adds_is_refused(device: torch.device) -> None:
    def step(batch: dict[str, Any]) -> torch.Tensor:
        if stepgraph.is_graph_capturing():
            batch["seen"] = 1
        return batch["x"] * 2

    with stepgraph.capture(step, warmup=1) as captured:
        captured({"x": torch.ones(2, device=device)})
        with pytest.raises(stepgraph.CaptureError, match=r"`batch\['seen'\]` was added"):
            captured({"x": torch.ones(2, device=device)})


def test_container_of_the_caller_changes_if_the_step_stays_eager(device: torch.device) -> None:
    state, expected = {"h": torch.ones(2, device=device)}, {"h": torch.ones(2, device=device)}
    with stepgraph.capture(recur, on_error="eager", warmup=2) as step:
        for index in range(6):
            x = torch.full((2,), float(index), device=device)
            if index == 2:  # where it would have been captured
                with pytest.warns(
                    StepgraphWarning, match=r"(?s)`state\['h'\]` was replaced by a new Tensor.*goes on in eager"
                ):
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
