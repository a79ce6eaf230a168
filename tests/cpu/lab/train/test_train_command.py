"""`stepgraph train`: the flags of the field, settings, cuts, and what a bad one is answered with."""

from __future__ import annotations

import json
import shlex
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stepgraph.commands.cli import app
from stepgraph.commands.train import configured, read, resume_command
from stepgraph.config.container import ConfigContainer
from stepgraph.core.errors import InvalidArgument
from stepgraph.lab import recipes
from stepgraph.lab.recipes.fit import refuse_too_large
from stepgraph.lab.train.loop import Loop

runner = CliRunner()
CPU = torch.device("cpu")
SMALL = [
    *("model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.ffn_hidden_size=32"),
    *("model.vocab_size=64", "model.seq_length=8", "train.train_iters=4", "train.global_batch_size=1"),
]


def run(folder: Path, *arguments: str) -> Any:
    given = ["train", "--device", "cpu", "--json", *SMALL, f"logger.log_dir={folder}", *arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older names
        return runner.invoke(app, given)


@pytest.mark.parametrize(
    ("flags", "implementation"),
    [
        (["--enable-cuda-graph", "--cuda-graph-num-warmup-steps", "3"], "local"),
        (
            [
                *("--enable-cuda-graph", "--cuda-graph-scope", "full_iteration", "--cuda-graph-warmup-steps", "1"),
                *("--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad"),
            ],
            "local, full_iteration",
        ),
        (
            [
                "--cuda_graph_impl",
                "transformer_engine",
                "--cuda_graph_scope",
                "attn,mlp",
                "model.cuda_graph_warmup_steps=1",
            ],
            "transformer_engine",
        ),
        (["--cuda-graph-impl", "local", "--cuda-graph-scope", "attn", "mlp"], "local"),
        (["--cuda-graph-impl=none"], "none"),
    ],
)
def test_flags_of_megatron_and_bridge_choose(tmp_path: Path, flags: list[str], implementation: str) -> None:
    result = run(tmp_path, *flags)
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["implementation"] == implementation
    assert (values["replays"] > 0) == (implementation != "none")
    assert len(values["losses"]) == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train.train_itres=3"], "train.train_iters"),
        (["--cuda-graph-impl", "locl"], "local"),
        (["--recipe", "gpt2_smal"], "gpt2_small"),
        (["--task", "sfd"], "sft"),
        (["model.num_layers"], "model.num_layers=VALUE"),
        (["--config", "/no/such/file.toml"], "correct the path"),
        (["model.tensor_model_parallel_size=2"], "not-run-here"),
        (["--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "full_iteration"], "full-iteration-impl"),
        (["checkpoint.load=/no/such/folder"], "no checkpoint"),
        (["ddp.use_distributed_optimizer=true"], "not-trained"),
    ],
)
def test_bad_arguments_exit_with_2(tmp_path: Path, arguments: list[str], text: str) -> None:
    result = run(tmp_path, *arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def described(
    *words: str, recipe: str | None = None, fit: bool | None = None
) -> tuple[ConfigContainer, list[str], int]:
    return configured(read(recipe, "pretrain", list(words), fit), CPU)


def test_without_a_recipe_a_small_gpt_is_cut_to_fit() -> None:
    cfg, cuts, parameters = described("train.train_iters=5")
    assert any("hidden_size" in cut for cut in cuts)
    assert cfg.train.train_iters == 5
    assert 0 < parameters < 10**7
    whole = read("gpt2_small", "lora", [], None)
    assert (whole.config.model.num_layers, whole.config.peft.scheme, whole.fits) == (12, "lora", False)


@pytest.mark.parametrize("name", ["defaults", "llama3_8b"])
def test_a_file_alone_is_the_whole_configuration(tmp_path: Path, name: str) -> None:
    cfg = ConfigContainer() if name == "defaults" else recipes.recipe(name)
    cfg.model.num_layers, cfg.train.train_iters = 2, 7
    (tmp_path / "run.toml").write_text(cfg.to_toml())
    wanted = read(None, "pretrain", [f"--config={tmp_path / 'run.toml'}"], None)
    assert (wanted.config, wanted.fits) == (cfg, False)
    assert read(None, "pretrain", [f"--config={tmp_path / 'run.toml'}"], True).fits
    over = read("gpt2_small", "pretrain", [f"--config={tmp_path / 'run.toml'}", "model.num_layers=3"], None)
    assert over.config.model.num_layers == 3


@pytest.mark.parametrize(
    "words",
    [
        ["model.num_layers=6"],
        ["model.hidden_size=64"],
        ["model.hidden_size=512", "model.num_attention_heads=8", "model.seq_length=16"],
        ["model.num_attention_heads=3", "model.vocab_size=9000"],
    ],
)
def test_cuts_leave_typed_settings_and_all_hold(words: list[str]) -> None:
    cfg, cuts, _ = described(*words)
    model = cfg.to_dict()["model"]
    typed = dict(word.removeprefix("model.").split("=") for word in words)
    assert {name: str(model[name]) for name in typed} == typed
    assert cuts
    for cut in cuts:
        setting, _, change = cut.partition(": ")
        section, _, name = setting.partition(".")
        assert name not in typed
        assert change.partition(" -> ")[2] == str(cfg.to_dict()[section][name])


def test_cuts_leave_a_typed_batch() -> None:
    assert described("train.global_batch_size=6")[0].train.global_batch_size == 6
    assert described()[0].train.global_batch_size == 2


def test_a_model_too_large_is_refused_before_it_is_built() -> None:
    with pytest.raises(InvalidArgument, match=r"add --fit") as caught:
        described(recipe="deepseek_v3")
    assert caught.value.rule == "fit"
    assert "GiB" in caught.value.details[0]
    cfg = recipes.llama3_8b()
    needed = 8_030_261_248 * (2 if cfg.mixed_precision.params_dtype != "fp32" else 4) * 4
    refuse_too_large(cfg, 2 * needed)
    with pytest.raises(InvalidArgument):
        refuse_too_large(cfg, needed // 2)
    cfg.peft.scheme = "lora"
    refuse_too_large(cfg, needed // 2)


def test_the_model_is_named_and_errors_come_alone(tmp_path: Path) -> None:
    words = ["train", "--device", "cpu", *SMALL, f"logger.log_dir={tmp_path}"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "model: gpt, 1 layer, width 32, " in result.stderr
    assert "num_layers" not in result.stderr.partition("model: ")[0]
    for wrong in ("model.num_query_groups=3", "ddp.use_distributed_optimizer=true", "model.kind=moe"):
        refused = runner.invoke(app, [*words, wrong])
        assert (refused.exit_code, "cut to fit" in refused.stderr) == (2, False), wrong


@pytest.mark.parametrize("task", ["sft", "lora"])
def test_fine_tuning_reads_jsonl(tmp_path: Path, task: str) -> None:
    rows = [{"prompt": f"{i} + 1 = ", "completion": str(i + 1)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    result = run(tmp_path, "--task", task, f"dataset.data_path={tmp_path / 'rows.jsonl'}", "peft.dim=2")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["final_loss"] > 0


def test_older_flags_are_warned_of_by_their_own_names(tmp_path: Path) -> None:
    given = ["train", "--device", "cpu", *SMALL, f"logger.log_dir={tmp_path}", "--enable-cuda-graph"]
    done = runner.invoke(app, [*given, "--cuda-graph-num-warmup-steps", "1"])
    assert done.exit_code == 0
    assert "warning: --enable-cuda-graph is another generation's name" in done.stderr
    assert "warning: --cuda-graph-num-warmup-steps is another" in done.stderr
    assert "typer" not in done.stderr


def test_stopped_run_prints_the_command_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = f"checkpoint.save={tmp_path / 'a folder'}"
    original = Loop.run

    def stopped(self: Loop) -> int:
        self._flag.number = signal.SIGINT
        return original(self)

    monkeypatch.setattr(Loop, "run", stopped)
    given = ["train", "--device", "cpu", *SMALL, f"logger.log_dir={tmp_path}"]
    done = runner.invoke(app, [*given, saved])
    assert done.exit_code == 130
    command = next(line for line in done.stderr.splitlines() if "go on with: " in line).partition("go on with: ")[2]
    monkeypatch.setattr(Loop, "run", original)
    words = shlex.split(command)
    assert words[:2] == ["stepgraph", "train"]
    again = runner.invoke(app, [*words[1:], "--json"])
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["start"] == 1
    assert "nothing was saved of 1 step;" in _stopped_without_saving(given, monkeypatch, stopped)


def _stopped_without_saving(given: list[str], monkeypatch: pytest.MonkeyPatch, stopped: Any) -> str:
    monkeypatch.setattr(Loop, "run", stopped)
    return str(runner.invoke(app, given).stderr)


def test_resume_command_starts_all_ranks_again() -> None:
    found = resume_command(["--task", "sft", "checkpoint.load=old", "checkpoint.save=new"], "new", ranks=2)
    start = "torchrun --nproc-per-node 2 -m stepgraph train --task sft"
    assert found == f"{start} checkpoint.save=new checkpoint.load=new"


def test_recipe_that_is_not_trained_suggests_no_training() -> None:
    done = runner.invoke(app, ["recipes", "qwen3_vl"])
    assert "Not trained by `stepgraph train`" in done.stdout
    assert "stepgraph train --recipe" not in done.stdout
    assert "stepgraph train --recipe llama3_8b" in runner.invoke(app, ["recipes", "llama3_8b"]).stdout


def test_report_of_an_iteration_counts_its_parameters(tmp_path: Path) -> None:
    done = run(tmp_path, "--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration")
    graphs = json.loads(done.stdout)["graphs"]
    assert "finish.parameters=[" in graphs["outlines"][0]
    assert "finish.parameters[7]" not in graphs["outlines"][0]
    assert "finish.parameters[7]" in graphs["signatures"][0], "the names are there for who asks"
