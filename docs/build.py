"""Builds the entries of docs/errors.md and docs/rules.md from the catalogue, and the tables of docs/config.md from the
sections of a configuration: `python docs/build.py`.

The head of each page, up to the marker, is written by hand; everything after it is built. A test compares the pages
with what this script would write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from stepgraph.config.container import ConfigContainer
from stepgraph.config.values import sentences_of, spelled, types_of
from stepgraph.core import catalogue
from stepgraph.core.catalogue import Entry, Section

DOCS = Path(__file__).parent
MARKER = "<!-- From here on built by `python docs/build.py` from stepgraph/core/catalogue. -->\n"
PAGES = {
    "errors.md": ("capture",),
    "rules.md": ("config", "run", "check", "symptom"),
}
"""The kinds of entries that each page shows."""
FIELDS_PAGE = "config.md"
FIELDS_MARKER = "<!-- From here on built by `python docs/build.py` from stepgraph/config. -->\n"
BLOCKS = ("|", "-", "```")
"""Markdown that cannot go on in the paragraph before it."""


def page_with_entries(name: str) -> str:
    """Return the text that a page should have."""
    wanted = FIELDS_MARKER if name == FIELDS_PAGE else MARKER
    head, marker, _ = (DOCS / name).read_text(encoding="utf-8").partition(wanted)
    if not marker:
        raise SystemExit(f"docs/{name} has no line `{wanted.strip()}`")
    if name == FIELDS_PAGE:
        return "\n\n".join([head + marker.strip(), *field_parts()]) + "\n"
    sections = [section for kind in PAGES[name] for section in catalogue.sections(kind)]
    return (
        "\n\n".join([head + marker.strip(), *(part for section in sections for part in section_parts(section))]) + "\n"
    )


def field_parts() -> Iterator[str]:
    """Yield a table of fields for each section of a configuration, and for each group of the model's fields."""
    for name, section in ConfigContainer().sections().items():
        yield f"### {name}"
        yield (type(section).__doc__ or "").strip().partition("\n")[0]
        groups = [kind for kind in reversed(type(section).__mro__) if dataclasses.is_dataclass(kind)]
        for group in groups:
            own = [field for field in vars(group).get("__annotations__", {}) if field != "section_name"]
            if not own:
                continue
            if len(groups) > 1:
                yield f"**{(group.__doc__ or '').strip()}**"
            rows = [f"| `{field}` | {cell(section, field)} |" for field in own]
            yield "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])


def cell(section: object, field: str) -> str:
    """Return the type, the default and the sentence of a field."""
    kind = type(section)
    default = "`[]`" if getattr(section, field) == [] else f"`{getattr(section, field)!r}`"
    return f"{spelled(types_of(kind)[field])} | {default} | {sentences_of(kind)[field]}"


def section_parts(section: Section) -> Iterator[str]:
    """Yield the paragraphs of a section."""
    yield f"# {section.title}"
    if section.intro:
        yield section.intro
    for entry in section.entries:
        yield from entry_parts(entry)


def entry_parts(entry: Entry) -> Iterator[str]:
    """Yield the paragraphs of an entry."""
    yield f"## {entry.id}"
    cuda = f"CUDA {entry.code}, `{entry.name}`. " if entry.code is not None else ""
    opening = f"{cuda}{entry.what[0].upper()}{entry.what[1:]}."
    details = entry.details.strip()
    yield opening + ("\n\n" if details.startswith(BLOCKS) else " ") + details if details else opening
    theirs = [*(entry.texts if entry.kind != "capture" else ()), *entry.peers]
    if theirs:
        yield "Other libraries report it as: " + ", ".join(f"`{code(text)}`" for text in theirs) + "."
    yield f"Why: {entry.why}".replace("{whose}", "step")
    yield f"Fix: {entry.fix}".replace("{whose}", "step")
    if entry.related:
        yield "See also: " + ", ".join(link(other) for other in entry.related) + "."
    if entry.notes:
        yield entry.notes.strip()
    if entry.example:
        language = "bash" if entry.kind in ("config", "run") else "python"
        yield f"```{language}\n{entry.example.strip()}\n```"


def code(text: str) -> str:
    """Return a piece of a message as it can stand between backticks."""
    return text.replace("`", "'")


def link(rule: str) -> str:
    """Return a link to another entry, from any page."""
    return f"[`{rule}`]({catalogue.entry(rule).page.removeprefix('docs/')})"


def main() -> None:
    """Write all pages."""
    for name in (*PAGES, FIELDS_PAGE):
        text = page_with_entries(name)
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"docs/{name}: {text.count(chr(10) + '## ') or text.count(chr(10) + '| `')} entries")


if __name__ == "__main__":
    main()
