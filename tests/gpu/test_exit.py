"""How a process with live CUDA graphs ends: the right exit code, no hang. NCCL lets no communicator go before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exiting import code_of, end_of

pytestmark = pytest.mark.gpu

ENDINGS = ("plain", "exit", "error", "interrupt", "interrupt in capture")


@pytest.mark.parametrize("ending", ENDINGS)
def test_process_with_graphs_ends_with_its_code(ending: str) -> None:
    done = end_of("cuda", ending)
    assert done.returncode == code_of(ending, "cuda"), done.stderr
    assert done.stdout.split() == (["trained", "ended"] if ending == "plain" else ["trained"])
    assert done.stderr.count("Traceback") == (ending not in ("plain", "exit")), done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("ending", ["plain", "destroy", "destroy at exit", "close and destroy"])
def test_process_with_graphs_that_hold_communicators_ends(ending: str, tmp_path: Path) -> None:
    done = end_of("cuda", ending, str(tmp_path / "store"))
    assert (done.returncode, done.stdout.split()) == (0, ["trained", "ended"]), done.stderr


@pytest.mark.parametrize("ending", ["exit", "error", "interrupt"])
def test_process_with_communicators_keeps_its_code_if_cut_short(ending: str, tmp_path: Path) -> None:
    done = end_of("cuda", ending, str(tmp_path / "store"))
    assert (done.returncode, done.stdout.split()) == (code_of(ending, "cuda"), ["trained"]), done.stderr
