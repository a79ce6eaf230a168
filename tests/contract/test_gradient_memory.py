"""Gradients and results that Python can reach between calls are never where another graph of the session writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import stepgraph

Call = Callable[[torch.Tensor], torch.Tensor]
Wrap = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]
ROUNDS = 30


def models_of(device: torch.device, count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 2).to(device) for _ in range(count)]


def make_train(model: nn.Module) -> Call:
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return train


def step_given_its_model(models: Sequence[nn.Module], wrap: Wrap) -> list[Call]:
    def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return make_train(model)(x)

    step = wrap(train)
    return [lambda x, m=model: step(m, x) for model in models]


def steps_in_one_session(models: Sequence[nn.Module], wrap: Wrap) -> list[Call]:
    return [wrap(make_train(model)) for model in models]


def parameters_of(models: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [parameter for model in models for parameter in model.parameters()]


def run(device: torch.device, make: Callable[..., list[Call]], wrap: Wrap, passes: int) -> list[list[torch.Tensor]]:
    """Call the steps in any order, `passes` times each, then let all optimizers step."""
    order = random.Random(0)
    models = models_of(device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    calls = make(models, wrap)
    seen = []
    for i in range(ROUNDS):
        for k in order.sample([*range(len(models))] * passes, passes * len(models)):
            calls[k](torch.full((3, 4), float(i + k)).sin().to(device))
        seen.append([parameter.grad.clone() for parameter in parameters_of(models)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append([parameter.detach().clone() for parameter in parameters_of(models)])
    return seen


class InOneSession:
    """Captures steps in one session and counts their replays."""

    def __init__(self) -> None:
        self._session = stepgraph.Session()
        self._steps: list[stepgraph.CapturedStep[..., torch.Tensor]] = []

    def __call__(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        self._steps.append(stepgraph.capture(function, session=self._session))
        return self._steps[-1]

    @property
    def replays(self) -> int:
        return sum(step.replays for step in self._steps)


@pytest.mark.parametrize("passes", [1, 2], ids=["once", "accumulated"])
@pytest.mark.parametrize("make", [step_given_its_model, steps_in_one_session])
def test_gradients_of_two_models_in_any_order(
    device: torch.device, make: Callable[..., list[Call]], passes: int
) -> None:
    wrap = InOneSession()
    eager, graphed = run(device, make, lambda f: f, passes), run(device, make, wrap, passes)
    assert all(all(map(torch.equal, one, two)) for one, two in zip(eager, graphed, strict=True))
    assert wrap.replays >= 0.8 * 2 * passes * ROUNDS


@pytest.mark.parametrize("make", [step_given_its_model, steps_in_one_session])
def test_gradients_held_over_calls_for_another_model(device: torch.device, make: Callable[..., list[Call]]) -> None:
    wrap, models = InOneSession(), models_of(device)
    first, second = make(models, wrap)
    x = torch.ones(3, 4, device=device)
    for i in range(12):
        model, call, other = (models[0], first, second) if i % 2 else (models[1], second, first)
        model.zero_grad()
        call(x * i)
        held = [parameter.grad for parameter in model.parameters()]
        copies = [grad.clone() for grad in held]
        model.zero_grad()
        for _ in range(2):
            other(x)
        assert all(map(torch.equal, held, copies))
    assert wrap.replays >= 20


def graphed_after_another(device: torch.device, wrap: Wrap) -> list[torch.Tensor]:
    """Capture an evaluation, then a training, and call the former between a backward and the use of its gradients."""
    model, other = models_of(device)
    with torch.no_grad():
        evaluate = wrap(lambda x: other(x.repeat(8, 1)).relu().sum())
        train = wrap(make_train(model))
    found = []
    for i in range(10):
        with torch.no_grad():
            evaluate(torch.ones(4, 4, device=device))
        if i >= 4:
            model.zero_grad()
            train(torch.full((3, 4), float(i), device=device))
            with torch.no_grad():
                evaluate(torch.ones(4, 4, device=device))
            found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


def test_gradients_after_the_capture_of_an_evaluation(device: torch.device) -> None:
    eager, graphed = graphed_after_another(device, lambda f: f), graphed_after_another(device, InOneSession())
    assert all(map(torch.equal, eager, graphed))


def test_gradient_in_two_layouts(device: torch.device) -> None:
    """The session's address of a gradient does not fit the second graph, so that one needs another."""

    def results(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(6, 4, device=device))
        other = wrap(lambda x: (x.repeat(2, 1) * 2).sum())

        def train(x: torch.Tensor, transposed: bool) -> torch.Tensor:
            loss = (weight * x).square().sum()
            loss.backward()
            if transposed:
                weight.grad = weight.grad.t().contiguous().t()
            return loss.detach()

        step, found = wrap(train), []
        for i in range(24):
            weight.grad = None
            step(torch.full((6, 4), float(i), device=device), i // 3 % 2 == 1)
            other(torch.ones(3, 4, device=device))
            found.append(weight.grad.clone())
        return found

    assert all(map(torch.equal, results(lambda f: f), results(InOneSession())))


def test_static_results_survive_replays_of_other_graphs(device: torch.device) -> None:
    session = stepgraph.Session()
    first = stepgraph.capture(lambda x: (x.repeat(8, 1) * 2).relu().sum(), session=session)
    second = stepgraph.capture(lambda x: {"y": x * 3, "x": x}, session=session, outputs="static")
    ones = torch.ones(16, 64, device=device)
    for _ in range(5):
        first(ones)
    for i in range(8):
        result = second(ones * i)
        first(ones)
        assert torch.equal(result["y"], ones * i * 3)
    assert second.replays >= 5
    assert result["y"].data_ptr() == second(ones)["y"].data_ptr(), "at a fixed address"


def test_session_shared_by_modules_and_a_step(device: torch.device) -> None:
    """A step and graphed modules add to the same parameters' gradients, in any order."""

    def results(*, graphed: bool) -> list[torch.Tensor]:
        model, order = models_of(device)[0], random.Random(1)
        whole = make_train(model)
        session = stepgraph.Session()
        if graphed:
            whole = stepgraph.capture(whole, session=session)
        body = nn.Sequential(model, nn.Tanh())
        handle = stepgraph.graph_modules(body, "0", session=session) if graphed else None
        found = []
        for i in range(20):
            x = torch.full((3, 4), float(i)).cos().to(device)
            for kind in order.sample("sm", 2):
                whole(x) if kind == "s" else body(x).square().sum().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        if handle is not None:
            handle.close()
        return found

    assert all(map(torch.equal, results(graphed=False), results(graphed=True)))


def two_backwards(
    device: torch.device, wrap: Wrap, kind: type[torch.optim.Optimizer], *, steps: bool, returns: bool
) -> list[torch.Tensor]:
    """Use gradients of a first backward after a second one. The optimizer `steps` between them, or does not.

    The step `returns` the gradients, or what it computes with them.
    """
    (model,) = models_of(device, 1)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]

    def train(x: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if steps:
            optimizer.step()
        first = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        model(x * 2).square().mean().backward()
        if not steps:
            torch._foreach_add_([parameter.grad for parameter in model.parameters()], first, alpha=-0.3)
        optimizer.step()
        return first if returns else [p.grad * grad for p, grad in zip(model.parameters(), first, strict=True)]

    other, step, found = wrap(lambda x: (x.repeat(9, 1) * 2).sum()), wrap(train), []
    for i in range(14):
        for _ in range(4 if i == 0 else 1):
            other(torch.ones(8, 8, device=device))
        if i > 4:
            found += [result.clone() for result in step(torch.full((3, 4), float(i), device=device).sin())]
            other(torch.ones(8, 8, device=device))
            found += [tensor.detach().clone() for p in model.parameters() for tensor in (p, p.grad)]
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.pairwise
@pytest.mark.parametrize("returns", [False, True], ids=["uses", "returns"])
@pytest.mark.parametrize("steps", [False, True], ids=["one", "two-steps"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["inside", "between-graphs"])
@pytest.mark.parametrize("in_one", [False, True], ids=["alone", "after-another"])
def test_gradients_used_after_a_second_backward(
    device: torch.device, kind: type[torch.optim.Optimizer], steps: bool, in_one: bool, returns: bool
) -> None:
    wrap = InOneSession() if in_one else stepgraph.capture
    if in_one and returns and steps and kind is torch.optim.Adam:
        with pytest.raises(stepgraph.CaptureError, match="held-gradient"):
            two_backwards(device, wrap, kind, steps=steps, returns=returns)
        return
    eager = two_backwards(device, lambda f: f, kind, steps=steps, returns=returns)
    graphed = two_backwards(device, wrap, kind, steps=steps, returns=returns)
    assert all(map(torch.equal, eager, graphed))
    assert not in_one or wrap.replays >= 15
