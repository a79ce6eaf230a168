"""A captured step leaves `.grad` as eager would, in memory that all graphs of a session agree on.

A graph writes gradients to fixed addresses, and `.grad` is attached to them after each replay. The session keeps one
address for each parameter (`GradBuffers`): the first graph that makes a gradient gives it its address, later graphs
copy theirs there as their last node, so that any number of graphs share one set of gradients and nothing that outlives
a replay is ever handed to another capture.

A gradient that is a view of the user's own memory (a piece of a flat buffer) and that the step adds to stays where it
is. The graph adds to it there, if it is the first such graph, or the result is copied there after each replay. A call
that finds another gradient in its place gets the result in that one, and the memory of the first is as it was.

What was in `.grad` before the call is harder. Most steps throw it away (`zero_grad()` comes first), some add to it, a
few read it first. CUDA does not say which. But if the old gradient's memory died before anything was recorded, the
graph cannot know its address: then nothing has to be carried in, and its memory is free for the capture. So the first
try lets go of the old gradients and watches them die, with a copy in host memory in case the capture fails. If one
outlives the first node, the recording is thrown away (nothing has run) and made again with the old gradients held at
the session's addresses, to which each later call's `.grad` is carried.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from stepgraph.errors import CaptureError
from stepgraph.oplog import current_log, left_out

Attachment = list[tuple[torch.Tensor, torch.Tensor | None]]
"""Parameters and what their `.grad` is to be."""
Note = Callable[[torch.Tensor], None]
_ALIGNED = 64
"""Bytes; no dtype needs more."""


def attach(attachment: Attachment) -> None:
    """Make `.grad` what it is after a replay."""
    for parameter, grad in attachment:
        if parameter.grad is not grad:
            parameter.grad = grad


class GradBuffers:
    """The address at which a session keeps each parameter's gradient."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        found = self._kept.get(id(parameter))
        return found[1] if found is not None else None

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self._kept[id(parameter)] = (parameter, grad)

    def clear(self) -> None:
        self._kept.clear()


@dataclass(slots=True)
class _Entry:
    """A gradient that was there when the capture began, and how to bring it back."""

    parameter: torch.Tensor
    kept: torch.Tensor | None
    """The very tensor that `.grad` was, where it has to stay: the session's buffer, or a view of the user's memory."""
    on_host: torch.Tensor | None
    alive: weakref.ref[torch.Tensor] | None

    def restore(self) -> None:
        grad = self.kept
        if grad is None and self.alive is not None:
            grad = self.alive()
        if grad is None:
            assert self.on_host is not None
            shape, stride, dtype = self.on_host.shape, self.on_host.stride(), self.on_host.dtype
            grad = torch.empty_strided(shape, stride, dtype=dtype, device=self.parameter.device).copy_(self.on_host)
        self.parameter.grad = grad


class GradCapture:
    """Gradients during one recording. `hold` chooses between the two ways of the module's docstring."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: GradBuffers,
        recorded_anything: Callable[[], bool],
        *,
        hold: bool,
    ) -> None:
        self._parameters = list(parameters)
        self._buffers = buffers
        self._recorded_anything = recorded_anything
        self._hold = hold
        self._entries: list[_Entry] = []
        self._empty = [p for p in parameters if p.grad is None]
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._died_in_time = 0
        self._last: dict[int, torch.Tensor | None] = {}
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._views: Attachment = []
        """Gradients in memory of the user's, which are put back before the first replay."""
        self.loaded: list[torch.Tensor] = []
        """Buffers that were written to for the recording's first replay."""
        self.added_to: set[int] = set()
        """Parameters, by id, whose gradient was there before, and the step adds to it as long as it has any."""
        self.carried_in: Attachment = []
        """Parameters whose `.grad` must be at its buffer before a replay, with that buffer."""

    def begin(self) -> None:
        """Put `.grad` where the recording may find it."""
        found = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for _, grad in found:
            refuse_sparse(grad)
        if self._hold:
            for parameter, grad in found:
                self._hold_entry(parameter, grad)
        else:
            self._release(found)
        for parameter in self._parameters:
            self._last[id(parameter)] = parameter.grad if self._hold else None

    def _hold_entry(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        kept = self._buffers.get(parameter)
        if kept is None or not _same_layout(kept, grad):
            kept = grad
        elif kept is not grad:
            kept.copy_(grad)
            self.loaded.append(kept)
            parameter.grad = kept
            if _is_part(grad):
                self._views.append((parameter, grad))
        if kept is not grad or not _is_part(grad):  # memory of the user's is this graph's at most, never the session's
            self._made[id(parameter)] = (parameter, kept)
        self.added_to.add(id(parameter))
        self.carried_in.append((parameter, kept))
        self._entries.append(_Entry(parameter, grad, None, None))

    def _release(self, found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Leave gradients to the recording, and watch them die."""
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter, grad in found:
            if self._buffers.get(parameter) is grad or _is_part(grad):  # memory that others know outlives the recording
                self._entries.append(_Entry(parameter, grad, None, None))
                parameter.grad = torch.empty_like(grad)  # stands in for it; nothing runs, its contents do not matter
            else:
                own.append((parameter, grad))
        for (parameter, grad), copy in zip(own, copies_on_host([grad for _, grad in own]), strict=True):
            self._entries.append(_Entry(parameter, None, copy, weakref.ref(grad)))
        for parameter, _ in found:
            assert parameter.grad is not None
            self._watches.append(weakref.ref(parameter.grad.untyped_storage(), self._died))

    def _died(self, _: object) -> None:
        self._died_in_time += not self._recorded_anything()

    @property
    def entries_unused(self) -> bool:
        """Whether the recording provably knows nothing of the gradients that were there before."""
        return self._hold or self._died_in_time == len(self._watches)

    def end_segment(self) -> Attachment:
        """While still recording: bring new gradients to their addresses. Returns what `.grad` is from here on."""
        found: Attachment = []
        targets, sources = [], []
        log = current_log()
        for parameter in self._parameters:
            grad = parameter.grad
            if grad is not None and grad is not self._last[id(parameter)]:
                self.added_to.discard(id(parameter))  # what the step adds to from here on is its own
                refuse_sparse(grad)
                made = self._made.get(id(parameter))
                kept = made[1] if made is not None else self._buffers.get(parameter)
                if kept is not None and _same_layout(kept, grad):
                    targets.append(kept)
                    sources.append(grad)
                    if log is not None:
                        log.is_same(kept, grad)
                    grad = parameter.grad = kept
                self._made[id(parameter)] = (parameter, grad)
            self._last[id(parameter)] = grad
            found.append((parameter, grad))
        if targets:
            with torch.no_grad(), left_out():
                torch._foreach_copy_(targets, sources)
        return found

    def commit(self) -> None:
        """The recording is good: its addresses are the session's, and `.grad` is what a replay begins with."""
        self._watches.clear()
        attach(self.carried_in)
        attach([(parameter, None) for parameter in self._empty])
        attach(self._views)
        for parameter, grad in self._made.values():
            self._buffers.keep(parameter, grad)

    def commit_ahead(self) -> None:
        """The recording is good and is not replayed now: its addresses are the session's, `.grad` is as before."""
        made = list(self._made.values())
        self.rollback()
        for parameter, grad in made:
            self._buffers.keep(parameter, grad)

    def rollback(self) -> None:
        """`.grad` as before the recording."""
        self._watches.clear()
        for entry in self._entries:
            entry.restore()
        for parameter in self._empty:
            parameter.grad = None
        self._made.clear()
        self._last.clear()


def copies_on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors that fill their memory, with the strides they have, in the host's memory.

    Memory that a process has just been given has to be entered into its page table when it is first written to, and
    one thread does that more slowly than a GPU sends the data. So all copies lie in one piece, which many threads
    write zeros to first: that halves the time, or better.
    """
    begins = list(accumulate((-(-t.nbytes // _ALIGNED) * _ALIGNED for t in tensors), initial=0))
    with torch.no_grad():
        memory = torch.zeros(begins[-1], dtype=torch.uint8, device="cpu")
        return [
            _strided_view(memory[begin : begin + t.nbytes], t).copy_(t)
            for begin, t in zip(begins[:-1], tensors, strict=True)
        ]


def _strided_view(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class Carried:
    """What a replay was given from elsewhere, and has to give back."""

    views: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Parameters, gradients that the user holds or that lie in memory of theirs, and where the graph has them."""
    borrowed: list[tuple[torch.Tensor, torch.Tensor]]
    """Memory of the user's that the graph uses in the place of another gradient, and what was in it."""


def can_carry_in(carried: Attachment) -> bool:
    """Whether gradients lie as those that the graph knows: a sum over other strides is taken in another order."""
    found = ((parameter.grad, kept) for parameter, kept in carried)
    return all(
        grad is kept or (grad is not None and grad.stride() == kept.stride())
        for grad, kept in found
        if kept is not None
    )


def carry_in(carried: Attachment, note_loaded: Note | None = None) -> Carried | None:
    """Before a replay: bring `.grad` to the address that the graph reads. None where it lies there already.

    `note_loaded` is told of memory that is written to.
    """
    found, note = Carried([], []), note_loaded if note_loaded is not None else _nobody
    for parameter, kept in carried:
        grad = parameter.grad
        if grad is not kept:
            assert grad is not None, "a call without gradients has another signature"
            assert kept is not None
            is_lent = _is_part(kept) and not is_same_memory(grad, kept)
            if is_lent:
                found.borrowed.append((kept, kept.clone()))
            kept.copy_(grad)
            note(kept)
            is_theirs, alive = is_lent or _is_part(grad), weakref.ref(grad)
            held = grad if is_theirs else None
            parameter.grad, grad = kept, None
            held = held if held is not None else alive()  # whoever holds it would see what eager adds to it
            if held is not None:
                found.views.append((parameter, held, kept))
    return found if found.views else None


def carry_out(carried: Carried, added_to: Container[int], note_loaded: Note | None = None) -> None:
    """After a replay: where the step has added to the gradients it found, give the result to the user's own.

    In eager it adds to these. It may have let go of them since.
    """
    note = note_loaded if note_loaded is not None else _nobody
    for parameter, view, kept in carried.views:
        if id(parameter) in added_to:
            view.copy_(kept)
            note(view)
            if parameter.grad is kept:
                parameter.grad = view
    for memory, before in carried.borrowed:
        memory.copy_(before)
        note(memory)


def _nobody(_: torch.Tensor) -> None:
    """Not told."""


def is_same_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors start at the same address and have the same strides."""
    return one.data_ptr() == two.data_ptr() and one.stride() == two.stride()


def _is_part(grad: torch.Tensor) -> bool:
    """Whether a gradient lies in memory that another tensor knows: a view, a piece of a flat buffer."""
    return grad._is_view() or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size()


def refuse_sparse(grad: torch.Tensor | None) -> None:
    """Refuse a sparse gradient."""
    if grad is not None and grad.layout is not torch.strided:
        raise CaptureError(
            f"a parameter of shape {list(grad.shape)} has a sparse gradient",
            rule="sparse-grad",
            why="a sparse gradient has as many entries as the batch has rows: its memory differs from call to call.",
            fix="use dense gradients (nn.Embedding(..., sparse=False)).",
        )


def _same_layout(one: torch.Tensor, two: torch.Tensor) -> bool:
    same_place = one.device == two.device and one.dtype == two.dtype
    return same_place and one.shape == two.shape and one.stride() == two.stride()
