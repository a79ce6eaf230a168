"""What a run says while it goes: a line of JSON for each iteration, a progress bar, TensorBoard where installed.

Only the first rank writes. The JSONL file, `stepgraph-train.jsonl` in `logger.log_dir`, has rows of several kinds:

    {"kind": "start", "step": 0, "run": "20260301T101500-4711", ...}  {"kind": "train", "step": 1, "loss": 5.2, ...}
    {"kind": "eval", ...}  {"kind": "capture", ...}  {"kind": "checkpoint", ...}  {"kind": "end", ...}

A run appends to the file, whatever is there: nothing of an earlier run is lost. All rows of a run have its `run`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import counted
from stepgraph.lab.train.ranks import Ranks

FILE_NAME = "stepgraph-train.jsonl"


class Journal:
    """Writes the rows of a run. On other ranks than the first it says only what concerns that rank."""

    def __init__(self, logger: Any, *, rank: int, size: int, start: int, last: int, quiet: bool = False) -> None:
        self._rank, self._size, self._quiet = rank, size, quiet
        self._interval = max(1, logger.log_interval)
        self._file: TextIO | None = None
        self._board: Any = None
        self._progress: Progress | None = None
        self._task: Any = None
        if rank != 0:
            return
        self.path = _file_in(logger)
        self._run = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 1000:03d}"
        self._file = self.path.open("a", encoding="utf-8")
        if logger.tensorboard_dir and importlib.util.find_spec("tensorboard") is not None:
            self._board = importlib.import_module("torch.utils.tensorboard").SummaryWriter(logger.tensorboard_dir)
        if logger.log_progress and not quiet and sys.stderr.isatty():
            self._progress = Progress(
                *(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=last, completed=start)
            self._progress.start()

    def say(self, text: str) -> None:
        """Print a line, with the rank if there are several."""
        if self._quiet:
            return
        line = f"rank {self._rank}: {text}" if self._size > 1 else text
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write a row of the JSONL file; numbers that JSON does not have become null."""
        if self._file is not None:
            row = {"kind": kind, "step": step, "run": self._run} | {
                name: _finite(value) for name, value in values.items()
            }
            self._append(json.dumps(row) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def _append(self, line: str) -> None:
        """Write a line. A full device ends the file, and not the run, whose checkpoints may be elsewhere."""
        assert self._file is not None
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # what could not be written is tried again
                file.close()
            self.say(f"{self.path} ends here, training goes on: {error}")

    def train_row(
        self, step: int, *, loss: float, lr: float, step_ms: float, tokens_per_s: float, replays: int
    ) -> None:
        """Write a training iteration, and show it."""
        self.write(
            "train",
            step,
            loss=loss,
            lr=lr,
            step_ms=round(step_ms, 3),
            tokens_per_s=round(tokens_per_s),
            replays=replays,
        )
        text = f"loss {loss:.4f}  {step_ms:.1f} ms  {tokens_per_s:,.0f} tokens/s  {counted(replays, 'replays')}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        elif self._rank == 0 and step % self._interval == 0:
            self.say(f"step {step}  {text}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._file is not None:
            self._file.close()
            self._file = None


def refuse_unwritable_log(logger: Any, ranks: Ranks) -> None:
    """Try the folders of the rows, on the first rank, before the run; every rank must call it, and all raise."""
    error: OSError | None = None
    if ranks.is_first:
        try:
            _file_in(logger).open("a", encoding="utf-8").close()
            if logger.tensorboard_dir:
                Path(logger.tensorboard_dir).mkdir(parents=True, exist_ok=True)
        except OSError as found:
            error = found
    if ranks.largest(int(error is not None)):
        raise InvalidArgument(
            f"the rows of the run cannot be written: {error or 'the first rank failed'}",
            rule="log-file",
        ) from error


def _file_in(logger: Any) -> Path:
    folder = Path(logger.log_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / FILE_NAME


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
