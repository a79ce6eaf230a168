"""Decisions of `advise`: every row of the published guides is a case, and so is every figure of the results."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.tools.advice.decide import (
    GIB,
    GUIDES_MEMORY,
    MEASURED_MEMORY,
    STAGE,
    WHOLE_STEP,
    Api,
    Bound,
    EagerPart,
    Measured,
    Program,
    Region,
    Workload,
    advise_on,
    api_for,
    bound_of,
    choose_api,
    choose_scope,
    documented_memory,
    predict,
    predict_whole_step,
    scope_bytes,
    whole_step_bytes,
    whole_step_ms,
)

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20

GPT2_SMALL = Measured(step_ms=124.8, busy_ms=26.5, host_ms=124.0, kernels=4400, small_kernels=3900)
GPT2_BUSY = Measured(step_ms=120.0, busy_ms=115.2, host_ms=110.0, kernels=4400)


@pytest.mark.parametrize(
    ("busy", "expected"),
    [(0.0, Bound.LAUNCHES), (0.79, Bound.LAUNCHES), (0.80, Bound.MIXED), (0.95, Bound.MIXED), (0.96, Bound.GPU)],
)
def test_bound_of_busy_fraction(busy: float, expected: Bound) -> None:
    assert bound_of(busy) is expected


def test_advice_captures_a_launch_bound_step() -> None:
    advice = advise_on(GPT2_SMALL)
    assert advice.bound is Bound.LAUNCHES
    assert advice.choice.choice == "whole step"
    (whole,) = advice.predictions
    assert whole.step_ms == pytest.approx(27.8, rel=0.10), "27.8 ms were measured for this step"


def test_advice_says_do_not_to_a_busy_gpu() -> None:
    advice = advise_on(GPT2_BUSY)
    assert advice.bound is Bound.GPU
    assert advice.choice.choice == "do not"
    assert "96 %" in advice.choice.reason


def test_advice_names_what_forbids_everything() -> None:
    advice = advise_on(dataclasses.replace(GPT2_SMALL, whole_step_forbidden=("host-read",)))
    assert advice.choice.choice == "do not"
    assert "host-read" in advice.choice.reason


def test_advice_falls_back_to_a_scope() -> None:
    attn = Region("attn", num_modules=48, host_ms=60.0, kernels=2000)
    experts = Region("moe", num_modules=48, host_ms=50.0, kernels=1500, forbidden=("host-read",))
    measured = dataclasses.replace(GPT2_SMALL, regions=(attn, experts), whole_step_forbidden=("host-read",))
    advice = advise_on(measured)
    assert advice.choice.choice == "attn"
    assert advice.predictions[0].scope == "attn", "what is allowed comes first"


def test_prediction_of_a_scope_saves_its_host_time() -> None:
    region = Region("attn", num_modules=10, host_ms=50.0, kernels=1000)
    found = {p.scope: p for p in predict(dataclasses.replace(GPT2_SMALL, regions=(region,)))}
    assert found["attn"].step_ms == pytest.approx(124.0 - 50.0 + 1.2)
    assert found["whole step"].step_ms < found["attn"].step_ms


# -- predictions against the figures under benchmarks/results


@functools.cache
def records(file: str) -> list[dict[str, Any]]:
    """The records of a result, eager ones and others."""
    return list(json.loads((RESULTS / file).read_text())["records"])


def record(file: str, workload: str | None, name: str) -> dict[str, Any]:
    found = (r for r in records(file) if r.get("workload") == workload)
    return next(r for r in found if name in (r.get("variant"), r.get("mechanism")) and "step_ms" in r)


WHOLE = (
    ("2026-11-15-h200/whole_step.json", "gpt2-small", "eager", "ours"),
    ("2026-11-15-h200/whole_step.json", "gpt2-small", "compile", "ours+compile"),
    ("2026-11-15-h200/whole_step.json", "gpt2-small-mb8", "eager", "ours"),
    ("2026-11-15-h200/whole_step.json", "gpt2-small-mb8", "compile", "ours+compile"),
    ("2026-11-16-h200-b/whole_step.json", "gpt2-small", "eager", "ours"),
    ("2026-11-16-h200-d/whole_step.json", "gpt2-small", "eager", "ours"),
    ("2026-11-15-h200-c/modules.json", "gpt2-small", "eager", "ours-step"),
    ("2026-11-15-h200-c/modules.json", "qwen3-moe-1024", "eager-grouped", "ours-step"),
    ("2026-11-15-h200-c/modules.json", "qwen3-moe-4096", "eager-grouped", "ours-step"),
)
RANKS = tuple(
    ("2026-11-15-h200-d/pipeline.json", f"interleaved-{size}", "eager", "whole-step")
    for size in ("8", "16", "32", "8-long")
)


@pytest.mark.parametrize(("file", "workload", "eager", "ours"), [*WHOLE, *RANKS])
def test_whole_step_time_is_within_10_percent(file: str, workload: str, eager: str, ours: str) -> None:
    base, graphed = record(file, workload, eager), record(file, workload, ours)
    measured = Measured(base["step_ms"], base["busy_ms"], base["host_ms"], base["gpu_intervals"], num_tensors=150)
    assert predict_whole_step(measured).step_ms == pytest.approx(graphed["step_ms"], rel=0.10)
    gain = 1 - graphed["step_ms"] / base["step_ms"]
    is_clear = abs(gain - 0.05) > 0.02  # nearer to 5 % an error of some percent of the step may tip the advice
    assert not is_clear or (advise_on(measured).choice.choice == "whole step") is (gain >= 0.05)


@pytest.mark.parametrize(("file", "workload", "eager", "ours"), WHOLE)
def test_whole_step_memory_is_within_15_percent(file: str, workload: str, eager: str, ours: str) -> None:
    base, graphed = (record(file, workload, name)["reserved_bytes"] for name in (eager, ours))
    assert base + whole_step_bytes(base) == pytest.approx(graphed, rel=0.15)


SCOPES_MEASURED = (
    *(("2026-11-15-h200-c/modules.json", "gpt2-small", "eager", f"ours-{s}") for s in ("attn", "attn+mlp", "layers")),
    ("2026-11-15-h200-d/modules.json", "gpt2-small", "eager", "ours-layers"),
    ("2026-11-15-h200-c/modules.json", "qwen3-moe-1024", "eager-grouped", "ours-layers"),
    ("2026-11-15-h200-c/modules.json", "qwen3-moe-1024", "eager-loop", "ours-partial"),
    ("2026-11-15-h200-c/modules.json", "qwen3-moe-4096", "eager-grouped", "ours-layers"),
    ("2026-11-15-h200-c/modules.json", "qwen3-moe-4096", "eager-loop", "ours-partial"),
    ("2026-11-15-h200-c/modules.json", "megatron-gpt2-small", "eager", "ours-layers"),
    ("2026-11-16-h200-g/te_layers.json", "bf16/first", "eager", "ours-modules"),
    *(
        ("2026-11-18-h200-d/compare_gpt2_small.json", None, "eager", f"ours-te-{scope}")
        for scope in ("attn", "mlp", "attn+mlp", "layers")
    ),
)


@pytest.mark.parametrize(("file", "workload", "eager", "ours"), SCOPES_MEASURED)
def test_scope_memory_is_within_15_percent(file: str, workload: str | None, eager: str, ours: str) -> None:
    both = [record(file, workload, name) for name in (eager, ours)]
    base, graphed = (one.get("reserved_bytes") or one["memory"]["reserved"] for one in both)
    assert base + scope_bytes(base) == pytest.approx(graphed, rel=0.15)


# -- what the time of a whole step is made of


def test_whole_step_keeps_the_host_time_of_eager_parts() -> None:
    base = Measured(step_ms=6.0, busy_ms=0.5, host_ms=5.9, kernels=400)
    adam = EagerPart("Adam", calls=2, host_ms=0.6, reason="its step count is on the host")
    found = dataclasses.replace(base, eager_parts=(adam,))
    assert whole_step_ms(base) == pytest.approx(0.5 + 0.12 + 0.005), "the GPU is the longer of the two"
    assert whole_step_ms(found) == pytest.approx(0.03 + 0.04 + 2 * 0.05 + 0.6), "the host is"


def test_whole_step_hides_eager_parts_behind_the_gpu() -> None:
    base = Measured(step_ms=100.0, busy_ms=50.0, host_ms=95.0, kernels=1000)
    adam = EagerPart("Adam", calls=1, host_ms=20.0, reason="its step count is on the host")
    found = dataclasses.replace(base, eager_parts=(adam,))
    assert whole_step_ms(found) == pytest.approx(whole_step_ms(base) + 0.01)


def test_whole_step_of_many_parameters_costs_the_host() -> None:
    base = Measured(step_ms=10.0, busy_ms=0.1, host_ms=9.0, kernels=10)
    found = dataclasses.replace(base, num_tensors=1000)
    assert whole_step_ms(found) == pytest.approx(0.03 + 0.6 + 0.001)


def test_whole_step_is_never_slower_than_eager() -> None:
    busy = Measured(step_ms=100.0, busy_ms=99.9, host_ms=60.0, kernels=4000)
    assert whole_step_ms(busy) > 100
    assert (predict_whole_step(busy).step_ms, predict_whole_step(busy).gain) == (100.0, 0.0)


@given(
    step=st.floats(0.1, 1e4),
    busy=st.floats(0, 1),
    host=st.floats(0, 1),
    kernels=st.integers(0, 100_000),
    share=st.floats(0, 1),
)
def test_predictions_stay_between_floor_and_eager(
    step: float, busy: float, host: float, kernels: int, share: float
) -> None:
    region = Region("attn", 4, share * host * step, int(share * kernels))
    measured = Measured(step, busy * step, host * step, kernels, regions=(region,))
    for prediction in predict(measured):
        assert min(busy * step, step) <= prediction.step_ms + 1e-9
        assert prediction.step_ms <= step
        assert 0 <= prediction.gain <= 1
    assert 0 <= measured.busy_fraction <= 1


# -- memory


def tight(used: float, **changes: Any) -> Measured:
    """A launch-bound step on a device of 140 GiB."""
    attn = Region("attn", num_modules=12, host_ms=60.0, kernels=2000)
    base = dataclasses.replace(GPT2_SMALL, used_bytes=int(used * GIB), total_bytes=140 * GIB, regions=(attn,))
    return dataclasses.replace(base, **changes)


def test_memory_is_warned_about_from_88_percent() -> None:
    assert advise_on(tight(120)).warnings == ()
    (warning,) = advise_on(tight(124)).warnings
    assert "124.0 of 140.0 GiB" in warning
    assert "88 %" in warning


def test_memory_warning_names_what_is_predicted_to_need_least() -> None:
    advice = advise_on(tight(130))
    rows = {one.scope: one for one in advice.predictions}
    assert rows["attn"].extra_bytes > rows["whole step"].extra_bytes
    (warning,) = advice.warnings
    assert "need least: whole step, +3.9 GiB" in warning
    assert "narrowest" not in warning


def test_prediction_that_does_not_fit_is_forbidden() -> None:
    advice = advise_on(tight(130))
    rows = {one.scope: one.forbidden for one in advice.predictions}
    assert rows == {"whole step": (), "attn": ("does not fit: needs 143.0 of 140.0 GiB",)}
    assert advice.choice.choice == "whole step"


def test_advice_is_do_not_if_nothing_fits() -> None:
    advice = advise_on(tight(139))
    assert advice.choice.choice == "do not"
    assert "does not fit: needs 143.2 of 140.0 GiB" in advice.choice.reason
    assert "need least" not in advice.warnings[0], "there is nothing to begin with"


def test_memory_warning_of_a_busy_gpu_names_no_capture() -> None:
    advice = advise_on(tight(130, busy_ms=124.0))
    assert advice.choice.choice == "do not"
    assert "need least" not in advice.warnings[0]


def test_prediction_without_a_known_total_is_allowed() -> None:
    assert all(not one.forbidden for one in predict(tight(1000, total_bytes=0)))


@pytest.mark.parametrize(
    ("scope", "stages", "expected"),
    [
        ("attn", 1, (0, 2 * GIB)),
        ("attn", 4, (10 * GIB, None)),
        ("whole step", 1, (20 * GIB, 40 * GIB)),
        ("full_iteration", 1, (20 * GIB, 40 * GIB)),
    ],
)
def test_documented_memory_of_the_guides(scope: str, stages: int, expected: tuple[int, int | None]) -> None:
    assert documented_memory(scope, 40 * GIB, stages) == expected


def test_memory_sentences_stand_on_the_page_too() -> None:
    page = " ".join((ROOT / "docs" / "advise.md").read_text().split())
    assert GUIDES_MEMORY in page
    assert MEASURED_MEMORY in page
    assert "10 GB and more with pipelines" in GUIDES_MEMORY


def test_memory_sentence_is_what_was_measured() -> None:
    def ratio(file: str, workload: str | None, *names: str) -> float:
        both = [record(file, workload, name) for name in names]
        eager, graphed = (one.get("reserved_bytes") or one["memory"]["reserved"] for one in both)
        return float(graphed / eager)

    trainings = [
        one["measured_bytes"] / one["eager_bytes"]
        for file in sorted(RESULTS.glob("*/advise.json"))
        for one in json.loads(file.read_text())["records"]
        if one.get("scope") == "whole step" and "eager_bytes" in one
    ]
    scopes, whole = max(ratio(*row) for row in SCOPES_MEASURED), max(*trainings, *(ratio(*row) for row in WHOLE))
    assert f"{scopes:.2f} times eager's peak for scopes and {whole:.2f} times for whole steps" in MEASURED_MEMORY


# -- the rows of the guides: each is a case, with a part of the reason


API_GUIDE = {
    "quick experiment, boundaries unknown": (Program(wish="least effort"), "capture", "one line"),
    "training with autograd, no FP8, no pipeline": (Program(), "capture", "forward, backward and optimizer"),
    "any model with FP8": (Program(has_fp8=True), "make_graphed_callables", "FP8"),
    "any model with a pipeline": (Program(has_pipeline=True), "make_graphed_callables", "order of its schedule"),
    "Megatron, per layer, automatic": (Program("megatron", "per layer"), "CudaGraphManager", "one by one"),
    "maximum speed, full iteration": (Program("megatron", "most speed"), "FullCudaGraphWrapper", "largest gain"),
    "full manual control": (Program(wish="control"), "capture", "any function"),
}
FLOWCHART = {
    "Megatron with FP8: most speed, static": (
        Program("megatron", "most speed", has_fp8=True),
        "FullCudaGraphWrapper",
        "static",
    ),
    "Megatron: most speed, shapes vary": (
        Program("megatron", "most speed", has_static_shapes=False),
        "CudaGraphManager",
        "shapes vary",
    ),
    "Megatron with a pipeline: automatic": (
        Program("megatron", "training", has_pipeline=True),
        "CudaGraphManager",
        "pipelines",
    ),
    "Megatron with FP8: control": (
        Program("megatron", "control", has_fp8=True),
        "make_graphed_callables",
        "you choose",
    ),
    "Transformer Engine: FP8": (
        Program("transformer_engine", has_fp8=True),
        "make_graphed_callables",
        "Transformer Engine",
    ),
    "Transformer Engine: pipeline": (
        Program("transformer_engine", has_pipeline=True),
        "make_graphed_callables",
        "pipeline",
    ),
    "general: zero effort": (Program(wish="least effort"), "capture", "one line"),
    "general: training loop": (Program(wish="training"), "capture", "backward"),
    "general: control": (Program(wish="control"), "capture", "as it is written"),
}
NAVIGATION = {
    "torch.compile gives too little": (Program(tried=("reduce-overhead",)), "capture", "many small graphs"),
    "make_graphed_callables cannot do FP8": (
        Program(has_fp8=True, tried=("make_graphed_callables",)),
        "make_graphed_callables",
        "FP8",
    ),
    "make_graphed_callables cannot do pipelines": (
        Program(has_pipeline=True, tried=("make_graphed_callables",)),
        "make_graphed_callables",
        "pipeline",
    ),
    "make_graphed_callables gives too little": (
        Program(tried=("make_graphed_callables",)),
        "capture",
        "loss and optimizer",
    ),
    "Megatron per layer": (Program("megatron", "per layer"), "CudaGraphManager", "automatically"),
    "best speed with Megatron": (Program("megatron", "most speed"), "FullCudaGraphWrapper", "one graph"),
    "best speed without Megatron": (Program(wish="most speed"), "capture", "optimizer"),
    "best speed, shapes vary": (Program(wish="most speed", has_static_shapes=False), "capture", "buckets="),
    "something is too hard to capture": (Program(has_dynamic_part=True), "graph_modules", "stays eager"),
    "start small": (Program(wish="per layer"), "graph_modules", "begin with one"),
    "a schedule of torch.distributed.pipelining": (
        Program(has_pipeline=True, has_torch_pipelining=True),
        "graph_stage",
        "schedule",
    ),
}


@pytest.mark.parametrize("case", [*API_GUIDE, *FLOWCHART, *NAVIGATION])
def test_choice_of_the_interface(case: str) -> None:
    program, expected, word = (API_GUIDE | FLOWCHART | NAVIGATION)[case]
    decision = choose_api(program)
    assert decision.choice == f"stepgraph.{expected}"
    assert word in decision.reason


PROGRAMS = (
    Program(),
    Program(has_fp8=True),
    Program("transformer_engine", has_fp8=True),
    Program("megatron"),
    Program("megatron", has_pipeline=True),
    Program(has_pipeline=True, has_torch_pipelining=True),
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_api_captures_what_was_chosen(program: Program) -> None:
    whole = api_for(WHOLE_STEP, program)
    assert whole.choice in (Api.CAPTURE, Api.FULL_ITERATION)
    assert whole.choice == Api.CAPTURE or program.framework == "megatron"
    assert "one by one" not in whole.reason
    assert api_for("attn", program).choice == Api.GRAPH_MODULES
    assert "these modules" in api_for("attn", program).reason
    assert api_for("do not", program).choice == "none"
    if program.has_torch_pipelining:
        assert api_for(STAGE, program).choice == Api.STAGE


ATTENTION = ("transformer_engine", ("attn",))
AROUND_EXPERTS = ("transformer_engine", ("attn", "moe_router", "moe_preprocess"))
FULL = ("local", ("full_iteration",))
NONE = ("none", ())
WANTS_FULL = Workload(wished_scope=("full_iteration",))
QUICK_DECISION = {
    "dense": (Workload(), ATTENTION, "attention"),
    "dropless experts": (Workload(model="moe"), AROUND_EXPERTS, "depend on data"),
    "images, stable data": (Workload(model="vision-language"), AROUND_EXPERTS, "depend on data"),
    "images, before the data is stable": (
        Workload(model="vision-language", has_stable_data=False),
        NONE,
        "reads images",
    ),
    "padded experts": (Workload(model="moe, padded experts"), ("transformer_engine", ("attn", "moe")), "capacity"),
    "mamba": (Workload(model="mamba"), ("transformer_engine", ("mamba", "attn")), "both kinds"),
    "full iteration is wanted": (WANTS_FULL, FULL, "strictest rules"),
    "selective recomputation": (Workload(recompute="selective"), ATTENTION, "attention"),
    "full recomputation": (Workload(recompute="full"), FULL, "full recomputation"),
}
WHEN = {
    "static sequence length and microbatch": (Workload(has_static_shapes=True), ATTENTION, "attention"),
    "the GPU waits for the host": (Workload(busy_fraction=0.5), ATTENTION, "attention"),
    "spare memory": (Workload(memory_used=0.6), ATTENTION, "attention"),
    "unchanged objective": (Workload(has_settled_objective=True), ATTENTION, "attention"),
    "a scope is the safer first one": (Workload(), ATTENTION, "first"),
    "the largest reduction is wanted": (WANTS_FULL, FULL, "largest gain"),
}
WHEN_NOT = {
    "varying shapes": (Workload(has_static_shapes=False), NONE, "varies"),
    "the GPU is busy": (Workload(busy_fraction=0.97), NONE, "busy"),
    "the objective still changes": (Workload(has_settled_objective=False), NONE, "objective"),
    "CPU offloading": (Workload(has_cpu_offloading=True), NONE, "offloading"),
    "tight memory, one stage, one scope": (Workload(memory_used=0.9), NONE, "memory is tight"),
    "tight memory with a pipeline": (Workload(memory_used=0.9, pipeline_stages=4), NONE, "each pipeline stage"),
    "tight memory with a full iteration": (
        dataclasses.replace(WANTS_FULL, memory_used=0.9),
        NONE,
        "memory is tight",
    ),
    "tight memory with full recomputation": (Workload(recompute="full", memory_used=0.95), NONE, "memory is tight"),
    "checks that conflict with a full iteration": (
        dataclasses.replace(WANTS_FULL, needs_nan_checks=True),
        NONE,
        "checks for NaN",
    ),
    "full recomputation and checks on the host": (
        Workload(recompute="full", needs_nan_checks=True),
        NONE,
        "checks for NaN",
    ),
    "packed sequences and checks on the host": (
        Workload(has_packed_sequences=True, needs_nan_checks=True),
        NONE,
        "checks for NaN",
    ),
    "checks beside a scope": (Workload(needs_nan_checks=True), ATTENTION, "attention"),
    "scopes that exclude each other": (Workload(wished_scope=("moe", "moe_router")), NONE, "exclude each other"),
    "a scope without the one it needs": (Workload(wished_scope=("attn", "moe_preprocess")), NONE, "needs moe_router"),
    "recomputed experts with their router": (Workload(model="moe", recompute="moe"), NONE, "recomputed"),
    "recomputed experts without their router": (
        Workload(model="moe", recompute="moe", wished_scope=("attn",)),
        ATTENTION,
        "asked for",
    ),
    "full recomputation with a scope": (
        Workload(recompute="full", wished_scope=("attn",)),
        NONE,
        "full recomputation",
    ),
    "packed sequences": (Workload(has_packed_sequences=True), FULL, "packed sequences"),
    "packed sequences with a scope": (
        Workload(has_packed_sequences=True, wished_scope=("attn",)),
        NONE,
        "packed sequences",
    ),
}


@pytest.mark.parametrize("case", [*QUICK_DECISION, *WHEN, *WHEN_NOT])
def test_choice_of_the_scope(case: str) -> None:
    workload, expected, word = (QUICK_DECISION | WHEN | WHEN_NOT)[case]
    choice = choose_scope(workload)
    assert (choice.impl, choice.scope) == expected
    assert word in choice.reason


def test_dense_scope_widens_to_the_mlp() -> None:
    assert choose_scope(Workload()).then == ("attn", "mlp")
