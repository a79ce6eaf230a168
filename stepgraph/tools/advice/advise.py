"""`stepgraph.advise` measures a script's training step and says whether graphs would pay, and how to begin.

The script runs unchanged, twice, each time in a process of its own. In the first run `stepgraph.check` finds what
forbids a capture, and where; a script that fails, hangs or has no step is answered from it. In the second a probe
measures the step (`measure`) and stops the script. The decision itself is pure (`decide`), and so is what to type then
(`bring_up`). Without a GPU only the first run says something.

Example:
    >>> report = stepgraph.advise("train.py", ["--epochs", "1"])
    >>> print(report.verdict, report.advice.choice)
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stepgraph.core.catalogue import entry
from stepgraph.core.errors import NoStepError
from stepgraph.core.wording import counted
from stepgraph.tools.advice.bring_up import Names, Target, ladder, snippet
from stepgraph.tools.advice.decide import (
    DO_NOT,
    WHOLE_STEP,
    Advice,
    Api,
    Barrier,
    Decision,
    EagerPart,
    Framework,
    Measured,
    ModelKind,
    Program,
    Region,
    ScopeChoice,
    Workload,
    advise_on,
    api_for,
    choose_scope,
    documented_memory,
    is_part,
    useful_scopes,
    with_barriers,
)
from stepgraph.tools.advice.phases import steps_needed
from stepgraph.tools.advice.trial import Trial, try_captures
from stepgraph.tools.checks.check import CheckReport, check
from stepgraph.tools.checks.findings import Api as CheckedApi
from stepgraph.tools.script.run import Outcome, Script, refuse_unjudged, run_script
from stepgraph.tools.timeline import StepTimes

__all__ = ["AdviceReport", "advise"]

DEFAULT_STEPS, MIN_STEPS = 20, 3
_PROBE = "stepgraph.tools.advice.measure:MeasureProbe"
_TRIAL_STEPS, _CHECK_STEPS = 20, 5
_NOT_TRIED = "--try captured nothing: it times a capture against a measured eager step"


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """What `advise` found."""

    script: Script
    outcome: Outcome
    measured: Measured | None
    """None if nothing could be measured; `cannot_judge` says why."""
    advice: Advice | None
    times: StepTimes | None
    cannot_judge: tuple[str, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    checked: CheckReport | None = None
    trials: tuple[Trial, ...] = ()

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the probe saw, as plain values."""
        return self.outcome.result

    @property
    def verdict(self) -> str:
        """Whether the step is launch-bound, in between or GPU-bound; or that it cannot be judged."""
        return self.advice.bound.value if self.advice is not None else "cannot judge"

    @property
    def names(self) -> Names:
        script, words = self.script, shlex.join(self.script.args)
        model = self.facts.get("model", {}).get("name") or "model"
        taken = f"{script} -- {words}" if words else str(script)
        return Names(taken, " ".join(filter(None, ("python", str(script), words))), model, self.step)

    @property
    def step(self) -> str:
        """The function that is one step: named by the user, or found; empty if there is none."""
        return self.script.step or (self.checked.shape.function if self.checked is not None else "")

    @property
    def api(self) -> Decision | None:
        """The interface to use, and why."""
        return None if self.advice is None else api_for(self.advice.choice.choice, program_of(self.facts))

    @property
    def guide(self) -> ScopeChoice | None:
        """What NVIDIA's guides for Megatron say to a model of this kind; None if it has none of their scopes."""
        words = words_of(self.facts)
        if not words:
            return None
        choice = choose_scope(workload_of(self.facts, self.measured, self.checked))
        return replace(choice, scope=tuple(word for word in choice.scope if word in words))

    @property
    def ladder(self) -> tuple[tuple[str, str], ...]:
        """The six steps in which graphs are brought up, each with its command; none if the answer is "do not"."""
        if is_no(self):
            return ()
        if self.advice is not None:
            paths = {one["scope"]: tuple(one["paths"]) for one in self.facts["scopes"]}
            last = self._target(self.advice.choice.choice)
            return ladder(self.names, self._first(useful_scopes(self.advice, paths), last), last)
        # without a measurement, layers and the words of known models are taken for useful, single children not
        known = [one["scope"] for one in self.facts.get("scopes", ()) if not one.get("is_child")]
        last = self._target(WHOLE_STEP)
        first = self._first(known, last)
        return ladder(self.names, first, first if self.barriers else last)

    def _first(self, useful: Sequence[str], last: Target) -> Target:
        """What to begin with: the scope of the guides if it is useful, else the first useful one, else the last."""
        guide = self.guide
        if guide is not None and guide.scope and set(guide.scope) <= set(useful):
            return Target(Api.GRAPH_MODULES, guide.scope)
        return self._target(useful[0]) if useful else last

    @property
    def paste(self) -> tuple[str, ...]:
        """The lines to paste into the script; none if the answer is "do not"."""
        if self.advice is None or is_no(self):
            return ()
        return snippet(self._target(self.advice.choice.choice), self.names)

    @property
    def try_command(self) -> str:
        """The command that captures the step whatever was decided."""
        return self.names.command("advise", "--try")

    @property
    def nsys(self) -> str:
        """The command that shows the step in Nsight Systems."""
        return f"nsys profile --cuda-graph-trace=graph {self.names.run}"

    def _target(self, choice: str) -> Target:
        words = {one["scope"]: tuple(one["words"]) for one in self.facts.get("scopes", ())}
        return Target(api_for(choice, program_of(self.facts)).choice, words.get(choice, ()))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        advice, measured, api, guide = self.advice, self.measured, self.api, self.guide
        return {
            "script": str(self.script),
            "verdict": self.verdict,
            "choice": advice.choice.choice if advice is not None else None,
            "reason": advice.choice.reason if advice is not None else None,
            "api": None if api is None else api.choice,
            "api_reason": None if api is None else api.reason,
            "measured": None if measured is None else asdict(measured) | {"busy_fraction": measured.busy_fraction},
            "step_ms": None if self.times is None else self.times.median,
            "step_ms_p10": None if self.times is None else self.times.p10,
            "step_ms_p90": None if self.times is None else self.times.p90,
            "predictions": [] if advice is None else [self._row(one) for one in advice.predictions],
            "barriers": [asdict(one) for one in self.barriers],
            "check": None if self.checked is None else self.checked.to_dict(),
            "trials": [asdict(trial) for trial in self.trials],
            "warnings": list(advice.warnings) if advice is not None else [],
            "guide": None if guide is None else asdict(guide),
            "ladder": [list(rung) for rung in self.ladder],
            "paste": list(self.paste),
            "nsys": self.nsys,
            "cannot_judge": list(self.cannot_judge),
            "notes": list(self.outcome.notes),
            "files_written": [file.path for file in self.outcome.files],
            "steps": self.outcome.steps,
            "facts": dict(self.facts),
        }

    def _row(self, prediction: Any) -> dict[str, Any]:
        used = self.measured.used_bytes if self.measured is not None else 0
        documented = documented_memory(prediction.scope, used, stages_of(self.facts))
        return asdict(prediction) | {"documented_bytes": list(documented)}


def advise(
    script: str,
    args: Sequence[str] = (),
    *,
    steps: int = DEFAULT_STEPS,
    step: str | None = None,
    tries: bool = False,
    timeout: float = 300.0,
    is_module: bool = False,
    writes: bool = True,
    stdout_to_stderr: bool = False,
) -> AdviceReport:
    """Run a script for some steps, measure them, and decide whether graphs pay, of what, and with which interface.

    Args:
        script: The path of the script, or with `is_module` the dotted name of a module.
        args: The script's own arguments.
        steps: How many steps are timed; about ten more run before and after them, and then the script is stopped.
        step: The function that is one step, if it is not found by itself: `train_step`, `Trainer.step`, `module:name`.
        tries: Capture the step for real, in two further runs, and measure it. It must be a function.
        timeout: Seconds after which the script is ended.
        is_module: Run `python -m script`.
        writes: False refuses files that the script opens for writing.
        stdout_to_stderr: Keep stdout free of what the script prints.
    """
    wanted = Script(script, tuple(args), is_module=is_module, step=step, timeout=timeout, writes=writes)
    return advise_script(wanted, steps=steps, tries=tries, stdout_to_stderr=stdout_to_stderr)


def advise_script(script: Script, *, steps: int, tries: bool, stdout_to_stderr: bool) -> AdviceReport:
    """Advise on a script; see `advise`."""
    checked = check(
        script.target,
        script.args,
        steps=_CHECK_STEPS,
        step=script.step,
        timeout=script.timeout,
        is_module=script.is_module,
        writes=script.writes,
        stdout_to_stderr=stdout_to_stderr,
    )
    refuse_graphed(script, checked.outcome)
    refuse_unjudged(script, checked.outcome)
    options = {"steps": max(steps, MIN_STEPS), "needs_gpu": True}
    # of a step that is a function, all of it is measured: also what comes before its first module and after its last
    named = replace(script, step=script.step or checked.shape.function or None)
    outcome = run_script(named, _PROBE, options, stdout_to_stderr=stdout_to_stderr)
    refuse_graphed(script, outcome)
    refuse_unjudged(script, outcome)
    report = report_of(script, outcome, steps, checked)
    if tries and report.measured is None:
        return replace(report, cannot_judge=(*report.cannot_judge, _NOT_TRIED))
    if not tries:
        return report
    if not report.step:
        why = "no function of the script is one step: put the step into a function, or name it with --step NAME"
        return replace(report, trials=(Trial(WHOLE_STEP, error=why),))
    tried = replace(script, step=report.step)
    return replace(report, trials=try_captures(tried, _TRIAL_STEPS, stdout_to_stderr=stdout_to_stderr))


def refuse_graphed(script: Script, outcome: Outcome) -> None:
    """Raise an error if the script has graphs: there is no eager step to measure."""
    if outcome.result.get("is_graphed"):
        why, fix = entry("script-graphed").reason_and_fix()
        fix = fix.replace("train.py", shlex.join([*(("-m",) if script.is_module else ()), script.target]))
        raise NoStepError(f"{script}: the script uses stepgraph already", rule="script-graphed", why=why, fix=fix)


def report_of(script: Script, outcome: Outcome, steps: int, checked: CheckReport | None = None) -> AdviceReport:
    """Make the report of a run: pure."""
    result = outcome.result
    unknown = (*outcome.cannot_judge, *reasons_unmeasured(result, outcome.steps, steps))
    barriers = barriers_of(result, checked)
    if unknown:
        return AdviceReport(script, outcome, None, None, None, unknown, barriers, checked)
    times = StepTimes(tuple(result["times_ms"]))
    measured = with_barriers(measured_of(result, times), barriers)
    return AdviceReport(script, outcome, measured, advise_on(measured), times, (), barriers, checked)


def reasons_unmeasured(result: Mapping[str, Any], seen: int, steps: int) -> tuple[str, ...]:
    """Return why a run says nothing about a GPU; none means that it was measured."""
    if not result:
        return ("the script's process ended before it could report",)
    if result["gpu"] is None:
        return ("this machine has no GPU: step time, busy time, kernels, gaps, waits and memory are not measured",)
    needed = steps_needed(max(steps, MIN_STEPS))
    if seen < needed:
        fewer = seen - steps_needed(0)
        fix = (
            f"--steps {fewer} needs {seen}" if fewer >= MIN_STEPS else f"at least {steps_needed(MIN_STEPS)} are needed"
        )
        return (f"the script ended after {counted(seen, 'steps')}, and {needed} are needed to measure it: {fix}",)
    if result["device"] != "cuda" or not result["kernels"]:
        return ("the script trains on the CPU: it launches no kernels that a graph could replay",)
    return ()


def measured_of(result: Mapping[str, Any], times: StepTimes) -> Measured:
    """Read a measurement from plain values."""
    memory, model = result["memory"], result["model"]
    regions = tuple(
        Region(one["scope"], one["calls"], one["host_fraction"] * result["host_ms"], one["kernels"])
        for one in result["scopes"]
        if one["calls"]
    )
    return Measured(
        step_ms=times.median,
        busy_ms=result["busy_ms"],
        host_ms=result["host_ms"],
        kernels=result["kernels"],
        small_kernels=result["small_kernels"],
        activation_bytes=memory.get("activation_bytes", 0),
        used_bytes=memory.get("used_bytes", 0),
        total_bytes=memory.get("total_bytes", 0),
        outside_ms=result["outside_ms"],
        outside_syncs=sum(one["times"] for one in result["waits_outside"]),
        num_tensors=model.get("tensors", 0),
        eager_parts=tuple(
            EagerPart(one["name"], one["calls"], one["host_fraction"] * result["host_ms"], one["reason"])
            for one in result["optimizers"]
            if not one["inside"]
        ),
        regions=regions,
    )


def barriers_of(result: Mapping[str, Any], checked: CheckReport | None) -> tuple[Barrier, ...]:
    """Return what stands in the way of a capture: lines of the script, and the kind of program that it is."""
    paths = {one["scope"]: tuple(one["paths"]) for one in result.get("scopes", ())}
    found = list(_barrier_lines(result, checked, paths))
    if checked is not None and checked.shape.library:
        found.append(Barrier(f"the loop is {checked.shape.library}'s: no function of yours is the step"))
    if stages_of(result) > 1:
        found.append(Barrier("the ranks of a pipeline wait for each other within the step"))
    if program_of(result).has_fp8:
        found.append(Barrier("fp8: scaling factors are not captured yet", scopes=tuple(paths)))
    return tuple(found)


def _barrier_lines(
    result: Mapping[str, Any], checked: CheckReport | None, paths: Mapping[str, Sequence[str]]
) -> Iterator[Barrier]:
    """The findings of `check`, or else the waits that were seen.

    A wait in an optimizer or a GradScaler is no finding: stepgraph captures both without it.
    """
    if checked is None or checked.verdict.api is CheckedApi.UNKNOWN:
        for wait in result.get("waits_inside", ()):
            yield Barrier("host-read", _place(wait["file"], wait["line"]), tuple(wait["scopes"]))
        return
    roots = [str(model["class"]) for model in checked.outcome.result.get("models", ())]
    for one in checked.findings:
        where = "" if one.where is None else _place(one.where.file, one.where.line)
        yield Barrier(one.rule, where, scopes_with(one.module, roots, paths))


def scopes_with(module: str, roots: Sequence[str], paths: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the scopes that a module is a part of, by its name below one of the models.

    Example:
        >>> scopes_with("GPT.layers.1.attn.proj", ["GPT"], {"attn": ["layers.0.attn", "layers.1.attn"]})
        ('attn',)
    """
    below = [module.removeprefix(root).removeprefix(".") for root in roots if is_part(module, root)]
    return tuple(scope for scope, known in paths.items() if any(is_part(path, one) for path in below for one in known))


def _place(file: str, line: int) -> str:
    return f"{file}:{line}" if file else ""


def program_of(result: Mapping[str, Any]) -> Program:
    """Read the kind of program from plain values.

    It is Megatron's if a schedule of Megatron runs the step. Megatron's layers in a loop of the user's are captured as
    any others.
    """
    model = result.get("model", {})
    schedule, libraries = model.get("schedule", {}).get("library"), model.get("libraries", ())
    framework: Framework = "transformer_engine" if "transformer_engine" in libraries else "torch"
    return Program(
        framework="megatron" if schedule == "megatron" else framework,
        has_fp8=bool(model.get("has_fp8")),
        has_pipeline=stages_of(result) > 1,
        has_torch_pipelining=schedule == "torch",
    )


def stages_of(result: Mapping[str, Any]) -> int:
    """Return the number of pipeline stages that share the model, 1 without a pipeline."""
    return int(result.get("model", {}).get("schedule", {}).get("stages", 1))


def words_of(result: Mapping[str, Any]) -> frozenset[str]:
    """Return the scopes of the model that have Megatron's names."""
    scopes = (one for one in result.get("scopes", ()) if not one.get("is_child"))
    return frozenset(one["scope"] for one in scopes if list(one["words"]) == [one["scope"]])


def workload_of(result: Mapping[str, Any], measured: Measured | None, checked: CheckReport | None) -> Workload:
    """Read what the guides ask about a training, as far as a run shows it.

    It does not show recomputation, offloading, packed sequences, padded experts or NaN checks on the host.
    """
    words = words_of(result)
    model: ModelKind = "mamba" if "mamba" in words else "moe" if words & {"moe", "moe_router"} else "dense"
    varies = checked is not None and any(one.rule == "varying-shape" for one in checked.findings)
    known = Workload(model=model, has_static_shapes=not varies, pipeline_stages=stages_of(result))
    if measured is None:
        return known
    used = measured.used_bytes / measured.total_bytes if measured.total_bytes else 0.0
    return replace(known, memory_used=used, busy_fraction=measured.busy_fraction)


def is_no(report: AdviceReport) -> bool:
    """Whether the answer is not to use graphs."""
    return report.advice is not None and report.advice.choice.choice == DO_NOT
