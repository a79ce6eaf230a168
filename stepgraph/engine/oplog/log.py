"""An operation log notes what a call computes, operation by operation.

A graph is right when the operations that it replays are those that the step would run. So operations are compared, not
the causes that could change them. A dispatch mode sees every operation of the call, in the forward, in autograd's
threads, in optimizers and hooks, and notes four things of each: its name; its plain arguments, by type and value; its
tensors, by geometry and by which tensor each is; and the user's line. Of an operator that is written in Python it notes
also what this calls (`backends.kernels`). Compiled code and Triton's kernels bypass the
dispatcher and are noted by hooks of their own (`unseen`).

Tensors are named up to renaming, so that two runs of one program agree. An argument of the call has its number; a
result, the number of results since. A tensor from before the call has the name of its role where it has one (`Roles`),
else a number of its own for as long as it lives. In backward the line is the user's own where their Python code runs
there, else that of the forward operation whose gradient is computed, found by autograd's sequence numbers.

Not noted are the engine's own operations (`left_out`), and work on the host where the step is for another device: no
graph contains it. The steps of optimizers and the calls of a GradScaler are sections of the log, because one that runs
between graphs is not recorded.

A call does more than operations. It steps an optimizer, leaves gradients, modes and plain results. These are *events*:
notes that stand between operations, for the step of each optimizer, each call of a GradScaler, and the end of the call.
An event holds the object and its arguments, and all that Python can find at that moment (`OpLog.effects`). So two equal
logs have the same cuts at the same places, with the same gradients, and leave the same behind.

The four parts of a note are numbers into a `Vocabulary` that logs share. Layers and microbatches repeat each other's
parts, so that a note costs 16 bytes and two logs are compared as arrays.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import sys
import types
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

from stepgraph.core.errors import Location
from stepgraph.core.executed_code import TrackingPaused
from stepgraph.core.frames import is_user
from stepgraph.core.plain_values import is_compared_by_value
from stepgraph.core.storage import inner_tensors, shape_of, storage_of
from stepgraph.core.tree import flatten
from stepgraph.engine.backends.kernels import may_be_python, mode_that_looks_inside, python_kernel

_V = TypeVar("_V")
_first = operator.itemgetter(0)

FIELDS = 4
"""The numbers of a note: operation, plain arguments, tensors, line."""
TENSOR = "tensor"
"""Stands for a tensor among the plain arguments."""
RESULTS = "results"
"""Stands before the shapes of the results, which are last among the plain arguments if `finds_arguments`."""
_UNSEEN = frozenset({"profiler"})
"""Namespaces of operations that compute nothing."""
_NOBODY, _USER, _BACKWARD, _LEFT_OUT, _COLLECTIVE = range(5)
_BACKWARD_FILE = torch.autograd.graph.__file__
"""Where Python enters autograd's engine: frames above it have called backward."""
_COLLECTIVES_FILE = os.path.join("torch", "distributed", "distributed_c10d.py")
"""What a collective does besides itself belongs to the process group."""


class _ByMemory(Generic[_V]):
    """Values by memory. New memory at the address of an old one has none."""

    def __init__(self, held: Mapping[int, tuple[weakref.ref[torch.UntypedStorage], _V]] | None = None) -> None:
        self._held = dict(held or {})

    def put(self, storage: torch.UntypedStorage, value: _V) -> None:
        self._held[storage._cdata] = (weakref.ref(storage), value)

    def get(self, storage: torch.UntypedStorage) -> _V | None:
        found = self._held.get(storage._cdata)
        return found[1] if found is not None and found[0]() is storage else None

    def values(self) -> list[_V]:
        return [value for _, value in self._held.values()]

    def copy(self) -> _ByMemory[_V]:
        return _ByMemory(self._held)


class _Identities:
    """Names for objects, each the same as long as the object lives."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Callable[[], Any], str]] = {}
        self._count = itertools.count(1)

    def of(self, value: object) -> str:
        found = self._names.get(id(value))
        if found is None or found[0]() is not value:
            try:
                alive: Callable[[], Any] = weakref.ref(value)
            except TypeError:  # no weak references to it: keep it, so that no other object gets its id
                alive = functools.partial(_itself, value)
            found = self._names[id(value)] = alive, f"{type(value).__name__} (object {next(self._count)})"
        return found[1]


def _itself(value: Any) -> Any:
    return value


class _Actors:
    """Names for the optimizers and scalers of a call: those from before it, by id, have one for all logs."""

    def __init__(self, identities: _Identities, known: Container[int]) -> None:
        self._identities, self._known, self._made = identities, known, _Identities()

    def name(self, value: object) -> str:
        is_known = id(value) in self._known
        return self._identities.of(value) if is_known else f"{self._made.of(value)}, made in the call"


class Effects:
    """All that Python can find at an event, besides what the operations have made. Here nothing."""

    def now(self) -> Iterable[Any]:
        """Return names and values."""
        return ()

    def forgive(self, optimizer: Any) -> None:
        """The step of an optimizer is over, or what stands for it: its changes are its own."""


class Operation(NamedTuple):
    """An operation of the dispatcher, and its number."""

    func: Any
    number: int
    computes_nothing: bool
    is_torchs: bool
    may_be_python: bool
    """Whether its kernel may be a Python function: then the log looks inside."""


class Vocabulary:
    """The parts of notes, each with a number; and numbers for memory that no log has a name for."""

    NOBODY, USER, LEFT_OUT = _NOBODY, _USER, _LEFT_OUT
    """Kinds of code: whose lines are no user's, whose are, and whose operations are in no log."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.parts: list[Any] = []
        self._memory: _ByMemory[int] = _ByMemory()
        self._seen: list[tuple[int, int, weakref.ref[torch.UntypedStorage]]] = []
        """For each memory by its number: the log that saw it first, its number there, and whether it lives."""
        self._operations: dict[int, Operation] = {}
        self.logs = itertools.count()
        self.kinds: dict[types.CodeType, int] = {}
        self.casts: _ByMemory[str] = _ByMemory()
        """The name of the cast, of a tensor with a name, that autocast keeps in some memory for later calls."""
        self.identities = _Identities()

    def number(self, part: Hashable) -> int:
        found = self._numbers.get(part)
        if found is None:
            found = self._numbers[part] = len(self.parts)
            self.parts.append(part)
        return found

    def operation(self, func: Any) -> Operation:
        """What is known of an operation. Its own properties are slow: they take its name apart at each look."""
        found = self._operations.get(id(func))
        if found is None:
            about = (func.namespace in _UNSEEN, func.namespace == "aten", may_be_python(func))
            found = Operation(func, self.number(func), *about)
            self._operations[id(func)] = found
        return found

    def memory(self, storage: torch.UntypedStorage, log: int, order: Callable[[], int]) -> int:
        """The number of memory that has no name, the same as long as it lives. `order` is called if it is new."""
        number = self._memory.get(storage)
        if number is None:
            number = len(self._seen)
            self._memory.put(storage, number)
            self._seen.append((log, order(), weakref.ref(storage)))
        return number

    def made_in(self, number: int, log: int) -> int | None:
        """The number by which a log has seen this memory first, if the memory ended with that log."""
        first, order, alive = self._seen[number]
        return order if first == log and alive() is None else None

    def kind_of(self, code: types.CodeType) -> int:
        found = self.kinds.get(code)
        if found is None:
            file = code.co_filename
            found = _USER if is_user(file) else _NOBODY
            if file == _BACKWARD_FILE:
                found = _BACKWARD
            elif file.endswith(_COLLECTIVES_FILE):
                found = _COLLECTIVE
            self.kinds[code] = found
        return found


class Roles:
    """Names for tensors that were there before a call, by their memory."""

    def __init__(self) -> None:
        self._names: _ByMemory[list[tuple[int, int, Hashable]]] = _ByMemory()
        """First and last element and name of each tensor in some memory."""
        self._wholes: _ByMemory[Hashable] = _ByMemory()

    def add(self, name: Hashable, tensor: torch.Tensor) -> None:
        """Name a tensor; of two names for the same place the first counts."""
        with _unseen():
            storage = storage_of(tensor)
            if storage is not None:
                start = int(tensor.storage_offset())
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                spans = self._names.get(storage)
                if spans is None:
                    self._names.put(storage, spans := [])
                spans.append((start, start + max(int(last), 0) + 1, name))

    def add_all(self, name: Hashable, tensor: torch.Tensor) -> None:
        """One name for everything in a tensor's memory."""
        storage = storage_of(tensor)
        if storage is not None:
            self._wholes.put(storage, name)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether something here is in this memory."""
        return self._names.get(storage) is not None or self._wholes.get(storage) is not None

    def find(self, storage: torch.UntypedStorage, offset: int) -> tuple[Hashable, int] | None:
        """The name of the tensor at this offset, and where it begins."""
        whole = self._wholes.get(storage)
        if whole is not None:
            return whole, offset
        spans = self._names.get(storage)
        if spans is None:
            return None
        found = [span for span in spans if span[0] <= offset < span[1]]
        start, _, name = max(found, key=_first) if found else (0, 0, None)
        return (name, start) if found else None

    def shared(self) -> dict[Hashable, Hashable]:
        """Names of tensors that share memory with others, each with the first name of its group."""
        groups = (names for names in self._names.values() if len(names) > 1)
        return {name: names[0][2] for names in groups for _, _, name in names}


class _Found(Roles):
    """Arguments that are found by their use."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Log:
    """The notes of one call."""

    vocabulary: Vocabulary
    notes: array[int]
    sections: tuple[tuple[int, int, Hashable], ...] = ()
    """The steps of optimizers and the calls of scalers: first note, the note after the last, whose it is."""
    serial: int = 0
    shared: Mapping[Hashable, Hashable] = field(default_factory=dict)
    """Arguments that share their memory with others, by the first of them."""
    outside: tuple[weakref.ref[torch.Tensor], ...] = ()
    """The tensors from before the call that have no name, each as it was seen first."""

    def __len__(self) -> int:
        return len(self.notes) // FIELDS

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Operation, plain arguments, tensors and line of one note."""
        parts = self.vocabulary.parts
        return tuple(parts[number] for number in self.notes[index * FIELDS : (index + 1) * FIELDS])

    def without(self, owners: Iterable[Hashable]) -> Log:
        """The log without the sections of these owners, and of all within them."""
        gone = set(owners)
        notes, begin = array("I"), 0
        for start, end in sorted((start, end) for start, end, owner in self.sections if owner in gone):
            if start >= begin:  # else it is within one that is gone already
                notes += self.notes[begin * FIELDS : start * FIELDS]
                begin = end
        return replace(self, notes=notes + self.notes[begin * FIELDS :], sections=()) if begin else self

    def operations(self) -> Log:
        """The log without its events: the same program in another process has other objects."""
        notes = array("I")
        for begin in range(0, len(self.notes), FIELDS):
            if not isinstance(self.vocabulary.parts[self.notes[begin]], Event):
                notes += self.notes[begin : begin + FIELDS]
        return replace(self, notes=notes, sections=())


class Event(str):
    """The name of something that a call does between operations."""

    __slots__ = ()


class OpLog(dispatch.TorchDispatchMode):
    """Notes the operations that run while it is entered. `arguments` are the leaves of the call.

    `roles` are names for tensors that were there before. `device` is the step's, so that work on the host is not its
    own. `objects` are optimizers and scalers from before the call, by id. A log cannot see inside a graph. Graphed code
    therefore runs eagerly while a log is active (`current_log`).

    `keeps_casts`: autocast keeps the casts of weights for this call and others of its region, so it does not matter
    which call creates one. A cast then has a name, and is not noted. `finds_arguments`: the arguments are not known, as
    of a loop's body. Each tensor from before that has no name is one, numbered in the order of first use. The shapes of
    results are noted then, too.

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
        objects: Container[int] = (),
        keeps_casts: bool = False,
        finds_arguments: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._actors = _Actors(vocabulary.identities, objects)
        self._keeps_casts = keeps_casts
        self._vocabulary, self._roles = vocabulary, roles or Roles()
        self._device = device.type if device is not None and device.type != "cpu" else None
        self._serial = next(vocabulary.logs)
        self._notes = array("I")
        self._given = _Found() if finds_arguments else Roles()
        for index, leaf in enumerate(arguments):
            if issubclass(type(leaf), torch.Tensor):
                self._given.add(index, leaf)
                for part, inner in enumerate(inner_tensors(leaf)):
                    self._given.add((index, part), inner)
        self._shared = self._given.shared()
        self._births = _Births()
        self._lines: dict[int, int] = {}
        """The line of each forward operation that autograd has a node for, by the node's sequence number."""
        self._sections = _Sections()
        self._hidden = 0
        """The number of blocks around the call whose operations are not noted."""
        self._outside: dict[int, weakref.ref[torch.Tensor]] = {}
        """Tensors without a name from before the call, by the number of their memory."""
        self.effects = Effects()

    def finish(self) -> Log:
        """The notes so far."""
        outside = tuple(self._outside.values())
        return Log(self._vocabulary, self._notes, tuple(self._sections.done), self._serial, self._shared, outside)

    def followed_by(self, roles: Roles | None = None) -> OpLog:
        """A log for what comes after this one, which can name its results: a backward of a forward."""
        made = OpLog(self._vocabulary, (), roles or self._roles, keeps_casts=self._keeps_casts)
        made._device, made._given, made._shared = self._device, self._given, self._shared
        made._births, made._lines = self._births.copy(), self._lines
        return made

    # -- what is told

    def begin_section(self, owner: Hashable, name: str) -> None:
        """The step of an optimizer begins, or a call of a scaler; a subclass's step calls its parent's."""
        self._sections.begin(owner, name, len(self._notes) // FIELDS)

    def end_section(self, owner: Hashable) -> None:
        """The same ends."""
        self._sections.end(owner, len(self._notes) // FIELDS)

    def note_event(self, name: str, *about: Any) -> None:
        """Note what happens between operations, with all that the call has left so far."""
        if not self._hidden:
            with _unseen(), TrackingPaused():
                self.note_call(Event(name), [*about, *self.effects.now()])

    def identity(self, value: object) -> str:
        """A name for an optimizer or scaler: the same in all logs, unless the call has made it."""
        return self._actors.name(value)

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether the call has made the memory of a tensor."""
        storage = storage_of(tensor)
        return storage is not None and self._births.name(storage) is not None

    def is_same(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """The engine has put one tensor in the place of another, which the call has made."""
        new, old = storage_of(one), storage_of(other)
        if new is not None and old is not None:
            self._births.rename(old, new)

    def note_call(self, name: Hashable, leaves: Sequence[Any], call: Callable[[], Any] = lambda: None) -> Any:
        """Note a call that the dispatcher does not see, by its arguments; what runs within is not noted.

        No argument is kept alive: compiled code empties the list it is given, and frees what it has used.
        """
        line, _ = self._line()
        self._note(self._vocabulary.number(name), [*_taken_apart(leaves)], {}, line, set())
        given = [weakref.ref(storage) for storage in map(storage_of, _tensors(leaves)) if storage is not None]
        self._hidden += 1
        try:
            out = call()
        finally:
            self._hidden -= 1
        alive = (storage() for storage in given)
        self._bear({storage._cdata for storage in alive if storage is not None}, out, self._scope)
        return out

    @property
    def last_line(self) -> Location | None:
        """The user's line of the last note."""
        line = self._vocabulary.parts[self._notes[-1]] if self._notes else None
        return location_of(line)

    def has_role(self, storage: torch.UntypedStorage) -> bool:
        """Whether memory has a name from before the call."""
        return self._roles.has(storage)

    @property
    def is_hiding(self) -> bool:
        """Whether operations are not noted now."""
        return bool(self._hidden)

    def note_result(self, result: Any, *about: Any) -> None:
        """At the end of the call, note its result: which tensors it holds, all plain values, and how it is built."""
        leaves, structure = flatten(result)
        self.note_event("the result", *about, structure, *map(self._as_result, leaves))

    def _as_result(self, leaf: Any) -> Any:
        if issubclass(type(leaf), torch.Tensor) or type(leaf) in BY_VALUE:
            return leaf
        return f"{type(leaf).__name__} {leaf!r}" if is_compared_by_value(leaf) else self._vocabulary.identities.of(leaf)

    # -- what is seen

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = self._vocabulary.operation(func)
        if operation.computes_nothing:
            return func(*args, **kwargs)
        if kinds and any(kind.__torch_dispatch__ is not _TENSORS_OWN for kind in kinds):
            return NotImplemented  # a wrapper around other tensors: let it take itself apart first
        if self._keeps_casts and func is _CAST and (cast := self._role(args[0])) is not None:
            out = func(*args, **kwargs)
            self._vocabulary.casts.put(out.untyped_storage(), f"{cast} as {out.dtype}")
            return out
        if self._hidden:
            line, is_left_out = 0, True
        else:
            line, is_left_out = self._line(is_collective=not operation.is_torchs)
        known: set[int] = set()
        """The memory of the arguments: any other memory of the results is new."""
        begin = len(self._notes)
        on_device = False
        with _unseen(), TrackingPaused():
            if is_left_out:
                _add_memory(known, args)
                _add_memory(known, tuple(kwargs.values()))
            else:
                taken = _lifted(args[0]) if func is _LIFT or func is _LIFT_COPY else args
                on_device = self._note(operation.number, taken, kwargs, line, known)
        out = self._run(operation, args, kwargs)
        with _unseen(), TrackingPaused():
            if is_left_out:
                self._bear(known, out, "left out")
            elif on_device or self._device is None or any(one.device.type == self._device for one in _tensors(out)):
                self._bear(known, out, self._scope)
                if isinstance(self._given, _Found):  # what makes another shape is asked of such logs
                    shapes = (RESULTS, tuple(map(shape_of, _tensors(out))))
                    plain = self._vocabulary.parts[self._notes[begin + 1]]
                    self._notes[begin + 1] = self._vocabulary.number((*plain, shapes))
            else:
                del self._notes[begin:]
                self._bear(known, out, "host")
        return out

    def _run(self, operation: Operation, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call an operator; of one that is written in Python note what it calls, too."""
        if operation.may_be_python and not self._hidden:
            kernel = python_kernel(operation.func, args, kwargs)
            if kernel is not None:
                below = mode_that_looks_inside()
                if below is None:
                    with self:
                        return kernel(*args, **kwargs)
                with below.entered_with(self):
                    return operation.func(*args, **kwargs)
        return operation.func(*args, **kwargs)

    @property
    def _scope(self) -> str:
        return self._sections.name

    def _note(self, operation: int, args: Sequence[Any], kwargs: Mapping[str, Any], line: int, known: set[int]) -> bool:
        """Note an operation and the memory of its arguments. Returns whether a tensor is on the step's device."""
        plain: list[Hashable] = []
        tensors: list[Hashable] = []
        on_device = self._take(args, plain, tensors, known)
        for name, value in kwargs.items():
            plain.append(name)
            on_device = self._take((value,), plain, tensors, known) or on_device
        number = self._vocabulary.number
        self._notes.extend((operation, number(tuple(plain)), number(tuple(tensors)), line))
        return on_device

    def _take(self, values: Iterable[Any], plain: list[Hashable], tensors: list[Hashable], known: set[int]) -> bool:
        on_device = False
        for value in values:
            if issubclass(type(value), torch.Tensor):
                plain.append(TENSOR)
                tensors.append(self._tensor(value, known))
                on_device = on_device or self._device is None or value.device.type == self._device
            elif issubclass(type(value), (list, tuple)):
                plain.append(len(value))
                on_device = self._take(value, plain, tensors, known) or on_device
            else:
                plain.append(_plain(value))
        return on_device

    def _bear(self, known: set[int], out: Any, scope: str) -> None:
        for result in _tensors(out):
            storage = storage_of(result)
            if storage is None or storage._cdata in known or self._births.name(storage) is not None:
                continue
            if not self._given.has(storage) and not self._roles.has(storage):  # given, but not as a tensor
                known.add(storage._cdata)
                self._births.add(storage, scope)

    def _tensor(self, tensor: torch.Tensor, known: set[int]) -> Hashable:
        storage = storage_of(tensor)
        if storage is None:
            form = (shape_of(tensor), tensor.dtype, tensor.device, tensor.layout)
            return (("without memory", type(tensor).__qualname__), form)
        known.add(storage._cdata)
        device, offset = tensor.device, int(tensor.storage_offset())
        if isinstance(self._given, _Found) and not self._is_named(storage, offset):
            self._given.add(next(self._given.numbers), tensor)
        which, begin = self._which(storage, offset, tensor)
        if self._device is not None and which[0] != "made" and not tensor.shape and device.type == "cpu":
            form = (tensor.shape, tensor.dtype, device, torch.strided)
            return (("number", _plain(_value(tensor))), form)  # the kernel is given its value
        form = (tensor.shape, tensor.dtype, device, torch.strided)
        return (which, form, (offset - begin, tensor.stride(), tensor.is_conj(), tensor.is_neg()))

    def _which(self, storage: torch.UntypedStorage, offset: int, tensor: torch.Tensor) -> tuple[tuple[Any, ...], int]:
        """The name of a tensor's memory, and where the tensor of that name begins."""
        made = self._births.name(storage)
        if made is not None:
            return made, 0
        cast = self._vocabulary.casts.get(storage) if self._keeps_casts else None
        if cast is not None:
            return ("role", cast), 0
        given = self._given.find(storage, offset)
        if given is not None:
            return ("argument", given[0]), given[1]
        role = self._roles.find(storage, offset)
        if role is not None:
            return ("role", role[0]), role[1]
        number = self._vocabulary.memory(storage, self._serial, lambda: len(self._outside))
        if number not in self._outside:
            self._outside[number] = weakref.ref(tensor)
        return ("outside", number), 0

    def _is_named(self, storage: torch.UntypedStorage, offset: int) -> bool:
        """Whether this place in memory has a name, in this call or from before."""
        if self._births.name(storage) is not None or self._vocabulary.casts.get(storage) is not None:
            return True
        return self._given.find(storage, offset) is not None or self._roles.find(storage, offset) is not None

    def _role(self, tensor: torch.Tensor) -> Hashable | None:
        """The name of a tensor that was there before the call and is no argument of it."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        which, _ = self._which(storage, int(tensor.storage_offset()), tensor)
        return which[1] if which[0] == "role" else None

    def _line(self, *, is_collective: bool = True) -> tuple[int, bool]:
        """The user's line, and whether the caller is left out: a GradScaler, a process group."""
        node: Any = torch._C._current_autograd_node()
        number, kinds = self._vocabulary.number, self._vocabulary.kinds
        frame: types.FrameType | None = sys._getframe(2)
        line = None
        is_left_out = False
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = self._vocabulary.kind_of(code)
            if kind == _USER:
                line = number((code.co_filename, frame.f_lineno, code.co_name))
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


class _Sections:
    """The steps of optimizers and the calls of scalers in a log, one inside another."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int, Hashable]] = []
        self._open: list[tuple[Hashable, str, int]] = []

    @property
    def name(self) -> str:
        """The optimizer or scaler that runs now; "" outside of any."""
        return self._open[-1][1] if self._open else ""

    def begin(self, owner: Hashable, name: str, note: int) -> None:
        self._open.append((owner, name, note))

    def end(self, owner: Hashable, note: int) -> None:
        while any(owner == one for one, _, _ in self._open):
            last, _, start = self._open.pop()  # one that has failed within was not ended
            if last == owner:
                if all(owner != outer for outer, _, _ in self._open):  # else a subclass's step called its parent's
                    self.done.append((start, note, owner))
                return


class _Births:
    """The memory that a call has made, counted for the call itself, each optimizer, and what is not noted."""

    def __init__(self) -> None:
        self._born: _ByMemory[tuple[str, int]] = _ByMemory()
        self._counts: Counter[str] = Counter()

    def add(self, storage: torch.UntypedStorage, scope: str) -> None:
        self._counts[scope] += 1
        self._born.put(storage, (scope, self._counts[scope]))

    def copy(self) -> _Births:
        made = _Births()
        made._born, made._counts = self._born.copy(), Counter(self._counts)
        return made

    def rename(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        found = self._born.get(old)
        if found is not None:
            self._born.put(new, found)

    def name(self, storage: torch.UntypedStorage) -> tuple[Any, ...] | None:
        """Its maker, and how many results ago it was made; 0 for what is not noted."""
        found = self._born.get(storage)
        if found is None:
            return None
        scope, number = found
        return ("made", scope, 0 if scope in ("host", "left out") else self._counts[scope] - number)


class StandingMode(dispatch.TorchDispatchMode):
    """A mode that stays entered below all others, and hands operations to the log of the moment, if there is one.

    Modes form a stack. A log that begins and ends where a script's step does, between blocks of the script's own code,
    must not be pushed there: a mode that the script leaves would take it away in its own place.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As of `OpLog`."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: OpLog | None = None

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.log is None:
            return func(*args, **(kwargs or {}))
        return self.log.__torch_dispatch__(func, kinds, args, kwargs)


def current_log() -> OpLog | None:
    """The log of this thread."""
    modes = dispatch._get_current_dispatch_mode_stack()
    logs = (mode.log if isinstance(mode, StandingMode) else mode for mode in reversed(modes))
    return next((log for log in logs if isinstance(log, OpLog)), None)


def is_logged() -> bool:
    """Whether a log notes what this thread runs."""
    return torch._C._len_torch_dispatch_stack() > 0 and current_log() is not None


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """This block is the engine's own work, and in no log."""
    log = current_log()
    if log is None:
        yield
        return
    log._hidden += 1
    try:
        yield
    finally:
        log._hidden -= 1


_LIFT, _LIFT_COPY = torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default
"""What makes a tensor of a number that is written in Python."""
_CAST = torch.ops.aten._to_copy.default
_TENSORS_OWN = torch.Tensor.__torch_dispatch__
_unseen = torch._C.DisableTorchFunction
"""A block that asks tensors for their geometry, which no function mode needs to hear of."""


def location_of(line: Any) -> Location | None:
    """The place that a note's line stands for; None in a backward without one."""
    return Location(*line) if isinstance(line, tuple) and len(line) == 3 else None


def _add_memory(known: set[int], values: Any) -> None:
    known.update(storage._cdata for storage in map(storage_of, _tensors(values)) if storage is not None)


def _lifted(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor of numbers that are written in Python: by value if it is a single one."""
    return (_value(tensor) if tensor.numel() == 1 else None, *tensor.shape, tensor.dtype)


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if issubclass(type(out), torch.Tensor):
        yield out
    elif issubclass(type(out), (list, tuple)):
        for item in out:
            yield from _tensors(item)


def _taken_apart(leaves: Iterable[Any]) -> Iterator[Any]:
    """These values, with the class and the tensors of a wrapper in its place: it has no memory to be named by."""
    for leaf in leaves:
        inner = tuple(inner_tensors(leaf)) if issubclass(type(leaf), torch.Tensor) else ()
        yield from (type(leaf).__qualname__, *inner) if inner else (leaf,)


def _value(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction(), dispatch._disable_current_modes():
        return tensor.item()


BY_VALUE = frozenset((int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


def _plain(value: Any) -> Hashable:
    """An argument that is no tensor, by type and value; 1, 1.0 and True differ, as do 0.0 and -0.0."""
    kind = type(value)
    if kind in BY_VALUE:
        return (kind, value)
    if issubclass(type(value), (int, float, complex, str, bytes)):
        return (kind, repr(value))
    if issubclass(type(value), torch.Generator):
        return ("Generator", int(getattr(value, "_cdata", 0)))  # each operator sees a new Python object
    if callable(value) and hasattr(value, "__qualname__"):
        return ("function", value.__qualname__)
    return (kind, "")
