"""The probe of `stepgraph verify`: in the script's process it traces every call of what the script has graphed.

A *subject* is a captured step, or the training around graphed modules, callables and stages. A *moment* is what is
there after a call of a captured step, or, for graphed parts, after the step of an optimizer: the values of the program
that the subject can name, and the results of the calls since the last moment. The script runs several times from one
seed, with its graphs and without. A run without them is the script as it is, except that everything graphed calls the
functions that it was made of. So the same moments come in the same order, and two traces can be compared.

One more mode looks for the cause of a difference: `experiments` runs with graphs up to the step that differs, and hands
that step, with its arguments and the state before it, to the experiments of `stepgraph.verify`; of graphed parts, one
part after the other. The operations of the step before are logged in passing.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core import wording
from stepgraph.core.errors import StepgraphError, StepgraphWarning
from stepgraph.core.storage import storage_of
from stepgraph.core.tree import flatten
from stepgraph.engine.backends import Backend, backend_for
from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.call.proof import StepLogs
from stepgraph.engine.observe.step_objects import numbered
from stepgraph.engine.oplog import Vocabulary
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.engine.oplog.writes import Writes
from stepgraph.engine.parts.callables.graphed import GraphedCallable
from stepgraph.engine.parts.modules.manager import ModuleGraphs
from stepgraph.engine.parts.stages.manager import StageManager
from stepgraph.engine.record.pair.eager_proof import AuditTurns
from stepgraph.engine.step.capture import capture
from stepgraph.engine.step.step import CapturedStep
from stepgraph.tools.program import Key, Program, program_of
from stepgraph.tools.script.patience import Patience
from stepgraph.tools.script.probe import RunningScript
from stepgraph.tools.script.steps import StepCalls
from stepgraph.tools.verification.agreement import Agreement
from stepgraph.tools.verification.causes import Earlier, HeldOutputs, Pair, logged
from stepgraph.tools.verification.compare import compare_pair
from stepgraph.tools.verification.costs import Counts, counted, timed
from stepgraph.tools.verification.plainly import running_plainly
from stepgraph.tools.verification.report import out_of_reach
from stepgraph.tools.verification.subjects import Part, eager_reasons, subject_of_call
from stepgraph.tools.verification.trace import Keeper, call_values, fresh, noting_writes

__all__ = ["PARTS", "ScriptMoment", "VerifyProbe"]

PARTS = "the training step"
"""The subject that stands for graphed modules, callables and stages."""
_MAX_NAMED = 6
_ENOUGH = 4
"""Moments of all subjects, as a multiple of those of one, after which the script is stopped."""


Call = tuple[CapturedStep[..., Any] | Part, Any, Any]
"""Something graphed, and the arguments and keywords of a call."""


@dataclass(frozen=True, slots=True)
class ScriptMoment:
    """What is there after one step of a subject."""

    subject: str
    step: int
    """Counted for each subject."""
    values: Mapping[Key, Any]
    step_ms: float | None = None
    counts: Counts | None = None


@dataclass(slots=True)
class _Subject:
    """What is known of one subject."""

    name: str
    kind: str
    program: Program
    backend: Backend
    steps: int = 0
    replays: int = 0
    held: HeldOutputs | None = None
    """The outputs of the last call."""
    overwritten: list[str] = field(default_factory=list)
    """Outputs that the next call has overwritten."""
    calls: list[Call] = field(default_factory=list)
    """The calls of graphed parts in a step that is examined, and copies of their arguments."""
    graphed: list[Any] = field(default_factory=list)
    """The captured step, or all graphed parts; they are kept, so that no other object gets their ids."""
    results: dict[Key, Any] = field(default_factory=dict)
    """The results of graphed parts since the last moment."""

    def facts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "backend": self.backend.name,
            "steps": self.steps,
            "replays": self.replays,
            "overwritten": list(dict.fromkeys(self.overwritten)),
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """Say what was graphed, and why it was not replayed."""
        parts = [f"`{_name_of(one)}`" for one in self.graphed if not isinstance(one, CapturedStep)]
        named = ", ".join(parts[:_MAX_NAMED]) + (f" and {len(parts) - _MAX_NAMED} more" * (len(parts) > _MAX_NAMED))
        graphed = [f"graphed are {named}, with {wording.counted(self.replays, 'replays')} in all"] if parts else []
        return graphed + ([] if self.replays else eager_reasons(self.graphed))

    def hold(self, result: Any) -> None:
        """Check the outputs of the call before, and hold these until the next one."""
        if self.held is not None:
            self.overwritten += self.held.overwritten()
        self.held = HeldOutputs(result)


class VerifyProbe:
    """Traces one run of the script.

    Options: mode (eager, graphed, experiments), seed, steps, trace; for experiments also the subject and the step.
    """

    def __init__(self, script: RunningScript) -> None:
        self._script, self._options = script, script.options
        self._mode = str(self._options["mode"])
        self._keeper = Keeper()
        self._moments: list[ScriptMoment] = []
        self._subjects: dict[int, _Subject] = {}
        self._parts: _Subject | None = None
        self._earlier: dict[int, Earlier] = {}
        self._shown: dict[str, Any] = {}
        self._warned: list[str] = []
        self._inside = 0
        self._vocabulary = Vocabulary()
        self._named = contextlib.ExitStack()
        """Captures the function that `--step` names, which is wrapped before the script runs."""
        self._named.enter_context(replaced(StepCalls, "wrapped", _captured))

    # -- the protocol of probes

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Seed everything, and trace what runs in the block."""
        _seed(int(self._options["seed"]))
        if not torch.cuda.is_available():
            torch.set_num_threads(1)  # a sum that is split over threads differs from run to run
        patience = Patience(
            self._script, lambda: bool(self._subjects or self._parts), "graphs nothing", int(self._options["steps"])
        )
        with contextlib.ExitStack() as stack:
            if self._mode == "eager":
                stack.enter_context(running_plainly())
                stack.enter_context(patience.watching())
            stack.enter_context(replaced(CapturedStep, "__call__", self._step))
            for kind in (ModuleGraphs, GraphedCallable, StageManager):
                stack.enter_context(replaced(kind, "__call__", self._part))
            stack.enter_context(at_optimizer_steps(after=self._after_optimizer))
            stack.enter_context(replaced(warnings, "showwarning", self._warning))
            yield

    def result(self) -> Mapping[str, Any]:
        """Write the trace to its file, and return what is small."""
        self._named.close()
        torch.save([self._as_saved(moment) for moment in self._moments], self._options["trace"])
        subjects = [*self._subjects.values(), *([self._parts] if self._parts is not None else [])]
        return {
            "subjects": {one.name: one.facts() for one in subjects},
            "warned": self._warned,
            **self._shown,
            "peak_bytes": next((one.backend.peak_memory_bytes() for one in subjects), None),
        }

    @staticmethod
    def _as_saved(moment: ScriptMoment) -> tuple[Any, ...]:
        return moment.subject, moment.step, dict(moment.values), moment.step_ms, moment.counts

    def _warning(self, below: Callable[..., None], message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(category, type) and issubclass(category, StepgraphWarning):
            self._warned.append(str(message))
        below(message, category, *args, **kwargs)

    # -- captured steps

    def _step(self, below: Callable[..., Any], step: CapturedStep[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return below(step, *args, **kwargs)
        subject = self._subject_of(step, args)
        with self._untraced():
            self._look_at(subject, [(step, args, kwargs)])
            with self._logged(subject, (args, kwargs)):
                result, step_ms, counts = self._called(subject, functools.partial(below, step), args, kwargs)
        if step.options.outputs != "static":
            subject.hold(result)
        self._add(subject, {**call_values((args, kwargs), result), **subject.program.values()}, step_ms, counts)
        return result

    @contextlib.contextmanager
    def _logged(self, subject: _Subject, given: Any) -> Iterator[None]:
        """Note that a call cannot be judged which writes to memory that is not among the values of its program."""
        if not self._options.get("logs_writes"):
            yield
            return
        tensors = (value for value in subject.program.values().values() if isinstance(value, torch.Tensor))
        writes = Writes(filter(None, map(storage_of, tensors)))
        with noting_writes(writes, given, self._vocabulary):
            yield
        if unsaved := writes.unsaved():
            self._script.cannot_judge(f"{subject.name} {out_of_reach(unsaved)}")

    @contextlib.contextmanager
    def _untraced(self) -> Iterator[None]:
        """Trace nothing of what is called inside."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _called(
        self, subject: _Subject, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, float | None, Counts | None]:
        """Make a call of a captured step: the last one is counted, the others are timed."""
        if subject.steps == int(self._options["steps"]) - 1:
            result, counts = counted(call, args, kwargs, subject.backend, operations=self._mode == "eager")
            return result, None, counts
        result, step_ms = timed(call, args, kwargs, subject.backend)
        return result, step_ms, None

    # -- the step that differs

    def _is_examined(self, subject: _Subject) -> bool:
        """Check whether this run looks at the present step of a subject, which is the one that differs or the last."""
        if self._mode != "experiments" or self._options["subject"] != subject.name:
            return False
        return int(self._options["step"]) - subject.steps in (0, 1)

    def _look_at(self, subject: _Subject, calls: Sequence[Call]) -> None:
        """Log the calls of the step before, or look for the cause in those of the step that differs."""
        if not self._is_examined(subject):
            return
        agreement = Agreement.of_process_group()
        calls = calls[: agreement.least(len(calls))]
        if subject.steps < int(self._options["step"]):
            for call in calls:
                with contextlib.suppress(StepgraphError):  # a part may be called in the order of a schedule only
                    self._earlier[id(call[0])] = _log_of(call, subject.steps)
            return
        for call in calls:
            found = None
            with contextlib.suppress(StepgraphError):
                found = _cause_in(call, self._earlier.get(id(call[0])), agreement)
            is_known = found is not None and found["rule"] != "wrong-numbers"
            if is_known or "cause" not in self._shown:
                self._shown["cause"] = found
            if agreement.any(is_known):
                break
        self._script.stop()

    def _subject_of(self, step: CapturedStep[..., Any], args: Any) -> _Subject:
        found = self._subjects.get(id(step))
        if found is None:
            program = program_of(step.function, args, step.options.generators)
            names = {one.name for one in self._subjects.values()}
            name = numbered(str(getattr(step, "__name__", "step")), names)
            found = _Subject(name, "captured step", program, backend_for(program.device), graphed=[step])
            found.backend.reset_peak_memory()
            self._subjects[id(step)] = found
            self._script.saw(f"{name} is graphed")
        return found

    # -- graphed parts

    def _part(self, below: Callable[..., Any], graphs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or (isinstance(graphs, StageManager) and not graphs.is_computing):
            return below(graphs, *args, **kwargs)
        parts = self._parts_with(graphs, (args, kwargs))
        name = numbered(_name_of(graphs), {key[1].partition(":")[0] for key in parts.results})
        with self._untraced():
            if self._is_examined(parts) and all(graphs is not known for known, _, _ in parts.calls):
                parts.calls.append((graphs, *fresh((args, kwargs))))
            result = below(graphs, *args, **kwargs)
        outputs = {("outputs", f"{name}:{key[1]}"): value for key, value in call_values((), result).items()}
        parts.results |= {key: v.detach().clone() if isinstance(v, torch.Tensor) else v for key, v in outputs.items()}
        return result

    def _parts_with(self, graphs: Any, given: Any) -> _Subject:
        """The subject of all graphed parts, to which this one belongs."""
        module = graphs.target.module if isinstance(graphs, StageManager) else _module_of(graphs)
        if self._parts is None:
            self._parts = _Subject(PARTS, "graphed parts", Program(), backend_for(_device_of(module, given)))
        parts = self._parts
        if all(graphs is not known for known in parts.graphed):
            parts.graphed.append(graphs)
            self._script.saw(f"{_name_of(graphs)} is graphed")
        if isinstance(module, torch.nn.Module) and all(module is not known for known in parts.program.modules.values()):
            modules = {**parts.program.modules, numbered(_name_of(graphs), parts.program.modules): module}
            parts.program = Program(modules, parts.program.optimizers)
        return parts

    def _after_optimizer(self, optimizer: Optimizer, _: Any) -> None:
        parts = self._parts
        if self._inside or parts is None:
            return
        with self._untraced():
            self._look_at(parts, parts.calls)
        parts.calls = []
        if all(optimizer is not known for known in parts.program.optimizers.values()):
            name = numbered(type(optimizer).__name__, parts.program.optimizers)
            parts.program = Program(parts.program.modules, {**parts.program.optimizers, name: optimizer})
        values, parts.results = {**parts.results, **parts.program.values()}, {}
        self._add(parts, values)

    # -- moments

    def _add(
        self, subject: _Subject, values: Mapping[Key, Any], step_ms: float | None = None, counts: Counts | None = None
    ) -> None:
        kept = self._keeper.keep(values)
        self._moments.append(ScriptMoment(subject.name, subject.steps, kept, step_ms, counts))
        subject.steps += 1
        subject.replays = max(subject.replays, sum(map(_replays_of, subject.graphed)))  # graphs may be closed later
        steps, subjects = int(self._options["steps"]), [*self._subjects.values()]
        subjects += [self._parts] if self._parts is not None else []
        if all(one.steps >= steps for one in subjects) or len(self._moments) >= _ENOUGH * steps:
            self._script.stop()


def _captured(below: Callable[..., Any], calls: StepCalls, function: Callable[..., Any]) -> Any:
    """Capture the function that `--step` names; a method, for each of its objects."""
    if isinstance(function, CapturedStep):
        return below(calls, function)
    step = capture(function)
    qualified = str(getattr(function, "__qualname__", ""))
    if isinstance(function, types.MethodType) or "." not in qualified.rpartition("<locals>.")[2]:
        return below(calls, step)

    @functools.wraps(function)
    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return step.__get__(instance, type(instance))(*args, **kwargs)

    return below(calls, method)


def _log_of(call: Call, step: int) -> Earlier:
    """Log a call of this step, made eagerly and without effect."""
    subject, batch = subject_of_call(*call)
    logs, program = StepLogs(), subject.program
    with subject.during, program.untouched():
        _, log = logged(logs, program, backend_for(program.device), subject.eager, fresh(batch), {})
    return Earlier(logs, log, program, step)


def _cause_in(call: Call, earlier: Earlier | None, agreement: Agreement) -> dict[str, Any] | None:
    """Compare one call, graphed and eager, from the present state; return the cause of a difference in plain values.

    The call is made on one batch alone, and audits are put off: no graph is recorded again while it is looked at.
    """
    subject, batch = subject_of_call(*call)
    graphed = call[0]
    put_off = replaced(AuditTurns, "begin", lambda below, turns: False)
    with subject.during, graphed.without_audits() if isinstance(graphed, CapturedStep) else put_off:
        backend = backend_for(subject.program.device)
        pair = Pair(
            subject.eager, subject.graphed, subject.program, [batch], backend, agreement=agreement, earlier=earlier
        )
        found = compare_pair(pair, capture=subject.capture, holds=subject.holds, has_costs=False)
    cause = found.cause
    if cause is None:
        return None
    where = None if cause.where is None else [cause.where.file, cause.where.line, cause.where.function]
    return {"rule": cause.rule, "what": cause.what, "where": where, "module": found.module}


def _replays_of(graphs: Any) -> int:
    """How often a captured step or a graphed part was replayed."""
    if isinstance(graphs, CapturedStep):
        modules = graphs.report().modules  # where the capture of the whole step has failed
        return graphs.replays + (modules.tally()[0] if modules is not None else 0)
    if isinstance(graphs, ModuleGraphs):
        return graphs.tally()[1]
    if isinstance(graphs, StageManager):
        return graphs.forwards + sum(runner.forwards for runner in graphs.runners.values())
    return int(graphs.report().forwards)


def _module_of(graphs: Any) -> Any:
    if isinstance(graphs, ModuleGraphs):
        return graphs.module
    return getattr(graphs.original, "__self__", None)


def _name_of(graphs: Any) -> str:
    return str(graphs.target.name if isinstance(graphs, StageManager) else graphs.name)


def _device_of(module: Any, given: Any) -> torch.device:
    parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    found = [*parameters, *(value for value in flatten(given)[0] if isinstance(value, torch.Tensor))]
    return found[0].device if found else torch.device("cpu")


def _seed(seed: int) -> None:
    """Seed every generator that a script draws from; workers of data loaders are seeded by torch from these."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        with contextlib.suppress(ImportError):
            import numpy
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
