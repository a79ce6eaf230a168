"""The probe of `stepgraph advise`: measures a script's steps, as `phases` says what is done in which."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.nn.modules import module as torch_module

from stepgraph.core.errors import Location
from stepgraph.core.frames import is_users_code
from stepgraph.engine.backends.threads import replaced
from stepgraph.tools.advice.optimizers import SteppedOptimizers
from stepgraph.tools.advice.parts import BEGIN, REACH, Scope, StepTrace, find_scopes, marked, stage_scope
from stepgraph.tools.advice.phases import MODELS_STEP, Phase, phase_of
from stepgraph.tools.checks.script_objects import ScriptObjects, calls_from_engine
from stepgraph.tools.measure import elapsed_ms, mark, traced
from stepgraph.tools.script.probe import RunningScript
from stepgraph.tools.timeline import read_trace

GRAPHED = "the script uses stepgraph already"
_SYNCHRONIZING = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype"
_TORCH_PIPELINES, _MEGATRON_PIPELINES = "torch.distributed.pipelining", "megatron.core.pipeline_parallel"


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of the host for the GPU."""

    what: str
    where: Location
    methods: frozenset[tuple[int, str]] = frozenset()
    """The methods of modules in which it happened: the id of the module, and the name."""


def _running_methods() -> Iterator[tuple[int, str]]:
    """The methods of modules on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            yield id(owner), frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _users_line() -> Location:
    """The innermost line of the user's on the stack; Python's own modules, such as `warnings`, are not the user's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_code(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return Location("", 0, "")
    return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class Waits:
    """Notes where the host waits for the GPU, in a step and between steps."""

    def __init__(self) -> None:
        self._pending: list[Wait] = []
        self.inside: list[Wait] = []
        self.outside: list[Wait] = []

    def note(self, what: str) -> None:
        """The host waits, at the user's innermost line."""
        self._pending.append(Wait(what, _users_line(), frozenset(_running_methods())))

    def reach(self) -> None:
        """All that was noted is in the step."""
        self.inside += self._pending
        self._pending.clear()

    def end(self) -> None:
        """The rest is not."""
        self.outside += self._pending
        self._pending.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Let torch report waits during the block."""

        def waits(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.note("synchronize()")
            return function(*args, **kwargs)

        mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("always", message=f".*{_SYNCHRONIZING}")
            warnings.filterwarnings("ignore", message=f".*{_PROTOTYPE}")
            shown = warnings.showwarning

            def show(message: Any, *args: Any, **kwargs: Any) -> None:
                if _SYNCHRONIZING in str(message):
                    self.note("wait")
                else:
                    shown(message, *args, **kwargs)

            warnings.showwarning = show
            for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
                stack.enter_context(replaced(owner, "synchronize", waits))
            if mode is not None:
                torch.cuda.set_sync_debug_mode("warn")
                stack.callback(torch.cuda.set_sync_debug_mode, mode)
            yield


class HostClock:
    """The host's own time in steps and between them."""

    def __init__(self) -> None:
        self.inside_ms: list[float] = []
        self.outside_ms: list[float] = []
        self._inside, self._from = 0.0, 0.0

    def begin(self) -> None:
        _drain()
        self._inside, self._from = 0.0, time.perf_counter()

    def reach(self) -> None:
        self._inside += time.perf_counter() - self._from
        _drain()
        self._from = time.perf_counter()

    def end(self) -> None:
        self.inside_ms.append(1e3 * self._inside)
        self.outside_ms.append(1e3 * (time.perf_counter() - self._from))


class Models:
    """The models that run in a step, and the user's name of the largest."""

    def __init__(self) -> None:
        self._called: dict[int, torch.nn.Module] = {}
        self.all: list[torch.nn.Module] = []
        self.largest: torch.nn.Module | None = None
        self.name = ""
        self.schedule: Mapping[str, Any] = {}
        """The schedule that calls the models; see `running_schedule`."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the modules that are called."""

        def called(module: torch.nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self._called[id(module)] = module
                self.schedule = self.schedule or running_schedule(sys._getframe(1))

        handle = torch_module.register_module_forward_pre_hook(called)
        try:
            yield
        finally:
            handle.remove()

    def settle(self) -> None:
        """Find the models among the modules that were called."""
        inner = {id(part) for module in self._called.values() for part in module.modules() if part is not module}
        models = [m for m in self._called.values() if id(m) not in inner and next(m.parameters(), None) is not None]
        self.all = models
        self.largest = max(models, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
        self.name = _users_name(self.largest)
        self._called.clear()


def running_schedule(frame: types.FrameType | None) -> Mapping[str, Any]:
    """Return the schedule among the callers of a frame: its library, and its stages. Empty if there is none.

    The functions of Megatron's schedules have names that say whether there are several stages, not how many: 2 then
    means "2 or more".
    """
    while frame is not None:
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if module.startswith(_TORCH_PIPELINES):
            stages = getattr(
                frame.f_locals.get("self"), "_num_stages", None
            )  # stages themselves have no such attribute
            if stages is not None:
                return {"library": "torch", "stages": int(stages)}
        if module.startswith(_MEGATRON_PIPELINES) and function.startswith("forward_backward_"):
            return {"library": "megatron", "stages": 2 if "_pipelining_with" in function else 1}
        frame = frame.f_back
    return {}


def _users_name(model: torch.nn.Module | None) -> str:
    """The name by which the user's code holds a model."""
    frame = sys._getframe(1) if model is not None else None
    while frame is not None:
        if is_users_code(frame.f_code):
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                if value is model:
                    return name
                held = getattr(value, "__dict__", {}) if name == "self" else {}
                for inner, own in [*held.items(), *held.get("_modules", {}).items()]:
                    if own is model:
                        return f"self.{inner}"
        frame = frame.f_back
    return ""


class MeasureProbe:
    """Measures a script. Options: `steps`, the number of timed ones; `needs_gpu`: without one, only note the models."""

    def __init__(self, script: RunningScript) -> None:
        self._script = script
        is_idle = bool(script.options.get("needs_gpu")) and not torch.cuda.is_available()
        self._steps = 0 if is_idle else int(script.options["steps"])
        self._phase = Phase.WARMUP
        self._in_step, self._over_steps = contextlib.ExitStack(), contextlib.ExitStack()
        self._marks: dict[int, Any] = {}
        self._traces: list[Mapping[str, Any]] = []
        self._waits, self._host, self._models = Waits(), HostClock(), Models()
        self._optimizers, self._is_graphed = SteppedOptimizers(), False
        self._scopes: tuple[Scope, ...] = ()
        self._memory: dict[str, int] = {}
        self._was_reached = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Listen to the steps of the block.

        Hooks are set before the step that they are for: a step is found in a hook of its first module, too late for
        another hook of that one.
        """
        self._script.listen(self)
        self._over_steps.enter_context(self._models.noting())
        self._over_steps.enter_context(self._optimizers.noting())
        try:
            yield
        finally:
            self._in_step.close()
            self._over_steps.close()

    def step_begins(self, index: int) -> None:
        """A step begins."""
        self._phase, self._was_reached = phase_of(index, self._steps), False
        self._refuse_graphs()
        match self._phase:
            case Phase.TIMED:
                self._marks[index] = mark(current_device())
            case Phase.HOST:
                self._marks.setdefault(index, mark(current_device()))  # the end of the last timed step
                self._memory.setdefault("before", _memory_of(torch.cuda.memory_allocated))
                self._host.begin()
            case Phase.WAITS:
                self._in_step.enter_context(self._waits.watching())
                if not _has_compiled_code():  # which would be compiled again
                    self._over_steps.enter_context(marked(self._scopes))
            case Phase.PROFILE:
                self._traces = self._in_step.enter_context(traced(current_device()))
                self._in_step.enter_context(self._optimizers.marked())
                with record_function(BEGIN):
                    pass
            case Phase.OVER:
                self._script.stop()

    def _refuse_graphs(self) -> None:
        """Stop at a script that has graphs: an event in a capture of its own would break it.

        Modules are looked at in the first steps only; whoever calls the step is cheap to see.
        """
        frame = sys._getframe(1)
        if self._phase is Phase.WARMUP:
            objects = ScriptObjects()
            objects.look_around()
            self._is_graphed = objects.notice_graphs(frame)
        else:
            self._is_graphed = calls_from_engine(frame)
        if self._is_graphed:
            self._script.cannot_judge(GRAPHED)
            self._script.stop()

    def step_reaches(self, index: int) -> None:
        """All that ran by now is in the step."""
        self._was_reached = True
        if self._phase is Phase.HOST:
            self._host.reach()
        elif self._phase is Phase.WAITS:
            self._waits.reach()
        elif self._phase is Phase.PROFILE:
            with record_function(REACH):
                pass

    def step_ends(self, index: int) -> None:
        """The next step begins, or the script ends."""
        if self._phase is Phase.WAITS:
            self._waits.end()
        if self._phase is Phase.HOST and self._was_reached:
            self._host.end()
        self._in_step.close()
        if not self._was_reached:
            return
        if index == MODELS_STEP:
            self._over_steps.close()
            self._models.settle()
            if self._models.largest is not None:
                in_stage = self._models.schedule.get("library") == "torch"
                stage = (stage_scope(self._models.largest),) if in_stage else ()
                self._scopes = (*find_scopes(self._models.largest), *stage)
        if phase_of(index + 1, self._steps) is Phase.OVER:
            self._script.stop()

    def result(self) -> Mapping[str, Any]:
        """Return what was measured."""
        model, found = self._models.largest, self._found_memory()
        timeline = self._timeline()
        return {
            "device": current_device().type if model is None else next(model.parameters()).device.type,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "times_ms": self._times(),
            "host_ms": _median(self._host.inside_ms),
            "outside_ms": _median(self._host.outside_ms),
            "waits_inside": _lines(self._waits.inside, self._scopes),
            "waits_outside": _lines(self._waits.outside, ()),
            "memory": found,
            "model": _described(self._models),
            "has_compiled_code": _has_compiled_code(),
            "is_graphed": self._is_graphed,
            **timeline,
        }

    def _times(self) -> list[float]:
        marks = [self._marks[index] for index in sorted(self._marks)][: self._steps + 1]
        return list(elapsed_ms(marks, current_device()))

    def _found_memory(self) -> dict[str, int]:
        if not self._memory:
            return {}
        return {
            "activation_bytes": max(0, _memory_of(torch.cuda.max_memory_allocated) - self._memory["before"]),
            "used_bytes": _memory_of(torch.cuda.max_memory_reserved),
            "total_bytes": _memory_of(lambda: torch.cuda.mem_get_info()[1]),
        }

    def _timeline(self) -> dict[str, Any]:
        trace = self._traces[0] if self._traces else {"traceEvents": []}
        line = read_trace(trace)
        read = StepTrace(trace)
        step_us, shares = read.host_us, read.shares(self._scopes)
        scopes = [
            {
                "scope": scope.name,
                "words": list(scope.words),
                "paths": list(scope.paths),
                "is_child": scope.is_child,
                "calls": shares[scope.name].calls,
                "host_fraction": shares[scope.name].host_us / step_us if step_us else 0.0,
                "kernels": shares[scope.name].kernels,
            }
            for scope in self._scopes
        ]
        gaps = line.gaps_us()
        return {
            "busy_ms": line.busy_ms,
            "kernels": len(line.kernels),
            "small_kernels": line.small,
            "gaps": len(gaps),
            "longest_gap_ms": max(gaps, default=0.0) / 1e3,
            "launches": line.launches,
            "graph_launches": line.graph_launches,
            "waits_in_profile": line.waits,
            "scopes": scopes,
            "optimizers": self._optimizers.result(read),
        }


def _described(models: Models) -> dict[str, Any]:
    model = models.largest
    if model is None:
        return {}
    parameters = {id(p): p for one in models.all for p in one.parameters()}.values()
    kinds = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return {
        "class": type(model).__name__,
        "name": models.name,
        "count": len(models.all),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        "libraries": sorted(kinds & {"megatron", "transformer_engine"}),
        "has_fp8": any(getattr(module, "fp8_initialized", False) for module in model.modules()),
        "schedule": dict(models.schedule),
    }


def _lines(waits: Iterable[Wait], scopes: Iterable[Scope]) -> list[dict[str, Any]]:
    """Waits by line, each with the scopes that it is in."""
    methods = {scope.name: {(id(part.module), part.method) for part in scope.parts} for scope in scopes}
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for wait in waits:
        where = wait.where
        new = {"what": wait.what, "file": where.file, "line": where.line, "source": where.source, "times": 0}
        row = found.setdefault((where.file, where.line, wait.what), {**new, "scopes": []})
        row["times"] += 1
        row["scopes"] += [name for name, of in methods.items() if of & wait.methods and name not in row["scopes"]]
    return list(found.values())


def _has_compiled_code() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"]["unique_graphs"])


def current_device() -> torch.device:
    """Return the GPU that is in use, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory_of(read: Callable[[], int]) -> int:
    return read() if torch.cuda.is_available() else 0


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
