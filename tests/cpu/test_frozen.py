"""`stepgraph.frozen`: which numbers a graph has baked in, where they enter, and whether a change is noticed."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import json
import os
import random
import struct
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph.backends.nodes import Node, Nodes, lasting, node_differences
from stepgraph.inspect import frozen as module
from stepgraph.inspect.frozen import examine
from stepgraph.inspect.frozen_probe import FrozenProbe
from stepgraph.inspect.frozen_report import FrozenReport, FrozenValue, State
from stepgraph.observe.steps import StepCalls, StepEvents, StepFinder

VALUE: Any = None
"""A number in a global, set by tests."""


def value_of(report: FrozenReport, name: str) -> FrozenValue:
    found = [value for value in report.values if value.name == name]
    assert len(found) == 1, [value.name for value in report.values]
    return found[0]


def states(report: FrozenReport) -> dict[str, str]:
    return {value.name: value.state.value for value in report.values}


# -- the same value, held in different ways

USES: dict[str, tuple[float, Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "learning rate": (0.1, lambda x, rate: x - rate * x),
    "weight decay": (0.01, lambda x, decay: x * (1 - decay)),
    "loss weight": (0.5, lambda x, weight: x.square().mean() * weight),
    "dropout": (0.25, lambda x, p: F.dropout(x, p) if isinstance(p, float) else x * (torch.rand_like(x) > p)),
    "schedule step": (7, lambda x, step: x * (1 - step / 100)),
    "temperature": (2.0, lambda x, temperature: torch.softmax(x / temperature, -1)),
}


@dataclasses.dataclass
class Config:
    """A configuration with a number in it."""

    number: Any = None
    nested: dict[str, Any] = dataclasses.field(default_factory=dict)


def in_global(use: Any, value: Any) -> tuple[Callable[..., Any], str]:
    globals()["VALUE"] = value
    return lambda x: use(x, VALUE), "VALUE"


def in_closure(use: Any, value: Any) -> tuple[Callable[..., Any], str]:
    number = value
    return lambda x: use(x, number), "number"


def in_attribute(use: Any, value: Any) -> tuple[Callable[..., Any], str]:
    holder = SimpleNamespace(number=value)
    return lambda x: use(x, holder.number), "holder.number"


def in_dataclass(use: Any, value: Any) -> tuple[Callable[..., Any], str]:
    config = SimpleNamespace(train=Config(value))
    return lambda x: use(x, config.train.number), "config.train.number"


def in_dict(use: Any, value: Any) -> tuple[Callable[..., Any], str]:
    config = Config(nested={"loss": {"number": value}})
    return lambda x: use(x, config.nested["loss"]["number"]), "config.nested['loss']['number']"


HOLDERS = (in_global, in_closure, in_attribute, in_dataclass, in_dict)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("use", USES)
def test_frozen_finds_number_where_it_enters(use: str, holder: Any) -> None:
    value, apply = USES[use]
    step, name = holder(apply, value)
    report = stepgraph.frozen(step, torch.ones(2, 3))
    found = value_of(report, name)
    assert (found.state, found.value) == (State.WATCHED, repr(value))
    assert found.entries[0].file == __file__
    assert found.entries[0].line == apply.__code__.co_firstlineno
    assert report.findings == ()


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("use", ["loss weight", "schedule step", "dropout"])
def test_frozen_reports_no_finding_for_tensor(use: str, holder: Any) -> None:
    value, apply = USES[use]
    step, name = holder(apply, torch.tensor(float(value)))
    report = stepgraph.frozen(step, torch.ones(2, 3))
    assert value_of(report, name).state is State.TENSOR
    assert report.findings == ()


@pytest.mark.parametrize("holder", HOLDERS)
def test_frozen_finds_unwatched_number(holder: Any) -> None:
    step, name = holder(*reversed(USES["loss weight"]))
    with stepgraph.capture(step, ignore=[name]) as captured:
        for _ in range(5):
            captured(torch.ones(2, 3))
        report = stepgraph.frozen(captured, torch.ones(2, 3))
    found = value_of(report, name)
    assert report.findings == (found,)
    assert found.state is State.BAKED
    assert "ignore=" in found.reason
    assert name in report.verdict


def test_frozen_says_when_no_audit_comes() -> None:
    weight = 2.0
    with stepgraph.capture(lambda x: x * weight, ignore=["weight"], audit=False) as captured:
        report = stepgraph.frozen(captured, torch.ones(2))
    assert "nothing finds a change" in value_of(report, "weight").reason


# -- optimizers


def training(kind: Any, **options: Any) -> tuple[Callable[..., Any], torch.optim.Optimizer, torch.nn.Module]:
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return train_step, optimizer, model


def test_frozen_asks_guards_of_optimizer_inside_graph() -> None:
    step, _, _ = training(torch.optim.SGD, lr=0.1, weight_decay=0.01)
    report = stepgraph.frozen(step, torch.ones(2, 3))
    for key in ("lr", "weight_decay"):
        found = value_of(report, f"optimizer.param_groups[0]['{key}']")
        assert found.state is State.WATCHED
        assert "leaves the graph" in found.reason
        assert found.entries[0].line == step.__code__.co_firstlineno + 4
    assert report.findings == ()


def test_frozen_calls_optimizer_between_graphs_live() -> None:
    step, _, _ = training(torch.optim.AdamW, lr=0.1)
    report = stepgraph.frozen(step, torch.ones(2, 3))
    for key in ("['lr']", "['betas'][0]", "['betas'][1]", "['weight_decay']", "['eps']"):
        assert value_of(report, f"optimizer.param_groups[0]{key}").state is State.LIVE
    assert report.findings == ()


def test_frozen_sees_rate_that_the_loss_reads() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() * optimizer.param_groups[0]["lr"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    report = stepgraph.frozen(train_step, torch.ones(2, 3))
    found = value_of(report, "optimizer.param_groups[0]['lr']")
    assert found.state is State.WATCHED
    assert found.entries[0].operation == "aten.mul.Tensor"


def test_frozen_reports_tensor_rate() -> None:
    step, _, _ = training(torch.optim.Adam, lr=torch.tensor(0.1), capturable=False, foreach=False)
    report = stepgraph.frozen(step, torch.ones(2, 3))
    assert value_of(report, "optimizer.param_groups[0]['lr']").state is State.TENSOR


# -- where numbers are kept


class Mode(enum.IntEnum):
    """Numbers with names."""

    HALF = 2
    FULL = 1


class Slotted:
    """A number in a slot, and one in the class."""

    __slots__ = ("number",)
    shared = 3.0

    def __init__(self) -> None:
        self.number = 2.0


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A number that Python's own assignment refuses."""

    number: float = 2.0


Pair = namedtuple("Pair", "first second")


def test_frozen_moves_numbers_of_every_kind() -> None:
    slotted, fixed, pair, nested = Slotted(), Fixed(), Pair(1.0, 2.0), (1.0, (3.0, 4.0))
    variable = contextvars.ContextVar("variable", default=5.0)
    chosen, many, deep = Mode.HALF, [1.0, 2.0], {"a": [1.0, {"b": 3.0}]}

    def scaled(x: torch.Tensor, scale: float = 1.5, *, shift: float = 0.5) -> torch.Tensor:
        return x * scale + shift

    def step(x: torch.Tensor) -> torch.Tensor:
        x = scaled(x) * slotted.number * slotted.shared * fixed.number * pair.second * nested[1][0] * variable.get()
        return x / int(chosen) * many[1] * deep["a"][1]["b"]

    report = stepgraph.frozen(step, torch.ones(2))
    watched = {name for name, state in states(report).items() if state == "watched"}
    assert watched == {
        *("scale", "shift", "slotted.number", "Slotted.shared", "fixed.number", "pair.second", "nested[1][0]"),
        *("variable.get()", "chosen", "many[1]", "deep['a'][1]['b']"),
    }
    assert (slotted.number, Slotted.shared, fixed.number, pair) == (2.0, 3.0, 2.0, Pair(1.0, 2.0))
    assert (variable.get(), chosen, many, deep) == (5.0, Mode.HALF, [1.0, 2.0], {"a": [1.0, {"b": 3.0}]})
    assert scaled.__defaults__ == (1.5,)
    assert scaled.__kwdefaults__ == {"shift": 0.5}


class Stubborn(float):
    """A number that refuses to be made of another one."""

    def __new__(cls, value: float) -> Stubborn:
        if value != 2.0:
            raise ValueError("only 2.0")
        return super().__new__(cls, value)


def test_frozen_says_why_a_number_is_not_moved() -> None:
    number = Stubborn(2.0)
    report = stepgraph.frozen(lambda x: x * number, torch.ones(2))
    found = value_of(report, "number")
    assert found.state is State.FIXED
    assert "Stubborn" in found.reason


def test_frozen_names_line_that_fails_when_moved() -> None:
    columns = 5

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, columns) * 2

    report = stepgraph.frozen(step, torch.ones(2, 5))
    found = value_of(report, "columns")
    assert found.state is State.WATCHED
    assert "the step fails: RuntimeError" in found.reason
    assert found.entries[0].line == step.__code__.co_firstlineno + 1
    assert columns == 5


def test_frozen_moves_far_where_near_has_no_effect() -> None:
    count = 7

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if count < 500 else x * 3

    report = stepgraph.frozen(step, torch.ones(2))
    found = value_of(report, "count")
    assert (found.state, found.moved_to) == (State.WATCHED, "1007")


def test_frozen_keeps_a_failure_where_another_move_is_idle() -> None:
    step, _, _ = training(torch.optim.RMSprop, lr=0.1)
    found = value_of(stepgraph.frozen(step, torch.ones(2, 3)), "optimizer.param_groups[0]['momentum']")
    assert (found.state, found.moved_to) == (State.WATCHED, "1"), "new state is made for 1, and none for -1"


def test_frozen_reports_numbers_without_effect() -> None:
    config = SimpleNamespace(used=2.0, unused=3.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        _ = config.unused
        return x * config.used

    report = stepgraph.frozen(step, torch.ones(2))
    assert states(report) == {"config.used": "watched", "config.unused": "no effect"}


def test_frozen_reports_plain_argument_as_graph_of_its_own() -> None:
    report = stepgraph.frozen(lambda x, scale: x * scale, torch.ones(2), scale=2.0)
    found = value_of(report, "scale")
    assert found.state is State.WATCHED
    assert "graph for each value" in found.reason
    assert found.entries[0].operation == "aten.mul.Tensor"


# -- the environment, and what is out of reach


def test_frozen_moves_environment_that_code_spells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROZEN_SCALE", "1.5")
    report = stepgraph.frozen(lambda x: x * float(os.environ["FROZEN_SCALE"]), torch.ones(2))
    assert value_of(report, "os.environ['FROZEN_SCALE']").state is State.WATCHED
    assert os.environ["FROZEN_SCALE"] == "1.5"


def test_frozen_finds_environment_out_of_reach() -> None:
    parts = ("FROZEN", "HIDDEN")

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * float(os.environ.get("_".join(parts), "1"))

    assert examine(step, (torch.ones(2),), {}).findings == ()
    report = examine(step, (torch.ones(2),), {}, env={"FROZEN_HIDDEN": "3"})
    found = value_of(report, "os.environ['FROZEN_HIDDEN']")
    assert (found.state, found.value, found.moved_to) == (State.BAKED, "absent", "3")
    assert found.entries[0].line == step.__code__.co_firstlineno + 1
    assert "FROZEN_HIDDEN" not in os.environ


def test_frozen_finds_file_that_changed_since_capture(tmp_path: Path) -> None:
    file = tmp_path / "scale"
    file.write_text("2")
    with stepgraph.capture(lambda x: x * float(file.read_text())) as captured:
        for _ in range(4):
            captured(torch.ones(2))
        assert stepgraph.frozen(captured, torch.ones(2)).findings == ()
        file.write_text("3")
        report = stepgraph.frozen(captured, torch.ones(2))
    assert [value.name for value in report.findings] == ["(out of reach)"]
    assert (report.findings[0].entries[0].before, report.findings[0].entries[0].now) == ("2.0", "3.0")


# -- the program is left as it was


def test_frozen_leaves_program_as_it_was() -> None:
    step, optimizer, model = training(torch.optim.AdamW, lr=0.1)
    step(torch.ones(2, 3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    contents = [grad.clone() for grad in grads]
    moments = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    stepgraph.frozen(step, torch.ones(2, 3))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(map(torch.equal, grads, contents))
    assert moments.keys() == optimizer.state.keys()
    assert all(torch.equal(optimizer.state[p][k], v) for p, state in moments.items() for k, v in state.items())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_frozen_takes_away_state_that_it_made() -> None:
    step, optimizer, model = training(torch.optim.AdamW, lr=0.1)
    stepgraph.frozen(step, torch.ones(2, 3))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_frozen_restores_program_when_step_raises() -> None:
    step, optimizer, model = training(torch.optim.SGD, lr=0.1)
    before = model.weight.clone()

    def reads(x: torch.Tensor) -> float:
        return step(x).item()

    with pytest.raises(stepgraph.CaptureError) as caught:
        stepgraph.frozen(reads, torch.ones(2, 3))
    assert caught.value.rule in ("host-read", "varying-output")
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_frozen_restores_what_the_steps_python_changes() -> None:
    counts = SimpleNamespace(calls=0, seen=[])

    def step(x: torch.Tensor) -> torch.Tensor:
        counts.calls += 1
        counts.seen.append(1)
        return x * 2

    with stepgraph.capture(step, ignore=["counts.calls", "counts.seen", "len(counts.seen)"]) as captured:
        for _ in range(4):
            captured(torch.ones(2))
        before = counts.calls, list(counts.seen)
        report = stepgraph.frozen(captured, torch.ones(2))
    assert report.recordings > 2
    assert (counts.calls, counts.seen) == before


def test_frozen_asks_the_graph_in_use() -> None:
    scale = 2.0
    with stepgraph.capture(lambda x: x * scale) as captured:
        for _ in range(4):
            captured(torch.ones(2))
        before = captured.report()
        report = stepgraph.frozen(captured, torch.ones(2))
        assert report.notes == ()
        assert value_of(report, "scale").state is State.WATCHED
        assert captured.report().captures == before.captures
        assert captured.replays == before.replays
        assert torch.equal(captured(torch.ones(2)), torch.full((2,), 2.0))
        assert captured.report().captures == before.captures


def test_frozen_captures_a_copy_where_no_graph_serves() -> None:
    scale = 2.0
    with stepgraph.capture(lambda x: x * scale) as captured:
        report = stepgraph.frozen(captured, torch.ones(2))
        assert "a copy with the same options" in report.notes[0]
        assert captured.report().captures == 0
    assert states(report) == {"scale": "watched"}


# -- many values


def test_frozen_halves_groups_of_many_values() -> None:
    config = SimpleNamespace(**{f"v{i}": float(i) for i in range(64)})

    def step(x: torch.Tensor) -> torch.Tensor:
        _ = [getattr(config, name) for name in vars(config)]
        return x * config.v7 + config.v40

    report = stepgraph.frozen(step, torch.ones(2))
    watched = [name for name, state in states(report).items() if state == "watched"]
    assert watched == ["config.v7", "config.v40"]
    assert len(report.values) == 64
    assert report.recordings < 40


def test_frozen_does_not_guess_past_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECORDINGS", 4)
    parts = {f"v{i}": 1.0 + i for i in range(6)}
    with stepgraph.capture(lambda x: x * sum(parts.values()), ignore=["parts"]) as captured:
        report = stepgraph.frozen(captured, torch.ones(2))
    found = [value.state for value in report.values]
    assert found.count(State.UNKNOWN) == 4
    assert report.recordings <= 4
    assert len(report.findings) == 6


# -- the report


def test_report_survives_json() -> None:
    scale = 2.0
    report = stepgraph.frozen(lambda x: x * scale, torch.ones(2))
    again = FrozenReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert str(again) == str(report)
    assert "scale = 2.0" in str(report)
    assert "no value is baked in unwatched" in report.verdict


def test_frozen_refuses_a_module() -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="captures functions"):
        stepgraph.frozen(torch.nn.Linear(2, 2), torch.ones(2))


# -- the probe, which looks into a running script


class Stop(BaseException):
    """The end of a script."""


class Script:
    """A running script that is this process."""

    def __init__(self, **options: Any) -> None:
        self.options, self.is_cuda_mapped = options, False
        self.unjudged: list[str] = []

    def listen(self, listener: Any) -> None:
        """The test calls the listener itself."""

    def stop(self) -> None:
        raise Stop

    def cannot_judge(self, what: str) -> None:
        self.unjudged.append(what)


def test_probe_examines_method_that_the_user_names() -> None:
    script = Script(step=True)
    probe = FrozenProbe(script)

    class Trainer:
        def __init__(self) -> None:
            self.scale = 2.0
            self.calls: list[float] = []

        @StepCalls(probe).wrapped
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    trainer = Trainer()
    with pytest.raises(Stop), probe.running():
        for _ in range(5):
            trainer.step(torch.ones(2))
            trainer.calls.append(trainer.scale)
    (report,) = [FrozenReport.from_dict(values) for values in probe.result()["reports"]]
    assert (report.step, states(report)) == ("step", {"self.scale": "watched"})
    assert trainer.calls == [2.0]


def test_probe_examines_captured_steps_in_turn() -> None:
    script = Script(env={})
    probe, scale = FrozenProbe(script), 2.0
    with pytest.raises(Stop), probe.running():
        first, second = stepgraph.capture(lambda x: x * scale), stepgraph.capture(lambda x: x + scale)
        for _ in range(5):
            first(torch.ones(2))
            second(torch.ones(2))
    reports = [FrozenReport.from_dict(values) for values in probe.result()["reports"]]
    operations = [value_of(report, "scale").entries[0].operation for report in reports]
    assert operations == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert script.unjudged == []


def test_probe_is_not_seen_by_the_capture() -> None:
    script = Script(env={})
    probe = FrozenProbe(script)
    train_step, _, _ = training(torch.optim.SGD, lr=0.1)
    with StepEvents(StepFinder(Silent())).watching(), pytest.raises(Stop), probe.running():
        step = stepgraph.capture(train_step)
        for _ in range(5):
            step(torch.ones(2, 3))
    (report,) = [FrozenReport.from_dict(values) for values in probe.result()["reports"]]
    assert value_of(report, "optimizer.param_groups[0]['lr']").state is State.WATCHED
    assert script.unjudged == []


class Silent:
    """Takes no note of steps."""

    def step_begins(self, index: int) -> None: ...
    def step_reaches(self, index: int) -> None: ...
    def step_ends(self, index: int) -> None: ...


# -- nodes


def word(number: int) -> bytes:
    return number.to_bytes(8, "little")


MEMORY = ((0x7F0000000000, 0x7F0000010000),)


def kernel(address: int, scale: float, count: int = 4) -> Nodes:
    parameters = (word(address) + struct.pack("<fi", scale, count), struct.pack("<d", scale))
    return Nodes((Node("kernel", "mul", (1, 1, 1, 128, 1, 1, 0), parameters),), MEMORY)


def test_nodes_tell_addresses_from_values() -> None:
    one, two = kernel(0x7F0000000100, 0.5), kernel(0x7F0000000800, 0.5)
    assert node_differences(one, two) == []
    found = node_differences(one, kernel(0x7F0000000800, 0.4375))
    assert [(each.place, each.before, each.now) for each in found] == [
        ("parameter 0, byte 8", "0.5", "0.4375"),
        ("parameter 1, byte 0", "0.5", "0.4375"),
    ]
    assert node_differences(one, kernel(0x600000000000, 0.5)) == [], "left over from the host"


def test_nodes_read_integers_and_launches() -> None:
    one, two = kernel(0, 0.5, count=4), kernel(0, 0.5, count=5)
    assert [(each.before, each.now) for each in node_differences(one, two)] == [("4", "5")]
    wider = Nodes((dataclasses.replace(one.nodes[0], launch=(2, 1, 1, 128, 1, 1, 0)),), MEMORY)
    assert [each.place for each in node_differences(one, wider)] == ["launch"]


def test_nodes_stop_at_another_kernel() -> None:
    one = Nodes((Node("kernel", "mul"), Node("fill")))
    two = Nodes((Node("kernel", "add"), Node("copy")))
    assert [(each.before, each.now) for each in node_differences(one, two)] == [("kernel mul", "kernel add")]
    assert len(node_differences(one, Nodes(one.nodes[:1]))) == 1


def test_nodes_leave_out_what_does_not_come_back() -> None:
    base, moved = kernel(0, 0.5), node_differences(kernel(0, 0.5), kernel(0, 0.25, count=9))
    again = node_differences(base, kernel(0, 0.25, count=7))
    assert [each.now for each in lasting(moved, again, [])] == ["0.25", "0.25"]
    noise = node_differences(base, kernel(0, 0.75))
    assert lasting(moved, moved, noise) == [each for each in moved if each.now == "9"]
