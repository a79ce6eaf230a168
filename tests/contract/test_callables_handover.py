"""From layer to layer: whatever the caller does with what one graph hands to the next, it is eager's, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph.core.errors import CaptureError, StepgraphWarning
from stepgraph.engine.order import Order
from tests.callables_harness import WIDTH, Rank, assert_rank_equals_eager
from tests.harness import same_bits

Call = Callable[[torch.Tensor], torch.Tensor]
Between = Callable[[Call, torch.Tensor], torch.Tensor]

ORDERS: dict[str, tuple[Sequence[float], list[int]]] = {
    "1f1b": ([1, 1, -1, 1, -1, 1, -1, -1], [3]),
    "interleaved": ([1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1], [2, 3]),
    "backwards in reverse": (Order([1, 1, 1, -1, -1, -1], [0, 1, 2, 2, 1, 0]), [3]),
    "weights split off": ([1, 1, -1, -1.5, 1, -1, -1.5, -1, -1.5], [2]),
}
IN_FULL = ["interleaved", "backwards in reverse"]


def changed_in_place(call: Call, hidden: torch.Tensor) -> torch.Tensor:
    hidden.add_(0.25)
    return call(hidden)


WAYS: dict[str, Between] = {
    "straight": lambda call, hidden: call(hidden),
    "another tensor": lambda call, hidden: call(hidden * 0.5),
    "around the layer": lambda call, hidden: call(torch.tanh(hidden)) + hidden,
    "to the layer and past it": lambda call, hidden: call(hidden) + 0.5 * hidden,
    "a view": lambda call, hidden: call(hidden.view(-1).view(hidden.shape)),
    "changed in place": changed_in_place,
    "as a constant": lambda call, hidden: call(hidden.detach().requires_grad_()) + hidden,
}


class Once(nn.Module):
    """Uses its argument once: a sum of several gradients of one tensor would depend on the order of its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x))


class Shift(nn.Module):
    """Hands the gradient of its result on as it is, and saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "case", ["1f1b", "weights split off", *(pytest.param(case, marks=pytest.mark.slow) for case in IN_FULL)]
)
def test_what_goes_from_layer_to_layer_equals_eager(way: str, case: str, device: torch.device) -> None:
    order, layers = ORDERS[case]
    assert_rank_equals_eager(lambda: Rank(device, order, layers, make=Once, between=WAYS[way]), steps=5)


@pytest.mark.parametrize("way", ["straight", "to the layer and past it", "changed in place"])
def test_gradients_that_pass_through_unchanged_equal_eager(way: str, device: torch.device) -> None:
    order, layers = ORDERS["1f1b"]
    assert_rank_equals_eager(lambda: Rank(device, order, layers, make=Shift, between=WAYS[way]), steps=5)


@pytest.mark.parametrize("when", ["always", "later", "now and then"])
def test_handover_of_a_transpose_is_not_mistaken_for_the_buffer(when: str, device: torch.device) -> None:
    """A square result has the same address and shape as its transpose. (Sums are in another order: nearly equal.)"""
    order, layers = ORDERS["1f1b"]

    def trained(*, graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        calls = iter(range(10**6))

        def between(call: Call, hidden: torch.Tensor) -> torch.Tensor:
            number = next(calls)
            is_turned = {"always": True, "later": number >= 24, "now and then": number % 5 == 4}[when]
            return call(hidden.t()) if is_turned else call(hidden)

        rank = Rank(device, order, layers, make=Once, batch=WIDTH, between=between)
        if graphed:
            rank.capture()
        torch.manual_seed(5)
        batches = torch.randn(8, 1, rank.num_microbatches, WIDTH, WIDTH, device=device)
        return [*(rank.run(batch) for batch in batches), *(p.grad for p in rank.model.parameters())]

    expected = trained(graphed=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*held-result", category=StepgraphWarning)
        received = trained(graphed=True)
    for one, two in zip(expected, received, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reuse", [True, False], ids=["shared", "apart"])
def test_handover_copies_nothing_from_the_second_round_on(reuse: bool, device: torch.device) -> None:
    """Seen by addresses: what a layer is called with is what its graph reads."""
    order, layers = ORDERS["interleaved"]
    rank = Rank(device, order, layers)
    seen: list[int] = []

    def noted(call: Any, hidden: torch.Tensor) -> torch.Tensor:
        static = call.func._runner.boundary.tensors[0]
        seen.append(hidden.data_ptr() == static.data_ptr())
        return call(hidden)

    rank.between = noted
    rank.capture(reuse_buffers=reuse)
    batch = torch.randn(2, rank.num_microbatches, rank.batch, WIDTH, device=device)
    for _ in range(3):
        seen.clear()
        rank.run(batch)
    assert seen == [True] * (rank.num_microbatches * (1 + 2))


KEPT: dict[str, Callable[[torch.Tensor, list[torch.Tensor]], Any]] = {
    "the result": lambda hidden, kept: kept.append(hidden),
    "a view of it": lambda hidden, kept: kept.append(hidden[1:, ::2]),
    "free of history": lambda hidden, kept: kept.append(hidden.detach()),
    "its gradient": lambda hidden, kept: hidden.register_hook(kept.append),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_is_kept_from_the_first_round_on_stays_as_it_was(what: str, device: torch.device) -> None:
    order, layers = ORDERS["1f1b"]

    def build() -> Rank:
        kept: list[torch.Tensor] = []

        def keep(call: Call, hidden: torch.Tensor) -> torch.Tensor:
            KEPT[what](hidden, kept)
            sums = sum(tensor.detach().sum() for tensor in kept[-9:])  # those of earlier rounds among them
            return call(hidden) + (sums if isinstance(sums, torch.Tensor) else 0.0)

        return Rank(device, order, layers, between=keep)

    assert_rank_equals_eager(build, steps=5)


RESULTS = [what for what in KEPT if what != "its gradient"]


@pytest.mark.parametrize("what", RESULTS)
def test_what_is_kept_in_a_later_round_stays_as_it_was(what: str, device: torch.device) -> None:
    """From the third round on the caller keeps some results, and drops them again two rounds later."""
    order, layers = ORDERS["interleaved"]
    kept: list[torch.Tensor] = []

    def build() -> Rank:
        kept.clear()
        calls = iter(range(10**6))

        def keep(call: Call, hidden: torch.Tensor) -> torch.Tensor:
            number = next(calls)
            if number % 60 == 0:
                kept.clear()
            elif number % 60 > 24 and number % 5 == 0:
                KEPT[what](hidden, kept)
            sums = [tensor.detach().sum() for tensor in kept]
            return call(hidden) + (torch.stack(sums).sum() if sums else 0.0)

        return Rank(device, order, layers, make=Once, between=keep)

    with pytest.warns(StepgraphWarning, match="held-result"):
        rank = assert_rank_equals_eager(build, steps=12)
    assert rank.graphed is not None
    assert 0 < rank.graphed[0].report().eager_calls < rank.graphed[0].report().forwards


def test_a_program_that_changes_for_good_is_replayed_again(device: torch.device) -> None:
    """Straight at first; then each result is needed beside the layer, and is copied after one eager call."""
    order, layers = ORDERS["1f1b"]
    made: list[Rank] = []

    def build() -> Rank:
        calls = iter(range(10**6))
        late = WAYS["around the layer"]
        between = lambda call, hidden: (WAYS["straight"] if next(calls) < 24 else late)(call, hidden)  # noqa: E731
        made.append(Rank(device, order, layers, make=Once, between=between))
        return made[-1]

    with pytest.warns(StepgraphWarning, match="held-result"):
        rank = assert_rank_equals_eager(build, steps=8)
    assert rank.graphed is not None
    assert rank.graphed[0].report().eager_calls == rank.num_microbatches


def running(device: torch.device, case: str, rounds: int) -> tuple[Rank, torch.Tensor, list[torch.Tensor]]:
    """A graphed rank after so many rounds, its batch, and the losses."""
    order, layers = ORDERS[case]
    rank = Rank(device, order, layers, make=Once)
    rank.capture()
    batch = torch.randn(1, rank.num_microbatches, rank.batch, WIDTH, device=device)
    return rank, batch, [rank.run(batch) for _ in range(rounds)]


def test_gradient_kept_in_a_later_round_raises_before_overwrite(device: torch.device) -> None:
    rank, batch, losses = running(device, "1f1b", rounds=3)
    kept: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def keep(call: Call, hidden: torch.Tensor) -> torch.Tensor:
        if not values:
            hidden.register_hook(lambda grad: (kept.append(grad), values.append(grad.clone()))[0])
        return call(hidden)

    rank.between = keep
    with pytest.raises(CaptureError, match=r"still holds.*\[held-gradient\]"):
        rank.run(batch)
    assert same_bits(kept[0], values[0])
    kept.clear()
    rank.between = WAYS["straight"]
    assert same_bits(rank.run(batch), losses[0])


def test_result_kept_in_a_later_round_raises_with_split_weights(device: torch.device) -> None:
    rank, batch, losses = running(device, "weights split off", rounds=2)
    kept: list[torch.Tensor] = []
    rank.between = lambda call, hidden: (kept.append(hidden), call(hidden))[1]
    values: list[torch.Tensor] = []
    with pytest.raises(CaptureError, match=r"still holds.*\[held-result\]"):
        for _ in range(2):
            values = [tensor.detach().clone() for tensor in kept]
            rank.run(batch)
    assert all(same_bits(one.detach(), two) for one, two in zip(kept, values, strict=False))
    kept.clear()
    rank.between = WAYS["straight"]
    assert same_bits(rank.run(batch), losses[0])


@pytest.mark.filterwarnings("ignore:.*held-result")
@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(st.sampled_from(sorted(WAYS)), min_size=8, max_size=8), min_size=4, max_size=4))
def test_handover_between_layers_may_change_from_call_to_call(ways: list[list[str]]) -> None:
    """Four rounds with a choice of their own for each layer and microbatch."""
    order, layers = ORDERS["1f1b"]

    def build() -> Rank:
        chosen = iter([way for round_ in ways for way in round_])
        between = lambda call, hidden: WAYS[next(chosen)](call, hidden)  # noqa: E731
        return Rank(torch.device("cpu"), order, layers, make=Once, between=between)

    assert_rank_equals_eager(build, steps=4)


class Pair(nn.Module):
    """Takes and returns two tensors of the same look, and a third that no gradient comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.linear(torch.tanh(x)), carried + x, (x > 0).sum()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_several_results_go_to_several_arguments(swapped: bool, retain: bool, device: torch.device) -> None:
    """Whichever goes where, and with a backward that comes twice."""
    order = [1, 1, -1, 1, -1, -1]

    def trained(*, graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(Pair() for _ in range(3)).to(device)
        calls: Sequence[Any] = [layer for _ in range(3) for layer in layers]
        if graphed:
            look = torch.randn(4, WIDTH, device=device, requires_grad=True)
            samples = tuple((look, look.detach().clone().requires_grad_()) for _ in range(9))
            calls = stepgraph.make_graphed_callables(
                tuple(layers), samples, order=order, num_layers_per_chunk=[3], retain_graph_in_backward=retain
            )
        torch.manual_seed(1)
        found: list[torch.Tensor] = []
        for _ in range(5):
            layers.zero_grad()
            under_way: list[torch.Tensor] = []
            forwards = iter(range(3))
            for entry in order:
                if entry > 0:
                    number = next(forwards)
                    x, carried = (torch.randn(4, WIDTH, device=device).requires_grad_() for _ in range(2))
                    for layer in range(3):
                        x, carried, count = calls[3 * number + layer](x, carried)
                        x, carried = (carried, x) if swapped else (x, carried)
                        found.append(count.clone())
                    under_way.append((x.pow(2) + carried.pow(2)).mean())
                else:
                    loss = under_way.pop(0)
                    if retain:
                        loss.backward(retain_graph=True)
                    loss.backward()
                    found += [loss.detach(), *(p.grad.clone() for p in layers.parameters())]
        return found

    for one, two in zip(trained(graphed=False), trained(graphed=True), strict=True):
        assert same_bits(one, two)


def test_forwards_without_backwards_hand_results_on(device: torch.device) -> None:
    order, rounds = [1, 1], 4
    torch.manual_seed(0)
    layers = nn.ModuleList(Once() for _ in range(3)).to(device).requires_grad_(False)
    samples = tuple((torch.randn(4, WIDTH, device=device),) for _ in range(6))
    with torch.no_grad():
        calls = stepgraph.make_graphed_callables(tuple(layers), samples, order=order, num_layers_per_chunk=[3])
        kept = []
        for _ in range(rounds):
            for number in range(2):
                x = expected = torch.randn(4, WIDTH, device=device)
                for layer in range(3):
                    x, expected = calls[3 * number + layer](x), layers[layer](expected)
                    assert same_bits(x, expected)
                kept.append((x, expected))
        assert all(same_bits(one, two) for one, two in kept)
    assert calls[0].report().forwards == rounds * 6
