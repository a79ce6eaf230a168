"""An operation log notes what a call computes, operation by operation.

A graph is right when the operations that it replays are those that the step would run. So operations are compared, not
the causes that could change them. A dispatch mode sees every operation of the call, in the forward, in autograd's
threads, in optimizers and hooks, and notes four things of each: its name; its numbers and other plain arguments, by
type and value; its tensors, by geometry and by which tensor each is; and the user's line.

Tensors are named up to renaming, so that two runs of one program agree. A tensor that the call was given has the number
of the argument; one that the call made, the number of results since. Any other tensor was there before: it has the name
of its role where one is known ("weight of layers.0"), else a number of its own for as long as it lives. In backward the
line is the user's own where Python code of theirs runs there, else that of the forward operation whose gradient is
computed, found by autograd's sequence numbers.

The four parts of a note are numbers into a `Vocabulary` that logs share. Layers and microbatches repeat each other's
parts, so that a note costs 16 bytes and two logs are compared as arrays.
"""

from __future__ import annotations

import sys
import types
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from stepgraph.frames import is_user
from stepgraph.signature import OwnMode

FIELDS = 4
"""The numbers of a note: operation, plain arguments, tensors, line."""
_UNSEEN = frozenset({"profiler"})
"""Namespaces of operations that compute nothing."""


class Vocabulary:
    """The parts that notes are made of, each with a number; and numbers for tensors that were there before a call."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.parts: list[Any] = []
        self._outside: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._num_outside = 0

    def number(self, part: Hashable) -> int:
        """The number of a part, which is a new one for a new part."""
        found = self._numbers.get(part)
        if found is None:
            found = self._numbers[part] = len(self.parts)
            self.parts.append(part)
        return found

    def outside(self, storage: torch.UntypedStorage) -> int:
        """The number of memory that is no call's own: the same as long as it lives, and never another's."""
        known = self._outside.get(storage._cdata)
        if known is None or known[0]() is not storage:
            self._num_outside += 1
            known = self._outside[storage._cdata] = (weakref.ref(storage), self._num_outside)
        return known[1]


@dataclass(frozen=True, slots=True)
class Log:
    """The notes of one call."""

    vocabulary: Vocabulary
    notes: array[int]

    def __len__(self) -> int:
        return len(self.notes) // FIELDS

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Operation, plain arguments, tensors and line of one note."""
        parts = self.vocabulary.parts
        return tuple(parts[number] for number in self.notes[index * FIELDS : (index + 1) * FIELDS])


class OpLog(TorchDispatchMode, OwnMode):
    """Notes the operations that run while it is entered. `arguments` are the leaves that the call is given.

    `roles` are names for tensors that were there before, by the number that torch has for their memory
    (`untyped_storage()._cdata`). `is_noted` says of an operation whether it belongs to the call.

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
        roles: Mapping[int, Hashable] | None = None,
        is_noted: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary, self._roles, self._is_noted = vocabulary, roles or {}, is_noted
        self._notes = array("I")
        given = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        self._given = {leaf.untyped_storage()._cdata: i for i, leaf in enumerate(given) if _has_storage(leaf)}
        self._born: dict[int, int] = {}
        """When memory that the call made was born: after how many others."""
        self._num_born = 0
        self._lines: dict[int, int] = {}
        """The line of each forward operation that autograd has a node for, by the node's sequence number."""

    def finish(self) -> Log:
        """The notes so far."""
        return Log(self._vocabulary, self._notes)

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in _UNSEEN or (self._is_noted is not None and not self._is_noted()):
            return func(*args, **kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        number = self._vocabulary.number
        self._notes.extend(
            (
                number(str(func)),
                number(tuple(_plain(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))),
                number(tuple(map(self._tensor, tensors))),
                self._line(),
            )
        )
        known = {tensor.untyped_storage()._cdata for tensor in tensors if _has_storage(tensor)}
        out = func(*args, **kwargs)
        for result in tree_flatten(out)[0]:
            if isinstance(result, torch.Tensor) and _has_storage(result):
                memory = result.untyped_storage()._cdata
                if memory not in known:
                    known.add(memory)
                    self._num_born += 1
                    self._born[memory] = self._num_born
                    self._given.pop(memory, None)  # it was freed meanwhile, and its number given to another
        return out

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        """A tensor: which one it is, and its geometry."""
        form = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout)
        if not _has_storage(tensor):
            return (("without memory", type(tensor).__qualname__), form)
        storage = tensor.untyped_storage()
        bits = (tensor.storage_offset(), tensor.stride(), tensor.is_conj(), tensor.is_neg())
        return (self._which(storage), form, bits)

    def _which(self, storage: torch.UntypedStorage) -> Hashable:
        memory = storage._cdata
        if memory in self._born:
            return ("made", self._num_born - self._born[memory])
        if memory in self._given:
            return ("argument", self._given[memory])
        if memory in self._roles:
            return ("known", self._roles[memory])
        return ("outside", self._vocabulary.outside(storage))

    def _line(self) -> int:
        node: Any = torch._C._current_autograd_node()
        number = self._vocabulary.number
        if node is not None:
            own = _user_line(in_backward=True)
            known = self._lines.get(node._sequence_nr()) if own is None else number(own)
            return number(("backward", node.name())) if known is None else known
        line = number(_user_line())
        self._lines.setdefault(torch._C._autograd._get_sequence_nr() - 1, line)
        return line


_ENGINE = torch.autograd.graph.__file__
"""Where Python enters autograd's engine: frames above it have called backward."""


def _user_line(*, in_backward: bool = False) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame that is the user's; in backward, of one that the engine called."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if in_backward and code.co_filename == _ENGINE:
            return None
        if is_user(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


def _has_storage(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor._is_zerotensor():
        return False
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper of other tensors, which are seen by themselves
        return False
    return True


_VALUES = (bool, int, float, complex, str, bytes, type(None))


def _plain(value: Any) -> Hashable:
    """An argument that is no tensor: by type and value; 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if isinstance(value, _VALUES):
        return (type(value).__name__, repr(value))
    if isinstance(value, torch.Generator):
        return ("Generator", id(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return ("function", value.__qualname__)
    kind = type(value)  # a dtype, a device, a layout are torch's, and shown by name
    return (kind.__qualname__, repr(value) if kind.__module__ == "torch" else "")
