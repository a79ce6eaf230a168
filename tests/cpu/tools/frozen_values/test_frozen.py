"""`stepgraph.frozen`: which numbers a graph has baked in, where they enter, and whether a change is noticed."""

from __future__ import annotations

import array
import contextvars
import dataclasses
import enum
import itertools
import json
import os
import random
import struct
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph.engine.backends.nodes import Node, Nodes, lasting, node_differences
from stepgraph.engine.step.rehearsal import Rehearsal, Rehearsed
from stepgraph.tools.frozen_values import frozen as module
from stepgraph.tools.frozen_values.frozen import examine
from stepgraph.tools.frozen_values.frozen_probe import FrozenProbe
from stepgraph.tools.frozen_values.frozen_report import FrozenReport, FrozenValue, State
from stepgraph.tools.script.steps import StepCalls, StepEvents, StepFinder

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
    assert "another value raises: RuntimeError" in found.reason
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


# -- flags, arrays, strings


def branch(x: torch.Tensor, flag: Any) -> torch.Tensor:
    return torch.relu(x) if flag else torch.tanh(x)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_frozen_flips_flag_that_selects_operations(holder: Any, value: Any) -> None:
    step, name = holder(branch, value)
    report = stepgraph.frozen(step, torch.ones(2, 3))
    found = value_of(report, name)
    assert (found.state, found.value, found.moved_to) == (State.WATCHED, repr(value), repr(type(value)(not value)))
    assert {found.entries[0].before, found.entries[0].now} == {"aten.relu.default", "aten.tanh.default"}
    assert (found.entries[0].file, found.entries[0].line) == (__file__, branch.__code__.co_firstlineno + 1)
    assert report.findings == ()


@pytest.mark.parametrize("holder", HOLDERS)
def test_frozen_finds_unwatched_flag(holder: Any) -> None:
    step, name = holder(branch, True)
    with stepgraph.capture(step, ignore=[name]) as captured:
        for _ in range(5):
            captured(torch.ones(2, 3))
        report = stepgraph.frozen(captured, torch.ones(2, 3))
        assert torch.equal(captured(torch.ones(2, 3)), torch.ones(2, 3)), "the flag is where it was"
    found = value_of(report, name)
    assert (report.findings, found.state) == ((found,), State.BAKED)
    assert found.entries[0].line == branch.__code__.co_firstlineno + 1
    assert "ignore=" in found.reason


class Norm(enum.Enum):
    """Names without numbers."""

    LAYER = "layer"
    NONE = "none"


def test_frozen_moves_enumeration_to_another_member() -> None:
    config = SimpleNamespace(norm=Norm.LAYER)

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (3,)) if config.norm is Norm.LAYER else x * 2

    found = value_of(stepgraph.frozen(step, torch.ones(2, 3)), "config.norm")
    assert (found.state, found.moved_to) == (State.WATCHED, repr(Norm.NONE))
    assert config.norm is Norm.LAYER


def test_frozen_flips_flags_one_by_one() -> None:
    config = SimpleNamespace(**{f"f{i}": False for i in range(20)}, enabled=True, verbose=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        _ = [getattr(config, name) for name in vars(config)]
        return x * 3 if config.enabled and config.verbose else x * 2

    found = states(stepgraph.frozen(step, torch.ones(2)))
    assert found.pop("config.verbose") == "watched", "flipped with `enabled` it has no effect"
    assert set(found.values()) == {"no effect"}


def test_frozen_reports_flag_whose_other_value_raises() -> None:
    config = SimpleNamespace(fused=False, calls=[])

    def step(x: torch.Tensor) -> torch.Tensor:
        if config.fused:
            config.calls.append(1)
            config.cache = x
            raise NotImplementedError("no kernel for this device")
        return x * 2

    report = stepgraph.frozen(step, torch.ones(2))
    found = value_of(report, "config.fused")
    assert found.state is State.WATCHED
    assert "another value raises: NotImplementedError: no kernel for this device" in found.reason
    assert found.entries[0].line == step.__code__.co_firstlineno + 4
    assert vars(config) == {"fused": False, "calls": []}


def test_frozen_survives_flag_that_ends_the_script() -> None:
    config = SimpleNamespace(is_last=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        if config.is_last:
            sys.exit(3)
        return x * 2

    found = value_of(stepgraph.frozen(step, torch.ones(2)), "config.is_last")
    assert "another value raises: SystemExit: 3" in found.reason
    assert config.is_last is False


class Debugged:
    """A step with a branch that no call has taken."""

    def __init__(self) -> None:
        self.debug, self.seen, self.total = False, 0, 5

    def note(self, x: torch.Tensor) -> None:
        self.seen, self.total = self.seen + 1, -1
        self.largest = x.max()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        if self.debug:
            self.note(x)
        return x * 2


def test_frozen_restores_what_a_branch_not_taken_changes() -> None:
    debugged = Debugged()
    with stepgraph.capture(debugged.step) as captured:
        for _ in range(4):
            captured(torch.ones(2))
        found = value_of(stepgraph.frozen(captured, torch.ones(2)), "self.debug")
        assert found.state is State.WATCHED
        assert vars(debugged) == {"debug": False, "seen": 0, "total": 5}
        captures = captured.report().captures
        captured(torch.ones(2))
        assert captured.report().captures == captures


def test_frozen_leaves_flags_with_guards_of_their_own() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    scale = torch.ones((), requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = model(x) * 2 if model.training else model(x)
        return x * scale if scale.requires_grad else x

    report = stepgraph.frozen(step, torch.ones(2, 3))
    assert report.findings == ()
    assert all(value.state is State.WATCHED for value in report.values if "inplace" in value.name)
    assert not [value for value in report.values if value.name.endswith((".training", ".requires_grad"))]
    assert all(module.training for module in model.modules())
    assert scale.requires_grad


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_frozen_judges_flags_of_optimizers(kind: Any) -> None:
    step, optimizer, _ = training(kind, lr=0.1)
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    report = stepgraph.frozen(step, torch.ones(2, 3))
    assert report.findings == ()
    assert value_of(report, "optimizer.param_groups[0]['maximize']").state in (State.WATCHED, State.LIVE)
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == before


def test_frozen_reports_flag_argument_as_graph_of_its_own() -> None:
    report = stepgraph.frozen(lambda x, flag, mode: branch(x, flag), torch.ones(2), flag=True, mode="fast")
    assert states(report) == {"flag": "watched", "mode": "not moved"}
    assert all("graph for each value" in value.reason for value in report.values)


ARRAYS: dict[str, Any] = {
    "floats": np.array([0.5, 2.0]),
    "halves": np.array([0.5, 2.0], dtype=np.float16),
    "zeros": np.zeros(2, dtype=np.float32),
    "integers": np.array([3, 2]),
    "bytes": np.array([3, 255], dtype=np.uint8),
    "complex": np.array([3, 2j]),
    "flags": np.array([False, True]),
    "empty shape": np.array(2.0),
    "a part": np.arange(8.0)[2:4],
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("name", ARRAYS)
def test_frozen_moves_numbers_of_array(name: str, holder: Any) -> None:
    array = ARRAYS[name]
    before = array.copy()

    def use(x: torch.Tensor, array: Any) -> torch.Tensor:
        return x * abs(array.reshape(-1)[-1].item())

    step, spelled = holder(use, array)
    report = stepgraph.frozen(step, torch.ones(2, 3))
    found = value_of(report, spelled)
    assert found.state is State.WATCHED
    assert found.entries[0].line == use.__code__.co_firstlineno + 1
    assert report.findings == ()
    assert array.tobytes() == before.tobytes()


def test_frozen_finds_array_too_large_to_be_watched() -> None:
    table = np.ones(5000)
    report = stepgraph.frozen(lambda x: x * float(table[4000]), torch.ones(2))
    (found,) = report.findings
    assert (found.name, found.state) == ("table", State.BAKED)
    assert found.entries[0].operation == "aten.mul.Tensor"
    assert (table == 1).all()


def test_frozen_finds_array_in_a_tuple() -> None:
    pair = (np.array([2.0]), 3)
    report = stepgraph.frozen(lambda x: x * float(pair[0][0]), torch.ones(2))
    assert states(report) == {"pair[0]": "watched", "pair[1]": "no effect"}


def test_frozen_does_not_write_to_memory_of_others(tmp_path: Path) -> None:
    file = tmp_path / "table"
    np.full(2, 2.0).tofile(file)
    mapped, weight = np.memmap(file, mode="r+", dtype=np.float64), torch.full((2,), 2.0)
    shared, fixed, words = weight.numpy(), np.full(2, 2.0), np.array(["a", "b"])
    fixed.flags.writeable = False
    stamp = file.stat().st_mtime_ns

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * float(mapped[0]) * float(shared[0]) * float(fixed[0]) * len(words)

    report = stepgraph.frozen(step, torch.ones(2))
    reasons = {value.name: value.reason for value in report.values}
    assert set(states(report).values()) == {"not moved"}
    assert "read-only" in reasons["fixed"]
    assert "memory of" in reasons["mapped"]
    assert "memory of" in reasons["shared"]
    assert "<U1" in reasons["words"]
    assert file.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("value", [np.float32(2.0), np.float64(2.0), np.int64(2), np.int8(127), np.complex64(2.0), 2j])
def test_frozen_moves_scalars_of_numpy(value: Any) -> None:
    config = SimpleNamespace(number=value)
    report = stepgraph.frozen(lambda x: x * abs(complex(config.number)), torch.ones(2))
    assert states(report) == {"config.number": "watched"}
    assert config.number is value


ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


def test_frozen_lists_strings_without_moving_them(capsys: pytest.CaptureFixture[str]) -> None:
    config = SimpleNamespace(activation="gelu", names=("a", 2.0))

    def step(x: torch.Tensor) -> torch.Tensor:
        print(config.activation)
        return ACTIVATIONS[config.activation](x) * config.names[1]

    report = stepgraph.frozen(step, torch.ones(2))
    found = value_of(report, "config.activation")
    assert (found.state, found.value, found.moved_to) == (State.FIXED, "'gelu'", "")
    assert "cannot be moved: another string would be a guess" in found.reason
    assert "a change: recorded again" in found.reason
    assert value_of(report, "config.names[0]").state is State.FIXED
    assert value_of(report, "config.names[1]").state is State.WATCHED
    assert report.findings == ()
    assert set(capsys.readouterr().out.split()) == {"gelu"}
    assert config == SimpleNamespace(activation="gelu", names=("a", 2.0))


def test_frozen_does_not_judge_unwatched_string() -> None:
    activation = "gelu"
    with stepgraph.capture(lambda x: ACTIVATIONS[activation](x), ignore=["activation"]) as captured:
        report = stepgraph.frozen(captured, torch.ones(2))
    (found,) = report.findings
    assert (found.name, found.state) == ("activation", State.UNKNOWN)
    assert "ignore=" in found.reason
    assert "another string would be a guess" in found.reason


def test_frozen_lists_environment_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROZEN_MODE", "fast")
    report = stepgraph.frozen(lambda x: x * len(os.environ["FROZEN_MODE"]), torch.ones(2))
    assert states(report) == {"os.environ['FROZEN_MODE']": "not moved"}
    assert os.environ["FROZEN_MODE"] == "fast"


def test_report_shortens_rows_that_say_little() -> None:
    config = SimpleNamespace(**{f"s{i}": "text" * 40 for i in range(9)})

    def step(x: torch.Tensor) -> torch.Tensor:
        _ = [getattr(config, name) for name in vars(config)]
        return x * 2

    report = stepgraph.frozen(step, torch.ones(2))
    assert len(report.values) == 9
    assert all(len(value.value) < 80 for value in report.values)
    assert "Not moved, too: config.s5, config.s6, config.s7, config.s8" in " ".join(str(report).split())


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


# -- numbers that no value in reach explains


def unexplained(report: FrozenReport) -> list[str]:
    return [note for note in report.notes if "out of reach of the watch" in note]


def test_number_of_a_file_is_noted_with_its_line(tmp_path: Path) -> None:
    file, weight = tmp_path / "w", 0.3
    file.write_text("3.7")

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weight * 0.7 + float(file.read_text())

    report = stepgraph.frozen(step, torch.ones(2))
    (note,) = unexplained(report)
    assert f"3.7 in aten.add.Tensor at {os.path.relpath(__file__)}:{step.__code__.co_firstlineno + 1}." in note
    assert ("0.3" in note, "0.7" in note) == (False, False)
    assert report.findings == ()


def test_many_unexplained_numbers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "w").write_text(" ".join(str(3.7 + i) for i in range(8)))

    def step(x: torch.Tensor) -> torch.Tensor:
        for number in (tmp_path / "w").read_text().split():
            x = x + float(number)
        return x

    (note,) = unexplained(stepgraph.frozen(step, torch.ones(2)))
    assert note.endswith(", and 3 more.")


def test_numbers_of_torch_and_of_shapes_are_explained() -> None:
    """Scales of attention, defaults of functions, constants of torch's code, an optimizer's numbers."""
    layer = torch.nn.TransformerEncoderLayer(24, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.normalize(layer(x)).square().mean() / 24**0.5
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.7)
        optimizer.step()
        return loss

    assert unexplained(stepgraph.frozen(step, torch.randn(2, 3, 24))) == []


def test_memory_past_the_watch_is_a_finding() -> None:
    small, large = array.array("d", [1.0]), array.array("d", [1.0] * 5000)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * small[0] * large[0]

    report = stepgraph.frozen(step, torch.ones(2))
    assert states(report) == {"large": "unknown", "small": "not moved"}
    assert "a change: recorded again" in value_of(report, "small").reason
    with stepgraph.capture(step, ignore=["small"]) as captured:
        assert states(stepgraph.frozen(captured, torch.ones(2)))["small"] == "unknown"


# -- the report


def test_report_survives_json() -> None:
    scale = 2.0
    report = stepgraph.frozen(lambda x: x * scale, torch.ones(2))
    again = FrozenReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert str(again) == str(report)
    assert "scale = 2.0" in str(report)
    assert "no value in reach is baked in unwatched" in report.verdict


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

    def at_write(self, call: Any) -> None:
        """The test writes no files."""

    def saw(self, what: str) -> None:
        """No time limit ends the test."""

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


@pytest.mark.parametrize(
    ("garbage", "state"),
    [
        ({}, "no effect"),
        ({2, 3}, "no effect"),  # with the value in both, by chance, and not in the next one
        ({2, 4}, "no effect"),
        ({2, 4, 6, 8}, "watched"),  # as often as it is moved, and never in between
    ],
)
def test_bytes_of_nodes_must_follow_a_value(garbage: set[int], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record, seen = Rehearsal.record, itertools.count()

    def with_nodes(rehearsal: Rehearsal, leaves: Sequence[Any] | None = None) -> Rehearsed:
        count = 9 if next(seen) in garbage else 4
        return dataclasses.replace(record(rehearsal, leaves), nodes=(kernel(0, 0.5, count),))

    monkeypatch.setattr(Rehearsal, "record", with_nodes)
    config = SimpleNamespace(unused=3.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        _ = config.unused
        return x * 2

    assert states(stepgraph.frozen(step, torch.ones(4)))["config.unused"] == state


def test_sizes_of_torchs_own_layers_are_not_moved() -> None:
    """An LSTM that is told of one more layer reads memory behind its weights."""
    net = torch.nn.LSTM(2, 4)
    report = stepgraph.frozen(lambda x: net(x)[0].square().mean(), torch.randn(3, 1, 2))
    assert states(report)["net.num_layers"] == "not moved"
    assert "torch's own layers" in str(report)
    assert states(report)["net.dropout"] != "not moved"
