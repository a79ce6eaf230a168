"""`Section` is the base of the parts of a configuration: plain dataclasses that refuse misspelt names and wrong types.

A field is declared once: its type, its default, and the sentence that the documentation shows.

    @dataclass(kw_only=True)
    class TrainSection(Section):
        train_iters: Annotated[int, "Number of training iterations."] = 20

To add fields to a section, add lines to it, or a group of fields as one more base class. Nothing else has to know them:
overrides, TOML files and the documentation read the annotations.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from stepgraph.config.spellings import older_setting
from stepgraph.config.values import fitted, types_of
from stepgraph.core.errors import InvalidArgument, nearest
from stepgraph.core.tracebacks import entry_point

_FROZEN = "_is_frozen"


class Section:
    """A part of a configuration. Assignment checks the field's name and type; a frozen section refuses it."""

    section_name: ClassVar[str] = ""

    @entry_point
    def __setattr__(self, name: str, value: Any) -> None:
        refuse_frozen(self, f"{self.section_name}.{name}")
        types = types_of(type(self))
        replaced = older_setting(self, name, value)
        if replaced is not None:
            for field, new in replaced.items():
                setattr(self, field, new)
        elif name in types:
            object.__setattr__(self, name, fitted(f"{self.section_name}.{name}", value, types[name]))
        else:
            raise unknown_setting(self.section_name, name, type(self))

    @entry_point
    def __delattr__(self, name: str) -> None:
        raise InvalidArgument(
            f"{self.section_name}.{name} cannot be deleted",
            rule="config-field",
            why="every setting has a value.",
            fix="assign None, or the default.",
        )

    def copy(self) -> Self:
        """A section of its own with the same values, which can be changed."""
        return type(self)(**values_of(self))

    def frozen(self) -> Self:
        """A copy that refuses changes; its lists are tuples."""
        found = self.copy()
        for name, value in values_of(found).items():
            if isinstance(value, list):
                object.__setattr__(found, name, tuple(value))
        object.__setattr__(found, _FROZEN, True)
        return found


def values_of(section: Any) -> dict[str, Any]:
    """The fields of a dataclass with their values, none copied."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def is_frozen(section: Any) -> bool:
    """True for what `validate()` returned."""
    return _FROZEN in vars(section)


def refuse_frozen(section: Any, where: str) -> None:
    """Refuse a change to a validated configuration."""
    if is_frozen(section):
        raise InvalidArgument(f"{where} is set on a validated configuration", rule="config-frozen")


def unknown_setting(section: str, name: str, kind: type[Any]) -> InvalidArgument:
    """The error for a name that a section does not have."""
    parts: dict[str, Any] = {} if section else types_of(kind)
    homes = [
        home
        for home, part in parts.items()
        if isinstance(part, type) and issubclass(part, Section) and name in types_of(part)
    ]
    if homes:
        return InvalidArgument(
            f"the configuration has no `{name}` outside its sections",
            rule="config-field",
            why="a setting belongs to a section.",
            fix=f"did you mean `{homes[0]}.{name}`? In a TOML file it stands under `[{homes[0]}]`.",
        )
    near = nearest(name, types_of(kind))
    dotted = f"{section}." if section else ""
    return InvalidArgument(
        f"the configuration has no `{dotted}{name}`",
        rule="config-field",
        why="a misspelt name would leave the setting at its default.",
        fix=f"did you mean `{dotted}{near}`?" if near else f"the names are {', '.join(types_of(kind))}.",
    )
