"""Lists the files that a script opens for writing, by Python's audit hook, and refuses them if the user says so.

Seen are files and folders that Python opens, makes, renames, removes, or gives other rights or times, in the script's
process and in those that it forks, and what `torch.save` writes. Not seen: what libraries in C write by themselves, and
other programs. Devices, compiled Python files, what the module `tempfile` makes, and torch's caches of compiled code do
not count.

Python reports the paths that a function was given. One beside a `dir_fd` is in the folder that this descriptor has
open. `os.open` reports no `dir_fd`, and `os.mkfifo` and `os.mknod` report nothing, so that these three are wrapped.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

from stepgraph.core.errors import StepgraphError

__all__ = ["CACHES", "FileWatch", "WriteRefused"]

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name folders in which torch keeps what it has compiled. Without the first one it makes a folder
`torchinductor_USER` for temporary files, as soon as an optimizer is made."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGED = MappingProxyType(
    {
        "open": ((0, None),),
        "os.chflags": ((0, None),),
        "os.chmod": ((0, 2),),
        "os.chown": ((0, 3),),
        "os.link": ((1, 3),),
        "os.mkdir": ((0, 2),),
        "os.mkfifo": ((0, 2),),
        "os.mknod": ((0, 3),),
        "os.remove": ((0, 1),),
        "os.removexattr": ((0, None),),
        "os.rename": ((0, 2), (1, 3)),
        "os.rmdir": ((0, 1),),
        "os.setxattr": ((0, None),),
        "os.symlink": ((1, 2),),
        "os.truncate": ((0, None),),
        "os.utime": ((0, 3),),
        "shutil.rmtree": ((0, 1),),
    }
)
"""The events of changes: for each path that changes, its place among the arguments, and that of its `dir_fd`."""
_OF_THE_NAME = ("os.link", "os.mkdir", "os.mkfifo", "os.mknod", "os.remove", "os.rename", "os.rmdir", "os.symlink")
"""Events that are about a name in a folder, and not about what a link of this name leads to."""
_MADE_BY_TEMPFILE = ("tempfile.mkstemp", "tempfile.mkdtemp")
_DEVICES = ("/dev/", "/proc/")


class WriteRefused(StepgraphError, PermissionError):
    """A script wanted to write, and `--no-write` forbids it."""


class FileWatch:
    """Reports each path once with `report(path, refused)`; with `refuses`, the change raises `WriteRefused`."""

    def __init__(self, report: Callable[[str, bool], None], own: str, *, refuses: bool) -> None:
        self._report, self._refuses = report, refuses
        named = (folder for name in CACHES if (folder := os.environ.get(name)))
        self._exempt = {os.path.realpath(folder) for folder in (own, *named)}
        """Paths, with all below them, that do not count."""
        self._compiled = os.path.join(os.path.realpath(tempfile.gettempdir()), "torchinductor_")
        self._is_on = False
        self._seen: set[str] = set()
        self._opening = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block. Python keeps audit hooks for as long as the process lives; this one falls silent."""
        import torch

        with ExitStack() as stack:
            sys.addaudithook(self._hook)
            stack.callback(self._stop)
            self._is_on = True
            # torch opens the file in C++, which is not audited
            stack.enter_context(_wrapped(torch.serialization, "_open_zipfile_writer", _audited_writer))
            stack.enter_context(_wrapped(os, "open", self._with_dir_fd))
            for name in ("mkfifo", "mknod"):
                stack.enter_context(_wrapped(os, name, _audited))
            yield

    def _stop(self) -> None:
        self._is_on = False

    def refuse(self) -> None:
        """Refuse from now on."""
        self._refuses = True

    def forget(self) -> None:
        """Report paths again that were reported before."""
        self._seen.clear()

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event in _MADE_BY_TEMPFILE:
            self._exempt.add(os.path.realpath(args[0]))
            return
        changed = self._changed(event, args)
        for path in changed:
            if path not in self._seen:
                self._seen.add(path)
                self._report(path, self._refuses)
        if self._refuses and changed:
            how = f"opens {changed[0]} for writing" if event == "open" else f"changes {changed[0]}, by {event}"
            raise WriteRefused(f"the script {how}", rule="no-write")

    def _changed(self, event: str, args: tuple[Any, ...]) -> list[str]:
        """Return the paths that an event changes and that count."""
        if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITING):
            return []
        found = []
        for place, of_folder in _CHANGED.get(event, ()):
            path = self._path(event, args, place, of_folder)
            if path is None or (event in ("os.mkdir", "open") and os.path.isdir(path)):
                continue  # it is there already, or a file without a name is opened in it
            if not self._is_exempt(path, follows=event not in _OF_THE_NAME):
                found.append(path)
        return found

    def _path(self, event: str, args: tuple[Any, ...], place: int, of_folder: int | None) -> str | None:
        """Return the absolute path of one argument of an event."""
        if event != "open":
            return _path(args[place], -1 if of_folder is None else args[of_folder])
        opens = not isinstance(args[place], int)  # nothing is opened by the number of an open file
        return _path(args[place], getattr(self._opening, "dir_fd", -1)) if opens else None

    def _is_exempt(self, path: str, *, follows: bool) -> bool:
        """Whether a path does not count, by where it really is."""
        folder, name = os.path.split(path)
        path = os.path.realpath(path) if follows else os.path.join(os.path.realpath(folder), name)
        if path.startswith((*_DEVICES, self._compiled)):
            return True
        if f"{os.sep}__pycache__{os.sep}" in path or path.endswith("__pycache__"):
            return True
        return any(path == known or path.startswith(known + os.sep) for known in self._exempt)

    def _with_dir_fd(self, original: Callable[..., int]) -> Callable[..., int]:
        """Make an `os.open` that keeps its `dir_fd` for the event that it causes."""

        @functools.wraps(original)
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            self._opening.dir_fd = -1 if dir_fd is None else dir_fd
            try:
                return original(path, flags, mode, dir_fd=dir_fd)
            finally:
                self._opening.dir_fd = -1

        return opened


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Put `wrap(original)` in the place of a function during the block, where there is one."""
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _audited(original: Callable[..., None]) -> Callable[..., None]:
    """A function of `os` with the event that Python lacks: the path first, its `dir_fd` last."""
    num_between = 1 if original.__name__ == "mkfifo" else 2

    @functools.wraps(original)
    def audited(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        sys.audit(f"os.{original.__name__}", path, *[None] * num_between, -1 if dir_fd is None else dir_fd)
        original(path, *args, dir_fd=dir_fd, **kwargs)

    return audited


def _audited_writer(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def audited(name_or_buffer: Any) -> Any:
        if isinstance(name_or_buffer, (str, os.PathLike)):
            sys.audit("open", os.fspath(name_or_buffer), "w", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return original(name_or_buffer)

    return audited


def _path(given: Any, dir_fd: Any) -> str | None:
    """Return the absolute path of an argument, which may be a descriptor, or a name in the folder of another one."""
    if isinstance(given, int):
        return _of_descriptor(given)
    if not isinstance(given, (str, bytes, os.PathLike)):
        return None
    name = os.fsdecode(given)
    if not os.path.isabs(name) and isinstance(dir_fd, int) and dir_fd >= 0:
        folder = _of_descriptor(dir_fd)
        name = name if folder is None else os.path.join(folder, name)
    return os.path.abspath(name)


def _of_descriptor(number: int) -> str | None:
    """Return the path of an open file; None of a pipe, a socket, or where the system does not say."""
    try:
        path = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None
    return path if os.path.isabs(path) else None
