"""Advice without a GPU: scopes of models, shares of a profile, reports from plain values, and what is printed."""

from __future__ import annotations

import dataclasses
import io
import itertools
import warnings
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from stepgraph.advice.advise import (
    AdviceReport,
    is_no,
    program_of,
    reasons_unmeasured,
    refuse_graphed,
    report_of,
    scopes_with,
)
from stepgraph.advice.decide import (
    DO_NOT,
    Advice,
    Barrier,
    Bound,
    Decision,
    Measured,
    Names,
    Prediction,
    Program,
    Region,
    advise_on,
    api_for,
    ladder,
    narrowest,
    predict_whole_step,
    snippet,
    with_barriers,
)
from stepgraph.advice.measure import Models, Wait, Waits, _lines
from stepgraph.advice.parts import BEGIN, REACH, find_scopes, mark_of, marked, shares_of
from stepgraph.advice.phases import HOST_STEPS, WARMUP, Phase, phase_of, steps_needed
from stepgraph.advice.trial import Trial, _trial
from stepgraph.bench.measure import traced
from stepgraph.commands.advise import _next, render
from stepgraph.errors import Location, NoStepError
from stepgraph.inspect.check import CheckReport
from stepgraph.inspect.findings import Seen, StepShape, collect, judge
from stepgraph.models import GPT, GPTConfig, MoEConfig, MoEGPT
from stepgraph.script.run import Outcome, Script, Status

CPU = torch.device("cpu")


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def small_gpt() -> GPT:
    return GPT(GPTConfig.tiny())


# -- the order of a run


@pytest.mark.parametrize("steps", [3, 20])
def test_phases_follow_each_other(steps: int) -> None:
    phases = [phase_of(index, steps) for index in range(steps_needed(steps) + 1)]
    counts = {phase: len(list(group)) for phase, group in itertools.groupby(phases)}
    expected = [WARMUP, steps, HOST_STEPS, 1, 1, 1]
    assert counts == dict(zip(Phase, expected, strict=True))


def test_phases_without_measuring_are_a_short_warmup() -> None:
    assert [phase_of(index, 0) for index in range(4)] == [Phase.WARMUP] * 3 + [Phase.OVER]


# -- scopes


def test_scopes_of_a_known_model_are_its_words() -> None:
    found = {scope.name: scope for scope in find_scopes(small_gpt())}
    assert list(found) == ["attn", "mlp", "layers"]
    assert (len(found["attn"].parts) == GPTConfig.tiny().num_layers, found["attn"].words, found["layers"].words) == (
        True,
        ("attn",),
        (),
    )


def test_scopes_of_an_unknown_model_are_repeated_layers() -> None:
    (found,) = find_scopes(nn.ModuleDict({"body": nn.ModuleList([block() for _ in range(3)]), "head": nn.Linear(4, 1)}))
    assert (found.name, found.words, len(found.parts)) == ("layers", ("body.*",), 3)
    (found,) = find_scopes(nn.Sequential(*[block() for _ in range(4)]))
    assert (found.words, found.paths) == (("*",), ("0", "1", "2", "3"))


def test_scopes_of_a_model_without_layers_are_its_children() -> None:
    found = find_scopes(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    assert [scope.words for scope in found] == [("0",), ("2",)], "a ReLU has nothing to capture by itself"


def profiled(model: nn.Module, inputs: torch.Tensor, scopes: Any) -> Any:
    with marked(scopes), traced(CPU) as found:
        with torch.autograd.profiler.record_function(BEGIN):
            pass
        model(inputs).sum().backward()
        with torch.autograd.profiler.record_function(REACH):
            pass
    return found[0]


def test_shares_have_forward_and_backward_of_their_parts() -> None:
    model = nn.Sequential(*[block() for _ in range(4)])
    scopes = find_scopes(model)
    model(torch.randn(2, 4)).sum().backward()
    trace = profiled(model, torch.randn(2, 4), scopes)
    step_us, shares = shares_of(trace, scopes)
    share = shares["layers"]
    assert share.calls == 4
    assert 0 < share.host_us < step_us
    nodes = [event["dur"] for event in trace["traceEvents"] if "evaluate_function: Addmm" in event.get("name", "")]
    assert len(nodes) == 4
    forward_only = dict(trace, traceEvents=[e for e in trace["traceEvents"] if "evaluate" not in e.get("name", "")])
    assert shares_of(forward_only, scopes)[1]["layers"].host_us <= share.host_us - sum(nodes)


def test_shares_leave_out_the_backward_of_others() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    first, second = find_scopes(model)
    trace = profiled(model, torch.randn(2, 4), (first, second))
    _, shares = shares_of(trace, (first, second))
    _, together = shares_of(trace, [dataclasses.replace(first, name="both", parts=(*first.parts, *second.parts))])
    assert shares["0"].host_us + shares["2"].host_us == pytest.approx(together["both"].host_us)


def test_shares_count_the_kernels_launched_in_a_part() -> None:
    (scope,) = find_scopes(nn.Sequential(nn.Linear(4, 4)))
    mark = mark_of(scope.parts[0])

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("user_annotation", BEGIN, 0, 1),
        event("user_annotation", mark, 10, 20),
        event("cpu_op", "aten::linear", 11, 5, **{"Sequence number": 7, "Fwd thread id": 0}),
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=1),
        event("cpu_op", "aten::sum", 40, 5, **{"Sequence number": 8, "Fwd thread id": 0}),
        event("cuda_runtime", "cudaLaunchKernel", 41, 1, correlation=2),
        event("cpu_op", "autograd::engine::evaluate_function: A", 60, 4, 2, **{"Sequence number": 7}),
        event("cuda_runtime", "cudaLaunchKernel", 61, 1, 2, correlation=3),
        event("cuda_runtime", "cudaStreamSynchronize", 62, 1, 2, correlation=9),
        event("user_annotation", REACH, 99, 1),
        *(event("kernel", "k", 100 + n, 1, correlation=n) for n in (1, 2, 3)),
    ]
    step_us, shares = shares_of({"traceEvents": events}, [scope])
    assert step_us == 100
    assert shares["0"] == type(shares["0"])(calls=1, host_us=24, kernels=2)


def test_marks_leave_the_model_as_it_was() -> None:
    model = MoEGPT(MoEConfig.tiny())
    scopes = find_scopes(model)
    assert {"moe_router", "moe_preprocess"} <= {scope.name for scope in scopes}
    before = [(set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with marked(scopes):
        assert any(len(m._forward_hooks) for m in model.modules())
    assert [(set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == before


# -- what is seen in a run


def test_models_are_the_outermost_modules_that_ran() -> None:
    small, large = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    models = Models()
    with models.noting():
        large(small(torch.randn(1, 4)))
        with torch.no_grad():
            nn.Linear(99, 99)(torch.randn(1, 99))
    models.settle()
    assert models.largest is large
    assert (len(models.all), models.name) == (2, "large")


def test_waits_are_in_the_step_or_between_steps() -> None:
    waits = Waits()
    waits.note("wait")
    waits.reach()
    waits.note("synchronize()")
    waits.end()
    assert [wait.what for wait in (*waits.inside, *waits.outside)] == ["wait", "synchronize()"]
    assert waits.inside[0].where.source == 'waits.note("wait")'


def test_waits_name_the_scope_whose_method_they_are_in() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    scopes = find_scopes(model)
    where = Location("train.py", 3, "f")
    waits = [Wait("wait", where, frozenset({(id(model[2]), "forward"), (id(model), "forward")}))] * 2
    (row,) = _lines(waits, scopes)
    assert (row["times"], row["scopes"], row["line"]) == (2, ["2"], 3)


def test_waits_outside_torch_warnings_are_shown_as_before() -> None:
    waits = Waits()
    with waits.watching(), pytest.warns(UserWarning, match="another"):
        warnings.warn("another", UserWarning, stacklevel=1)
    assert waits.inside == waits.outside == []


# -- reports


def result(**changes: Any) -> dict[str, Any]:
    """What the probe returns for a launch-bound script."""
    found = {
        "device": "cuda",
        "gpu": "NVIDIA H200",
        "times_ms": [10.0] * 20,
        "host_ms": 9.5,
        "outside_ms": 0.2,
        "waits_inside": [],
        "waits_outside": [],
        "memory": {"activation_bytes": 2**28, "used_bytes": 2**30, "total_bytes": 140 * 2**30},
        "model": {"class": "GPT", "name": "net", "parameters": 1000, "gradient_bytes": 4000, "libraries": []},
        "has_compiled_code": False,
        "optimizers": [],
        "busy_ms": 2.0,
        "kernels": 1000,
        "small_kernels": 990,
        "gaps": 900,
        "longest_gap_ms": 0.1,
        "launches": 1000,
        "graph_launches": 0,
        "waits_in_profile": 0,
        "scopes": [
            {"scope": "attn", "words": ["attn"], "paths": ["layers.0.attn"], "calls": 1, "host_fraction": 0.4}
            | {"kernels": 400},
            {"scope": "mlp", "words": ["mlp"], "paths": ["layers.0.mlp"], "calls": 1, "host_fraction": 0.2}
            | {"kernels": 200},
        ],
    }
    return found | changes


def checked(*seen: Seen, function: str = "train_step", library: str = "") -> CheckReport:
    findings = tuple(collect(seen))
    shape = StepShape(steps=5, function=function, clean_modules=("layers.0.mlp",), library=library)
    outcome = Outcome(Status.STOPPED, {"models": [{"name": "net", "class": "GPT", "clean": []}]}, 5)
    return CheckReport("train.py", judge(findings, shape), findings, (), shape, outcome)


def reported(check: CheckReport | None = None, steps: int = 30, **changes: Any) -> AdviceReport:
    outcome = Outcome(Status.STOPPED, result(**changes), steps)
    return report_of(Script("train.py", ("--epochs", "1")), outcome, 20, check)


def text_of(report: AdviceReport) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(render(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line for line in text.splitlines() if len(line.rstrip()) > 80] == []
    return " ".join(text.split())


def test_report_captures_a_launch_bound_step() -> None:
    report = reported(checked())
    assert report.verdict == "launch-bound"
    assert report.advice is not None
    assert report.advice.choice.choice == "whole step"
    assert report.paste == ("import stepgraph", "", "train_step = stepgraph.capture(train_step)  # before the loop")
    assert report.nsys == "nsys profile --cuda-graph-trace=graph python train.py --epochs 1"
    text = text_of(report)
    for part in (
        "10.00 ms (p10 10.00, p90 10.00, 20 steps)",
        "20.0 % (2.00 ms)",
        "1000 a step, 990 under 50 us",
        "900, 8.00 ms idle",
        "launch-bound: capture the whole step",
        "Use stepgraph.capture",
        "whole step + compile not predicted --try measures it",
        "The host never waits for the GPU.",
        report.nsys,
    ):
        assert part in text, part


ADAM = {"name": "AdamW", "inside": False, "reason": "its step count is on the host", "calls": 1} | {
    "host_fraction": 0.1,
    "kernels": 20,
}


def test_report_counts_optimizers_between_graphs() -> None:
    inside = ADAM | {"inside": True}
    without, with_one = reported(checked(), optimizers=[inside]), reported(checked(), optimizers=[inside, ADAM])
    assert without.measured is not None
    assert with_one.measured is not None
    assert without.measured.eager_parts == ()
    (part,) = with_one.measured.eager_parts
    assert (part.name, part.calls, part.host_ms) == ("AdamW", 1, pytest.approx(0.95))
    assert "AdamW would run between graphs (its step count is on the host): 0.95 ms of the host" in text_of(with_one)
    assert "between graphs" not in text_of(without)
    assert "AdamW would run between graphs" in text_of(reported(checked(), 3, gpu=None, optimizers=[ADAM]))


def test_report_names_the_next_command() -> None:
    assert _next(reported(checked())) == "stepgraph verify train.py --step train_step -- --epochs 1"
    assert _next(reported(checked(function=""))) == "stepgraph check train.py -- --epochs 1"
    seen = Seen("host-read", ".item()", Location("model.py", 7, "forward"), step=2)
    assert _next(reported(checked(seen))) == "stepgraph check train.py -- --epochs 1"
    assert _next(reported(checked(), busy_ms=9.9)) == "stepgraph bench --fit --compare"


def test_ladder_without_a_gpu_begins_with_no_single_child() -> None:
    scope = {"words": ["0"], "paths": ["0"], "calls": 0, "host_fraction": 0.0, "kernels": 0}
    child = scope | {"scope": "0", "is_child": True}
    layers = scope | {"scope": "layers", "words": ["*"], "is_child": False}
    assert reported(checked(), 3, gpu=None, scopes=[child]).ladder[2][1] == "train_step = stepgraph.capture(train_step)"
    assert "graph_modules" in reported(checked(), 3, gpu=None, scopes=[layers]).ladder[2][1]
    loop = reported(checked(function=""), 3, gpu=None, scopes=[child]).ladder
    assert loop[2][1] == "step = stepgraph.capture(train_step)  # your loop's body, as a function"


def test_report_without_a_gpu_counts_models_and_optimizers() -> None:
    adam = {"name": "Adam", "inside": False, "reason": "its step count is on the host"}
    model = {"class": "Sequential", "name": "D", "parameters": 212, "count": 2}
    text = text_of(reported(checked(), 3, gpu=None, optimizers=[adam, adam], model=model))
    assert "3 steps of Sequential, 212 parameters, the largest of 2 models." in text
    assert text.count("would run between graphs") == 1
    assert "Each of 2 Adam would run between graphs" in text


def test_graphed_scripts_are_refused_by_name() -> None:
    graphed = Outcome(Status.STOPPED, result(is_graphed=True), 0)
    with pytest.raises(NoStepError) as refused:
        refuse_graphed(Script("loop.py"), graphed)
    assert refused.value.rule == "script-graphed"
    assert "`stepgraph verify loop.py`" in refused.value.fix
    refuse_graphed(Script("train.py"), Outcome(Status.STOPPED, result(), 0))


def test_report_says_do_not_to_a_busy_gpu() -> None:
    report = reported(checked(), busy_ms=9.9)
    assert (report.verdict, is_no(report), report.paste) == ("GPU-bound", True, ())
    assert "GPU-bound: do not use graphs here: the GPU is busy 99 % of the step" in text_of(report)


def test_report_forbids_the_scopes_that_findings_are_in() -> None:
    seen = Seen("host-read", ".item()", Location("model.py", 7, "forward"), module="GPT.layers.0.attn.proj", step=2)
    report = reported(checked(seen))
    assert report.advice is not None
    forbidden = {one.scope: one.forbidden for one in report.advice.predictions}
    assert forbidden == {"mlp": (), "attn": ("host-read at model.py:7",), "whole step": ("host-read at model.py:7",)}
    assert report.advice.choice.choice == "mlp"
    assert report.api is not None
    assert report.api.choice == "stepgraph.graph_modules"
    assert 'graphs = stepgraph.graph_modules(net, scope=["mlp"])  # before the loop' in report.paste
    assert "host-read at model.py:7" in text_of(report)


def test_report_of_a_library_loop_offers_modules_only() -> None:
    report = reported(checked(function="", library="lightning"))
    assert report.advice is not None
    assert report.advice.choice.choice in ("attn", "mlp")
    assert "the loop is lightning's" in text_of(report)


def test_report_uses_seen_waits_where_check_cannot_judge() -> None:
    wait = {"what": "wait", "file": "train.py", "line": 9, "source": "loss.item()", "times": 2, "scopes": ["mlp"]}
    report = reported(None, waits_inside=[wait])
    assert report.barriers == (Barrier("host-read", "train.py:9", ("mlp",)),)
    text = text_of(report)
    assert "The host waits for the GPU in the step: train.py:9 loss.item() (2 times)" in text


def test_report_lists_few_waits_and_counts_the_rest() -> None:
    rows = [{"what": "wait", "file": "a.py", "line": n, "source": "x", "times": 1, "scopes": []} for n in range(1, 10)]
    assert "and 3 more lines: --json lists them" in text_of(reported(checked(), waits_outside=rows))


def test_report_shows_what_was_tried() -> None:
    trials = (Trial("whole step", 2.5, 2**30 + 2**29), Trial("whole step + compile", error="CaptureError: no"))
    text = text_of(dataclasses.replace(reported(checked()), trials=trials))
    assert "whole step, tried 2.50 75 % +0.50 GiB" in text
    assert "CaptureError: no" in text
    assert "not predicted" not in text


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ({"gpu": None}, 3, "this machine has no GPU"),
        ({"device": "cpu"}, 30, "the script trains on the CPU"),
        ({"kernels": 0}, 30, "the script trains on the CPU"),
        ({}, 18, "ended after 18 steps, and 30 are needed to measure it: --steps 8 needs 18"),
        ({}, 5, "ended after 5 steps, and 30 are needed to measure it: at least 13 are needed"),
    ],
)
def test_report_says_why_nothing_was_measured(changes: dict[str, Any], steps: int, expected: str) -> None:
    report = reported(checked(), steps, **changes)
    assert (report.verdict, report.advice, report.api) == ("cannot judge", None, None)
    assert expected in report.cannot_judge[0]
    text = text_of(report)
    assert expected in text
    assert "stepgraph check: The whole step can be captured" in text


def test_report_of_a_killed_process_has_no_result() -> None:
    assert reasons_unmeasured({}, 3, 20) == ("the script's process ended before it could report",)
    assert text_of(report_of(Script("a.py"), Outcome(Status.STOPPED, {}, 1), 20))


def test_report_is_plain_values() -> None:
    import json

    values = json.loads(json.dumps(reported(checked()).to_dict()))
    assert (values["verdict"], values["choice"], values["api"]) == ("launch-bound", "whole step", "stepgraph.capture")
    assert values["measured"]["busy_fraction"] == 0.2
    assert [row["scope"] for row in values["predictions"]] == ["whole step", "attn", "mlp"]
    assert values["predictions"][1]["documented_bytes"] == [0, 2 * 2**30]
    assert len(values["ladder"]) == 6


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, Program()),
        ({"libraries": ["megatron", "transformer_engine"]}, Program("megatron")),
        ({"libraries": ["transformer_engine"], "has_fp8": True}, Program("transformer_engine", has_fp8=True)),
    ],
)
def test_program_is_read_from_the_model(model: dict[str, Any], expected: Program) -> None:
    assert program_of({"model": model}) == expected


def test_modules_are_matched_by_whole_segments() -> None:
    paths = {"one": ["layers.1"], "ten": ["layers.10"]}
    assert scopes_with("Net.layers.10.norm", ["Net"], paths) == ("ten",)
    assert scopes_with("Net", ["Net"], paths) == ()
    assert scopes_with("", ["Net"], paths) == ()


# -- decisions


def test_whole_step_waits_for_the_work_between_steps() -> None:
    base = Measured(step_ms=10, busy_ms=2, host_ms=5, kernels=0, outside_ms=4)
    assert predict_whole_step(base).step_ms == pytest.approx(4.03), "the host is the longer of the two"
    waits = dataclasses.replace(base, outside_syncs=1)
    expected = 0.03 + 2.005 + 4
    assert predict_whole_step(waits).step_ms == pytest.approx(expected), "the host waits for the GPU, then works"


def test_barriers_of_the_step_do_not_forbid_its_parts() -> None:
    measured = Measured(10, 2, 9, 10, regions=(Region("attn", 1, 4, 5),))
    found = with_barriers(measured, [Barrier("host-print", "a.py:1"), Barrier("host-print", "a.py:1")])
    assert found.whole_step_forbidden == ("host-print at a.py:1",)
    assert found.regions[0].forbidden == ()
    assert advise_on(found).choice.choice == "attn"


def test_narrowest_scope_is_the_smallest_useful_one() -> None:
    rows = [Prediction("attn", 8, 0, 0.2), Prediction("mlp", 9.8, 0, 0.02), Prediction("layers", 5, 0, 0.5)]
    advice = Advice(Bound.LAUNCHES, Decision("layers", ""), (*rows, Prediction("whole step", 1, 0, 0.9)))
    assert narrowest(advice) == "attn"
    assert narrowest(dataclasses.replace(advice, predictions=advice.predictions[1:2])) is None


def test_ladder_is_filled_with_the_users_names() -> None:
    names = Names("train.py -- --lr 1", "python train.py --lr 1", "net", "Trainer.fit_batch")
    lines = [how for _, how in ladder(names, ["attn"])]
    assert lines == [
        "python train.py --lr 1",
        "stepgraph check train.py -- --lr 1",
        'graphs = stepgraph.graph_modules(net, scope=["attn"])',
        "print(graphs.report())",
        "stepgraph verify train.py -- --lr 1",
        "trainer.fit_batch = stepgraph.capture(trainer.fit_batch)",
    ]
    assert ladder(names)[3][1] == "print(trainer.fit_batch.report())"


def test_ladder_of_a_whole_step_names_it_and_captures_it_once() -> None:
    lines = [how for _, how in ladder(Names("train.py -- --lr 1", "python train.py --lr 1", "net", "kd_step"))]
    assert lines[2:] == [
        "kd_step = stepgraph.capture(kd_step)",
        "print(kd_step.report())",
        "stepgraph verify train.py --step kd_step -- --lr 1",
    ]


def test_report_spells_scopes_that_are_children() -> None:
    scope = {"words": ["0"], "paths": ["0"], "calls": 0, "host_fraction": 0.0, "kernels": 0, "is_child": True}
    report = reported(checked(), 3, gpu=None, scopes=[scope | {"scope": "0"}, scope | {"scope": "2"}])
    assert 'It has these scopes: its children "0", "2", and the whole step.' in text_of(report)


@pytest.mark.parametrize(
    ("choice", "step", "words", "expected"),
    [
        (DO_NOT, "f", (), ""),
        ("whole step", "f", (), "f = stepgraph.capture(f)"),
        ("whole step", "loop:f", (), "f = stepgraph.capture(f)"),
        ("whole step", "", (), "@stepgraph.capture"),
        ("attn", "f", ("attn",), 'stepgraph.graph_modules(model, scope=["attn"])'),
        ("layers", "f", (), "stepgraph.graph_modules(model)"),
    ],
)
def test_snippet_fits_the_choice(choice: str, step: str, words: tuple[str, ...], expected: str) -> None:
    assert expected in "\n".join(snippet(choice, Names("a.py", "python a.py", step=step), words))


def test_api_follows_what_is_captured() -> None:
    def advice(choice: str) -> Advice:
        return Advice(Bound.LAUNCHES, Decision(choice, ""), ())

    assert api_for(advice(DO_NOT), Program()).choice == "none"
    assert api_for(advice("attn"), Program()).choice == "stepgraph.graph_modules"
    assert api_for(advice("whole step"), Program()).choice == "stepgraph.capture"
    assert api_for(advice("whole step"), Program("megatron", "most speed")).choice == "stepgraph.FullCudaGraphWrapper"


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (
            Outcome(Status.FAILED, {}, 4, exception='Traceback\n  File "a"\nCaptureError: x\n  at a.py:3'),
            "CaptureError: x",
        ),
        (Outcome(Status.TIMED_OUT, {}, 4), "timed_out"),
        (Outcome(Status.COMPLETED, {"times_ms": []}, 4), "ended after 4 steps"),
        (Outcome(Status.STOPPED, {"times_ms": [1.0], "eager_reasons": {"hooks": 9}}, 20), "never replayed: hooks"),
    ],
)
def test_trial_that_fails_is_a_row_that_says_so(outcome: Outcome, error: str) -> None:
    trial = _trial("whole step", outcome)
    assert trial.step_ms is None
    assert error in trial.error
