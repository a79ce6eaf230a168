"""Lists the files that a script opens for writing, by Python's audit hook, and refuses them if the user says so.

Seen are files and folders that Python opens, makes, renames or removes, in the script's process and in those that it
forks, and what `torch.save` writes. Not seen: what libraries in C write by themselves, and other programs. Devices,
compiled Python files and what the module `tempfile` makes do not count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepgraph.errors import StepgraphError

__all__ = ["FileWatch", "WriteRefused"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NAMED_FIRST = ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
_NAMED_SECOND = ("os.rename", "os.link", "os.symlink")
_MADE_BY_TEMPFILE = ("tempfile.mkstemp", "tempfile.mkdtemp")
_DEVICES = ("/dev/", "/proc/")


class WriteRefused(StepgraphError, PermissionError):
    """A script wanted to write, and `--no-write` forbids it."""


class FileWatch:
    """Reports each path once with `report(path, refused)`; with `refuses`, opening raises `WriteRefused`."""

    def __init__(self, report: Callable[[str, bool], None], own: str, *, refuses: bool) -> None:
        self._report, self._refuses = report, refuses
        self._exempt = {os.path.abspath(own)}
        """Paths, with all below them, that do not count."""
        self._is_on = False
        self._seen: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block. Python keeps audit hooks for as long as the process lives; this one falls silent."""
        import torch

        serialization: Any = torch.serialization
        original = getattr(serialization, "_open_zipfile_writer", None)
        sys.addaudithook(self._hook)
        self._is_on = True
        if original is not None:  # it opens the file in C++, which is not audited

            def audited(name_or_buffer: Any) -> Any:
                if isinstance(name_or_buffer, (str, os.PathLike)):
                    sys.audit("open", os.fspath(name_or_buffer), "w", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                return original(name_or_buffer)

            serialization._open_zipfile_writer = audited
        try:
            yield
        finally:
            self._is_on = False
            if original is not None:
                serialization._open_zipfile_writer = original

    def refuse(self) -> None:
        """Refuse from now on."""
        self._refuses = True

    def forget(self) -> None:
        """Report paths again that were reported before."""
        self._seen.clear()

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        path = self._written(event, args)
        if path is None:
            return
        if path not in self._seen:
            self._seen.add(path)
            self._report(path, self._refuses)
        if self._refuses:
            raise WriteRefused(f"the script opens {path} for writing", rule="no-write")

    def _written(self, event: str, args: tuple[Any, ...]) -> str | None:
        """Return the path that an event writes, or None."""
        if event == "open":
            name, _, flags = args
            if not isinstance(flags, int) or not flags & _WRITING:
                return None
        elif event in _NAMED_FIRST:
            name = args[0]
        elif event in _NAMED_SECOND:
            name = args[1]
        else:
            if event in _MADE_BY_TEMPFILE:
                self._exempt.add(os.path.abspath(args[0]))
            return None
        if not isinstance(name, (str, bytes, os.PathLike)):
            return None  # an open descriptor
        path = os.path.abspath(os.fsdecode(name))
        if event in ("os.mkdir", "open") and os.path.isdir(path):
            return None  # it is there already, or a file without a name is opened in it
        return None if self._is_exempt(path) else path

    def _is_exempt(self, path: str) -> bool:
        if path.startswith(_DEVICES) or f"{os.sep}__pycache__{os.sep}" in path or path.endswith("__pycache__"):
            return True
        return any(path == known or path.startswith(known + os.sep) for known in self._exempt)
