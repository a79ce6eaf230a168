"""`run_script` runs a user's script in a process group of its own, with a probe inside it, and returns the `Outcome`.

The parent knows of time and signals only. The script, the processes that it starts (workers of data loaders, ranks) and
what they start end together: when the script has ended, at the time limit, or when the parent is interrupted. They are
asked by SIGTERM first, and killed after five seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepgraph.script.request import Answer, Outcome, Request, Script, Status, WrittenFile

__all__ = ["Outcome", "Script", "Status", "WrittenFile", "run_script"]

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
EXIT_S = 10.0
"""Seconds for the process to exit once the script has ended and the result is there."""
OFFLINE = MappingProxyType(
    {
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "COMET_MODE": "disabled",
        "NEPTUNE_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "DO_NOT_TRACK": "1",
    }
)
"""What the script's environment says to libraries that would use the network."""


def run_script(
    script: Script, probe: str, options: Mapping[str, Any] | None = None, *, stdout_to_stderr: bool = False
) -> Outcome:
    """Run a script with the probe `package.module:Class`, which is given the options.

    Args:
        script: What to run.
        probe: The class to make in the script's process, called with the `RunningScript`.
        options: Plain values for the probe.
        stdout_to_stderr: Keep stdout free of what the script prints (`--json`).
    """
    with tempfile.TemporaryDirectory(prefix="stepgraph-") as folder:
        answer, file = Path(folder, "answer.jsonl"), Path(folder, "request.json")
        file.write_text(Request(script, probe, options or {}, str(answer)).to_json(), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "stepgraph.script.child", str(file)],
            stdout=2 if stdout_to_stderr else None,
            env=os.environ | OFFLINE,
            start_new_session=True,
        )
        try:
            timed_out = not _waited(process, answer, script.timeout)
        finally:
            _end_group(process)
        return _outcome(Answer.read(answer), timed_out, process.returncode)


def _waited(process: subprocess.Popen[bytes], answer: Path, timeout: float) -> bool:
    """Wait until the process has ended; return False if its time is over."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        try:
            process.wait(min(0.2, max(0.01, until - time.monotonic())))
            return True
        except subprocess.TimeoutExpired:
            if _has_ended(answer):
                until = min(until, time.monotonic() + EXIT_S)
    return _has_ended(answer)


def _has_ended(answer: Path) -> bool:
    return Answer.read(answer).end is not None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the group; kill those that are left after some seconds."""
    try:
        _signal_group(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while _is_group_alive(process) and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _is_group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # a process that nobody has waited for still counts
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _outcome(answer: Answer, timed_out: bool, code: int) -> Outcome:
    end = answer.end or {}
    status, text = Status(end.get("status", Status.FAILED)), str(end.get("exception", ""))
    if timed_out:
        status = Status.TIMED_OUT
    elif answer.end is None:
        text = (
            f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process exited with {code}"
        )
    return Outcome(
        status,
        end.get("result", {}),
        answer.steps,
        tuple(answer.cannot_judge),
        tuple(answer.notes),
        tuple(answer.files),
        text,
        rank=int(os.environ.get("RANK", "0")),
    )
