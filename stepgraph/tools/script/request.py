"""What a command asks for, and what it gets back: `Script`, `Outcome`, and the file by which the child answers.

The child appends one line of JSON for each event to a file of its own, so that nothing that the script prints can
corrupt it, and what was reported until a kill is not lost. Imports no torch.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Outcome", "Script", "Status", "WrittenFile"]


@dataclass(frozen=True, slots=True)
class Script:
    """A user's script, as it is to be run."""

    target: str
    """The path of a Python file, or the name of a module."""
    args: tuple[str, ...] = ()
    is_module: bool = False
    """Run as by `python -m`."""
    step: str | None = None
    """A function whose calls are the steps: `function`, `Class.method`, or `module:function`."""
    timeout: float = 300.0
    """Seconds until the script and all that it has started are ended."""
    writes: bool = True
    """Whether the script may open files for writing."""

    def __str__(self) -> str:
        return f"-m {self.target}" if self.is_module else self.target


class Status(enum.StrEnum):
    """How a script ended."""

    COMPLETED = "completed"
    """It ran to its end, or exited with 0."""
    STOPPED = "stopped"
    """The probe had seen enough."""
    FAILED = "failed"
    """It raised, exited with another code, or its process died."""
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that the script opened for writing, or a folder that it made."""

    path: str
    after_stop: bool
    """Opened by an `except` or `finally` while the early stop ended the script."""
    refused: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a script ended, and what the probe saw."""

    status: Status
    result: Mapping[str, Any]
    """What the probe returned, as JSON holds it: tuples are lists. Empty if the process ended before it could."""
    steps: int
    """The number of steps that were found."""
    cannot_judge: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[WrittenFile, ...] = ()
    exception: str = ""
    """The script's own traceback, or why its process ended."""
    was_stopped: bool = False
    """Whether the probe ended the script early; one that timed out then has caught the exception."""
    rank: int = 0
    seen: tuple[str, ...] = ()
    """What the probe saw, told as it was seen."""

    @property
    def is_first_rank(self) -> bool:
        """True in the one process whose result is printed."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Request:
    """The parent's words to the child."""

    script: Script
    probe: str
    options: Mapping[str, Any]
    answer: str
    """The file to answer to."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        values = json.loads(text)
        script = values["script"]
        values["script"] = Script(**{**script, "args": tuple(script["args"])})
        return cls(**values)


@dataclass(slots=True)
class Answer:
    """The lines that a child has written so far."""

    steps: int = 0
    end: Mapping[str, Any] | None = None
    """The last line: status, exception and the probe's result. None if the process ended without one."""
    was_stopped: bool = False
    cannot_judge: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    files: list[WrittenFile] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Answer:
        """Read what there is; a kill may have cut the last line."""
        answer = cls()
        for line in _whole_lines(file):
            kind, value = line
            if kind == "steps":
                answer.steps = value
            elif kind == "stop":
                answer.was_stopped = True
            elif kind == "cannot_judge" and value not in answer.cannot_judge:
                answer.cannot_judge.append(value)
            elif kind == "note" and value not in answer.notes:
                answer.notes.append(value)
            elif kind == "seen" and value not in answer.seen:
                answer.seen.append(value)
            elif kind == "file":
                answer.files.append(WrittenFile(**value))
            elif kind == "end":
                answer.end = value
        return answer


def append(file: str, kind: str, value: Any) -> None:
    """Append one line. The file is opened each time: a script may close all descriptors."""
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps([kind, value]) + "\n")


def _whole_lines(file: Path) -> Iterator[tuple[str, Any]]:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            kind, value = json.loads(line)
            yield kind, value
