"""The C++ library: its location, its build, and its one class.

Before a replay some facts about each parameter are read. From Python, torch answers one question about one tensor at a
time. `row.cpp` reads all facts in one call, several times as fast. The library must match the installed torch, so it is
not part of the package: `stepgraph native --build` lets torch compile it, once for each torch and Python, and every
later process finds it. Without it, Python does the same checks.

A file that is shorter than its headers say ends the process that loads it with SIGBUS, and one of another program may
do anything. So the digest of the library stands behind it, in the same file, and a file whose digest does not fit is
not loaded. The loader of the system does not look at what stands behind a library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any

import torch

from stepgraph.core import catalogue
from stepgraph.core.errors import BuildError
from stepgraph.core.frames import warn_user

_NAME = "stepgraph_row"
_SOURCE = Path(__file__).with_name("row.cpp")
_MARK = b"\nstepgraph sha256 "
"""What stands between the library and its digest."""

MakeRow = Callable[..., Callable[[], bool]]
"""Makes the check of a row from its expectations, given as tuples."""


def location() -> Path:
    """Return the path of the library for this torch, Python and source, among torch's extensions. It may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")).absolute()
    fits = (torch.__version__, torch.version.git_version, sys.version, _SOURCE.read_text(), _MARK)
    return root / "stepgraph" / hashlib.sha256(repr(fits).encode()).hexdigest()[:16] / f"{_NAME}.so"


def is_built() -> bool:
    """Return whether there is a library for this torch and this Python. Whether it can be used shows when it loads."""
    return os.path.exists(location())  # unlike `Path.exists`, False for a folder that may not be searched


def build(*, verbose: bool = False) -> Path:
    """Let torch compile the library, and return its path. Processes that already run do not load it."""
    target = location()
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True)
    with temporary as folder:
        try:
            from torch.utils import cpp_extension  # needs setuptools

            cpp_extension.load(
                _NAME,
                [str(_SOURCE)],
                extra_cflags=["-O2"],
                build_directory=folder,
                with_cuda=False,
                is_python_module=False,
                verbose=verbose,
            )
        except (RuntimeError, OSError, ImportError) as error:  # no ninja, no compiler or no headers
            raise BuildError(
                "the part of stepgraph in C++ could not be built",
                rule="native-build",
                details=str(error).strip().splitlines()[-12:],
            ) from error
        built = Path(folder, target.name)
        with _writing(target):
            _put(built.read_bytes(), built.with_suffix(".sealed"), target)
    return target


def _put(library: bytes, temporary: Path, target: Path) -> None:
    """Write a library and its digest. After a crash of the machine, too, `target` is whole or not there."""
    with temporary.open("wb") as file:
        file.write(library + _seal(library))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)  # atomic
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _seal(library: bytes) -> bytes:
    return _MARK + hashlib.sha256(library).hexdigest().encode()


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """In this block errors are about the folder of the library."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            "the folder of the part of stepgraph in C++ cannot be written",
            rule="native-folder",
            details=[f"folder  {target.parent}", f"{type(error).__name__}: {error.strerror or error}"],
        ) from error


def remove() -> bool:
    """Delete the library. Return whether there was one."""
    found, is_there = location(), is_built()
    with _writing(found), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found.unlink()
    return is_there


@functools.cache
def native_row() -> MakeRow | None:
    """Return the row in C++, if it was built. A process looks for it once, like an import."""
    path = location()
    if not is_built():
        return None
    damage = _damage(path)
    if damage is None:
        try:
            loader = ExtensionFileLoader(_NAME, str(path))
            module: Any = importlib.util.module_from_spec(ModuleSpec(_NAME, loader, origin=str(path)))
            loader.exec_module(module)
        except ImportError as error:
            damage = str(error)
        else:
            made: MakeRow = module.Row
            return made
    row = catalogue.entry("native-load")
    warn_user(f"{row.what}   [{row.id}]\n  {path}\n  {damage}\nWhy: {row.why}\nFix: {row.fix}")
    return None


def _damage(path: Path) -> str | None:
    """Say why a file is not a library that `build` has made, without loading it; None if it is one."""
    if not path.is_file():
        return "it is no file"
    try:
        library, mark, digest = path.read_bytes().rpartition(_MARK)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    if not mark:
        return "it has no digest: it was cut off, or another program has written it"
    return None if mark + digest == _seal(library) else "its digest is another one: it has changed since it was built"
