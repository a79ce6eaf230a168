"""`stepgraph train`: the flags of the field, settings, cuts, and what a bad one is answered with."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stepgraph.cli import app
from stepgraph.commands.train import configured

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


def test_without_a_recipe_a_small_gpt_is_cut_to_fit() -> None:
    cfg, cuts = configured(None, "pretrain", ["train.train_iters=5"], None, CPU)
    assert any("hidden_size" in cut for cut in cuts)
    assert cfg.train.train_iters == 5
    whole, none = configured("gpt2_small", "lora", [], None, CPU)
    assert (whole.model.num_layers, whole.peft.scheme, none) == (12, "lora", [])


@pytest.mark.parametrize("task", ["sft", "lora"])
def test_fine_tuning_reads_jsonl(tmp_path: Path, task: str) -> None:
    rows = [{"prompt": f"{i} + 1 = ", "completion": str(i + 1)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    result = run(tmp_path, "--task", task, f"dataset.data_path={tmp_path / 'rows.jsonl'}", "peft.dim=2")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["final_loss"] > 0
