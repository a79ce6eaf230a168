"""The options of commands that run a script, and the parts of the runner that need no process."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from stepgraph.commands.advise import advise
from stepgraph.commands.base import CONTEXT_SETTINGS, AsJson, Command, ExitCode, Result
from stepgraph.commands.check import check
from stepgraph.commands.frozen import _result, frozen
from stepgraph.commands.script_options import command_on, takes_script
from stepgraph.commands.verify import verify
from stepgraph.core.errors import InvalidArgument, NoStepError, ScriptError
from stepgraph.tools.checks.step_operations import StepOperations
from stepgraph.tools.frozen_values.frozen_report import FrozenReport
from stepgraph.tools.script.child import script_traceback, warnings_at_own_lines
from stepgraph.tools.script.cuda_on_cpu import DeviceMode
from stepgraph.tools.script.files import FileWatch, WriteRefused
from stepgraph.tools.script.main_module import NamedStep
from stepgraph.tools.script.request import Answer, Outcome, Request, Script, Status, append
from stepgraph.tools.script.run import follows_a_stop, refuse_no_script, refuse_unjudged
from stepgraph.tools.script.steps import StepCalls, goes_back

runner = CliRunner()
app = typer.Typer(context_settings=CONTEXT_SETTINGS, pretty_exceptions_enable=False)


@app.command(cls=Command)
@takes_script
def look(wanted: Script, as_json: AsJson = False) -> Result:
    """Say what would be run."""
    if wanted.target == "fails.py":
        refuse_unjudged(wanted, Outcome(Status.FAILED, {}, 0, exception="Traceback:\n  ...\nValueError: mine"))
    if wanted.target == "none.py":
        refuse_unjudged(wanted, Outcome(Status.COMPLETED, {}, 0))
    return Result({"script": json.loads(Request(wanted, "", {}, "").to_json())["script"]}, str(wanted), "next")


@app.command()
def other() -> None:
    """Make `look` a command of a group."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py"], Script("train.py")),
        (
            ["train.py", "--", "--lr", "3", "-m", "x", "--a_b=c"],
            Script("train.py", ("--lr", "3", "-m", "x", "--a_b=c")),
        ),
        (["-m", "my_pkg.train_it"], Script("my_pkg.train_it", is_module=True)),
        (["-m", "pkg.train", "--", "a", "--", "-x"], Script("pkg.train", ("a", "--", "-x"), True)),
        (["--module=pkg"], Script("pkg", is_module=True)),
        (["train.py", "--no_write", "--timeout", "5"], Script("train.py", timeout=5.0, writes=False)),
        (["--step", "loop:Class.train_step", "train.py"], Script("train.py", step="loop:Class.train_step")),
    ],
)
def test_options_say_what_to_run(words: list[str], expected: Script) -> None:
    result = runner.invoke(app, ["look", *words, "--json"] if "--" not in words else ["look", "--json", *words])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)["script"]
    assert Script(**{**shown, "args": tuple(shown["args"])}) == expected


@pytest.mark.parametrize("command", [check, advise, verify, frozen])
def test_commands_on_scripts_have_the_same_options(command: Callable[..., Result]) -> None:
    shared = [p for p in inspect.signature(look).parameters.values() if p.name != "as_json"]
    names = [p.name for p in shared]
    assert names == ["script", "args", "module", "step", "no_write", "script_timeout"]
    assert [p for p in inspect.signature(command).parameters.values() if p.name in names] == shared


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "name a script, or a module with -m NAME"),
        (["train.py", "-gq"], "No such option: -gq"),
        (["train.py", "--no-writes"], "No such option"),
        (["train.py", "--timeout", "0"], "0.001"),
    ],
)
def test_wrong_usage_is_answered(words: list[str], text: str) -> None:
    result = runner.invoke(app, ["look", *words], env={"COLUMNS": "200"})
    assert result.exit_code == ExitCode.USAGE
    assert text in result.output


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [("fails.py", ExitCode.SCRIPT, "ValueError: mine"), ("none.py", ExitCode.FINDINGS, "[no-step]")],
)
def test_scripts_that_show_nothing_have_their_exit_codes(script: str, code: int, text: str) -> None:
    result = runner.invoke(app, ["look", script])
    assert result.exit_code == code
    assert text in result.stderr


def test_other_ranks_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for script, code in (("fails.py", ExitCode.SCRIPT), ("none.py", ExitCode.FINDINGS), ("train.py", ExitCode.OK)):
        result = runner.invoke(app, ["look", script, "--json"])
        assert (result.exit_code, result.output) == (code, "")


def test_traceback_has_the_scripts_frames_only() -> None:
    def failing(call: Any) -> str:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (any)
            return script_traceback(error)
        raise AssertionError

    calls = StepCalls(Silent())
    text = failing(calls.wrapped(lambda: 1 / 0))
    assert "ZeroDivisionError" in text
    assert "steps.py" not in text
    assert "steps.py" in failing(lambda: goes_back(3, ()))  # type: ignore[arg-type]
    with DeviceMode(lambda name: None):
        text = failing(lambda: torch.ones(2) @ torch.ones(3))
    assert "cuda_on_cpu.py" not in text, "it only passes calls on"
    with StepOperations(lambda *_: None, lambda *_: None, contextlib.nullcontext).watching():
        text = failing(lambda: torch.nn.functional.linear(torch.ones(2, 5), torch.ones(4, 4)))
    assert "mat1 and mat2 shapes cannot be multiplied" in text
    for name in ("step_operations.py", "_compile.py", "eval_frame.py", "_ops.py"):
        assert name not in text


def test_traceback_keeps_torch_frames_that_lead_to_none_of_ours() -> None:
    def failing() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        torch._dynamo.disable(failing)()
    assert "eval_frame.py" in script_traceback(caught.value)


def test_warning_names_the_line_of_the_script() -> None:
    code = compile("warn()", "train.py", "exec")
    shown: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", lambda message, category, file, line, *_: shown.append((file, line)))
        with warnings_at_own_lines():
            for file in (inspect.getfile(StepOperations), "other.py"):
                exec(code, {"warn": functools.partial(warnings.showwarning, "text", UserWarning, file, 9)})
    assert shown == [("train.py", 1), ("other.py", 9)]


def test_options_of_the_script_go_after_two_dashes() -> None:
    result = runner.invoke(app, ["look", "train.py", "--epochs", "3"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == ExitCode.USAGE
    assert "go after --: stepgraph look SCRIPT -- --epochs 3." in " ".join(result.output.split())


def test_step_that_the_script_does_not_define_is_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("class Trainer:\n    def step(self): ...\n")
    for name in ("Trainer.step", "other:step"):
        assert runner.invoke(app, ["look", str(path), "--step", name]).exit_code == ExitCode.OK
    result = runner.invoke(app, ["look", str(path), "--step", "nothing"])
    assert result.exit_code == ExitCode.USAGE
    assert "has no function nothing   [step-name]" in result.output


def test_next_command_of_frozen_keeps_the_step() -> None:
    report = FrozenReport("kd_step", "tape", (), 1, "operations")
    outcome = Outcome(Status.STOPPED, {"reports": [report.to_dict()]}, 5)
    found = _result(Script("train.py", ("--lr", "1"), step="kd_step"), outcome)
    assert found.next == "stepgraph verify train.py --step kd_step -- --lr 1"


def test_command_on_a_script_keeps_arguments_last() -> None:
    module = Script("package.train", ("--lr", "0.1 0.2"), is_module=True)
    assert command_on("verify", module, "--step", "f") == "stepgraph verify -m package.train --step f -- --lr '0.1 0.2'"
    assert command_on("check", Script("train.py")) == "stepgraph check train.py"


class Silent:
    def step_begins(self, index: int) -> None: ...

    def step_reaches(self, index: int) -> None: ...

    def step_ends(self, index: int) -> None: ...


def test_outcomes_without_a_judgement_are_refused() -> None:
    script = Script("train.py", timeout=7)
    for status, error in ((Status.FAILED, ScriptError), (Status.TIMED_OUT, ScriptError), (Status.STOPPED, NoStepError)):
        with pytest.raises(error, match=r"train\.py"):
            refuse_unjudged(script, Outcome(status, {}, 0))
    refuse_unjudged(script, Outcome(Status.COMPLETED, {}, 1))
    refuse_unjudged(script, Outcome(Status.STOPPED, {}, 0, cannot_judge=("torch.cuda.graph needs a GPU",)))


def test_request_is_read_as_it_was_written() -> None:
    request = Request(Script("a.py", ("x",), step="f"), "m:C", {"steps": 3}, "/tmp/answer")
    assert Request.from_json(request.to_json()) == request


def test_answer_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "answer"
    assert Answer.read(file).end is None
    append(str(file), "steps", 2)
    append(str(file), "note", "twice")
    append(str(file), "note", "twice")
    with file.open("a") as stream:
        stream.write('["end", {"sta')
    found = Answer.read(file)
    assert (found.steps, found.notes, found.end) == (2, ["twice"], None)


SOURCE = """
def step(): return 1
class Trainer:
    @staticmethod
    def made(): return 2
    if True:
        def step(self): return 3
try:
    def inner(): return 4
finally:
    pass
"""


@pytest.mark.parametrize(
    ("name", "call", "value"),
    [
        ("step", "step()", 1),
        ("Trainer.made", "Trainer.made()", 2),
        ("Trainer.step", "Trainer().step()", 3),
        ("__main__:inner", "inner()", 4),
    ],
)
def test_named_function_is_wrapped_where_it_is_defined(name: str, call: str, value: int) -> None:
    calls = []

    def wrap(function: Any) -> Any:
        def called(*args: Any) -> Any:
            calls.append(function.__name__)
            return function(*args)

        return called

    step = NamedStep(name, wrap)
    tree = ast.parse(SOURCE)
    step.mark(tree, "script.py")
    names: dict[str, Any] = {"__stepgraph_step__": wrap}
    exec(compile(tree, "script.py", "exec"), names)
    assert eval(call, names) == value
    assert calls == [name.rpartition(":")[2].rpartition(".")[2]]


def test_named_function_that_is_missing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"script.py has no function Trainer\.train   \[step-name\]"):
        NamedStep("Trainer.train", lambda function: function).mark(ast.parse(SOURCE), "script.py")


def watch(refuses: bool = False) -> tuple[FileWatch, list[str]]:
    seen: list[str] = []
    files = FileWatch(lambda path, refused: seen.append(path), "/own", refuses=refuses)
    files._is_on = True
    return files, seen


@pytest.mark.parametrize(
    ("event", "args", "num_listed"),
    [
        ("open", ("/x/log", "w", os.O_WRONLY | os.O_CREAT), 1),
        ("open", ("/x/log", "r+", os.O_RDWR), 1),
        ("open", (b"/x/log", "a", os.O_APPEND | os.O_WRONLY), 1),
        ("open", ("/x/log", "r", os.O_RDONLY | os.O_CLOEXEC), 0),
        ("open", (3, "w", os.O_WRONLY), 0),
        ("open", ("/dev/null", "w", os.O_WRONLY), 0),
        ("open", ("/own/answer", "a", os.O_WRONLY), 0),
        ("open", ("/x/__pycache__/a.pyc", None, os.O_WRONLY), 0),
        ("os.mkdir", ("/x", 0o777, -1), 1),
        ("os.mkdir", (os.path.dirname(sys.executable), 0o777, -1), 0),
        ("os.rename", ("/a", "/x", -1, -1), 2),
        ("os.rename", ("/own/a", "/x", -1, -1), 1),
        ("os.chmod", ("/x", 0, -1), 1),
        ("os.utime", ("/x", None, None, -1), 1),
        ("os.link", ("/a", "/x", -1, -1), 1),
        ("os.remove", ("/x", -1), 1),
        ("import", ("os", None, None, None, None), 0),
    ],
)
def test_audit_events_that_write_are_listed(event: str, args: tuple[Any, ...], num_listed: int) -> None:
    files, seen = watch()
    files._hook(event, args)
    files._hook(event, args)
    assert len(seen) == num_listed


def test_files_of_tempfile_do_not_count() -> None:
    files, seen = watch()
    files._hook("tempfile.mkdtemp", ("/x/tmpa",))
    files._hook("os.mkdir", ("/x/tmpa", 0o700, -1))
    files._hook("open", ("/x/tmpa/socket", "w", os.O_WRONLY))
    assert seen == []


def test_refused_files_raise_a_permission_error() -> None:
    files, seen = watch(refuses=True)
    with pytest.raises(WriteRefused, match="no-write") as caught:
        files._hook("open", ("/x/log", "w", os.O_WRONLY))
    assert isinstance(caught.value, PermissionError)
    assert seen == ["/x/log"]


def test_rank_that_fails_after_a_stopped_one_does_not_count() -> None:
    """The others of a script that is stopped because it graphs nothing lose their peer."""
    stopped = {"status": Status.STOPPED, "cannot_judge": ["it graphs nothing"], "ended_at": 1.0}
    judged = {**stopped, "cannot_judge": []}
    failed = {"status": Status.FAILED, "cannot_judge": [], "ended_at": 2.0}
    assert follows_a_stop(failed, [stopped, failed])
    assert not follows_a_stop(failed, [judged, failed])
    assert not follows_a_stop({**failed, "ended_at": 0.5}, [stopped, failed])
    assert not follows_a_stop(stopped, [stopped, failed])


def test_script_in_a_deleted_working_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, gone = tmp_path / "script.py", tmp_path / "gone"
    script.write_text("")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidArgument, match="the working folder does not exist any more"):
        refuse_no_script(Script(str(script)))
