"""The training loop on the tape: every implementation gives eager's losses, and every end is in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepgraph.core.errors import NonFinite
from stepgraph.lab.train import pretrain
from stepgraph.lab.train.checkpoint import checkpoints_in
from stepgraph.lab.train.memory import DeviceMemory
from tests.train_harness import gpt, tiny

GRAPHED = ("scopes", "iteration", "te")


def train(folder: Path, implementation: str = "eager", provider: Any = gpt, **settings: Any) -> Any:
    settings = {"model__num_layers": 1, **settings}
    return pretrain(tiny(folder, implementation, **settings), model_provider=provider, device="cpu", quiet=True)


@pytest.mark.parametrize("implementation", GRAPHED)
def test_graphed_losses_equal_eager(tmp_path: Path, implementation: str) -> None:
    settings = {"train__eval_interval": 3, "train__eval_iters": 1}
    eager = train(tmp_path, **settings)
    graphed = train(tmp_path, implementation, **settings)
    assert graphed.losses == eager.losses
    assert graphed.eval_losses == eager.eval_losses
    assert graphed.replays > 0
    assert graphed.eager_reasons["warm-up"] == 2
    assert ("evaluation" in graphed.eager_reasons) == (implementation != "iteration")
    assert "NOTHING WAS REPLAYED" in eager.verdict
    rows = [json.loads(line) for line in (tmp_path / "stepgraph-train.jsonl").read_text().splitlines()]
    runs = list(dict.fromkeys(row["run"] for row in rows))
    assert len(runs) == 2, "both runs are in the file"
    for run in runs:
        trained = [row["loss"] for row in rows if (row["kind"], row["run"]) == ("train", run)]
        assert trained == list(eager.losses.values())
    assert {"start", "capture", "eval", "end"} <= {row["kind"] for row in rows}


def test_autocast_of_graphs_ahead_of_time_equals_eager(tmp_path: Path) -> None:
    settings = {"mixed_precision": "bf16_autocast", "train__train_iters": 3, "model__cuda_graph_warmup_steps": 1}
    graphed = train(tmp_path, "te", **settings)
    assert graphed.losses == train(tmp_path, **settings).losses
    assert graphed.replays > 0


def test_too_little_memory_means_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "free", lambda self: 1000)
    report = train(tmp_path, "te")
    assert report.losses == train(tmp_path).losses
    assert report.replays == 0
    assert sum(count for reason, count in report.eager_reasons.items() if reason.startswith("memory:")) == 4
    assert "NOTHING WAS REPLAYED" in str(report)
    assert "1000" not in report.verdict


class Spoiled(nn.Module):
    """A model whose loss becomes infinite from one call on."""

    def __init__(self, cfg: Any, calls: int) -> None:
        super().__init__()
        self.inner = gpt(cfg)
        self.register_buffer("left", torch.tensor(float(calls)))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.inner(tokens, targets)
        self.left.sub_(1)
        return loss / self.left.clamp(0, 1)


@pytest.mark.parametrize(("implementation", "check"), [("eager", None), ("eager", "device"), ("te", "device")])
def test_nan_in_the_loss_stops_the_run(tmp_path: Path, implementation: str, check: Any) -> None:
    settings: dict[str, Any] = {"checkpoint__save": str(tmp_path), "checkpoint__save_interval": 1}
    with pytest.raises(NonFinite):
        train(
            *(tmp_path, implementation, lambda cfg: Spoiled(cfg, 9)),
            rerun_state_machine__check_for_nan_in_loss=check,
            model__cuda_graph_scope=[]
            if implementation == "eager"
            else tiny(tmp_path, implementation).model.cuda_graph_scope,
            **settings,
        )
    assert [step for step, _ in checkpoints_in(tmp_path)] == [1, 2, 3, 4], "bad parameters are not saved"


def test_events_come_in_order(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    cfg = tiny(tmp_path, "te", train__train_iters=4, checkpoint__save=str(tmp_path))
    pretrain(cfg, model_provider=gpt, device="cpu", on_event=lambda *event: seen.append(event), quiet=True)
    assert seen == [("warmup", 0), ("warmup", 1), ("capture", 2), ("replay", 2), ("replay", 3), ("checkpoint", 4)]


def test_settings_that_are_not_carried_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ddp.use_distributed_optimizer, train.rampup_batch_size"):
        train(tmp_path, ddp__use_distributed_optimizer=True, train__rampup_batch_size=[1, 1, 1])
    with pytest.raises(ValueError, match="batch-size"):
        train(tmp_path, train__global_batch_size=3)


def test_save_folder_of_a_longer_run_is_refused(tmp_path: Path) -> None:
    train(tmp_path, checkpoint__save=str(tmp_path / "saved"))
    with pytest.raises(RuntimeError, match="went further"):
        train(tmp_path, checkpoint__save=str(tmp_path / "saved"), train__train_iters=3)


def test_recent_checkpoints_are_kept(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"checkpoint__save": str(tmp_path / "s"), "checkpoint__most_recent_k": 2}
    train(tmp_path, checkpoint__save_interval=2, **saving)
    assert [step for step, _ in checkpoints_in(tmp_path / "s")] == [4, 6]
