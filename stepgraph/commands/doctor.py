"""`stepgraph doctor`: the installation in a terminal."""

from __future__ import annotations

import dataclasses

from stepgraph.commands.base import AsJson, ExitCode, Result, Timeout


def doctor(as_json: AsJson = False, timeout: Timeout = None) -> Result:
    """Look at versions, GPU, allocator, variables and optional parts, as text for a bug report without secrets."""
    from rich.text import Text

    from stepgraph.tools.doctor import doctor as look

    report = look()
    code = ExitCode.OK if report.ok else ExitCode.FINDINGS
    broken = report.broken_rules
    following = f"stepgraph explain {broken[0].rule}" if broken else "stepgraph demo"
    values = {"ok": report.ok, **dataclasses.asdict(report)}
    return Result(values, Text(str(report), overflow="fold"), next=following, exit_code=code)
