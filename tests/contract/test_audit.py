"""Audits: a captured step is recorded again now and then, and its operations are compared with those of the graph.

What the step's Python reads may change where nothing watches it. The call that is audited shows it, and is right; no
audit changes anything where nothing has changed.
"""

from __future__ import annotations

import functools
import os
import pathlib
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.contract.programs import PROGRAMS
from tests.harness import Program, assert_captured_equals_eager, different, snapshot

Put = Callable[[float], object]
VARIABLE = "STEPGRAPH_TEST_AUDIT"


class Reading:
    """A number that a step reads from where no watch looks: `read` it, `put` another one."""

    def __init__(self, read: Callable[[], float], put: Put) -> None:
        self.read, self.put = read, put


def in_a_file(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Reading:
    file = path / "number"
    return Reading(lambda: float(file.read_text()), lambda value: file.write_text(str(value)))


def in_the_environment(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(lambda: float(os.environ.get(VARIABLE, "1")), lambda value: monkeypatch.setenv(VARIABLE, str(value)))


def in_an_object_of_c(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Reading:
    numbers = functools.partial(dict, factor=1.0)

    def put(value: float) -> None:
        numbers.__setstate__((dict, (), {"factor": value}, None))

    return Reading(lambda: float(numbers()["factor"]), put)


HIDDEN = {"file": in_a_file, "environment": in_the_environment, "partial": in_an_object_of_c}


@pytest.fixture(params=HIDDEN)
def hidden(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Reading:
    """A number out of the watch's reach, which is 1."""
    reading = HIDDEN[request.param](tmp_path, monkeypatch)
    reading.put(1.0)
    return reading


def scaled(device: torch.device, read: Callable[[], float]) -> Program:
    """A training whose loss has a factor that it reads at each call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * read()
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randn(3, 4, device=device),) for _ in range(12)]
    return Program(step, batches, [model], [optimizer])


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_audit_at_each_replay_equals_eager_whatever_changes(hidden: Reading, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        program = scaled(device, hidden.read)
        program.before_call = lambda index: hidden.put(1.0 if index < 6 else 2.0) and None
        return program

    report = assert_captured_equals_eager(build, device, audit=1)
    assert sum(report.recapture_reasons.values()) == 1
    assert report.eager_calls == 3


def test_audit_finds_a_change_when_it_is_due(device: torch.device, tmp_path: pathlib.Path) -> None:
    """Until then replays do what was captured, and the warning says how many."""
    file = tmp_path / "number"
    file.write_text("1")
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: x * int(file.read_text()), audit=4) as step:
        for _ in range(3 + 4):
            assert step(x).tolist() == [1, 1]
        assert step(x).tolist() == [1, 1]  # audited, and the same
        file.write_text("3")
        found = []
        for _ in range(2):
            found.append(step(x)[0].item())
        assert found == [1, 1]
        with pytest.warns(stepgraph.StepgraphWarning, match=r"changed-operations") as seen:
            assert step(x).tolist() == [3, 3]
        assert step(x).tolist() == [3, 3]
        report = step.report()
    assert "test_audit.py" in str(seen[0].message)
    assert "1 -> 3" in str(seen[0].message)
    assert "3 calls may have replayed the old operations" in str(seen[0].message)
    assert (report.captures, report.recaptures, report.eager_calls) == (2, 1, 3)


def test_audit_under_strict_raises_before_anything_runs(hidden: Reading, device: torch.device) -> None:
    program = scaled(device, hidden.read)
    with stepgraph.capture(program.step, audit=1, strict=True) as step:
        for batch in program.batches[:5]:
            step(*batch)
        hidden.put(2.0)
        before = snapshot(program, device)
        for _ in range(2):
            with pytest.raises(stepgraph.StateChanged):
                step(*program.batches[5])
            assert different(before, snapshot(program, device)) == []
        hidden.put(1.0)
        step(*program.batches[5])
        assert step.report().replays == 3


# -- a step that begins to use its old gradients after the capture, which its graph does not know

Use = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None]


def leaves_them(model: nn.Module, optimizer: torch.optim.Optimizer, kept: torch.Tensor) -> None:
    """The backward adds to them."""


def sets_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer, kept: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)


def copies_one(model: nn.Module, optimizer: torch.optim.Optimizer, kept: torch.Tensor) -> None:
    kept.copy_(model[0].weight.grad)  # type: ignore[arg-type, union-attr]
    optimizer.zero_grad()


def reads_them(model: nn.Module, optimizer: torch.optim.Optimizer, kept: torch.Tensor) -> None:
    for parameter in model.parameters():
        kept.add_(parameter.grad.sum())  # type: ignore[union-attr]
    optimizer.zero_grad()


def reads_a_part(model: nn.Module, optimizer: torch.optim.Optimizer, kept: torch.Tensor) -> None:
    kept[0].copy_(model[0].weight.grad.as_strided((4,), (1,), 4))  # type: ignore[union-attr]
    optimizer.zero_grad()


def keeps_them(model: nn.Module, optimizer: torch.optim.Optimizer, kept: torch.Tensor) -> None:
    before = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad()
    kept.mul_(0.5)
    del before


USES = (leaves_them, sets_to_zero, copies_one, reads_them, reads_a_part, keeps_them)


def with_old_gradients(device: torch.device, use: Use, begins: Callable[[], bool], *, flat: bool) -> Program:
    """A training that drops its old gradients, or uses them. `flat`: they are in memory of the user's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    kept = torch.zeros(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        if begins():
            use(model, optimizer, kept)
        else:
            optimizer.zero_grad()
        loss = model(x).square().mean() + kept.sum() * 0.25
        loss.backward()
        optimizer.step()
        return loss

    def in_one_piece(index: int) -> None:
        parameters = list(model.parameters())
        memory = torch.zeros(sum(p.numel() for p in parameters), device=device)
        pieces = memory.split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).fill_(index)

    batches = [(torch.randn(3, 4, device=device),) for _ in range(12)]
    program = Program(step, batches, [model], [optimizer], tensors=[kept])
    if flat:
        program.before_call = in_one_piece
    return program


@pytest.mark.parametrize("flat", [False, True], ids=["own", "flat"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_audit_finds_use_of_old_gradients_that_begins_later(use: Use, flat: bool, device: torch.device) -> None:
    """Trap on CUDA: an audit had no memory for them, and failed with an invalid argument."""
    hidden = in_an_object_of_c(pathlib.Path(), pytest.MonkeyPatch())

    def build(device: torch.device) -> Program:
        program = with_old_gradients(device, use, lambda: hidden.read() > 1, flat=flat)
        prepare = program.before_call

        def before_call(index: int) -> None:
            hidden.put(2.0 if index >= 6 else 1.0)
            prepare(index)

        program.before_call = before_call
        return program

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        report = assert_captured_equals_eager(build, device, audit=1, on_error="eager")
    told = [str(each.message) for each in seen if issubclass(each.category, stepgraph.StepgraphWarning)]
    assert len(told) == 1, told
    assert "changed-operations" in told[0]
    assert (report.captures, report.recaptures) == (2, 1)
    assert not any("capture failed" in reason for reason in report.eager_reasons)


@pytest.mark.parametrize("flat", [False, True], ids=["own", "flat"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_audit_under_strict_names_use_of_old_gradients(use: Use, flat: bool, device: torch.device) -> None:
    config = types.SimpleNamespace(begins=False)
    program = with_old_gradients(device, use, lambda: config.begins, flat=flat)
    with stepgraph.capture(program.step, strict=True) as step:
        for index, batch in enumerate(program.batches[:6]):
            program.before_call(index)
            step(*batch)
        config.begins = True
        program.before_call(6)
        before = snapshot(program, device)
        for _ in range(2):
            with pytest.raises(stepgraph.StateChanged, match=r"config\.begins: False -> True") as caught:
                step(*program.batches[6])
            assert caught.value.rule == "state-changed"
            assert different(before, snapshot(program, device)) == []
        config.begins = False
        step(*program.batches[6])
        assert step.report().captures == 1


SLOW = ("small_gpt", "transformer_dropout", "changing_batch_size")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PROGRAMS])
def test_audit_of_every_call_changes_nothing(name: str, device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"[\s\S]*\[(changed-operations|other-path|host-value)\]")
        report = assert_captured_equals_eager(PROGRAMS[name], device, audit=1)
    assert report.recaptures == 0


@pytest.mark.parametrize(
    ("audit", "runs"),
    [("auto", [4, 5, 6, 7, 8, 11]), (3, [4, 7, 9, 12, 14]), (1, list(range(4, 15))), (False, [4])],
    ids=str,
)
def test_audit_runs_python_once_in_the_calls_that_are_due(audit: Any, runs: list[int], device: torch.device) -> None:
    """The step is recorded in the fourth call; the audits of "auto" are after 1, 2, 3, 4 and 7 replays."""
    seen: list[int] = []
    x = torch.ones(2, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x * 2

    with stepgraph.capture(step, audit=audit, ignore=["seen"]) as captured:
        counts = []
        for _ in range(14):
            before = len(seen)
            assert captured(x).tolist() == [2, 2]
            counts.append(len(seen) - before)
        report = captured.report()
    assert counts[:3] == [1, 1, 1]
    assert [index + 1 for index, count in enumerate(counts) if count and index > 2] == runs
    assert max(counts) == 1
    assert (report.captures, report.recaptures, report.replays) == (1, 0, 11)


@pytest.mark.parametrize("audit", ["often", 0, -1, 1.5, True, None])
def test_audit_of_another_value_is_refused(audit: Any) -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="audit") as caught:
        stepgraph.capture(lambda x: x, audit=audit)
    assert caught.value.rule == "option"


@pytest.mark.parametrize("on_error", ["raise", "eager"])
def test_audit_whose_recording_fails(on_error: str, device: torch.device, tmp_path: pathlib.Path) -> None:
    """The step reads a value on the host by now, which eager can and a graph cannot."""
    flag = tmp_path / "flag"

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item() if flag.exists() else x * 2

    x = torch.ones(3, device=device)
    with stepgraph.capture(step, audit=1, on_error=on_error) as captured:
        for _ in range(5):
            assert captured(x).tolist() == [2, 2, 2]
        flag.touch()
        if on_error == "raise":
            with pytest.raises(stepgraph.CaptureError, match="host-read"):
                captured(x)
        else:
            with pytest.warns(stepgraph.StepgraphWarning, match="goes on in eager"):
                assert captured(x).tolist() == [3, 3, 3]
            assert captured(x).tolist() == [3, 3, 3]
            assert captured.report().eager_reasons["capture failed: [host-read]"] == 2


@pytest.mark.parametrize("strict", [False, True])
def test_other_path_under_capture_is_reported_with_its_line(strict: bool, device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if stepgraph.is_graph_capturing():
            x = x + 0  # only here
        return x * 2

    x = torch.ones(2, device=device)
    with stepgraph.capture(step, strict=strict) as captured:
        outcome: Any = pytest.warns(stepgraph.StepgraphWarning, match=r"\[other-path\][\s\S]*only here")
        if strict:
            outcome = pytest.raises(stepgraph.CaptureError, match="only here")
        with outcome as told:
            for _ in range(9):
                assert captured(x).tolist() == [2, 2]
        if strict:
            assert told.value.rule == "other-path"
        else:
            assert len(told) == 1
            assert captured.report().replays > 0


@pytest.mark.parametrize("hidden", ["file", "environment"], indirect=True)
def test_varying_operations_are_refused(hidden: Reading, device: torch.device) -> None:
    """A step that does something else at every other call, for a reason that no watch sees."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if hidden.read() else x + 2

    x = torch.ones(2, device=device)
    with stepgraph.capture(step) as captured:
        with pytest.raises(stepgraph.CaptureError, match="aten") as caught:
            for index in range(12):
                hidden.put(index % 2)
                assert captured(x).tolist() == ([2, 2] if index % 2 else [3, 3])
        assert captured.report().captures == 0
    assert caught.value.rule == "varying-operations"


def test_audit_step_that_starts_counting_is_right_then_refused(device: torch.device) -> None:
    """The call that shows it replays what was recorded for it; then the step is looked at, and the value named."""
    state = {"on": False, "number": 1}

    def step(x: torch.Tensor) -> torch.Tensor:
        if state["on"]:
            state["number"] += 1
        return x * state["number"]

    x = torch.ones(2, device=device)
    with stepgraph.capture(step) as captured:
        for _ in range(6):
            assert captured(x).tolist() == [1, 1]
        state["on"] = True
        with pytest.warns(stepgraph.StepgraphWarning, match=r"state\['on'\]"):
            assert captured(x).tolist() == [2, 2]
        with pytest.raises(stepgraph.CaptureError, match="host-value") as caught:
            for number in range(3, 9):
                assert captured(x).tolist() == [number] * 2
    assert "state['number']" in caught.value.what


def test_varying_gradient_patterns_each_have_an_eager_call_first(device: torch.device) -> None:
    """A kind of call is compared with an eager one of its own before it is replayed."""
    model = nn.Linear(4, 2).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    x = torch.ones(3, 4, device=device)
    with stepgraph.capture(step, warmup=1) as captured:
        for index in range(12):
            if index % 3 == 0:
                model.zero_grad()
            captured(x)
        report = captured.report()
    assert (report.graphs, report.replays) == (2, 9)
    assert report.eager_reasons == {"warm-up": 3}


def test_value_that_matters_late_is_right_in_the_same_call(device: torch.device) -> None:
    """`if epoch >= 3`: the first changes have no effect, and the third one has."""
    config, weight = types.SimpleNamespace(epoch=0), torch.full((2,), 3.0, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weight if config.epoch >= 3 else x + weight

    x = torch.ones(2, device=device)
    for calls in (20, 150):
        with stepgraph.capture(step) as captured, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in range(5 * calls):
                config.epoch = call // calls
                assert torch.equal(captured(x), step(x))
            assert captured.report().replays > 4 * calls


def test_value_that_matters_late_is_right_after_a_recapture(device: torch.device) -> None:
    """Many changes without effect, then another graph, then the change that matters."""
    config, offset = types.SimpleNamespace(epoch=0, scale=1.0), torch.full((2,), 3.0, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * config.scale if config.epoch >= 14 else x * config.scale + offset

    x = torch.ones(2, device=device)
    with stepgraph.capture(step) as captured, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(15 * 150):
            config.epoch, config.scale = call // 150, 1.0 if call < 12 * 150 else 2.0
            result = captured(x)
            assert call % 50 or torch.equal(result, step(x))
        assert captured.report().captures == 3


def test_counter_compared_with_a_limit_needs_one_audit(device: torch.device) -> None:
    """What the step asks of it is known then, and asked again before each replay."""
    config = types.SimpleNamespace(steps=0, never=10**6)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if config.steps < config.never else x

    with stepgraph.capture(step) as captured:
        for _ in range(40):
            captured(torch.ones(2, device=device))
            config.steps += 1
        report = captured.report()
    assert (report.replays, report.captures) == (37, 1)
    assert report.audits == 8, "one, and those that are due"
    assert "by what the step asks of them: config.steps" in str(report.equality)
