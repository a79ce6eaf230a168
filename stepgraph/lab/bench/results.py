"""The JSON file of a comparison: rewritten whole after each row, so that an interrupted run can be resumed from it."""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.strict_json import as_json


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to know about the machine and its software."""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "GPU": torch.cuda.get_device_name(device) if on_gpu else "none: the CPU tape",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda if on_gpu else None,
        "Python": platform.python_version(),
        "CPU cores": os.cpu_count(),
    }


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written: no folder, no permission, a folder of its name."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be written",
            rule="report-file",
            why=f"{path.parent}: {error.strerror}." if not path.is_dir() else "it is a folder.",
            fix="name a file in an existing folder that can be written to.",
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: it is there whole, or as it was before."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidArgument(
            f"{path} could not be written: {error.strerror}",
            rule="report-file",
            why="the device is full, or the folder cannot be written to.",
            fix="make room, or name another folder; rows that were written before are kept: add --resume.",
        ) from error


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The results of one comparison: its request, the machine, and a record for each run."""

    path: Path
    request: Mapping[str, Any]
    facts: dict[str, Any]

    def save(self, records: list[dict[str, Any]]) -> None:
        """Write all records, under another name first."""
        text = as_json({"facts": self.facts, "request": self.request, "records": records}, indent=1)
        write_whole(self.path, text + "\n")

    def load(self) -> list[dict[str, Any]]:
        """Return the records of an earlier run of the same comparison; none if there is no file."""
        if not self.path.exists():
            return []
        records, request = self._read()
        if request != json.loads(as_json(self.request)):
            raise InvalidArgument(
                f"--resume: {self.path} is of another comparison",
                rule="report-file",
                why="rows of different configurations cannot be compared with each other.",
                fix="leave --resume out, or use the same settings.",
            )
        return [record for record in records if "error" not in record]

    def refuse_foreign(self) -> None:
        """Refuse to write over a file that is no result of a comparison."""
        if self.path.exists():
            self._read()

    def _read(self) -> tuple[list[dict[str, Any]], Any]:
        """The records and the request of the file."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return list(found["records"]), found["request"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(
                f"{self.path} is no result of a comparison",
                rule="report-file",
                why="the rows are written to that file, which belongs to something else.",
                fix="move it away, or give the report another name: --report FILE.html.",
            ) from error
