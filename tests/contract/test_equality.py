"""N calls of a captured step leave exactly what N eager calls leave, after every single call, on each backend."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contract.programs import OPTIMIZERS, PROGRAMS, classifier_program, vectors
from tests.harness import Program, assert_captured_equals_eager


@pytest.mark.parametrize("name", PROGRAMS)
def test_captured_step_equals_eager_after_every_call(name: str, device: torch.device) -> None:
    report = assert_captured_equals_eager(PROGRAMS[name], device)
    assert set(report.eager_reasons) == {"warm-up"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_captured_step_equals_eager_with_optimizer(name: str, device: torch.device) -> None:
    make, inside = OPTIMIZERS[name]

    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        optimizer = make(model.parameters())
        return classifier_program(model, optimizer, vectors(device, 4, 8), lambda x: model(x).pow(2).mean())

    report = assert_captured_equals_eager(build, device)
    assert report.segments == (1 if inside else 2)
    assert report.eager_calls == 3
