"""Runs `check` on scripts within the test's own process, one after another: starting a process costs seconds.

A script says itself what is to be found: a line that ends in `# finds: RULE, RULE` is to be reported under these rules,
and no other line.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.tools.checks.check import PROBE, CheckReport, report_of
from stepgraph.tools.script import child
from stepgraph.tools.script.request import Answer, Outcome, Request, Script
from stepgraph.tools.script.run import _outcome

_MARK = re.compile(r"#\s*finds:\s*([\w, -]+)$")


def expected_in(source: str) -> set[tuple[int, str]]:
    """The lines and rules that a script says are to be found in it."""
    marks = ((number, _MARK.search(line)) for number, line in enumerate(source.splitlines(), 1))
    return {(number, rule.strip()) for number, mark in marks if mark for rule in mark[1].split(",")}


def found_by(report: CheckReport) -> set[tuple[int, str]]:
    """The lines and rules of a report's findings."""
    return {(finding.where.line if finding.where is not None else 0, finding.rule) for finding in report.findings}


def check_here(path: Path, folder: Path, steps: int = 6, *, captures: bool = False) -> CheckReport:
    """Check a script in this process. It runs as it would in its own, except for what earlier ones have loaded."""
    return report_of(str(path), run_here(path, folder, PROBE, {"steps": steps, "captures": captures}))


def run_here(path: Path, folder: Path, probe: str, options: Mapping[str, Any]) -> Outcome:
    """Run a script with a probe in this process."""
    answer, request = folder / "answer.jsonl", folder / "request.json"
    answer.unlink(missing_ok=True)
    request.write_text(Request(Script(str(path)), probe, options, str(answer)).to_json())
    with _as_it_was(), _removable_audit_hooks(), contextlib.redirect_stdout(io.StringIO()):
        child.carry_out(str(request))
    gc.collect()
    return _outcome(Answer.read(answer), False, 0)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    main, argv, paths = sys.modules["__main__"], list(sys.argv), list(sys.path)
    state = torch.get_rng_state()
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv[:], sys.path[:] = main, argv, paths
        torch.set_rng_state(state)


_AUDITING: list[Callable[[str, tuple[Any, ...]], None]] = []


_HOOK = compile("lambda event, args: [each(event, args) for each in hooks]", "<audit hooks>", "eval")
"""In no file, so that it is not taken for the user's code."""


@functools.cache
def _install() -> None:
    sys.addaudithook(eval(_HOOK, {"hooks": _AUDITING}))


@contextlib.contextmanager
def _removable_audit_hooks() -> Iterator[None]:
    """Python keeps audit hooks for good and calls each for every frame that is asked for: scripts share one here."""
    _install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "addaudithook", _AUDITING.append)
        try:
            yield
        finally:
            _AUDITING.clear()
