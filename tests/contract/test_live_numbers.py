"""An optimizer's numbers are live: changed between calls, by hand or by any scheduler, they act as they do in eager.

An optimizer that runs between graphs reads them at each step, so nothing has to be captured again. One inside the graph
has them baked in: it leaves the graph at the first change, once, and the report says for which number.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stepgraph
from tests.harness import Program, assert_captured_equals_eager, different, snapshot

CALLS = 16
WARM = 3

Groups = list[dict[str, Any]]


class SignMomentum(torch.optim.Optimizer):
    """An optimizer as users write them: plain Python over plain tensors, its momentum made at the first step."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(group["momentum"]).add_(parameter.grad, alpha=1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(state["momentum"].sign(), alpha=-group["lr"])


OPTIMIZERS: dict[str, tuple[Callable[[Groups], torch.optim.Optimizer], bool]] = {
    "adamw fused": (lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, fused=True), True),
    "adamw foreach": (lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, foreach=True), False),
    "sgd momentum": (lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1), True),
    "rmsprop": (lambda groups: torch.optim.RMSprop(groups, momentum=0.9), True),
    "adagrad": (lambda groups: torch.optim.Adagrad(groups, lr_decay=0.1), False),
    "custom": (lambda groups: SignMomentum(groups, lr=0.1), False),
}
"""Each optimizer, and whether it is inside the graph until a number changes."""

Advance = Callable[[int, float], None]
"""What the loop does after a call: its index, and the loss as the loop reads it."""


def build(
    device: torch.device,
    optimizer_name: str,
    schedule: Callable[[torch.optim.Optimizer], Advance],
    lrs: tuple[float, ...] = (0.01, 0.002),
) -> Program:
    """Two parameter groups with learning rates of their own; `schedule` says what the loop does after each call."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    parts = (model[0], model[2])
    optimizer = OPTIMIZERS[optimizer_name][0](
        [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(parts, lrs, strict=True)]
    )
    advance = schedule(optimizer)
    latest = torch.zeros((), device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        latest.copy_(loss.detach())
        return loss

    def before_call(index: int) -> None:
        if index:
            advance(index, latest.item())

    batches = [(torch.randn(4, 6, device=device),) for _ in range(CALLS)]
    return Program(step, batches, [model], [optimizer], tensors=[latest], before_call=before_call)


def assigned(key: str, value: Callable[[int], Any], group: int | None = None) -> Callable[..., Advance]:
    """Assign a number in all groups, or in one, from the sixth call on."""

    def schedule(optimizer: torch.optim.Optimizer) -> Advance:
        def advance(index: int, loss: float) -> None:
            for i, numbers in enumerate(optimizer.param_groups):
                if index > 5 and group in (None, i):
                    numbers[key] = value(index)

        return advance

    return schedule


def stepped(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[..., Advance]:
    """Step a scheduler after each call, as the loop of an epoch does."""

    def schedule(optimizer: torch.optim.Optimizer) -> Advance:
        scheduler = make(optimizer)
        return lambda index, loss: scheduler.step()

    return schedule


def on_plateau(optimizer: torch.optim.Optimizer) -> Advance:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, cooldown=1)
    return lambda index, loss: scheduler.step(loss)


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    then = lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[5])


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.01], total_steps=CALLS + 1, cycle_momentum=True)


SCHEDULES: dict[str, Callable[..., Advance]] = {
    "assigned": assigned("lr", lambda index: 0.1 / index),
    "one group": assigned("lr", lambda index: 0.1 / index, group=1),
    "step": stepped(lambda o: lr_scheduler.StepLR(o, step_size=5, gamma=0.3)),
    "warm-up": stepped(lambda o: lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, (epoch + 1) / 9))),
    "cosine": stepped(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10, eta_min=1e-4)),
    "plateau": on_plateau,
    "sequential": stepped(warm_up_then_cosine),
}


def assert_live(
    optimizer_name: str, schedule: Callable[..., Advance], number: str, device: torch.device, **options: Any
) -> stepgraph.Report:
    """Equal to eager after each call; no call eager but warm-up; one recapture, named, if the graph had it baked in."""
    report = assert_captured_equals_eager(lambda d: build(d, optimizer_name, schedule), device, **options)
    inside = OPTIMIZERS[optimizer_name][1]
    assert report.recaptures <= (1 if inside else 0), report.recapture_reasons
    assert all(f"[{number!r}]" in reason for reason in report.recapture_reasons)
    assert report.eager_reasons == {"warm-up": WARM}
    assert report.replays == CALLS - WARM
    assert report.segments == 3  # the optimizer cuts the step; the loss is noted after it
    return report


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_live_learning_rate_equals_eager(optimizer: str, schedule: str, device: torch.device) -> None:
    report = assert_live(optimizer, SCHEDULES[schedule], "lr", device)
    if schedule == "one group" and OPTIMIZERS[optimizer][1]:
        (reason,) = report.recapture_reasons
        assert "param_groups[1]['lr']: 0.002 -> " in reason


@pytest.mark.parametrize("optimizer", ["adamw fused", "adamw foreach", "sgd momentum", "rmsprop", "custom"])
def test_live_one_cycle_moves_learning_rate_and_momentum(optimizer: str, device: torch.device) -> None:
    """OneCycle turns `betas` for Adam and `momentum` for the others, the other way round than the learning rate."""
    seen: list[Any] = []

    def schedule(made: torch.optim.Optimizer) -> Advance:
        scheduler = one_cycle(made)

        def advance(index: int, loss: float) -> None:
            scheduler.step()
            seen.append(made.param_groups[0].get("momentum", made.param_groups[0].get("betas")))

        return advance

    assert_live(optimizer, schedule, "lr", device)
    assert len(set(seen)) > CALLS // 2


NUMBERS: dict[tuple[str, str], Callable[[int], Any]] = {
    ("adamw fused", "weight_decay"): lambda index: 0.5 / index,
    ("adamw fused", "betas"): lambda index: (0.9 - index / 100, 0.99),
    ("adamw fused", "eps"): lambda index: 1e-3 * index,
    ("adamw foreach", "weight_decay"): lambda index: 0.5 / index,
    ("adamw foreach", "betas"): lambda index: (0.9 - index / 100, 0.99),
    ("sgd momentum", "momentum"): lambda index: 0.9 - index / 50,
    ("sgd momentum", "weight_decay"): lambda index: 0.5 / index,
    ("sgd momentum", "nesterov"): lambda index: index % 3 == 0,
    ("rmsprop", "alpha"): lambda index: 0.9 - index / 100,
    ("custom", "momentum"): lambda index: 0.9 - index / 50,
}


@pytest.mark.parametrize(("optimizer", "number"), NUMBERS, ids=" ".join)
def test_live_number_other_than_the_learning_rate(optimizer: str, number: str, device: torch.device) -> None:
    assert_live(optimizer, assigned(number, NUMBERS[optimizer, number]), number, device)


@pytest.mark.parametrize("optimizer", ["adamw fused", "sgd momentum"])
def test_live_number_that_returns_to_its_old_value(optimizer: str, device: torch.device) -> None:
    """For two calls only: the graph with the old value baked in must not come back for the calls between."""
    assert_live(optimizer, assigned("lr", lambda index: 0.5 if index in (7, 8) else 0.01, group=0), "lr", device)


def test_live_betas_in_a_list_changed_in_place(device: torch.device) -> None:
    def build_list(device: torch.device) -> Program:
        program = build(device, "adamw fused", lambda optimizer: lambda index, loss: None)
        for group in program.optimizers[0].param_groups:
            group["betas"] = [0.9, 0.99]

        def before_call(index: int) -> None:
            if index > 5:
                program.optimizers[0].param_groups[1]["betas"][0] = index / 32

        return dataclasses.replace(program, before_call=before_call)

    report = assert_captured_equals_eager(build_list, device)
    assert report.recapture_reasons == {"AdamW.param_groups[1]['betas']: [0.9, 0.99] -> [0.1875, 0.99]": 1}


@pytest.mark.parametrize("optimizer", ["adamw fused", "adamw foreach", "sgd momentum"])
def test_live_learning_rate_of_all_signatures(optimizer: str, device: torch.device) -> None:
    """A change reaches every graph of the step, those that were not called since, too."""

    def two_sizes(device: torch.device) -> Program:
        program = build(device, optimizer, assigned("lr", lambda index: 0.1 / (1 + index // 8)))
        sizes = [4, 2] * 4 + [4, 4, 4, 2] * 4
        program.batches = [(torch.randn(size, 6, device=device),) for size in sizes]
        return program

    report = assert_captured_equals_eager(two_sizes, device, warmup=2)  # both are captured when it changes
    assert report.graphs == 2
    assert report.recaptures == (2 if OPTIMIZERS[optimizer][1] else 0)
    assert report.eager_reasons == {"warm-up": 2 * 2}


@pytest.mark.parametrize("optimizer", ["adamw fused", "sgd momentum"])
def test_live_learning_rate_changed_before_the_capture(optimizer: str, device: torch.device) -> None:
    """After the last eager call: the optimizer leaves the graph at once, and nothing is captured twice."""

    def build_one(device: torch.device) -> Program:
        return build(device, optimizer, assigned("lr", lambda index: 0.1 / index))

    report = assert_captured_equals_eager(build_one, device, warmup=6)
    assert (report.captures, report.recaptures) == (1, 0)
    assert ["its numbers change" in told for told in report.optimizers.values()] == [True]


def test_live_learning_rate_is_no_change_under_strict(device: torch.device) -> None:
    """A schedule is what everybody does: strict has nothing against it."""
    assert_live("adamw fused", SCHEDULES["cosine"], "lr", device, strict=True)


def test_live_optimizer_of_two_steps_is_live_in_both(device: torch.device) -> None:
    """One that two captured steps share: each has it baked in, and each notices by itself."""

    def run(captured: bool) -> tuple[list[torch.Tensor], dict[str, Any], list[stepgraph.Report]]:
        torch.manual_seed(7)
        program = build(device, "sgd momentum", assigned("lr", lambda index: 0.1 / index))
        model, optimizer = program.modules[0], program.optimizers[0]

        def penalty(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).abs().mean()
            loss.backward()
            optimizer.step()
            return loss

        steps: list[Any] = [program.step, penalty]
        with stepgraph.Session() as session:
            if captured:
                steps = [stepgraph.capture(step, session=session) for step in steps]
            losses = []
            for index, (x,) in enumerate(program.batches):
                program.before_call(index)
                losses += [step(x).detach().clone() for step in steps]
            return losses, snapshot(program, device), [step.report() for step in steps if captured]

    expected, state, _ = run(False)
    received, other, reports = run(True)
    assert all(torch.equal(a, b) for a, b in zip(expected, received, strict=True))
    assert different(state, other) == []
    assert [report.recaptures for report in reports] == [1, 1]


@pytest.mark.parametrize("optimizer", ["adamw fused", "adamw foreach"])
@pytest.mark.parametrize("make", [lr_scheduler.CosineAnnealingLR, lr_scheduler.OneCycleLR], ids=["cosine", "one cycle"])
def test_live_scheduler_stepped_inside_is_refused_by_name(make: Any, optimizer: str, device: torch.device) -> None:
    made: list[Any] = []

    def schedule(optimizer: torch.optim.Optimizer) -> Advance:
        made.append(make(optimizer, 20) if make is lr_scheduler.CosineAnnealingLR else one_cycle(optimizer))
        return lambda index, loss: None

    program = build(device, optimizer, schedule)
    (scheduler,) = made

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = program.step(x)
        scheduler.step()
        return loss

    with stepgraph.capture(step) as captured:
        for i in range(WARM):
            captured(*program.batches[i])
        before = snapshot(program, device)
        with pytest.raises(stepgraph.CaptureError, match="host-value") as caught:
            captured(*program.batches[WARM])
        assert different(before, snapshot(program, device)) == []
    assert "AdamW.param_groups[0]['lr']" in str(caught.value)
    assert "scheduler.step() after it" in str(caught.value)


def test_live_scheduler_made_after_the_capture(device: torch.device) -> None:
    """A scheduler wraps `optimizer.step` to see that it was called; one that comes late must see it, too."""

    def build_late(device: torch.device) -> Program:
        program = build(device, "adamw foreach", lambda optimizer: lambda index, loss: None)
        made: list[Any] = []

        def before_call(index: int) -> None:
            if index == 8:
                made.append(lr_scheduler.ExponentialLR(program.optimizers[0], gamma=0.5))
            if index > 8:
                made[0].step()

        program.before_call = before_call
        return program

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = assert_captured_equals_eager(build_late, device)
    assert report.recaptures == 0
