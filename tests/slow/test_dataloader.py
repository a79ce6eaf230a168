"""A hundred captures beside a DataLoader's workers, on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.contract.test_dataloader import assert_captured_beside_a_loader


@pytest.mark.long  # the contract suite runs a few captures beside a loader
def test_dataloader_runs_beside_a_hundred_captures() -> None:
    assert_captured_beside_a_loader(torch.device("cpu"), 100)
