"""`stepgraph bench` on a machine without the GPU that is asked for: refusals, predictions, and a small run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import stepgraph
from stepgraph.commands.bench import render
from stepgraph.commands.cli import app
from stepgraph.config.rules import RULES
from stepgraph.lab.bench.run import Memory, Regions

PLAIN = {"NO_COLOR": "1", "COLUMNS": "80"}
GUIDE = (
    "-m qwen -mr qwen3_30b_a3b --task pretrain -g h100 -c bf16 -ng 16 -tp 2 -pp 2 -ep 4 "
    "--cuda_graph_impl transformer_engine --cuda_graph_scope attn,moe_router,moe_preprocess"
)
"""The line of NVIDIA's guide."""
TINY = (
    "-g cpu --fit --steps 2 model.num_layers=1 model.hidden_size=32 model.num_attention_heads=2 -sl 16 -mb 1 -gb 1 "
    "model.vocab_size=128"
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said without a GPU")


def bench(line: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and stderr of a command line."""
    done = CliRunner().invoke(app, ["bench", *line.split(), "--json"], env=PLAIN | environment)
    return done.exit_code, json.loads(done.stdout), " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("line", "rule", "fix"),
    [
        ("-m qwn", "recipe", "did you mean -m qwen?"),
        ("-m qwen", "recipe", "add -mr qwen3_30b_a3b."),
        ("-m llama -mr qwen3_30b_a3b", "recipe", "use -m qwen, or leave -m out."),
        ("-mr qwen3_30b", "recipe", "qwen3_30b_a3b"),
        ("-c fp8_cs", "not-trained", "use -c bf16."),
        ("-c fp8_ds", "not-trained", "use -c bf16."),
        ("-c int4", "option", "use -c bf16."),
        ("--moe_token_dispatcher_type flex", "option", "use alltoall"),
        ("-m gpt_oss_20b", "recipe", "-mr gpt_oss_20b"),
        ("-g cpu --dry-run -mb 2", "option", "`stepgraph bench -mr gpt2_small -g h100 -mb 2 --dry-run`"),
        ("-g h1000", "option", "did you mean h100?"),
        ("-g cpu -ng 2", "world-size", "torchrun --nproc-per-node 2 -m stepgraph bench -mr gpt2_small -g cpu -ng 2"),
    ],
)
def test_bench_refuses_and_names_the_fix(line: str, rule: str, fix: str) -> None:
    code, values, stderr = bench(line)
    assert (code, values["error"]["rule"]) == (2, rule)
    assert fix in values["error"]["fix"]
    assert f"[{rule}]" in stderr


@pytest.mark.slow
@no_gpu
def test_bench_answers_a_gpu_that_is_not_here_with_both_fixes() -> None:
    code, values, _ = bench(GUIDE)
    assert (code, values["error"]["rule"]) == (2, "gpu-missing")
    scope = "--cuda_graph_impl transformer_engine --cuda_graph_scope attn,moe_router,moe_preprocess"
    there = f"`stepgraph bench -mr qwen3_30b_a3b -g h100 -ng 16 -tp 2 -pp 2 -ep 4 {scope} --dry-run`"
    here = f"`stepgraph bench -mr qwen3_30b_a3b --fit -ng 1 {scope}`"
    assert there in values["error"]["fix"]
    assert here in values["error"]["fix"]
    code, values, _ = bench(there.strip("`").removeprefix("stepgraph bench "))
    assert code == 0, "the fix can be typed"


def test_bench_needs_a_process_for_each_device() -> None:
    code, values, _ = bench("-mr gpt2_small -g cpu -ng 1 -mb 2", WORLD_SIZE="2", RANK="0")
    assert (code, values["error"]["rule"]) == (2, "world-size")
    assert values["error"]["fix"] == "torchrun --nproc-per-node 1 -m stepgraph bench -mr gpt2_small -g cpu -ng 1 -mb 2"
    code, values, _ = bench("-mr gpt2_small -g CPU -ng 2 --fit")
    assert values["error"]["what"] == "-ng 2, and 1 process was started"
    assert values["error"]["fix"] == "torchrun --nproc-per-node 2 -m stepgraph bench -mr gpt2_small -g cpu -ng 2 --fit"


def test_bench_compares_in_one_process_only() -> None:
    code, values, _ = bench("-mr gpt2_small -g cpu --fit -mb 2 --compare", WORLD_SIZE="2", RANK="0")
    assert (code, values["error"]["rule"]) == (2, "world-size")
    assert values["error"]["fix"] == "without torchrun: stepgraph bench -mr gpt2_small -g cpu --fit -mb 2 --compare"


@pytest.mark.slow
def test_bench_predicts_the_line_of_the_guide() -> None:
    code, values, _ = bench(f"{GUIDE} --dry-run")
    assert code == 0
    assert (values["gpu"], values["num_gpus"], values["recipe"]) == ("h100", 16, "qwen3_30b_a3b")
    assert values["parameters"] == pytest.approx(30.5e9, rel=0.02)
    assert 0 < values["memory_fraction"] < 1
    assert values["fastest_ms"] == pytest.approx(values["flops"] / 16 / 989e9)
    assert values["not_run_here"] == ["not-run-here"]
    assert values["machine_settings"] == {"train.global_batch_size": 1024, "train.micro_batch_size": 1}
    scope = "--cuda_graph_impl transformer_engine --cuda_graph_scope attn,moe_router,moe_preprocess"
    assert values["next"] == f"stepgraph bench -mr qwen3_30b_a3b --fit -ng 1 {scope}"


@pytest.mark.slow
def test_bench_prediction_fits_and_names_what_is_not_run() -> None:
    done = CliRunner().invoke(app, ["bench", *GUIDE.split(), "--dry-run"], env=PLAIN)
    *lines, following = done.stdout.splitlines()
    assert [line for line in lines if len(line.rstrip()) > 80] == []
    assert lines[0] == "settings of h100: global_batch_size=1024, micro_batch_size=1", "the rest was typed"
    assert all(line.startswith(("memory ", "operations ", "not run here ", " ")) for line in lines[2:])
    assert "model.tensor_model_parallel_size=2; model.expert_model_parallel_size=4" in " ".join(done.stdout.split())
    assert following.startswith("Next: stepgraph bench -mr qwen3_30b_a3b")


@pytest.mark.slow
def test_bench_predicts_with_the_settings_of_the_gpu() -> None:
    _, hopper, _ = bench("-mr llama3_8b -g h100 --dry-run")
    _, blackwell, _ = bench("-mr llama3_8b -g b200 --dry-run")
    assert (hopper["num_gpus"], blackwell["num_gpus"]) == (8, 8)
    assert hopper["machine_settings"]["model.context_parallel_size"] == 2
    assert hopper["machine_settings"]["model.cuda_graph_impl"] == "none"
    assert blackwell["machine_settings"]["model.cuda_graph_scope"] == ["full_iteration"]
    assert blackwell["machine_settings"]["train.micro_batch_size"] == 2
    assert (hopper["not_run_here"], blackwell["not_run_here"]) == (["not-run-here"], [])
    _, typed, _ = bench("-mr llama3_8b -g b200 --dry-run -ng 16 -mb 1 --cuda_graph_scope attn")
    assert (typed["num_gpus"], typed["machine_settings"]) == (16, {"train.global_batch_size": 256})


@pytest.mark.slow
def test_bench_says_where_no_settings_are_published() -> None:
    done = CliRunner().invoke(app, ["bench", "-g", "h200", "--dry-run"], env=PLAIN)
    line, title, *_ = done.stdout.splitlines()
    assert line == "no settings are published for gpt2_small on h200; the recipe's own are used"
    assert title == "gpt2_small on 1 h200: a valid configuration; nothing was run"


def test_bench_refuses_gpus_that_published_sizes_do_not_fit() -> None:
    code, values, _ = bench("-mr llama3_70b -g h100 -ng 8 --dry-run")
    assert (code, values["error"]["rule"]) == (2, "world-size")
    assert "not a multiple of 32" in values["error"]["what"]
    assert "-ng 64" in values["error"]["fix"]


@pytest.mark.slow
def test_bench_prediction_cuts_a_model_to_the_gpu() -> None:
    code, values, _ = bench("-mr llama3_8b -g l40s --dry-run --fit")
    assert (code, values["num_gpus"]) == (0, 1)
    assert values["cuts"][0].startswith("model.num_layers: 32 -> ")
    assert values["memory_fraction"] <= 0.6
    code, values, _ = bench("-mr llama3_8b -g l40s --dry-run --fit -ng 2")
    assert (code, "one GPU" in values["error"]["what"]) == (2, True)


@pytest.mark.parametrize("option", ["--compare", "--only eager", "--resume", "--report r.html"])
def test_bench_prediction_refuses_options_of_a_run(option: str) -> None:
    code, values, _ = bench(f"-mr gpt2_small --dry-run {option}")
    assert code == 2
    assert "runs nothing" in values["error"]["what"]
    assert option.split()[0] in values["error"]["what"]


@no_gpu
@pytest.mark.slow
def test_bench_fixes_keep_the_settings_that_were_typed() -> None:
    code, values, _ = bench("-mr llama3_8b -g h100 -mb 2 --steps 5 --seed 7 optimizer.lr=3e-4")
    assert (code, values["error"]["rule"]) == (2, "gpu-missing")
    kept = "-mb 2 --steps 5 --seed 7 optimizer.lr=3e-4"
    assert f"-g h100 -ng 1 {kept} --dry-run`" in values["error"]["fix"]
    assert f"--fit -ng 1 {kept}`" in values["error"]["fix"]


def test_bench_prediction_refuses_a_broken_rule() -> None:
    code, values, _ = bench(f"{GUIDE} --dry-run".replace("attn,moe_router,", "attn,"))
    assert code == 2
    assert values["error"]["rule"] == "preprocess-needs-router"


LOCAL, TE = "--cuda_graph_impl local --cuda_graph_scope", "--cuda_graph_impl transformer_engine --cuda_graph_scope"
DELAYED = "model.delay_wgrad_compute=true"
RULE_LINES = {
    "config-value": "-mr gpt2_small optimizer.lr=-1",
    "rng-tracker": f"-mr gpt2_small {LOCAL} attn rng.te_rng_tracker=false",
    "full-iteration-impl": f"-mr gpt2_small {TE} full_iteration",
    "full-iteration-alone": f"-mr gpt2_small {LOCAL} full_iteration,attn",
    "nan-check-in-graph": f"-mr gpt2_small {LOCAL} full_iteration ddp.check_for_nan_in_grad=true",
    "moe-and-router": f"-mr qwen3_30b_a3b {TE} moe,moe_router",
    "preprocess-needs-router": f"-mr qwen3_30b_a3b {TE} moe_preprocess",
    "moe-scope-without-experts": f"-mr gpt2_small {TE} moe_router",
    "mlp-scope-without-dense": f"-mr qwen3_30b_a3b {TE} mlp",
    "scope-without-layers": f"-mr gpt2_small {TE} mamba",
    "dropless-moe": f"-mr qwen3_30b_a3b {TE} moe model.moe_token_dispatcher_type=alltoall",
    "static-shapes": "-mr gpt2_small model.variable_seq_lengths=true",
    "packed-sequence": f"-mr gpt2_small --task sft {TE} attn dataset.packed_sequence=true",
    "batch-size": "-mr gpt2_small -gb 7 -mb 2",
    "expandable-segments": f"-mr gpt2_small {TE} attn",
    "cpu-offloading": f"-mr gpt2_small {TE} attn model.cpu_offloading=true",
    "full-recompute": f"-mr gpt2_small {TE} attn model.recompute_granularity=full",
    "moe-recompute": f"-mr qwen3_30b_a3b {TE} attn,moe_router model.recompute_granularity=selective "
    "model.recompute_modules=moe",
    "delayed-wgrad-fusion": f"-mr llama3_8b {TE} attn {DELAYED}",
    "delayed-wgrad-bias": f"-mr gpt2_small {TE} attn {DELAYED} model.gradient_accumulation_fusion=true",
    "not-run-here": "-mr gpt2_small -tp 2",
    "gpu-missing": "-mr gpt2_small -g h100 -ng 2",
    "world-size": "-mr gpt2_small -ng 2",
}
ELSEWHERE = {"delayed-wgrad-te-version", "nccl-ddp-warmup"}
"""Rules for another version of Transformer Engine, and for several GPUs."""


def test_bench_has_a_line_for_every_rule() -> None:
    assert RULE_LINES.keys() | ELSEWHERE == set(map(str, RULES))


@no_gpu
@pytest.mark.parametrize("rule", RULE_LINES)
def test_bench_answers_a_broken_rule(rule: str) -> None:
    line = RULE_LINES[rule] if " -g " in RULE_LINES[rule] else f"{RULE_LINES[rule]} -g cpu"
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if rule == "expandable-segments" else {}
    code, values, stderr = bench(line, **segments)
    assert code == 2
    found = values["error"]
    assert rule in (found["rule"], *(each["rule"] for each in found.get("violations", ())))
    assert found["what"]
    assert found["why"]
    assert found["fix"]
    assert f"[{rule}]" in stderr


@pytest.mark.parametrize("option", ["--only eager", "--resume", "--report r.html"])
def test_bench_options_of_a_comparison_need_it(option: str) -> None:
    code, values, stderr = bench(f"-g cpu {option}")
    assert code == 2
    assert "are for --compare" in values["error"]["what"]
    assert "--compare" in stderr


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("missing/r.html", "No such file or directory"),
        ("folder.html", "it is a folder"),
        ("notes.html", "belongs to something else"),
        ("taken.html", "it is a folder"),
        ("/proc/r.html", "/proc: "),
        ("r.txt", "one HTML file"),
    ],
)
def test_bench_report_is_refused_before_anything_runs(place: str, why: str, tmp_path: Path) -> None:
    for name in ("folder.html", "taken.json"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    code, values, _ = bench(f"-g cpu --fit --compare --report {tmp_path / place}")
    assert (code, values["error"]["rule"]) == (2, "report-file")
    assert why in values["error"]["why"]
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "notes.json").read_text() == "{}"


def test_bench_that_is_stopped_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(server: Any, jobs: Any, request: Any, timeout_s: float, keep: Any) -> None:
        keep({"mechanism": "eager", "pass": 0, "step_ms": 1.0, "losses": {}})
        raise KeyboardInterrupt

    monkeypatch.setattr("stepgraph.lab.bench.compare.run_all", stopped)
    line = f"{TINY} --compare --only eager --report {tmp_path}/r.html"
    done = CliRunner().invoke(app, ["bench", *line.split()], env=PLAIN | {"COLUMNS": "500"})
    assert done.exit_code == 130
    assert f"1 row kept in {tmp_path}/r.json: --resume goes on from there" in done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["records"][0]["mechanism"] == "eager"


@no_gpu
def test_bench_prediction_names_the_gpu_that_it_assumes() -> None:
    done = CliRunner().invoke(app, ["bench", "--dry-run"], env=PLAIN)
    assert "gpt2_small on 1 h100, since no -g names another: a valid configuration" in " ".join(done.stdout.split())


def test_bench_names_unknown_mechanisms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, values, _ = bench(f"{TINY} --compare --only eagr")
    assert (code, values["error"]["rule"]) == (2, "option")
    assert "eager" in values["error"]["fix"]


def test_regions_follow_each_other() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def ranged(name: str) -> Iterator[None]:
        seen.append(f"begin {name}")
        yield
        seen.append(f"end {name}")

    with contextlib.closing(Regions(ranged)) as regions:
        regions("warmup", 0)
        regions("capture", 1)
    assert seen == ["begin warmup 0", "end warmup 0", "begin capture 1", "end capture 1"]


@pytest.mark.slow
def test_bench_measures_a_small_run_on_the_cpu() -> None:
    code, values, _ = bench(TINY)
    assert code == 0
    assert len(values["step_ms_each"]) == values["steps"] == 2
    assert values["step_ms_p10"] <= values["step_ms"] <= values["step_ms_p90"]
    assert (values["gpu"], values["mfu"], values["busy_fraction"], values["kernels"]) == ("cpu", None, None, None)
    assert values["machine_settings"] is None, "a CPU is no GPU of the table"
    assert values["replays"] >= 2
    model = "model.num_layers=1 model.hidden_size=32 model.num_attention_heads=2 model.vocab_size=128"
    same = f"stepgraph bench -mr gpt2_small -g cpu --fit -gb 1 -mb 1 -sl 16 --steps 2 {model}"
    assert values["next"] == f"{same} --compare", "the same model, not the recipe's"
    assert values["loss"] > 0
    assert values["tokens_per_s"] > 0


@pytest.mark.slow
def test_bench_text_says_what_a_cpu_time_means() -> None:
    done = CliRunner().invoke(app, ["bench", *TINY.split(), "--cuda_graph_impl", "none"], env=PLAIN)
    assert done.exit_code == 0, done.output
    assert "A CPU's times say nothing about a GPU's" in " ".join(done.stdout.split())
    *lines, _ = done.stdout.splitlines()
    assert [line for line in lines if len(line.rstrip()) > 80] == []
    assert "iterations trained" not in done.output, "the loop's own report would say all of it twice"


@pytest.mark.slow
def test_benchmark_is_public() -> None:
    from stepgraph.lab import recipes
    from stepgraph.lab.recipes.fit import for_cpu

    cfg = for_cpu(recipes.gpt2_small())
    cfg.model.num_layers, cfg.model.hidden_size, cfg.model.num_attention_heads = 1, 32, 2
    cfg.model.seq_length, cfg.model.vocab_size = 16, 128
    cfg.train.micro_batch_size = cfg.train.global_batch_size = 1
    found = stepgraph.benchmark(cfg, steps=2)
    assert isinstance(found, stepgraph.BenchResult)
    assert len(found.times.each) == 2
    assert found.to_dict()["memory"]["over_eager"] is None, "not counted on a CPU"
    counted = dataclasses.replace(found, memory=Memory(reserved=5 << 30, eager_reserved=4 << 30))
    assert counted.to_dict()["memory"]["over_eager"] == 1.25
    shown = io.StringIO()
    Console(file=shown, width=100).print(render(counted, "title", []))
    assert "5.00 GiB reserved, 1.25 of what the eager warm-up reserved" in shown.getvalue()


@pytest.mark.long
def test_bench_compares_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, values, _ = bench(f"{TINY} --compare --only eager,ours-whole --report {tmp_path}/r.html")
    assert code == 0, values
    assert [row["mechanism"] for row in values["rows"]] == ["eager", "ours-whole", "ours-whole", "eager"]
    losses = [row["losses"] for row in values["rows"]]
    assert all(each == losses[0] for each in losses), "bit for bit, on one thread"
    page = (tmp_path / "r.html").read_text()
    assert "A CPU&#x27;s times say nothing about a GPU&#x27;s" in page
    assert "CUDA: None" not in page
    assert "<th>busy</th>" not in page, "a column without figures is left out"
    again, values, _ = bench(f"{TINY} --compare --only eager,ours-whole --report {tmp_path}/r.html --resume")
    assert (again, len(values["rows"])) == (0, 4), "all rows were there"
