"""What a step makes and drops in a call: a loss module, a copy of the model with its optimizer, a leaf with `.grad`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager

Made = list["weakref.ref[Any]"]


class Softened(nn.Module):
    """Makes layers on the spot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Dropout(0.2)(nn.Softmax(dim=-1)(nn.ReLU()(self.linear(x))))


def small_model(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def program(device: torch.device, model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        optimizer.step()
        return loss

    batches = [(torch.randn(5, 4, device=device), torch.randn(5, 3, device=device)) for _ in range(7)]
    return Program(step, batches, [model], [optimizer])


def with_loss_module(device: torch.device, made: Made) -> Program:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        criterion = nn.MSELoss()
        made.append(weakref.ref(criterion))
        loss: torch.Tensor = criterion(model(x), y)
        loss.backward()
        return loss

    return program(device, small_model(device), loss_of)


def with_layers_in_forward(device: torch.device, made: Made) -> Program:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return program(device, Softened().to(device), loss_of)


def with_inner_loop(device: torch.device, made: Made) -> Program:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1, momentum=0.5)
        for _ in range(2):
            inner.zero_grad()
            F.mse_loss(fast(x), y).backward()
            inner.step()
            inner.param_groups[0]["lr"] *= 0.5
        inner.zero_grad()
        loss = F.mse_loss(fast(x.flip(0)), y.flip(0))
        loss.backward()
        for parameter, adapted in zip(model.parameters(), fast.parameters(), strict=True):
            assert adapted.grad is not None
            parameter.grad = adapted.grad.clone()
        made.extend(map(weakref.ref, (fast, inner, *fast.parameters())))
        return loss

    return program(device, small_model(device), loss_of)


def with_perturbation(device: torch.device, made: Made) -> Program:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        delta = torch.zeros_like(x, requires_grad=True)
        made.append(weakref.ref(delta))
        F.mse_loss(model(x + delta), y).backward()
        assert delta.grad is not None
        loss = F.mse_loss(model(x + 0.1 * delta.grad.sign()), y)
        loss.backward()
        return loss

    return program(device, small_model(device), loss_of)


def with_lasting_parts(device: torch.device, made: Made) -> Program:
    """The module is new, its layers are not; and it holds itself."""
    model = small_model(device)
    parts = {"all": {"layers": list(model)}}  # too deep to be found before the step has run

    def loss_of(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        joined = nn.Sequential(*parts["all"]["layers"])
        joined.itself = [joined]
        made.append(weakref.ref(joined))
        loss = F.mse_loss(joined(x), y)
        loss.backward()
        return loss

    return program(device, model, loss_of)


BUILDERS = [with_loss_module, with_layers_in_forward, with_inner_loop, with_perturbation, with_lasting_parts]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("build", BUILDERS)
def test_made_in_the_step_is_captured_and_let_go_of(
    build: Callable[[torch.device, Made], Program], strict: bool, device: torch.device
) -> None:
    made: Made = []
    options: dict[str, Any] = {"strict": strict, "ignore": ["len(made)"]}
    report = assert_captured_equals_eager(lambda device: build(device, made), device, **options)
    assert (report.captures, report.replays, report.eager_reasons) == (1, 4, {"warm-up": 3})
    gc.collect()
    assert not [ref for ref in made if ref() is not None]


def test_made_in_the_step_is_not_kept_while_the_step_warms_up(device: torch.device) -> None:
    made: Made = []
    program = with_inner_loop(device, made)
    with stepgraph.capture(program.step, warmup=20) as step:
        for batch in program.batches:
            step(*batch)
            assert not [ref for ref in made if ref() is not None]


class Scaled(nn.Module):
    """Reads a number of its own, and a global."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.scale
        return result


class Weighted(nn.Module):
    """A loss whose constructor and forward read globals."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = SETTINGS["made with"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * self.weight + SETTINGS["called with"]


SETTINGS = {"made with": 1.0, "called with": 1.0}
REGISTRY = {"losses": {"weighted": Weighted}}
"""Its class is too deep for the step's code to name it."""


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_number_of_a_module_that_the_step_copies_is_watched(device: torch.device) -> None:
    model = Scaled().to(device)
    x = torch.randn(2, 4, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = copy.deepcopy(model)(x)
        return result.detach()

    with stepgraph.capture(step) as captured:
        for scale in (1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0):
            model.scale = scale
            assert torch.equal(captured(x), step(x))
        assert captured.report().captures == 2


@pytest.mark.parametrize("name", ["made with", "called with"])
@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_numbers_read_by_a_module_made_in_the_step_are_watched(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 4, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = REGISTRY["losses"]["weighted"]()(x)
        return result

    with stepgraph.capture(step) as captured:
        for value in (1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0):
            monkeypatch.setitem(SETTINGS, name, value)
            assert torch.equal(captured(x), step(x))
        assert captured.report().captures == 2


def test_hook_of_a_module_that_the_step_copies_is_refused(device: torch.device) -> None:
    model = small_model(device)
    model.register_forward_hook(lambda *_: None)
    with stepgraph.capture(lambda x: copy.deepcopy(model)(x)) as step:
        for _ in range(3):
            step(torch.randn(2, 4, device=device))
        with pytest.raises(stepgraph.CaptureError) as refused:
            step(torch.randn(2, 4, device=device))
    assert refused.value.rule == "module-hook"


def test_optimizer_made_in_the_step_with_a_host_count_is_refused(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(4, device=device, requires_grad=True)
        inner = torch.optim.Adam([weight])
        (x * weight).sum().backward()
        inner.step()
        return weight.detach()

    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(torch.randn(2, 4, device=device))
        with pytest.raises(stepgraph.CaptureError, match="Adam, its step count is on the host") as refused:
            captured(torch.randn(2, 4, device=device))
    assert refused.value.rule == "inner-optimizer"


def test_older_optimizer_is_not_mistaken_for_one_the_step_makes(device: torch.device, tmp_path: Path) -> None:
    weight = torch.ones(4, device=device, requires_grad=True)
    deep = {"in": {"here": torch.optim.SGD([weight], lr=0.1)}}
    flag = tmp_path / "steps"

    def step(x: torch.Tensor) -> torch.Tensor:
        fresh = weight.detach().clone().requires_grad_()
        (x * fresh).sum().backward()
        torch.optim.SGD([fresh], lr=0.1).step()
        if flag.exists():
            deep["in"]["here"].step()
        return fresh.detach()

    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(torch.randn(2, 4, device=device))
        flag.touch()
        weight.grad = torch.ones_like(weight)
        captured(torch.randn(2, 4, device=device))
        assert weight.tolist() == pytest.approx([0.9] * 4)
        assert captured.report().eager_reasons == {"warm-up": 4}, "it was seen to step, and looked at once more"


class Lazy(nn.Module):
    """Makes its second layer at the first call, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.kept: dict[str, dict[str, nn.Module]] = {"by name": {}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kept["by name"]:
            torch.manual_seed(3)
            self.kept["by name"]["second"] = nn.Linear(4, 3).to(x.device)
        result: torch.Tensor = self.kept["by name"]["second"](self.first(x))
        return result


def test_module_that_the_step_makes_and_keeps_is_the_steps_own(device: torch.device) -> None:
    model = Lazy().to(device)
    x = torch.randn(2, 4, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        result: torch.Tensor = model(x).sum()
        result.backward()
        return result

    with stepgraph.capture(step) as captured:
        for _ in range(5):
            captured(x)
        assert captured.report().captures == 1
        second = model.kept["by name"]["second"]
        assert isinstance(second, nn.Linear)
        second.weight = nn.Parameter(torch.ones(3, 4, device=device))  # its weight is guarded
        assert torch.equal(captured(x), step(x).detach())
        assert sum(captured.report().recapture_reasons.values()) == 1
