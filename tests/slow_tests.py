"""The tests that take long for what they add, by measurement: `make test` leaves them to `make test-slow`.

`tests/slow_tests.txt` has their names. `make time-tests` runs the fast suites on a quiet machine and writes it again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

SLOW_S = 0.2
"""A test that takes longer is slow."""
FILE = Path(__file__).with_suffix(".txt")


class SlowTests:
    """A plugin of pytest that adds up what each test takes, and writes the names of the slow ones."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.split("@")[0]] += report.duration  # xdist adds the group

    def pytest_sessionfinish(self) -> None:
        slow = sorted(name for name, seconds in self._seconds.items() if seconds >= SLOW_S)
        FILE.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")

    @staticmethod
    def read() -> frozenset[str]:
        """The names of the slow tests."""
        return frozenset(FILE.read_text(encoding="utf-8").splitlines()) if FILE.exists() else frozenset()
