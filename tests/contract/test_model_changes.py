"""What happens to a model and its optimizer without an event, and what a step does to them itself: never silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import stepgraph
from stepgraph.engine.guards.optimizer import StateGuard
from stepgraph.engine.guards.protocol import told
from tests.contract.test_guards import CHANGE_AT, changing
from tests.harness import Program, assert_captured_equals_eager

Change = Callable[[Any, Any], None]


def remove_bias(model: Any, optimizer: Any) -> None:
    model[0].bias = None


def replace_behind_torchs_back(model: Any, optimizer: Any) -> None:
    model[0]._parameters["bias"] = nn.Parameter(model[0].bias.detach() * 0.5)


def exchange_children(model: Any, optimizer: Any) -> None:
    model._modules["2"] = nn.ReLU()


def turn_data(model: Any, optimizer: Any) -> None:
    square = model[3][0].weight
    square.data = square.data.t()


def hook_a_weight(model: Any, optimizer: Any) -> None:
    model[0].weight.register_hook(lambda grad: grad * 0.5)


def hook_after_accumulation(model: Any, optimizer: Any) -> None:
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halve)


CHANGES: dict[str, tuple[Change, str]] = {
    "bias removed": (remove_bias, "bias` was removed"),
    "parameter replaced behind torch's back": (replace_behind_torchs_back, "bias` was replaced"),
    "child replaced behind torch's back": (exchange_children, "`Sequential.2` was replaced"),
    "data with other strides": (turn_data, "other strides"),
    "hook on a weight": (hook_a_weight, "a hook of `Sequential.0.weight` was added"),
    "hook after accumulation": (hook_after_accumulation, "post_accumulate_grad_hooks"),
}


def nested(device: torch.device, change: Change, **options: Any) -> Program:
    """`changing`, with a square layer one level down."""
    return changing(device, change, nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_model_change_without_an_event_is_noticed(name: str, fused: bool, device: torch.device) -> None:
    change, told = CHANGES[name]
    fused = fused and change is not turn_data  # on CUDA the fused kernel wants the strides that its state has
    report = assert_captured_equals_eager(lambda d: nested(d, change, fused=fused), device)
    assert report.recaptures == 1, report.recapture_reasons
    assert told in next(iter(report.recapture_reasons))


def test_model_data_that_was_cut_is_noticed(device: torch.device) -> None:
    """The first rows of one layer, the first columns of the next: at their addresses, with their strides."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(device)
    x = torch.randn(4, 16, device=device)

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    with stepgraph.capture(evaluate) as step:
        for _ in range(6):
            step(x)
        first, second = model
        first.weight.data, first.bias.data = first.weight.data[:8], first.bias.data[:8]
        second.weight.data = second.weight.data[:, :8]
        for _ in range(3):
            assert torch.equal(step(x), evaluate(x))
        report = step.report()
    assert list(report.recapture_reasons) == ["`Sequential.0.weight` has the shape [8, 16], not [16, 16]"]


def test_model_hook_that_is_taken_off_a_weight_is_noticed(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        program = nested(device, lambda model, optimizer: handle.remove())
        (model,) = program.modules
        handle = model.get_parameter("0.weight").register_hook(lambda grad: grad * 0.5)
        return program

    assert assert_captured_equals_eager(build, device).recaptures == 1


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_model_value_in_a_hook_of_a_weight_is_watched(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        factor = {"of the gradient": 0.5}
        program = nested(device, lambda model, optimizer: factor.update({"of the gradient": 0.25}))
        (model,) = program.modules
        model.get_parameter("0.weight").register_hook(lambda grad: grad * factor["of the gradient"])
        return program

    assert assert_captured_equals_eager(build, device).recaptures == 1


def test_model_hook_on_every_module_is_refused_by_name(device: torch.device) -> None:
    program = nested(device, lambda model, optimizer: None)

    def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    with stepgraph.capture(program.step) as step:
        for i in range(5):
            step(*program.batches[i])
        handle = register_module_forward_hook(double)
        try:
            with pytest.raises(
                stepgraph.CaptureError, match=r"every module has a hook, `.*double`.*module-hook"
            ) as told:
                for _ in range(2):
                    step(*program.batches[5])
            assert "safe_hooks" in told.value.fix
        finally:
            handle.remove()


def clear_state(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def drop_one_state(model: Any, optimizer: Any) -> None:
    del optimizer.state[model[0].weight]


def replace_entry(model: Any, optimizer: Any) -> None:
    kept = optimizer.state[model[0].weight]
    kept["exp_avg"] = torch.zeros_like(kept["exp_avg"])


def replace_entries_and_keep_them(model: Any, optimizer: Any) -> None:
    optimizer.backup = [dict(kept) for kept in optimizer.state.values()]
    for kept in optimizer.state.values():
        kept["exp_avg"] = torch.zeros_like(kept["exp_avg"])


def exchange_one_state_and_keep_it(model: Any, optimizer: Any) -> None:
    parameter = model[3][0].weight
    optimizer.backup = optimizer.state[parameter]
    optimizer.state[parameter] = {key: value.clone() * 0.5 for key, value in optimizer.backup.items()}


def exchange_parameters(model: Any, optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][0])
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2, 2, device=model[0].weight.device))


def other_step(model: Any, optimizer: Any) -> None:
    original = optimizer.step

    def twice() -> None:
        original()
        original()

    optimizer.step = twice


OPTIMIZER_CHANGES: dict[str, tuple[Change, str]] = {
    "state cleared": (clear_state, "the state of AdamW"),
    "state of one parameter dropped": (drop_one_state, "the state of AdamW"),
    "entry of the state replaced": (replace_entry, "'exp_avg' was replaced"),
    "entries of the state replaced and kept": (replace_entries_and_keep_them, "'exp_avg' was replaced"),
    "state of one parameter exchanged and kept": (exchange_one_state_and_keep_it, "the state of AdamW"),
    "parameters exchanged": (exchange_parameters, "other parameters"),
    "step replaced": (other_step, "AdamW.step was replaced"),
}


@pytest.mark.parametrize("name", OPTIMIZER_CHANGES)
def test_optimizer_change_is_noticed(name: str, device: torch.device) -> None:
    change, told = OPTIMIZER_CHANGES[name]
    report = assert_captured_equals_eager(lambda d: nested(d, change, fused=True), device)
    assert report.recaptures == 1, report.recapture_reasons
    assert told in next(iter(report.recapture_reasons))


def test_optimizer_state_with_swapped_data_is_noticed_by_guard(device: torch.device) -> None:
    program = nested(device, lambda model, optimizer: None, fused=True)
    with stepgraph.capture(program.step) as step:
        for i in range(5):
            step(*program.batches[i])
        (optimizer,) = program.optimizers
        guard = StateGuard(optimizer)
        assert not guard.changed()
        entry = next(iter(optimizer.state.values()))["exp_avg"]
        before, entry.data = entry.data, entry.data.clone()
        assert told(guard.changed()) == "the state of AdamW: a tensor moved to another address"
        entry.data = before
        assert not guard.changed()


def test_gradient_whose_data_was_swapped_is_noticed(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        def clip(model: Any, optimizer: Any) -> None:
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)

        return nested(device, clip)

    report = assert_captured_equals_eager(build, device)
    assert "(`.grad.data = ...`)" in next(iter(report.recapture_reasons))


class Named(nn.Module):
    """A module of which a method is called, and never the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_parameter("shift", None)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) @ self.scale
        return y if self.shift is None else y + self.shift


def unfreeze(module: Named) -> None:
    module.scale.requires_grad_(True)


def turn(module: Named) -> None:
    module.scale.data = module.scale.data.t()


def fill(module: Named) -> None:
    module._parameters["shift"] = nn.Parameter(torch.ones(4, device=module.scale.device), requires_grad=False)


@pytest.mark.parametrize("change", [unfreeze, turn, fill])
def test_model_whose_method_is_called_is_guarded(change: Callable[[Named], None], device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        module = Named().to(device)
        optimizer = torch.optim.SGD(module.inner.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module.encode(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        def before_call(index: int) -> None:
            if index == CHANGE_AT:
                change(module)

        batches = [(torch.randn(2, 4, device=device) / 4,) for _ in range(CHANGE_AT + 5)]
        return Program(step, batches, [module], [optimizer], before_call=before_call)

    assert assert_captured_equals_eager(build, device).recaptures == 1


def test_model_with_a_sparse_buffer_is_captured(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    model.register_buffer("adjacency", torch.eye(4, device=device).to_sparse())
    x = torch.ones(2, 4, device=device)
    with stepgraph.capture(lambda x: model(x).sum().detach()) as step:
        for _ in range(6):
            assert torch.equal(step(x), model(x).sum())
        assert step.report().replays == 3


def test_model_data_that_is_conjugated_is_noticed(device: torch.device) -> None:
    model = nn.Module()
    model.register_buffer("k", torch.randn(4, dtype=torch.complex64, device=device))
    x = torch.randn(4, dtype=torch.complex64, device=device)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * model.k

    with stepgraph.capture(turned) as step:
        for index in range(8):
            if index == 5:
                model.k.data = model.k.data.conj()
            assert torch.equal(step(x), turned(x))
        assert step.report().recaptures == 1


def test_optimizer_scheduler_made_after_the_capture_is_no_change(device: torch.device) -> None:
    def schedule(model: Any, optimizer: Any) -> None:
        optimizer.kept = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    report = assert_captured_equals_eager(lambda d: nested(d, schedule, fused=True), device)
    assert (report.captures, report.recaptures) == (1, 0)


def test_optimizer_hook_on_every_step_runs_at_every_step(device: torch.device) -> None:
    program = nested(device, lambda model, optimizer: None, fused=True)
    seen: list[str] = []
    with stepgraph.capture(program.step) as step:
        for i in range(5):
            step(*program.batches[i])
        handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append("stepped"))
        try:
            for i in range(5):
                step(*program.batches[i])
        finally:
            handle.remove()
        assert seen == ["stepped"] * 5
        assert step.report().recapture_reasons == {"a step hook of all optimizers was added": 1}


def freeze_and_slow_down(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(False)
    optimizer.param_groups[0]["lr"] = 1e-3


def grow_and_slow_down(model: Any, optimizer: Any) -> None:
    new = nn.Linear(4, 4).to(model[0].weight.device)
    model.append(new)
    optimizer.add_param_group({"params": list(new.parameters())})
    optimizer.param_groups[0]["lr"] = 1e-3


@pytest.mark.parametrize("change", [freeze_and_slow_down, grow_and_slow_down])
def test_change_of_a_number_hides_no_other_change(change: Change, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        program = nested(device, change, fused=True)
        (model,), (optimizer,) = program.modules, program.optimizers

        def step(x: torch.Tensor) -> torch.Tensor:  # gradients are dropped outside
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        def before_call(index: int) -> None:
            optimizer.zero_grad()
            program.before_call(index)
            if index == CHANGE_AT + 3:
                model[-1].requires_grad_(False)

        return Program(step, program.batches, [model], [optimizer], before_call=before_call)

    assert_captured_equals_eager(build, device)


@pytest.mark.parametrize("change", [freeze_and_slow_down, grow_and_slow_down])
def test_change_beside_a_number_raises_under_strict(change: Change, device: torch.device) -> None:
    program = nested(device, change, fused=True)
    with stepgraph.capture(program.step, strict=True) as step:
        for i in range(5):
            step(*program.batches[i])
        change(program.modules[0], program.optimizers[0])
        with pytest.raises(stepgraph.StateChanged):
            step(*program.batches[5])


def test_group_added_raises_under_strict(device: torch.device) -> None:
    program = nested(device, lambda model, optimizer: None, fused=True)
    with stepgraph.capture(program.step, strict=True) as step:
        for i in range(5):
            step(*program.batches[i])
        program.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2, device=device))]})
        with pytest.raises(stepgraph.StateChanged, match=r"a group of .* was added or removed"):
            step(*program.batches[5])


AVERAGE_CHANGES: dict[str, Callable[[Any], None]] = {
    "data swapped": lambda average: setattr(average[0].weight, "data", average[0].weight.data.clone()),
    "weight replaced": lambda average: setattr(average[0], "weight", nn.Parameter(torch.ones_like(average[0].weight))),
    "loaded by assignment": lambda average: average.load_state_dict(
        {k: v.clone() for k, v in average.state_dict().items()}, assign=True
    ),
    "buffer replaced": lambda average: setattr(average[1], "running_mean", torch.ones_like(average[1].running_mean)),
}


@pytest.mark.parametrize("name", AVERAGE_CHANGES)
def test_model_that_is_used_and_not_called_is_guarded(name: str, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        program = nested(device, lambda model, optimizer: AVERAGE_CHANGES[name](average), fused=True)
        average = copy.deepcopy(program.modules[0]).requires_grad_(False)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = program.step(x)
            with torch.no_grad():
                for kept, new in zip(average.parameters(), program.modules[0].parameters(), strict=True):
                    kept.lerp_(new, 0.1)
                average[1].running_mean.add_(1)
            return loss

        return Program(step, program.batches, [*program.modules, average], program.optimizers, (), program.before_call)

    assert assert_captured_equals_eager(build, device).recaptures == 1


class Averaging(nn.Module):
    """Keeps a running mean in a buffer, in one of two ways."""

    mean: torch.Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return x - self.mean


def refused(step: Callable[..., Any], device: torch.device, **options: Any) -> stepgraph.StepgraphError:
    x = torch.ones(3, device=device)
    with stepgraph.capture(step, **options) as captured, pytest.raises(stepgraph.CaptureError) as told:
        for _ in range(6):
            captured(x)
    return told.value


@pytest.mark.parametrize("warmup", [1, 3])
def test_own_buffer_put_in_another_place_is_refused(warmup: int, device: torch.device) -> None:
    module = Averaging(in_place=False).to(device)
    error = refused(module.forward, device, warmup=warmup)
    assert error.rule == "own-change"
    assert "`Averaging.mean`" in error.what
    assert "in place" in error.fix
    kept = module.mean
    assert kept.isfinite().all()  # that of the last eager call


def test_own_buffer_changed_in_place_is_captured(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        module = Averaging(in_place=True).to(device)
        return Program(module.forward, [(torch.randn(3, device=device),) for _ in range(8)], [module])

    assert_captured_equals_eager(build, device)


@pytest.mark.parametrize("warmup", [1, 3])
def test_own_data_given_to_a_parameter_is_refused(warmup: int, device: torch.device) -> None:
    model = nn.Linear(3, 1).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.data - 0.1 * parameter.grad
        return loss

    error = refused(step, device, warmup=warmup)
    assert error.rule == "own-change"
    assert "`Linear.weight` other data" in error.what
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_own_mode_is_left_changed_by_replays_too(fused: bool, device: torch.device) -> None:
    """`model.train()` in the step, and an evaluation now and then."""

    def build(device: torch.device) -> Program:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device)
        frozen = nn.Dropout(0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)

        def step(x: torch.Tensor) -> torch.Tensor:
            x = model(x).detach()  # in the mode that it finds
            model.train()
            frozen.eval()
            optimizer.zero_grad()
            loss = frozen(model(x)).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        def before_call(index: int) -> None:
            assert index == 0 or (model[2].training and not frozen.training)
            if index % 2:
                model.eval()
                frozen.train()

        batches = [(torch.randn(3, 4, device=device),) for _ in range(14)]
        return Program(step, batches, [model, frozen], [optimizer], before_call=before_call)

    report = assert_captured_equals_eager(build, device)
    assert (report.captures, report.recaptures, report.replays) == (2, 0, 8)


def test_own_flag_left_changed_is_refused(device: torch.device) -> None:
    model = nn.Linear(3, 1).to(device)

    def freezes(x: torch.Tensor) -> torch.Tensor:
        model.requires_grad_(not model.weight.requires_grad)
        return model(x)

    assert "requires_grad" in refused(freezes, device).what


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_number_set_to_its_own_value_is_refused(fused: bool, device: torch.device) -> None:
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)

    def step(x: torch.Tensor, lr: float) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    with stepgraph.capture(step) as captured, pytest.raises(stepgraph.CaptureError) as told:
        for _ in range(5):
            captured(torch.ones(3, device=device), 0.1)
    assert told.value.rule == "host-value"
    assert "AdamW.param_groups[0]['lr']" in told.value.what
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert type(optimizer.param_groups[0]) is dict


@pytest.mark.parametrize("change", [remove_bias, exchange_children, clear_state, freeze_and_slow_down])
def test_change_goes_on_raising_under_strict(change: Change, device: torch.device) -> None:
    program = nested(device, change, fused=True)
    with stepgraph.capture(program.step, strict=True) as step:
        for i in range(6):
            step(*program.batches[i])
        change(program.modules[0], program.optimizers[0])
        for _ in range(4):
            with pytest.raises(stepgraph.StateChanged):
                step(*program.batches[6])


class Deciding(nn.Module):
    """Works by a method of its own, so that nobody calls the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return (out * 2 if self.training else out).sum()


def test_mode_of_a_model_that_is_not_called_selects_the_graph(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        model = Deciding().to(device)

        def step(x: torch.Tensor) -> torch.Tensor:
            return model.loss(x)

        def before_call(index: int) -> None:
            model.training = index not in (6, 7, 8, 9, 10)

        batches = [(torch.randn(2, 3, device=device),) for _ in range(14)]
        return Program(step, batches, [model], before_call=before_call)

    assert assert_captured_equals_eager(build, device).captures == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("called", [False, True])
def test_model_of_torchscript_is_captured(called: bool, device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        scripted = torch.jit.trace(nn.Linear(3, 3).to(device), torch.ones(2, 3, device=device))
        model = nn.Sequential(scripted, nn.Linear(3, 2).to(device)) if called else nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).sum() + sum(p.sum() for p in scripted.parameters())
            loss.backward()
            optimizer.step()
            return loss

        batches = [(torch.randn(2, 3, device=device),) for _ in range(8)]
        return Program(step, batches, [model], [optimizer])

    assert_captured_equals_eager(build, device)


def test_state_that_the_step_makes_again_each_time_is_refused(device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.state[weight]["squares"] = weight.detach().square()
        optimizer.step()
        return loss

    with stepgraph.capture(step) as captured, pytest.raises(stepgraph.CaptureError, match="state of an optimizer"):
        for _ in range(12):
            captured(torch.ones(2, device=device))


def test_value_changed_only_by_the_first_call_is_accepted(device: torch.device) -> None:
    cache: dict[str, torch.Tensor] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        if "mask" not in cache:
            cache["mask"] = torch.ones_like(x)
        return x * cache["mask"]

    with stepgraph.capture(step, warmup=1) as captured:
        for _ in range(5):
            captured(torch.ones(2, device=device))
        assert captured.report().replays == 3


def test_default_replaced_goes_on_raising_under_strict(device: torch.device) -> None:
    def scaled(x: torch.Tensor, scale: float = 2.0, *, shift: float = 1.0) -> torch.Tensor:
        return x * scale + shift

    for change in (lambda: setattr(scaled, "__defaults__", (3.0,)), lambda: scaled.__kwdefaults__.update(shift=2.0)):
        with stepgraph.capture(lambda x: scaled(x), strict=True) as step:
            for _ in range(6):
                step(torch.ones(2, device=device))
            change()
            for _ in range(4):
                with pytest.raises(stepgraph.StateChanged):
                    step(torch.ones(2, device=device))


def test_hook_removed_beside_others_keeps_raising_under_strict(device: torch.device) -> None:
    program = nested(device, lambda model, optimizer: None, fused=True)
    weight = program.modules[0].get_parameter("0.weight")
    weight.register_hook(lambda grad: grad * 2)
    handle = weight.register_hook(lambda grad: grad * 0.5)
    with stepgraph.capture(program.step, strict=True) as step:
        for i in range(6):
            step(*program.batches[i])
        handle.remove()
        for _ in range(4):
            with pytest.raises(stepgraph.StateChanged, match="hook"):
                step(*program.batches[6])
