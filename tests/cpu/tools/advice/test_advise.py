"""Advice without a GPU: scopes of models, shares of a profile, reports from plain values, and what is printed."""

from __future__ import annotations

import dataclasses
import io
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from stepgraph.commands.advise import _next, render
from stepgraph.commands.cli import app
from stepgraph.core.errors import Location, NoStepError, ScriptError
from stepgraph.lab.models import GPT, GPTConfig, MoEConfig, MoEGPT
from stepgraph.tools.advice import advise as advise_file
from stepgraph.tools.advice.advise import (
    AdviceReport,
    advise_script,
    is_no,
    program_of,
    reasons_unmeasured,
    refuse_graphed,
    report_of,
    scopes_with,
    workload_of,
)
from stepgraph.tools.advice.bring_up import Names, Target, ladder, snippet
from stepgraph.tools.advice.decide import (
    GUIDES_MEMORY,
    MEASURED_MEMORY,
    Advice,
    Api,
    Barrier,
    Bound,
    Decision,
    Measured,
    Prediction,
    Program,
    Region,
    Workload,
    advise_on,
    predict_whole_step,
    useful_scopes,
    with_barriers,
)
from stepgraph.tools.advice.measure import Models, Wait, Waits, _lines
from stepgraph.tools.advice.parts import BEGIN, REACH, find_scopes, mark_of, marked, shares_of, stage_scope
from stepgraph.tools.advice.phases import HOST_STEPS, WARMUP, Phase, phase_of, steps_needed
from stepgraph.tools.advice.trial import Trial, _trial
from stepgraph.tools.checks.check import CheckReport
from stepgraph.tools.checks.findings import Seen, StepShape, collect, judge
from stepgraph.tools.measure import traced
from stepgraph.tools.script.run import Outcome, Script, Status

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


MEGATRON_SCHEDULES = """
def forward_backward_no_pipelining(model, x):
    model(x)

def forward_backward_pipelining_without_interleaving(model, x):
    model(x)
"""


@pytest.mark.parametrize(
    ("function", "stages"),
    [("forward_backward_no_pipelining", 1), ("forward_backward_pipelining_without_interleaving", 2)],
)
def test_models_know_the_schedule_of_megatron(function: str, stages: int) -> None:
    library: dict[str, Any] = {"__name__": "megatron.core.pipeline_parallel.schedules"}
    exec(MEGATRON_SCHEDULES, library)
    models = Models()
    with models.noting():
        library[function](nn.Linear(4, 4), torch.randn(1, 4))
    assert models.schedule == {"library": "megatron", "stages": stages}


def test_models_know_the_schedule_of_torch() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = nn.Linear(4, 4)
        schedule = ScheduleGPipe(PipelineStage(part, 0, 1, CPU), 2, loss_fn=nn.functional.mse_loss)
        models = Models()
        with models.noting():
            schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
    finally:
        dist.destroy_process_group()
    models.settle()
    assert models.largest is part
    assert models.schedule == {"library": "torch", "stages": 1}


def test_models_without_a_schedule_have_none() -> None:
    models = Models()
    with models.noting():
        nn.Linear(4, 4)(torch.randn(1, 4))
    assert models.schedule == {}


def test_stage_has_all_of_its_model_in_it() -> None:
    model = nn.Sequential(*[block() for _ in range(4)])
    scopes = (*find_scopes(model), stage_scope(model))
    trace = profiled(model, torch.randn(2, 4), scopes)
    _, shares = shares_of(trace, scopes)
    assert (shares["stage"].calls, shares["layers"].calls) == (1, 4)
    assert shares["stage"].host_us > shares["layers"].host_us


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
    assert report.paste == ("import stepgraph", "", "# before the loop", "train_step = stepgraph.capture(train_step)")
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
    assert (report.verdict, is_no(report), report.paste, report.ladder) == ("GPU-bound", True, (), ())
    text = text_of(report)
    assert "GPU-bound: do not use graphs here: the GPU is busy 99 % of the step" in text
    assert "stepgraph advise train.py --try -- --epochs 1" in text
    for part in ("To bring graphs up", "To paste", "Use stepgraph", "begin with"):
        assert part not in text, part


def test_report_of_a_tried_step_does_not_say_how_to_try() -> None:
    tried = dataclasses.replace(reported(checked(), busy_ms=9.9), trials=(Trial("whole step", 9.8, 2**30),))
    assert "--try --" not in text_of(tried)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_command_exits_with_0_if_the_answer_is_do_not(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise_file, "advise_script", lambda *args, **kwargs: reported(checked(), busy_ms=9.9))
    done = CliRunner().invoke(app, ["advise", "train.py", *options], env={"NO_COLOR": "1"})
    assert done.exit_code == 0
    assert "do not" in done.stdout


IN_MEGATRON = {"model": {"class": "GPTModel", "name": "net", "schedule": {"library": "megatron", "stages": 1}}}
IN_PIPELINE = {"model": {"class": "GPTModel", "name": "net", "schedule": {"library": "megatron", "stages": 2}}}
IN_STAGE = {"model": {"class": "GPT", "name": "net", "schedule": {"library": "torch", "stages": 4}}}
MEGATRON_LAYERS = {"model": {"class": "Net", "name": "net", "libraries": ["megatron", "transformer_engine"]}}
STAGE_ROW = {"scope": "stage", "words": [], "paths": [""], "calls": 4, "host_fraction": 0.9, "kernels": 900}
AGREEING = {
    "plain torch": ({}, "the whole step", "stepgraph.capture"),
    "Megatron's layers in the user's loop": (MEGATRON_LAYERS, "the whole step", "stepgraph.capture"),
    "Megatron's schedule": (IN_MEGATRON, "the whole step", "stepgraph.FullCudaGraphWrapper"),
    "Megatron's schedule of a pipeline": (IN_PIPELINE, "the scope attn", "stepgraph.graph_modules"),
    "a stage of torch's pipelines": (
        IN_STAGE | {"scopes": [STAGE_ROW]},
        "the stages of the schedule",
        "stepgraph.graph_stage",
    ),
}


@pytest.mark.parametrize("case", AGREEING)
def test_report_agrees_with_itself(case: str) -> None:
    changes, captured, api = AGREEING[case]
    report = reported(checked(), **changes)
    text = text_of(report)
    assert f"launch-bound: capture {captured}:" in text
    assert f"Use {api}:" in text
    assert report.paste[-1].partition(" = ")[2].startswith(f"{api}(")
    assert len(report.ladder) == 6
    rungs = " ".join(how for _, how in report.ladder)
    assert report.paste[-1] in rungs
    named = {f"stepgraph.{word}" for word in ("capture(", "FullCudaGraphWrapper(", "graph_stage(", "CudaGraphManager(")}
    assert {one for one in named if one in rungs} <= {f"{api}("}


def test_report_of_a_pipeline_forbids_the_whole_step() -> None:
    report = reported(checked(), **IN_PIPELINE)
    assert report.advice is not None
    (whole,) = (one for one in report.advice.predictions if one.scope == "whole step")
    assert whole.forbidden == ("the ranks of a pipeline wait for each other within the step",)
    rows = {row["scope"]: row["documented_bytes"] for row in report.to_dict()["predictions"]}
    assert rows["attn"] == [10 * 2**30, None]


def test_report_of_fp8_layers_says_do_not() -> None:
    report = reported(checked(), model={"class": "Net", "name": "net", "has_fp8": True})
    assert is_no(report)
    text = text_of(report)
    assert "fp8: scaling factors are not captured yet" in text
    assert "make_graphed_callables" not in text


def test_report_says_what_does_not_fit() -> None:
    memory = {"activation_bytes": 2**30, "used_bytes": 130 * 2**30, "total_bytes": 140 * 2**30}
    text = text_of(reported(checked(), memory=memory))
    assert "does not fit: needs 143.0 of 140.0 GiB" in text
    assert "begin with what is predicted to need least: whole step, +3.9 GiB" in text
    assert "would not begin yet: memory is tight" in text, "what the guides say of it"


def test_report_has_the_memory_of_guides_and_results() -> None:
    text = text_of(reported(checked()))
    assert GUIDES_MEMORY in text
    assert MEASURED_MEMORY in text


def test_report_names_the_scope_of_the_guides() -> None:
    text = text_of(reported(checked()))
    assert "guides for Megatron begin such a model with attn: attention of a dense model first." in text
    assert "NaN checks are not seen in a run" in text
    row = {"paths": ["layers.0"], "calls": 1, "host_fraction": 0.3, "kernels": 9}
    layers = row | {"scope": "layers", "words": ["layers.*"]}
    unknown = reported(checked(), scopes=[layers])
    assert (unknown.guide, unknown.to_dict()["guide"]) == (None, None)
    experts = [row | {"scope": word, "words": [word]} for word in ("attn", "moe_router", "moe_preprocess")]
    without = reported(checked(), 3, gpu=None, scopes=experts)
    assert (
        without.ladder[2][1] == 'graphs = stepgraph.graph_modules(net, scope=["attn", "moe_router", "moe_preprocess"])'
    )


def test_workload_is_read_from_a_run() -> None:
    measured = Measured(10, 2, 9, 10, used_bytes=2**30, total_bytes=2**32)
    scope = {"scope": "moe_router", "words": ["moe_router"]}
    known = workload_of(IN_PIPELINE | {"scopes": [scope]}, measured, checked())
    assert known == Workload(model="moe", memory_used=0.25, pipeline_stages=2, busy_fraction=0.2)
    seen = Seen("varying-shape", "x", Location("model.py", 7, "forward"), step=2)
    assert workload_of({"scopes": [{"scope": "mamba", "words": ["mamba"]}]}, None, checked(seen)) == Workload(
        model="mamba", has_static_shapes=False
    )


UNJUDGED = {
    "raised": (Outcome(Status.FAILED, {}, 0, exception="RuntimeError: broken"), "script-failed"),
    "timed out": (Outcome(Status.TIMED_OUT, {}, 2), "script-timeout"),
    "exited": (Outcome(Status.COMPLETED, {}, 0), "no-step"),
    "graphed": (Outcome(Status.STOPPED, {"is_graphed": True}, 3), "script-graphed"),
}


@pytest.mark.parametrize("case", UNJUDGED)
def test_advise_runs_a_script_once_that_cannot_be_judged(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_again(*args: Any, **kwargs: Any) -> Outcome:
        raise AssertionError("the script ran again")

    outcome, rule = UNJUDGED[case]
    monkeypatch.setattr(advise_file, "check", lambda *args, **kwargs: dataclasses.replace(checked(), outcome=outcome))
    monkeypatch.setattr(advise_file, "run_script", runs_again)
    with pytest.raises(ScriptError) as refused:
        advise_script(Script("train.py"), steps=20, tries=False, stdout_to_stderr=False)
    assert refused.value.rule == rule


def test_report_forbids_the_scopes_that_findings_are_in() -> None:
    seen = Seen("host-read", ".item()", Location("model.py", 7, "forward"), module="GPT.layers.0.attn.proj", step=2)
    report = reported(checked(seen))
    assert report.advice is not None
    forbidden = {one.scope: one.forbidden for one in report.advice.predictions}
    assert forbidden == {"mlp": (), "attn": ("host-read at model.py:7",), "whole step": ("host-read at model.py:7",)}
    assert report.advice.choice.choice == "mlp"
    assert report.api is not None
    assert report.api.choice == "stepgraph.graph_modules"
    assert 'graphs = stepgraph.graph_modules(net, scope=["mlp"])' in report.paste
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
        ({"libraries": ["megatron", "transformer_engine"]}, Program("transformer_engine")),
        ({"libraries": ["transformer_engine"], "has_fp8": True}, Program("transformer_engine", has_fp8=True)),
        (IN_MEGATRON["model"], Program("megatron")),
        (IN_PIPELINE["model"], Program("megatron", has_pipeline=True)),
        (IN_STAGE["model"], Program(has_pipeline=True, has_torch_pipelining=True)),
    ],
)
def test_program_is_read_from_the_model(model: dict[str, Any], expected: Program) -> None:
    assert program_of({"model": model}) == expected


def test_modules_are_matched_by_whole_segments() -> None:
    paths = {"one": ["layers.1"], "ten": ["layers.10"]}
    assert scopes_with("Net.layers.10.norm", ["Net"], paths) == ("ten",)
    assert scopes_with("Net", ["Net"], paths) == ()
    assert scopes_with("", ["Net"], paths) == ()
    assert scopes_with("Net", ["Net"], paths | {"stage": [""]}) == ("stage",), "a stage has all of the model in it"


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


def test_useful_scopes_are_inside_the_choice_and_gain_enough() -> None:
    rows = [Prediction("attn", 8, 0, 0.2), Prediction("mlp", 9, 0, 0.1), Prediction("layers", 5, 0, 0.5)]
    paths = {"attn": ["layers.0.attn"], "mlp": ["layers.0.mlp"], "layers": ["layers.0"]}

    def useful(choice: str, *of: Prediction) -> tuple[str, ...]:
        predictions = (*of, Prediction("whole step", 1, 0, 0.9))
        return useful_scopes(Advice(Bound.LAUNCHES, Decision(choice, ""), predictions), paths)

    assert useful("whole step", *rows) == useful("layers", *rows) == ("mlp", "attn", "layers")
    assert useful("attn", *rows) == ("attn",), "an mlp cannot be widened to attention"
    assert useful("whole step", Prediction("mlp", 9.8, 0, 0.02)) == (), "2 % are not useful"
    assert useful("whole step", Prediction("mlp", 9, 0, 0.1, ("host-read",))) == ()


def test_ladder_begins_with_the_scope_of_the_guides() -> None:
    report = reported(checked())
    assert report.ladder[2][1] == 'graphs = stepgraph.graph_modules(net, scope=["attn"])'
    seen = Seen("host-read", ".item()", Location("model.py", 7, "forward"), module="GPT.layers.0.attn.proj", step=2)
    assert reported(checked(seen)).ladder[2][1] == 'graphs = stepgraph.graph_modules(net, scope=["mlp"])'


NAMES = Names("train.py -- --lr 1", "python train.py --lr 1", "net", "Trainer.fit_batch")
ATTENTION = Target(Api.GRAPH_MODULES, ("attn",))


def test_ladder_is_filled_with_the_users_names() -> None:
    assert [how for _, how in ladder(NAMES, ATTENTION, Target(Api.CAPTURE))] == [
        "python train.py --lr 1",
        "stepgraph check train.py -- --lr 1",
        'graphs = stepgraph.graph_modules(net, scope=["attn"])',
        "print(graphs.report())",
        "stepgraph verify train.py -- --lr 1",
        "trainer.fit_batch = stepgraph.capture(trainer.fit_batch)",
    ]


def test_ladder_of_a_whole_step_ends_with_further_features() -> None:
    names = dataclasses.replace(NAMES, step="kd_step")
    rungs = ladder(names, Target(Api.CAPTURE), Target(Api.CAPTURE))
    assert [how for _, how in rungs][2:] == [
        "kd_step = stepgraph.capture(kd_step)",
        "print(kd_step.report())",
        "stepgraph verify train.py --step kd_step -- --lr 1",
        "stepgraph advise train.py --try -- --lr 1",
    ]
    assert rungs[2][0] == "Capture the whole step."
    assert "torch.compile" in rungs[5][0]
    assert "overlapped" in rungs[5][0]


def test_ladder_of_a_scope_ends_with_what_forbids_more() -> None:
    rungs = ladder(NAMES, ATTENTION, ATTENTION)
    assert len(rungs) == 6
    assert "widen" in rungs[5][0]
    assert rungs[5][1] == "stepgraph check train.py -- --lr 1"
    wider = ladder(NAMES, ATTENTION, Target(Api.GRAPH_MODULES))
    assert "widen it to the scope of whole layers" in wider[5][0]
    assert wider[5][1] == "graphs = stepgraph.graph_modules(net)"


def test_report_spells_scopes_that_are_children() -> None:
    scope = {"words": ["0"], "paths": ["0"], "calls": 0, "host_fraction": 0.0, "kernels": 0, "is_child": True}
    report = reported(checked(), 3, gpu=None, scopes=[scope | {"scope": "0"}, scope | {"scope": "2"}])
    assert 'It has these scopes: its children "0", "2", and the whole step.' in text_of(report)


@pytest.mark.parametrize(
    ("target", "step", "expected"),
    [
        (Target(Api.CAPTURE), "f", "f = stepgraph.capture(f)"),
        (Target(Api.CAPTURE), "loop:f", "f = stepgraph.capture(f)"),
        (Target(Api.CAPTURE), "", "@stepgraph.capture"),
        (ATTENTION, "f", 'stepgraph.graph_modules(model, scope=["attn"])'),
        (Target(Api.GRAPH_MODULES), "f", "stepgraph.graph_modules(model)"),
        *((Target(api), "f", f"{api}(") for api in Api),
    ],
)
def test_snippet_is_of_the_interface_that_is_named(target: Target, step: str, expected: str) -> None:
    assert expected in "\n".join(snippet(target, Names("a.py", "python a.py", step=step)))


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
