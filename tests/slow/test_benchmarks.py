"""Benchmarks that also run on the tape do run, reach what does not depend on speed, and say what they ran."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark of several files, which find each other as they do when it is run as a script."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(name)


def test_around_the_step_trains_bit_equal_to_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--device", "cpu", "--steps", "6", "--only", "training", "--out", str(tmp_path)]
    assert imported("around_the_step", monkeypatch).main(options) == 0
    summary = json.loads((tmp_path / "around_the_step.json").read_text())
    assert summary["command"] == "python benchmarks/around_the_step.py --device cpu --steps 6 --only training --out DIR"
    assert summary["targets"] == {"bit_equal_after_training": {"target": True, "reached": True}}
    plain, scaled, whole = summary["records"]
    for run in summary["records"]:
        assert run["process"] == "forked", "each has a process of its own"
        assert sum(run["differing"].values()) == 0
        assert run["train_step"]["replays"] == 3
        assert run["evaluate"]["replays"] == 2
        assert min(run["eager_ms"], run["captured_ms"]) > 0
    assert plain["skipped_steps"] == 0
    assert scaled["skipped_steps"] == whole["skipped_steps"] > 0
    assert [run["train_step"]["recaptures"] for run in summary["records"]] == [0, 0, 0]
    assert whole["train_step"]["segments"] == 1
    assert (tmp_path / "around_the_step.md").read_text().count(" 0 of ") == 3


def test_around_the_step_counts_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported("around_the_step", monkeypatch)
    one = {"losses": [torch.ones(2), torch.zeros(2)], "numbers": [{"lr": 0.1}]}
    two = {"losses": [torch.ones(2), -torch.zeros(2)], "numbers": [{"lr": 0.2}]}
    assert module.differing(one, one) == {"losses": 0, "numbers": 0}
    assert module.differing(one, two) == {"losses": 1, "numbers": 1}


def test_around_the_step_measures_the_memory_of_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported("around_the_step", monkeypatch)
    record = module.measure_memory(torch.device("cpu"))
    assert record["largest_first"]["graphs"] == record["smallest_first"]["graphs"] == 4
    assert 1.0 <= record["largest_first"]["pool_ratio"] <= 1.3
    known = {"workload": "memory", "variant": "eight lengths"}
    assert module.targets_of([record | known])["pool_ratio"]["reached"]
    failed = known | {"error": "E"}
    assert not module.targets_of([failed])["pool_ratio"]["reached"]
    assert module.sections({"records": [failed], "targets": {}})[0][1][1][:2] == ["eight lengths", "failed: E"]


SMALL_MODEL = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.ffn_hidden_size=32"]
SMALL_MODEL += ["model.vocab_size=128", "model.seq_length=16"]


def signal_options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"device": "cpu", "timeout": 120.0, "settings": SMALL_MODEL} | changes)


@pytest.mark.parametrize(
    ("place", "case"),
    [
        ("replay", "transformer_engine, SIGTERM, 1 rank"),
        pytest.param("checkpoint", "full_iteration, SIGINT, 2 ranks", marks=pytest.mark.long),
    ],
)
def test_signal_exit_sees_trainings_end(place: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("signal_exit", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent))
    record = script.measure(place, case, signal_options())
    code = 143 if "SIGTERM" in case else 130
    assert record["codes"] == [code] * int(case[-6:].split()[0])
    assert (record["parked_at_step"], record["saved"]) == (
        (4, "step_00000005") if place == "replay" else (5, "step_00000005")
    )
    assert record["seconds"] > 0


def test_signal_exit_reports_a_rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("signal_exit", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent))
    options = vars(signal_options(settings=["model.num_layers=0"]))
    request = {"workload": "warmup", "variant": "none, SIGTERM, 1 rank", "options": options}
    record = script.run(request)
    assert record["error"].startswith("RuntimeError: a rank ended with 1 before it was parked: ")
    summary = script.summary_of([record], {}, "")
    assert not summary["target"]["reached"]
    assert script.tables_of(summary)[1][1][1][2].startswith("failed: ")


def test_signal_exit_plans_a_bounded_number_of_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("signal_exit", monkeypatch)
    jobs = script.plan(script.parse_arguments(["--device", "cpu"]))
    assert len(jobs) == len(set(jobs)) == 22
    assert {place for place, case in jobs if case == "transformer_engine, SIGINT, 2 ranks"} == set(script.PLACES)
    few = script.parse_arguments(["--device", "cpu", "--ranks", "2", "--places", "replay", "--signals", "SIGTERM"])
    assert [case for _, case in script.plan(few)] == [f"{name}, SIGTERM, 2 ranks" for name in script.IMPLEMENTATIONS]


@pytest.mark.parametrize(("seconds", "reached"), [([1.0, 29.0], True), ([1.0, 31.0], False)])
def test_signal_exit_holds_cases_against_the_target(
    seconds: list[float], *, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"workload": "replay", "variant": "x", "seconds": one} for one in seconds]
    summary = imported("signal_exit", monkeypatch).summary_of(records, {}, "")
    assert summary["target"] == {"limit_s": 30.0, "longest_s": seconds[1], "reached": reached}


def test_on_error_modules_measures_a_model_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    script = imported("on_error_modules", monkeypatch)
    sizes = {"layers": 1, "hidden": 32, "sequence": 16, "batch": 2, "steps": 2, "blocks": 2}
    request = {"workload": "mixtral", "variant": script.WAY, "options": {"device": "cpu", **sizes}}
    record = script.run(request)
    assert record["equal"], record
    assert record["replays"] > 0
    assert record["graphed"]
    assert any("experts" in path for path in record["left_out"]), record["left_out"]
    assert len(record["steps_ms"]["eager"]) == len(record["steps_ms"]["modules"]) + record["audited_steps"] == 4
    assert script.rows_of([record, record | {"error": "E"}])[1][-1] == "yes"


def test_host_cost_scales_to_the_machine_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("host_cost", monkeypatch)
    turn = {"bare": 30.0, "cpp": 80.0, "python": 140.0}
    figures = {"bare_us": 28.0, "added_us": {"cpp": 50.0, "python": 130.0}, "median_turn_us": turn, "watched_values": 3}
    record = {"workload": "linear layers", "variant": "150", **figures}
    target = script.target_of([record])
    assert target["added_us_scaled"] == {"cpp": 25.0, "python": 65.0}
    assert target["reached"] == {"cpp": True, "python": False}
    assert script.target_of([record | {"error": "E"}])["reached"] == {}
    tables = script.sections({"records": [record], "target": target})
    assert [row[:4] for row in tables[0][1][1:]] == [["150", "cpp", "28.0", "50.0"], ["150", "python", "28.0", "130.0"]]


def test_compare_writes_the_rows_of_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("compare", monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = script.Workload("gpt2_small", tuple(SMALL_MODEL), "eager,eager-again,compile,ours-te-attn")
    monkeypatch.setitem(script.WORKLOADS, "small", small)
    options = ["--device", "cpu", "--only", "small", "--steps", "1", "--out", str(tmp_path)]
    assert script.main(options) == 0
    rows = json.loads((tmp_path / "compare_small.json").read_text())["records"]
    assert [row["mechanism"] for row in rows] == [
        *("eager", "eager-again", "ours-te-attn"),
        *("ours-te-attn", "eager-again", "eager"),
    ]
    page = (tmp_path / "compare.md").read_text()
    assert "their losses are equal" in page
    assert "Not run: compile." in page
    assert script.main([*options, "--resume"]) == 0
    assert json.loads((tmp_path / "compare_small.json").read_text())["records"] == rows
    assert (tmp_path / "compare.md").read_text() == page


def test_compare_page_is_that_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("compare", monkeypatch)
    pages = list((BENCHMARKS / "results").glob("*/compare.md"))
    assert pages
    for path in pages:
        assert script.page(path.parent) == (path.read_text(), False)


def test_recommended_mechanisms_reach_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("compare", monkeypatch)
    seen = set()
    for name in script.WORKLOADS:
        for path in (BENCHMARKS / "results").glob(f"*/compare_{name}.json"):
            found = script.compared(name, json.loads(path.read_text()))
            eager, best = found.row("eager"), found.row(found.winner)
            assert best.step_ms <= eager.step_ms * (1 + found.noise)
            assert best.figures["memory"]["reserved"] <= 1.10 * eager.figures["memory"]["reserved"]
            ours = [row for row in found.rows if row.mechanism.whose == "stepgraph"]
            if found.eager_equals_eager:
                same = [row for row in ours if not row.mechanism.changes_kernels]
                assert all(row.left_eager_at is None for row in same)
                assert len(eager.figures["losses"]) >= 20
            if name == "gpt2_small":
                assert found.rows[0] in ours
            seen.add(name)
    assert seen == script.WORKLOADS.keys()


@pytest.mark.long
def test_host_cost_lets_two_checkouts_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("host_cost", monkeypatch)
    options = [
        "--against",
        str(BENCHMARKS.parent),
        "--rounds",
        "1",
        "--turns",
        "2",
        "--calls",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert script.main(options) == 0
    summary = json.loads((tmp_path / "host_cost_against.json").read_text())
    assert summary["ratios"].keys() == {"whole step", "module pair", "callable pair"}
    assert "--against DIR" in summary["command"]


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
