"""The guard of tensors without a name: it and its row notice that one has ended."""

from __future__ import annotations

import weakref

import torch

from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.guards.outside_memory import OutsideMemory
from stepgraph.engine.oplog import OpLog, Vocabulary


def test_outside_memory_that_has_ended_is_noticed_by_the_row() -> None:
    kept = torch.ones(3) + 1
    named = torch.ones(3) + 1
    with OpLog(Vocabulary(), ()) as log:
        kept.abs()
        named.abs()
    notes = log.finish()
    assert len(notes.outside) == 2
    guard, row = OutsideMemory(notes, {id(named)}), GuardRow()
    guard.expect(row)
    holds, alive = row.question(), weakref.ref(kept)
    del log, notes, named
    assert holds()
    assert not guard.changed()
    del kept
    assert alive() is None
    assert not holds()
    (change,) = guard.changed()
    assert str(change) == "a tensor that an earlier call has made is gone, and the graph reads its memory"
