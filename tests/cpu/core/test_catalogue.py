"""The catalogue: one entry for each rule id, complete, in plain words, and shipped with the package."""

import re
import shlex
import tomllib
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from stepgraph.core import catalogue
from stepgraph.core.catalogue import KINDS, Entry, entries, entry, sections

FOLDER = Path(catalogue.__file__).parent
IDS = [found.id for found in entries()]


def test_ids_are_unique() -> None:
    assert len(IDS) > 100
    assert sorted(set(IDS)) == sorted(IDS)


def test_codes_are_unique() -> None:
    codes = [found.code for found in entries() if found.code is not None]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_say_what_why_and_how(kind: str) -> None:
    for found in entries(kind):
        assert found.kind == kind
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found.id)
        assert all((found.what, found.why, found.fix)), found.id
        assert len(found.what) <= 130, f"{found.id}: `what` is one clause"
        assert not found.what.endswith("."), found.id
        assert "](" not in found.what, f"{found.id}: a link stands in `details`"
        assert found.why.endswith("."), found.id
        assert found.fix.endswith("."), found.id
        assert entry(found.id) is found


def test_texts_of_messages_have_no_links() -> None:
    for found in entries("capture"):
        if found.texts or "{whose}" in found.why + found.fix:
            assert "](" not in found.why + found.fix, found.id


def test_examples_of_configurations_are_command_lines() -> None:
    for found in (*entries("config"), *entries("run")):
        for line in found.example.splitlines():
            words = shlex.split(line, comments=True)
            assert "stepgraph" in words, f"{found.id}: {line}"
            assert {"train", "check", "bench", "advise", "verify"} & set(words), f"{found.id}: {line}"
            assert all("=" in word or not word[0].isupper() for word in words), f"{found.id}: {line}"
        if found.example:
            refused = [re.search("# refused", line) is not None for line in found.example.splitlines()]
            assert any(refused), found.id
            assert not all(refused), f"{found.id}: a fixed form belongs to an example"


def test_fixes_of_configurations_can_be_typed() -> None:
    """A fix names a field, a variable, an option or a package, or says that the message does."""
    typed = re.compile(r"\w+\.\w+=|[A-Z_]{8,}=|--\w+|\w+>=\d|(model|train)\.\w+|cfg\.|the message")
    assert [found.id for kind in ("config", "run") for found in entries(kind) if not typed.search(found.fix)] == []


def test_entries_are_read_by_kind_and_section() -> None:
    assert {found.kind for found in entries("config")} == {"config"}
    assert entries() == tuple(found for kind in KINDS for found in entries(kind))
    assert [s.title for s in sections("run")] == ["What can be run", "Data and checkpoints", "Running a script"]
    assert all(found.section == s.title for s in sections() for found in s.entries)
    assert entries("no-such-kind") == ()


def test_entry_of_an_unknown_id_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no-such-rule"):
        entry("no-such-rule")


def test_entries_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        entry("host-read").what = "else"  # type: ignore[misc]


def test_files_hold_known_fields_only() -> None:
    fields = set(Entry.__dataclass_fields__) - {"kind", "section"}
    files = sorted(FOLDER.glob("*.toml"))
    assert {file.stem for file in files} <= set(KINDS)
    for file in files:
        data = tomllib.loads(file.read_text())
        assert data["kind"] == file.stem
        for raw in data["section"]:
            assert set(raw) <= {"title", "intro", "entry"}, raw["title"]
            assert all(set(found) <= fields for found in raw["entry"]), raw["title"]
