"""An optimizer runs inside the graph only where a replay is bit for bit the eager step.

The measure is the user's own program in eager: same arithmetic, same Python-float learning rate. Adam with
`capturable=True` differs from that (its bias correction runs in float32 on the device), and so does a float32 tensor
learning rate. So an optimizer goes inside a graph only when its kernels take no number that changes from step to step:
the fused ones count their steps on the device, SGD and RMSprop use no count. Their numbers (learning rate, weight
decay, betas, ...) are baked into the graph and compared before each replay; when one changes, the optimizer leaves the
graph for good. Any other optimizer runs eagerly between two graphs, which is right by construction.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.catalogue import entry
from stepgraph.core.errors import CaptureError
from stepgraph.core.plain_values import MISSING
from stepgraph.engine.backends import Backend
from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.oplog import OpLog, current_log
from stepgraph.engine.oplog.optimizer_steps import all_have_hooks, has_other_step, shadowed, step_hooks

Cut: TypeAlias = Callable[[str, Callable[[], Any], Callable[[], Any] | None], Any]
"""Notes a call to make between two graphs, by name, and its replacement while recording."""
OptimizerMode = Literal["auto", "inside", "outside", "capturable"]
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_STEPLESS = (torch.optim.SGD, torch.optim.RMSprop)
_HEALTH_CHECKS = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")
_CAPTURABLE = ("adam", "adamw", "nadam", "radam", "adamax", "adadelta", "asgd", "rprop", "rmsprop")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an optimizer runs, and why."""

    inside: bool
    reason: str


def place(optimizer: Optimizer, mode: str, moved: str | None = None) -> Placement:
    """Decide whether an optimizer's step is captured. `moved` names a number of it that changed after a capture."""
    kind = type(optimizer)
    if mode == "outside":
        return Placement(False, "optimizer='outside'")
    if moved is not None:
        return Placement(False, f"its numbers change: {moved}")
    if has_other_step(optimizer):
        return Placement(False, "its step was replaced by other code")
    if any(step_hooks(optimizer)):
        return Placement(False, "it has step hooks, which must run at each step")
    if all_have_hooks():
        return Placement(False, "all optimizers have step hooks, which must run at each step")
    if kind in _FUSED and all(group.get("fused") for group in optimizer.param_groups):
        return Placement(True, "fused: its step count is on the device")
    if all(group.get("capturable") for group in optimizer.param_groups):
        return Placement(True, "capturable: its step count is on the device")
    numbers = [(k, v) for group in optimizer.param_groups for k, v in group.items() if k != "params"]
    is_unusual = any(isinstance(v, torch.Tensor) or (k == "differentiable" and v) for k, v in numbers)
    if kind in _STEPLESS and not is_unusual:
        return Placement(True, f"{kind.__name__} uses no step count")
    if mode == "inside" and not _counts_on_host(optimizer):
        return Placement(True, "optimizer='inside'")
    reason = "its step count is on the host" if _counts_on_host(optimizer) else "not known to replay bit for bit"
    return Placement(False, reason)


def place_made(optimizer: Optimizer, mode: str) -> Placement:
    """The same for an optimizer that the step itself makes, uses and drops: it is inside, or cannot be recorded."""
    if mode == "capturable" and all(group.get("capturable") for group in optimizer.param_groups):
        return Placement(False, "which optimizer='capturable' would have to change while it is recorded")
    return place(optimizer, "auto" if mode == "outside" else mode)


def _counts_on_host(optimizer: Optimizer) -> bool:
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    return is_torch and type(optimizer) not in _STEPLESS


def check_forced(optimizer: Optimizer, mode: str, placement: Placement) -> None:
    """Refuse `optimizer='inside'` where it would freeze the step count."""
    if mode == "inside" and not placement.inside and _counts_on_host(optimizer):
        row = entry("optimizer-capturable")
        what = f"{type(optimizer).__name__}: {row.what}"
        raise CaptureError(what, rule=row.id, entry=row)


class KeptState:
    """The state of optimizers before a recording, which must leave it as it is.

    Optimizers make their state at the first step that finds gradients. If warm-up had none, a recording would make it,
    and write its zeros again at each replay. A step may also take out the state of an optimizer that runs inside the
    graph. Then its next step is a first one, which no graph repeats.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._before = [
            (
                optimizer,
                {p: (inner, dict(inner)) for p, inner in dict.items(optimizer.state) if issubclass(type(inner), dict)},
            )
            for optimizer in optimizers
        ]

    def rollback(self) -> tuple[list[Optimizer], bool]:
        """Restore it. Return the optimizers that have lost state meanwhile, and whether any has other state."""
        lost, is_other = [], False
        for optimizer, before in self._before:
            now = {p: dict(inner) for p, inner in dict.items(optimizer.state) if issubclass(type(inner), dict)}
            for parameter, (inner, earlier) in before.items():
                entries, is_same = now.get(parameter, {}), dict.get(optimizer.state, parameter) is inner
                if not is_same or earlier.keys() - entries.keys():
                    lost.append(optimizer)
                same = (entries.get(key, MISSING) is value for key, value in earlier.items())
                if not is_same or len(entries) != len(earlier) or not all(same):
                    is_other = True
                    inner.clear()
                    inner.update(earlier)
                    optimizer.state[parameter] = inner
            for parameter in now.keys() - before.keys():
                is_other = is_other or bool(now[parameter])
                del optimizer.state[parameter]
        return lost, is_other


class HostCounters:
    """Step counts that a captured optimizer keeps in host memory (RMSprop's, for its state_dict).

    On CUDA such a count is plain host work: capture runs it once and replays never. It is taken back after capture and
    advanced at each replay, with one fused call.
    """

    def __init__(self, optimizers: Sequence[Optimizer], backend: Backend) -> None:
        tensors = [v for o in optimizers for state in states_of(o) for v in state.values()]
        self._tensors = [t for t in tensors if issubclass(type(t), torch.Tensor) and not backend.owns(t)]
        self._before = [t.clone() for t in self._tensors]
        self._counting: list[torch.Tensor] = []
        self._steps: list[torch.Tensor] = []

    def rollback(self) -> None:
        """Take back what the capture did."""
        for tensor, before in zip(self._tensors, self._before, strict=True):
            step = tensor - before
            if bool(step.any()):
                self._counting.append(tensor)
                self._steps.append(step)
            tensor.copy_(before)

    @property
    def is_needed(self) -> bool:
        return bool(self._counting)

    def advance(self) -> None:
        torch._foreach_add_(self._counting, self._steps)


def note_step(log: OpLog, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Note in a log that an optimizer steps now, with its arguments."""
    about = (*args, *(part for item in kwargs.items() for part in item))
    log.note_event(f"{type(optimizer).__name__}.step", log.identity(optimizer), *about)


@contextlib.contextmanager
def cut_at(
    optimizers: Sequence[Optimizer], cut: Cut, before: Callable[[Optimizer], None], imitate: Callable[[Optimizer], Any]
) -> Iterator[None]:
    """While recording, turn each step of these optimizers into a cut: the step is noted, not run.

    `step` is shadowed on the instance, where schedulers and scalers look it up too. `before` is called first, `imitate`
    in the place of the step.
    """

    def noted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        name = f"{type(optimizer).__name__}.step"
        if any(arg is not None for arg in (*args, kwargs.get("closure"))):
            raise CaptureError(
                f"{name} was called with a closure",
                rule="optimizer-closure",
                why="the optimizer runs between graphs, and its closure would run there, eagerly and unrecorded.",
                fix="compute the loss and call backward() before step(), without a closure. If a framework passes one "
                "of its own (Lightning), step the optimizer inside its wrapper, or use one that runs inside the graph, "
                "where a closure is recorded (fused=True). For LBFGS, capture the closure and step outside of it.",
            )
        before(optimizer)
        log = current_log()
        if log is not None:
            note_step(log, optimizer, args, kwargs)
        # looked up then: a scheduler made later wraps it
        return cut(name, lambda: optimizer.step(**kwargs), functools.partial(imitate, optimizer))

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(shadowed(optimizer, "step", functools.partial(noted, optimizer)))
        yield


@contextlib.contextmanager
def captured_inside(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let these optimizers step inside a capture: `place` has found them fit, whatever their capturable flag says."""
    with letting_step() as let_step:
        for optimizer in optimizers:
            let_step(optimizer)
        yield


@contextlib.contextmanager
def letting_step() -> Iterator[Callable[[Optimizer], None]]:
    """The same for optimizers that the step makes while it is recorded: call what it gives when one steps."""
    told: list[weakref.ref[Optimizer]] = []

    def let_step(optimizer: Optimizer) -> None:
        told.append(weakref.ref(optimizer))
        vars(optimizer).update({check: lambda: None for check in _HEALTH_CHECKS if hasattr(optimizer, check)})

    try:
        yield let_step
    finally:
        for optimizer in filter(None, (ref() for ref in told)):
            for check in _HEALTH_CHECKS:
                vars(optimizer).pop(check, None)


def states_of(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """The state of each parameter. Programs may keep other things beside it, under keys of their own."""
    return [state for state in dict.values(optimizer.state) if issubclass(type(state), dict)]


def make_capturable(optimizer: Optimizer, device: torch.device) -> bool:
    """Move step counts and learning rate of an optimizer to the device; False if it has no capturable form."""
    if not all("capturable" in group for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["capturable"] = True
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
    for state in states_of(optimizer):
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=device, dtype=torch.float32)
    return True


@contextlib.contextmanager
def capturable_on_cpu() -> Iterator[None]:
    """Let capturable optimizers run on CPU tensors, where torch refuses them although they compute the same.

    torch.optim lists the devices that have graphs; the tape gives the CPU some.
    """

    def with_cpu(supported: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
        return [*supported(*args, **kwargs), "cpu"]

    with contextlib.ExitStack() as stack:
        for module in (importlib.import_module(f"torch.optim.{name}") for name in _CAPTURABLE):
            if hasattr(module, "_get_capturable_supported_devices"):
                stack.enter_context(replaced(module, "_get_capturable_supported_devices", with_cpu))
        yield
