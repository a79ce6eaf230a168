"""The public API as a type checker sees it: mypy accepts every real use and refuses the mistakes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import NONE

USES = Path(__file__).with_name("typed_uses.py")


@pytest.mark.timeout(600)  # without a cache mypy reads all of torch first
def test_mypy_refuses_wrong_uses_and_no_others() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(USES)]
    done = subprocess.run(
        command, cwd=USES.parents[2], capture_output=True, text=True, check=False, env=os.environ | NONE
    )
    assert done.returncode in (0, 1), done.stderr
    found = {int(line) for line in re.findall(rf"{USES.name}:(\d+): error", done.stdout)}
    expected = {n for n, line in enumerate(USES.read_text().splitlines(), 1) if line.endswith("# refused")}
    assert len(expected) > 30
    assert found == expected, done.stdout
