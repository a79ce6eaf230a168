"""A checkpoint knows nothing of graphs: saved by a captured run or an eager one, resumed by either, bit for bit.

The uninterrupted eager run is the measure. A run is cut after some calls, its state goes through a file (model,
optimizer, scheduler, GradScaler, random state), and what resumes from it must go on as if nothing had happened: in a
program built anew, or in the very one that is captured already and has meanwhile trained on.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import assert_same_history, different, same_bits

CALLS, CUT = 18, 8

KINDS = ("plain", "fused", "scheduled", "scheduled fused", "scaled", "scaled fused")
CAPTURED = pytest.mark.parametrize("saved", ["captured", "eager"])


@dataclass
class Training:
    """A program with everything that a checkpoint holds, and nothing else to compare."""

    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    scaler: torch.amp.GradScaler | None
    batches: list[torch.Tensor]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        half = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        with torch.autocast(self.device.type, dtype=half, enabled=self.scaler is not None):
            loss = self.model(x).float().pow(2).mean()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def checkpoint(self) -> dict[str, Any]:
        """Everything that a user saves."""
        state: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        state["rng"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["rng cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng cuda"], self.device)

    def run(self, step: Any, start: int, stop: int) -> list[tuple[list[Any], dict[str, Any]]]:
        """Call the step on a range of batches; results, checkpoint and gradients after each."""
        history = []
        for x in self.batches[start:stop]:
            loss = step(x).detach().clone()
            if self.scheduler is not None:
                self.scheduler.step()
            history.append(([loss], flat(self.checkpoint()) | self._gradients()))
        return history

    def _gradients(self) -> dict[str, Any]:
        return {f"{name}.grad": p.grad.detach().clone() for name, p in self.model.named_parameters()}


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """A checkpoint's tensors and numbers by their paths, copied."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    found = {key: value for k, v in items for key, value in flat(v, f"{name}/{k}").items()}
    if isinstance(state, (dict, list)):
        return found
    return {name: state.detach().clone() if isinstance(state, torch.Tensor) else state}


def build(device: torch.device, kind: str, seed: int = 7) -> Training:
    torch.manual_seed(5)
    batches = list(torch.randn(CALLS, 4, 8, device=device))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused="fused" in kind)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12) if "scheduled" in kind else None
    scaler = None
    if "scaled" in kind:
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=3)
        batches[CUT - 2] = batches[CUT - 2] * float("inf")  # a skipped step on either side of the cut
        batches[CUT + 5] = batches[CUT + 5] * float("inf")
        model[1].track_running_stats = False  # one infinite batch would leave NaN in them for ever
    return Training(device, model, optimizer, scheduler, scaler, batches)


@contextlib.contextmanager
def stepping(training: Training, how: str) -> Iterator[Any]:
    """The training's step, captured or as it is."""
    if how == "eager":
        yield training.step
        return
    with stepgraph.capture(training.step) as step:
        yield step


def uninterrupted(device: torch.device, kind: str) -> list[Any]:
    training = build(device, kind)
    return training.run(training.step, 0, CALLS)


def assert_replayed(step: Any) -> None:
    if isinstance(step, stepgraph.CapturedStep):
        assert step.report().replays > 0


@pytest.mark.pairwise
@pytest.mark.parametrize("resumed", ["captured", "eager"])
@CAPTURED
@pytest.mark.parametrize("kind", KINDS)
def test_resume_in_a_new_program_equals_an_uninterrupted_run(
    kind: str, saved: str, resumed: str, device: torch.device, tmp_path: Path
) -> None:
    expected = uninterrupted(device, kind)
    first = build(device, kind)
    with stepping(first, saved) as step:
        assert_same_history(expected[:CUT], first.run(step, 0, CUT), "before the cut")
        torch.save(first.checkpoint(), tmp_path / "checkpoint.pt")
        assert_replayed(step)
    second = build(device, kind, seed=8)
    second.load(tmp_path / "checkpoint.pt")
    with stepping(second, resumed) as step:
        assert_same_history(expected[CUT:], second.run(step, CUT, CALLS), "resumed")
        assert_replayed(step)


RECAPTURES: dict[str, dict[str, int]] = {
    "plain": {},
    "fused": {"the state of AdamW was loaded or replaced": 1},
    "scheduled": {},
}
"""What is captured again after a load: only what the graph holds by address, which is a captured optimizer's state."""


@pytest.mark.parametrize("kind", KINDS)
def test_resume_in_the_live_captured_step(kind: str, device: torch.device, tmp_path: Path) -> None:
    """The run goes on past its checkpoint, then back to it: in place for the model, one recapture for the optimizer."""
    expected = uninterrupted(device, kind)
    training = build(device, kind)
    with stepgraph.capture(training.step) as step:
        assert_same_history(expected[:CUT], training.run(step, 0, CUT), "before the cut")
        torch.save(training.checkpoint(), tmp_path / "checkpoint.pt")
        training.run(step, CUT, CUT + 4)
        before = step.report()
        training.load(tmp_path / "checkpoint.pt")
        assert_same_history(expected[CUT:], training.run(step, CUT, CALLS), "resumed")
        after = step.report()
    assert after.recaptures - before.recaptures <= 1
    assert after.eager_calls == before.eager_calls == 3
    if kind in RECAPTURES:
        assert after.recapture_reasons == RECAPTURES[kind]


@CAPTURED
def test_resume_keeps_going_in_the_saving_program(saved: str, device: torch.device) -> None:
    """Saving itself changes nothing: state_dict is taken, and kept, while the step goes on."""
    expected = uninterrupted(device, "fused")
    training = build(device, "fused")
    with stepping(training, saved) as step:
        history, kept, files = [], [], []
        for call in range(CALLS):
            history += training.run(step, call, call + 1)
            files.append(io.BytesIO())
            torch.save(training.checkpoint(), files[-1])
            kept.append(flat(training.checkpoint()))
    assert_same_history(expected, history, "saving at each call")
    for file, state in zip(files, kept, strict=True):
        file.seek(0)
        assert different(flat(torch.load(file, weights_only=True)), state) == []


def test_resume_state_dict_of_a_captured_run_is_plain(device: torch.device) -> None:
    """Names, types, dtypes and devices of a checkpoint are those of an eager run: no wrapper, no buffer of a graph."""
    eager, captured = build(device, "scheduled fused"), build(device, "scheduled fused")
    eager.run(eager.step, 0, CUT)
    with stepgraph.capture(captured.step) as step:
        captured.run(step, 0, CUT)
        one, two = flat(eager.checkpoint()), flat(captured.checkpoint())
        assert list(one) == list(two)
        assert all(type(one[name]) is type(two[name]) for name in one)
        owned = {id(p) for p in captured.model.parameters()}
        assert all(id(p) in owned for group in captured.optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_resume_with_assign_into_a_model_without_memory(kind: str, device: torch.device, tmp_path: Path) -> None:
    """The way of large models: built on meta, given the checkpoint's own tensors."""
    expected = uninterrupted(device, kind)
    first = build(device, kind)
    with stepgraph.capture(first.step) as step:
        first.run(step, 0, CUT)
        torch.save(first.checkpoint(), tmp_path / "checkpoint.pt")
    second = build(device, kind, seed=8)
    second.model.to("meta")
    state = torch.load(tmp_path / "checkpoint.pt", map_location=device, weights_only=True)
    second.model.load_state_dict(state["model"], assign=True)
    second.optimizer = torch.optim.AdamW(second.model.parameters(), lr=1e-2, fused="fused" in kind)
    second.load(tmp_path / "checkpoint.pt")
    with stepgraph.capture(second.step) as step:
        assert_same_history(expected[CUT:], second.run(step, CUT, CALLS), "resumed")
        assert step.report().replays == CALLS - CUT - 3


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_resume_with_assign_in_the_live_captured_step(kind: str, device: torch.device, tmp_path: Path) -> None:
    """New tensors under an old step, and a new optimizer over them: noticed, and captured once more."""
    expected = uninterrupted(device, kind)
    training = build(device, kind)
    with stepgraph.capture(training.step) as step:
        training.run(step, 0, CUT)
        torch.save(training.checkpoint(), tmp_path / "checkpoint.pt")
        training.run(step, CUT, CUT + 4)
        state = torch.load(tmp_path / "checkpoint.pt", map_location=device, weights_only=True)
        training.model.load_state_dict(state["model"], assign=True)
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2, fused="fused" in kind)
        training.load(tmp_path / "checkpoint.pt")
        assert_same_history(expected[CUT:], training.run(step, CUT, CALLS), "resumed")
        report = step.report()
    assert report.recaptures == 1, report.recapture_reasons
    assert report.captures == 2
    assert "replaced" in next(iter(report.recapture_reasons))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_resume_scaler_loaded_in_a_live_captured_step(fused: bool, device: torch.device) -> None:
    """Scale and growth numbers are those of the loaded state from the next call on."""

    def run(how: str) -> list[Any]:
        training = build(device, "scaled fused" if fused else "scaled")
        scaler = training.scaler
        assert scaler is not None
        with stepping(training, how) as step:
            history = training.run(step, 0, 5)
            loaded = {"scale": 32.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
            scaler.load_state_dict(scaler.state_dict() | loaded)
            history += training.run(step, 5, CALLS)
            assert_replayed(step)
        return history

    expected, received = run("eager"), run("captured")
    assert_same_history(expected, received, "loaded scaler")
    scales = [state["/scaler/scale"] for _, state in expected]
    assert scales[4:9] == [512.0, 32.0, 8.0, 8.0, 32.0]  # call 6 overflows


def test_resume_model_alone_into_a_live_step_keeps_every_graph(device: torch.device) -> None:
    training = build(device, "fused")
    start = {k: v.clone() for k, v in training.model.state_dict().items()}
    with stepgraph.capture(training.step) as step:
        training.run(step, 0, CUT)
        for _ in range(3):
            training.model.load_state_dict(start)
            training.run(step, 0, 1)
        report = step.report()
        assert (report.captures, report.recaptures) == (1, 0)
        assert not same_bits(training.model[0].weight, start["0.weight"])
