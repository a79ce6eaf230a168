"""The C++ library: its location, its build, and its one class.

Before a replay some facts about each parameter are read. From Python, torch answers one question about one tensor at a
time. `row.cpp` reads all facts in one call, several times as fast. The library must match the installed torch, so it is
not part of the package: `stepgraph native --build` lets torch compile it, once for each torch and Python, and every
later process finds it. Without it, Python does the same checks.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any

import torch

from stepgraph.errors import BuildError
from stepgraph.frames import warn_user

_NAME = "stepgraph_row"
_SOURCE = Path(__file__).with_name("row.cpp")

MakeRow = Callable[..., Callable[[], bool]]
"""Makes the check of a row from its expectations, given as tuples."""


def location() -> Path:
    """Return the path of the library for this torch, Python and source, among torch's extensions. It may not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    fits = (torch.__version__, torch.version.git_version, sys.version, _SOURCE.read_text())
    return root / "stepgraph" / hashlib.sha256(repr(fits).encode()).hexdigest()[:16] / f"{_NAME}.so"


def build(*, verbose: bool = False) -> Path:
    """Let torch compile the library, and return its path. Processes that already run do not load it."""
    target = location()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
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
        os.replace(Path(folder) / target.name, target)  # atomic
    return target


def remove() -> bool:
    """Delete the library. Return whether there was one."""
    found = location()
    is_there = found.exists()
    found.unlink(missing_ok=True)
    return is_there


@functools.cache
def native_row() -> MakeRow | None:
    """Return the row in C++, if it was built. A process looks for it once, like an import."""
    path = location()
    if not path.exists():
        return None
    try:
        loader = ExtensionFileLoader(_NAME, str(path))
        module: Any = importlib.util.module_from_spec(ModuleSpec(_NAME, loader, origin=str(path)))
        loader.exec_module(module)
    except ImportError as error:
        warn_user(
            f"the part of stepgraph in C++ could not be loaded: {error}\nStepgraph goes on in Python; "
            "`stepgraph native --build` builds it again."
        )
        return None
    made: MakeRow = module.Row
    return made
