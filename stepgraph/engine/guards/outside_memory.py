"""Memory that a recording reads and nobody has named: made by an earlier call, and kept where no name leads to.

`torch.nn.utils.parametrize.cached()` keeps weights that the first call of its block has computed; a library may keep a
table of the first length that it has seen. A graph has the address baked in. No walk finds the owner, so the tensor
itself is watched, by a weak reference. When it has died, its memory may be anyone's: the next call runs eagerly, which
makes what it needs again, and the graph is recorded anew. (A recording in its place would leave tensors of its own with
that owner.)
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence

from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.guards.protocol import Change, Remedy
from stepgraph.engine.oplog import Log


class _State:
    """What the references tell when a tensor dies. It does not know the guard, so that it keeps nothing alive."""

    __slots__ = ("is_whole",)

    def __init__(self) -> None:
        self.is_whole = True

    def end(self, _: object) -> None:
        self.is_whole = False


class OutsideMemory:
    """The tensors that a recording has read, and that neither have a role nor are `named`, by id, by a watch."""

    def __init__(self, log: Log, named: Container[int]) -> None:
        self._state = state = _State()
        alive = [tensor for ref in log.outside if (tensor := ref()) is not None]  # others have ended with the call
        self._refs = [weakref.ref(tensor, state.end) for tensor in alive if id(tensor) not in named]

    def changed(self) -> Sequence[Change]:
        if self._state.is_whole:
            return ()
        what = "is gone, and the graph reads its memory"
        return (Change("a tensor that an earlier call has made", "", what, Remedy.START_OVER),)

    def expect(self, row: GuardRow) -> None:
        if self._refs:
            row.attribute(self._state, "is_whole", True)
