"""The probe of `stepgraph check`: watches the steps of a script, and never changes what it computes.

It joins three observers, of operations (`step_operations`), of the host's work (`host_work`) and of host values
(`step_state`), and sorts what they report into inside and outside of the step. After enough steps it stops the script.
Before that it tries what the verdict will advise, in some more steps: the modules that can be captured, if something
was found in a model (`script_search`); on a GPU a capture of the step's function, if not (`real_capture`).
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import Location
from stepgraph.core.frames import is_engine
from stepgraph.core.wording import with_article
from stepgraph.engine.backends.threads import compiled_code_runs_eagerly, replaced
from stepgraph.engine.observe.ddp import replicas
from stepgraph.engine.observe.own_changes import OwnNumbers
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.tools.checks.findings import Ledger, Seen, collect
from stepgraph.tools.checks.host_work import HostWork
from stepgraph.tools.checks.module_calls import BACKWARD, GRAD, ModuleCalls
from stepgraph.tools.checks.places import is_own_code, location_of, own_frames, package_of, place_of, stack_of
from stepgraph.tools.checks.real_capture import RealCapture
from stepgraph.tools.checks.script_objects import ScriptObjects
from stepgraph.tools.checks.script_search import ScriptSearch
from stepgraph.tools.checks.step_functions import StepFunctions
from stepgraph.tools.checks.step_history import StepHistory
from stepgraph.tools.checks.step_operations import Made, StepOperations
from stepgraph.tools.checks.step_state import Line, StepState, lines_with
from stepgraph.tools.script.probe import RunningScript

DEFAULT_STEPS = 10
"""Steps that are watched."""
_SYNCHRONIZING = "called a synchronizing CUDA operation"
"""What torch warns of in its sync debug mode."""
_GRAPHED = "the script uses stepgraph already: `stepgraph verify` compares its graphs with eager steps"
_MAKERS = ("torch.tensor", "torch.as_tensor", "torch.asarray")
_DEFAULT_STREAM = "default_stream"
_LISTED = frozenset(
    ("host-read", "host-file", "tokenizer", "host-random", "host-print", "host-logging", "host-data", "host-value")
)
"""Rules of which work outside the step is listed."""


class CheckProbe:
    """Watches a script's steps. The result has findings as plain values: `Seen`, inside and outside."""

    def __init__(self, script: RunningScript) -> None:
        self._script = script
        self._max_steps = int(script.options.get("steps", DEFAULT_STEPS))
        self._seen, self._lines = Ledger(), Ledger()
        self._objects, self._functions, self._history = ScriptObjects(), StepFunctions(), StepHistory()
        self._work = HostWork(self._note)
        self._operations = StepOperations(self._note, self._moved, self._work.paused)
        self._work.lines = self._line
        self._numbers = OwnNumbers((), lambda optimizer: False)
        self._state: StepState | None = None
        self._step: int | None = None
        """The step that is watched now."""
        self._calls = ModuleCalls()
        self._trial: ScriptSearch | RealCapture | None = None
        self._changed: list[Seen] = []
        """The host values that this step has changed by now."""

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
            stack.enter_context(replaced(torch.autograd, "grad", self._grad))
            stack.enter_context(self._sync_warnings())
            stack.enter_context(at_optimizer_steps(self._optimizer_begins, self._optimizer_done))
            stack.callback(torch_module.register_module_forward_pre_hook(self._forward).remove)
            done = torch_module.register_module_forward_hook(self._forward_done, with_kwargs=True)
            stack.callback(
                torch_module._global_forward_hooks_with_kwargs.pop, done.id, None
            )  # `remove` leaves it there
            stack.callback(done.remove)
            try:
                yield
            finally:
                if self._trial is not None:
                    self._trial.finish()

    def result(self) -> Mapping[str, Any]:
        """Return what was seen."""
        inside, trial = self._inside(), self._trial
        models = self._models(inside)
        if isinstance(trial, ScriptSearch) and trial.scope is not None:
            next(model for model in models if "" not in model["clean"])["clean"] = trial.scope
        if isinstance(trial, RealCapture) and trial.error is not None:
            error = trial.error
            inside.append(Seen(error.rule, f"a capture fails: {error.what}", error.where, "", "", len(self._history)))
        outside = [one for one in self._seen.outside if one.rule in _LISTED]
        found = {
            "inside": [plain_seen(one) for one in inside],
            "outside": [plain_seen(one) for one in outside],
            "steps": len(self._history),
            "step": self._functions.result(),
            "models": models,
            "replays": trial.num_replays if isinstance(trial, RealCapture) else 0,
            "is_hidden": self._work.is_hidden,
            "is_graphed": self._objects.is_graphed,
        }
        self._calls = ModuleCalls()
        # let the script's objects go: the runner keeps its probe for as long as the process lives
        self._objects, self._history, self._trial = ScriptObjects(), StepHistory(), None
        self._numbers = OwnNumbers((), lambda optimizer: False)
        return found

    def _inside(self) -> list[Seen]:
        """What was seen inside of steps by now, with what changes from step to step."""
        return [*self._seen.inside, *self._history.varying(self._first, self._objects.module_at)]

    @property
    def _first(self) -> int:
        """The first step that is compared: DDP makes its buckets again in the second."""
        return 2 if replicas(self._objects.touched.all_modules) else 1

    def _models(self, inside: Sequence[Seen]) -> list[dict[str, Any]]:
        """The models that ran; those come first of which something can be captured."""
        changed = {one.module: one.rule for one in inside if one.rule == "own-change" and one.module}
        models = self._objects.models(inside, self._functions, changed | self._calls.unfit(self._first))
        return sorted(models, key=lambda model: "" in model["unfit"])

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
        if index >= self._max_steps and not self._tries():
            self._script.stop()
        if self._trial is not None:
            return
        self._objects.look_around()
        if self._objects.notice_graphs(sys._getframe(1)):
            self._script.cannot_judge(_GRAPHED)
            self._script.stop()
        self._step = index
        frames = own_frames(sys._getframe(1))
        self._functions.begin(frames)
        touched, device = self._objects.touched, self._objects.device
        self._numbers = OwnNumbers(touched.all_optimizers, lambda optimizer: False)
        self._state = self._watched_values(frames)
        self._lines = Ledger()
        self._changed = []
        self._calls.begin()
        self._operations.begin(index, touched, device)
        self._work.start(device)

    def _tries(self) -> bool:
        """After the watched steps: whether this one is used to try what will be advised."""
        if self._trial is None:
            self._trial = self._new_trial()
        if isinstance(self._trial, ScriptSearch):
            self._trial.begin_step()
        return self._trial is not None and not self._trial.is_over

    def _new_trial(self) -> ScriptSearch | RealCapture | None:
        inside, code = self._inside(), self._functions.code
        models = [one for one in self._models(inside) if "" not in one["clean"]]
        if models and (models[0]["clean"] or "" not in models[0]["unfit"]):
            return ScriptSearch(self._objects.called[models[0]["class"]], models[0]["unfit"])
        if not self._script.options.get("captures", not self._script.is_cuda_mapped) or collect(inside) or code is None:
            return None
        functions = self._objects.functions_of([code])
        trial = RealCapture(functions[0], self._script.stop) if len(functions) == 1 else None
        return trial if trial is not None and trial.put_in_place() else None

    def _watched_values(self, frames: Sequence[types.FrameType]) -> StepState | None:
        """The host values of a step, if it is known from the step before which it has."""
        lines: Sequence[Line] = self._lines.inside
        if not lines:
            return None
        functions = self._objects.functions_of({code for code, _ in lines})
        return StepState(self._objects.touched, frames, lines, functions, self._work.ran, self._numbers)

    def step_reaches(self, index: int) -> None:
        """All that ran by now is inside the step."""
        if self._step is None:
            return
        with self._work.paused():
            self._work.settle()
            self._seen.reach()
            self._lines.reach()
            self._calls.ledger.reach()
            self._operations.reach()
            self._functions.reach(sys._getframe(1))
            self._note_changes()

    def _note_changes(self, *, is_over: bool = False) -> None:
        """Note the host values that the step has changed by now."""
        self._changed = []
        if self._state is not None:
            sets = self._operations.guard.sets
            self._state.note_changes(self._value_changed, self._lines.inside, sets, is_over=is_over)

    def step_ends(self, index: int) -> None:
        """The step is over."""
        if isinstance(self._trial, ScriptSearch):
            self._trial.end_step()
        if self._step is None:
            return
        self._work.stop()
        logs = self._operations.end()
        was_reached = bool(self._lines.inside) or any(logs)  # else it was none
        self._seen.end()
        self._lines.end()
        if was_reached and self._functions.code is not None:
            self._note_changes(is_over=True)  # in the rest of the function
            if not self._functions.is_running(sys._getframe(1)):  # the next call may undo it before its first forward
                self._changed = [one for one in self._changed if one.rule != "own-change"]
        if was_reached:
            self._history.add(logs, self._lines.inside)
            self._seen.inside += self._changed
        self._calls.end(is_step=was_reached)
        self._state = self._step = None

    # -- what happens

    def _note(self, rule: str, what: str, frame: types.FrameType, line: Location | None = None) -> None:
        place = place_of(frame)
        if place.is_optimizers or self._step is None:
            return
        where = line or place.where
        seen = Seen(rule, what, where, place.inside, self._objects.name_of(place.module), self._step)
        if place.is_loading:
            self._seen.outside.append(seen)
        else:
            self._seen.note(seen, in_function=self._functions.is_running(frame))

    def _line(self, frame: types.FrameType) -> None:
        """A line of the user's runs. The default stream is known by name: there is no event for its use."""
        code, line = frame.f_code, frame.f_lineno or 0
        self._lines.note((code, line), in_function=self._functions.is_running(frame))
        if _DEFAULT_STREAM in code.co_names and line in lines_with(code, _DEFAULT_STREAM):
            where = Location(code.co_filename, line, code.co_name)
            self._seen.note(Seen("legacy-stream", "uses the default stream", where, "", "", self._step or 0))

    def _value_changed(self, rule: str, what: str, where: Location | None, module: str) -> None:
        if where is None:
            where, what = self._functions.place, f"{what}, at a line of the step that is not known"
        self._changed.append(Seen(rule, what, where, "", module, self._step or 0))

    def _moved(self, made: Made, tensor: torch.Tensor) -> None:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        what = f"{with_article(shape)} tensor of this step is read by the next one, at another address each time"
        self._seen.note(Seen("moving-address", what, made.where, "", self._objects.module_at(made.where), made.step))

    def _synchronizes(self, name: str) -> None:
        """The script waits for what stands for the device. New tensors of Python values are noted as host data."""
        if not name.startswith(_MAKERS):
            self._note_call("host-read", f"{name}()")

    def _note_call(self, rule: str, what: str) -> None:
        """Note a call of the script's or a library's. torch's own code asks where a tensor is, and is told."""
        frame = next((one for one in stack_of(sys._getframe(1)) if not is_engine(one.f_code.co_filename)), None)
        if self._step is not None and frame is not None and package_of(frame.f_code.co_filename) != "torch":
            self._note(rule, what, frame)

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        """A module is about to run: notes it, and whether a loop came round within the step."""
        if self._step is None or not self._operations.home.is_here() or torch.compiler.is_compiling():
            return
        self._objects.add_call(module)
        frame = next((one for one in stack_of(sys._getframe(1)) if is_own_code(one.f_code)), None)
        if frame is None or not torch.is_grad_enabled():
            return
        site = (frame.f_code, frame.f_lasti)
        if site in self._calls.sites and self._operations.has_backward:
            for ledger in (self._seen, self._lines, self._calls.ledger):
                ledger.microbatch_begins()
            self._operations.microbatch_begins(self._objects.touched)
            self._calls.sites.clear()
        self._calls.sites.add(site)

    def _forward_done(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """A module has run. The step's first forward has begun the step."""
        if self._step is not None and self._operations.home.is_here() and not torch.compiler.is_compiling():
            self._calls.add(self._objects.name_of(module), (args, kwargs), result)

    def _backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._calls.differentiate(BACKWARD, args, kwargs)
        backward(*args, **kwargs)
        if self._step is not None:
            for ledger in (self._seen, self._lines, self._calls.ledger):
                ledger.backward_done()
            self._operations.backward_done()

    def _grad(self, grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calls.differentiate(GRAD, args, kwargs)
        return grad(*args, **kwargs)

    def _optimizer_begins(self, optimizer: Optimizer) -> None:
        self._numbers.begin(optimizer)
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
        self._numbers.end(optimizer)


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
