"""Captures beside a DataLoader: its workers and its pin-memory thread run on while graphs are recorded.

On a GPU the pin-memory thread calls CUDA at any moment, also in the middle of a capture; a capture that minds what
other threads do breaks now and then. On the tape there is no such thread, but batches come through shared memory from
other processes all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stepgraph
from tests.harness import Program, assert_same_history, run

SIZE = 4


def build(device: torch.device) -> Program:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(11)
    return Program(step, [], [model], [optimizer])


@pytest.mark.gpu
@pytest.mark.timeout(60)
def test_dataloader_runs_beside_a_hundred_captures() -> None:
    """On the CPU the slower suites do the same."""
    assert_captured_beside_a_loader(torch.device("cuda"), 100)


def assert_captured_beside_a_loader(device: torch.device, captures: int) -> None:
    """Every third call captures: none fails, and what was trained is what eager trains on the same batches."""
    features = torch.randn(3 * captures * SIZE, 6)
    labels = torch.arange(3 * captures * SIZE) % 3
    eager = build(device)
    eager.batches = list(zip(features.to(device).split(SIZE), labels.to(device).split(SIZE), strict=True))
    expected = run(eager, eager.step, device)
    loader = DataLoader(
        TensorDataset(features, labels),
        batch_size=SIZE,
        num_workers=2,
        prefetch_factor=2,  # few, so that workers and the pinning thread are busy all the time
        pin_memory=device.type == "cuda",
        multiprocessing_context="spawn",  # this process may hold a GPU
        generator=torch.Generator(),  # the loader draws its workers' seed from this one, not from the program's
    )
    program = build(device)
    received: list[Any] = []
    with stepgraph.capture(program.step, warmup=2) as step:
        for call, batch in enumerate(loader):
            if call % 3 == 0:
                step.reset()
            program.batches = [tuple(tensor.to(device, non_blocking=True) for tensor in batch)]
            received += run(program, step, device)
        report = step.report()
    assert (report.captures, report.replays, report.eager_reasons) == (captures, captures, {"warm-up": 2 * captures})
    assert_same_history(expected, received, "captured differs from eager")
