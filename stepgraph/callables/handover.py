"""A graph hands results and gradients to the next graph of its chunk in the memory that the next one reads.

Mostly a layer's result goes straight to the next layer, and the gradient that comes back from there straight to the
layer before. So each graph also writes them to where the next graph reads them, and that memory can be handed to the
caller as it lies: brought to the next graph, it is there already. Nothing says beforehand that the caller does so. In
the first round they get copies, and it is seen which of these come to the next graph, and are dropped before the memory
is written again. Those are handed out as they lie from then on. Before a graph writes there, it is asked whether
somebody holds one all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.buffers.borrowed import BorrowedTensor, lend_out
from stepgraph.errors import CaptureError
from stepgraph.frames import warn_user


class HandoverBuffer:
    """Static memory that one graph writes and another reads, and what was handed out of it last."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.alias = lend_out([buffer])[0].lend()
        self._address, self._strides = buffer.data_ptr(), buffer.stride()
        self.last: Handover | None = None

    def fits(self, tensor: torch.Tensor | None, address: int) -> bool:
        """Whether a tensor is what lies at an address, read as it is read here: not transposed, not conjugate."""
        return (
            tensor is not None
            and tensor.data_ptr() == address
            and tensor.stride() == self._strides
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def held_up_by(self, tensor: torch.Tensor | None = None) -> Handover | None:
        """What somebody holds and a write would change, a write for this tensor if it is not here."""
        last = self.last
        if last is None or not last.is_lent or self.fits(tensor, self._address) or not last.is_held():
            return None
        return last

    def receive(self, tensor: torch.Tensor | None) -> None:
        """A tensor comes to the graph that reads here; what is not here already will be written."""
        if self.fits(tensor, self._address):
            return
        if self.last is not None and self.fits(tensor, self.last.copied_to):
            self.last.arrived = True
        else:
            self.clear()

    def clear(self) -> None:
        """It is about to be written."""
        if self.last is not None:
            self.last.end()
            self.last = None


class Handover(BorrowedTensor):
    """A result, or the gradient of an argument, that lies where another graph reads it."""

    __slots__ = ("_copy", "_place", "_times_held", "arrived", "copied_to", "is_direct", "is_lent")

    def __init__(self, place: HandoverBuffer) -> None:
        super().__init__(place.alias)
        self._place = place
        self.is_direct = False
        """Whether it is handed out as it lies from now on."""
        self.is_lent = False
        """Whether it was last time."""
        self._times_held = 0
        self._copy: weakref.ref[torch.UntypedStorage] | None = None
        self.copied_to = 0
        """The address of the last copy, while it is followed."""
        self.arrived = False
        """Whether that has come to the next graph."""

    def copy(self, *, goes_on: bool = True) -> torch.Tensor:
        """The tensor for the caller."""
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
        """Somebody was found to hold it: copies are handed out, until it is seen again that nobody does."""
        self.is_direct = False
        self._times_held += 1

    def end(self) -> None:
        """The memory is written again: see how the copy has fared."""
        if self._copy is not None and self._times_held < _MAX_TIMES_HELD:
            self.is_direct = self.arrived and self._copy() is None
        self._copy, self.copied_to = None, 0


_MAX_TIMES_HELD = 2
"""How often something is found to be held that is handed out as it lies, before it is copied for good."""


@dataclass(slots=True)
class SampleHandovers:
    """What the graphs of one sample hand on, and where what others hand on comes to them."""

    results: dict[int, tuple[int, HandoverBuffer]] = field(default_factory=dict)
    """By result: the argument of the next sample that it is written to, by leaf index, and its place."""
    grads: dict[int, HandoverBuffer] = field(default_factory=dict)
    """By input of the node: the place of the gradient of another sample's result."""
    arguments: list[tuple[int, HandoverBuffer]] = field(default_factory=list)
    """The arguments that others write to, or others with the same memory."""
    incoming: list[tuple[int, HandoverBuffer]] = field(default_factory=list)
    """The gradients of results of which the same is true."""

    def forward_held_up_by(self, leaves: Sequence[Any]) -> list[Handover]:
        """What somebody holds and a forward for these arguments would overwrite."""
        found = [place.held_up_by(leaves[index]) for index, place in self.arguments]
        found += [place.held_up_by() for _, place in self.results.values()]
        return [held for held in found if held is not None]

    def before_forward(self, leaves: Sequence[Any]) -> None:
        """A forward is about to be replayed for these arguments."""
        for index, place in self.arguments:
            place.receive(leaves[index])
        for _, place in self.results.values():
            place.clear()

    def before_backward(self, name: str, grads: Sequence[torch.Tensor | None]) -> None:
        """A backward is about to be replayed for these gradients; raises if it would overwrite what somebody holds."""
        found = [place.held_up_by(grads[index]) for index, place in self.incoming]
        found += [place.held_up_by() for place in self.grads.values()]
        held = [one for one in found if one is not None]
        if held:
            take_back(held)
            raise CaptureError(
                f"{name}: a gradient that was handed from one callable to the next is still held",
                rule="held-gradient",
                why="it used to be dropped at once, so it is handed out in the memory that the next graph reads, and "
                "the backward that comes now would overwrite it.",
                fix=_KEPT,
            )
        for index, place in self.incoming:
            place.receive(grads[index])
        for place in self.grads.values():
            place.clear()


_KEPT = "clone what is kept, or keep it from the first round on: then copies are handed out."


def take_back(held: Sequence[Handover]) -> None:
    """Hand out copies of these from now on."""
    for one in held:
        one.take_back()


def held_result(name: str) -> CaptureError:
    """A forward cannot be replayed without changing what somebody holds, and cannot run eagerly either."""
    return CaptureError(
        f"{name}: a result that was handed from one callable to the next is still held",
        rule="held-result",
        why="it used to be dropped before the memory was needed again, so it is handed out in the memory that the next "
        "graph reads; and a call whose weight gradient is split off cannot run eagerly.",
        fix=_KEPT,
    )


def warn_held_result(name: str) -> None:
    """The same where the call can run eagerly."""
    warn_user(
        f"{name}: a result that was handed from one callable to the next is still held, and a replay would overwrite "
        f"it; such calls run eagerly   [held-result]\nFix: {_KEPT}"
    )


class HandoverBuffers:
    """All places of a set of graphs."""

    def __init__(self) -> None:
        self._places: dict[int, HandoverBuffer] = {}

    def at(self, buffer: torch.Tensor) -> HandoverBuffer:
        """The place of a static tensor."""
        address = buffer.data_ptr()
        if address not in self._places:
            self._places[address] = HandoverBuffer(buffer)
        return self._places[address]

    def among(self, tensors: Mapping[int, torch.Tensor]) -> list[tuple[int, HandoverBuffer]]:
        """Those of these tensors that are places."""
        found = [(index, self._places.get(tensor.data_ptr())) for index, tensor in tensors.items()]
        return [(index, place) for index, place in found if place is not None]
