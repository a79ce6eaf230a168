"""The gradient guard: with the compiler's guard as without it, any change of a gradient or a flag is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stepgraph.engine.guards.gradients import GradientGuard

Change = Callable[[nn.Parameter], object]


def _set_grad(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    parameter.grad = grad


CHANGES: dict[str, Change] = {
    "nothing": lambda p: None,
    "a value in place": lambda p: p.data.add_(1.0),
    "a gradient in place": lambda p: p.grad.add_(1.0) if p.grad is not None else None,
    "no gradient": lambda p: _set_grad(p, None),
    "another gradient": lambda p: _set_grad(p, torch.ones_like(p)),
    "an equal gradient": lambda p: _set_grad(p, p.grad.clone() if p.grad is not None else torch.zeros_like(p)),
    "the other flag": lambda p: p.requires_grad_(not p.requires_grad),
}


def parameters(count: int) -> list[nn.Parameter]:
    """Some with a gradient, some without, some that need none."""
    made = [nn.Parameter(torch.ones(2, 3), requires_grad=i % 3 != 2) for i in range(count)]
    for i, parameter in enumerate(made):
        parameter.grad = torch.zeros(2, 3) if i % 2 == 0 else None
    return made


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_there() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # imports the compiler, as any training step does


@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 5)), max_size=4))
def test_parameters_hold_while_all_gradients_and_flags_are_equal(changes: list[tuple[str, int]]) -> None:
    held = parameters(6)
    grads, flags = [p.grad for p in held], [p.requires_grad for p in held]
    guard = GradientGuard(held, grads)
    assert [guard.hold(), guard.hold()] == [True, True]  # by looking at each, then by the guard
    assert guard._check is not None
    for change, index in changes:
        CHANGES[change](held[index])
        unchanged = all(p.grad is g and p.requires_grad is f for p, g, f in zip(held, grads, flags, strict=True))
        assert guard.hold() is unchanged
        with torch.no_grad():
            assert guard.hold() is unchanged


def test_gradient_at_a_reused_address_is_noticed() -> None:
    (parameter,) = parameters(1)
    guard = GradientGuard([parameter], [parameter.grad])
    assert [guard.hold(), guard.hold()] == [True, True]  # by looking at each, then by the guard
    for _ in range(100):
        parameter.grad = None
        parameter.grad = torch.zeros(2, 3)
        assert not guard.hold()


def test_parameters_of_another_class_are_looked_at_one_by_one() -> None:
    class Marked(nn.Parameter):
        pass

    parameter = Marked(torch.ones(2))
    guard = GradientGuard([parameter], [None])
    assert [guard.hold(), guard.hold()] == [True, True]  # by looking at each, then by the guard
    parameter.grad = torch.ones(2)
    assert not guard.hold()


def test_no_parameters_hold() -> None:
    guard = GradientGuard([], [])
    assert [guard.hold(), guard.hold()] == [True, True]  # by looking at each, then by the guard
