"""Where a step may find a number: wherever Python looks names up, a changed one is noticed and named, never frozen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager

Step = Callable[[torch.Tensor], torch.Tensor]
Built = tuple[Step, Callable[[], None], str]
"""A step, a change of what it reads, and the name under which the change is told."""


@dataclass
class Config:
    temperature: float = 1.0
    weights: list[float] = field(default_factory=lambda: [1.0])


class Trainer:
    """A step as a method, with what it reads on `self`, directly and through methods and properties."""

    def __init__(self, device: torch.device) -> None:
        self.config = Config()
        self.options = {"scale": 1.0}
        self.factors = [1.0, torch.ones(2, device=device)]
        self.bias = Config()
        self.history: list[float] = []
        self.log = {"calls": 0}

    @property
    def shift(self) -> float:
        return self.bias.temperature

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.options["scale"] * self.factors[0] * self.factors[1]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) * self.config.temperature + self.shift

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) * self.config.temperature


def default_argument(device: torch.device) -> Built:
    config = Config()

    def step(x: torch.Tensor, used: Config = config) -> torch.Tensor:
        return x * used.temperature

    return step, lambda: setattr(config, "temperature", 2.0), "used.temperature: 1.0 -> 2.0"


def keyword_default(device: torch.device) -> Built:
    config = {"scale": 1.0}

    def step(x: torch.Tensor, *, used: dict[str, float] = config) -> torch.Tensor:
        return x * used["scale"]

    return step, lambda: config.update(scale=2.0), "used['scale']: 1.0 -> 2.0"


def default_tensor(device: torch.device) -> Built:
    mask = torch.ones(2, device=device)
    kept = mask.data

    def step(x: torch.Tensor, used: torch.Tensor = mask) -> torch.Tensor:
        return x * used

    return step, lambda: setattr(mask, "data", kept.clone() * 2), "used: a tensor -> the same tensor at another address"


def object_of_self(device: torch.device) -> Built:
    trainer = Trainer(device)
    return trainer.step, lambda: setattr(trainer.config, "temperature", 2.0), "self.config.temperature: 1.0 -> 2.0"


def dict_of_self_in_a_method(device: torch.device) -> Built:
    trainer = Trainer(device)
    return trainer.step, lambda: trainer.options.update(scale=2.0), "self.options['scale']: 1.0 -> 2.0"


def list_of_self_in_a_method(device: torch.device) -> Built:
    trainer = Trainer(device)
    return trainer.step, lambda: trainer.factors.__setitem__(0, 2.0), "self.factors[0]: 1.0 -> 2.0"


def tensor_in_a_list_of_self(device: torch.device) -> Built:
    trainer = Trainer(device)
    other = torch.full((2,), 3.0, device=device)
    return trainer.step, lambda: trainer.factors.__setitem__(1, other), "self.factors[1]: a tensor of shape [2] -> "


def behind_a_property(device: torch.device) -> Built:
    trainer = Trainer(device)
    return trainer.step, lambda: setattr(trainer.bias, "temperature", 2.0), "self.bias.temperature: 1.0 -> 2.0"


def object_of_a_callable(device: torch.device) -> Built:
    trainer = Trainer(device)
    return trainer, lambda: setattr(trainer.config, "temperature", 2.0), "self.config.temperature: 1.0 -> 2.0"


def tensor_in_a_list(device: torch.device) -> Built:
    weights = [torch.ones(2, device=device)]
    other = torch.full((2,), 3.0, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weights[0]

    return step, lambda: weights.__setitem__(0, other), "weights[0]: a tensor of shape [2] -> "


PLACES = (
    default_argument,
    keyword_default,
    default_tensor,
    object_of_self,
    dict_of_self_in_a_method,
    list_of_self_in_a_method,
    tensor_in_a_list_of_self,
    behind_a_property,
    object_of_a_callable,
    tensor_in_a_list,
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_watch_notices_a_change_wherever_the_step_finds_it(
    place: Callable[[torch.device], Built], device: torch.device
) -> None:
    step, change, told = place(device)
    x = torch.ones(2, device=device)
    with stepgraph.capture(step) as captured:
        for _ in range(5):
            assert torch.equal(captured(x), step(x))
        before = captured(x)
        change()
        with pytest.warns(stepgraph.StepgraphWarning) as seen:
            assert torch.equal(captured(x), step(x))
        assert not torch.equal(captured(x), before)
        assert captured.report().recaptures == 1
    assert told in str(seen[0].message)


def test_watch_leaves_the_loops_own_records_alone(device: torch.device) -> None:
    """What the step's code does not name may change: a history that grows, counts in a dict."""
    trainer = Trainer(device)
    with stepgraph.capture(trainer.step) as captured, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            result: Any = captured(torch.ones(2, device=device))
            trainer.history.append(result.sum().item())
            trainer.log["calls"] += 1
        assert captured.report().replays == 5


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_watch_optimizer_replaced_is_looked_at_anew(fused: bool, device: torch.device) -> None:
    """Another optimizer over the same parameters: one eager call shows it, then the step is captured with it."""

    class Owner:
        def __init__(self) -> None:
            self.model = nn.Linear(4, 4).to(device)
            self.renew(1e-3)

        def renew(self, lr: float) -> None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=fused)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            return loss

    def build(device: torch.device) -> Program:
        owner = Owner()
        batches = [(torch.randn(2, 4, device=device),) for _ in range(14)]
        return Program(
            owner.step, batches, [owner.model], before_call=lambda index: owner.renew(0.1) if index == 7 else None
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = assert_captured_equals_eager(build, device)
    assert report.recaptures == 1
    assert report.replays == 14 - 3 - 1


def test_watch_flag_that_brings_in_parameters_never_seen(device: torch.device) -> None:
    """A flag turns on a second network, out of the closure's reach: its gradients add up as the first one's do."""

    def build(device: torch.device) -> Program:
        nets = {"first": [nn.Linear(4, 4).to(device)], "second": [nn.Linear(4, 4).to(device)]}
        flags = {"both": False}

        def step(x: torch.Tensor) -> torch.Tensor:
            out = nets["first"][0](x)
            if flags["both"]:
                out = nets["second"][0](out)
            loss = out.pow(2).mean()
            loss.backward()
            return loss

        batches = [(torch.randn(2, 4, device=device),) for _ in range(14)]
        return Program(
            step, batches, [net for (net,) in nets.values()], before_call=lambda index: flags.update(both=index >= 7)
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = assert_captured_equals_eager(build, device)
    assert report.recapture_reasons == {"flags['both']: False -> True": 1}
