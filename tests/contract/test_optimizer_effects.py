"""Optimizers between graphs that do more than update: clear gradients, return something, count in their groups."""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import stepgraph
from tests.harness import Program, assert_captured_equals_eager, same_bits
from tests.seeding import seed

CALLS = 9


class Own(Optimizer):
    """Plain descent, with something done after it."""

    def __init__(self, params: Any, after: Callable[[Own], Any] = lambda self: None) -> None:
        super().__init__(params, {"lr": 0.1, "step": 0})
        self._after = after

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
        return self._after(self)


def clear(optimizer: Optimizer, *_: Any) -> None:
    optimizer.zero_grad()


def double(optimizer: Optimizer, *_: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.grad * 2


def count(optimizer: Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["step"] += 1


def with_hook(params: Any) -> Optimizer:
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    optimizer.register_step_post_hook(clear)
    return optimizer


def program(
    make: Callable[[Any], Optimizer], then: Callable[[nn.Module], Any] = lambda model: None
) -> Callable[[torch.device], Program]:
    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        optimizer = make(model.parameters())

        def step(x: torch.Tensor) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss, then(model)

        batches = [(torch.randn(3, 4, device=device),) for _ in range(CALLS)]
        return Program(step, batches, [model], [optimizer])

    return build


def weights(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.detach().norm() for p in model.parameters()])


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])


def backward_again(model: nn.Module) -> torch.Tensor:
    model(torch.ones_like(next(model.parameters())[:1, :4])).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("then", [lambda model: None, weights, backward_again], ids=["last", "weights", "backward"])
@pytest.mark.parametrize("make", [with_hook, lambda p: Own(p, clear)], ids=["hook of AdamW", "own step"])
def test_gradients_that_an_optimizer_clears_are_gone_as_in_eager(
    make: Callable[[Any], Optimizer], then: Callable[[nn.Module], Any], device: torch.device
) -> None:
    assert_captured_equals_eager(program(make, then), device)


@pytest.mark.parametrize("every", [2, 3])
def test_gradients_that_an_optimizer_clears_at_times_equal_eager(every: int, device: torch.device) -> None:
    def make(params: Any) -> Optimizer:
        calls = iter(range(1, 100))
        return Own(params, lambda self: clear(self) if next(calls) % every == 0 else None)

    assert_captured_equals_eager(program(make), device)


def test_gradients_that_an_optimizer_replaces_are_as_in_eager(device: torch.device) -> None:
    assert_captured_equals_eager(program(lambda p: Own(p, double)), device)


def test_graph_refuses_gradients_replaced_by_an_optimizer(device: torch.device) -> None:
    built = program(lambda p: Own(p, double), gradients)(device)
    with stepgraph.capture(built.step, warmup=1) as step:
        with pytest.raises(stepgraph.StateChanged, match=r"Own\.step replaced or cleared gradients") as caught:
            for batch in built.batches:
                step(*batch)
        assert caught.value.rule == "optimizer-gradients"


@pytest.mark.parametrize(
    "value", [lambda o: 4, lambda o: o.param_groups[0]["params"][0].grad.norm()], ids=["4", "norm"]
)
@pytest.mark.parametrize(
    "use",
    [lambda n: n, lambda n: {"n": [n]}, lambda n: n * 2, lambda n: 1.0 + n, lambda n: torch.add(n, 1), float],
    ids=["handed out", "in a container", "times", "plus", "given to torch", "float"],
)
def test_what_an_optimizer_between_graphs_returns_cannot_be_used(
    value: Callable[[Any], Any], use: Callable[[Any], Any], device: torch.device
) -> None:
    model = nn.Linear(3, 2).to(device)
    optimizer = Own(model.parameters(), value)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        model(x).sum().backward()
        n = optimizer.step()
        assert n is not None
        return use(n)

    with stepgraph.capture(step, warmup=1) as captured:
        captured(torch.ones(1, 3, device=device))
        with pytest.raises(stepgraph.CaptureError, match=r"uses the result of Own\.step\(\)") as caught:
            for _ in range(2):
                captured(torch.ones(1, 3, device=device))
        assert caught.value.rule == "optimizer-result"


def test_what_an_optimizer_returns_may_be_thrown_away(device: torch.device) -> None:
    assert_captured_equals_eager(program(lambda p: Own(p, lambda self: 4)), device)


@pytest.mark.parametrize(
    "call", [lambda o: o.step(None), lambda o: o.step(closure=None)], ids=["step(None)", "keyword"]
)
def test_no_closure_is_no_closure(call: Callable[[Any], Any], device: torch.device) -> None:
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        call(optimizer)

    with stepgraph.capture(step) as captured:
        for _ in range(5):
            captured(torch.ones(1, 3, device=device))
        assert captured.report().replays == 2


def test_numbers_changed_by_an_optimizer_between_graphs_are_live(device: torch.device) -> None:
    assert_captured_equals_eager(program(lambda p: Own(p, count)), device)


def test_numbers_that_the_step_changes_are_refused(device: torch.device) -> None:
    model = nn.Linear(3, 2).to(device)
    optimizer = Own(model.parameters(), count)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()

    with stepgraph.capture(step) as captured, pytest.raises(stepgraph.CaptureError, match=r"\['lr'\]: .* ->"):
        for _ in range(5):
            captured(torch.ones(1, 3, device=device))


class Around(Optimizer):
    """As Accelerate and Lookahead do: an optimizer around another, with its groups."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
    ],
    ids=["sgd", "adamw fused", "adamw"],
)
def test_an_optimizer_around_another_is_captured(make: Callable[[Any], Optimizer], device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Linear(4, 2).to(device)
        inner = make(model.parameters())
        optimizer = Around(inner)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return Program(step, [(torch.randn(3, 4, device=device),) for _ in range(CALLS)], [model], [inner])

    assert_captured_equals_eager(build, device)


def test_state_of_an_optimizer_read_by_the_step_is_guarded(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return torch.stack([state["exp_avg"].norm() for state in optimizer.state.values()])

        def before_call(index: int) -> None:
            if index == 6:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        batches = [(torch.randn(3, 4, device=device),) for _ in range(CALLS)]
        return Program(step, batches, [model], [optimizer], before_call=before_call)

    report = assert_captured_equals_eager(build, device)
    assert report.recapture_reasons == {"the state of AdamW was loaded or replaced": 1}


def with_stored_step(device: torch.device) -> Program:
    """The step of an optimizer that runs between graphs was stored: stepgraph cannot cut it out."""
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    stored = optimizer.step

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        stored()

    return Program(step, [(torch.randn(1, 3, device=device),) for _ in range(CALLS)], [model], [optimizer])


def with_another_optimizer_each_time(device: torch.device) -> Program:
    """Each run of the step's Python takes an optimizer that none before has shown."""
    model = nn.Linear(3, 2).to(device)
    others = ctypes.py_object(iter([torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(4 * CALLS)]))

    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        model(x).sum().backward()
        next(others.value).step()

    return Program(step, [(torch.randn(1, 3, device=device),) for _ in range(2 * CALLS)], [model])


@pytest.mark.parametrize("build", [with_stored_step, with_another_optimizer_each_time])
def test_late_optimizer_runs_eagerly_and_is_counted(
    build: Callable[[torch.device], Program], device: torch.device
) -> None:
    programs = []
    for _ in range(2):
        seed(0)
        programs.append(build(device))
    program, eager = programs
    with stepgraph.capture(program.step) as captured, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for one, two in zip(program.batches, eager.batches, strict=True):
            captured(*one)
            eager.step(*two)
        report = captured.report()
    assert ["late-optimizer" in str(each.message) for each in told] == [True]
    assert report.eager_reasons["capture failed: [late-optimizer]"] > 1
    assert not report.refused
    for one, two in zip(program.modules[0].parameters(), eager.modules[0].parameters(), strict=True):
        assert same_bits(one.detach(), two.detach())


def test_late_optimizer_raises_under_strict(device: torch.device) -> None:
    program = with_stored_step(device)
    with (
        stepgraph.capture(program.step, strict=True) as captured,
        pytest.raises(stepgraph.CaptureError, match=r"was not called as `optimizer\.step\(\)`") as caught,
    ):
        for batch in program.batches:
            captured(*batch)
    assert caught.value.rule == "late-optimizer"


def with_own_state(device: torch.device, **options: Any) -> list[torch.Tensor]:
    """Losses, and at the end weights and what the program keeps in its optimizer's state."""
    seed(7)
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.state.update({"history": [torch.zeros(2, device=device)], "scale": torch.ones(1, device=device), "n": 3})

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) * optimizer.state["scale"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.state["history"][0].add_(1)
        return loss.detach()

    run = stepgraph.capture(step, **options) if options else step
    losses = [run(torch.full((3, 4), float(index), device=device)) for index in range(CALLS)]
    if options:
        assert run.report().replays == CALLS - 3
    return [*losses, *model.parameters(), optimizer.state["history"][0]]


@pytest.mark.parametrize("optimizer", ["auto", "capturable"])
def test_state_under_a_key_of_the_program_is_no_obstacle(device: torch.device, optimizer: str) -> None:
    """torch allows any key and any value in an optimizer's state, also what is not a dict."""
    received = with_own_state(device, optimizer=optimizer)
    assert received[-1].tolist() == [CALLS] * 2
    if optimizer == "auto":  # the other one computes with other formulas
        assert all(map(same_bits, with_own_state(device), received))
