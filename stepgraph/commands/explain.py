"""`stepgraph explain`: an error, a code, a rule or a symptom in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result, printing
from stepgraph.tools.explain import Candidate, Explanation
from stepgraph.tools.explain import explain as explain_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEAD_BYTES, _TAIL_BYTES = 4 * 2**20, 4 * 2**20
"""What is kept of a longer log: its beginning, where the first error is, and its end."""


def explain(
    context: typer.Context,
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT | RULE | CODE | -",
            show_default=False,
            help="An error message, a rule's id, a CUDA code or name, a symptom in words, or - for a log on stdin.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> Result:
    """Explain an error, a CUDA code or a symptom: its cause, its fix, and where to read on."""
    note = ""
    if text and text != ["-"]:
        given = " ".join(text)
    elif text or not sys.stdin.isatty():
        given, note = _read(sys.stdin.buffer)
    else:
        with printing(ExitCode.USAGE):
            typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)
    if not given.strip():
        what = note or "there is nothing to explain: the text is empty."
        return _not_found(Explanation(()), what, "stepgraph explain --help")
    found = explain_text(given)
    if found.found:
        first = found.candidates[0].entry
        values = {"found": True, "candidates": [_values(each) for each in found.candidates], "note": note or None}
        return Result({**values, "nearest": []}, _shown(found.candidates, note), next=f"stepgraph rules {first.id}")
    if text and os.path.isfile(given):
        return _not_found(found, f"{given} is a file; pass its content.", f"stepgraph explain - < {given}")
    near = f" Rules with a similar id: {', '.join(found.nearest)}." if found.nearest else ""
    what = f"this text is not in the catalogue, so no cause is named.{near} {note}".strip()
    return _not_found(found, what, f"stepgraph explain {found.nearest[0]}" if found.nearest else "stepgraph doctor")


def _read(stream: BinaryIO) -> tuple[str, str]:
    """Read a log: return its text, and what the user should know about the reading."""
    head = stream.read(_HEAD_BYTES)
    tail, skipped = b"", 0
    while block := stream.read(2**20):
        tail += block
        if len(tail) > 2 * _TAIL_BYTES:
            skipped += len(tail) - _TAIL_BYTES
            tail = tail[-_TAIL_BYTES:]
    data = head + (b"\n" if skipped else b"") + tail
    if not data.strip():
        return "", "there is nothing to explain: stdin is empty."
    sample = data[: 2**16]
    unprintable = sum(byte < 32 and byte not in b"\t\n\r\f\b\x1b" for byte in sample)
    if unprintable > len(sample) // 20:
        return "", "stdin is binary data, not the text of a log."
    told = f"{skipped / 2**20:.0f} MiB in the middle of the text were not read." if skipped else ""
    return data.decode("utf-8", "replace"), told


def _not_found(found: Explanation, what: str, following: str) -> Result:
    from rich.text import Text

    advice = (
        "`stepgraph doctor` looks at the installation, `stepgraph check SCRIPT` at a script, "
        "and `stepgraph rules` lists what is known."
    )
    values = {"found": False, "candidates": [], "nearest": list(found.nearest), "note": what}
    return Result(values, Text(f"{what}\n{advice}"), next=following, exit_code=ExitCode.FINDINGS)


def _values(candidate: Candidate) -> dict[str, Any]:
    entry = candidate.entry
    why, fix = entry.reason_and_fix()
    texts = {"id": entry.id, "kind": entry.kind, "what": entry.what, "why": why, "fix": fix, "page": entry.page}
    evidence = {"evidence": candidate.evidence.name.lower(), "matched": candidate.matched, "line": candidate.line}
    return {**texts, "code": entry.code, "name": entry.name or None, **evidence}


def _shown(candidates: Sequence[Candidate], note: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(note)] if note else []
    for number, candidate in enumerate(candidates, 1):
        entry = candidate.entry
        why, fix = entry.reason_and_fix()
        title = f"{number}. {entry.id}" if len(candidates) > 1 else entry.id
        cuda = f"   CUDA {entry.code} {entry.name}" if entry.code is not None else ""
        parts += [Text("")] if parts else []
        parts.append(Text.assemble((title, "bold"), cuda))
        rows = (("What", f"{entry.what}."), ("Why", why), ("Fix", fix), ("Page", entry.page), ("By", candidate.reason))
        parts += [Text.assemble((f"{name}: ", "bold"), text, overflow="fold") for name, text in rows]
    return Group(*parts)
