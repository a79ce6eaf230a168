"""Configurations as TOML files: a table for each section."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from stepgraph.core.errors import InvalidArgument


def read_toml(file: str | PathLike[str]) -> dict[str, Any]:
    """The sections of a TOML file."""
    try:
        found = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(
            f"the configuration {file} cannot be opened",
            rule="config-file",
            details=[str(error)],
            why="the settings of a run are read before it starts.",
            fix="correct the path; `cfg.to_toml()` is the text of such a file.",
        ) from None
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and integers of thousands of digits
        raise InvalidArgument(
            f"the configuration {file} cannot be read",
            rule="config-file",
            details=[str(error)],
            why="a configuration is a TOML file, with one table for each section.",
            fix='correct the line; a section is `[model]`, a field is `cuda_graph_impl = "local"`.',
        ) from None
    return found


def as_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of plain values as TOML, without those that are None."""
    tables = []
    for name, values in sections.items():
        lines = [f"{field} = {_spelled(value)}" for field, value in values.items() if value is not None]
        tables.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(tables) + "\n"


def _spelled(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_spelled(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return str(value).lower() if isinstance(value, bool) else repr(value)
