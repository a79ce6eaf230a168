"""Starts jobs that measure, one process each, and returns their records; `server` has the other end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stepgraph.lab.bench.server import STDERR
from stepgraph.tools.script.processes import GRACE_S, end_group, own_program

Record = dict[str, Any]
WORKER = "stepgraph.lab.bench.worker"


class JobServer:
    """A server of jobs, started with the first job and ended with the block; one that dies is started again.

    Example:
        >>> with JobServer() as jobs:
        ...     record = jobs.run({"mechanism": "eager", "pass": 0, ...}, timeout_s=300)
    """

    def __init__(self, module: str = WORKER, paths: Sequence[Path] = ()) -> None:
        self._module = module
        self._paths = tuple(map(str, paths))
        """Folders that the module and its imports are in, beside those of PYTHONPATH."""
        self._server: subprocess.Popen[str] | None = None
        self._job: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="stepgraph-bench-")

    def __enter__(self) -> JobServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, request: Mapping[str, Any], timeout_s: float) -> Record:
        """Run one job; return the record that it wrote, or the `error` that it ended with."""
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            file = Path(folder) / "record.json"
            error = self._ended({**request, "file": str(file)}, folder, timeout_s)
            if file.exists():
                return dict(json.loads(file.read_text(encoding="utf-8")))
        return {"error": error[:300]}

    def _ended(self, request: Mapping[str, Any], folder: str, timeout_s: float) -> str:
        """Run a job to its end; return how it ended, in words."""
        server = self._started()
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(json.dumps({"request": request, "folder": folder, "timeout_s": timeout_s}) + "\n")
            server.stdin.flush()
        self._job = (self._reply() or {}).get("pid")
        end = self._reply() if self._job is not None else None
        if end is None:
            self._stop()
            return f"the server of jobs ended with {server.returncode}: {_last_line(self._log)}"
        self._job = None
        if end["timed_out"]:
            return f"no result within {timeout_s:.0f} s"
        return f"exit status {end['status']}: {_last_line(Path(folder) / STDERR)}"

    def _started(self) -> subprocess.Popen[str]:
        if self._server is not None and self._server.poll() is None:
            return self._server
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                own_program("stepgraph.lab.bench.server", self._module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                env=os.environ | self._variables(),
                start_new_session=True,
            )
        return self._server

    def _variables(self) -> dict[str, str]:
        known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths = {"PYTHONPATH": os.pathsep.join([*self._paths, *known])} if self._paths else {}
        return paths | {"OPENBLAS_NUM_THREADS": "1"}  # NumPy's threads begin with its import

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "server.txt"

    def _reply(self) -> Record | None:
        assert self._server is not None
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        return dict(json.loads(line)) if line else None

    def close(self) -> None:
        """End the server and the job that runs, if one does."""
        try:
            self._stop()
        finally:
            self._folder.cleanup()

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        job, self._job = self._job, None
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            with contextlib.suppress(OSError):
                server.stdin.close()  # the server ends its job, and then itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(2 * GRACE_S)
        finally:
            if server.poll() is None:
                end_group(server.pid, server.poll)
            server.stdout.close()
            if server.wait() < 0 and job is not None:  # it was killed, and its job goes on
                end_group(job, lambda: None)


def _last_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
