"""`run_script` runs a user's script in a process group of its own, with a probe inside it, and returns the `Outcome`.

The parent knows of time and signals only. The script, the processes that it starts (workers of data loaders, ranks) and
what they start end together: when the script has ended, at the time limit, or when the parent is interrupted. They are
asked by SIGTERM first, and killed after five seconds. Imports no torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepgraph.core.errors import InvalidArgument, NoStepError, ScriptError
from stepgraph.tools.script.files import CACHES
from stepgraph.tools.script.processes import GRACE_S, end_group, own_program
from stepgraph.tools.script.ranks import exchanged, meeting, rank
from stepgraph.tools.script.request import Answer, Outcome, Request, Script, Status, WrittenFile

__all__ = [
    "Outcome",
    "Script",
    "Status",
    "WrittenFile",
    "follows_a_stop",
    "refuse_no_script",
    "refuse_unjudged",
    "run_script",
    "timed_out",
]

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
_SEVERITY = (Status.COMPLETED, Status.STOPPED, Status.TIMED_OUT, Status.FAILED)


def run_script(
    script: Script, probe: str, options: Mapping[str, Any] | None = None, *, stdout_to_stderr: bool = False
) -> Outcome:
    """Run a script with the probe `package.module:Class`, which is given the options.

    Under torchrun all ranks return the worst status of any of them, and all that could not be judged.

    Args:
        script: What to run.
        probe: The class to make in the script's process, called with the `RunningScript`.
        options: Plain values for the probe.
        stdout_to_stderr: Keep stdout free of what the script prints (`--json`).
    """
    refuse_no_script(script)
    with tempfile.TemporaryDirectory(prefix="stepgraph-") as folder:
        answer, file = Path(folder, "answer.jsonl"), Path(folder, "request.json")
        file.write_text(Request(script, probe, options or {}, str(answer)).to_json(), encoding="utf-8")
        process = subprocess.Popen(
            own_program("stepgraph.tools.script.child", str(file)),
            stdout=2 if stdout_to_stderr else None,
            env=os.environ | OFFLINE | _caches(script, folder) | meeting(script.timeout),
            start_new_session=True,
        )
        try:
            timed_out = not _waited(process, answer, script.timeout)
        finally:
            end_group(process.pid, process.poll)
            process.wait()
        found = Answer.read(answer)
    refusal = (found.end or {}).get("refusal")
    if refusal is not None:
        what, rule = refusal["what"], refusal["rule"]
        raise InvalidArgument(what, rule=rule)
    ended_at = float((found.end or {}).get("time", time.time()))
    return _agreed(_outcome(found, timed_out, process.returncode), ended_at, script.timeout)


def refuse_unjudged(script: Script, outcome: Outcome) -> None:
    """Raise a `ScriptError` if there is nothing to judge: the script failed, had no time, or has no step.

    If something needs a GPU, or else cannot be judged, there is no error: the command says so, and exits with 1.
    """
    if outcome.status is Status.FAILED:
        lines = outcome.exception.splitlines()
        raise ScriptError(f"{script}: the script failed", rule="script-failed", details=lines)
    if outcome.status is Status.TIMED_OUT:
        raise timed_out(script, outcome)
    if not outcome.steps and not outcome.cannot_judge:
        raise NoStepError(f"{script}: no training step was seen", rule="no-step")


def timed_out(script: Script, outcome: Outcome) -> ScriptError:
    """The error for a script that was ended at its time limit, with what was seen until then."""
    what = f"{script}: the script was ended after {script.timeout:g} s, as --timeout says"
    details = [f"steps seen until then: {outcome.steps}"]
    details += [f"seen until then: {one}" for one in outcome.seen]
    details += ["it caught the exception that was to stop it"] if outcome.was_stopped else []
    return ScriptError(what, rule="script-timeout", details=details)


def refuse_no_script(script: Script) -> None:
    """Raise if there is no such script, or Python cannot read it: at once, before torch is imported."""
    try:
        os.getcwd()
    except OSError:
        raise InvalidArgument(
            "the working folder does not exist any more",
            rule="script-missing",
            why="Python and the libraries that it loads look for files there, so no script starts in it.",
            fix="change to a folder that exists (cd ~), and name the script by its whole path.",
        ) from None
    if script.is_module:
        _refuse_no_module(script.target)
        return
    path = Path(script.target)
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder, not a script", rule="script-missing")
    if not path.exists():
        raise InvalidArgument(f"there is no file {path}", rule="script-missing")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}", rule="script-missing") from None
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        if path.suffix != ".py" or b"\0" in source:
            raise InvalidArgument(f"{path} is not a Python file", rule="script-missing") from None
        place = f"{path}:{getattr(error, 'lineno', 1)}"
        details = [f"at    {place}", f"{type(error).__name__}: {getattr(error, 'msg', error)}"]
        raise ScriptError(f"{script}: Python cannot read the script", rule="script-failed", details=details) from None


def _refuse_no_module(name: str) -> None:
    """Only what can be told without running code: the packages above a module run when it is looked for."""
    root = name.partition(".")[0]
    if root in sys.modules or (root and importlib.machinery.PathFinder.find_spec(root, [os.getcwd()]) is not None):
        return
    if not root or importlib.util.find_spec(root) is None:
        raise InvalidArgument(f"-m {name}: Python finds no module of that name", rule="script-missing")


def _caches(script: Script, folder: str) -> dict[str, str]:
    """Where torch keeps what it compiles: with `--no-write`, in the folder of this run, which is deleted after it."""
    return {} if script.writes else {name: os.path.join(folder, name.lower()) for name in CACHES}


def _waited(process: subprocess.Popen[bytes], answer: Path, timeout: float) -> bool:
    """Wait until the process has ended; return False if its time is over."""
    until, has_ended = time.monotonic() + timeout, False
    while time.monotonic() < until:
        try:
            process.wait(min(0.2, max(0.01, until - time.monotonic())))
            return True
        except subprocess.TimeoutExpired:
            if not has_ended and Answer.read(answer).end is not None:
                has_ended, until = True, time.monotonic() + EXIT_S
    return has_ended


def _outcome(answer: Answer, timed_out: bool, code: int) -> Outcome:
    end = answer.end or {}
    status, text = Status(end.get("status", Status.FAILED)), str(end.get("exception", ""))
    if timed_out:
        status = Status.TIMED_OUT
    elif answer.end is None and answer.was_stopped:
        status = Status.STOPPED
        text = _end_of_process(code)
    elif answer.end is None:
        text = _end_of_process(code)
    return Outcome(
        status,
        end.get("result", {}),
        answer.steps,
        tuple(answer.cannot_judge),
        tuple(answer.notes),
        tuple(answer.files),
        text,
        answer.was_stopped,
        rank(),
        tuple(answer.seen),
    )


def _end_of_process(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process exited with {code}, without a way for Python to report"


def follows_a_stop(one: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rank has failed after another one was stopped because it cannot be judged: it may be why."""
    stops = [other["ended_at"] for other in ranks if other["status"] == Status.STOPPED and other["cannot_judge"]]
    return one["status"] == Status.FAILED and any(ended_at <= one["ended_at"] for ended_at in stops)


def _agreed(outcome: Outcome, ended_at: float, timeout: float) -> Outcome:
    """What all ranks say together; without torchrun the outcome as it is.

    Of several ranks that failed, the first one is shown: the others may have failed because it was gone.
    """
    own = {
        "ended_at": ended_at,
        "rank": outcome.rank,
        "status": outcome.status,
        "exception": outcome.exception,
        "cannot_judge": outcome.cannot_judge,
        "steps": outcome.steps,
    }
    others = exchanged(own, timeout + 2 * GRACE_S)
    if len(others) == 1:
        return outcome
    others = [one | {"status": Status.STOPPED} if follows_a_stop(one, others) else one for one in others]
    worst = max(others, key=lambda one: (_SEVERITY.index(Status(one["status"])), -one["ended_at"]))
    text = f"rank {worst['rank']}: {worst['exception']}" if worst["exception"] else ""
    judged = tuple(dict.fromkeys(what for one in others for what in one["cannot_judge"]))
    steps = min(one["steps"] for one in others)
    return replace(outcome, status=Status(worst["status"]), exception=text, cannot_judge=judged, steps=steps)
