"""How a watched value is named, and how a changed one is told.

A message is read by somebody who looks for the line to change: it spells a value as the step's code does (`self.w`,
`config['scale']`), and tells two of the same spelling apart. Values are written as they would be typed, where they are
made of plain ones and short; no `__repr__` of the user runs.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.values.equality import MISSING, attributes_of, is_numpy, is_plain, items_of

_SHORT = 80
_BRACKETS: dict[type, tuple[str, str]] = {tuple: ("(", ")"), list: ("[", "]"), set: ("{", "}"), frozenset: ("{", "}")}


@dataclass(frozen=True, slots=True)
class Change:
    """A watched value that is not what it was."""

    name: str
    before: str
    now: str
    is_users: bool = True
    """Whether it belongs to something of the user's own, not to an installed library."""

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.now}"


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
    return Change(name, one, two, is_users)


def told(value: Any) -> str:
    """A value in a message."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if kind in (types.FunctionType, types.BuiltinFunctionType, types.MethodType):
        return f"<function {value.__qualname__}>"
    if kind is types.CodeType:
        return f"<code of line {value.co_firstlineno}>"
    if issubclass(kind, type):
        return f"<class {value.__qualname__}>"
    if issubclass(kind, types.ModuleType):
        return f"<module {vars(value).get('__name__')}>"
    if issubclass(kind, tuple) and any(issubclass(type(item), torch.Tensor) for item in items_of(value)):
        return f"a {kind.__name__} with tensors"
    text = _written(value)
    if text is None or (len(text) >= _SHORT and not is_plain(value)):
        return f"<{kind.__name__} at {id(value):#x}>"
    return text


def _written(value: Any) -> str | None:
    """What one would type for a value, if it is made of plain ones."""
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return f"{kind.__name__}.{(attributes_of(value) or {}).get('_name_')}"
    for base in (int, float, complex, str, bytes):
        if issubclass(kind, base):
            number: Any = bool if kind is bool else base
            return str(number.__repr__(value))
    if kind in _BRACKETS:
        left, right = _BRACKETS[kind]
        comma = "," if kind is tuple and len(value) == 1 else ""
        return (
            _joined(left, [("", v) for v in items_of(value)], comma + right)
            if value or kind not in (set, frozenset)
            else "set()"
        )
    if issubclass(kind, (tuple, frozenset)):
        return _joined(f"{kind.__name__}(", [("", v) for v in items_of(value)], ")")
    if kind is dict:
        return _joined("{", [(f"{told(k)}: ", v) for k, v in value.items()], "}") if len(value) < _SHORT else None
    if dataclasses.is_dataclass(kind) or kind is types.SimpleNamespace:
        attributes = attributes_of(value)
        fields = None if attributes is None else [(f"{k}=", v) for k, v in attributes.items()]
        return None if fields is None else _joined(f"{kind.__name__}(", fields, ")")
    if is_numpy(kind, "ndarray"):
        return " ".join(repr(value).split()) if value.dtype.kind in "biufc" else None
    return repr(value) if is_plain(value) else None


def _joined(left: str, items: Iterable[tuple[str, Any]], right: str) -> str | None:
    parts: list[str] = []
    for before, value in items:
        if not is_plain(value):
            return None
        parts.append(f"{before}{_written(value)}")
    return f"{left}{', '.join(parts)}{right}"
