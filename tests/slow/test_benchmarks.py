"""Benchmarks that also run on the tape do run, reach what does not depend on speed, and say what they ran."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark of several files, which find each other as they do when it is run as a script."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(name)


def test_around_the_step_trains_bit_equal_to_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--steps", "6", "--only", "training", "--out", str(tmp_path / "results")]
    assert load("around_the_step").main(options) == 0
    record = json.loads((tmp_path / "results" / "around_the_step.json").read_text())
    assert record == json.loads(capsys.readouterr().out)
    assert record["command"] == "python benchmarks/around_the_step.py --device cpu --steps 6 --only training"
    plain, scaled, whole = record["training"]
    for run in record["training"]:
        assert sum(run["differing"].values()) == 0
        assert run["train_step"]["replays"] == 3
        assert run["evaluate"]["replays"] == 2
    assert plain["skipped_steps"] == 0
    assert scaled["skipped_steps"] == whole["skipped_steps"] > 0
    assert [run["train_step"]["recaptures"] for run in record["training"]] == [0, 0, 0]
    assert whole["train_step"]["segments"] == 1


def test_around_the_step_counts_what_differs() -> None:
    module = load("around_the_step")
    one = {"losses": [torch.ones(2), torch.zeros(2)], "numbers": [{"lr": 0.1}]}
    two = {"losses": [torch.ones(2), -torch.zeros(2)], "numbers": [{"lr": 0.2}]}
    assert module.differing(one, one) == {"losses": 0, "numbers": 0}
    assert module.differing(one, two) == {"losses": 1, "numbers": 1}


def test_around_the_step_measures_the_memory_of_signatures() -> None:
    record = load("around_the_step").measure_memory(torch.device("cpu"))
    assert record["largest_first"]["graphs"] == record["smallest_first"]["graphs"] == 8
    assert 1.0 <= record["largest_first"]["pool_ratio"] <= 1.3


def test_modules_trains_every_way_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--device", "cpu", "--layers", "1", "--steps", "1", "--equality-steps", "5", "--out", str(tmp_path)]
    workloads = ["--workloads", "gpt2-small,qwen3-moe-1024,megatron-gpt2-small,host-pair"]
    variants = ["--variants", "eager,ours-layers,ours-attn,eager-loop,ours-partial,pair"]
    assert imported("modules", monkeypatch).main([*sizes, *workloads, *variants]) == 0
    summary = json.loads((tmp_path / "modules.json").read_text())
    assert list(summary["skipped"]) == ["megatron-gpt2-small"]
    assert summary["command"].endswith("--variants eager,ours-layers,ours-attn,eager-loop,ours-partial,pair")
    records = {(r["workload"], r["variant"]): r for r in summary["records"]}
    for variant in ("ours-layers", "ours-attn"):
        assert records["gpt2-small", variant]["loss"] == records["gpt2-small", "eager"]["loss"]
        assert records["gpt2-small", variant]["engine"]["eager_reasons"] == {"warm-up": 3}
    partial = records["qwen3-moe-1024", "ours-partial"]
    assert partial["loss"] == records["qwen3-moe-1024", "eager-loop"]["loss"]
    assert partial["engine"]["replays"] > 0
    assert set(records["host-pair", "pair"]["added_us"]) == {"eager", "ours", "ours, outputs='static'"}
    page = (tmp_path / "modules.md").read_text()
    assert "| ours-attn |" in page
    assert page.count("same bits") == 3


def test_modules_compares_layers_with_eager_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--device", "cpu", "--layers", "1", "--equality-steps", "5", "--out", str(tmp_path)]
    assert imported("modules", monkeypatch).main([*sizes, "--workloads", "gpt2-small", "--variants", "equality"]) == 0
    (target,) = json.loads((tmp_path / "modules.json").read_text())["targets"]
    assert target["reached"], target["measured"]


def test_modules_report_counts_nothing_that_was_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = imported("modules_report", monkeypatch)
    same = {"losses": {"tensors": 5, "differing": 0, "first": None, "widest_gap": 0.0}}
    run = {
        "workload": "gpt2-small",
        "variant": "equality",
        "steps": 5,
        "finite": True,
        "pairs": {"eager vs ours-attn": same},
    }
    replayed = run | {"replays": {"eager vs ours-attn": 17}, "eager_parts": {"eager vs ours-attn": {}}}
    idle = replayed | {"replays": {"eager vs ours-attn": 0}}
    part = {"blocks.0.attn": "capture failed: [step-raised]"}
    partly = replayed | {"eager_parts": {"eager vs ours-attn": part}}
    reached = [report.equality_target([r], "gpt2-small").reached for r in (replayed, idle, partly)]
    assert reached == [True, False, False]
    rows = [{"path": "blocks.0.attn", "eager_reasons": {"warm-up": 9, "capture failed: [step-raised]": 17, "held": 1}}]
    assert report.eager_parts({"modules": rows}, steps=5) == part


@pytest.mark.parametrize(("ours_us", "reached"), [(99.0, True), (101.0, False)])
def test_modules_report_holds_the_host_pair_against_torch(
    ours_us: float, *, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"workload": "host-pair", "variant": "pair", "added_us": {"torch": 200.0, "ours": ours_us}}
    target = imported("modules_report", monkeypatch).pair_target([record])
    assert target.reached is reached


@pytest.mark.long
def test_pipeline_trains_alike_every_way_in_constant_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--device", "cpu", "--layers", "1", "--steps", "1", "--equality-steps", "2", "--out", str(tmp_path)]
    workloads = ["--workloads", "interleaved-8,interleaved-16"]
    assert imported("pipeline", monkeypatch).main([*sizes, *workloads]) == 0
    summary = json.loads((tmp_path / "pipeline.json").read_text())
    assert [target["reached"] for target in summary["targets"]] == [True, True, True], summary["targets"]
    records = {(r["workload"], r["variant"]): r for r in summary["records"]}
    for workload, samples in (("interleaved-8", 16), ("interleaved-16", 32)):
        eager = records[workload, "eager"]
        ours, apart = (records[workload, variant]["engine"] for variant in ("ours", "ours-no-reuse"))
        losses = [records[workload, variant]["loss"] for variant in ("ours", "ours-no-reuse", "whole-step")]
        assert losses == [eager["loss"]] * 3
        assert (ours["num_samples"], ours["num_buffers"], apart["num_buffers"]) == (samples, 11, samples)
        assert ours["static_bytes"] < apart["static_bytes"]
        assert ours["pool_bytes"] < apart["pool_bytes"]
    page = (tmp_path / "pipeline.md").read_text()
    assert page.count("same bits") == 6
    assert "| interleaved, stage 0 of 2 | 1,2 | 4 | 12 |" in page


def test_pipeline_report_plans_the_reference_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [plan.row(buffer_bytes=10) for plan in imported("pipeline_report", monkeypatch).plans()]
    assert [row["unique"] for row in rows[:5]] == [4, 2, 6, 8, 7]
    assert [row["unique"] for row in rows[5:17]] == [8, 8, 8, 6, 6, 6, 4, 4, 4, 2, 2, 2]
    assert [(row["samples"], row["unique"]) for row in rows[17:]] == [
        (32, 32),
        (64, 44),
        (128, 44),
        (256, 44),
        (512, 44),
    ]
    assert all(row["unique_bytes"] == 10 * row["unique"] for row in rows)


def test_pipeline_report_notices_memory_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    report = imported("pipeline_report", monkeypatch)
    workloads = ["interleaved-8", "interleaved-16"]
    for grown, reached in ((1000, True), (1100, False)):
        records = [
            {"workload": workload, "variant": "ours", "engine": {"static_bytes": size}}
            for workload, size in zip(workloads, (1000, grown), strict=True)
        ]
        assert report.growth_target(records, workloads, "static_bytes", "static memory").reached is reached
    assert not report.growth_target(records[:1], workloads, "static_bytes", "static memory").reached


def test_te_layers_report_wants_eager_bits_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("te_layers", monkeypatch)

    def run(variant: str, ms: float, losses: list[float], replays: int | None = None) -> dict[str, object]:
        times = {"step_ms": ms, "again_ms": ms, "first_steps_s": 1.0, "reserved_bytes": 2**30}
        return {"workload": "bf16/first", "variant": variant, "losses": losses, "replays": replays, **times}

    records = [
        run("eager", 100.0, [4.5, 4.25]),
        run("te-graphs", 10.0, [4.5, 4.3]),
        run("ours-step", 9.0, [4.5, 4.25], replays=37),
        run("ours-modules", 11.0, [4.5, 4.3], replays=37),
    ]
    targets = [asdict(t) for t in script.judge(records, ["bf16/first"], script.VARIANTS)]
    assert [t["reached"] for t in targets] == [True, True, False, False]
    assert targets[2]["measured"] == "differ from step 2: 4.25, 4.3"
    idle = script.judge([records[0], run("ours-step", 9.0, [4.5, 4.25], replays=0)], ["bf16/first"], ["ours-step"])
    assert [t.reached for t in idle] == [False, False]
    summary = {"environment": {}, "command": "", "workloads": ["bf16/first"], "targets": targets, "records": records}
    assert "| te-graphs | 10.00 | 10.00 | 10.00x | differ from step 2: 4.25, 4.3 |" in script.markdown(summary)
    rows = [{"eager_reasons": {"warm-up": 3}}, {"eager_reasons": {"warm-up": 3, "held": 1}}]
    assert script.summary_of({"replays": 8, "modules": rows}) == {
        "replays": 8,
        "eager_reasons": {"warm-up": 6, "held": 1},
    }


@pytest.mark.parametrize(("way", "calls"), [("whole step", 4), ("by layer", 4)])
def test_warmup_cost_measures_until_a_replay(way: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("warmup_cost", monkeypatch)
    record = script.measure("gpt", way, torch.device("cpu"), num_layers=1, hidden=32)
    assert len(record["calls_s"]) == calls
    assert 0 < record["recording_s"] < record["warmup_and_capture_s"]
    run = record | {"workload": "gpt", "variant": way}
    assert script.rows_of([run, {"workload": "vit", "variant": way, "error": "E"}])[2][2] == "failed: E"


ADVICE = {
    "verdict": "launch-bound",
    "choice": "whole step",
    "cannot_judge": [],
    "measured": {"step_ms": 10.0, "used_bytes": 1000, "busy_fraction": 0.2, "kernels": 100},
    "predictions": [{"scope": "whole step", "step_ms": 2.2, "extra_bytes": 100, "gain": 0.78, "forbidden": []}],
    "facts": {"model": {}},
    "paste": ["import stepgraph", "", "update = stepgraph.capture(update)  # before the loop"],
}


@pytest.mark.parametrize(
    ("verdict", "choice", "gain", "expected"),
    [
        ("launch-bound", "whole step", 0.8, True),
        ("in between", "whole step", 0.05, True),
        ("in between", "whole step", 0.04, False),
        ("GPU-bound", "do not", 0.01, True),
        ("in between", "do not", 0.04, True),
        ("in between", "do not", 0.06, False),
        ("launch-bound", "do not", 0.01, False),
        ("GPU-bound", "layers", 0.2, False),
    ],
)
def test_advise_report_says_when_advice_was_right(
    verdict: str, choice: str, gain: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert imported("advise", monkeypatch).is_right(verdict, choice, gain) is expected


def test_advise_report_compares_with_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("advise", monkeypatch)
    record = script.judged(ADVICE, {"measured_ms": 2.0, "eager_again_ms": 10.0, "measured_bytes": 1000})
    assert (record["time_error"], record["memory_error"]) == (pytest.approx(10), pytest.approx(10))
    record |= {"time_error": -10.0}
    assert (record["measured_gain"], record["right"]) == (pytest.approx(0.8), True)
    targets = script.targets_of([record | {"time_error": 10.1}, record, {"workload": "rl", "error": "failed"}])
    assert list(targets.values()) == [[1, 2], [2, 2], [2, 2]]


@pytest.mark.parametrize("paste", [ADVICE["paste"], []], ids=["as advised", "though not advised"])
def test_advise_measures_graphs_and_eager_steps(
    paste: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = imported("advise", monkeypatch)
    file = tmp_path / "train.py"
    file.write_text(script.with_graphs("rl", script.WORKLOADS["rl"].text("cpu"), ADVICE | {"paste": paste}))
    found = script.measure(file, torch.device("cpu"))
    assert (found["report"]["replays"], found["report"]["eager_reasons"]) == (6, {"warm-up": 3})
    assert found["report"]["segments"] == 5, "two optimizers between three graphs"
    assert min(found["measured_ms"], found["eager_again_ms"]) > 0


@pytest.mark.long
def test_advise_runs_on_the_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("advise", monkeypatch)
    assert script.main(["--device", "cpu", "--only", "rl", "--out", str(tmp_path)]) == 0
    (record,) = json.loads((tmp_path / "advise.json").read_text())["records"]
    assert record["verdict"] == "cannot judge"
    assert "no GPU" in record["cannot_judge"][0]
    assert record["report"]["replays"] == 6
