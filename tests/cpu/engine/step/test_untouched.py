"""The short way to a replay: taken where nothing was touched, and never where anything was."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph import CapturedStep
from stepgraph.engine.step.call import CapturedCall, StartState

RATE, MOMENTUM, SCALE = 0.1, 0.9, 1.5
X = torch.ones(4, 4)


@dataclass
class Training:
    """A captured step with all that it reads at hand."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    scale: dict[str, float]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).pow(2).mean() * self.scale["loss"]
        loss.backward()
        self.optimizer.step()
        return loss


def make_training() -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return Training(model, optimizer, {"loss": SCALE})


@contextlib.contextmanager
def captured(training: Training | None = None) -> Iterator[tuple[Training, CapturedStep[..., Any], CapturedCall]]:
    """A step that is replayed already, and its one graph."""
    training = training or make_training()
    with stepgraph.capture(training.step, backend="tape", audit=False) as step:
        for _ in range(6):
            step(X)
        (site,) = step._sites.values()
        (call,) = site.calls
        yield training, step, call


def set_number(key: str, value: Any) -> Callable[[Training], None]:
    def change(training: Training) -> None:
        training.optimizer.param_groups[0][key] = value

    return change


def drop_grad(training: Training) -> None:
    training.model[0].weight.grad = None


def replace_grad(training: Training) -> None:
    training.model[0].weight.grad = torch.zeros(8, 4)


def freeze(training: Training) -> None:
    training.model[0].bias.requires_grad_(False)


def swap_data(training: Training) -> None:
    training.model[2].weight.data = training.model[2].weight.data.clone()


def replace_buffer(training: Training) -> None:
    training.model[1].running_var = torch.ones(8)


def evaluate_one(training: Training) -> None:
    training.model[1].eval()


def add_module(training: Training) -> None:
    training.model.append(nn.Tanh())


def add_module_without_a_word(training: Training) -> None:
    training.model._modules["more"] = nn.Tanh()


def replace_children(training: Training) -> None:
    training.model._modules = {**training.model._modules, "more": nn.Tanh()}


def add_hook(training: Training) -> None:
    training.model[0].register_forward_hook(lambda *_: None)


def add_step_hook(training: Training) -> None:
    training.optimizer.register_step_pre_hook(lambda *_: None)


def add_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def add_parameter_to_group(training: Training) -> None:
    training.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))


def replace_group(training: Training) -> None:
    training.optimizer.param_groups[0] = {**training.optimizer.param_groups[0], "lr": 0.5}


def load_optimizer(training: Training) -> None:
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def scale_loss(training: Training) -> None:
    training.scale["loss"] = 2.0


CHANGES: dict[str, Callable[[Training], None]] = {
    "learning rate": set_number("lr", 0.2),
    "new number": set_number("momentum", 0.8),
    "gradient dropped": drop_grad,
    "gradient replaced": replace_grad,
    "frozen": freeze,
    "data swapped": swap_data,
    "buffer replaced": replace_buffer,
    "one module in eval": evaluate_one,
    "module added": add_module,
    "module added behind torch's back": add_module_without_a_word,
    "children replaced behind torch's back": replace_children,
    "hook": add_hook,
    "step hook": add_step_hook,
    "group added": add_group,
    "parameter added to a group": add_parameter_to_group,
    "group replaced": replace_group,
    "optimizer loaded": load_optimizer,
    "watched value": scale_loss,
}


@pytest.mark.parametrize("name", CHANGES)
def test_untouched_is_denied_after_a_change(name: str) -> None:
    with captured() as (training, _, call):
        assert call.is_untouched()
        CHANGES[name](training)
        assert not call.is_untouched()


def tells_of_a_change(call: CapturedCall) -> bool:
    """What the long way would find."""
    return not call.start.fits() or bool(call.guards.changed())


def put_back(training: Training) -> None:
    """Some of the changes, undone."""
    training.optimizer.param_groups[0].update(lr=RATE, momentum=MOMENTUM)
    training.scale["loss"] = SCALE
    training.model.train()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([*CHANGES.values(), put_back, put_back]), max_size=5))
def test_untouched_is_never_true_when_a_guard_reports_a_change(changes: list[Callable[[Training], None]]) -> None:
    with captured() as (training, _, call):
        for change in changes:
            change(training)
            assert not (call.is_untouched() and tells_of_a_change(call))


def test_untouched_is_true_again_once_a_number_is_restored() -> None:
    with captured() as (training, step, call):
        training.optimizer.param_groups[0]["lr"] = 0.3
        assert not call.is_untouched()
        training.optimizer.param_groups[0]["lr"] = RATE
        assert call.is_untouched()
        step(X)
        assert step.report().captures == 1


def test_untouched_numbers_in_a_list_are_compared_each_time() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    with captured(Training(model, optimizer, {"loss": SCALE})) as (_, step, call):
        assert call.is_untouched()
        optimizer.param_groups[0]["betas"][0] = 0.5
        step(X)
        assert "betas" in next(iter(step.report().recapture_reasons))


def test_untouched_calls_do_not_look_at_the_guards_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with captured() as (_, step, _):
        monkeypatch.setattr(StartState, "fits", lambda self: pytest.fail("the long way was taken"))
        before = step.report().replays
        step(X)
        assert step.report().replays == before + 1


def test_untouched_two_graphs_of_a_site_are_distinguished() -> None:
    """Train and eval in turn, gradients as they are: each call is replayed by the graph of its mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    x = torch.randn(16, 4)
    with stepgraph.capture(forward, backend="tape") as step:
        for _ in range(6):
            for mode in (True, False):
                model.train(mode)
                result = step(x)
                assert (result == 0).any().item() is mode
        report = step.report()
        assert (report.captures, report.recaptures) == (2, 0)


def test_untouched_is_true_with_gradients_dropped_outside() -> None:
    training = make_training()

    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = training.model(x).pow(2).mean()
        loss.backward()
        return loss

    with stepgraph.capture(backward, backend="tape", audit=False) as step:
        for _ in range(6):
            training.optimizer.zero_grad()
            step(X)
        (site,) = step._sites.values()
        (call,) = site.calls
        assert not call.is_untouched()  # with the gradients of the last call
        training.optimizer.zero_grad()
        assert call.is_untouched()
        step(X)
        assert all(p.grad is not None for p in training.model.parameters())


def test_untouched_is_true_again_after_any_events_elsewhere() -> None:
    with captured() as (_, step, call):
        for _ in range(12):
            nn.Linear(1, 1).register_forward_hook(lambda *_: None).remove()
            assert not call.is_untouched()
            for _ in range(20):
                step(X)
            assert call.is_untouched()
        assert step.report().captures == 1


def test_untouched_is_true_under_a_constant_schedule() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with captured(Training(model, optimizer, {"loss": SCALE})) as (_, step, call):
        for _ in range(3):
            schedule.step()
            assert call.is_untouched()
            step(X)
        optimizer.param_groups[0]["lr"] = RATE * 2
        assert not call.is_untouched()


def test_cache_refilled_after_a_change_does_not_stop_replays() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None:
                self.mask = torch.ones(4)
            return self.inner(x) * self.mask

    model = Masked()
    with stepgraph.capture(lambda x: model(x).detach(), backend="tape") as step, warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        for index in range(12):
            if index == 6:
                model.mask = None
            assert torch.equal(step(X), model(X))
        assert step.report().captures == 3  # one for the call that fills it, one for those after it


def test_untouched_is_seen_beside_other_threads() -> None:
    """The entry among torch's hooks that stays where other threads run is nobody's change."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with captured() as (_, step, call):
            step(X)
            assert call.is_untouched()
    finally:
        over.set()
        thread.join()
