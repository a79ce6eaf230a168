"""Notices what the user's code writes to stdout and stderr while it is recorded.

A replay runs no Python, so a `print` in a step appears at eager calls, at the capture and at audits, and at no other
call. That looks like a condition of the user's own. `Output` sees each write of this thread during a recording: the
`write` of the two streams is replaced for that time, so that loggers and progress bars that hold a stream are seen too.
Nothing is looked at during a replay.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from stepgraph.core import catalogue
from stepgraph.core.errors import Location
from stepgraph.core.frames import is_engine, is_installed, is_of_python, is_users_code, warn_user

_RULE = "host-print"


class Output:
    """The lines that wrote during recordings. Each is named once."""

    def __init__(self) -> None:
        self._lines: dict[Location, bool] = {}
        """True for those that were named."""

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice what this thread writes in this block."""
        streams = {id(each): each for each in (sys.stdout, sys.stderr) if hasattr(each, "__dict__")}.values()
        writers = [(stream, _Writer(stream, self._lines)) for stream in streams]
        try:
            yield
        finally:
            for stream, writer in writers:
                writer.is_over = True
                _put_back(stream)

    def warn(self, name: str) -> None:
        """Name the lines that wrote in the recordings so far, if any is new."""
        new = [line for line, is_named in self._lines.items() if not is_named]
        if new:
            self._lines.update(dict.fromkeys(new, True))
            entry = catalogue.entry(_RULE)
            listed = "\n".join(f"  {line}" for line in new)
            warn_user(f"{name} writes to stdout or stderr   [{_RULE}]\n{listed}\nWhy: {entry.why}\nFix: {entry.fix}")


class _Writer:
    """Stands in the place of a stream's `write`, and notes the lines of its thread."""

    def __init__(self, stream: Any, lines: dict[Location, bool]) -> None:
        self.before = vars(stream).get("write")
        self.is_over = False
        self._write, self._lines, self._thread = stream.write, lines, threading.get_ident()
        vars(stream)["write"] = self

    def __call__(self, *args: Any) -> Any:
        is_meant = threading.get_ident() == self._thread and not self.is_over
        if is_meant and (line := _line_that_writes(sys._getframe(1))) is not None:
            self._lines.setdefault(line, False)
        return self._write(*args)


def _put_back(stream: Any) -> None:
    """Take the writers of recordings that are over off a stream; another thread may be in the middle of one."""
    attributes = vars(stream)
    while isinstance(writer := attributes.get("write"), _Writer) and writer.is_over:
        if writer.before is None:
            del attributes["write"]
        else:
            attributes["write"] = writer.before


def _line_that_writes(frame: types.FrameType | None) -> Location | None:
    """The user's line that a write goes back to; None if torch, stepgraph or a warning writes."""
    found = None
    while frame is not None:
        code = frame.f_code
        if is_users_code(code):
            found = found or frame
            if not is_installed(code.co_filename):
                found = frame
                break
        elif found is None and (not is_of_python(code.co_filename) or code.co_filename.endswith("warnings.py")):
            return None
        elif is_engine(code.co_filename):
            break
        frame = frame.f_back
    return None if found is None else Location(found.f_code.co_filename, found.f_lineno, found.f_code.co_name)
