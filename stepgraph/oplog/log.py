"""An operation log notes what a call computes, operation by operation.

A graph is right when the operations that it replays are those that the step would run. So operations are compared, not
the causes that could change them. A dispatch mode sees every operation of the call, in the forward, in autograd's
threads, in optimizers and hooks, and notes four things of each: its name; its numbers and other plain arguments, by
type and value; its tensors, by geometry and by which tensor each is; and the user's line. What goes past the dispatcher
and has a hook, compiled code and Triton's kernels, is noted by that (`unseen`).

Tensors are named up to renaming, so that two runs of one program agree. A tensor that the call was given has the number
of the argument; one that the call made, the number of results since. One that was there before has the name of its
role where it has one (`Roles`), else a number of its own for as long as it lives. In backward the line is the user's
own where Python code of theirs runs there, else that of the forward operation whose gradient is computed, found by
autograd's sequence numbers.

Left out are the engine's own operations (`left_out`), those of a GradScaler, which are cuts or recorded with guards of
their own, and work on the host where the step is for another device: no graph contains it. What such work makes is
known as that. The steps of optimizers are sections of the log, for one that runs between graphs is not recorded.

The four parts of a note are numbers into a `Vocabulary` that logs share. Layers and microbatches repeat each other's
parts, so that a note costs 16 bytes and two logs are compared as arrays.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import types
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from stepgraph.backends.tape import graph as tape_graph
from stepgraph.backends.tape import rng as tape_rng
from stepgraph.frames import is_user

FIELDS = 4
"""The numbers of a note: operation, plain arguments, tensors, line."""
TENSOR = "tensor"
"""Stands for a tensor among the plain arguments."""
_UNSEEN = frozenset({"profiler"})
"""Namespaces of operations that compute nothing."""
_NOBODY, _USER, _BACKWARD, _LEFT_OUT, _COLLECTIVE = range(5)
_BACKWARD_FILE = torch.autograd.graph.__file__
"""Where Python enters autograd's engine: frames above it have called backward."""
_LEFT_OUT_FILES = frozenset(
    file
    for file in (sys.modules[torch.amp.GradScaler.__module__].__file__, tape_graph.__file__, tape_rng.__file__)
    if file is not None
)
"""Whose operations are in no log: GradScaler's, and what the tape does about random states."""
_COLLECTIVES_FILE = os.path.join("torch", "distributed", "distributed_c10d.py")
"""What a collective does besides itself, while it is waited for, is the process group's."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory that no log has a name for, with a number that is never another's."""

    alive: weakref.ref[torch.UntypedStorage]
    number: int


class Vocabulary:
    """The parts that notes are made of, each with a number; and numbers for memory that no log has a name for."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.parts: list[Any] = []
        self._memory: dict[int, _Memory] = {}
        self._seen: list[tuple[int, int, weakref.ref[torch.UntypedStorage]]] = []
        """Of each memory by its number: in which log it was seen first, as which there, and whether it lives."""
        self._logs = itertools.count()
        self._kinds: dict[types.CodeType, int] = {}
        self._casts: dict[int, tuple[weakref.ref[torch.UntypedStorage], Hashable]] = {}

    def number(self, part: Hashable) -> int:
        """The number of a part, which is a new one for a new part."""
        found = self._numbers.get(part)
        if found is None:
            found = self._numbers[part] = len(self.parts)
            self.parts.append(part)
        return found

    def new_log(self) -> int:
        return next(self._logs)

    def memory(self, storage: torch.UntypedStorage, log: int, order: Callable[[], int]) -> int:
        """The number of memory that has no name: the same as long as it lives. `order` is asked if it is new."""
        known = self._memory.get(storage._cdata)
        if known is None or known.alive() is not storage:
            alive = weakref.ref(storage)
            known = self._memory[storage._cdata] = _Memory(alive, len(self._seen))
            self._seen.append((log, order(), alive))
        return known.number

    def made_in(self, number: int, log: int) -> int | None:
        """As which memory without a name a log has seen this one first, where it has and the memory ended with it."""
        first, order, alive = self._seen[number]
        return order if first == log and alive() is None else None

    def name_cast(self, storage: torch.UntypedStorage, name: Hashable) -> None:
        """This memory has the cast of a tensor with a name, which autocast keeps for later calls."""
        key = storage._cdata
        self._casts[key] = (weakref.ref(storage, lambda _: self._casts.pop(key, None)), name)

    def cast(self, storage: torch.UntypedStorage) -> Hashable | None:
        """The name of the cast in this memory."""
        found = self._casts.get(storage._cdata)
        return found[1] if found is not None and found[0]() is storage else None

    def kind_of(self, code: types.CodeType) -> int:
        """Whose code it is."""
        found = self._kinds.get(code)
        if found is None:
            file = code.co_filename
            found = _USER if is_user(file) else _NOBODY
            if file == _BACKWARD_FILE:
                found = _BACKWARD
            elif file in _LEFT_OUT_FILES:
                found = _LEFT_OUT
            elif file.endswith(_COLLECTIVES_FILE):
                found = _COLLECTIVE
            self._kinds[code] = found
        return found


class Roles:
    """Names for tensors that were there before a call, by the memory that each lies in."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.UntypedStorage], list[tuple[int, int, Hashable]]]] = {}
        self._wholes: dict[int, tuple[weakref.ref[torch.UntypedStorage], Hashable]] = {}

    def add(self, name: Hashable, tensor: torch.Tensor) -> None:
        """A name for a tensor; of two for the same place the first counts."""
        storage = storage_of(tensor)
        if storage is not None:
            start = int(tensor.storage_offset())
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            span = (start, start + max(int(last), 0) + 1, name)
            self._names.setdefault(storage._cdata, (weakref.ref(storage), []))[1].append(span)

    def add_all(self, name: Hashable, tensor: torch.Tensor) -> None:
        """One name for all that lies in a tensor's memory, wherever it begins."""
        storage = storage_of(tensor)
        if storage is not None:
            self._wholes[storage._cdata] = (weakref.ref(storage), name)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is memory that something here lies in; another may have the place of one that is gone."""
        found = self._names.get(storage._cdata)
        return (found is not None and found[0]() is storage) or self._whole(storage) is not None

    def _whole(self, storage: torch.UntypedStorage) -> Hashable | None:
        found = self._wholes.get(storage._cdata)
        return found[1] if found is not None and found[0]() is storage else None

    def find(self, storage: torch.UntypedStorage, offset: int) -> tuple[Hashable, int] | None:
        """The name of what lies there, and where it begins."""
        whole = self._whole(storage)
        if whole is not None:
            return whole, offset
        if not self.has(storage):
            return None
        found = [span for span in self._names[storage._cdata][1] if span[0] <= offset < span[1]]
        start, _, name = max(found, key=lambda span: span[0], default=(0, 0, None))
        return (name, start) if found else None

    def shared(self) -> dict[Hashable, Hashable]:
        """Names of tensors that lie in the same memory as others: the name of the first of each such group."""
        groups = (names for _, names in self._names.values() if len(names) > 1)
        return {name: names[0][2] for names in groups for _, _, name in names}


@dataclass(frozen=True, slots=True)
class Log:
    """The notes of one call."""

    vocabulary: Vocabulary
    notes: array[int]
    sections: tuple[tuple[int, int, Hashable], ...] = ()
    """The steps of optimizers: first note, the note after the last, whose it is."""
    serial: int = 0
    shared: Mapping[Hashable, Hashable] = field(default_factory=dict)
    """Arguments that lie in the same memory as others, by the first of them."""

    def __len__(self) -> int:
        return len(self.notes) // FIELDS

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Operation, plain arguments, tensors and line of one note."""
        parts = self.vocabulary.parts
        return tuple(parts[number] for number in self.notes[index * FIELDS : (index + 1) * FIELDS])

    def without(self, owners: Iterable[Hashable]) -> Log:
        """The log without the steps of these optimizers."""
        gone = set(owners)
        notes, begin = array("I"), 0
        for start, end, owner in self.sections:
            if owner in gone:
                notes += self.notes[begin * FIELDS : start * FIELDS]
                begin = end
        return replace(self, notes=notes + self.notes[begin * FIELDS :], sections=()) if begin else self


class OpLog(dispatch.TorchDispatchMode):
    """Notes the operations that run while it is entered. `arguments` are the leaves that the call is given.

    `roles` are names for tensors that were there before. `device` is that of the step, where work on the host is not
    its own. A graph that is called meanwhile could not be seen into: what has one runs its own code (`current_log`).
    `keeps_casts`: autocast keeps the casts of weights, for this call and for others of its region, so that which call
    makes one says nothing. A cast then has a name, and is not noted.

    Example:
        >>> with OpLog(vocabulary, [x]) as log:
        ...     step(x)
        >>> first_difference(before, log.finish())
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: without this torch runs it eagerly under a mode, and from then on."""
        return True

    def __init__(
        self,
        vocabulary: Vocabulary,
        arguments: Iterable[Any] = (),
        roles: Roles | None = None,
        device: torch.device | None = None,
        *,
        keeps_casts: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps_casts = keeps_casts
        self._vocabulary, self._roles = vocabulary, roles or Roles()
        self._device = device.type if device is not None and device.type != "cpu" else None
        self._serial = vocabulary.new_log()
        self._notes = array("I")
        self._given = Roles()
        for index, leaf in enumerate(arguments):
            if isinstance(leaf, torch.Tensor):
                self._given.add(index, leaf)
        self._shared = self._given.shared()
        self._births = _Births()
        self._lines: dict[int, int] = {}
        """The line of each forward operation that autograd has a node for, by the node's sequence number."""
        self._sections: list[tuple[int, int, Hashable]] = []
        self._section: tuple[int, str, Hashable] | None = None
        self._depth = 0
        self._hidden = 0
        """In how many blocks the call is whose operations are not noted."""
        self._nameless = itertools.count()

    def finish(self) -> Log:
        """The notes so far."""
        return Log(self._vocabulary, self._notes, tuple(self._sections), self._serial, self._shared)

    def followed_by(self, roles: Roles | None = None) -> OpLog:
        """A log for what comes after what this one has seen, whose results it can name: a backward of a forward."""
        made = OpLog(self._vocabulary, (), roles or self._roles, keeps_casts=self._keeps_casts)
        made._device, made._given, made._shared = self._device, self._given, self._shared
        made._births, made._lines = self._births.copy(), self._lines
        return made

    # -- what is told

    def begin_section(self, owner: Hashable, name: str) -> None:
        """What follows is the step of an optimizer, until `end_section`; a subclass's step calls its parent's."""
        if self._section is None:
            self._section = (len(self._notes) // FIELDS, name, owner)
        self._depth += self._section[2] == owner

    def end_section(self, owner: Hashable) -> None:
        if self._section is not None and self._section[2] == owner:
            self._depth -= 1
            if not self._depth:
                self._sections.append((self._section[0], len(self._notes) // FIELDS, owner))
                self._section = None

    def is_same(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """The engine has put one tensor in the place of another, which the call has made."""
        new, old = storage_of(one), storage_of(other)
        if new is not None and old is not None:
            self._births.rename(old, new)

    def note_call(self, name: Hashable, leaves: Sequence[Any], call: Callable[[], Any] = lambda: None) -> Any:
        """A call that the dispatcher does not see, by its arguments; what runs within is not noted."""
        line, _ = self._line()
        known: set[int] = set()
        self._note(name, leaves, {}, line, known)
        self._hidden += 1
        try:
            out = call()
        finally:
            self._hidden -= 1
        self._bear(known, out, self._scope)
        return out

    @property
    def is_hiding(self) -> bool:
        """Whether what runs right now is not noted."""
        return bool(self._hidden)

    def note_result(self, leaves: Iterable[Any]) -> None:
        """What the call returns."""
        self.note_call("the result", [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    # -- what is seen

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _UNSEEN:
            return func(*args, **kwargs)
        if kinds and any(kind.__torch_dispatch__ is not _TENSORS_OWN for kind in kinds):
            return NotImplemented  # a wrapper around other tensors: let it take itself apart first
        if self._keeps_casts and func is _CAST and (cast := self._role(args[0])) is not None:
            out = func(*args, **kwargs)
            self._vocabulary.name_cast(out.untyped_storage(), f"{cast} as {out.dtype}")
            return out
        if self._hidden:
            line, scope = 0, "left out"
        else:
            line, left_out = self._line(is_collective=func.namespace != "aten")
            scope = "left out" if left_out else self._scope
        known: set[int] = set()
        """The memory of the arguments: what else the results lie in has come into being."""
        begin = len(self._notes)
        if scope == "left out":
            _add_memory(known, args)
            _add_memory(known, tuple(kwargs.values()))
        else:
            on_device = self._note(func, _lifted(args[0]) if func in _LIFTS else args, kwargs, line, known)
        out = func(*args, **kwargs)
        if scope != "left out" and not on_device and not self._is_on_device(out):
            del self._notes[begin:]
            scope = "host"
        self._bear(known, out, scope)
        return out

    @property
    def _scope(self) -> str:
        return "" if self._section is None else self._section[1]

    def _note(
        self, operation: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any], line: int, known: set[int]
    ) -> bool:
        """Write an operation down, and the memory that it is given. Whether a tensor is on the step's device."""
        plain: list[Hashable] = []
        tensors: list[Hashable] = []
        on_device = self._take(args, plain, tensors, known)
        for name, value in kwargs.items():
            plain.append(name)
            on_device = self._take((value,), plain, tensors, known) or on_device
        number = self._vocabulary.number
        self._notes.extend((number(operation), number(tuple(plain)), number(tuple(tensors)), line))
        return on_device

    def _take(self, values: Iterable[Any], plain: list[Hashable], tensors: list[Hashable], known: set[int]) -> bool:
        on_device = False
        for value in values:
            if isinstance(value, torch.Tensor):
                plain.append(TENSOR)
                tensors.append(self._tensor(value, known))
                on_device = on_device or self._device is None or value.device.type == self._device
            elif isinstance(value, (list, tuple)):
                plain.append(len(value))
                on_device = self._take(value, plain, tensors, known) or on_device
            else:
                plain.append(_plain(value))
        return on_device

    def _is_on_device(self, out: Any) -> bool:
        if self._device is None:
            return True
        return any(tensor.device.type == self._device for tensor in _tensors(out))

    def _bear(self, known: set[int], out: Any, scope: str) -> None:
        """Note which memory has come into being."""
        for result in _tensors(out):
            storage = storage_of(result)
            if storage is not None and storage._cdata not in known and not self._was_there(storage):
                known.add(storage._cdata)
                self._births.add(storage, scope)

    def _was_there(self, storage: torch.UntypedStorage) -> bool:
        """Whether memory has a name already: an operation may be given it by another way than as a tensor."""
        return self._births.name(storage) is not None or self._given.has(storage) or self._roles.has(storage)

    def _tensor(self, tensor: torch.Tensor, known: set[int]) -> Hashable:
        """A tensor: which one it is, and its geometry."""
        shape = tuple(tensor.shape) if not tensor.is_nested else ("nested", tensor.size(0))
        form = (shape, tensor.dtype, tensor.device, tensor.layout)
        storage = storage_of(tensor)
        if storage is None:
            return (("without memory", type(tensor).__qualname__), form)
        known.add(storage._cdata)
        offset = int(tensor.storage_offset())
        which, begin = self._which(storage, offset)
        if self._device is not None and not form[0] and which[0] != "made" and tensor.device.type == "cpu":
            return (("number", _plain(_value(tensor))), form)  # the kernel is given its value
        return (which, form, (offset - begin, tensor.stride(), tensor.is_conj(), tensor.is_neg()))

    def _which(self, storage: torch.UntypedStorage, offset: int) -> tuple[tuple[Any, ...], int]:
        """How memory is called, and where what has that name begins."""
        made = self._births.name(storage)
        if made is not None:
            return made, 0
        cast = self._vocabulary.cast(storage) if self._keeps_casts else None
        if cast is not None:
            return ("role", cast), 0
        given = self._given.find(storage, offset)
        if given is not None:
            return ("argument", given[0]), given[1]
        role = self._roles.find(storage, offset)
        if role is not None:
            return ("role", role[0]), role[1]
        number = self._vocabulary.memory(storage, self._serial, lambda: next(self._nameless))
        return ("outside", number), 0

    def _role(self, tensor: torch.Tensor) -> Hashable | None:
        """The name of a tensor that was there before the call and is no argument of it."""
        storage = storage_of(tensor)
        which, _ = (("without memory",), 0) if storage is None else self._which(storage, int(tensor.storage_offset()))
        return which[1] if which[0] == "role" else None

    def _line(self, *, is_collective: bool = True) -> tuple[int, bool]:
        """The user's line, and whether what has called is left out: a GradScaler, the tape, a process group."""
        node: Any = torch._C._current_autograd_node()
        number, kind_of = self._vocabulary.number, self._vocabulary.kind_of
        frame: types.FrameType | None = sys._getframe(2)
        line = None
        is_left_out = False
        while frame is not None:
            kind = kind_of(frame.f_code)
            if kind == _USER:
                line = number((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
                break
            if kind == _BACKWARD and node is not None:
                break
            is_left_out = is_left_out or kind == _LEFT_OUT or (kind == _COLLECTIVE and not is_collective)
            frame = frame.f_back
        if node is None:
            line = number(None) if line is None else line
            self._lines.setdefault(torch._C._autograd._get_sequence_nr() - 1, line)
        elif line is None:
            line = self._lines.get(node._sequence_nr())
            line = number(("backward", node.name())) if line is None else line
        return line, is_left_out


class _Births:
    """Which memory a call has made, counted for the call itself, for each optimizer, and for what is not noted."""

    def __init__(self) -> None:
        self._born: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, storage: torch.UntypedStorage, scope: str) -> None:
        self._counts[scope] += 1
        self._born[storage._cdata] = (weakref.ref(storage), scope, self._counts[scope])

    def copy(self) -> _Births:
        """The same births, to go on from."""
        made = _Births()
        made._born, made._counts = dict(self._born), Counter(self._counts)
        return made

    def rename(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        found = self._born.get(old._cdata)
        if found is not None:
            self._born[new._cdata] = (weakref.ref(new), *found[1:])

    def name(self, storage: torch.UntypedStorage) -> tuple[Any, ...] | None:
        """Who has made it, and how many results ago; of what is not noted, how many is nobody's business."""
        found = self._born.get(storage._cdata)
        if found is None or found[0]() is not storage:  # another may have its place by now
            return None
        _, scope, number = found
        return ("made", scope, 0 if scope in ("host", "left out") else self._counts[scope] - number)


def current_log() -> OpLog | None:
    """The log that notes what this thread runs."""
    modes = dispatch._get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, OpLog)), None)


def is_logged() -> bool:
    """Whether a log notes what this thread runs."""
    return torch._C._len_torch_dispatch_stack() > 0 and current_log() is not None


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """What runs in this block is the engine's own, and in no log."""
    log = current_log()
    if log is None:
        yield
        return
    log._hidden += 1
    try:
        yield
    finally:
        log._hidden -= 1


_LIFTS = frozenset((torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default))
"""What makes a tensor of a number that is written in Python."""
_CAST = torch.ops.aten._to_copy.default
_TENSORS_OWN = torch.Tensor.__torch_dispatch__


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory that a tensor is known by, if it has any of its own."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor._is_zerotensor():
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper of other tensors, which are seen by themselves
        return None


def _add_memory(known: set[int], values: Any) -> None:
    known.update(storage._cdata for storage in map(storage_of, _tensors(values)) if storage is not None)


def _lifted(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor of numbers that are written in Python: by value where it is one."""
    return (_value(tensor) if tensor.numel() == 1 else None, *tensor.shape, tensor.dtype)


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for item in out:
            yield from _tensors(item)


def _value(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction(), dispatch._disable_current_modes():
        return tensor.item()


_BY_VALUE = frozenset((int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


def _plain(value: Any) -> Hashable:
    """An argument that is no tensor: by type and value; 1, 1.0 and True differ, as do 0.0 and -0.0."""
    kind = type(value)
    if kind in _BY_VALUE:
        return (kind, value)
    if isinstance(value, (int, float, complex, str, bytes)):
        return (kind, repr(value))
    if isinstance(value, torch.Generator):
        return ("Generator", int(getattr(value, "_cdata", 0)))  # each operator sees a new Python object
    if callable(value) and hasattr(value, "__qualname__"):
        return ("function", value.__qualname__)
    return (kind, "")
