"""The deciding parts of `stepgraph check`, without a script: what is inside a step, which API fits, which line."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stepgraph.commands.base import Result, _for_people
from stepgraph.commands.check import render
from stepgraph.core.catalogue import entry
from stepgraph.core.errors import Location
from stepgraph.engine.oplog import Log, OpLog, StandingMode, Vocabulary, current_log, differences
from stepgraph.tools.checks.check import CheckReport, report_of
from stepgraph.tools.checks.check_probe import plain_seen
from stepgraph.tools.checks.findings import GROUPS, Api, Ledger, Seen, StepShape, collect, judge
from stepgraph.tools.checks.places import is_own_code, package_of
from stepgraph.tools.checks.script_objects import clean_parts
from stepgraph.tools.checks.step_functions import StepFunctions, first_statement
from stepgraph.tools.checks.step_history import branch_of, changes
from stepgraph.tools.checks.step_state import line_of_use, read_first
from stepgraph.tools.script.request import Outcome, Status

HERE = Location("train.py", 7, "train_step")


def seen(rule: str = "host-read", step: int = 1, line: int = 7, inside: str = "", what: str = ".item()") -> Seen:
    return Seen(rule, what, Location("train.py", line, "train_step"), inside, "", step)


def log_of(function: Callable[[], object], vocabulary: Vocabulary) -> Log:
    with OpLog(vocabulary, finds_arguments=True) as log:
        function()
    return log.finish()


# -- inside and outside


def test_ledger_counts_only_what_a_step_reaches_over() -> None:
    ledger = Ledger()
    ledger.note("forward")
    ledger.reach()
    ledger.note("zero_grad")
    ledger.reach()
    ledger.note("print")
    ledger.end()
    assert (ledger.inside, ledger.outside) == (["forward", "zero_grad"], ["print"])


def test_ledger_leaves_out_what_is_between_microbatches() -> None:
    ledger = Ledger()
    for batch in ("one", "two"):
        ledger.microbatch_begins()
        ledger.note(f"forward {batch}")
        ledger.backward_done()
        ledger.note(f"print {batch}")
    ledger.reach()
    assert ledger.inside == ["forward one", "forward two", "print two"]
    assert ledger.outside == ["print one"]


def test_ledger_counts_all_of_the_steps_function() -> None:
    ledger = Ledger()
    ledger.note("forward", in_function=True)
    ledger.reach()
    ledger.note("return loss.item()", in_function=True)
    ledger.note("print")
    ledger.end()
    assert (ledger.inside, ledger.outside) == (["forward", "return loss.item()"], ["print"])


# -- findings


def test_findings_of_one_line_and_rule_are_one() -> None:
    (found,) = collect([seen(step=1), seen(step=1), seen(step=2)])
    assert (found.rule, found.times, found.steps, found.group) == ("host-read", 3, 2, "sync-free")
    assert found.why == entry("host-read").why
    assert len(collect([seen(line=7), seen(line=8), seen("host-print", line=7)])) == 3


def test_findings_leave_out_what_a_library_does_once() -> None:
    assert collect([seen(step=0, inside="transformers/cache.py, fill")]) == []
    assert len(collect([seen(step=0)])) == 1, "the user's own line may come again at the hundredth step"


def test_findings_of_memory_need_two_that_were_made() -> None:
    assert collect([seen("moving-address", step=1), seen("moving-address", step=1)]) == []
    assert len(collect([seen("moving-address", step=1), seen("moving-address", step=2)])) == 1


def test_report_lists_no_line_outside_that_is_a_finding() -> None:
    inside, outside = plain_seen(seen(line=12)), [plain_seen(seen(line=12, step=0)), plain_seen(seen(line=20))]
    report = report_of("train.py", Outcome(Status.STOPPED, {"inside": [inside], "outside": outside, "steps": 5}, 5))
    assert [one.where.line for one in report.outside if one.where is not None] == [20]


def test_groups_name_rules_of_the_catalogue() -> None:
    rules = [rule for group in GROUPS.values() for rule in group]
    assert len(set(rules)) == len(rules)
    assert {entry(rule).kind for rule in rules} == {"capture", "check"}


# -- the verdict


@pytest.mark.parametrize(
    ("findings", "shape", "unknown", "api"),
    [
        ([], StepShape(), [], Api.UNKNOWN),
        ([], StepShape(steps=2), [], Api.UNKNOWN),
        ([], StepShape(steps=5), ["a Triton kernel"], Api.UNKNOWN),
        ([], StepShape(steps=5), [], Api.CAPTURE),
        ([], StepShape(steps=5, library="lightning", clean_modules=("",)), [], Api.MODULES),
        ([seen()], StepShape(steps=5, clean_modules=("",)), [], Api.MODULES),
        ([seen()], StepShape(steps=5), [], Api.NOTHING),
    ],
)
def test_judge_chooses_the_api(findings: list[Seen], shape: StepShape, unknown: list[str], api: Api) -> None:
    verdict = judge(collect(findings), shape, unknown)
    assert verdict.api is api
    assert verdict.reason.endswith(".")
    assert verdict.sentence.endswith(".")


def test_judge_pastes_with_the_users_names() -> None:
    function = judge([], StepShape(steps=5, function="train_step"))
    assert function.paste[1] == "train_step = stepgraph.capture(train_step)  # before the loop"
    method = judge([], StepShape(steps=5, function="Trainer.step"))
    assert method.paste[1] == "trainer.step = stepgraph.capture(trainer.step)  # before the loop"
    loop = judge([], StepShape(steps=5, loop=HERE))
    assert "from line 7 to the last call" in "\n".join(loop.paste)
    parts = judge(collect([seen()]), StepShape(steps=5, models=("net",), clean_modules=("layers.*", "head")))
    assert parts.paste[1] == 'stepgraph.graph_modules(net, ["layers.*", "head"])  # before the loop'


def test_command_never_wraps_lines_of_code() -> None:
    shape = StepShape(steps=5, models=("net",), clean_modules=("a_long_name.of_a_module",) * 9)
    findings = collect([seen()])
    report = CheckReport("train.py", judge(findings, shape), tuple(findings), (), shape, Outcome(Status.STOPPED, {}, 5))
    text = _for_people(Result({}, render(report), "stepgraph rules"))
    assert f"    {report.verdict.paste[1]}" in [line.rstrip() for line in text.splitlines()]


def test_clean_parts_are_the_outermost_without_a_finding() -> None:
    called = ["Net", "Net.stem", "Net.body", "Net.body.0", "Net.body.1", "Net.body.1.inner", "Net.head"]
    assert clean_parts("Net", called, []) == [""]
    assert clean_parts("Net", called, ["Net"]) == ["body", "head", "stem"]
    assert clean_parts("Net", called, ["Net.body.0"]) == ["body.1", "head", "stem"]


# -- steps compared


def test_changes_name_a_number_a_shape_and_an_operation() -> None:
    words = Vocabulary()
    x, y = torch.ones(4, 4), torch.ones(4, 4)

    def rules(one: Callable[[], object], two: Callable[[], object]) -> list[str]:
        return [rule for rule, _ in changes([log_of(one, words)], [log_of(two, words)])]

    assert rules(lambda: x * 2, lambda: y * 2) == [], "another batch is the same step"
    assert rules(lambda: x[1:3] * 2, lambda: x[2:4] * 2) == ["varying-number"]
    assert rules(lambda: x[:3] * 2, lambda: x[:4] * 2) == ["varying-shape"]
    assert rules(lambda: (x * 2).relu(), lambda: (x * 3).relu()) == ["varying-number"]
    assert rules(lambda: x.relu(), lambda: x.tanh()) == ["varying-operations"]
    assert rules(lambda: x.exp(), lambda: torch.ones(5).exp()) == ["varying-operations"]


def test_changes_report_another_batch_size_once() -> None:
    words = Vocabulary()
    batches = (torch.ones(3), torch.ones(4))
    logs = [log_of(functools.partial(lambda batch: torch.relu(batch * 2).sum(), batch), words) for batch in batches]
    (rule, difference), *others = changes([logs[0]], [logs[1]])
    assert (rule, others) == ("varying-shape", [])
    assert (difference.before, difference.now) == ("tensor 0 has shape (3,)", "shape (4,)")


def test_changes_ignore_a_shape_that_depends_on_data() -> None:
    words, x = Vocabulary(), torch.arange(4.0)
    limits = (torch.tensor(1.0), torch.tensor(2.0))
    one, two = (log_of(functools.partial(lambda limit: x[x > limit] * 2, limit), words) for limit in limits)
    assert list(changes([one], [two])) == [], "that is a host read"
    assert [found.kind for found in differences(one, two)][:1] == ["result shape"]


def test_branch_is_the_line_before_steps_part() -> None:
    code = (lambda: None).__code__
    path = [(code, line) for line in (1, 2, 5, 6)]
    assert branch_of(path, path) is None
    assert branch_of(path, [(code, 1), (code, 2), (code, 3)]) == Location(code.co_filename, 2, code.co_name)
    assert branch_of(path, path[:2]) == Location(code.co_filename, 2, code.co_name)


def test_standing_mode_logs_only_while_it_has_a_log() -> None:
    words = Vocabulary()
    with StandingMode() as mode:
        torch.ones(2) + 1
        assert current_log() is None
        mode.log = log = OpLog(words, finds_arguments=True)
        torch.ones(2) + 1
        assert current_log() is log
        mode.log = None
        torch.ones(2) + 1
    assert [str(log.finish()[index][0]) for index in range(2)] == ["aten.ones.default", "aten.add.Tensor"]
    assert len(log.finish()) == 2


# -- lines and names


def loop_body(history, count, x):  # type: ignore[no-untyped-def]
    out = x * 2
    history.append(count)
    count += 1
    return out, count


def test_variables_of_a_loop_are_those_read_before_they_are_set() -> None:
    code = loop_body.__code__
    first = code.co_firstlineno
    lines = [(code, first + offset) for offset in range(1, 5)]
    assert read_first(code, lines) == ["x", "history", "count"]
    assert read_first(code, lines[3:]) == ["out", "count"]
    assert line_of_use("history", lines) == Location(code.co_filename, first + 2, "loop_body")
    assert line_of_use("nothing", lines) is None


def test_own_code_is_neither_torch_nor_an_installed_library() -> None:
    assert is_own_code(test_own_code_is_neither_torch_nor_an_installed_library.__code__)
    assert not is_own_code(torch.nn.Linear.forward.__code__)
    assert not is_own_code(pytest.raises.__code__)
    assert not is_own_code(re.compile.__code__)
    assert package_of(str(pytest.__file__)) == "pytest"
    assert package_of(__file__) == ""


BODY = """\
for batch in loader:
    optimizer.zero_grad()
    with autocast():
        if batch:
            loss = model(batch)
    for _ in range(2):
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("first", "last", "expected"), [(5, 8, 3), (5, 5, 5), (5, 1, 1), (7, 8, 7), (99, 1, 99)])
def test_statement_of_a_line_is_in_the_block_of_the_last(first: int, last: int, expected: int, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BODY)
    assert first_statement(str(path), first, last) == expected


def test_step_of_a_loop_begins_at_a_whole_statement(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("for _ in range(3):\n    with block():\n        begin()\n    reach()\n")
    found = StepFunctions()
    names = {
        "block": contextlib.nullcontext,
        "begin": lambda: found.begin([sys._getframe(1)]),
        "reach": lambda: found.reach(sys._getframe(1)),
    }
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert found.result()["loop"] == [str(path), 2, "<module>"]


def test_step_function_is_the_one_that_each_step_calls() -> None:
    found = StepFunctions()

    def step(x: int) -> None:
        frame: types.FrameType | None = __import__("sys")._getframe()
        frames = [frame, frame.f_back]  # type: ignore[union-attr]
        found.begin(frames)  # type: ignore[arg-type]
        found.reach(frame)  # type: ignore[arg-type]

    for x in range(3):
        step(x)
    result = found.result()
    assert (result["function"], result["parameters"]) == ("step", ["x"])
    assert found.code is step.__code__
