"""The nodes of a graph, read back from it: kernels with their parameter bytes, copies, fills.

A log of operations says what torch was asked to do. The nodes say what the device will do, also where code bypasses
torch's dispatcher: a C++ extension, a library's kernel. Two recordings of one step are compared node by node. What
differs is an address, which a new recording may choose freely, or a value that the host has put into the graph. A word
is an address where it points into memory of the device in both recordings.

Parameters are read by the driver as plain bytes, and C++ leaves bytes between the members of a structure as they are.
So a difference counts only if it comes back in a second recording, and if recordings of the unchanged step, before and
in between, do not have it (`lasting`).
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepgraph.core.wording import counted

_WORD = 8
_HALF = 4
_HOST_BEGIN, _HOST_END = 0x5500_0000_0000, 0x8000_0000_0000
"""Where Linux places programs, heaps, libraries and stacks of 64-bit processes."""
_SHORT = 72
"""Most letters of a kernel's name in a message."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node: what it is, how it is launched, and the bytes that it was given."""

    kind: str
    """`kernel`, `copy`, `fill`, or the driver's word for another kind."""
    name: str = ""
    """The kernel's name."""
    launch: tuple[int, ...] = ()
    """Of a kernel grid, block and shared memory; of a copy or a fill its extent."""
    parameters: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        shown = self.name if len(self.name) <= _SHORT else f"{self.name[: _SHORT - 3]}..."
        return f"{self.kind} {shown}".strip()


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of one recording, and the device's memory when they were read."""

    nodes: tuple[Node, ...]
    memory: tuple[tuple[int, int], ...] = ()
    """Begin and end of each range, in order."""

    def is_address(self, word: bytes) -> bool:
        """Check whether a word of eight bytes points into the memory."""
        address = int.from_bytes(word, "little")
        place = bisect.bisect_right(self.memory, (address, math.inf)) - 1
        return place >= 0 and self.memory[place][0] <= address <= self.memory[place][1]


@dataclass(frozen=True, slots=True)
class NodeDifference:
    """A difference between two recordings: which node, which bytes, and both sides."""

    index: int
    node: str
    place: str
    """`parameter 2, byte 16`, `launch`, or empty for a node that is another one."""
    before: str
    now: str

    def __str__(self) -> str:
        return f"node {self.index}, {self.node}{', ' if self.place else ''}{self.place}: {self.before} -> {self.now}"


def node_differences(before: Nodes, now: Nodes) -> list[NodeDifference]:
    """All values that differ between two recordings, up to the first node that is another one."""
    found: list[NodeDifference] = []
    for index, (one, two) in enumerate(zip(before.nodes, now.nodes, strict=False)):
        sizes = [[len(part) for part in node.parameters] for node in (one, two)]
        if (one.kind, one.name, sizes[0]) != (two.kind, two.name, sizes[1]):
            return [*found, NodeDifference(index, str(one), "", str(one), str(two))]
        if one.launch != two.launch:
            found.append(NodeDifference(index, str(one), "launch", str(one.launch), str(two.launch)))
        for number, (old, new) in enumerate(zip(one.parameters, two.parameters, strict=True)):
            if old != new:
                found += _in_bytes(index, str(one), number, (before, old), (now, new))
    if len(before.nodes) != len(now.nodes):
        index = min(len(before.nodes), len(now.nodes))
        counts = [counted(len(nodes.nodes), "nodes") for nodes in (before, now)]
        found.append(NodeDifference(index, "the graph", "", *counts))
    return found


def lasting(
    found: Iterable[NodeDifference], again: Iterable[NodeDifference], noise: Iterable[NodeDifference]
) -> list[NodeDifference]:
    """Return the differences that came back in a second recording, and that unchanged recordings do not have."""
    repeated = set(again)
    places = {(one.index, one.place) for one in noise}
    return [one for one in found if one in repeated and (one.index, one.place) not in places]


def _in_bytes(
    index: int, name: str, number: int, before: tuple[Nodes, bytes], now: tuple[Nodes, bytes]
) -> list[NodeDifference]:
    """The differences within one parameter, addresses left out."""
    (old_nodes, old), (new_nodes, new) = before, now
    found = []
    for start in range(0, len(old), _WORD):
        one, two = old[start : start + _WORD], new[start : start + _WORD]
        if one == two or (len(one) == _WORD and old_nodes.is_address(one) and new_nodes.is_address(two)):
            continue
        if len(one) == _WORD and (_is_on_host(one) or _is_on_host(two)):
            continue  # left over from the host's stack: kernels are given no addresses of the host's heap
        for offset, size in _pieces(one, two):
            values = [_read(word[offset : offset + size]) for word in (one, two)]
            found.append(NodeDifference(index, name, f"parameter {number}, byte {start + offset}", *values))
    return found


def _is_on_host(word: bytes) -> bool:
    """Check whether a word reads as an address of the process: no number that a step computes with has these bits."""
    return _HOST_BEGIN <= int.from_bytes(word, "little") < _HOST_END


def _pieces(one: bytes, two: bytes) -> Sequence[tuple[int, int]]:
    """Offset and size of what differs in a word.

    That is the whole word where it reads as a double on both sides, and both halves differ or the low one is zero, as
    that of 0.5 is. Else it is each half that differs.
    """
    halves = [(start, len(one[start : start + _HALF])) for start in range(0, len(one), _HALF)]
    differ = [(start, size) for start, size in halves if one[start : start + size] != two[start : start + size]]
    is_double = len(one) == _WORD and all(_is_usual(struct.unpack("<d", word)[0]) for word in (one, two))
    is_whole = len(differ) == 2 or not any(one[:_HALF])
    return [(0, _WORD)] if is_double and is_whole else differ


def _read(word: bytes) -> str:
    """Bytes as a number would be written: a float where that has a usual size, else an integer."""
    if len(word) in (_HALF, _WORD):
        number = struct.unpack("<f" if len(word) == _HALF else "<d", word)[0]
        if _is_usual(number):
            return f"{number:.9g}" if len(word) == _HALF else repr(number)
    return str(int.from_bytes(word, "little", signed=True))


def _is_usual(number: float) -> bool:
    """Check whether bits read as a float make a number that somebody would write: small integers do not."""
    return math.isfinite(number) and 1e-30 < abs(number) < 1e30
