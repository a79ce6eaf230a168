"""How a run refuses, resumes and ends: its rows, its optimizer, a loss that is not finite, a signal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepgraph.commands.cli import app
from stepgraph.config.container import ConfigContainer
from stepgraph.core.errors import InvalidArgument, NonFinite
from stepgraph.lab.train import pretrain
from stepgraph.lab.train.checkpoint import CheckpointError
from stepgraph.lab.train.journal import FILE_NAME, Journal
from stepgraph.lab.train.loop import Loop

runner = CliRunner()
SMALL = [
    *("model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "model.ffn_hidden_size=16"),
    *("model.vocab_size=64", "model.seq_length=8", "train.train_iters=2", "train.global_batch_size=1"),
]


def settings(folder: Path, *overrides: str) -> ConfigContainer:
    return ConfigContainer().override([*SMALL, f"logger.log_dir={folder}", *overrides])


def trained(folder: Path, *overrides: str) -> Any:
    return pretrain(settings(folder, *overrides), device="cpu", quiet=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


@pytest.mark.parametrize("field", ["log_dir", "tensorboard_dir"])
def test_rows_that_cannot_be_written_are_refused(tmp_path: Path, field: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="log-file"):
        trained(tmp_path, f"logger.{field}={tmp_path / 'file' / 'folder'}")


def test_full_device_ends_the_rows_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    journal = Journal(settings(tmp_path).logger, rank=0, size=1, start=0, last=2)
    journal.write("start", 0)
    journal.write("end", 2)
    journal.close()
    assert capsys.readouterr().err.count("training goes on") == 1


def test_resume_refuses_another_optimizer(tmp_path: Path) -> None:
    trained(tmp_path, f"checkpoint.save={tmp_path}")
    given = [f"checkpoint.load={tmp_path}", "train.train_iters=3", "optimizer.optimizer=sgd"]
    with pytest.raises(CheckpointError, match=r"optimizer of .* is not the one of this run"):
        trained(tmp_path, *given)
    assert trained(tmp_path, *given, "checkpoint.load_optim=false").step == 3


def test_resume_takes_the_settings_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, f"checkpoint.save={tmp_path}")
    found: list[Any] = []
    original = Loop.run

    def noted(self: Loop) -> int:
        found.extend(self._work.optimizer.param_groups)
        return original(self)

    monkeypatch.setattr(Loop, "run", noted)
    changed = ["optimizer.weight_decay=0.5", "optimizer.adam_beta2=0.7"]
    trained(tmp_path, f"checkpoint.load={tmp_path}", "train.train_iters=3", *changed)
    assert {group["weight_decay"] for group in found} == {0.5, 0.0}
    assert {group["betas"][1] for group in found} == {0.7}


def test_loss_that_is_not_finite_names_its_iteration(tmp_path: Path) -> None:
    with pytest.raises(NonFinite, match=r"iteration \d: the loss is nan") as caught:
        trained(tmp_path, "optimizer.lr=1e18", "train.train_iters=6")
    iteration = int(caught.value.what.split()[1].rstrip(":"))
    assert f"train.iterations_to_skip={iteration}." in caught.value.fix
    done = [row["step"] for row in rows(tmp_path) if row["kind"] == "train"]
    assert done == list(range(1, iteration)), "the row before is not lost"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_run_has_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    original = Loop.run

    def stopped(self: Loop) -> int:
        os.kill(os.getpid(), number)
        return original(self)

    monkeypatch.setattr(Loop, "run", stopped)
    saved = f"checkpoint.save={tmp_path / 'saved'}"
    done = runner.invoke(app, ["train", "--device", "cpu", "--json", *SMALL, f"logger.log_dir={tmp_path}", saved])
    found = json.loads(done.stdout)
    assert done.exit_code == found["exit_code"] == 128 + number
    assert list(found["losses"]) == ["1"]
    assert found["error"]["what"] == {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert found["next"].endswith(f"checkpoint.load={tmp_path / 'saved'}")


def test_time_limit_has_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Loop.run

    def late(self: Loop) -> int:
        os.kill(os.getpid(), signal.SIGALRM)
        return original(self)

    monkeypatch.setattr(Loop, "run", late)
    given = ["train", "--device", "cpu", "--json", "--timeout", "900", *SMALL, f"logger.log_dir={tmp_path}"]
    done = runner.invoke(app, given)
    found = json.loads(done.stdout)
    assert done.exit_code == found["exit_code"] == 3
    assert list(found["losses"]) == ["1"]
    assert "as --timeout says" in found["error"]["what"]


@pytest.mark.parametrize("arguments", [["train.train_iters=0"], ["--foo"]])
def test_first_rank_alone_prints_json(arguments: list[str]) -> None:
    first, second = (
        runner.invoke(app, ["train", "--device", "cpu", "--json", *arguments], env={"RANK": rank, "WORLD_SIZE": "2"})
        for rank in "01"
    )
    assert first.exit_code == second.exit_code == 2
    assert json.loads(first.stdout)["exit_code"] == 2
    assert second.stdout == ""


def test_sections_do_not_undo_fields_typed_before_them() -> None:
    words = ["peft.dim=4", "peft=lora", "mixed_precision.fp8_recipe=mxfp8", "mixed_precision=fp32"]
    cfg = ConfigContainer().override(words)
    assert (cfg.peft.scheme, cfg.peft.dim) == ("lora", 4)
    assert cfg.mixed_precision.fp8_recipe == "mxfp8"
