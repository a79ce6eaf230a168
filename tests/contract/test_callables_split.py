"""Weight gradients split off from the backward: equal to torch's pipelines, replayed by `backward_dw()` in order."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.order import Order, get_overlap_moe_expert_parallel_comm_order
from tests.callables_harness import WIDTH, Rank, assert_rank_equals_eager
from tests.module_harness import Layer

ZERO_BUBBLE = [1, 1, -1, 1, -1, -1.5, -1, -1.5, -1.5]
CASES: dict[str, tuple[Sequence[float], list[int]]] = {
    "at once": ([1, -1, -1.5, 1, -1, -1.5], [2]),
    "later": (ZERO_BUBBLE, [2]),
    "all at the end": ([1, 1, -1, -1, -1.5, -1.5], [2]),
    "two chunks": ([1, 2, -2, 1, -2.5, -1, 2, -1.5, -2, -1, -2.5, -1.5], [1, 2]),
    "one chunk of two": ([1, 2, -2, -2.5, -1, 1, 2, -2, -2.5, -1], [1, 2]),
    "some microbatches": (Order([1, 1, 1, -1, -1, -1.5, -1], [0, 1, 2, 0, 1, 1, 2]), [2]),
}


@pytest.mark.parametrize("reuse", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shared", "apart"])
@pytest.mark.parametrize("case", CASES)
def test_split_callables_equal_eager(case: str, reuse: bool, device: torch.device) -> None:
    order, layers = CASES[case]
    rank = assert_rank_equals_eager(lambda: Rank(device, order, layers), reuse_buffers=reuse)
    assert rank.graphed is not None
    assert rank.graphed[0].report().weight_grads > 0


@pytest.mark.parametrize("zero", ["none", "never"])
def test_split_callables_of_an_overlapped_order_equal_eager(zero: str, device: torch.device) -> None:
    order, _ = get_overlap_moe_expert_parallel_comm_order([1, 1, -1, 1, -1, -1], [2], True)
    assert_rank_equals_eager(lambda: Rank(device, order, [1, 1], zero=zero))


def test_the_backward_leaves_the_weights_alone(device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    (graphed,) = stepgraph.make_graphed_callables(layer, ((x,),), order=[1, -1, -1.5])
    graphed(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    graphed.backward_dw()
    assert torch.equal(layer.bias.grad, torch.full((WIDTH,), 4.0, device=device))  # type: ignore[arg-type]


def test_weight_gradients_of_an_entry_come_in_any_order(device: torch.device) -> None:
    grads = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        torch.manual_seed(0)
        layers = tuple(Layer(dropout=0.0).to(device) for _ in range(3))
        samples = tuple((torch.randn(4, WIDTH, device=device, requires_grad=True),) for _ in layers)
        graphed = stepgraph.make_graphed_callables(layers, samples, order=[1, -1, -1.5], num_layers_per_chunk=3)
        for _ in range(2):
            hidden = samples[0][0]
            for call in graphed:
                hidden = call(hidden)
            hidden.sum().backward()
            for index in order:
                graphed[index].backward_dw()
        grads.append([p.grad.clone() for layer in layers for p in layer.parameters()])  # type: ignore[union-attr]
    for other in grads[1:]:
        assert all(torch.equal(one, two) for one, two in zip(grads[0], other, strict=True))


def test_hooks_of_weights_run_with_the_weight_gradient(device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    seen: list[torch.Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[union-attr]
    x, dy = torch.randn(4, WIDTH, device=device, requires_grad=True), torch.ones(4, WIDTH, device=device)
    (graphed,) = stepgraph.make_graphed_callables(layer, ((x,),), order=[1, -1, -1.5])
    for count in range(1, 4):
        graphed(x).backward(dy)
        assert len(seen) == count - 1
        graphed.backward_dw()
        assert len(seen) == count
    expected = torch.autograd.grad(layer(x), layer.weight, dy)[0]
    assert torch.equal(seen[0], expected)
    assert torch.equal(layer.weight.grad, expected + expected + expected)  # type: ignore[arg-type]


def refusal(call: Any) -> stepgraph.StepgraphError:
    with pytest.raises(stepgraph.StepgraphError) as caught:
        call()
    return caught.value


def test_a_weight_gradient_out_of_order_is_refused(device: torch.device) -> None:
    rank = Rank(device, ZERO_BUBBLE, [1])
    graphed = rank.capture()
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    first, second = graphed[0](x), graphed[1](x)
    error = refusal(graphed[0].backward_dw)
    assert error.rule == "replay-order"
    assert "entry 2 of 9: input gradient of chunk 1, microbatch 0, layer 0" in str(error)
    first.sum().backward()
    error = refusal(graphed[0].backward_dw)
    assert "entry 3 of 9: forward of chunk 1, microbatch 2" in str(error)
    graphed[2](x)
    error = refusal(lambda: graphed[0](x))
    assert "received  forward of chunk 1, microbatch 0" in str(error)
    second.sum().backward()
    error = refusal(graphed[1].backward_dw)
    assert "entry 5 of 9: weight gradient of chunk 1, microbatch 0" in str(error)
    graphed[0].backward_dw()


def test_backward_dw_without_a_split_weight_gradient_is_refused(device: torch.device) -> None:
    rank = Rank(device, [1, -1], [1])
    graphed = rank.capture()
    assert "has no separate weight gradient" in refusal(graphed[0].backward_dw).what


def test_a_checkpoint_with_random_numbers_cannot_be_split(device: torch.device) -> None:
    class Checkpointed(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    error = refusal(lambda: Rank(device, [1, -1, -1.5], [1], make=Checkpointed).capture())
    assert error.rule == "rng-recompute"
    assert error.what.startswith("callables[0] (Checkpointed): ")


def test_a_reentrant_checkpoint_cannot_be_split(device: torch.device) -> None:
    class Checkpointed(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    error = refusal(lambda: Rank(device, [1, -1, -1.5], [1], make=Checkpointed).capture())
    assert error.rule == "reentrant-checkpoint"
    assert error.what.startswith("callables[0] (Checkpointed): ")
