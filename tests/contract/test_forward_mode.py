"""Forward-mode AD inside a step: dual tensors, `torch.func.jvp` and what is built on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.harness import Program, assert_captured_equals_eager

Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], object]


def jvp(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> object:
    return torch.func.jvp(lambda x: model(x).square().sum(-1), (x,), (tangent,))


def dual(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> object:
    with forward_ad.dual_level():
        y = model(forward_ad.make_dual(x, tangent))
        y[0].mul_(2)
        primal, derivative = forward_ad.unpack_dual(y)
        return primal.clone(), derivative.clone()


def no_tangent(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> object:
    """A zero tangent that is no memory at all comes out."""
    with forward_ad.dual_level():
        y = forward_ad.make_dual(x, torch._efficientzerotensor(x.shape, device=x.device)) * 2
        primal, derivative = forward_ad.unpack_dual(y)
        return primal.clone(), derivative + 1, derivative


def hessian_vector(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> object:
    return torch.func.jvp(torch.func.grad(lambda x: model(x).square().sum()), (x,), (tangent,))


def jacobian(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> object:
    return torch.func.jacfwd(lambda x: model(x) * tangent[0])(x[0])


def parameters(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> object:
    values = dict(model.named_parameters())
    tangents = {name: torch.ones_like(value) for name, value in values.items()}
    return torch.func.jvp(lambda p: torch.func.functional_call(model, p, (x,)).mean(), (values,), (tangents,))


def backward_of_a_tangent(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> object:
    out, derivative = torch.func.jvp(model, (x,), (tangent,))
    loss = derivative.square().mean() + out.mean()
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore:a result of the captured step requires a gradient")
@pytest.mark.parametrize("work", [jvp, dual, no_tangent, hessian_vector, jacobian, parameters, backward_of_a_tangent])
def test_forward_mode_in_a_step_equals_eager(work: Step, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        count = torch.zeros((), device=device)

        def step(x: torch.Tensor, tangent: torch.Tensor) -> object:
            optimizer.zero_grad()
            count.add_(1)
            result = work(model, x, tangent)
            optimizer.step()
            return result

        batches = [tuple(torch.randn(3, 4, device=device) for _ in range(2)) for _ in range(5)]
        return Program(step, batches, [model], [optimizer], [count])

    assert_captured_equals_eager(build, device)
