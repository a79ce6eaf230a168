"""The file of the part in C++: where it is, that it is whole, and what is said where it is not."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepgraph.commands.cli import app
from stepgraph.core.errors import BuildError, StepgraphWarning
from stepgraph.engine.backends.native import library

runner = CliRunner()
UNWRITABLE = ("/dev/null/extensions", "/proc/extensions", "/tmp/" + "x" * 300)
DAMAGES: dict[str, Callable[[Path], object]] = {
    "of another program": lambda path: path.write_bytes(b"\x7fELF" + bytes(5000)),
    "empty": lambda path: path.touch(),
    "cut off": lambda path: path.write_bytes((b"x" * 5000 + library._seal(b"x" * 5000))[:5000]),
    "cut off in its digest": lambda path: path.write_bytes((b"x" * 5000 + library._seal(b"x" * 5000))[:-1]),
    "changed": lambda path: path.write_bytes(b"x" * 4999 + b"y" + library._seal(b"x" * 5000)),
    "no library": lambda path: path.write_bytes(b"x" * 5000 + library._seal(b"x" * 5000)),
    "a folder": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
}


@pytest.fixture(autouse=True)
def looked_for_anew() -> Iterator[None]:
    library.native_row.cache_clear()
    yield
    library.native_row.cache_clear()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_library_is_named_and_not_loaded(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library.location().parent.mkdir(parents=True)
    DAMAGES[damage](library.location())
    with pytest.warns(StepgraphWarning) as warned:
        assert library.native_row() is None
    text = str(warned[0].message)
    assert "[native-load]" in text
    assert str(library.location()) in text
    assert "\nWhy: " in text
    assert "\nFix: run `stepgraph native --build`" in text


@pytest.mark.parametrize("folder", UNWRITABLE)
def test_folder_that_cannot_be_written_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", folder)
    assert not library.is_built()
    assert library.native_row() is None
    with pytest.raises(BuildError) as caught:
        library.build()
    assert caught.value.rule == "native-folder"
    assert any(folder in line for line in caught.value.details)
    assert "TORCH_EXTENSIONS_DIR" in caught.value.fix
    result = runner.invoke(app, ["native", "--build", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["error"]["rule"]) == (2, "native-folder")


def test_library_that_cannot_be_deleted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library.location().mkdir(parents=True)
    with pytest.raises(BuildError) as caught:
        library.remove()
    assert caught.value.rule == "native-folder"


def test_user_without_a_home_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have no entry in /etc/passwd."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert library.location().is_absolute()
    assert library.native_row() is None


def test_sealed_library_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "library.so"
    library._put(b"x" * 5000, tmp_path / "temporary", target)
    assert library._damage(target) is None
    assert list(tmp_path.iterdir()) == [target]
