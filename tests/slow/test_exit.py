"""How a process with live graphs ends: the right exit code, nothing on stderr that is not the user's, no hang."""

from __future__ import annotations

import pytest

from tests.exiting import code_of_an_interrupt, end_of


@pytest.mark.usefixtures("new_processes")
def test_plain_end_without_close_is_clean() -> None:
    done = end_of("cpu", "plain")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["trained", "ended"], "")


def test_sys_exit_in_the_loop_keeps_its_code() -> None:
    done = end_of("cpu", "exit")
    assert (done.returncode, done.stdout.split(), done.stderr) == (3, ["trained"], "")


def test_uncaught_error_is_the_users() -> None:
    done = end_of("cpu", "error")
    assert (done.returncode, done.stdout.split()) == (1, ["trained"])
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("ValueError: the user's own error")


@pytest.mark.parametrize("ending", ["interrupt", "interrupt in capture"])
def test_interrupt_ends_the_process_as_python_does(ending: str) -> None:
    done = end_of("cpu", ending)
    assert (done.returncode, done.stdout.split()) == (code_of_an_interrupt(), ["trained"])
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "ignored" not in done.stderr
