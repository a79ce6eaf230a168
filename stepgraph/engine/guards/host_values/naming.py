"""Names of watched values, and descriptions of their changes.

A message spells a value as the step's code does (`self.w`, `config['scale']`), and tells two of one spelling apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepgraph.core.plain_values import MISSING, told
from stepgraph.engine.guards.protocol import Change


@dataclass(frozen=True, slots=True)
class Label:
    """The spelling of a value, and a suffix that distinguishes it from another one of the same spelling."""

    spelling: str
    apart: str = ""
    is_open: bool = False
    """True if its items are spelled as attributes."""

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
    """Makes labels for variables, each of them unique."""

    def __init__(self) -> None:
        self._owners: dict[str, Any] = {}

    def new(self, spelling: str, apart: str, owner: Any) -> Label:
        """Make a label with this spelling. `apart` distinguishes it from an earlier one of another `owner`."""
        suffix, count = "", 1
        while self._owners.setdefault(spelling + suffix, owner) != owner:
            suffix = f" ({apart})" if count == 1 else f" ({apart}#{count})"
            count += 1
        return Label(spelling, suffix)


def describe_change(name: str, before: Any, now: Any, is_users: bool = True) -> Change:
    """Describe a change; the two values get different descriptions."""
    one = "absent" if before is MISSING else told(before)
    two = "gone" if now is MISSING else told(now)
    if one == two and not one.startswith("a "):  # the address of a tensor or object would not help the user
        one, two = f"{one} at {id(before):#x}", f"{two} at {id(now):#x}"
    return Change(name, one, two, is_users=is_users)
