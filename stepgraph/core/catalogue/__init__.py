"""The catalogue: every rule that stepgraph applies, with what is wrong, why, and how to fix it, under one id.

An error shows its id in brackets. The id leads to one entry here, and every text about the rule comes from that entry:
messages of failed captures, broken rules of a configuration, `stepgraph rules`, `stepgraph explain`, docs/errors.md and
docs/rules.md. The entries stand in one TOML file a kind, beside this module:

| kind | applied |
|---|---|
| `config` | to a configuration, when it is validated |
| `run` | to a valid configuration, when a run starts |
| `capture` | while a step, a module or a callable is captured and replayed |
| `check` | to a script, without running it as a training |
| `symptom` | by the user: something that no error reports, such as a run that is not faster |

Nothing of stepgraph is imported here, and nothing is read before it is asked for.

Example:
    >>> entry("full-recompute").fix
    'recompute parts of layers (model.recompute_granularity=selective ...'
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["KINDS", "Entry", "Section", "entries", "entry", "lookup", "sections"]

_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
KINDS = ("config", "run", "capture", "check", "symptom")
"""All kinds, in the order in which a user meets them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One rule."""

    id: str
    """Shown in brackets at the end of an error's first line; a heading of docs/errors.md or docs/rules.md."""
    kind: str
    """One of `KINDS`."""
    section: str
    """The part of the documentation page that it belongs to."""
    what: str
    """What is wrong, as a clause without a full stop, so that a message can go on or begin with a name."""
    why: str
    """The reason, in sentences; begins in lower case, as it follows `Why:`."""
    fix: str
    """What to type instead, in sentences; follows `Fix:`. `{whose}` here and in `why` is what is captured."""
    example: str = ""
    """Command lines (of `config` and `run`) or Python that runs in the tests (of the other kinds)."""
    details: str = ""
    """When it is raised, and as what; Markdown for the documentation page."""
    notes: str = ""
    """More about the fix; Markdown for the documentation page."""
    texts: tuple[str, ...] = ()
    """Pieces of raw messages, of CUDA, torch or Megatron, that identify it; CUDA's name does too."""
    code: int | None = None
    """The CUDA runtime's error number, where the failure has one."""
    name: str = ""
    """The CUDA name of that number."""
    peers: tuple[str, ...] = ()
    """Pieces of messages of torch's graph functions, Megatron or Transformer Engine about the same rule. `explain`
    recognizes them; a failed capture is not looked up by them."""
    words: tuple[str, ...] = ()
    """How users describe it: words that must all occur in a description, each with its alternatives (`hang|stuck`)."""
    related: tuple[str, ...] = ()
    """Ids of other rules that may lead to the same error."""

    @property
    def page(self) -> str:
        """The place in the documentation."""
        return f"docs/{'errors' if self.kind == 'capture' else 'rules'}.md#{self.id}"

    def reason_and_fix(self, whose: str = "step") -> tuple[str, str]:
        """Return `why` and `fix` for a message about this step or module, without Markdown's links."""
        why, fix = (_LINK.sub(r"\1", text).replace("{whose}", whose) for text in (self.why, self.fix))
        return why, fix


@dataclass(frozen=True, slots=True)
class Section:
    """Entries that stand under one heading of a documentation page."""

    title: str
    kind: str
    intro: str
    entries: tuple[Entry, ...]


def entry(id: str) -> Entry:
    """Return the entry with this id; a KeyError says that there is none."""
    return _by_id()[id]


def entries(kind: str | None = None) -> tuple[Entry, ...]:
    """Return all entries, or those of one kind, in the order of the documentation."""
    return tuple(found for section in sections(kind) for found in section.entries)


def sections(kind: str | None = None) -> tuple[Section, ...]:
    """Return all sections, or those of one kind."""
    return tuple(section for known in KINDS if kind in (None, known) for section in _sections(known))


def lookup(text: str) -> Entry | None:
    """Return the entry of a failed capture that a raw message of CUDA or torch belongs to, or None."""
    folded = text.lower()
    pieces = ((found, piece) for found in entries("capture") for piece in (*found.texts, found.name) if piece)
    return next((found for found, piece in pieces if piece.lower() in folded), None)


@functools.cache
def _by_id() -> dict[str, Entry]:
    return {found.id: found for found in entries()}


@functools.cache
def _sections(kind: str) -> tuple[Section, ...]:
    """Read one kind's file; a kind without a file has no entries yet."""
    file = resources.files(__name__).joinpath(f"{kind}.toml")
    if not file.is_file():
        return ()
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    assert data["kind"] == kind, file
    return tuple(_section(kind, raw) for raw in data["section"])


def _section(kind: str, raw: dict[str, Any]) -> Section:
    title = raw["title"]
    found = tuple(Entry(kind=kind, section=title, **_frozen(fields)) for fields in raw["entry"])
    return Section(title, kind, raw.get("intro", ""), found)


def _frozen(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
