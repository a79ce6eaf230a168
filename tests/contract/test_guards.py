"""Whatever a user does around a captured step is noticed, handled or refused: never silently stale."""

from __future__ import annotations

import argparse
import copy
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager

CHANGE_AT = 7


def changing(
    device: torch.device,
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
    last: nn.Module | None = None,
    **kwargs: Any,
) -> Program:
    """A plain program, with this last layer if given, that is changed before one of its calls."""
    last = nn.Linear(16, 4) if last is None else last
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), last).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **kwargs)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    def before_call(index: int) -> None:
        if index == CHANGE_AT:
            change(model, optimizer)

    batches = [(torch.randn(4, 8, device=device),) for _ in range(14)]
    return Program(step, batches, [model], [optimizer], before_call=before_call)


def hand_over(optimizer: torch.optim.Optimizer, old: torch.Tensor, new: torch.Tensor) -> None:
    """Let the optimizer go on with another parameter in the place of one."""
    group = optimizer.param_groups[0]["params"]
    group[[p is old for p in group].index(True)] = new
    optimizer.state[new] = optimizer.state.pop(old)


def replace_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    old = model[3].weight
    model[3].weight = nn.Parameter(old.detach().clone() * 0.5)
    hand_over(optimizer, old, model[3].weight)


def swap_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = model[0].weight.data.clone() * 0.5


def replace_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1].running_mean = torch.zeros_like(model[1].running_mean)


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(False)


def add_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Tanh())


def remove_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del model[2]


def load_assign(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {k: v.clone() * 0.5 if v.is_floating_point() else v.clone() for k, v in model.state_dict().items()}
    before = list(model.parameters())
    model.load_state_dict(state, assign=True)
    for old, new in zip(before, model.parameters(), strict=True):
        hand_over(optimizer, old, new)


CHANGES: dict[str, tuple[Callable[..., None], str]] = {
    "parameter replaced": (replace_parameter, "replaced"),
    "data swapped": (swap_data, "moved"),
    "buffer replaced": (replace_buffer, "replaced"),
    "frozen": (freeze, "requires_grad"),
    "module added": (add_module, "added"),
    "module removed": (remove_module, "removed"),
    "load_state_dict assign": (load_assign, "replaced"),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_guard_notices_and_captures_once_more(name: str, fused: bool, device: torch.device) -> None:
    change, told = CHANGES[name]
    report = assert_captured_equals_eager(lambda d: changing(d, change, fused=fused), device)
    assert report.recaptures == 1, report.recapture_reasons
    assert told in next(iter(report.recapture_reasons))
    assert report.captures == 2


@pytest.mark.parametrize("name", CHANGES)
def test_guard_raises_under_strict(name: str, device: torch.device) -> None:
    change, told = CHANGES[name]
    made = changing(device, change)
    with stepgraph.capture(made.step, strict=True) as step:
        for i in range(6):
            step(*made.batches[i])
        change(made.modules[0], made.optimizers[0])
        with pytest.raises(stepgraph.StateChanged, match=told):
            step(*made.batches[6])


def test_guard_in_place_load_state_dict_keeps_the_graph(device: torch.device) -> None:
    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()}
        model.load_state_dict(state)

    report = assert_captured_equals_eager(lambda d: changing(d, load), device)
    assert (report.captures, report.recaptures) == (1, 0)


@pytest.mark.parametrize("fused", [False, True])
def test_guard_optimizer_load_state_dict(fused: bool, device: torch.device) -> None:
    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"] * 2
        optimizer.load_state_dict(state)

    report = assert_captured_equals_eager(lambda d: changing(d, load, fused=fused), device)
    assert report.recaptures == (1 if fused else 0)


def test_guard_model_moved_to_another_dtype(device: torch.device) -> None:
    def to_double(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.double()

    def build(device: torch.device) -> Program:
        made = changing(device, to_double)
        model, optimizer = made.modules[0], made.optimizers[0]

        def step(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = model(x.to(model[0].weight.dtype)).float().pow(2).mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
            return loss

        return Program(step, made.batches, [model], [optimizer], before_call=made.before_call)

    report = assert_captured_equals_eager(build, device)
    assert report.recaptures == 1


def test_guard_hook_on_a_captured_module_is_refused_by_name(device: torch.device) -> None:
    made = changing(device, lambda m, o: None)

    def my_hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 2

    made.modules[0][0].register_forward_hook(my_hook)
    with stepgraph.capture(made.step) as step:
        for i in range(3):
            step(*made.batches[i])
        with pytest.raises(stepgraph.CaptureError, match="module-hook") as caught:
            step(*made.batches[3])
        assert "my_hook" in str(caught.value)
    for safe in (my_hook, my_hook.__qualname__):
        with stepgraph.capture(made.step, safe_hooks=[safe]) as step:
            for i in range(6):
                step(*made.batches[i])
            assert step.report().replays == 3


def test_guard_hook_added_after_capture_is_noticed(device: torch.device) -> None:
    made = changing(device, lambda m, o: None)
    calls: list[int] = []
    with stepgraph.capture(made.step, on_error="eager") as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(6):
            step(*made.batches[i])
        handle = made.modules[0][0].register_forward_hook(lambda *_: calls.append(1))
        for i in range(4):
            step(*made.batches[i])
        assert len(calls) >= 4
        assert "hook" in next(iter(step.report().recapture_reasons))
        handle.remove()


def test_guard_known_hooks_of_torch_are_captured(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)).to(device)
        # the old form keeps an autograd graph from the stream it was made on, which a capture on a GPU must not meet
        old = nn.utils.weight_norm(nn.Linear(8, 4)) if device.type == "cpu" else nn.Linear(8, 4).to(device)
        model = nn.ModuleList([layer, old])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (layer(x) + old(x)).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        return Program(step, [(torch.randn(4, 8, device=device),) for _ in range(10)], [model], [optimizer])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert assert_captured_equals_eager(build, device).recaptures == 0


def make_inputs_require_grads(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.requires_grad_(True)


class QValueHook:
    """As torchrl's: the best action in the place of all values."""

    def __call__(self, module: nn.Module, args: Any, values: torch.Tensor) -> torch.Tensor:
        return values * (values == values.max(dim=-1, keepdim=True).values)


@pytest.fixture(params=["transformers", "torchrl"])
def library_hook(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A hook as a library registers it."""
    if request.param == "torchrl":
        monkeypatch.setattr(QValueHook, "__module__", "torchrl.modules.tensordict_module.actors")
        return QValueHook()
    hook = make_inputs_require_grads
    monkeypatch.setattr(hook, "__module__", "transformers.modeling_utils")
    monkeypatch.setattr(hook, "__qualname__", f"PreTrainedModel.enable_input_require_grads.<locals>.{hook.__name__}")
    return hook


@pytest.mark.parametrize("frozen", [True, False])
def test_guard_known_hooks_of_libraries_are_captured(
    frozen: bool, library_hook: Callable[..., Any], device: torch.device
) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(device)
        model[0].requires_grad_(not frozen)
        model[0].register_forward_hook(library_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        return Program(step, [(torch.randn(4, 8, device=device),) for _ in range(6)], [model], [optimizer])

    report = assert_captured_equals_eager(build, device)
    assert (report.replays, report.recaptures) == (3, 0)


def test_guard_known_hooks_of_libraries_in_a_module(library_hook: Callable[..., Any], device: torch.device) -> None:
    inner = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4)).to(device)
    inner[0].register_forward_hook(library_hook)
    x = torch.randn(4, 8, device=device)
    inner(x).sum().backward()
    expected = inner[1].weight.grad
    inner[1].zero_grad()
    model = nn.Sequential(inner)
    with stepgraph.graph_modules(model, scope=["0"], warmup=1) as handle:
        for _ in range(3):
            inner[1].zero_grad()
            model(x).sum().backward()
            assert torch.equal(inner[1].weight.grad, expected)
        assert handle.report().rows[0].backwards == 2


class Config:
    def __init__(self) -> None:
        self.temperature = 1.0


SCALE = {"value": 1.0}


def test_watch_value_that_changed_is_never_frozen(device: torch.device) -> None:
    config = Config()
    weight = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weight * config.temperature * SCALE["value"]

    with stepgraph.capture(step) as captured:
        x = torch.ones(2, device=device)
        for _ in range(5):
            assert captured(x).tolist() == [1.0, 1.0]
        weight = 2.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"weight: 1\.0 -> 2\.0"):
            assert captured(x).tolist() == [2.0, 2.0]
        captured(x)
        config.temperature = 3.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"config\.temperature: 1\.0 -> 3\.0"):
            assert captured(x).tolist() == [6.0, 6.0]
        captured(x)
        SCALE["value"] = 0.5
        with pytest.warns(stepgraph.StepgraphWarning, match=r"SCALE\['value'\]: 1\.0 -> 0\.5"):
            assert captured(x).tolist() == [3.0, 3.0]
        assert captured.report().recaptures == 3
        assert captured(x).tolist() == [3.0, 3.0]
    SCALE["value"] = 1.0


def test_watch_value_that_keeps_changing_stays_eager_and_says_so(device: torch.device) -> None:
    factor = 0.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    with stepgraph.capture(step) as captured, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        x = torch.ones(2, device=device)
        for i in range(12):
            factor = float(max(0, i - 4))
            assert captured(x).tolist() == [factor] * 2
        report = captured.report()
    assert report.recaptures == 3  # the last of them for one call: the step's Python had run for it
    assert report.eager_reasons == {"warm-up": 3, "the operations keep changing: factor": 4}
    assert len(seen) == 3
    assert "stay eager" in str(seen[-1].message)
    assert "ignore=['factor']" in str(seen[-1].message)


def annealed(device: torch.device, epochs: int, steps: int) -> Program:
    """A loss whose second term gets another weight in each epoch."""
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = {"kl": 0.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        mean = model(x)
        loss = (mean - x).pow(2).mean() + weights["kl"] * mean.pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    def before_call(index: int) -> None:
        weights["kl"] = (index // steps) / epochs

    batches = [(torch.randn(3, 4, device=device),) for _ in range(epochs * steps)]
    return Program(step, batches, [model], [optimizer], before_call=before_call)


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_watch_value_that_changes_once_an_epoch_is_captured(device: torch.device) -> None:
    report = assert_captured_equals_eager(lambda device: annealed(device, 20, 10), device)
    assert report.replays == 7 + 19 * 10, "the call that shows the change replays the new recording"
    assert report.eager_calls == 3
    assert report.recaptures == 19
    assert report.graphs == 1


@pytest.mark.parametrize(("steps", "epochs", "recaptures"), [(8, 6, 5), (7, 4, 2)])
@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_watch_change_after_few_replays_counts(steps: int, epochs: int, recaptures: int, device: torch.device) -> None:
    """After two eager calls each call is a replay; graphs of earlier epochs keep no memory and no place."""
    program = annealed(device, epochs, steps)
    pool = []
    with stepgraph.capture(program.step, warmup=1, max_graphs=1) as step:
        for index, batch in enumerate(program.batches):
            program.before_call(index)
            step(*batch)
            pool.append(step.report().pool_bytes)
        report = step.report()
    last = int(recaptures < 5)  # one more recording, for the one call that shows that it does not pay
    assert report.recaptures == recaptures + last
    assert report.replays == steps * (recaptures + 1) - 2 + last
    kept_changing = report.eager_reasons.get("the operations keep changing: weights['kl']", 0)
    assert kept_changing == steps * (epochs - 1 - recaptures) - last
    assert max(pool) == pool[2 * steps - 1], "of all epochs, after the first recapture"


def test_watch_strict_raises_with_the_name(device: torch.device) -> None:
    factor = 1.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    with stepgraph.capture(step, strict=True) as captured:
        for _ in range(5):
            captured(torch.ones(2, device=device))
        factor = 2.0
        with pytest.raises(stepgraph.StateChanged, match=r"factor: 1\.0 -> 2\.0"):
            captured(torch.ones(2, device=device))


def test_watch_ignored_value_is_left_alone(device: torch.device) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.steps, self.alpha = 0, 2.0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.alpha

    trainer = Trainer()
    with stepgraph.capture(trainer.step, ignore=["self.steps"]) as captured:
        for _ in range(8):
            captured(torch.ones(2, device=device))
            trainer.steps += 1
        assert captured.report().replays == 5
        trainer.alpha = 5.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"self\.alpha"):
            assert captured(torch.ones(2, device=device)).tolist() == [5.0, 5.0]


def test_watch_tensor_in_a_closure_by_identity_and_address(device: torch.device) -> None:
    mask = torch.ones(2, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * mask

    with stepgraph.capture(step) as captured:
        x = torch.ones(2, device=device)
        for _ in range(5):
            captured(x)
        mask.mul_(3)
        assert captured(x).tolist() == [3.0, 3.0]
        assert captured.report().recaptures == 0
        mask = torch.full((2,), 4.0, device=device)
        with pytest.warns(stepgraph.StepgraphWarning, match="mask"):
            assert captured(x).tolist() == [4.0, 4.0]
        captured(x)
        mask.data = torch.full((2,), 5.0, device=device)
        with pytest.warns(stepgraph.StepgraphWarning, match="another address"):
            assert captured(x).tolist() == [5.0, 5.0]


def test_watch_value_in_a_function_that_the_step_calls(device: torch.device) -> None:
    weight = 1.0

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    def step(x: torch.Tensor) -> torch.Tensor:
        return loss_of(x) + 1

    with stepgraph.capture(step) as captured:
        for _ in range(5):
            captured(torch.ones(2, device=device))
        weight = 3.0
        with pytest.warns(stepgraph.StepgraphWarning, match="weight"):
            assert captured(torch.ones(2, device=device)).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("kind", ["counter", "list", "attribute"])
def test_watch_value_that_the_step_itself_changes_is_refused(kind: str, device: torch.device) -> None:
    config, losses, count = Config(), [], 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if kind == "counter":
            count += 1
        elif kind == "list":
            losses.append(x)
        else:
            config.temperature += 1
        return x * 2

    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(torch.ones(2, device=device))
        with pytest.raises(stepgraph.CaptureError, match="host-value") as caught:
            captured(torch.ones(2, device=device))
    named = {"counter": "count: ", "list": "len(losses): ", "attribute": "config.temperature: "}
    assert named[kind] in str(caught.value)


def test_watch_rebound_model_is_noticed(device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    with stepgraph.capture(step) as captured:
        x = torch.ones(2, device=device)
        for _ in range(5):
            captured(x)
        model = nn.Linear(2, 2).to(device)
        with pytest.warns(stepgraph.StepgraphWarning, match="model"):
            assert torch.equal(captured(x), step(x))
        assert torch.equal(captured(x), step(x))


def test_watch_number_of_a_module_is_never_frozen(device: torch.device) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.enabled = 2.0, True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor if self.enabled else x

    model = nn.Sequential(nn.Dropout(0.0), nn.Sequential(Scaled())).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    with stepgraph.capture(step) as captured:
        x = torch.ones(4, device=device)
        for _ in range(5):
            assert captured(x).tolist() == [2.0] * 4
        model[1][0].factor = 3.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"factor: 2\.0 -> 3\.0"):
            assert captured(x).tolist() == [3.0] * 4
        captured(x)
        model[1][0].enabled = False
        with pytest.warns(stepgraph.StepgraphWarning, match=r"enabled: True -> False"):
            assert captured(x).tolist() == [1.0] * 4
        captured(x)
        model[0].p = 1.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"\.p: 0\.0 -> 1\.0"):
            assert captured(x).tolist() == [0.0] * 4


def test_watch_module_counting_its_calls_is_refused_or_ignored(device: torch.device) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * 2

    model = nn.Sequential(Counting())
    with stepgraph.capture(lambda x: model(x)) as captured:
        for _ in range(3):
            captured(torch.ones(2, device=device))
        with pytest.raises(stepgraph.CaptureError, match=r"Sequential\.0\.calls"):
            captured(torch.ones(2, device=device))
    with stepgraph.capture(lambda x: model(x), ignore=["Sequential.0.calls"]) as captured:
        for _ in range(6):
            captured(torch.ones(2, device=device))
        assert captured.report().replays == 3


def test_watch_two_models_of_one_class_are_distinguished(device: torch.device) -> None:
    one, two = nn.Sequential(nn.Dropout(0.0)), nn.Sequential(nn.Dropout(0.0))

    def step(x: torch.Tensor) -> torch.Tensor:
        return one(x) + two(x)

    with stepgraph.capture(step) as captured:
        x = torch.ones(2, device=device)
        for _ in range(5):
            assert captured(x).tolist() == [2.0, 2.0]
        two[0].p = 1.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"Sequential#2\.0\.p"):
            assert captured(x).tolist() == [1.0, 1.0]


def test_guard_recapture_after_touching_more_objects_replays(device: torch.device) -> None:
    """Eval mode calls a module that training does not: what was captured before must still be found after a change."""

    def build(device: torch.device) -> Program:
        model = nn.ModuleDict({"body": nn.Linear(8, 8), "extra": nn.Linear(8, 8)}).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inner = [model]  # out of the closure's reach: found only by what is called

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            body = inner[0]["body"]
            out = body(x) if body.training else inner[0]["extra"](body(x))
            loss = out.pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        def before_call(index: int) -> None:
            model.train(index not in range(6, 12))
            if index == 14:
                optimizer.param_groups[0]["lr"] = 0.05

        batches = [(torch.randn(4, 8, device=device),) for _ in range(24)]
        return Program(step, batches, [model], [optimizer], before_call=before_call)

    report = assert_captured_equals_eager(build, device)
    # one in each mode, and that of training again; the first call back in training finds gradients that no call before
    # it has found, and runs eagerly
    assert (report.captures, report.recaptures) == (3, 1)
    assert report.eager_reasons == {"warm-up": 7}


def test_watch_module_named_in_the_closure(device: torch.device) -> None:
    drop = nn.Dropout(0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return drop(x)

    with stepgraph.capture(step) as captured:
        x = torch.ones(2, device=device)
        for _ in range(5):
            assert captured(x).tolist() == [1.0, 1.0]
        drop.p = 1.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"drop\.p: 0\.0 -> 1\.0"):
            assert captured(x).tolist() == [0.0, 0.0]


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


def test_watch_takes_any_object_that_a_step_names(device: torch.device) -> None:
    path, pattern, slotted, stream = Path("a"), re.compile("a"), Slotted(), io.StringIO()
    args = argparse.Namespace(alpha=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        assert all(named is not None for named in (path, pattern, stream))
        return x * slotted.value * args.alpha

    with stepgraph.capture(step) as captured:
        for _ in range(6):
            assert captured(torch.ones(2, device=device)).tolist() == [2.0, 2.0]
        assert captured.report().replays == 3
        args.alpha = 2.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"args\.alpha: 1\.0 -> 2\.0"):
            assert captured(torch.ones(2, device=device)).tolist() == [4.0, 4.0]
        captured(torch.ones(2, device=device))
        slotted.value = 3.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"slotted\.value: 2\.0 -> 3\.0"):
            assert captured(torch.ones(2, device=device)).tolist() == [6.0, 6.0]


class Described(nn.Module):
    """A layer that holds the shape of another, with no data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("like", torch.empty(3, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) * len(self.like)
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.layer._apply(fn, recurse)  # a meta tensor cannot be moved
        return self


def test_guard_meta_tensors_in_reach_are_no_other_device(device: torch.device) -> None:
    shape, plan = torch.empty(5, device="meta"), nn.Linear(8, 4, device="meta")

    def build(device: torch.device) -> Program:
        model = Described().to(device)
        optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).mean() * len(shape) * plan.in_features
            loss.backward()
            optimizer.step()
            return loss

        return Program(step, [(torch.randn(4, 8, device=device),) for _ in range(6)], [model.layer], [optimizer])

    assert assert_captured_equals_eager(build, device).replays == 3


def test_guard_meta_tensors_of_a_graphed_module_are_left_alone(device: torch.device) -> None:
    x, model = torch.ones(2, 8, device=device), nn.Sequential(Described()).to(device)
    expected = model(x).detach()
    with stepgraph.graph_modules(model, scope=["0"], warmup=1) as handle:
        for _ in range(3):
            assert torch.equal(model(x), expected)
        assert handle.report().rows[0].forwards == 2
    graphed = stepgraph.make_graphed_callables(Described().to(device), (x,))
    assert graphed(x).shape == (2, 4)


def test_guard_meta_tensor_as_an_argument_is_refused(device: torch.device) -> None:
    with stepgraph.capture(lambda x, like: x * len(like)) as step:
        with pytest.raises(stepgraph.InvalidArgument, match="meta") as caught:
            step(torch.ones(2, device=device), torch.empty(3, device="meta"))
        assert caught.value.rule == "tensor-class"


def test_guard_meta_tensor_as_an_argument_runs_eagerly(device: torch.device) -> None:
    like = torch.empty(3, device="meta")
    with stepgraph.capture(lambda x, like: x * len(like), on_error="eager") as step:
        for number in range(5):
            assert step(torch.full((2,), float(number), device=device), like).tolist() == [3.0 * number] * 2
        assert step.report().replays == 0
        assert any("meta device" in reason for reason in step.report().eager_reasons)


def test_verify_compares_all_but_meta_tensors(device: torch.device) -> None:
    like = torch.empty(3, device="meta")
    report = stepgraph.verify(lambda x: (x * len(like), like), [torch.ones(2, device=device)], steps=5)
    assert report.equal
    with pytest.raises(stepgraph.StepgraphError) as caught:
        stepgraph.verify(lambda x, like: x * len(like), [(torch.ones(2, device=device), like)], steps=5)
    assert caught.value.rule == "tensor-class"


@pytest.mark.parametrize("make", [mock.MagicMock, mock.Mock])
def test_watch_mock_in_reach_is_no_iterator(make: Any, device: torch.device) -> None:
    log = make()

    def step(x: torch.Tensor) -> torch.Tensor:
        log.info("called")
        return x * 2

    with stepgraph.capture(step, warmup=2) as captured:
        for _ in range(4):
            captured(torch.ones(2, device=device))
        assert captured.report().replays == 2
