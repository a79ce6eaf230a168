"""Where a step may find a number: wherever Python looks names up, a changed one is noticed and named, never frozen."""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager, assert_change_is_noticed

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

    return (
        step,
        lambda: setattr(mask, "data", kept.clone() * 2),
        "used: a tensor -> the same tensor, which moved to another address",
    )


def cut_tensor(device: torch.device) -> Built:
    table = torch.ones(4, 2, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * table.sum()

    told = "table: a tensor -> the same tensor, which has the shape [3, 2], not [4, 2]"
    return step, lambda: setattr(table, "data", table.data[:3]), told


def on_a_tensor(device: torch.device) -> Built:
    weight: Any = torch.ones(2, device=device)
    weight.scale = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weight * weight.scale

    return step, lambda: setattr(weight, "scale", 2.0), "weight.scale: 1.0 -> 2.0"


def on_parameters(device: torch.device) -> Built:
    model: Any = torch.nn.Linear(2, 2).to(device)
    for parameter in model.parameters():
        parameter.decay = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        decay = sum(p.decay * p.detach().pow(2).sum() for p in model.parameters())
        return model(x).detach() + decay

    return step, lambda: setattr(model.bias, "decay", 2.0), "model.bias.decay: 1.0 -> 2.0"


def on_a_modules_own_parameter(device: torch.device) -> Built:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight: Any = self.weight
            return super().forward(x) * weight.scale

    model = Scaled(2, 2).to(device)
    weight: Any = model.weight
    weight.scale = 1.0
    return lambda x: model(x).detach(), lambda: setattr(weight, "scale", 2.0), "model.weight.scale: 1.0 -> 2.0"


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


def behind_a_decorator(device: torch.device) -> Built:
    scale = 1.0

    @torch.no_grad()
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return step, change, "scale: 1.0 -> 2.0"


def function_of_self(device: torch.device) -> Built:
    class Owner:
        def __init__(self) -> None:
            self.loss = nn.functional.mse_loss

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.loss(x, 3 * x)

    owner = Owner()
    told = "self.loss: <function mse_loss> -> <function l1_loss>"
    return owner.step, lambda: setattr(owner, "loss", nn.functional.l1_loss), told


def attribute_of_a_class(device: torch.device) -> Built:
    class Settings:
        scale = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * Settings.scale

    return step, lambda: setattr(Settings, "scale", 2.0), "Settings.scale: 1.0 -> 2.0"


def attribute_of_a_python_module(device: torch.device) -> Built:
    settings = types.ModuleType("settings")
    vars(settings)["scale"] = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * settings.scale

    return step, lambda: vars(settings).update(scale=2.0), "settings.scale: 1.0 -> 2.0"


def plain_default(device: torch.device) -> Built:
    def step(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    return step, lambda: setattr(step, "__defaults__", (2.0,)), "scale: 1.0 -> 2.0"


def attribute_that_hides_another(device: torch.device) -> Built:
    class Owner:
        scale = 1.0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    owner = Owner()
    return owner.step, lambda: setattr(owner, "scale", 2.0), "self.scale: 1.0 -> 2.0"


class Scaled(nn.Module):
    """A module that computes with attributes of several kinds."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._scale = 1.0
        self.mask = torch.ones(2, device=device)
        self.options = {"scale": 1.0}
        self.drop = nn.Dropout(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * self._scale * self.mask * self.options["scale"]


def private_attribute_of_a_module(device: torch.device) -> Built:
    model = Scaled(device)
    return (lambda x: model(x)), lambda: setattr(model, "_scale", 2.0), "model._scale: 1.0 -> 2.0"


def tensor_of_a_module(device: torch.device) -> Built:
    model = Scaled(device)
    other = torch.full((2,), 3.0, device=device)
    return (lambda x: model(x)), lambda: setattr(model, "mask", other), "model.mask: a tensor of shape [2] -> "


def dict_of_a_module(device: torch.device) -> Built:
    model = Scaled(device)
    return (lambda x: model(x)), lambda: model.options.update(scale=2.0), "model.options['scale']: 1.0 -> 2.0"


def number_of_a_layer(device: torch.device) -> Built:
    model = Scaled(device)
    return (lambda x: model(x)), lambda: setattr(model.drop, "p", 1), "Scaled.drop.p: 0 -> 1"


def forward_of_a_module(device: torch.device) -> Built:
    model = nn.Identity()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    return (lambda x: model(x)), lambda: setattr(model, "forward", doubled), "model.forward: "


def class_of_a_module(device: torch.device) -> Built:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model = nn.Identity()
    return (lambda x: model(x)), lambda: setattr(model, "__class__", Doubled), "model.__class__: <class Identity> -> "


def contents_of_a_set(device: torch.device) -> Built:
    active = {1, 2}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (1 if 1 in active else 3)

    def change() -> None:
        active.remove(1)
        active.add(7)

    return step, change, "active: {1, 2} -> {2, 7}"


def sign_of_zero(device: torch.device) -> Built:
    zero = {"value": 0.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x / torch.full_like(x, zero["value"])

    return step, lambda: zero.update(value=-0.0), "zero['value']: 0.0 -> -0.0"


PLACES = (
    behind_a_decorator,
    function_of_self,
    attribute_of_a_class,
    attribute_of_a_python_module,
    plain_default,
    attribute_that_hides_another,
    private_attribute_of_a_module,
    tensor_of_a_module,
    dict_of_a_module,
    number_of_a_layer,
    forward_of_a_module,
    class_of_a_module,
    contents_of_a_set,
    sign_of_zero,
    default_argument,
    keyword_default,
    default_tensor,
    cut_tensor,
    on_a_tensor,
    on_parameters,
    on_a_modules_own_parameter,
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
    message = assert_change_is_noticed(*place(device), device)
    assert "Fix: pass it as a tensor argument (a plain number gets a graph for each value)" in message


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


def test_watch_of_getattr_by_name_ignores_other_attributes(device: torch.device) -> None:
    class Counted(Trainer):
        calls = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            config = self.config if hasattr(self, "config") else Config()
            return super().step(x) * getattr(config, "extra", 1.0)

    trainer, x = Counted(device), torch.ones(2, device=device)
    with stepgraph.capture(trainer.step) as captured:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(8):
                captured(x)
                trainer.calls += 1
        assert captured.report().replays == 5
        vars(trainer.config)["extra"] = 2.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"self\.config\.extra: absent -> 2\.0"):
            assert torch.equal(captured(x), trainer.step(x))


def test_watch_leaves_new_attributes_alone_that_no_code_names(device: torch.device) -> None:
    trainer, model = Trainer(device), Scaled(device)
    with (
        stepgraph.capture(lambda x: model(trainer.step(x))) as captured,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for index in range(8):
            captured(torch.ones(2, device=device))
            vars(trainer)[f"made_{index}"] = vars(model)[f"made_{index}"] = index
        assert captured.report().replays == 5


def test_watch_refuses_a_step_drawing_from_its_own_generator(device: torch.device) -> None:
    generator = random.Random(0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * generator.random()

    with stepgraph.capture(step) as captured, pytest.raises(stepgraph.CaptureError, match="`generator`") as error:
        for _ in range(5):
            captured(torch.ones(2, device=device))
    assert error.value.rule == "iterator"
    assert "ignore=['generator']" in error.value.fix


def test_watch_lets_the_loop_draw_where_the_step_does_not(device: torch.device) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.batches = iter([torch.full((2,), float(i), device=device) for i in range(8)])
            self.shuffle = random.Random(0)
            self.weight = torch.ones(2, device=device)

        def step(self) -> torch.Tensor:
            self.shuffle.random()
            result: torch.Tensor = captured(next(self.batches))
            return result

        def compute(self, x: torch.Tensor) -> torch.Tensor:
            torch.optim.SGD([self.weight.clone().requires_grad_()], lr=0.1).zero_grad()
            return x * self.weight.step() if hasattr(self.weight, "step") else x * self.weight

    trainer = Trainer()
    with stepgraph.capture(trainer.compute) as captured, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [trainer.step().tolist() for _ in range(8)] == [[float(i)] * 2 for i in range(8)]
        assert captured.report().replays == 5


def test_watch_refuses_a_module_that_counts(device: torch.device) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self._calls += 1
            return x / self._calls

    model = Counting()
    with stepgraph.capture(model.forward) as captured, pytest.raises(stepgraph.CaptureError, match=r"\._calls: 2 -> 3"):
        for _ in range(5):
            captured(torch.ones(2, device=device))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_watch_replaced_optimizer_is_captured_again(fused: bool, device: torch.device) -> None:
    """Another optimizer over the same parameters: two eager calls show it, then the step is captured with it."""

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
    assert report.replays == 14 - 3 - 2


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
    assert report.captures == 2
    assert report.replays >= 9


class Average:
    """An average of a model's parameters, as many write it."""

    def __init__(self, model: nn.Module) -> None:
        self.decay, self.shadow = 0.9, {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter, 1 - self.decay)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.shadow[name] = value.clone()


@pytest.mark.parametrize("place", ["closure", "attribute"])
def test_average_that_is_loaded_item_by_item_is_noticed(place: str, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = Average(model)
        start = {name: value.clone() for name, value in average.shadow.items()}
        holder = types.SimpleNamespace(average=average)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            (average if place == "closure" else holder.average).update(model)
            return torch.stack([t.sum() for t in average.shadow.values()])

        def before_call(index: int) -> None:
            if index == 7:
                average.load(start)

        draw = torch.Generator().manual_seed(1)
        batches = [(torch.randn(3, 4, generator=draw).to(device),) for _ in range(12)]
        return Program(step, batches, [model], [optimizer], before_call=before_call)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        report = assert_captured_equals_eager(build, device)
    assert any("shadow" in reason for reason in report.recapture_reasons)
