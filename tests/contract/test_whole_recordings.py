"""A recording is compared whole: a flag may decide on effects that no operation shows.

Optimizers between graphs, cleared gradients, modes, state that is taken out of an optimizer, plain results. The flag is
in reach of the watch in most tests, and out of its reach in `test_audit_finds_an_effect_without_operations`.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager, same_bits

CALLS = 22
SCHEDULES: dict[str, Callable[[int], bool]] = {
    "every third call": lambda call: call % 3 == 2,
    "from call 9 on": lambda call: call >= 9,
    "until call 9": lambda call: call < 9,
}


class Parts:
    """What a step works on."""

    def __init__(self, device: torch.device) -> None:
        self.model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2)).to(device)
        self.optimizer = self.new_optimizer()
        self.scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        self.on = False

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.1)

    def decay(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.mul_(0.9)


def steps_under_a_flag(p: Parts) -> None:
    if p.on:
        p.optimizer.step()
        p.optimizer.zero_grad()


def cleared_under_a_flag(p: Parts) -> None:
    p.optimizer.step()
    if p.on:
        p.optimizer.zero_grad()


def scaled_under_a_flag(p: Parts) -> None:
    if p.on:
        p.scaler.step(p.optimizer)
        p.scaler.update()
        p.optimizer.zero_grad()


def order_of_decay(p: Parts) -> None:
    if p.on:
        p.optimizer.step()
        p.decay()
    else:
        p.decay()
        p.optimizer.step()
    p.optimizer.zero_grad()


def two_steps(p: Parts) -> None:
    p.optimizer.step()
    if p.on:
        p.optimizer.step()
    p.optimizer.zero_grad()


def state_taken_out(p: Parts) -> None:
    p.optimizer.step()
    p.optimizer.zero_grad()
    if p.on:
        p.optimizer.state.clear()


def state_of_one_parameter(p: Parts) -> None:
    if p.on and p.model[0].bias in p.optimizer.state:
        del p.optimizer.state[p.model[0].bias]
    p.optimizer.step()
    p.optimizer.zero_grad()


def mode_left(p: Parts) -> None:
    p.optimizer.step()
    p.optimizer.zero_grad()
    p.model.train(not p.on)


def gradient_dropped_before_the_step(p: Parts) -> None:
    if p.on:
        p.model[0].bias.grad = None
    p.optimizer.step()
    p.optimizer.zero_grad()


EFFECTS = (
    *(steps_under_a_flag, cleared_under_a_flag, scaled_under_a_flag, order_of_decay, two_steps),
    *(state_taken_out, state_of_one_parameter, mode_left, gradient_dropped_before_the_step),
)


def program_of(
    device: torch.device, finish: Callable[[Parts], None], before_call: Callable[[Parts, int], None]
) -> Program:
    parts = Parts(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = parts.model(x).square().mean()
        (parts.scaler.scale(loss) if "scale" in finish.__name__ else loss).backward()
        finish(parts)
        return loss.detach()

    batches = [(torch.full((3, 4), float(call), device=device).sin(),) for call in range(CALLS)]
    return Program(step, batches, [parts.model], [parts.optimizer], before_call=lambda call: before_call(parts, call))


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("effect", EFFECTS)
def test_effect_under_a_flag_is_as_in_eager(
    effect: Callable[[Parts], None], schedule: str, device: torch.device
) -> None:
    def flag(parts: Parts, call: int) -> None:
        parts.on = SCHEDULES[schedule](call)

    assert_captured_equals_eager(lambda device: program_of(device, effect, flag), device)


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("scaled", [False, True])
def test_new_optimizer_in_its_place_is_stepped(scaled: bool, device: torch.device) -> None:
    def exchange(parts: Parts, call: int) -> None:
        if call in (9, 15):
            parts.optimizer = parts.new_optimizer()

    def finish(parts: Parts) -> None:
        if scaled:
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
        else:
            parts.optimizer.step()
        parts.optimizer.zero_grad()

    finish.__name__ = "scaled" if scaled else "plain"
    assert_captured_equals_eager(lambda device: program_of(device, finish, exchange), device)


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("effect", [steps_under_a_flag, state_taken_out, two_steps])
def test_audit_finds_an_effect_without_operations(
    effect: Callable[[Parts], None], device: torch.device, tmp_path: Path
) -> None:
    """No watch reaches a file. With an audit at each replay the call that shows the change is right."""
    file = tmp_path / "flag"

    class Hidden(Parts):
        on = property(lambda parts: file.exists(), lambda parts, value: None)  # type: ignore[assignment]

    def build(device: torch.device) -> Program:
        file.touch()
        parts = Hidden(device)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = parts.model(x).square().mean()
            loss.backward()
            effect(parts)
            return loss.detach()

        def before_call(call: int) -> None:
            if call == 12:
                file.unlink()

        batches = [(torch.full((3, 4), float(call), device=device).sin(),) for call in range(CALLS)]
        return Program(step, batches, [parts.model], [parts.optimizer], before_call=before_call)

    assert_captured_equals_eager(build, device, audit=1)


def test_effect_that_stops_is_named_with_its_line(device: torch.device, tmp_path: Path) -> None:
    file, model = tmp_path / "flag", nn.Linear(4, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    file.touch()

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        if file.exists():
            optimizer.step()
        return loss.detach()

    with stepgraph.capture(train, audit=1) as step:
        for _ in range(6):
            step(torch.ones(2, 4, device=device))
        file.unlink()
        with pytest.warns(stepgraph.StepgraphWarning, match="Adam.step -> aten.detach"):
            step(torch.ones(2, 4, device=device))


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("period", [2, 3, 16, 50])
@pytest.mark.parametrize("as_argument", [False, True], ids=["attribute", "argument"])
def test_accumulation_by_a_counter_is_replayed(
    as_argument: bool, period: int, make: Callable[..., torch.optim.Optimizer], device: torch.device
) -> None:
    calls = 110

    def run(wrap: Callable[[Any], Any]) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model, trainer = nn.Linear(4, 2).to(device), types.SimpleNamespace(n=0)
        optimizer, weights = make(model.parameters(), lr=0.1), []

        def train(x: torch.Tensor, last: bool | None = None) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            if trainer.n % period == period - 1 if last is None else last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        step = wrap(train)
        for call in range(calls):
            x = torch.full((3, 4), float(call), device=device).sin()
            if as_argument:
                step(x, last=call % period == period - 1)
            else:
                trainer.n = call
                step(x)
            weights.append(model.weight.detach().clone())
        return weights, step

    eager, _ = run(lambda train: train)
    graphed, step = run(lambda train: stepgraph.capture(train, audit=40))
    assert all(map(torch.equal, eager, graphed))
    assert step.report().replays >= calls - 9, "all but the warm-up of each kind"


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("period", [7, 16])
def test_operation_under_a_counter_is_right_and_replayed(period: int, device: torch.device) -> None:
    trainer = types.SimpleNamespace(n=0)
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: x * 2 if trainer.n % period == period - 1 else x, audit=40) as step:
        for call in range(60):
            trainer.n = call
            assert step(x)[0].item() == (2.0 if call % period == period - 1 else 1.0)
        assert step.report().replays >= 55


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_module_under_a_counter_is_right_and_replayed(device: torch.device) -> None:
    class Counted(nn.Module):
        n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.n % 11 == 10 else x + 0

    model, x = Counted(), torch.ones(2, device=device)
    with stepgraph.graph_modules(model, ["forward"], warmup=2, audit=40) as handle:
        for call in range(60):
            model.n = call
            assert model(x)[0].item() == (2.0 if call % 11 == 10 else 1.0)
        assert handle.report().replays >= 50


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.on = nn.Linear(4, 2), False

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), (2.0 if self.on else 1.0)


class Keys(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        return {"out": self.linear(x), **({"more": 0.5} if self.on else {})}


class Modes(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x)
        self.linear.train(not self.on)
        return hidden


class Shared(Plain):
    """Two results that share memory, or do not."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x)
        return hidden, hidden.view(-1) if self.on else hidden.clone().view(-1)


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("kind", [Plain, Keys, Modes, Shared])
def test_plain_part_of_a_module_is_as_in_eager(kind: type[Plain], device: torch.device) -> None:
    def trace(*, graphed: bool) -> Iterator[Any]:
        torch.manual_seed(0)
        model = kind().to(device)
        if graphed:
            stepgraph.graph_modules(model, ["forward"], warmup=2)
        for call in range(16):
            model.on = call >= 7
            made = model(torch.ones(3, 4, device=device) * call)
            tensors = [t for t in torch.utils._pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
            tensors[0].sum().backward()
            plain = torch.utils._pytree.tree_map(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, made)
            yield plain, model.linear.training, *(t.detach().clone() for t in tensors)

    for eager, graphed in zip(trace(graphed=False), trace(graphed=True), strict=True):
        assert eager[:2] == graphed[:2]
        assert all(map(same_bits, eager[2:], graphed[2:]))


CHANGES = ("load", "clear", "hook", "lr", "scale")


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("scaler", ["none", "disabled", "enabled"])
@pytest.mark.parametrize("make", ["sgd", "fused", "adam"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.pairwise
def test_two_changes_in_one_call_are_both_answered(change: str, make: str, scaler: str, device: torch.device) -> None:
    """A watched value changes without effect, and so does something that needs more than an audit."""
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    }

    def build(device: torch.device) -> Program:
        model, trainer = nn.Linear(4, 2).to(device), types.SimpleNamespace(epoch=0, note=["a"])
        optimizer = optimizers[make](model.parameters())
        scale = torch.amp.GradScaler(device.type, enabled=scaler == "enabled", init_scale=4.0)
        saved: dict[str, Any] = {}

        def step(x: torch.Tensor) -> torch.Tensor:
            if trainer.epoch > 1000 or len(trainer.note) > 50:
                x = x * 2
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scale.scale(loss).backward()
            if scaler == "none":
                optimizer.step()
            else:
                scale.step(optimizer)
                scale.update()
            return loss.detach()

        def halve(*_: Any) -> None:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)

        def before_call(call: int) -> None:
            if call == 4:
                saved.update(_copied(optimizer.state_dict()))
            if call != 8:
                return
            trainer.epoch = call
            trainer.note.append("b")
            if change == "load":
                optimizer.load_state_dict(saved)
            elif change == "clear":
                optimizer.state.clear()
            elif change == "hook":
                optimizer.register_step_pre_hook(halve)
            elif change == "lr":
                optimizer.param_groups[0]["lr"] = 0.01
            elif scaler == "enabled":
                scale.update(2.0)

        batches = [(torch.full((3, 4), float(call), device=device).sin(),) for call in range(14)]
        return Program(step, batches, [model], [optimizer], before_call=before_call)

    assert_captured_equals_eager(build, device)


def _copied(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, tree)


def test_ignored_counter_that_the_step_advances_is_named(device: torch.device) -> None:
    trainer = types.SimpleNamespace(n=0)

    def train(x: torch.Tensor) -> torch.Tensor:
        trainer.n += 1
        return x * 2

    with stepgraph.capture(train, ignore=["trainer.n"]) as step, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(12):
            step(torch.ones(2, device=device))
    told = [str(warning.message) for warning in seen]
    assert sum("trainer.n" in message and "stands still" in message for message in told) == 1
    assert trainer.n < 12


def ramp(model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Any, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean() * min(1.0, (trainer.n + 1) / 12)
    loss.backward()
    optimizer.step()
    return loss.detach()


def phases(model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Any, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), ("warm", "main")[trainer.n >= 20]


def identity(model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Any, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if (trainer.n >= 20) is not True and trainer.flag is not True:
        optimizer.step()
    return loss.detach()


def library_write(model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Any, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = trainer.drop(model(x)).square().mean()
    loss.backward()
    optimizer.step()
    if trainer.n == 20:
        trainer.drop.p = 0.5
    return loss.detach()


BODIES = ["ramp that rests", "result by phases", "identity", "write to a library's module"]


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize(
    ("body", "replays"), [(ramp, 60), (phases, 94), (identity, 90), (library_write, 90)], ids=BODIES
)
def test_number_in_all_its_uses_is_as_in_eager(body: Callable[..., Any], replays: int, device: torch.device) -> None:
    """A ramp that comes to rest, a plain result by phases, identities, a write to a library's module."""
    calls = 100

    def run(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = types.SimpleNamespace(n=0, flag=False, drop=nn.Dropout(0.1))

        def train(x: torch.Tensor) -> Any:
            return body(model, optimizer, trainer, x)

        step, seen = wrap(train), []
        for call in range(calls):
            trainer.n, trainer.flag = call, call >= 30
            result = step(torch.full((3, 4), float(call), device=device).sin())
            loss, *plain = result if isinstance(result, tuple) else (result,)
            seen.append([loss.clone(), model.weight.detach().clone(), *plain])
        return seen, step

    eager, _ = run(lambda train: train)
    graphed, step = run(stepgraph.capture)
    assert [one[2:] for one in eager] == [one[2:] for one in graphed]
    assert all(
        torch.equal(a, b)
        for one, two in zip(eager, graphed, strict=True)
        for a, b in zip(one[:2], two[:2], strict=True)
    )
    assert step.report().replays >= replays


class Remembering(nn.Module):
    """Its forward sets a flag at one call, which changes what the next ones compute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.n, self.late = nn.Linear(4, 4), 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.late:
            y = torch.tanh(y)
        if self.n == 20:
            self.late = True
        return y


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("options", [{}, {"audit": 1}], ids=["default", "each round"])
def test_attribute_that_a_forward_sets_once_is_set(options: dict[str, Any], device: torch.device) -> None:
    def run(*, is_graphed: bool) -> tuple[list[torch.Tensor], bool]:
        torch.manual_seed(0)
        net = nn.Sequential(Remembering()).to(device)
        if is_graphed:
            stepgraph.graph_modules(net, "*", **options)
        seen = []
        for call in range(40):
            net[0].n = call
            result = net(torch.ones(2, 4, device=device))
            result.sum().backward()
            seen.append(result.detach().clone())
        return seen, bool(net[0].late)

    eager, late = run(is_graphed=False)
    graphed, is_late = run(is_graphed=True)
    assert all(map(torch.equal, eager, graphed))
    assert late is is_late is True
