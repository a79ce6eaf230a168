"""The probe of `stepgraph check`: watches the steps of a script, and never changes what it computes.

It joins three observers, of operations (`step_operations`), of the host's work (`host_work`) and of host values
(`step_state`), and sorts what they report into inside and outside of the step. After enough steps it stops the script.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import Optimizer

from stepgraph.backends.threads import compiled_code_runs_eagerly, replaced
from stepgraph.errors import Location
from stepgraph.frames import is_engine
from stepgraph.inspect.findings import Ledger, Seen
from stepgraph.inspect.host_work import HostWork
from stepgraph.inspect.places import Place, is_own_code, location_of, own_frames, package_of, place_of, stack_of
from stepgraph.inspect.script_search import ScriptSearch
from stepgraph.inspect.step_functions import StepFunctions
from stepgraph.inspect.step_operations import Made, StepOperations, changes
from stepgraph.inspect.step_state import FunctionsByCode, Line, StepState, lines_with
from stepgraph.observe.ddp import replicas
from stepgraph.observe.own_changes import OwnNumbers
from stepgraph.observe.step_objects import StepObjects
from stepgraph.oplog import Difference, Log
from stepgraph.optim.steps import at_optimizer_steps
from stepgraph.script.probe import RunningScript

DEFAULT_STEPS = 10
"""Steps that are watched."""
_SYNCHRONIZING = "called a synchronizing CUDA operation"
"""What torch warns of in its sync debug mode."""
_DEFAULT_STREAM = "default_stream"
_LISTED = frozenset(
    ("host-read", "host-file", "tokenizer", "host-random", "host-print", "host-logging", "host-data", "host-value")
)
"""Rules of which work outside the step is listed."""


@dataclass(slots=True)
class CurrentStep:
    """The host side of the step that runs now."""

    numbers: OwnNumbers = field(default_factory=lambda: OwnNumbers((), lambda optimizer: False))
    state: StepState | None = None
    forwards: set[tuple[types.CodeType, int]] = field(default_factory=set)
    """Where modules were called."""
    changed: list[Seen] = field(default_factory=list)
    """The host values that it has changed by now."""


@dataclass(slots=True)
class PastSteps:
    """The steps that are over."""

    count: int = 0
    logs: list[list[Log]] = field(default_factory=list)
    paths: list[list[Line]] = field(default_factory=list)
    """The lines that ran in each step, in order."""


class CheckProbe:
    """Watches a script's steps. The result has findings as plain values: `Seen`, inside and outside."""

    def __init__(self, script: RunningScript) -> None:
        self._script = script
        self._max_steps = int(script.options.get("steps", DEFAULT_STEPS))
        self._seen, self._lines = Ledger(), Ledger()
        self._touched = StepObjects()
        self._work = HostWork(self._note)
        self._operations = StepOperations(self._note, self._moved, self._work.paused)
        self._work.lines = self._line
        self._functions, self._by_code = StepFunctions(), FunctionsByCode()
        self._step: int | None = None
        self._now, self._past = CurrentStep(), PastSteps()
        self._called: dict[str, torch.nn.Module] = {}
        """The modules that ran in a step, by name."""
        self._search: ScriptSearch | None = None

    # -- the protocol

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch during the block."""
        self._script.listen(self)
        self._script.at_synchronize(self._synchronizes)
        with contextlib.ExitStack() as stack:
            stack.enter_context(compiled_code_runs_eagerly())
            stack.enter_context(self._work.watching())
            stack.enter_context(self._operations.watching())
            stack.enter_context(replaced(torch.autograd, "backward", self._backward))
            stack.enter_context(self._sync_warnings())
            stack.enter_context(at_optimizer_steps(self._optimizer_begins, self._optimizer_done))
            handle = torch_module.register_module_forward_pre_hook(self._forward)
            stack.callback(handle.remove)
            try:
                yield
            finally:
                if self._search is not None:
                    self._search.finish()

    def result(self) -> Mapping[str, Any]:
        """Return what was seen."""
        inside = [one for one in self._seen.inside if isinstance(one, Seen)]
        varying = self._varying()
        models = self._modules([*inside, *varying])
        if self._search is not None:
            searched = next(model for model in models if "" not in model["clean"])
            searched["clean"] = searched["clean"] if self._search.scope is None else self._search.scope
        self._release()
        outside = [one for one in self._seen.outside if one.rule in _LISTED]
        return {
            "inside": [plain_seen(one) for one in (*inside, *varying)],
            "outside": [plain_seen(one) for one in outside],
            "steps": self._past.count,
            "step": self._functions.result(),
            "models": models,
            "is_hidden": self._work.is_hidden,
        }

    def _release(self) -> None:
        """Let the script's objects go: the runner keeps its probe for as long as the process lives."""
        self._touched, self._by_code = StepObjects(), FunctionsByCode()
        self._called, self._past, self._now = {}, PastSteps(self._past.count), CurrentStep()

    @contextlib.contextmanager
    def _sync_warnings(self) -> Iterator[None]:
        """On a GPU, torch's sync debug mode warns of each wait: those in a step are noted."""
        if self._script.is_cuda_mapped:
            yield
            return
        show = warnings.showwarning

        def shown(message: Any, *args: Any, **kwargs: Any) -> None:
            if _SYNCHRONIZING not in str(message):
                show(message, *args, **kwargs)
            elif self._step is not None:
                self._note("host-read", "waits for the device", sys._getframe(1))

        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=_SYNCHRONIZING)
            warnings.showwarning = shown
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    # -- the steps

    def step_begins(self, index: int) -> None:
        """A step begins."""
        if index >= self._max_steps and not self._searches():
            self._script.stop()
        if self._search is not None:
            return
        self._step = index
        self._find_objects()
        frames = own_frames(sys._getframe(1))
        self._functions.begin(frames)
        device = self._device()
        self._now.numbers = OwnNumbers(self._touched.all_optimizers, lambda optimizer: False)
        self._now.state = self._watched_values(frames)
        self._lines = Ledger()
        self._now.changed, self._now.forwards = [], set()
        self._operations.begin(index, self._touched, device)
        self._work.start(device)

    def _searches(self) -> bool:
        """After the watched steps: observe one more for the search of modules, if there is one to do."""
        if self._search is None:
            inside = [one for one in self._seen.inside if isinstance(one, Seen)]
            models = [model for model in self._modules([*inside, *self._varying()]) if "" not in model["clean"]]
            if not models:
                return False
            self._search = ScriptSearch(self._called[models[0]["class"]])
        self._search.begin_step()
        return not self._search.is_over

    def _watched_values(self, frames: Sequence[types.FrameType]) -> StepState | None:
        """The host values of a step, if it is known from the step before which it has."""
        lines: Sequence[Line] = self._lines.inside
        if not lines:
            return None
        functions = self._by_code.of({code for code, _ in lines})
        return StepState(self._touched, frames, lines, functions, self._work.ran, self._now.numbers)

    def step_reaches(self, index: int) -> None:
        """All that ran by now is inside the step."""
        if self._step is None:
            return
        with self._work.paused():
            self._work.settle()
            self._seen.reach()
            self._lines.reach()
            self._operations.reach()
            self._functions.reach(sys._getframe(1))
            self._now.changed = []
            if self._now.state is not None:
                self._now.state.note_changes(self._value_changed, self._lines.inside)

    def step_ends(self, index: int) -> None:
        """The step is over."""
        if self._search is not None:
            self._search.end_step()
        if self._step is None:
            return
        self._work.stop()
        logs = self._operations.end()
        self._seen.end()
        self._lines.end()
        self._now.state = None
        if self._lines.inside or self._now.changed or any(logs):  # else it was none
            self._past.count = index + 1
            self._past.logs.append(logs)
            self._past.paths.append(self._lines.inside)
            self._seen.inside += self._now.changed
        self._step = None

    # -- what happens

    def _note(self, rule: str, what: str, frame: types.FrameType, line: Location | None = None) -> None:
        place = place_of(frame)
        if place.is_optimizers or self._step is None:
            return
        where = line or place.where
        seen = Seen(rule, what, where, place.inside, self._module_name(place), self._step)
        if place.is_loading:
            self._seen.outside.append(seen)
        else:
            self._seen.note(seen)

    def _line(self, code: types.CodeType, line: int) -> None:
        """A line of the user's runs. The default stream is known by name: there is no event for its use."""
        self._lines.note((code, line))
        if _DEFAULT_STREAM in code.co_names and line in lines_with(code, _DEFAULT_STREAM):
            where = Location(code.co_filename, line, code.co_name)
            self._seen.note(Seen("legacy-stream", "uses the default stream", where, "", "", self._step or 0))

    def _value_changed(self, rule: str, what: str, where: Location | None) -> None:
        self._now.changed.append(Seen(rule, what, where, "", "", self._step or 0))

    def _moved(self, made: Made, tensor: torch.Tensor) -> None:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        what = f"a {shape} tensor of this step is read by the next one, at another address each time"
        self._seen.note(Seen("moving-address", what, made.where, "", self._module_at(made.where), made.step))

    def _synchronizes(self, name: str) -> None:
        """The script waits for what stands for the device."""
        self._note_call("host-read", f"{name}()")

    def _note_call(self, rule: str, what: str) -> None:
        """Note a call of the script's or a library's. torch's own code asks where a tensor is, and is told."""
        frame = next((one for one in stack_of(sys._getframe(1)) if not is_engine(one.f_code.co_filename)), None)
        if self._step is not None and frame is not None and package_of(frame.f_code.co_filename) != "torch":
            self._note(rule, what, frame)

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        """A module is about to run: notes it, and whether a loop came round within the step."""
        if self._step is None or not self._operations.is_ours() or torch.compiler.is_compiling():
            return
        self._touched.add_module(module)
        self._called.setdefault(self._touched.name(module), module)
        frame = next((one for one in stack_of(sys._getframe(1)) if is_own_code(one.f_code)), None)
        if frame is None or not torch.is_grad_enabled():
            return
        site = (frame.f_code, frame.f_lasti)
        if site in self._now.forwards and self._operations.has_backward:
            self._seen.microbatch_begins()
            self._lines.microbatch_begins()
            self._operations.microbatch_begins(self._touched)
            self._now.forwards.clear()
        self._now.forwards.add(site)

    def _backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if self._step is not None:
            self._seen.backward_done()
            self._lines.backward_done()
            self._operations.backward_done()

    def _optimizer_begins(self, optimizer: Optimizer) -> None:
        self._now.numbers.begin(optimizer)
        caller = next((one for one in stack_of(sys._getframe(1)) if one.f_code.co_name == "wrapper"), None)
        given = (*caller.f_locals.get("args", ())[1:], *caller.f_locals.get("kwargs", {}).values()) if caller else ()
        if any(callable(value) for value in given):
            self._closure(optimizer, given)

    def _closure(self, optimizer: Optimizer, given: Sequence[Any]) -> None:
        closure = next(value for value in given if callable(value))
        code = getattr(closure, "__code__", None)
        if code is not None and is_own_code(code):  # a framework's own closure says nothing about the user's code
            frame = next((one for one in stack_of(sys._getframe(1)) if is_own_code(one.f_code)), None)
            where = location_of(frame) if frame is not None else None
            what = f"{type(optimizer).__name__}.step is given a closure"
            self._seen.note(Seen("optimizer-closure", what, where, "", "", self._step or 0))

    def _optimizer_done(self, optimizer: Optimizer, _: Any) -> None:
        self._now.numbers.end(optimizer)

    # -- what is known

    def _find_objects(self) -> None:
        """Find the models and optimizers that are alive; whole models first, since their parts are named by them."""
        modules: dict[int, torch.nn.Module] = {}
        for value in gc.get_objects():
            kind = type(value)
            if issubclass(kind, Optimizer) and "param_groups" in vars(value):  # else a wrapper around another one
                self._touched.add_optimizer(value)
            elif issubclass(kind, torch.nn.Module) and "_modules" in vars(value):
                modules[id(value)] = value
        parts = {id(part) for module in modules.values() for part in module.children()}
        for key, module in modules.items():
            if key not in parts:
                self._touched.add_reachable(module)

    def _device(self) -> torch.device:
        found = {parameter.device.type for parameter in self._touched.all_parameters}
        return torch.device("cuda" if "cuda" in found else "cpu")

    def _module_name(self, place: Place) -> str:
        return self._touched.name(place.module) if place.module is not None else ""

    def _varying(self) -> list[Seen]:
        """What changes from step to step, after the first."""
        found = []
        first = 3 if replicas(self._touched.all_modules) else 2  # DDP makes its buckets again in the second step
        for step in range(first, len(self._past.logs)):
            for rule, difference in changes(self._past.logs[step - 1], self._past.logs[step]):
                what = _told(rule, difference)
                where = difference.where
                if rule == "varying-operations":
                    where = branch_of(self._past.paths[step - 1], self._past.paths[step]) or where
                found.append(Seen(rule, what, where, "", self._module_at(where), step))
        return found

    def _module_at(self, where: Location | None) -> str:
        """The first module that ran whose `forward` has this line."""
        for name, module in self._called.items() if where is not None else ():
            code = getattr(type(module).forward, "__code__", None)
            if code is not None and where is not None and code.co_filename == where.file:
                lines = [line for _, _, line in code.co_lines() if line is not None]
                if min(lines) <= where.line <= max(lines):
                    return name
        return ""

    def _modules(self, inside: Sequence[Seen]) -> list[dict[str, Any]]:
        """The models that ran, each with the parts that ran without a finding."""
        dirty = {one.module for one in inside if one.module}
        roots = [name for name in self._called if not any(name.startswith(f"{other}.") for other in self._called)]
        return [
            {
                "name": self._functions.name_of(self._called[root]),
                "class": root,
                "clean": clean_parts(root, self._called, dirty),
            }
            for root in roots
            if next(self._called[root].parameters(), None) is not None
        ]


def _told(rule: str, found: Difference) -> str:
    if rule == "varying-operations":
        return f"one step runs {found.before} where another runs {found.now}"
    return f"{found.operation.removesuffix('.default')}: {found.before}, then {found.now}"


def branch_of(before: Sequence[Line], now: Sequence[Line]) -> Location | None:
    """The line after which two steps went different ways, or None if the same lines ran."""
    last = None
    for one, two in zip(before, now, strict=False):
        if one != two:
            return last
        last = Location(one[0].co_filename, one[1], one[0].co_name)
    return last if len(before) != len(now) else None


def clean_parts(root: str, called: Iterable[str], dirty: Iterable[str]) -> list[str]:
    """The outermost modules below a root, by path, in which nothing was found; an empty path is the root itself."""

    def is_clean(path: str) -> bool:
        return not any(one == path or one.startswith(f"{path}.") for one in dirty)

    if is_clean(root):
        return [""]
    found: list[str] = []
    for path in sorted(called):
        if path.startswith(f"{root}.") and is_clean(path) and not any(path.startswith(f"{one}.") for one in found):
            found.append(path)
    return [path.removeprefix(f"{root}.") for path in found]


def plain_seen(seen: Seen) -> dict[str, Any]:
    """Return plain values."""
    place = seen.where
    where = [place.file, place.line, place.function] if place is not None else None
    return {
        "rule": seen.rule,
        "what": seen.what,
        "where": where,
        "inside": seen.inside,
        "module": seen.module,
        "step": seen.step,
    }
