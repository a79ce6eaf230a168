"""A graph passes results and gradients to the next graph of its chunk in the memory that the next one reads.

Usually a layer's result goes straight to the next layer, and the gradient from there straight to the layer before. So
each graph also writes them to the memory that the next graph reads. The caller can get that memory without a copy: when
it is passed to the next graph, it is in place already. It is not known in advance that the caller passes it on, so in
the first round the caller gets copies. The copies that reach the next graph, and are dropped before the memory is
written again, are replaced by the memory itself from then on. Before a graph writes there, it checks that no caller
still holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.frames import warn_user
from stepgraph.engine.memory.borrowed import BorrowedTensor, lend_out


class HandoverBuffer:
    """Static memory that one graph writes and another reads, and the last tensor returned from it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.alias = lend_out([buffer])[0].lend()
        self._address, self._strides = buffer.data_ptr(), buffer.stride()
        self.last: Handover | None = None

    def fits(self, tensor: torch.Tensor | None, address: int) -> bool:
        """Check that a tensor is stored at an address, with this buffer's strides, and not conjugated or negated."""
        return (
            tensor is not None
            and tensor.data_ptr() == address
            and tensor.stride() == self._strides
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def held_up_by(self, tensor: torch.Tensor | None = None) -> Handover | None:
        """Return the handover that a caller holds and a write would change. There is no write if `tensor` is here."""
        last = self.last
        if last is None or not last.is_lent or self.fits(tensor, self._address) or not last.is_held():
            return None
        return last

    def receive(self, tensor: torch.Tensor | None) -> None:
        """Note a tensor that is passed to the graph that reads here. It will be written, unless it is here already."""
        if self.fits(tensor, self._address):
            return
        if self.last is not None and self.fits(tensor, self.last.copied_to):
            self.last.arrived = True
        else:
            self.clear()

    def clear(self) -> None:
        """End the last handover, before the memory is written."""
        if self.last is not None:
            self.last.end()
            self.last = None


class Handover(BorrowedTensor):
    """A result, or the gradient of an argument, that is stored where another graph reads it."""

    __slots__ = ("_copy", "_place", "_times_held", "arrived", "copied_to", "is_direct", "is_lent")

    def __init__(self, place: HandoverBuffer) -> None:
        super().__init__(place.alias)
        self._place = place
        self.is_direct = False
        """True if callers get it without a copy from now on."""
        self.is_lent = False
        """True if the last caller got it without a copy."""
        self._times_held = 0
        self._copy: weakref.ref[torch.UntypedStorage] | None = None
        self.copied_to = 0
        """The address of the last copy, while the copy is tracked."""
        self.arrived = False
        """True if the copy has reached the next graph."""

    def copy(self, *, goes_on: bool = True) -> torch.Tensor:
        """Return the tensor for the caller."""
        if not goes_on:
            return super().copy()
        self._place.last = self
        self.is_lent, self.arrived = self.is_direct, False
        if self.is_direct:
            self._copy, self.copied_to = None, 0
            return self.lend()
        made = super().copy()
        self._copy, self.copied_to = weakref.ref(made.untyped_storage()), made.data_ptr()
        return made

    def take_back(self) -> None:
        """Return copies again, since a caller held it, until copies are seen to be dropped in time."""
        self.is_direct = False
        self._times_held += 1

    def end(self) -> None:
        """Decide, before the memory is written again, whether the copy was needed."""
        if self._copy is not None and self._times_held < _MAX_TIMES_HELD:
            self.is_direct = self.arrived and self._copy() is None
        self._copy, self.copied_to = None, 0


_MAX_TIMES_HELD = 2
"""How often a caller may hold a tensor lent without a copy, before it is copied for good."""


@dataclass(slots=True)
class SampleHandovers:
    """The tensors that the graphs of one sample pass on, and those that they receive from others."""

    results: dict[int, tuple[int, HandoverBuffer]] = field(default_factory=dict)
    """By result: the argument of the next sample that it is written to, by leaf index, and its place."""
    grads: dict[int, HandoverBuffer] = field(default_factory=dict)
    """By input of the node: the place of the gradient of another sample's result."""
    arguments: list[tuple[int, HandoverBuffer]] = field(default_factory=list)
    """Arguments that other graphs write to, also through other arguments in the same memory."""
    incoming: list[tuple[int, HandoverBuffer]] = field(default_factory=list)
    """Gradients of results that other graphs write to, also through others in the same memory."""

    def forward_held_up_by(self, leaves: Sequence[Any]) -> list[Handover]:
        """Return the handovers that callers hold and a forward for these arguments would overwrite."""
        if not self.arguments and not self.results:
            return []
        found = [place.held_up_by(leaves[index]) for index, place in self.arguments]
        found += [place.held_up_by() for _, place in self.results.values()]
        return [held for held in found if held is not None]

    def before_forward(self, leaves: Sequence[Any]) -> None:
        """Update the buffers before a forward is replayed for these arguments."""
        for index, place in self.arguments:
            place.receive(leaves[index])
        for _, place in self.results.values():
            place.clear()

    def before_backward(self, name: str, grads: Sequence[torch.Tensor | None]) -> None:
        """Update the buffers before a backward is replayed; raise if it would overwrite a held gradient."""
        found = [place.held_up_by(grads[index]) for index, place in self.incoming]
        found += [place.held_up_by() for place in self.grads.values()]
        held = [one for one in found if one is not None]
        if held:
            take_back(held)
            raise CaptureError(
                f"{name}: your program still holds a gradient that passes from one callable to the next",
                rule="held-gradient",
                why="in earlier rounds it was dropped at once, so it is passed on without a copy, in the memory that "
                "the next graph reads. This backward would overwrite it.",
                fix=_KEPT,
            )
        for index, place in self.incoming:
            place.receive(grads[index])
        for place in self.grads.values():
            place.clear()


_KEPT = "clone the tensor to keep it, or keep it from the first round on: then you get copies."


def take_back(held: Sequence[Handover]) -> None:
    """Return copies of these from now on."""
    for one in held:
        one.take_back()


def held_result(name: str) -> CaptureError:
    """Make the error for a forward that would overwrite a tensor that a caller holds, and cannot run eagerly."""
    return CaptureError(
        f"{name}: your program still holds a result that passes from one callable to the next",
        rule="held-result",
        why="in earlier rounds it was dropped in time, so it is passed on without a copy, in the memory that the next "
        "graph reads. A call whose weight gradient is split off cannot run eagerly instead.",
        fix=_KEPT,
    )


def warn_held_result(name: str) -> None:
    """Warn of the same where the call can run eagerly."""
    warn_user(
        f"{name}: your program still holds a result that passes from one callable to the next, and a replay would "
        f"overwrite it: such calls run eagerly   [held-result]\nFix: {_KEPT}"
    )


class HandoverBuffers:
    """All places of a set of graphs."""

    def __init__(self) -> None:
        self._places: dict[int, HandoverBuffer] = {}

    def at(self, buffer: torch.Tensor) -> HandoverBuffer:
        address = buffer.data_ptr()
        if address not in self._places:
            self._places[address] = HandoverBuffer(buffer)
        return self._places[address]

    def among(self, tensors: Mapping[int, torch.Tensor]) -> list[tuple[int, HandoverBuffer]]:
        """Return the places among these tensors."""
        found = [(index, self._places.get(tensor.data_ptr())) for index, tensor in tensors.items()]
        return [(index, place) for index, place in found if place is not None]
