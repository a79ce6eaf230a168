"""Handover: a copy at first, as it lies once copies were seen to arrive and to be dropped, copies again if held."""

from __future__ import annotations

import torch

from stepgraph.engine.parts.callables.handover import Handover, HandoverBuffer


def place_of(buffer: torch.Tensor) -> tuple[HandoverBuffer, Handover]:
    place = HandoverBuffer(buffer)
    handover = Handover(place)
    handover.settle()
    return place, handover


def go_round(place: HandoverBuffer, handover: Handover, *, arrives: bool = True) -> int:
    """One round with a result that is dropped; where it lay."""
    place.clear()
    tensor = handover.copy()
    if arrives:
        place.receive(tensor)
    return tensor.data_ptr()


def test_handover_of_a_dropped_tensor_copies_nothing() -> None:
    buffer = torch.ones(3, 3)
    place, handover = place_of(buffer)
    assert go_round(place, handover) != buffer.data_ptr()
    assert go_round(place, handover) == buffer.data_ptr()
    assert go_round(place, handover, arrives=False) == buffer.data_ptr()


def test_what_goes_elsewhere_is_copied() -> None:
    buffer = torch.ones(3, 3)
    place, handover = place_of(buffer)
    for _ in range(4):
        assert go_round(place, handover, arrives=False) != buffer.data_ptr()


def test_what_is_kept_is_copied() -> None:
    buffer = torch.ones(3, 3)
    place, handover = place_of(buffer)
    kept = []
    for _ in range(4):
        place.clear()
        kept.append(handover.copy())
        place.receive(kept[-1])
        assert kept[-1].data_ptr() != buffer.data_ptr()


def test_what_is_held_holds_up_whoever_would_write_there() -> None:
    place, handover = place_of(torch.ones(3, 3))
    go_round(place, handover)
    place.clear()
    held = handover.copy()
    assert place.held_up_by(held) is None, "it is there"
    assert place.held_up_by(held.view(9).view(3, 3)) is None
    assert place.held_up_by(held.t()) is handover, "it would be read transposed"
    assert place.held_up_by(torch.ones(3, 3)) is handover
    assert place.held_up_by() is handover
    view = held[1:].detach()
    del held
    assert place.held_up_by() is handover
    del view
    assert place.held_up_by() is None


def test_handover_of_a_conjugate_is_not_mistaken_for_the_buffer() -> None:
    place, handover = place_of(torch.ones(3, 3, dtype=torch.complex64))
    go_round(place, handover)
    place.clear()
    held = handover.copy()
    assert place.held_up_by(held) is None
    assert place.held_up_by(held.conj()) is handover


def test_what_was_held_twice_is_copied_for_good() -> None:
    buffer = torch.ones(3, 3)
    place, handover = place_of(buffer)
    for _ in range(2):
        go_round(place, handover)
        place.clear()
        held = handover.copy()
        assert held.data_ptr() == buffer.data_ptr()
        assert place.held_up_by() is handover
        handover.take_back()
        del held
    for _ in range(4):
        assert go_round(place, handover) != buffer.data_ptr()


def test_a_transposed_copy_does_not_count_as_arrived() -> None:
    buffer = torch.ones(3, 3)
    place, handover = place_of(buffer)
    for _ in range(3):
        place.clear()
        tensor = handover.copy()
        assert tensor.data_ptr() != buffer.data_ptr()
        place.receive(tensor.t())
        del tensor
