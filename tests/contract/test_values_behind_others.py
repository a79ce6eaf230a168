"""Watched values that the step's own code does not spell: methods of modules inside others, what code is handed."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import assert_change_is_noticed

Step = Callable[[torch.Tensor], torch.Tensor]
Built = tuple[Step, Callable[[], object], str]
"""A step, a change of something that it reads, and how the change is told."""


class Encoder(nn.Module):
    gain = 1.0
    bias: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()
        self.temperature, self.calls, self._scale = 1.0, 0, 1.0
        self.shift: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / self.temperature + self.shift

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls

    @property
    def scale(self) -> float:
        return self._scale


class Model(nn.Module):
    """Uses a module inside it otherwise than by calling it."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


class Encoding(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder.encode(x)


class Scaling(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) * self.encoder.scale


class Gaining(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for encoder in (self.encoder,):
            x = encoder(x) * encoder.gain if encoder.bias is None else encoder(x)
        return x


def built(kind: type[Model]) -> Model:
    return kind(lambda _, x: x)


def method_of_a_module_inside(_: torch.device) -> Built:
    model = built(Encoding)
    return model.forward, lambda: setattr(model.encoder, "temperature", 0.5), "encoder.temperature: 1.0 -> 0.5"


def tensor_in_a_method_of_a_module_inside(device: torch.device) -> Built:
    model, ones = built(Encoding), torch.ones(2, device=device)
    model.encoder.shift = torch.zeros(2, device=device)
    return model.forward, lambda: setattr(model.encoder, "shift", ones), "encoder.shift: a tensor of shape [2]"


def property_of_a_module_inside(_: torch.device) -> Built:
    model = built(Scaling)
    return model.forward, lambda: setattr(model.encoder, "_scale", 2.0), "encoder._scale: 1.0 -> 2.0"


def default_of_a_class_hidden_on_a_module_inside(_: torch.device) -> Built:
    model = built(Gaining)
    return model.forward, lambda: setattr(model.encoder, "gain", 2.0), "encoder.gain: 1.0 -> 2.0"


def spelled_by_the_step(_: torch.device) -> Built:
    model = built(Model)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model.encoder.encode(x)

    return step, lambda: setattr(model.encoder, "temperature", 0.5), "model.encoder.temperature: 1.0 -> 0.5"


def spelled_in_a_loop(_: torch.device) -> Built:
    layers = nn.ModuleList([Encoder(), Encoder()])

    def step(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer.encode(x)
        return x

    return step, lambda: setattr(layers[1], "temperature", 0.5), "layers.1.temperature: 1.0 -> 0.5"


class Schedule:
    weight = 1.0

    def __init__(self) -> None:
        self._value = 1.0

    def value(self) -> float:
        return self._value


class Scheduled(nn.Module):
    def forward(self, x: torch.Tensor, schedule: Any) -> torch.Tensor:
        return x * schedule.value()


class Weighted(nn.Module):
    def forward(self, x: torch.Tensor, schedule: Any) -> torch.Tensor:
        return x * schedule.weight


def method_of_what_a_module_is_given(_: torch.device) -> Built:
    model, schedule = Scheduled(), Schedule()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x, schedule)

    return step, lambda: setattr(schedule, "_value", 3.0), "schedule._value: 1.0 -> 3.0"


def class_attribute_of_what_a_module_is_given(_: torch.device) -> Built:
    model, schedule = Weighted(), type("Own", (Schedule,), {"weight": 1.0})()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x, schedule)

    return step, lambda: setattr(type(schedule), "weight", 3.0), "Own.weight: 1.0 -> 3.0"


def weigh(x: torch.Tensor, config: Any) -> torch.Tensor:
    return x * config.weight


def class_that_is_handed_on(_: torch.device) -> Built:
    config = type("Config", (), {"weight": 1.0})

    def step(x: torch.Tensor) -> torch.Tensor:
        return weigh(x, config)

    return step, lambda: setattr(config, "weight", 3.0), "Config.weight: 1.0 -> 3.0"


def python_module_that_is_handed_on(_: torch.device) -> Built:
    settings = types.ModuleType("settings_of_a_test")
    vars(settings)["weight"] = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return weigh(x, settings)

    return step, lambda: setattr(settings, "weight", 3.0), "settings.weight: 1.0 -> 3.0"


def logged(function: Callable[..., torch.Tensor]) -> Any:
    @functools.wraps(function)
    def inner(*args: Any) -> torch.Tensor:
        return function(*args)

    return inner


def attribute_of_a_decorated_function(_: torch.device) -> Built:
    @logged
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scaled.weight

    scaled.weight = 1.0
    return lambda x: scaled(x), lambda: setattr(scaled, "weight", 3.0), "scaled.weight: 1.0 -> 3.0"


def attribute_of_a_function_of_torchs(_: torch.device) -> Built:
    @torch.no_grad()
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scaled.weight  # type: ignore[attr-defined]

    scaled.weight = 1.0  # type: ignore[attr-defined]
    return lambda x: scaled(x), lambda: setattr(scaled, "weight", 3.0), "scaled.weight: 1.0 -> 3.0"


def attribute_of_another_function(_: torch.device) -> Built:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    same.weight = 1.0  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> torch.Tensor:
        return same(x) * same.weight  # type: ignore[attr-defined]

    return step, lambda: setattr(same, "weight", 3.0), "same.weight: 1.0 -> 3.0"


def dict_on_a_function(_: torch.device) -> Built:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scaled.config["weight"]  # type: ignore[attr-defined]

    scaled.config = config = {"weight": 1.0}  # type: ignore[attr-defined]
    return lambda x: scaled(x), lambda: config.update(weight=3.0), "scaled.config['weight']: 1.0 -> 3.0"


def attribute_that_a_function_comes_to_have(_: torch.device) -> Built:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(scaled, "weight", 1.0)

    return lambda x: scaled(x), lambda: setattr(scaled, "weight", 3.0), "scaled.weight: absent -> 3.0"


def attribute_of_a_partial(_: torch.device) -> Built:
    scaled: Any = functools.partial(torch.mul, torch.full((), 1.0))
    scaled.weight = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * scaled.weight

    return step, lambda: setattr(scaled, "weight", 3.0), "scaled.weight: 1.0 -> 3.0"


PLACES = (
    method_of_a_module_inside,
    tensor_in_a_method_of_a_module_inside,
    property_of_a_module_inside,
    default_of_a_class_hidden_on_a_module_inside,
    spelled_by_the_step,
    spelled_in_a_loop,
    method_of_what_a_module_is_given,
    class_attribute_of_what_a_module_is_given,
    class_that_is_handed_on,
    python_module_that_is_handed_on,
    attribute_of_a_decorated_function,
    attribute_of_a_function_of_torchs,
    attribute_of_another_function,
    dict_on_a_function,
    attribute_that_a_function_comes_to_have,
    attribute_of_a_partial,
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_change_of_what_other_code_reads_is_noticed(
    place: Callable[[torch.device], Built], device: torch.device
) -> None:
    assert_change_is_noticed(*place(device), device)


def test_attribute_of_the_captured_step_is_noticed(device: torch.device) -> None:
    @stepgraph.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * step.weight  # type: ignore[attr-defined]

    step.weight = 1.0  # type: ignore[attr-defined]
    x = torch.ones(2, device=device)
    for _ in range(5):
        assert step(x)[0] == 1.0
    step.weight = 3.0  # type: ignore[attr-defined]
    with pytest.warns(stepgraph.StepgraphWarning, match=r"step\.weight: 1\.0 -> 3\.0"):
        assert step(x)[0] == 3.0
    step.close()


def test_count_in_a_method_of_a_module_inside_is_refused(device: torch.device) -> None:
    model = nn.ModuleList([Encoder()])

    def step(x: torch.Tensor) -> torch.Tensor:
        (encoder,) = model
        return encoder.counted(x)  # type: ignore[operator]

    assert_refused(step, r"0\.calls: 2 -> 3", device)


def test_count_on_a_function_is_refused(device: torch.device) -> None:
    def ramp(calls: int) -> float:
        return calls / 10

    ramp.calls = 0  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> torch.Tensor:
        ramp.calls += 1  # type: ignore[attr-defined]
        return x * ramp(ramp.calls)  # type: ignore[attr-defined]

    assert_refused(step, r"ramp\.calls: 2 -> 3", device)


def assert_refused(step: Step, told: str, device: torch.device) -> None:
    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(torch.ones(2, device=device))
        with pytest.raises(stepgraph.CaptureError, match=told) as caught:
            captured(torch.ones(2, device=device))
        assert caught.value.rule == "host-value"


# -- what is not read


class Trainer:
    """Counts in attributes that are called as others of what it holds."""

    def __init__(self, device: torch.device) -> None:
        self.model = nn.Linear(2, 2).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = self.zero_grad = 0

    def train(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
        return loss


def test_attribute_of_another_object_is_not_read_as_the_trainers(device: torch.device) -> None:
    """`self.optimizer.step()` does not read `self.step`, in which the loop counts."""
    trainer = Trainer(device)
    with stepgraph.capture(trainer.train) as captured, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            captured(torch.ones(2, device=device))
            trainer.step += 1
            trainer.zero_grad += 1
        assert captured.report().replays == 5


def test_attribute_of_a_variable_is_not_read_as_another_objects(device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = types.SimpleNamespace(step=0, weight=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum() * state.weight
        loss.backward()
        optimizer.step()
        return loss

    with stepgraph.capture(step) as captured:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(8):
                captured(torch.ones(2, device=device))
                state.step += 1
        assert captured.report().replays == 5
        state.weight = 2.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"state\.weight: 1\.0 -> 2\.0"):
            captured(torch.ones(2, device=device))


class Nested:
    """An object that is also an attribute of another: `outer.inner.step` is its own."""

    def __init__(self) -> None:
        self.step = 1.0
        self.inner = self


def test_attribute_reached_through_another_is_read(device: torch.device) -> None:
    outer = Nested()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * outer.inner.step

    x = torch.ones(2, device=device)
    with stepgraph.capture(step) as captured:
        for _ in range(5):
            captured(x)
        outer.step = 3.0
        with pytest.warns(stepgraph.StepgraphWarning, match="step: 1.0 -> 3.0"):
            assert captured(x)[0] == 3.0


def test_attribute_reached_through_a_wrapper_is_read(device: torch.device) -> None:
    """A compiled module answers for the one inside."""
    model = Encoder()
    compiled = torch.compile(model, backend="eager")

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * compiled.temperature

    change = functools.partial(setattr, model, "temperature", 3.0)
    assert_change_is_noticed(step, change, "temperature: 1.0 -> 3.0", device)


class Item:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def test_attribute_reached_through_a_local_variable_is_read(device: torch.device) -> None:
    """`item.inner` may be any object, whatever `other.inner` is."""
    state, other = types.SimpleNamespace(scale=1.0), Item(types.SimpleNamespace(scale=5.0))
    items = [[Item(state)]]

    def step(x: torch.Tensor) -> torch.Tensor:
        (item,) = items[0]
        return x * item.inner.scale if state is not other.inner else x

    change = functools.partial(setattr, state, "scale", 3.0)
    assert_change_is_noticed(step, change, "state.scale: 1.0 -> 3.0", device)


class Meter:
    """Of the loop; a method of it is called as one that a module calls on something else."""

    def __init__(self) -> None:
        self.count = 0

    def mean(self) -> float:
        self.count += 1
        return float(self.count)


class Averaging(nn.Module):
    def forward(self, x: torch.Tensor, _: Any) -> torch.Tensor:
        return x.mean(dim=0, keepdim=True)


def test_method_that_did_not_run_is_not_followed_in_a_module(device: torch.device) -> None:
    model, meter = Averaging(), Meter()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x, meter)

    with stepgraph.capture(step) as captured, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            captured(torch.ones(2, device=device))
            meter.mean()
        assert captured.report().replays == 5
