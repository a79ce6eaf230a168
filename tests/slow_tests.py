"""The processor time of tests, and the tests of the fast suites that `make test` leaves to `make test-slow`.

`tests/slow_tests.txt` has their names. `make time-tests` runs the fast suites and writes it again. What counts is the
time of the processor, that of the processes which a test starts included: unlike the time on the clock it depends
little on what else the machine does.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

SLOW_S = 0.2
"""A test that takes more processor time is slow."""
FILE = Path(__file__).with_suffix(".txt")


class CpuTimes:
    """In a process that runs tests: notes on each report what its phase took."""

    def __init__(self) -> None:
        self._before = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _cpu_seconds()
        report.cpu_s, self._before = now - self._before, now  # type: ignore[attr-defined]
        return report


class SlowTests:
    """In the process that reports: adds up what each test takes, lists files, and writes the names of the slow ones."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.split("@")[0]] += report.cpu_s  # type: ignore[attr-defined]  # xdist adds the group

    def pytest_sessionfinish(self) -> None:
        if self._writes:
            slow = sorted(name for name, seconds in self._seconds.items() if seconds >= SLOW_S)
            FILE.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: Counter[str] = Counter()
        for name, seconds in self._seconds.items():
            files[name.partition("::")[0]] += seconds
        terminalreporter.section("processor time, in seconds")
        for name, seconds in [*files.most_common(), ("all", files.total())]:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")

    @staticmethod
    def read() -> frozenset[str]:
        """The names of the slow tests."""
        return frozenset(FILE.read_text(encoding="utf-8").splitlines()) if FILE.exists() else frozenset()


def _cpu_seconds() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
