"""`make_graphed_callables` with an order: equal to eager, in memory that the schedule's depth decides."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.order import (
    Order,
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
    get_schedule_table,
)
from tests.callables_harness import MIN_STEPS, WIDTH, Rank, assert_rank_equals_eager
from tests.module_harness import Layer

ONE_F_ONE_B = [1, 1, -1, 1, -1, 1, -1, -1]
INTERLEAVED = [1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1]
UNEVEN = [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
CASES: dict[str, tuple[Sequence[float], list[int]]] = {
    "one microbatch": ([1, -1], [2]),
    "1f1b": (ONE_F_ONE_B, [2]),
    "all forwards first": ([1, 1, 1, -1, -1, -1], [2]),
    "interleaved": (INTERLEAVED, [1, 2]),
    "five microbatches": (UNEVEN, [1, 1]),
    "backwards in reverse": (Order([1, 1, 1, -1, -1, -1], [0, 1, 2, 2, 1, 0]), [2]),
    "a chunk without layers": ([1, 2, -2, -1, 1, 2, -2, -1], [0, 2]),
}


def interleaved(num_microbatches: int, warmup: int = 4) -> list[float]:
    return convert_schedule_table_to_order(warmup, 2, get_schedule_table(num_microbatches, 2, 2))


@pytest.mark.parametrize("reuse", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shared", "apart"])
@pytest.mark.parametrize("case", CASES)
def test_ordered_callables_equal_eager(case: str, reuse: bool, device: torch.device) -> None:
    order, layers = CASES[case]
    rank = assert_rank_equals_eager(lambda: Rank(device, order, layers), reuse_buffers=reuse)
    assert rank.graphed is not None
    report = rank.graphed[0].report()
    assert report.forwards == report.backwards == MIN_STEPS * sum(layers) * rank.num_microbatches
    assert report.num_graphs == 2 * report.num_samples


@pytest.mark.parametrize("zero", ["none", "zero", "never"])
def test_ordered_callables_accumulate_gradients_as_eager_does(zero: str, device: torch.device) -> None:
    assert_rank_equals_eager(lambda: Rank(device, INTERLEAVED, [1, 2], zero=zero))


def test_ordered_callables_of_layers_as_chunks_equal_eager(device: torch.device) -> None:
    order, _ = get_overlap_moe_expert_parallel_comm_order([1, 1, -1, 1, -1, -1], [2], False)
    assert_rank_equals_eager(lambda: Rank(device, order, [1, 1]))


class Normed(nn.Module):
    """Statistics and dropout, and a mask that is not differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + torch.dropout(self.linear(self.norm(x)), 0.2, True) * scale


def test_ordered_callables_keep_statistics_and_random_numbers(device: torch.device) -> None:
    assert_rank_equals_eager(lambda: Rank(device, INTERLEAVED, [2, 2], make=Normed))


def test_ordered_callables_pass_plain_keyword_arguments(device: torch.device) -> None:
    build = lambda: Rank(device, ONE_F_ONE_B, [2], make=Normed, kwargs={"scale": 0.5})  # noqa: E731
    assert_rank_equals_eager(build, sample_kwargs={"scale": 0.5})


@pytest.mark.parametrize("reentrant", [False, True])
def test_ordered_callables_with_checkpointing_equal_eager(reentrant: bool, device: torch.device) -> None:
    class Checkpointed(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=reentrant)

    assert_rank_equals_eager(lambda: Rank(device, ONE_F_ONE_B, [2], make=Checkpointed))


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "split"])
def test_static_memory_does_not_grow_with_the_microbatches(split: bool, device: torch.device) -> None:
    found = []
    for num_microbatches in (4, 12):
        order = interleaved(num_microbatches)
        if split:
            order = [n for number in order for n in ([number, number - 0.5] if number < 0 else [number])]
        rank = Rank(device, order, [2, 2], batch=64)
        report = rank.capture(num_warmup_iters=1)[0].report()
        found.append(report)
        rank.graphed[0].reset()  # type: ignore[index]
    assert len({(report.num_buffers, report.static_bytes) for report in found}) == 1
    if device.type == "cpu":  # a GPU's pool grows by segments of 2 MiB, and by cuBLAS's workspace
        # what a best fit leaves between blocks may differ a little from order to order
        assert max(report.pool_bytes for report in found) <= 1.05 * min(report.pool_bytes for report in found)


@pytest.mark.slow
def test_static_memory_is_less_than_without_reuse(device: torch.device) -> None:
    def captured(reuse: bool) -> stepgraph.CallablesReport:
        rank = Rank(device, interleaved(8), [2, 2], batch=64)
        return rank.capture(num_warmup_iters=1, reuse_buffers=reuse)[0].report()

    shared, apart = captured(True), captured(False)
    assert (shared.num_buffers, apart.num_buffers) == (10, 32)
    assert shared.static_bytes < apart.static_bytes / 3
    if device.type == "cpu":  # a GPU's pool grows by segments of 2 MiB, and by cuBLAS's workspace
        assert shared.pool_bytes < apart.pool_bytes / 2


@pytest.mark.parametrize(
    ("order", "layers", "unique"), [(ONE_F_ONE_B, [2], 4), (UNEVEN, [1, 1], 6), (INTERLEAVED, [1, 2], 7)]
)
def test_buffers_are_those_of_the_plan(
    order: list[float], layers: list[int], unique: int, device: torch.device
) -> None:
    rank = Rank(device, order, layers)
    assert rank.capture(num_warmup_iters=1)[0].report().num_buffers == unique


def test_results_stay_as_they_are_while_later_calls_replay(device: torch.device) -> None:
    rank = Rank(device, ONE_F_ONE_B, [2])
    rank.capture()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(3):
        batch = torch.randn(1, 4, 4, WIDTH, device=device)
        rank.run(batch, lambda *values: seen.extend((v.detach(), v.detach().clone()) for v in values))
    assert seen
    assert all(torch.equal(held, copy) for held, copy in seen)


def test_samples_of_other_shapes_have_buffers_of_their_own(device: torch.device) -> None:
    layers = [nn.Linear(WIDTH, WIDTH).to(device) for _ in range(2)]
    sizes = [4, 4, 6, 6]
    samples = tuple((torch.randn(size, WIDTH, device=device, requires_grad=True),) for size in sizes)
    graphed = stepgraph.make_graphed_callables(tuple(layers), samples, order=[1, -1, 2, -2, 1, -1, 2, -2])
    assert graphed[0].report().num_buffers == 2
    for _ in range(2):
        for microbatch in range(2):
            for chunk in range(2):
                index = 2 * chunk + microbatch
                x = torch.randn(sizes[index], WIDTH, device=device)
                y = graphed[index](x)
                assert torch.equal(y, layers[chunk](x))
                y.sum().backward()


def test_an_order_without_backwards_captures_forwards_only(device: torch.device) -> None:
    layer = Layer().to(device).eval()
    samples = tuple((torch.randn(4, WIDTH, device=device),) for _ in range(3))
    graphed = stepgraph.make_graphed_callables(layer, samples, order=[1, 1, 1])
    assert graphed[0].report().num_graphs == 3
    with torch.no_grad():
        for _ in range(4):
            for call in graphed:
                x = torch.randn(4, WIDTH, device=device)
                y = call(x)
                assert torch.equal(y, layer(x))
                assert not y.requires_grad


def test_forwards_only_need_memory_for_one_at_a_time(device: torch.device) -> None:
    layer = Layer().to(device).eval()
    pools = []
    for count in (2, 8):
        samples = tuple((torch.randn(64, WIDTH, device=device),) for _ in range(count))
        graphed = stepgraph.make_graphed_callables(layer, samples, order=[1] * count, num_warmup_iters=1)
        pools.append(graphed[0].report().pool_bytes)
        graphed[0].reset()
    assert pools[0] == pools[1]


def test_ordered_callables_run_as_they_were_in_the_other_mode(device: torch.device) -> None:
    rank = Rank(device, [1, 1, -1, -1], [1])
    graphed = rank.capture()
    rank.model.eval()
    x = torch.randn(3, WIDTH, device=device)
    assert torch.equal(graphed[0](x), rank.model[0](x))
    rank.model.train()
    rank.run(torch.randn(1, 2, 4, WIDTH, device=device))
    assert graphed[0].report().forwards == 2


def test_reset_frees_everything(device: torch.device) -> None:
    rank = Rank(device, ONE_F_ONE_B, [2])
    graphed = rank.capture()
    rank.run(torch.randn(1, 4, 4, WIDTH, device=device))
    graphed[3].reset()
    report = graphed[0].report()
    assert (report.num_graphs, report.static_bytes, report.pool_bytes) == (0, 0, 0)
    for call in graphed:
        call.reset()
    with pytest.raises(stepgraph.ClosedError, match=r"callables\[1\] \(Layer\), sample 1, was reset"):
        graphed[1](torch.randn(4, WIDTH, device=device))
    rank.graphed = None
    rank.run(torch.randn(1, 4, 4, WIDTH, device=device))  # the layers themselves are as before
    assert_rank_equals_eager(lambda: Rank(device, ONE_F_ONE_B, [2]))


def test_private_spellings_of_the_order_are_read(device: torch.device) -> None:
    layers = tuple(nn.Linear(WIDTH, WIDTH).to(device) for _ in range(3))
    samples = tuple((torch.randn(2, WIDTH, device=device, requires_grad=True),) for _ in range(6))
    graphed = stepgraph.make_graphed_callables(
        layers, samples, _order=[1, 2, -2, -1, 1, 2, -2, -1], _num_layers_per_chunk=[1, 2]
    )
    assert [call.name for call in graphed] == [f"callables[{i}] (Linear)" for i in (0, 0, 1, 2, 1, 2)]


def test_samples_of_a_callable_serve_all_its_microbatches(device: torch.device) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    layers = tuple(Scaled(WIDTH, WIDTH).to(device) for _ in range(2))
    samples = tuple((torch.randn(2, WIDTH, device=device, requires_grad=True),) for _ in layers)
    graphed = stepgraph.make_graphed_callables(
        layers, samples, sample_kwargs=({"scale": 2.0}, {"scale": 3.0}), order=[1, 1, 2, 2, -2, -2, -1, -1]
    )
    x = torch.randn(2, WIDTH, device=device)
    for call, layer, scale in zip(graphed, (0, 0, 1, 1), (2.0, 2.0, 3.0, 3.0), strict=True):
        assert torch.equal(call(x, scale=scale), layers[layer](x, scale=scale))


def test_a_session_can_be_shared(device: torch.device) -> None:
    with stepgraph.Session() as session:
        rank = Rank(device, [1, 1, -1, -1], [1])
        rank.capture(pool=session)
        layer = nn.Linear(WIDTH, WIDTH).to(device)
        stepgraph.make_graphed_callables(layer, (torch.randn(4, WIDTH, device=device),), pool=session)
        for _ in range(2):
            rank.run(torch.randn(1, 2, 4, WIDTH, device=device))
            layer(torch.randn(4, WIDTH, device=device)).sum().backward()
        layer.reset()
        rank.run(torch.randn(1, 2, 4, WIDTH, device=device))


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_gradients_in_memory_of_the_callers_are_added_to(set_to_none: bool, device: torch.device) -> None:
    rank, twin = (Rank(device, [1, 1, -1, -1], [1], make=lambda: Layer(dropout=0.0)) for _ in range(2))
    twin.model.load_state_dict(rank.model.state_dict())
    flat = [torch.randn_like(p) for p in rank.model.parameters()]
    for parameter, other, memory in zip(rank.model.parameters(), twin.model.parameters(), flat, strict=True):
        parameter.grad, other.grad = memory, memory.clone()
    rank.capture()
    for parameter, memory in zip(rank.model.parameters(), flat, strict=True):
        assert parameter.grad is memory
    for index in range(4):
        batch = torch.randn(1, 2, 4, WIDTH, device=device)
        rank.run(batch)
        twin.run(batch)
        for parameter, other, memory in zip(rank.model.parameters(), twin.model.parameters(), flat, strict=True):
            assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]
            assert set_to_none or parameter.grad is memory or index > 1
        if index == 1:
            rank.model.zero_grad(set_to_none=set_to_none)
            twin.model.zero_grad(set_to_none=set_to_none)


def test_two_orders_of_the_same_layers_take_turns(device: torch.device) -> None:
    rank, twin = (Rank(device, [1, 1, -1, -1], [1], make=lambda: Layer(dropout=0.0)) for _ in range(2))
    twin.model.load_state_dict(rank.model.state_dict())
    sets = [rank.capture(), rank.capture()]
    for index in range(6):
        rank.graphed = sets[index % 2]
        batch = torch.randn(1, 2, 4, WIDTH, device=device)
        rank.run(batch)
        twin.run(batch)
        for parameter, other in zip(rank.model.parameters(), twin.model.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]
        if index % 3 == 0:
            rank.model.zero_grad()
            twin.model.zero_grad()
