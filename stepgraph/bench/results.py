"""The JSON file of a comparison: rewritten whole after each row, so that an interrupted run can be resumed from it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepgraph.errors import InvalidArgument


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
        text = json.dumps({"facts": self.facts, "request": self.request, "records": records}, indent=1)
        write_whole(self.path, text + "\n")

    def load(self) -> list[dict[str, Any]]:
        """Return the records of an earlier run of the same comparison; none if there is no file."""
        if not self.path.exists():
            return []
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            records, request = list(found["records"]), found["request"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._unusable("is no result of a comparison", "move it away, or leave --resume out.") from error
        if request != json.loads(json.dumps(self.request)):
            raise self._unusable("is of another comparison", "leave --resume out, or use the same settings.")
        return [record for record in records if "error" not in record]

    def _unusable(self, what: str, fix: str) -> InvalidArgument:
        return InvalidArgument(
            f"--resume: {self.path} {what}",
            rule="report-file",
            why="rows of different configurations cannot be compared with each other.",
            fix=fix,
        )
