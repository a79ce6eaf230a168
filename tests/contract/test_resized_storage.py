"""Storages that are resized in a call: seen by one patch for the time of the call, refused by a rule, never a crash."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.backends.resizing import resized_by
from tests import resizing
from tests.processes import run_to_end

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("raise", "storage-resize"),
        ("eager", "equal"),
        ("modules", "equal"),
        ("graph_modules", "equal"),
        ("callables 3", "storage-resize"),
        ("callables 0", "storage-resize"),
    ],
)
def test_resizing_ends_in_a_refusal_or_in_eager(engine: str, expected: str, device: torch.device) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    [done] = run_to_end([[sys.executable, resizing.__file__, str(device), engine]], environment)
    assert done.returncode == 0, done.stderr
    assert dict(line.split(" ", 1) for line in done.stdout.splitlines()) == dict.fromkeys(resizing.KINDS, expected)


def grown_by(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Operators that give a tensor more memory."""
    kept = torch.ones(4, device=device)

    def taller() -> int:
        return kept.numel() + 4

    return {
        "resize_": lambda: kept.resize_(taller()),
        "resize_as_": lambda: kept.resize_as_(torch.empty(taller(), device=device)),
        "set_": lambda: kept.set_(kept.untyped_storage(), 0, (taller(),)),
    }


@pytest.mark.parametrize("name", ["resize_", "resize_as_", "set_"])
def test_growing_by_an_operator_is_refused(name: str, device: torch.device) -> None:
    grow = grown_by(device)[name]

    def step(x: torch.Tensor) -> torch.Tensor:
        return grow().fill_(2.0).sum() + x

    with stepgraph.capture(step) as captured, pytest.raises(stepgraph.CaptureError):
        for _ in range(5):
            captured(torch.ones((), device=device))


def test_resize_in_the_first_call_alone_is_no_obstacle(device: torch.device) -> None:
    kept, calls = torch.empty(4, device=device), []

    def step(x: torch.Tensor) -> torch.Tensor:
        if not calls:
            kept.untyped_storage().resize_(32)
            calls.append(True)
        return kept.copy_(x).sum()

    with stepgraph.capture(step) as captured:
        for _ in range(6):
            assert captured(torch.ones(4, device=device)) == 4
        assert captured.report().replays == 3


def test_resize_that_begins_after_the_capture_is_refused_unmade(device: torch.device) -> None:
    kept, flags = torch.ones(4, device=device), {"resize": False}

    def step(x: torch.Tensor) -> torch.Tensor:
        if flags["resize"]:
            kept.untyped_storage().resize_(0)
        return kept.sum() + x

    with stepgraph.capture(step) as captured:
        for _ in range(5):
            assert captured(torch.ones((), device=device)) == 5
        flags["resize"] = True
        with pytest.raises(stepgraph.CaptureError) as caught:
            captured(torch.ones((), device=device))
        assert caught.value.rule == "storage-resize"
        assert torch.equal(kept, torch.ones(4, device=device)), "the storage stays as it was"
        flags["resize"] = False
        for _ in range(5):
            assert captured(torch.ones((), device=device)) == 5
        assert captured.report().captures == 2


def test_resize_patch_acts_in_its_block_only() -> None:
    assert "resize_" not in vars(torch.UntypedStorage)
    seen: list[int] = []

    def see(resize: Callable[..., Any], storage: torch.UntypedStorage, num_bytes: int) -> Any:
        seen.append(num_bytes)
        return resize(storage, num_bytes)

    tensor = torch.ones(4)
    with resized_by(see):
        tensor.untyped_storage().resize_(32)
    assert tensor.untyped_storage().nbytes() == 32
    assert "resize_" not in vars(torch.UntypedStorage)
    tensor.untyped_storage().resize_(64)
    assert seen == [32]


def test_resize_is_torchs_own_at_replays(device: torch.device) -> None:
    found: list[bool] = []

    class Noting(torch.optim.SGD):  # it runs between the graphs, at replays too
        def step(self, closure: Any = None) -> None:
            found.append("resize_" in vars(torch.UntypedStorage))
            super().step()

    model = nn.Linear(4, 1).to(device)
    optimizer = Noting(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with stepgraph.capture(step, optimizer="outside", audit=False, ignore=["found"]) as captured:
        for _ in range(6):
            captured(torch.ones(2, 4, device=device))
        assert captured.report().replays == 3
    assert found[:3] == [True] * 3
    assert found[-2:] == [False] * 2


def test_verify_and_frozen_name_the_rule_and_end_no_process(device: torch.device) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    commands = [[sys.executable, resizing.__file__, str(device), tool] for tool in ("verify", "frozen")]
    for done in run_to_end(commands, environment):
        assert done.returncode == 0, done.stderr
        assert dict(line.split(" ", 1) for line in done.stdout.splitlines()) == {"unsharded": "storage-resize"}
