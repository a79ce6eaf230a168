"""A module's backward graph accumulates parameter gradients by itself.

The graph adds to one piece of memory for each parameter, as autograd's accumulators add to `.grad`. Without an earlier
gradient, eager stores the new one unchanged. For that the memory is filled with -0.0: adding any number to it gives
that number, bit for bit.

Usually the memory is stepgraph's, and `.grad` is a tensor over it. But a caller may keep such a gradient over
`zero_grad()`, because eager makes a new one then. Or the caller has set `.grad` to other memory, and expects the
gradient there. Then the graph gets hidden memory, and gradients are copied in before a replay and out after it.

If a parameter has several uses in one backward, autograd adds the sum of their gradients to an old gradient. Graphs
that run one after the other would each add to the old one. So, if the same backward will run another use, the old
gradient is put aside until the last of them, and added then.

Each parameter has a gradient of its own. If `.grad` of two parameters of one graph is in the same memory, eager adds
both shares to it, in the order of its backward. A graph that adds each to its own memory cannot, so it is refused.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.engine.grads.other_uses import OtherUses
from stepgraph.engine.grads.step_grads import is_same_memory
from stepgraph.engine.memory.borrowed import BorrowedTensor, lend_out


class GradSlot:
    """The memory in which graphs accumulate the gradient of one parameter."""

    __slots__ = ("given", "is_callers", "lent", "memory", "parameter")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.memory = _empty_like(parameter)
        self.given: torch.Tensor | None = None
        """The tensor that `.grad` is while it is stored in the memory."""
        self.lent: BorrowedTensor | None = lend_out([self.memory])[0]
        """Knows whether a caller holds the memory; None if callers get copies."""
        self.is_callers = False
        """True if the memory is the caller's."""
        if parameter.grad is not None and self.bring() and _fits(parameter.grad, parameter):
            self.memory, self.given, self.lent = parameter.grad.detach(), parameter.grad, None
            self.is_callers = True

    def is_free(self) -> bool:
        """True if nobody else uses the memory. Call it if `.grad` is not stored there."""
        self.given = None
        return not self.is_callers if self.lent is None else not self.lent.is_held()

    def move(self) -> None:
        """Leave the memory to the caller that holds it. Callers get copies from now on."""
        self.memory, self.given, self.lent, self.is_callers = _empty_like(self.parameter), None, None, False

    def give(self) -> None:
        """Make `.grad` the memory."""
        assert self.lent is not None
        self.given = self.parameter.grad = self.lent.lend()

    def bring(self) -> bool:
        """Copy the present gradient to the memory.

        Return True if `.grad` stays as it is: others hold it, or it has other strides, which additions in eager keep.
        """
        grad = self.parameter.grad
        assert grad is not None
        self.memory.copy_(grad)
        if self.lent is None or grad.stride() != self.memory.stride():
            return True
        grad = None
        held = _held_elsewhere(self.parameter)
        if held is None:
            self.give()
            return False
        self.parameter.grad = held
        return True


@dataclass(slots=True)
class _Aside:
    """An old gradient while a sum is made in its place."""

    memory: torch.Tensor
    old: torch.Tensor
    given: torch.Tensor | None
    version: int

    def put_back(self) -> None:
        """After an aborted backward, restore the old gradient, unless the caller has written to it since."""
        if self.given is not None and self.given._version == self.version:
            self.memory.copy_(self.old)


class ParamGrads:
    """The gradients of one model's parameters that graphs accumulate."""

    def __init__(self) -> None:
        self._slots: dict[int, GradSlot] = {}
        self.moves = 0
        """The number of times memory was given up: graphs that use it must be recorded again."""
        self._task = -1
        self.aside: dict[Hashable, dict[int, _Aside]] = {}
        """Old gradients that wait for a sum, by group."""
        self.other_uses = OtherUses()

    def part(self, parameters: Sequence[torch.Tensor], group: Hashable = None) -> GradPart:
        """The parameters that get gradients from one backward graph. Graphs of one group may share parameters."""
        with torch.no_grad():
            slots = [self._slot(parameter) for parameter in parameters]
        if any(slot.is_callers for slot in slots):
            _refuse_shared_memory([slot.memory for slot in slots])
        return GradPart(self, slots, group)

    def _slot(self, parameter: torch.Tensor) -> GradSlot:
        slot = self._slots.get(id(parameter))
        if slot is None or not _fits(slot.memory, parameter):
            slot = self._slots[id(parameter)] = GradSlot(parameter)
        return slot

    def knows(self, parameter: torch.Tensor) -> bool:
        """True if a graph accumulates the gradient of this parameter."""
        slot = self._slots.get(id(parameter))
        return slot is not None and slot.parameter is parameter

    def forget(self, parameters: Sequence[torch.Tensor]) -> None:
        """Forget the memory of these parameters, after their graphs were freed."""
        for parameter in parameters:
            self._slots.pop(id(parameter), None)

    def put_aside(self, group: Hashable, slots: Sequence[GradSlot]) -> None:
        """Start a separate sum, in a backward in which several graphs add to a gradient."""
        self._task = torch._C._current_graph_task_id()
        aside = self.aside.setdefault(group, {})
        fresh = [slot for slot in slots if id(slot.memory) not in aside]
        for slot in fresh:
            version = slot.given._version if slot.given is not None else -1
            aside[id(slot.memory)] = _Aside(slot.memory, slot.memory.clone(), slot.given, version)
        if fresh:
            _fill_with_nothing([slot.memory for slot in fresh])

    def settle(self) -> None:
        """Undo the changes of an aborted backward."""
        if self._task != torch._C._current_graph_task_id():
            for aside in [aside for group in self.aside.values() for aside in group.values()]:
                aside.put_back()
            self.aside.clear()

    def take_back(self, group: Hashable) -> None:
        """After the last addition of a group, add the sums to the old gradients."""
        kept = list(self.aside.pop(group, {}).values())
        if kept:
            torch._foreach_add_([a.old for a in kept], [a.memory for a in kept])
            torch._foreach_copy_([a.memory for a in kept], [a.old for a in kept])


class GradPart:
    """The parameters of one backward graph and the memory of their gradients."""

    def __init__(self, grads: ParamGrads, slots: list[GradSlot], group: Hashable) -> None:
        self._grads, self._slots, self._group = grads, slots, group
        self._pairs = [(slot.parameter, slot) for slot in slots]
        self.memory = [slot.memory for slot in slots]
        """The memory that the graph adds to."""
        self._moves, self._is_current = grads.moves, True
        self._callers: list[GradSlot] = []

    def attach(self) -> bool:
        """Before a replay, bring `.grad` to the memory. Return False if the graph must be recorded for other memory."""
        if self._grads.aside:
            self._grads.settle()
        for parameter, slot in self._pairs:
            if slot.given is None or parameter.grad is not slot.given:
                self._bring()
                break
        if self._moves != self._grads.moves:
            self._moves = self._grads.moves
            self._is_current = all(slot.memory is known for slot, known in zip(self._slots, self.memory, strict=True))
        return self._is_current

    def _bring(self) -> None:
        away, empty = [], []
        for parameter, slot in self._pairs:
            there = parameter.grad
            if there is not None and (there is slot.given or is_same_memory(there, slot.memory)):
                slot.given = there
            else:
                away.append(slot)
        there = None
        if any(slot.parameter.grad is not None for slot in away):
            _refuse_shared_memory([grad for parameter, _ in self._pairs if (grad := parameter.grad) is not None])
        for slot in away:
            if not slot.is_free():
                slot.move()
                self._grads.moves += 1
            if slot.parameter.grad is not None:
                stays = slot.bring()
            else:
                empty.append(slot.memory)
                stays = slot.lent is None
                if not stays:
                    slot.give()
            if stays:
                self._callers.append(slot)
        if empty:
            _fill_with_nothing(empty)

    def begin_sum(self, without: Collection[int] = ()) -> None:
        """Begin a sum: further graphs add in this backward. `without` are parameters that autograd sums up, by id."""
        self._grads.put_aside(self._group, [slot for slot in self._slots if id(slot.parameter) not in without])

    def separate(self, parameters: Collection[int]) -> SeparateShare:
        """Before a replay, let the graph add the shares of some parameters, given by id, to nothing."""
        return SeparateShare([slot for slot in self._slots if id(slot.parameter) in parameters])

    def finish(self, *, last: bool) -> None:
        """Finish after a replay. `last`: no further graph adds in this backward."""
        if last and self._grads.aside:
            self._grads.take_back(self._group)
        if self._callers:
            callers, self._callers = self._callers, []
            for slot in callers:
                if slot.parameter.grad is None:
                    slot.parameter.grad = slot.memory.clone()
                else:
                    slot.parameter.grad.copy_(slot.memory)


class SeparateShare:
    """The memory of some gradients while it holds the share of one replay only."""

    def __init__(self, slots: Sequence[GradSlot]) -> None:
        self._slots = slots
        self._old = [slot.memory.clone() for slot in slots]
        if slots:
            _fill_with_nothing([slot.memory for slot in slots])

    def take(self) -> dict[int, torch.Tensor]:
        """After the replay, return the shares by the ids of the parameters, and restore the memory."""
        shares = {id(slot.parameter): slot.memory.clone() for slot in self._slots}
        if self._slots:
            torch._foreach_copy_([slot.memory for slot in self._slots], self._old)
        return shares


def _held_elsewhere(parameter: torch.Tensor) -> torch.Tensor | None:
    """Remove `.grad` from a parameter. Return the gradient if anybody else holds it or its memory."""
    grad = parameter.grad
    assert grad is not None
    tensor, storage = weakref.ref(grad), weakref.ref(grad.untyped_storage())
    kind = {"dtype": grad.dtype, "device": grad.device}
    geometry = (grad.storage_offset(), grad.shape, grad.stride())
    parameter.grad = grad = None
    found = tensor()
    if found is not None:
        return found
    memory = storage()
    return None if memory is None else torch.empty(0, **kind).set_(memory, *geometry)  # type: ignore[call-overload]


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty_like(parameter, requires_grad=False)


def _fits(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return grad.shape == parameter.shape and grad.dtype == parameter.dtype and grad.device == parameter.device


def _refuse_shared_memory(grads: Sequence[torch.Tensor]) -> None:
    """Refuse gradients of several parameters in the same memory."""
    found = sorted((_addresses(grad) for grad in grads if grad.numel() and grad.data_ptr()), key=lambda one: one[:2])
    for (device, _, end, grad), (other_device, start, _, other) in itertools.pairwise(found):
        if device == other_device and start < end:
            raise CaptureError(
                f"parameters of shapes {list(grad.shape)} and {list(other.shape)} share the memory of one `.grad`",
                rule="held-gradient",
                why="eager adds the gradients of both to that memory. A graph has separate memory for each parameter.",
                fix="give each parameter a gradient of its own: `b.grad = a.grad.clone()`.",
            )


def _addresses(grad: torch.Tensor) -> tuple[str, int, int, torch.Tensor]:
    """The device and the addresses of a gradient; of one with gaps, where others may lie, only the first element's."""
    start, span = grad.data_ptr(), 1 + sum((n - 1) * step for n, step in zip(grad.shape, grad.stride(), strict=True))
    return str(grad.device), start, start + (span if span == grad.numel() else 1) * grad.element_size(), grad


def _fill_with_nothing(memory: Sequence[torch.Tensor]) -> None:
    torch._foreach_zero_(list(memory))
    torch._foreach_neg_(list(memory))
