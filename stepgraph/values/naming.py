"""How a watched value is named, and how a changed one is told.

A message is read by somebody who looks for the line to change: it spells a value as the step's code does (`self.w`,
`config['scale']`), and tells two of the same spelling apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepgraph.guards.protocol import Change
from stepgraph.plain import MISSING, told


@dataclass(frozen=True, slots=True)
class Label:
    """How a value is spelled, and what tells it from another one of the same spelling."""

    spelling: str
    apart: str = ""
    is_open: bool = False
    """Whether its items are spelled as attributes."""

    def attribute(self, name: str) -> Label:
        return Label(f"{self.spelling}.{name}", self.apart)

    def item(self, key: Any) -> Label:
        if self.is_open and type(key) is str and key.isidentifier():
            return self.attribute(key)
        return Label(f"{self.spelling}[{told(key)}]", self.apart)

    @property
    def length(self) -> Label:
        return Label(f"len({self.spelling})", self.apart)

    @property
    def order(self) -> Label:
        return Label(f"list({self.spelling})", self.apart)

    def __str__(self) -> str:
        return self.spelling + self.apart


class Labels:
    """Labels for variables, each of which is spelled like no other."""

    def __init__(self) -> None:
        self._owners: dict[str, Any] = {}

    def new(self, spelling: str, apart: str, owner: Any) -> Label:
        """A label for something that is spelled so; `apart` tells it from an earlier one of the same spelling."""
        suffix, count = "", 1
        while self._owners.setdefault(spelling + suffix, owner) != owner:
            suffix = f" ({apart})" if count == 1 else f" ({apart}#{count})"
            count += 1
        return Label(spelling, suffix)


def tell(name: str, before: Any, now: Any, is_users: bool = True) -> Change:
    """A change, in words that differ."""
    one = "absent" if before is MISSING else told(before)
    two = "gone" if now is MISSING else told(now)
    if one == two and not one.startswith("a "):  # tensors are told apart by nothing that would help
        one, two = f"{one} at {id(before):#x}", f"{two} at {id(now):#x}"
    return Change(name, one, two, is_users=is_users)
