"""Programs that are forks of the server find what Python would have given to them, and end as any process does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import NESTED, NONE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="a fork is adopted on Linux only"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU no program is a fork"),
]
FACTS = """
import json, os, sys
names = ("__name__", "__file__", "__package__", "__doc__")
facts = {name: globals().get(name) for name in names} | {"argv": sys.argv, "folder": os.getcwd()}
facts["path"], facts["parent"] = sys.path, os.getppid()
facts["is_main"], facts["leads"] = sys.modules["__main__"].__dict__ is globals(), os.getsid(0) == os.getpid()
print(json.dumps(facts | {"mine": os.environ.get("MINE"), "stdin": sys.stdin.read()}))
print("forked", "torch" in sys.modules, file=sys.stderr)
"""


def told(words: list[str], folder: Path, more: dict[str, str]) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, *words, "--lr", "3"],
        input="given",
        env=os.environ | {"MINE": "here", "PYTHONPATH": "/no/such"} | more,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    "words", [["folder/train.py"], ["-m", "folder.train"], ["-c", FACTS]], ids=["file", "-m", "-c"]
)
def test_fork_finds_what_a_new_process_finds(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.py").write_text(FACTS)
    forked, said = told(words, tmp_path, {})
    assert said == "forked True\n"
    new, said = told(words, tmp_path, NONE)
    assert said == "forked False\n"
    assert forked == new
    assert (forked["parent"], forked["leads"], forked["stdin"]) == (os.getpid(), True, "given")


def ended(program: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False)


def test_fork_ends_as_a_process_does() -> None:
    assert ended("import atexit; atexit.register(print, 'last'); raise SystemExit(3)").returncode == 3
    failed = ended("import atexit\natexit.register(print, 'last')\ndef f():\n    raise KeyError('mine')\nf()")
    assert (failed.returncode, failed.stdout) == (1, "last\n")
    frames = ['File "<string>", line 5, in <module>', 'File "<string>", line 4, in f']
    assert [line.strip() for line in failed.stderr.splitlines()[1:3]] == frames
    assert failed.stderr.splitlines()[-1] == "KeyError: 'mine'"


def test_fork_takes_signals() -> None:
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1000)"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            process.send_signal(number)
        assert process.returncode == -number


def test_fork_may_have_forks_of_its_own() -> None:
    inner = "import os, sys; print('torch' in sys.modules, os.getppid()); sys.exit(5)"
    program = (
        "import os, subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-c', {inner!r}], capture_output=True, text=True)\n"
        "print(done.stdout.split() == [str('torch' in sys.modules), str(os.getpid())], done.returncode)"
    )
    assert ended(program, **NESTED).stdout == "True 5\n"
