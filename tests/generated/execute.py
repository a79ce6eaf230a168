"""Runs one program with one engine, in this process."""

from __future__ import annotations

import contextlib
import linecache
from pathlib import Path
from typing import Any

from tests.generated.program import Program
from tests.generated.source import source

PIPELINES = ("stage",)
"""Engines whose programs are pipelines."""


def execute(program: Program, engine: str, folder: Path) -> dict[str, Any]:
    """Write a program to a file of the folder, run it, and say how the engine compares with eager."""
    from tests.generated import runtime

    file = folder / f"program_{program.seed}.py"
    text = "from tests.generated.runtime import *\n\n\n" + source(program)
    file.write_text(text, encoding="utf-8")
    linecache.checkcache(str(file))
    namespace: dict[str, Any] = {"__name__": "generated", "__file__": str(file)}
    exec(compile(text, str(file), "exec"), namespace)
    made = runtime.ENGINES[engine](dict(program.options), program.shared)
    with runtime.one_rank() if engine in PIPELINES else contextlib.nullcontext():
        return runtime.judge(namespace["program"], made)
