"""How a captured step behaves around its graphs: signatures, limits, failures, outputs, sessions."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.core.wording import counted
from tests.harness import Program, assert_captured_equals_eager, different, snapshot


def program(device: torch.device, **kwargs: Any) -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **kwargs)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randn(4, 8, device=device),) for _ in range(12)]
    return Program(step, batches, [model], [optimizer])


def train(step: Any, made: Program, calls: int) -> list[torch.Tensor]:
    return [step(*made.batches[i % len(made.batches)]) for i in range(calls)]


def test_capture_counts_warmup_then_replays(device: torch.device) -> None:
    made = program(device)
    with stepgraph.capture(made.step) as step:
        train(step, made, 10)
        report = step.report().to_dict()
    assert report["eager_calls"] == 3
    assert report["eager_reasons"] == {"warm-up": 3}
    assert report["replays"] == 7
    assert (report["graphs"], report["captures"], report["recaptures"]) == (1, 1, 0)
    assert report["segments"] == 2
    assert report["pool_bytes"] > 0
    assert report["static_bytes"] >= 4 * 8 * 4
    assert report["capture_seconds"] > 0
    assert report["signatures"] == [f"x=f32[4, 8] {made.batches[0][0].device}"]


def test_capture_works_as_a_decorator(device: torch.device) -> None:
    weight = torch.ones(3, device=device)

    @stepgraph.capture
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    @stepgraph.capture(warmup=1)
    def with_options(x: torch.Tensor) -> torch.Tensor:
        return x + weight

    for i in range(5):
        x = torch.full((3,), float(i), device=device)
        assert torch.equal(plain(x), x)
        assert torch.equal(with_options(x), x + 1)
    assert plain.__name__ == "plain"
    assert with_options.report().replays == 4
    plain.close()
    with_options.close()


@pytest.mark.parametrize("mode", ["auto", "inside", "outside"])
def test_capture_optimizer_modes_are_equal_to_eager(mode: str, device: torch.device) -> None:
    report = assert_captured_equals_eager(lambda d: program(d, fused=True), device, optimizer=mode)
    assert report.segments == (2 if mode == "outside" else 1)


def test_capture_optimizer_inside_refuses_a_host_step_count(device: torch.device) -> None:
    made = program(device)
    with stepgraph.capture(made.step, optimizer="inside") as step:
        train(step, made, 3)
        with pytest.raises(stepgraph.CaptureError, match="optimizer-capturable"):
            step(*made.batches[0])


def test_capture_optimizer_capturable_is_one_graph_and_says_so(device: torch.device) -> None:
    made = program(device)
    with stepgraph.capture(made.step, optimizer="capturable") as step:
        losses = train(step, made, 12)
        report = step.report()
    assert report.segments == 1
    assert "capturable" in report.equality
    twin = program(device)
    eager = train(twin.step, twin, 12)
    assert all(torch.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] or eager[-1] >= eager[0]
    assert made.optimizers[0].state[next(made.modules[0].parameters())]["step"].item() == 12


def test_capture_changed_learning_rate_is_never_frozen(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        made = program(device, fused=True)
        optimizer = made.optimizers[0]
        made.batches = made.batches * 2

        def before_call(index: int) -> None:
            if index >= 8:
                optimizer.param_groups[0]["lr"] = 1e-2 / index

        made.before_call = before_call
        return made

    report = assert_captured_equals_eager(build, device)
    assert report.recaptures == 1
    assert report.segments == 2
    assert "lr" in report.optimizers["AdamW"]


def test_capture_scheduler_outside_the_step_is_live(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        made = program(device)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made.optimizers[0], T_max=10)
        made.before_call = lambda index: scheduler.step() if index else None
        return made

    assert assert_captured_equals_eager(build, device).recaptures == 0


def test_capture_scheduler_inside_the_step_is_refused(device: torch.device) -> None:
    made = program(device)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizers[0], gamma=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = made.step(x)
        scheduler.step()
        return loss

    with stepgraph.capture(step) as captured:
        train(captured, made, 3)
        with pytest.raises(stepgraph.CaptureError, match=r"host-value") as caught:
            captured(*made.batches[0])
    assert "'lr'" in str(caught.value)


def test_capture_host_random_is_refused(device: torch.device) -> None:
    import random

    with stepgraph.capture(lambda x: x * random.random()) as step:
        x = torch.ones(2, device=device)
        for _ in range(3):
            step(x)
        with pytest.raises(stepgraph.CaptureError, match="host-random"):
            step(x)


def test_capture_failure_leaves_the_state_of_before_the_call(device: torch.device, tmp_path: Path) -> None:
    made, flag = program(device), tmp_path / "reads"

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = made.step(x)
        if flag.exists():  # which nobody watches
            loss.item()
        return loss

    with stepgraph.capture(step) as captured:
        train(captured, made, 3)
        flag.touch()
        grads = [p.grad for p in made.modules[0].parameters()]
        values = [g.clone() for g in grads]
        before = snapshot(made, device)
        with pytest.raises(stepgraph.CaptureError) as caught:
            captured(*made.batches[3])
        assert different(before, snapshot(made, device)) == []
        assert all(torch.equal(p.grad, v) for p, v in zip(made.modules[0].parameters(), values, strict=True))
        error = caught.value
        assert error.code == 900
        assert error.where.file == __file__
        assert "loss.item()" in str(error)
        flag.unlink()
        train(captured, made, 4)
        assert captured.report().replays == 4


def test_capture_failure_in_the_second_segment_rolls_back_too(device: torch.device) -> None:
    made = program(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = made.step(x)  # the optimizer cuts the chain here
        return loss * float(loss > 0)

    with stepgraph.capture(step) as captured:
        train(captured, made, 3)
        before = snapshot(made, device)
        with pytest.raises(stepgraph.CaptureError, match="host-read"):
            captured(*made.batches[3])
        assert different(before, snapshot(made, device)) == []


def test_capture_on_error_eager_goes_on_counts_and_warns_once(device: torch.device) -> None:
    made, twin = program(device), program(device)
    twin.modules[0].load_state_dict(made.modules[0].state_dict())

    def reading(step: Any) -> Any:
        return lambda x: step(x) * float(x[0, 0] > -100)

    torch.manual_seed(3)
    expected = train(reading(twin.step), made, 8)
    torch.manual_seed(3)
    with stepgraph.capture(reading(made.step), on_error="eager") as step, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        received = train(step, made, 8)
        report = step.report()
    assert all(torch.equal(a.detach(), b) for a, b in zip(expected, received, strict=True))
    assert [w.category for w in seen] == [stepgraph.StepgraphWarning]
    assert seen[0].filename == __file__
    assert report.eager_reasons == {"warm-up": 3, "capture failed: [host-read]": 5}


def test_capture_past_max_graphs_is_eager_and_reported_once(device: torch.device) -> None:
    with stepgraph.capture(lambda x: x * 2, warmup=1, max_graphs=2) as step:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                for size in (2, 3, 4, 5):
                    assert step(torch.ones(size, device=device)).tolist() == [2.0] * size
        report = step.report()
    assert report.graphs == 2
    waiting = "max_graphs=2 other signatures are warming up"
    assert report.eager_reasons == {"warm-up": 2, waiting: 2, "past max_graphs=2": 4}
    (warning,) = seen
    assert warning.category is stepgraph.StepgraphWarning
    assert "shape changed" in str(warning.message)


def test_capture_strict_raises_past_the_limit_naming_the_leaf(device: torch.device) -> None:
    with stepgraph.capture(lambda batch: batch["x"] * 2, warmup=1, max_graphs=1, strict=True) as step:
        for _ in range(3):
            step({"x": torch.ones(2, device=device)})
        with pytest.raises(stepgraph.SignatureMismatch, match=r"batch\['x'\]: shape changed"):
            step({"x": torch.ones(3, device=device)})
        with pytest.raises(stepgraph.SignatureMismatch, match=r"batch\['y'\]: extra"):
            step({"x": torch.ones(2, device=device), "y": 1})


def test_capture_number_that_changes_at_each_call_ends_in_eager(device: torch.device) -> None:
    with stepgraph.capture(lambda x, i: x * i, max_graphs=3) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(8):
            assert step(torch.ones(2, device=device), i).tolist() == [float(i)] * 2
        assert step.report().eager_reasons["max_graphs=3 other signatures are warming up"] == 5


def test_capture_outputs_are_detached_and_safe_to_keep(device: torch.device) -> None:
    made = program(device)
    with stepgraph.capture(made.step) as step:
        kept = train(step, made, 8)
        copies = [loss.clone() for loss in kept]
        train(step, made, 4)
    assert not any(loss.requires_grad for loss in kept)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_capture_static_outputs_are_overwritten(device: torch.device) -> None:
    with stepgraph.capture(lambda x: {"y": x * 2}, outputs="static") as step:
        results = [step(torch.full((2,), float(i), device=device))["y"] for i in range(6)]
    assert results[4].data_ptr() == results[5].data_ptr()
    assert results[4].tolist() == [10.0, 10.0]


def test_capture_output_that_varies_is_refused(device: torch.device) -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        calls.append(1)
        return x * 2, len(calls)

    with stepgraph.capture(step, ignore=["calls"]) as captured:
        for _ in range(3):
            captured(torch.ones(2, device=device))
        with pytest.raises(stepgraph.CaptureError, match=r"varying-output") as caught:
            captured(torch.ones(2, device=device))
    assert "result[1]" in str(caught.value)


def test_capture_grad_may_be_read_zeroed_or_dropped_in_between(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        model = nn.Linear(8, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        def before_call(index: int) -> None:
            grads = [p.grad for p in model.parameters()]
            if index % 5 == 1:
                optimizer.zero_grad(set_to_none=True)
            elif index % 5 == 2:
                optimizer.zero_grad(set_to_none=False)
            elif index % 5 == 3:
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p.grad = grad.clone() * 2
            elif index % 5 == 4:
                optimizer.step()

        batches = [(torch.randn(4, 8, device=device),) for _ in range(30)]
        return Program(step, batches, [model], [optimizer], before_call=before_call)

    assert assert_captured_equals_eager(build, device).graphs == 2


def test_capture_grads_of_all_graphs_share_one_address(device: torch.device) -> None:
    made = program(device)
    with stepgraph.capture(made.step) as step:
        addresses = set()
        for i in range(16):
            step(torch.randn(4 if i % 2 else 6, 8, device=device))
            if step.report().graphs == 2:
                addresses.add(tuple(p.grad.data_ptr() for p in made.modules[0].parameters()))
        assert len(addresses) == 1


def test_capture_input_changed_in_place_changes_for_the_caller(device: torch.device) -> None:
    with stepgraph.capture(lambda x: x.mul_(2).sum()) as step:
        for _ in range(6):
            x = torch.ones(3, device=device)
            assert step(x).item() == 6
            assert x.tolist() == [2.0] * 3


def test_capture_input_that_requires_grad_gets_its_grad(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.pow(2).sum()
        loss.backward()
        return loss

    with stepgraph.capture(step) as captured:
        for i in range(6):
            x = torch.full((3,), float(i), device=device, requires_grad=True)
            captured(x)
            assert x.grad.tolist() == [2.0 * i] * 3
            captured(x)
            assert x.grad.tolist() == [4.0 * i] * 3


def test_capture_expanded_and_strided_inputs(device: torch.device) -> None:
    with stepgraph.capture(lambda a, b: (a * 2, b * 3)) as step:
        for i in range(6):
            a = torch.full((1, 4), float(i), device=device).expand(3, 4)
            b = torch.arange(12.0, device=device).view(3, 4).t() * i
            one, two = step(a, b)
            assert torch.equal(one, a * 2)
            assert torch.equal(two, b * 3)
        assert step.report().replays == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_capture_forward_only(mode: Any, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device).eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        with mode():
            return model(x)

    with stepgraph.capture(step) as captured:
        for _ in range(8):
            x = torch.randn(4, 8, device=device)
            assert torch.equal(captured(x), step(x))
        assert captured.report().replays == 5
    with mode(), stepgraph.capture(lambda x: model(x)) as captured:
        for _ in range(8):
            x = torch.randn(4, 8, device=device)
            assert torch.equal(captured(x), model(x))
        assert captured.report().replays == 5


def test_capture_autocast_around_the_step(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        made = program(device)
        inner = made.step

        def step(x: torch.Tensor) -> torch.Tensor:
            return inner(x)

        return Program(step, made.batches, made.modules, made.optimizers)

    torch.manual_seed(7)
    eager = build(device)
    torch.manual_seed(11)
    expected = []
    for (x,) in eager.batches:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            expected.append(eager.step(x).detach())
    torch.manual_seed(7)
    made = build(device)
    torch.manual_seed(11)
    with stepgraph.capture(made.step) as step, torch.autocast(device.type, dtype=torch.bfloat16):
        received = [step(x) for (x,) in made.batches]
        assert step.report().replays == 9
    assert all(torch.equal(a, b) for a, b in zip(expected, received, strict=True))


def test_capture_two_steps_share_a_session(device: torch.device) -> None:
    made, twin = program(device), program(device)
    twin.modules[0].load_state_dict(made.modules[0].state_dict())
    model = made.modules[0]

    def evaluate(m: nn.Module) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return m(x).sum()

        return step

    torch.manual_seed(3)
    expected = []
    for (x,) in made.batches:
        expected += [twin.step(x).detach(), evaluate(twin.modules[0])(x)]
    torch.manual_seed(3)
    with stepgraph.Session() as session:
        one = stepgraph.capture(made.step, session=session)
        two = stepgraph.capture(evaluate(model), session=session)
        received = []
        for (x,) in made.batches:
            received += [one(x), two(x)]
        assert one.report().replays == two.report().replays == 9
        assert one.report().pool_bytes == two.report().pool_bytes
    assert all(torch.equal(a, b) for a, b in zip(expected, received, strict=True))
    with pytest.raises(stepgraph.ClosedError, match="closed"):
        one(*made.batches[0])


def test_capture_two_sessions_live_side_by_side(device: torch.device) -> None:
    first, second = stepgraph.capture(lambda x: x * 2), stepgraph.capture(lambda x: x * 3)
    for i in range(6):
        x = torch.full((2,), float(i), device=device)
        assert first(x).tolist() == [2.0 * i] * 2
        assert second(x).tolist() == [3.0 * i] * 2
    first.close()
    assert second(torch.ones(2, device=device)).tolist() == [3.0, 3.0]
    second.close()


def test_capture_close_and_capture_again(device: torch.device) -> None:
    made = program(device)
    for _ in range(3):
        with stepgraph.capture(made.step) as step:
            train(step, made, 6)
            assert step.report().replays == 3
        with pytest.raises(stepgraph.ClosedError):
            step(*made.batches[0])
    step.close()


def test_capture_reset_warms_up_and_captures_again(device: torch.device) -> None:
    made = program(device)
    with stepgraph.capture(made.step) as step:
        train(step, made, 6)
        step.reset()
        assert step.report().graphs == 0
        train(step, made, 6)
        assert step.report().graphs == 1
        assert step.report().captures == 2


def test_capture_closes_on_an_exception(device: torch.device) -> None:
    made = program(device)
    with pytest.raises(ZeroDivisionError), stepgraph.capture(made.step) as step:
        train(step, made, 5)
        1 / 0  # noqa: B018
    with pytest.raises(stepgraph.ClosedError):
        step(*made.batches[0])


def test_capture_user_errors_in_warmup_pass_through(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with stepgraph.capture(step) as captured, pytest.raises(KeyError, match="mine"):
        captured(torch.ones(2, device=device))


def test_capture_hooks_are_gone_after_warmup(device: torch.device) -> None:
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    made = program(device)
    backward = torch.autograd.backward
    with stepgraph.capture(made.step) as step:
        for i in range(5):
            step(*made.batches[i])
            for hooks in (modules._global_forward_pre_hooks, optimizers._global_optimizer_pre_hooks):
                assert not [hook for hook in hooks.values() if getattr(hook, "calls", [hook])]  # an idle entry may stay
            assert torch.autograd.backward is backward
            assert "step" not in vars(made.optimizers[0])


def test_capture_nested_step_is_a_part_of_the_outer_one(device: torch.device) -> None:
    inner = stepgraph.capture(lambda x: x * 2)
    with stepgraph.capture(lambda x: inner(x) + 1) as outer:
        for i in range(8):
            assert outer(torch.full((2,), float(i), device=device)).tolist() == [2.0 * i + 1] * 2
        assert outer.report().replays == 5
    inner.close()


def test_capture_gc_is_as_before_after_success_and_failure(device: torch.device) -> None:
    assert gc.isenabled()
    with stepgraph.capture(lambda x: x.sum().item()) as step:
        for _ in range(3):
            step(torch.ones(2, device=device))
        with pytest.raises(stepgraph.CaptureError):
            step(torch.ones(2, device=device))
    assert gc.isenabled()


def test_capture_optimizer_with_closure_outside_is_refused(device: torch.device) -> None:
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(torch.ones(2, 4, device=device))
        with pytest.raises(stepgraph.CaptureError, match="optimizer-closure"):
            captured(torch.ones(2, 4, device=device))


def test_capture_compiled_module(device: torch.device) -> None:
    calls = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.append(1)
        return graph.forward

    def build(device: torch.device) -> Program:
        made = program(device)
        made.modules[0].compile(backend=counting)
        return made

    report = assert_captured_equals_eager(build, device)
    assert report.graphs == 1
    torch.compiler.reset()


def test_capture_one_tensor_passed_twice_stays_one(device: torch.device) -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b.sum()

    with stepgraph.capture(step) as captured:
        x = torch.zeros(3, device=device)
        assert [captured(x, x).item() for _ in range(6)] == [3.0 * (i + 1) for i in range(6)]
        y = torch.zeros(3, device=device)
        assert captured(y, torch.zeros(3, device=device)).item() == 0


def test_capture_write_through_one_of_two_views_is_refused(device: torch.device) -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b.sum()

    base = torch.zeros(4, device=device)
    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(base[:3], base[1:])
        before = base.clone()
        with pytest.raises(stepgraph.CaptureError, match=r"shared-input"):
            captured(base[:3], base[1:])
        assert torch.equal(base, before)


def test_capture_gradient_into_the_callers_graph_is_refused(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.pow(2).sum()
        loss.backward()
        return loss

    base = torch.ones(3, device=device, requires_grad=True)
    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(base * 2)
        with pytest.raises(stepgraph.CaptureError, match=r"outer-graph"):
            captured(base * 2)


def test_capture_object_that_hides_tensors_is_refused(device: torch.device) -> None:
    class Batch:
        def __init__(self) -> None:
            self.x = torch.ones(2, device=device)

    with (
        stepgraph.capture(lambda batch: batch.x * 2) as step,
        pytest.raises(stepgraph.InvalidArgument, match="opaque-argument"),
    ):
        step(Batch())


def test_capture_sparse_gradients_are_refused_by_name(device: torch.device) -> None:
    model = nn.Embedding(8, 4, sparse=True).to(device)

    def step(ids: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(ids).pow(2).sum()
        loss.backward()
        return loss

    ids = torch.arange(4, device=device)
    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(ids)
        with pytest.raises(stepgraph.CaptureError, match="sparse-grad"):
            captured(ids)
        assert model.weight.grad.is_sparse


def test_capture_optimizer_step_hooks_run_at_every_step(device: torch.device) -> None:
    made = program(device, fused=True)
    calls: list[int] = []
    made.optimizers[0].register_step_post_hook(lambda *_: calls.append(1))
    with stepgraph.capture(made.step) as step:
        train(step, made, 8)
        assert len(calls) == 8
        assert "hooks" in step.report().optimizers["AdamW"]


def test_capture_optimizer_hook_added_later_is_noticed(device: torch.device) -> None:
    made = program(device, fused=True)
    calls: list[int] = []
    with stepgraph.capture(made.step) as step:
        train(step, made, 6)
        made.optimizers[0].register_step_pre_hook(lambda *_: calls.append(1))
        train(step, made, 4)
        assert len(calls) == 4
        assert step.report().recaptures == 1


def test_capture_added_parameter_group_is_noticed(device: torch.device) -> None:
    def build(device: torch.device) -> Program:
        made = program(device, fused=True)
        extra = nn.Linear(4, 4).to(device)
        inner = made.modules[0]
        optimizer = made.optimizers[0]

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = extra(inner(x)).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        def before_call(index: int) -> None:
            if index == 7:
                optimizer.add_param_group({"params": list(extra.parameters())})

        return Program(step, made.batches, [inner, extra], [optimizer], before_call=before_call)

    assert assert_captured_equals_eager(build, device).recaptures == 1


def test_capture_step_captured_before_can_be_nested(device: torch.device) -> None:
    inner = stepgraph.capture(lambda x: x * 2)
    for i in range(6):
        inner(torch.full((2,), float(i), device=device))
    with stepgraph.capture(lambda x: inner(x) + 1) as outer:
        for i in range(8):
            assert outer(torch.full((2,), float(i), device=device)).tolist() == [2.0 * i + 1] * 2
        assert outer.report().replays == 5
    inner.close()


def test_capture_report_never_raises_and_prints(device: torch.device) -> None:
    made = program(device)
    with stepgraph.capture(made.step, optimizer="inside", on_error="eager") as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(5):
            assert str(step.report()).startswith(f"0 of {counted(i, 'calls')} replayed" if i else "no calls yet")
            step(*made.batches[i])
        assert "capture failed: [optimizer-capturable]: 2" in str(step.report())


def test_capture_result_with_a_new_object_each_time_is_refused(device: torch.device) -> None:
    with stepgraph.capture(lambda x: {"x": x * 2, "extra": object()}) as step:
        for _ in range(3):
            step(torch.ones(2, device=device))
        with pytest.raises(stepgraph.CaptureError, match=r"varying-output"):
            step(torch.ones(2, device=device))


def test_capture_on_a_method_is_one_step_an_instance(device: torch.device) -> None:
    class Trainer:
        def __init__(self, factor: float) -> None:
            self.weight = torch.full((2,), factor, device=device)

        @stepgraph.capture
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    trainers = [Trainer(2.0), Trainer(3.0)]
    for i in range(6):
        for trainer, factor in zip(trainers, (2.0, 3.0), strict=True):
            assert trainer.step(torch.full((2,), float(i), device=device)).tolist() == [factor * i] * 2
    for trainer in trainers:
        assert trainer.step.report().replays == 3
        trainer.step.close()


def test_capture_what_only_the_first_call_does_is_no_obstacle(device: torch.device) -> None:
    import random

    made: list[float] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        if not made:
            made.append(random.random())
        return x * made[0]

    with stepgraph.capture(step) as captured:
        for _ in range(6):
            captured(torch.ones(2, device=device))
        assert captured.report().replays == 3


def test_capture_of_what_needs_no_graph_at_all(device: torch.device) -> None:
    with stepgraph.capture(lambda x: None) as step:
        for _ in range(6):
            assert step(torch.ones(2, device=device)) is None
        assert step.report().segments == 0


def test_capture_failure_keeps_random_sequences_of_other_graphs(device: torch.device) -> None:
    generator = torch.Generator(device)

    def run(capture_it: bool) -> list[torch.Tensor]:
        generator.manual_seed(5)
        torch.manual_seed(5)

        def step(x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(x.shape, device=device, generator=generator)
            y = nn.functional.dropout(x, 0.5) + noise
            if x.shape[0] == 3:
                y = y * float(capture_it or True)
                y.sum().item()
            return y

        results = []
        captured = stepgraph.capture(step, generators=[generator], on_error="eager") if capture_it else step
        for i in range(24):
            results.append(captured(torch.ones(3 if i % 3 == 2 else 8, device=device)))
        if capture_it:
            assert captured.report().replays > 10
            assert captured.report().eager_reasons["capture failed: [host-read]"] > 2
            captured.close()
        return results

    expected = run(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        received = run(True)
    assert all(torch.equal(a, b) for a, b in zip(expected, received, strict=True))


@pytest.mark.pairwise
@pytest.mark.parametrize("shared", [True, False], ids=["one session", "two sessions"])
@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "in place"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_capture_accumulation_across_two_functions(
    shared: bool, to_none: bool, fused: bool, device: torch.device
) -> None:
    def build() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

        def accumulate(x: torch.Tensor, last: bool) -> torch.Tensor:
            loss = model(x).pow(2).mean() / (1 if last else 2)
            loss.backward()
            return loss

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

        return model, accumulate, update

    batches = torch.randn(12, 3, 4, 8, device=device)

    def run(accumulate: Any, update: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        losses = []
        for step in batches:
            losses += [accumulate(x, last=i == 2).detach().clone() for i, x in enumerate(step)]
            update()
        return losses

    model, accumulate, update = build()
    expected = run(accumulate, update)
    twin, accumulate, update = build()
    with stepgraph.Session() as session, stepgraph.Session() as other:
        one = stepgraph.capture(accumulate, session=session)
        two = stepgraph.capture(update, session=session if shared else other)
        received = run(one, two)
        assert one.report().replays > 20
        assert two.report().replays == 9
    assert all(torch.equal(a, b) for a, b in zip(expected, received, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


class Base:
    """A captured method, which others build upon."""

    def __init__(self, device: torch.device) -> None:
        self.weight = torch.full((2,), 2.0, device=device)
        self.calls = 0

    @stepgraph.capture
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Derived(Base):
    def step(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        return super().step(x) + 1


class Both(Base):
    @stepgraph.capture
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * 10


def test_capture_on_a_method_leaves_inheritance_as_it_is(device: torch.device) -> None:
    derived, both, x = Derived(device), Both(device), torch.ones(2, device=device)
    for _ in range(6):
        assert derived.step(x).tolist() == [3.0, 3.0]
        assert both.step(x).tolist() == [20.0, 20.0]
        assert super(Both, both).step(x).tolist() == [2.0, 2.0]
    assert derived.calls == 6
    assert super(Derived, derived).step.report().replays == 3
    assert both.step.report().replays == super(Both, both).step.report().replays == 3


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_capture_on_a_method_of_a_copy_is_the_copys(how: Callable[[Base], Base], device: torch.device) -> None:
    base, x = Base(device), torch.ones(2, device=device)
    for _ in range(5):
        base.step(x)
    other = how(base)
    other.weight = torch.full((2,), 5.0, device=device)
    for _ in range(5):
        assert other.step(x).tolist() == [5.0, 5.0]
        assert base.step(x).tolist() == [2.0, 2.0]


def test_capture_put_on_a_class_later_or_on_class_methods(device: torch.device) -> None:
    class Plain:
        factor = 2.0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @classmethod
        def scaled(cls, x: torch.Tensor) -> torch.Tensor:
            return x * cls.factor

    x = torch.ones(2, device=device)
    Plain.step = stepgraph.capture(Plain.step)  # type: ignore[method-assign]
    scaled = stepgraph.capture(Plain.scaled)
    plain = Plain()
    for _ in range(5):
        assert plain.step(x).tolist() == [2.0, 2.0]
        assert scaled(x).tolist() == [2.0, 2.0]

    class Slotted:
        __slots__ = ()

        @stepgraph.capture
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(stepgraph.InvalidArgument, match="__slots__"):
        Slotted().step(x)
