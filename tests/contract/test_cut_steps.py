"""Steps cut by an optimizer between two graphs: the second graph computes with results of the first.

While such a step is recorded, kernels on the CPU look at what they are given: a probability must be one, an index must
be in range. So results of the first graph hold plausible numbers until the whole step is recorded.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager

CALLS = 6
BATCH, FEATURES, NOISE = 5, 8, 4


def adversarial(device: torch.device) -> Program:
    """Two networks with an optimizer and a BCELoss each, as in torch's DCGAN example."""
    judge = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid()).to(device)
    painter = nn.Sequential(nn.Linear(NOISE, FEATURES), nn.BatchNorm1d(FEATURES), nn.Tanh()).to(device)
    judging = torch.optim.Adam(judge.parameters(), lr=2e-2, betas=(0.5, 0.999))
    painting = torch.optim.Adam(painter.parameters(), lr=2e-2, betas=(0.5, 0.999))
    criterion = nn.BCELoss()

    def step(real: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        judge.zero_grad()
        label = torch.full((real.size(0),), 1.0, device=device)
        told = judge(real).view(-1)
        on_real = criterion(told, label)
        on_real.backward()
        fake = painter(noise)
        label.fill_(0.0)
        on_fake = criterion(judge(fake.detach()).view(-1), label)
        on_fake.backward()
        judging.step()
        painter.zero_grad()
        label.fill_(1.0)
        fooled = criterion(judge(fake).view(-1), label)
        fooled.backward()
        painting.step()
        return on_real + on_fake, fooled, told.mean()

    shapes = ((BATCH, FEATURES), (BATCH, NOISE))
    batches = [tuple(torch.randn(shape, device=device) for shape in shapes) for _ in range(CALLS)]
    return Program(step, batches, [judge, painter], [judging, painting])


def test_adversarial_training_with_two_optimizers(device: torch.device) -> None:
    report = assert_captured_equals_eager(adversarial, device)
    assert (report.replays, report.eager_calls) == (CALLS - 3, 3)


def cross_entropy(p: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy(p, torch.ones_like(p))


def multinomial(p: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(p, 2, replacement=True).to(p.dtype)


def index(p: torch.Tensor) -> torch.Tensor:
    return torch.arange(BATCH, device=p.device)[(p * (BATCH - 1)).long()]


def nested_index(p: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot((p * (BATCH - 1)).long(), BATCH).sum(-1)


@pytest.mark.parametrize("use", [cross_entropy, torch.bernoulli, multinomial, index, nested_index])
def test_values_before_a_cut_are_fit_for_use_after_it(
    use: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Linear(FEATURES, BATCH).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)  # its step count is on the host

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            p = model(x).sigmoid()
            p.sum().backward()
            optimizer.step()
            return use(p.detach())

        return Program(step, [(torch.randn(BATCH, FEATURES, device=device),) for _ in range(CALLS)], [model])

    torch.use_deterministic_algorithms(use is not multinomial)  # torch knows no deterministic sum for it on CUDA
    report = assert_captured_equals_eager(build, device)
    assert report.replays == CALLS - 3


def test_results_of_a_capture_that_failed_after_a_cut_are_poison() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    kept: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()  # what a container keeps is taken back

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        if stepgraph.is_graph_capturing():
            kept.put(loss.detach())
        loss.backward()
        optimizer.step()
        return loss * loss.item()

    with stepgraph.capture(step, ignore=["kept"], backend="tape") as captured:
        for _ in range(3):
            captured(torch.ones(2, 2))
        with pytest.raises(stepgraph.CaptureError, match="host-read"):
            captured(torch.ones(2, 2))
    assert kept.get().isnan()
