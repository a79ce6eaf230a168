"""Graphed modules in any order: microbatches in flight, layers out of turn, several models; equal to eager always."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph import CudaGraphManager, GraphedModules, ModuleReport
from tests.contract.module_programs import Do, Training, assert_orders_equal_eager, assert_ways_equal_eager, order, play
from tests.harness import same_bits

WIDTH = 6
ONE_IN_FLIGHT = "F0 B0 F1 B1"
ORDERS = {
    "one in flight": (ONE_IN_FLIGHT, 1),
    "1f1b, two deep": ("F0 F1 B0 F2 B1 F3 B2 B3", 2),
    "1f1b, four deep": ("F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5", 4),
    "gpipe": ("F0 F1 F2 F3 B0 B1 B2 B3", 4),
    "reversed": ("F0 F1 F2 F3 B3 B2 B1 B0", 4),
    "one backward of the sum": ("F0 F1 F2 F3 S", 4),
    "layer by layer": ("N0 N1 N0 N1 F0 F1 B1 B0", 2),
    "layers cross": ("N0 N1 N1 F0 F1 B0 B1", 2),
    "layers cross, one backward": ("N0 N1 F1 F0 S", 2),
}


class Layer(nn.Module):
    """A residual layer with dropout, so that the random state counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Three layers to be graphed, the first two next to each other, and an eager one before the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages(0):
            x = stage(x)
        return x

    def stages(self, step: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        first, second, third = self.layers
        return [first, second, lambda x: torch.tanh(self.between(x)), third, lambda x: x.pow(2).mean()]


def rows(draw: torch.Generator, size: int) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=draw)


def stack(device: torch.device) -> Training:
    model = Stack().to(device)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows, model.stages)


def in_graphs(scope: str = "layers.*", **options: Any) -> Callable[[Training], GraphedModules]:
    options = {"audit": 3, **options}  # each records all of a step again
    return lambda training: stepgraph.graph_modules(training.model, [scope], **options)


def runners(report: ModuleReport) -> list[int]:
    return [row.runners for row in report.rows]


ANY_OR_FIXED = {"any order": in_graphs(single_mempool=False), "fixed order": in_graphs(single_mempool=True)}


@pytest.mark.parametrize(("text", "in_flight"), ORDERS.values(), ids=ORDERS)
def test_order_of_microbatches_equals_eager(device: torch.device, text: str, in_flight: int) -> None:
    """Runners are reused as backwards finish, step after step: in any order, there are as many as calls in flight."""
    reports = assert_ways_equal_eager(stack, [order(text)] * 8, device, ANY_OR_FIXED)
    calls = 8 * len({do.microbatch for do in order(text) if do.kind in "FN"})
    for way, report in reports.items():
        for row in report.rows:
            assert set(row.eager_reasons) == {"warm-up"}, way
            assert row.forwards == row.backwards == calls - row.eager_calls, way
        assert (report.fixed_order > 0) == (way == "fixed order"), way
    assert runners(reports["any order"]) == [in_flight] * 3


def test_order_with_gradients_kept_at_zero_equals_eager(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = stack(device)
        training.set_to_none = False
        return training

    assert_orders_equal_eager(build, [order("F0 F1 B0 F2 B1 B2")] * 8, device, in_graphs())


def test_dropped_microbatches_give_their_runner_back(device: torch.device) -> None:
    report = assert_orders_equal_eager(stack, [order("F0 F1 D0 B1 F2 F3 D3 B2")] * 8, device, in_graphs())
    assert max(runners(report)) == 2


def test_signatures_in_flight_together_equal_eager(device: torch.device) -> None:
    steps = [order("F0 F1x3 B0 B1"), order("F0x3 F1 B1 B0"), order("F0 B0")] * 4
    report = assert_orders_equal_eager(stack, steps, device, in_graphs())
    assert [row.signatures for row in report.rows] == [2, 2, 2]


def test_evaluation_between_forwards_and_backwards_equals_eager(device: torch.device) -> None:
    """It is captured while the model trains, with dropout off all the same."""
    report = assert_orders_equal_eager(stack, [order("F0 E0 F1 B0 E0x3 B1 E0")] * 8, device, in_graphs())
    assert [row.signatures for row in report.rows] == [3, 3, 3]
    assert report.eager_calls <= 3 * 3 * 5


def test_evaluation_before_training_delays_no_capture(device: torch.device) -> None:
    steps = [order("E0x5"), *[order("F0 B0")] * 10]
    report = assert_orders_equal_eager(stack, steps, device, in_graphs())
    assert [row.forwards for row in report.rows] == [7, 7, 7]


def random_step(pick: random.Random) -> list[Do]:
    """Up to five microbatches, up to four in flight, each moved on by a stage or to its end at any time."""
    waiting, stages = list(range(pick.randint(1, 5))), 5
    done: dict[int, int] = {}
    step = []
    while waiting or done:
        if pick.random() < 0.08:
            step.append(Do("E", size=pick.choice([4, 4, 3])))
        elif waiting and len(done) < 4 and pick.random() < 0.4:
            microbatch = waiting.pop(0)
            done[microbatch] = 1
            step.append(Do("N", microbatch, 3 if pick.random() < 0.2 else 4))
        elif done:
            microbatch = pick.choice(list(done))
            if pick.random() < 0.06:
                step.append(Do("D", microbatch))
                del done[microbatch]
            elif done[microbatch] == stages:
                step.append(Do("B", microbatch))
                del done[microbatch]
            elif pick.random() < 0.4:
                step.append(Do("F", microbatch))
                done[microbatch] = stages
            else:
                step.append(Do("N", microbatch))
                done[microbatch] += 1
    return step


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_random_interleavings_equal_eager(device: torch.device, seed: int) -> None:
    pick = random.Random(seed)
    steps = [random_step(pick) for _ in range(9)]
    report = assert_orders_equal_eager(stack, steps, device, in_graphs())
    assert report.replays > 0
    assert {reason for row in report.rows for reason in row.eager_reasons} == {"warm-up"}


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_random_steps_that_repeat_share_memory_by_order(device: torch.device, seed: int) -> None:
    pick = random.Random(seed)
    step = [Do("N", 9), *(do for do in random_step(pick) if do.kind not in "DE"), Do("F", 9), Do("B", 9)]
    step = [do for do in step if do.microbatch == 9 or Do("B", do.microbatch) in step]
    steps = [[*step, *order("E0")] if pick.random() < 0.3 else step for _ in range(8)]
    report = assert_orders_equal_eager(stack, steps, device, in_graphs(single_mempool=True))
    assert report.fixed_order == 6 * len({do.microbatch for do in step})


def test_layers_in_another_order_at_each_step_equal_eager(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = stack(device)
        model = training.model

        def stages(step: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
            return [model.between, *random.Random(step).sample(list(model.layers), 3), lambda x: x.pow(2).mean()]

        training.stages = stages
        return training

    report = assert_orders_equal_eager(build, [order("F0 F1 B0 B1")] * 14, device, in_graphs())
    assert {reason for row in report.rows for reason in row.eager_reasons} == {"warm-up"}
    assert report.eager_calls <= 3 * 2 * 4
    assert max(runners(report)) <= 4


def test_backwards_in_another_order_than_captured_equal_eager(device: torch.device) -> None:
    """Two chains side by side: one backward after the other in warm-up, in turns later."""

    def build(device: torch.device) -> Training:
        model = nn.ModuleList([Layer() for _ in range(4)]).to(device)

        def both(step: int, x: torch.Tensor) -> torch.Tensor:
            one, two = model[0](x), model[1](x * 2)
            one, two = model[2](one), model[3](two)
            if step >= 6 and step % 2:
                return one.pow(2).mean() + two.pow(3).mean()
            one.pow(2).mean().backward()
            return two.pow(3).mean()

        stages = lambda step: [lambda x: both(step, x)]  # noqa: E731
        return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows, stages)

    report = assert_orders_equal_eager(build, [order("F0 B0")] * 12, device, in_graphs("*"))
    assert runners(report) == [1] * 4


def test_module_called_twice_in_a_forward_equals_eager(device: torch.device) -> None:
    """Autograd sums the gradients of both uses before it adds the sum to an old gradient."""

    def build(device: torch.device) -> Training:
        training = stack(device)
        first, second, third = training.model.layers
        training.stages = lambda step: [first, second, first, third, second, first, lambda x: x.pow(2).mean()]
        return training

    report = assert_orders_equal_eager(build, [order("F0 B0 F1 F2 B1 B2")] * 7, device, in_graphs())
    assert runners(report) == [6, 4, 2]


@pytest.mark.parametrize("text", ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 S", "F0 F1 F2 F3 B3 B2 B1 B0"])
def test_max_runners_exceeded_runs_eagerly(text: str, device: torch.device) -> None:
    """Two calls of four find a runner; the others run eagerly, beside them, in the same backward too."""
    with pytest.warns(stepgraph.StepgraphWarning, match=r"4 calls are in flight at once[^$]*max-runners"):
        report = assert_orders_equal_eager(stack, [order(text)] * 8, device, in_graphs(max_runners=2))
    assert runners(report) == [2] * 3
    for row in report.rows:
        assert row.eager_reasons["past max_runners=2   [max-runners]"] == 2 * 5, "of each step after the warm-up"
        assert not row.refused


def test_max_runners_exceeded_raises_under_strict(device: torch.device) -> None:
    training = stack(device)
    with (
        stepgraph.graph_modules(training.model, ["layers.*"], max_runners=2, strict=True),
        pytest.raises(stepgraph.CaptureError, match=r"layers\.0: 4 calls are in flight at once") as caught,
    ):
        play(training, [order("F0 F1 F2 F3 B0 B1 B2 B3")] * 5, device)
    assert caught.value.rule == "max-runners"
    assert "max_runners to 4" in caught.value.fix


def test_max_runners_out_of_order_runs_eagerly(device: torch.device) -> None:
    """Where it is not the calls in flight that are too many, but the memory of the runners there are is in use."""

    def build(device: torch.device) -> Training:
        training = stack(device)
        model = training.model
        layers = list(model.layers)
        training.stages = lambda step: [model.between, *layers[:: 1 if step < 6 else -1], lambda x: x.pow(2).mean()]
        return training

    report = assert_orders_equal_eager(build, [order("F0 B0")] * 10, device, in_graphs(max_runners=1))
    assert runners(report) == [1, 1, 1]
    assert any("order of calls differs" in reason for row in report.rows for reason in row.eager_reasons)


def test_two_models_in_one_process(device: torch.device) -> None:
    """Their calls come in turns, a loss goes through both, and closing one leaves the other."""
    torch.manual_seed(7)
    expected, received = [stack(device) for _ in range(2)], [stack(device) for _ in range(2)]
    for mine, theirs in zip(expected, received, strict=True):
        theirs.model.load_state_dict(mine.model.state_dict())
    handles = [stepgraph.graph_modules(training.model, ["layers.*"]) for training in received]
    draw = torch.Generator().manual_seed(3)
    for step in range(14):
        if step == 8:
            handles[0].close()
        x, y = rows(draw, 4).to(device), rows(draw, 4).to(device)
        for pair in (expected, received):
            one, two = pair[0].model, pair[1].model
            torch.manual_seed(step)
            joined = one(x) + two(x)
            alone = one(y)
            joined.backward()
            (alone + two(y)).backward()
        for mine, theirs in zip(expected, received, strict=True):
            for p, q in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
                assert same_bits(p.grad, q.grad), step
        for training in (*expected, *received):
            training.optimizer.step()
            training.optimizer.zero_grad()
    first, second = (handle.report() for handle in handles)
    assert [row.forwards for row in first.rows] == [2 * 8 - 6] * 3
    assert [row.forwards for row in second.rows] == [2 * 14 - 3] * 3
    handles[1].close()
    assert type(received[1].model.layers[0].__dict__.get("forward")) is type(None)


def test_results_that_are_held_keep_their_values(device: torch.device) -> None:
    """Through steps, graphs of other layers and recaptures; and hidden states as well as outputs."""
    training = stack(device)
    model = training.model
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with stepgraph.graph_modules(model, ["layers.*"]) as handle:
        for step in range(21):
            x = torch.randn(4, WIDTH, device=device)
            for stage in model.stages(step):
                x = stage(x)
                if step % 3 == 0 and step > 4:
                    kept.append((x.detach(), x.detach().clone()))
            x.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            for held, copy in kept[-40:]:
                assert same_bits(held, copy), step
        report = handle.report()
    assert [row.forwards > 10 for row in report.rows] == [True] * 3
    assert any("still held" in reason for row in report.rows for reason in row.eager_reasons)


def test_result_held_until_the_next_call_costs_no_eager_step(device: torch.device) -> None:
    """Warm-up sees that it is held, so that it is copied from the start."""
    training = stack(device)
    first, second, third = training.model.layers
    y = None
    with stepgraph.graph_modules(training.model, ["layers.*"]) as handle:
        for _ in range(12):
            y = third(second(first(torch.randn(4, WIDTH, device=device))))
            y.pow(2).mean().backward()
        rows_of = handle.report().rows
    assert y is not None
    assert [row.eager_reasons["warm-up"] for row in rows_of] == [3, 3, 3]
    assert [row.eager_calls for row in rows_of] == [3, 3, 3]
    assert [row.recapture_reasons for row in rows_of] == [{}, {}, {}]


class Masked(nn.Module):
    """Keeps its mask for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * mask)


def test_tensor_shared_in_warm_up_may_differ_later(device: torch.device) -> None:
    """A mask that layers and microbatches had in common, and then each its own."""

    def build(device: torch.device) -> Training:
        model = nn.ModuleList([Masked() for _ in range(3)]).to(device)
        common = torch.rand(4, WIDTH, device=device)
        own = [torch.rand(4, WIDTH, device=device) for _ in range(3)]

        def stages(step: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
            masks = [common] * 3 if step < 6 or step % 3 == 0 else own
            if step % 5 == 4:
                masks[0].mul_(0.5)
            layers = [lambda x, i=i: model[i](x, masks[i] if x.sum() > 0 else common) for i in range(3)]
            return [*layers, lambda x: x.pow(2).mean()]

        return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), rows, stages)

    ways = {f"single_mempool={single}": in_graphs("*", single_mempool=single) for single in (False, True)}
    assert_ways_equal_eager(build, [order("F0 F1 B0 B1")] * 12, device, ways)


def test_second_backward_through_kept_graphs_equals_eager(device: torch.device) -> None:
    torch.manual_seed(7)
    expected, received = stack(device).model, stack(device).model
    received.load_state_dict(expected.state_dict())
    x = torch.randn(4, WIDTH, device=device)
    with stepgraph.graph_modules(received, ["layers.*"]) as handle:
        for model in (expected, received):
            torch.manual_seed(3)
            for _ in range(8):
                loss = model(x)
                loss.backward(retain_graph=True)
                loss.backward()
        for p, q in zip(expected.parameters(), received.parameters(), strict=True):
            assert same_bits(p.grad, q.grad)
        assert [row.backwards for row in handle.report().rows] == [2 * 5] * 3


def test_second_backward_after_another_call_equals_eager(device: torch.device) -> None:
    """A call whose graph is retained keeps its runner, so that others take other memory."""
    torch.manual_seed(7)
    expected, received = stack(device).model, stack(device).model
    received.load_state_dict(expected.state_dict())
    x = torch.randn(4, WIDTH, device=device)
    with stepgraph.graph_modules(received, ["layers.*"]):
        for model in (expected, received):
            torch.manual_seed(3)
            for _ in range(8):
                loss = model(x)
                loss.backward(retain_graph=True)
                model(-x).backward()
                loss.backward()
        for p, q in zip(expected.parameters(), received.parameters(), strict=True):
            assert same_bits(p.grad, q.grad)


# -- a fixed order


def test_fixed_order_takes_less_memory() -> None:
    """On the tape, which counts bytes: a GPU's segments of 2 MiB say nothing of a model of this size."""

    steps = [order("F0 F1 F2 F3 B0 B1 B2 B3")] * 5
    reports = assert_ways_equal_eager(stack, steps, torch.device("cpu"), ANY_OR_FIXED)
    assert reports["fixed order"].pool_bytes < reports["any order"].pool_bytes


def test_fixed_order_names_the_expected_entry(device: torch.device) -> None:
    training = stack(device)
    with stepgraph.graph_modules(training.model, ["layers.*"], single_mempool=True) as handle:
        play(training, [order("F0 F1 B0 B1")] * 6, device)
        with pytest.raises(
            stepgraph.CaptureError, match=r"backward of `layers\.2` \(call 5\) is out of order"
        ) as caught:
            play(training, [order("F0 F1 B1 B0")], device)
        assert caught.value.rule == "replay-order"
        assert "expected  entry 6 of 12: backward of `layers.2` (call 2)" in str(caught.value)
        with pytest.raises(stepgraph.CaptureError, match=r"the forward of `layers\.0` is out of order") as caught:
            play(training, [order("F0 F1 F2")], device)
        assert "expected  entry 6 of 12: backward of `layers.2` (call 2)" in str(caught.value)
        del caught  # and with it the frames that hold the losses
        gc.collect()  # the frames of an error and the error hold each other
        before = handle.report().replays
        play(training, [order("F0 F1 B0 B1")], device)  # what was given up is let go of
        assert handle.report().replays == before + 6
        handle.reset()
        play(training, [order("F0 F1 B1 B0")] * 6, device)
        assert handle.report().fixed_order == 12


def test_fixed_order_begins_again_when_a_round_is_given_up(device: torch.device) -> None:
    steps = [order("F0 F1 B0 B1")] * 6 + [order("F0 N1 D0 D1"), order("F0 F1 B0 B1")] * 4
    report = assert_orders_equal_eager(stack, steps, device, in_graphs(single_mempool=True))
    assert report.eager_calls == 3 * 2 * 3


def test_fixed_order_is_not_taken_from_rounds_that_differ(device: torch.device) -> None:
    steps = [order("F0 F1 B0 B1 F2 B2")] * 8
    report = assert_orders_equal_eager(stack, steps, device, in_graphs(single_mempool=True))
    assert report.fixed_order == 0
    assert report.replays > 0


def test_fixed_order_copes_with_results_that_are_held(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = stack(device)
        model, kept = training.model, []

        def stages(step: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
            def note(x: torch.Tensor) -> torch.Tensor:
                if step < 8:
                    return x + x.detach()
                kept.append(x.detach())
                return x + kept[len(kept) // 2]

            first, second, third = model.layers
            return [first, note, second, note, third, note, lambda x: x.pow(2).mean()]

        training.stages = stages
        return training

    report = assert_orders_equal_eager(build, [order("F0 F1 B0 B1")] * 14, device, in_graphs(single_mempool=True))
    assert report.fixed_order == 12
    assert report.recaptures > 0


class Managed:
    """One manager a layer, from a config as Megatron spells it; to share an order, managers share a session."""

    def __init__(self, training: Training, **choice: bool) -> None:
        config = SimpleNamespace(cuda_graph_warmup_steps=2, **choice)
        self._managers: list[CudaGraphManager] = []
        for layer in training.model.layers:
            session = self._managers[0].session if self._managers else None
            self._managers.append(CudaGraphManager(config, layer, "forward", session=session))

    def __enter__(self) -> Managed:
        return self

    def __exit__(self, *error: object) -> None:
        self._managers[0].session.close()

    def report(self) -> ModuleReport:
        return self._managers[0].report()


def test_manager_reads_the_choice_from_a_config(device: torch.device) -> None:
    ways = {
        "unsaid": Managed,
        "off": partial(Managed, cuda_graph_use_single_mempool=False),
        "on": partial(Managed, cuda_graph_use_single_mempool=True),
    }
    for way, report in assert_ways_equal_eager(stack, [order("F0 F1 B0 B1")] * 7, device, ways).items():
        assert report.fixed_order == (12 if way == "on" else 0), way
        assert [row.eager_calls for row in report.rows] == [4, 4, 4], way
