"""The library in C++: where it lies, how it is built, and what it has.

Before a replay some facts of each parameter are read, and from Python torch answers for one fact of one tensor at a
time. `row.cpp` reads all of them in one call, several times as fast. It has to fit the torch that it meets, so it is
not part of what is installed: `stepgraph native --build` has torch compile it, once for each torch and Python, and
every process finds it from then on. Without it the same is asked in Python.
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
"""From what is expected, as tuples, to the question whether it is met."""


def location() -> Path:
    """Where the library for this torch, this Python and this source lies, or would lie: with torch's own extensions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    fits = (torch.__version__, torch.version.git_version, sys.version, _SOURCE.read_text())
    return root / "stepgraph" / hashlib.sha256(repr(fits).encode()).hexdigest()[:16] / f"{_NAME}.so"


def build(*, verbose: bool = False) -> Path:
    """Have torch compile the library, and say where it lies. Processes that run already do not see it."""
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
        except (RuntimeError, OSError, ImportError) as error:  # no ninja, no compiler, no headers; all in words
            raise BuildError(
                "the part of stepgraph in C++ could not be built",
                rule="native-build",
                details=str(error).strip().splitlines()[-12:],
                why="torch compiles it on this machine, with a C++ compiler, ninja and the headers of Python.",
                fix="install what is missing (pip install ninja; apt install g++ python3-dev), or go on without it: "
                "it changes what a replay costs the host, and nothing else.",
            ) from error
        os.replace(Path(folder) / target.name, target)  # whole, or not at all
    return target


def remove() -> bool:
    """Delete the library; say whether there was one."""
    found = location()
    is_there = found.exists()
    found.unlink(missing_ok=True)
    return is_there


@functools.cache
def native_row() -> MakeRow | None:
    """The row in C++, if it was built; looked for once a process, as any import is."""
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
            "`stepgraph native --build` builds it anew."
        )
        return None
    made: MakeRow = module.Row
    return made
