"""What surrounds a graphed call: autocast, host values, attributes, compiled code, code that nobody can capture."""

from __future__ import annotations

import contextlib
import functools
import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.module_harness import Layer, Net, Note, Training, assert_graphed_equals_eager, only_row, quiet, training_of


class MatmulBackward(torch.autograd.Function):
    """A backward that multiplies matrices: under autocast it would do so in another dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return (grad.float() @ weight.T).to(x.dtype), (x.float().T @ grad.float()).to(weight.dtype)


class Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MatmulBackward.apply(F.gelu(self.inner(x)), self.weight)


@pytest.mark.parametrize("backward", ["outside", "inside", "now and then"])
@pytest.mark.parametrize("forward", ["always", "every other step"])
def test_autocast_around_the_call_and_around_its_backward(forward: str, backward: str, device: torch.device) -> None:
    """Trap: the backward captured under the ambient autocast. Each has the state that eager gives it."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Multiplies(), Layer(), Multiplies()), device, steps=18)
        optimizer, count = training.optimizers[0], [0]

        def autocast(enabled: bool) -> contextlib.AbstractContextManager[Any]:
            return torch.autocast(device.type, torch.bfloat16) if enabled else contextlib.nullcontext()

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            count[0] += 1
            optimizer.zero_grad()
            with autocast(forward == "always" or count[0] % 2 == 0):
                loss = training.model(batch[0]).float().pow(2).mean()
            with autocast(backward == "inside" or (backward == "now and then" and count[0] % 3 == 0)):
                loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        training.step = step
        return training

    report = assert_graphed_equals_eager(build, device)
    assert all(row.signatures == (1 if forward == "always" else 2) for row in report.rows)


def test_autocast_weights_are_cast_again_at_each_replay(device: torch.device) -> None:
    """The cache of casts of the caller's block is not baked in: weights change between its calls."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer()), device, microbatches=2)
        inner = training.step

        def step(batch: torch.Tensor, note: Note) -> Any:
            with torch.autocast(device.type, torch.bfloat16):
                return inner(batch, note)

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)


# -- host values


@dataclass
class Config:
    scale: float = 1.0
    act: str = "relu"


class Reads(nn.Module):
    """Reads numbers from several places."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner, self.config, self.temperature, self.dropout = nn.Linear(8, 8), config, 1.0, nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.inner(x)) * self.config.scale / self.temperature
        return hidden.relu() if self.config.act == "relu" else hidden.tanh()


CHANGES = {
    "temperature": lambda model: setattr(model.layers[0], "temperature", 2.0),
    "config.scale": lambda model: setattr(model.layers[0].config, "scale", 0.5),
    "config.act": lambda model: setattr(model.layers[0].config, "act", "tanh"),
    "dropout.p": lambda model: setattr(model.layers[0].dropout, "p", 0.6),
}


def reading(device: torch.device, change: Any, at: tuple[int, ...]) -> Training:
    training = training_of(lambda: Net(Reads(Config()), Reads(Config())), device, steps=12)

    def before_step(index: int) -> None:
        if index in at:
            change(training.model)

    training.before_step = before_step
    return training


@pytest.mark.parametrize("name", CHANGES)
def test_host_value_that_changes_is_reported_and_captured_again(name: str, device: torch.device) -> None:
    with quiet() as warned:
        report = assert_graphed_equals_eager(lambda device: reading(device, CHANGES[name], (5,)), device)
    assert [len(row.recapture_reasons) for row in report.rows] == [1, 0]
    assert name in next(iter(report.rows[0].recapture_reasons))
    assert any("host-value" in str(w.message) and name in str(w.message) for w in warned)


def test_host_value_that_keeps_changing_ends_in_eager(device: torch.device) -> None:
    def count(model: nn.Module) -> None:
        model.layers[0].temperature += 0.25

    with quiet():
        build = functools.partial(reading, change=count, at=tuple(range(12)))
        report = assert_graphed_equals_eager(build, device, warmup=1, replays=False)
    assert report.rows[0].eager_reasons == {"warm-up": 4, "capture failed: [varying-operations]": 8}
    assert report.rows[1].eager_calls == 1


def test_host_value_that_begins_to_change_ends_in_eager(device: torch.device) -> None:
    def count(model: nn.Module) -> None:
        model.layers[0].temperature += 0.25

    with quiet():
        build = functools.partial(reading, change=count, at=tuple(range(3, 12)))
        report = assert_graphed_equals_eager(build, device, warmup=1)
    assert report.rows[0].eager_reasons["capture failed: [varying-operations]"] > 0
    assert report.rows[1].eager_calls == 1


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("options", [{"warmup": 1}, {"warmup": 3}, {"warmup": 3, "single_mempool": True}])
def test_host_value_that_changes_now_and_then_is_captured_again(options: dict[str, Any], device: torch.device) -> None:
    """With at least 8 replays between two changes, however many there are. One call of a lone module is eager then."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Reads(Config())), device, steps=5 * 9)

        def before_step(index: int) -> None:
            training.model.layers[0].temperature = 1.0 + index // 9

        training.before_step = before_step
        return training

    (row,) = assert_graphed_equals_eager(build, device, **options).rows
    assert sum(row.recapture_reasons.values()) == 4
    warm = options["warmup"] + 4
    assert (row.forwards, row.eager_reasons) == (5 * 9 - warm, {"warm-up": warm})


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_host_value_of_many_modules_that_changes_once_an_epoch(device: torch.device) -> None:
    """Each module finds the change by itself; none of them makes another one warm up from the beginning."""
    epochs, steps = 5, 10

    def build(device: torch.device) -> Training:
        config = Config()
        training = training_of(lambda: Net(*(Reads(config) for _ in range(3))), device, steps=epochs * steps)
        training.before_step = lambda index: setattr(config, "scale", 1.0 + index // steps)
        return training

    for row in assert_graphed_equals_eager(build, device, audit=False).rows:
        assert sum(row.recapture_reasons.values()) == epochs - 1
        assert row.eager_reasons == {"warm-up": 3 + 2 * (epochs - 1)}


def test_host_value_that_is_ignored_may_change(device: torch.device) -> None:
    model = Net(Reads(Config())).to(device)
    ignore = ["self.temperature", "layers.0.temperature"]
    with stepgraph.graph_modules(model, "layers.*", warmup=1, ignore=ignore, audit=False) as h:
        for _ in range(3):
            model(torch.ones(4, 8, device=device)).sum().backward()
        model.layers[0].temperature = 3.0
        model(torch.ones(4, 8, device=device)).sum().backward()
        assert h.report().replays == 3


def test_host_value_that_changes_is_an_error_under_strict(device: torch.device) -> None:
    model = Net(Reads(Config())).to(device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1, strict=True), quiet():
        for _ in range(3):
            model(torch.ones(4, 8, device=device)).sum().backward()
        model.layers[0].temperature = 3.0
        with pytest.raises(stepgraph.StateChanged, match=r"temperature.*1\.0 -> 3\.0"):
            model(torch.ones(4, 8, device=device))


# -- what a module hangs on itself


class SetsAttribute(nn.Module):
    """Leaves an auxiliary loss on itself, or a counter, or a buffer in a new tensor."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self._what, self.calls, self.history = nn.Linear(8, 8), what, 0, []
        self.register_buffer("mean", torch.zeros(8))
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        if self._what == "aux":
            self.aux = hidden.pow(2).mean()
        elif self._what == "calls":
            self.calls += 1
        elif self._what == "mean":
            self.mean = 0.9 * self.mean + hidden.detach().mean(0)
        elif self._what == "history":
            self.history.append(hidden.detach())
        elif self._what == "cache" and not self.history:
            self.history.append(torch.ones(8, device=x.device))  # once, at the first call
        return hidden.tanh() if self._what != "cache" else hidden * self.history[0]


@pytest.mark.parametrize("what", ["aux", "calls", "mean", "history", "cache"])
def test_attribute_set_by_a_forward_is_never_that_of_the_capture(what: str, device: torch.device) -> None:
    """A module that leaves something on itself at each call stays eager, and says so; a cache is filled once."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(SetsAttribute(what), Layer()), device)
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> list[Any]:
            optimizer.zero_grad()
            loss = training.model(batch[0]).pow(2).mean()
            first = training.model.layers[0]
            if first.aux is not None:
                loss = loss + 0.1 * first.aux
            loss.backward()
            note(loss)
            optimizer.step()
            return [loss.detach(), first.calls, len(first.history), first.mean.clone()]

        training.step = step
        return training

    with quiet() as warned:
        report = assert_graphed_equals_eager(build, device, replays=False)
    assert report.rows[1].forwards > 0
    if what == "cache":
        assert report.rows[0].forwards > 0
    else:
        assert report.rows[0].forwards == 0
        rule = "host-value" if what == "history" else "module-attribute"
        assert report.rows[0].eager_reasons[f"capture failed: [{rule}]"] == 5
        assert any(what in str(w.message) and rule in str(w.message) for w in warned)


def test_attribute_that_is_ignored_is_left_as_it_was(device: torch.device) -> None:
    model = Net(SetsAttribute("calls")).to(device)
    with stepgraph.graph_modules(model, "layers.*", ignore=["layers.0.calls", "self.calls"]) as handle:
        for _ in range(6):
            model(torch.ones(4, 8, device=device)).sum().backward()
        assert handle.report().replays == 3
        assert model.layers[0].calls == 3, "the capture itself is no call"


# -- compiled code


@pytest.mark.parametrize("how", ["torch.compile(layer)", "layer.compile()", "inside"])
def test_compiled_modules_are_graphed(how: str, device: torch.device) -> None:
    """Compiled as a whole, in place, or somewhere inside. On the CPU the tape records the operators."""

    def make() -> nn.Module:
        model = Net(Layer(dropout=0.0), Layer(dropout=0.0))
        if how == "torch.compile(layer)":
            model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.layers)
        elif how == "layer.compile()":
            for layer in model.layers:
                layer.compile(backend="eager")
        else:
            for layer in model.layers:
                layer.up = torch.compile(layer.up, backend="eager")
        return model

    assert_graphed_equals_eager(lambda device: training_of(make, device, microbatches=2), device)


def test_compiled_region_around_graphed_modules_breaks_at_them(device: torch.device) -> None:
    """The compiled region ends before a graphed module, which is replayed, and goes on after it."""

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.compile(model, backend="eager")(x)

    assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(Layer(dropout=0.0), Layer(dropout=0.0)), device, call=call), device
    )


# -- what nobody can capture


class ReadsOnHost(nn.Module):
    """Reads a value on the host, always or only in its backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self._where = nn.Linear(8, 8), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        if self._where == "forward":
            return hidden * (2.0 if hidden.sum().item() > 0 else 0.5)
        return HostBackward.apply(hidden)


class HostBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (2.0 if grad.sum().item() > 0 else 0.5)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_capture_failure_leaves_only_its_layer_eager(where: str, device: torch.device) -> None:
    """Right everywhere, reported by rule and line, with the random state and gradients of eager."""
    with quiet() as warned:
        report = assert_graphed_equals_eager(
            lambda device: training_of(
                lambda: Net(Layer(), ReadsOnHost(where), Layer()), device, microbatches=2, zero="never"
            ),
            device,
            replays=False,
        )
    assert [row.forwards > 0 for row in report.rows] == [True, False, True]
    row = only_row(report, "layers.1")
    assert row.eager_reasons["capture failed: [host-read]"] > 10
    (message,) = {str(w.message) for w in warned if "host-read" in str(w.message)}
    assert "layers.1" in message
    assert "test_module_surroundings.py" in message


def test_capture_failure_under_strict_raises_and_restores_all(device: torch.device) -> None:
    """Trap: a failed capture leaves gc off, gradients None, a flag set or a class patched."""
    model = Net(Layer(), ReadsOnHost("forward")).to(device)
    x = torch.randn(4, 8, device=device)
    with stepgraph.graph_modules(model, "layers.*", strict=True, warmup=1):
        model(x).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        state = {k: v.clone() for k, v in model.state_dict().items()}
        random_state = torch.get_rng_state()
        with pytest.raises(stepgraph.CaptureError) as raised:
            model(x)
        assert raised.value.rule == "host-read"
        assert raised.value.where is not None
        assert gc.isenabled()
        assert not stepgraph.is_graph_capturing()
        assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        assert torch.equal(random_state, torch.get_rng_state())
        assert all(type(p) is nn.Parameter and p.is_leaf for p in model.parameters())
        with pytest.raises(stepgraph.CaptureError, match="runs eagerly"):
            model(x)
