"""A tensor that a step makes and leaves somewhere would be the graph's own: refused, with the place by name."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager


class Shadow:
    """An average of parameters, in one of two ways."""

    def __init__(self, model: nn.Module, *, in_place: bool) -> None:
        self.in_place = in_place
        self.kept = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if self.in_place:
                self.kept[name].lerp_(parameter.detach(), 0.1)
            else:
                self.kept[name] = self.kept[name].lerp(parameter.detach(), 0.1)


class Trainer:
    """Keeps what it makes two levels down."""

    def __init__(self, device: torch.device, *, in_place: bool = True) -> None:
        self.model = nn.Linear(3, 2).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.shadow = Shadow(self.model, in_place=in_place)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.shadow.update(self.model)
        return loss


def test_kept_average_of_parameters_is_refused_by_name(device: torch.device) -> None:
    trainer = Trainer(device, in_place=False)
    x = torch.ones(4, 3, device=device)
    with stepgraph.capture(trainer.step) as step, pytest.raises(stepgraph.CaptureError) as told:
        for _ in range(5):
            step(x)
    assert told.value.rule == "host-value"
    assert "the step itself changes self.shadow.kept['weight']" in told.value.what
    assert "self.shadow.kept['bias']" in told.value.fix
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_kept_average_that_is_known_to_be_harmless_is_let_pass(device: torch.device) -> None:
    trainer = Trainer(device, in_place=False)
    x = torch.ones(4, 3, device=device)
    with stepgraph.capture(trainer.step, ignore=["self.shadow.kept"]) as step:
        for _ in range(6):
            step(x)
        assert step.report().replays >= 2


def test_kept_tensor_that_is_known_to_be_harmless_is_let_pass(device: torch.device) -> None:
    trainer = Trainer(device)
    seen: dict[str, torch.Tensor] = {}

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = trainer.step(x)
        seen["loss"] = loss.detach()
        return loss

    x = torch.ones(4, 3, device=device)
    with stepgraph.capture(train, ignore=["seen", "seen['loss']"]) as step:
        for _ in range(5):
            step(x)
        assert step.report().replays == 2


def test_kept_average_changed_in_place_equals_eager(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        trainer = Trainer(device)
        batches = [(torch.randn(4, 3, device=device),) for _ in range(8)]
        return Program(
            trainer.step, batches, [trainer.model], [trainer.optimizer], tensors=list(trainer.shadow.kept.values())
        )

    assert_captured_equals_eager(build, device)


class Log:
    """What past calls have left, some levels down."""

    def __init__(self) -> None:
        self.queue: Any = collections.deque(maxlen=4)
        self.rows: list[dict[str, torch.Tensor]] = []
        self.last: torch.Tensor | None = None
        self.weak: Any = weakref.WeakKeyDictionary()
        self.remember = self.remembering()

    def remembering(self) -> Callable[[torch.Tensor], None]:
        last: torch.Tensor | None = None

        def remember(x: torch.Tensor) -> None:
            nonlocal last
            last = x

        return remember


PLACES: dict[str, tuple[Callable[[Log, torch.Tensor], Any], str]] = {
    "a queue": (lambda log, x: log.queue.append(x), "self.inner['log'].queue"),
    "a row of a table": (lambda log, x: log.rows.append({"x": x}), "self.inner['log'].rows"),
    "an attribute": (lambda log, x: setattr(log, "last", x), "self.inner['log'].last"),
    "a weak dictionary": (lambda log, x: log.weak.__setitem__(log, x), "self.inner['log'].weak.data"),
    "a variable of a function": (lambda log, x: log.remember(x), "last"),
}


@pytest.mark.parametrize("place", PLACES)
def test_kept_result_of_a_call_is_refused_by_name(place: str, device: torch.device) -> None:
    keep, name = PLACES[place]

    class Owner:
        def __init__(self) -> None:
            self.inner = {"log": Log()}

        def step(self, x: torch.Tensor) -> torch.Tensor:
            keep(self.inner["log"], x * 2)
            return x * 3

    owner = Owner()
    told = told_of(owner.step, device, rule="kept-tensor" if place == "a weak dictionary" else "host-value")
    assert name in told.what


def told_of(
    step: Callable[[torch.Tensor], Any], device: torch.device, rule: str = "kept-tensor", **options: Any
) -> stepgraph.CaptureError:
    with stepgraph.capture(step, **options) as captured, pytest.raises(stepgraph.CaptureError) as told:
        for _ in range(8):  # a cache is given some calls to be filled by eager
            captured(torch.ones(3, device=device))
    assert told.value.rule == rule
    return told.value


def test_kept_tensor_in_a_container_is_named_after_its_variable(device: torch.device) -> None:
    """One name covers one container: a second one that the step needs is still refused."""
    history, needed = collections.defaultdict[str, list[Any]](list), collections.defaultdict[str, list[Any]](list)

    def step(x: torch.Tensor) -> torch.Tensor:
        history["loss"].append(x.sum())
        result = x * 3 + (needed["x"][-1] if needed["x"] else 0)
        needed["x"].append(result.detach())
        return result

    for ignore in (["a list"], ["needed"], ["needed['x']"]):
        assert "history['loss']" in told_of(step, device, "host-value", ignore=ignore).what
    assert "needed['x']" in told_of(step, device, "host-value", ignore=["history", "a list"]).what


def test_kept_tensor_in_optimizer_state_is_named_by_its_key(device: torch.device) -> None:
    class Sharp(torch.optim.SGD):
        def ascend(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["old"] = p.detach().clone()

    model = nn.Linear(3, 1).to(device)
    optimizer = Sharp(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.ascend()
        return loss

    name = "optimizer.state[...]['old']"
    told = told_of(step, device)
    assert f"`{name}`" in told.what
    assert repr(name) in told.fix
    with stepgraph.capture(step, ignore=[name]) as captured:
        for _ in range(5):
            captured(torch.ones(3, device=device))
        assert captured.report().replays == 2


def test_kept_nothing_where_only_garbage_holds_a_tensor(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        cycle: list[Any] = [x * 2]
        cycle.append(cycle)
        return x + cycle[0]

    with stepgraph.capture(step) as captured:
        for _ in range(5):
            captured(torch.ones(3, device=device))
        assert captured.report().replays == 2


@pytest.mark.parametrize("enabled", [False, True])
def test_kept_look_leaves_the_collector_as_it_was(enabled: bool, device: torch.device) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with stepgraph.capture(lambda x: x * 2) as step:
            for _ in range(5):
                step(torch.ones(3, device=device))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
