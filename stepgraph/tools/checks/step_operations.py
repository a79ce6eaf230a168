"""Watches the operations of a script's steps: what CUDA would refuse, and what changes from step to step.

Two modes stay entered below all of the script's own: one sees torch's functions, one its operators. In a step they
apply the tape's refusals (`backends.tape.refusals`), note them, and let everything run as it would. They keep an
operation log of each step, in which the batch is found by use; `step_history` compares them. Memory that one step makes
and the next one reads is noted: its address moves.

The end of a microbatch and the loading of the next are outside the step, so each microbatch has a log of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch as dispatch

from stepgraph.core.errors import CaptureRefused, Location
from stepgraph.core.storage import storage_of
from stepgraph.engine.backends.tape.refusals import HOST_READS, HostReadGuard, OperatorGuard, is_lift, unseen_by_modules
from stepgraph.engine.call.proof import roles_of
from stepgraph.engine.observe.step_objects import StepObjects
from stepgraph.engine.oplog import Log, OpLog, StandingMode, Vocabulary, noting_unseen
from stepgraph.engine.oplog.log import FIELDS
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.tools.checks.places import is_own_code, place_of
from stepgraph.tools.script.cuda_on_cpu import DeviceMode

Note = Callable[[str, str, types.FrameType, Location | None], None]
"""Takes a rule, what happened, the frame in which it happened, and the line if that is another one."""


_RANDOM = frozenset(("rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "bernoulli"))
"""Functions of torch that draw random numbers into a new tensor."""
_WATCHED = (torch.Tensor.data, torch.Tensor.requires_grad)
"""What a step may set of a tensor, and a graph does not record."""
_SCALERS_FILE = sys.modules[torch.amp.GradScaler.__module__].__file__
_OPTIMIZERS = "optimizers"
"""The owner of the sections of all optimizers."""


class OwnLines(Vocabulary):
    """A vocabulary whose lines are the user's own, not a library's. A GradScaler's own work is in no log."""

    def kind_of(self, code: types.CodeType) -> int:
        found = super().kind_of(code)
        if code.co_filename == _SCALERS_FILE:
            found = self.kinds[code] = self.LEFT_OUT
        if found == self.USER and not is_own_code(code):
            found = self.kinds[code] = self.NOBODY
        return found


@dataclass(frozen=True, slots=True)
class Made:
    """When some memory was made, and where."""

    storage: weakref.ref[torch.UntypedStorage]
    step: int
    number: int
    """Counts all memory that was made."""
    where: Location | None


class MadeMemory:
    """The memory that steps have made, as long as it lives."""

    def __init__(self) -> None:
        self._made: dict[int, Made] = {}
        self._count = self._reached = 0

    def add(self, storage: torch.UntypedStorage, step: int, where: Location | None) -> None:
        self._count += 1
        self._made[storage._cdata] = Made(weakref.ref(storage), step, self._count, where)

    def find(self, storage: torch.UntypedStorage) -> Made | None:
        made = self._made.get(storage._cdata)
        return made if made is not None and made.storage() is storage else None

    def reach(self) -> None:
        """The step reaches over all that was made by now."""
        self._reached = self._count

    def forget_outside(self) -> None:
        """The step is over: forget what was made since it last reached, and what is gone."""
        self._made = {
            key: made for key, made in self._made.items() if made.number <= self._reached and made.storage() is not None
        }


class Home:
    """The thread and the process that steps run in."""

    def __init__(self) -> None:
        self._thread, self._process = threading.get_ident(), os.getpid()

    def is_here(self) -> bool:
        """Whether the step's own thread asks, or one of autograd's: not a worker that was forked meanwhile."""
        here = threading.get_ident() == self._thread
        return (here or isinstance(threading.current_thread(), threading._DummyThread)) and os.getpid() == self._process


Moved = Callable[[Made, torch.Tensor], None]


class StepOperations(StandingMode):
    """The modes, and the logs of all steps."""

    def __init__(self, note: Note, moved: Moved, paused: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """`paused` is entered around the work on each operation, which no other observer need see."""
        super().__init__()
        self.guard = NotingGuard(self)
        self._note, self._moved, self._paused = note, moved, paused
        self._operators = OperatorGuard(self.guard)
        self._vocabulary = OwnLines()
        self._step = 0
        self._device = torch.device("cpu")
        self._is_on_device: Callable[[torch.Tensor], bool] = lambda tensor: True
        self.home = Home()
        self._logs: list[Log] = []
        self._lengths = [0, 0]
        """The notes of the log at the last backward, and when the step last reached this far."""
        self._made = MadeMemory()
        self._optimizer: str | None = None
        """The class of the optimizer that steps now."""

    # -- the steps

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps in this block."""

        def begin(optimizer: Optimizer) -> None:
            self._optimizer = type(optimizer).__name__
            if self.log is not None:
                self.log.begin_section(_OPTIMIZERS, self._optimizer)

        def end(optimizer: Optimizer, _: Any) -> None:
            self._optimizer = None
            if self.log is not None:
                self.log.end_section(_OPTIMIZERS)

        with unseen_by_modules(self.guard), noting_unseen(), at_optimizer_steps(begin, end), self.guard, self:
            yield

    def begin(self, step: int, touched: StepObjects, device: torch.device) -> None:
        """A step begins."""
        self._step, self._device, self._logs = step, device, []
        self.guard.sets.clear()
        modes = _get_current_function_mode_stack()
        mapped = next((mode for mode in modes if isinstance(mode, DeviceMode)), None)
        if mapped is not None and any(map(mapped.is_on_device, touched.all_parameters)):
            self._is_on_device = mapped.is_on_device  # the step runs on what stands for a GPU
        else:
            self._is_on_device = lambda tensor: device.type == "cpu" or tensor.device.type != "cpu"
        self._begin_log(touched)

    def _begin_log(self, touched: StepObjects) -> None:
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            self.log = OpLog(self._vocabulary, (), roles_of(touched), self._device, finds_arguments=True)
        if self._optimizer is not None:  # its closure begins the step
            self.log.begin_section(_OPTIMIZERS, self._optimizer)
        self._lengths = [0, 0]

    @property
    def has_backward(self) -> bool:
        """Whether a backward ran since the log began, or the step last reached so far: then a loop may come round."""
        return bool(self._lengths[0])

    def backward_done(self) -> None:
        self._lengths[0] = self._length

    def microbatch_begins(self, touched: StepObjects) -> None:
        """The loop came round in the step: what ran since the last backward is not of the step."""
        self._logs.append(self._cut(self._lengths[0]))
        self._begin_log(touched)

    def reach(self) -> None:
        self._lengths = [0, self._length]
        self._made.reach()

    def end(self) -> list[Log]:
        """The step is over. Returns its logs, one for each microbatch."""
        logs = [*self._logs, self._cut(self._lengths[1])]
        self.log = None
        self._made.forget_outside()
        return logs

    @property
    def _length(self) -> int:
        return len(self.log.finish()) if self.log is not None else 0

    def _cut(self, length: int) -> Log:
        """The log up to this length, without what optimizers do."""
        assert self.log is not None
        log = self.log.finish()
        sections = [(start, min(end, length), owner) for start, end, owner in log.sections if start < length]
        log = dataclasses.replace(log, notes=log.notes[: length * FIELDS], sections=tuple(sections))
        return log.without([_OPTIMIZERS])

    # -- the operations

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.log is None or not self.home.is_here():
            return func(*args, **kwargs)
        if kinds and any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in kinds):
            return NotImplemented
        with self._paused(), torch._C.DisableTorchFunction():
            known = self._read((*args, *kwargs.values()))
            out = super().__torch_dispatch__(func, kinds, args, kwargs)
            self._bear(known, out)
            if isinstance(func, torch._ops.OpOverload) and not self.guard.is_reading:
                self._refuse(func, args, kwargs)
        return out

    def reads_device(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these tensors is on the step's device; of those in a backward that is not known."""
        in_backward = torch._C._current_autograd_node() is not None
        return in_backward or any(self._is_on_device(tensor) for tensor in tensors)

    def drawn(self, func: Any, result: Any) -> None:
        """Note random numbers that are drawn on the host, for a step on another device."""
        if isinstance(result, torch.Tensor) and not self._is_on_device(result):
            self._note("host-random", f"torch.{func.__name__} draws on the host", sys._getframe(1), None)

    def refused(self, error: CaptureRefused) -> None:
        """Note a refusal, and go on."""
        if self.log is not None and self.home.is_here():
            in_backward = torch._C._current_autograd_node() is not None
            line = self.log.last_line if in_backward else None  # that of the forward, unless Python runs there
            self._note(error.row.id, error.operation, sys._getframe(1), line)

    def _refuse(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._operators.is_check(func) or not (is_lift(func) or self.reads_device(tensors_in(args))):
            return
        error = self._operators.refusal(func, args, kwargs)
        if error is not None:
            self.refused(error)

    def _read(self, values: Iterable[Any]) -> set[int]:
        """The memory that an operation is given; notes what the step before has made."""
        known = set()
        for tensor in tensors_in(values):
            storage = storage_of(tensor)
            if storage is None:
                continue
            known.add(storage._cdata)
            made = self._made.find(storage)
            if made is not None and made.step < self._step:
                assert self.log is not None
                if not self.log.has_role(storage) and not place_of(sys._getframe(1)).is_optimizers:
                    self._moved(made, tensor)
        return known

    def _bear(self, known: set[int], out: Any) -> None:
        for tensor in tensors_in((out,)):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in known:
                self._made.add(storage, self._step, self.log.last_line if self.log is not None else None)


class NotingGuard(HostReadGuard):
    """The guard of host reads: it notes, and never changes what runs."""

    def __init__(self, operations: StepOperations) -> None:
        super().__init__(operations.refused)
        self._operations = operations
        self.is_reading = False
        """Whether a read that was noted is running: its operators are not noted again."""
        self.sets: dict[int, Location | None] = {}
        """The lines that have set `.data` or `.requires_grad` of a tensor in this step, by the tensor's id."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._operations.log is None or not self._operations.home.is_here():
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "requires_grad_" or (name == "__set__" and func.__self__ in _WATCHED):
            self.sets[id(args[0])] = place_of(sys._getframe(1)).where
        if name in _RANDOM:
            result = func(*args, **(kwargs or {}))
            self._operations.drawn(func, result)
            return result
        if name not in HOST_READS or self.is_reading:
            return super().__torch_function__(func, kinds, args, kwargs)
        try:
            is_tensor = bool(args) and isinstance(args[0], torch.Tensor)
            if is_tensor and self._operations.reads_device(args[:1]):
                self._refuse_read(func, args)
            self.is_reading = is_tensor
            return func(*args, **(kwargs or {}))
        finally:
            self.is_reading = False

    def copied(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`torch.tensor(tensor)` makes no host data: it copies on the device."""
        self.is_reading, before = True, self.is_reading
        try:
            return torch.tensor(*args, **kwargs)
        finally:
            self.is_reading = before


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
