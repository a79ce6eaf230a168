"""The definition of a backend: what passes here on a device is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.engine.backends import Backend, Graph, Workspace
from stepgraph.engine.call.failure import capture_error
from tests.harness import operators_of


@pytest.fixture
def backend(device: torch.device) -> Backend:
    return stepgraph.backend_for(device)


@pytest.fixture
def workspace(backend: Backend) -> Any:
    made = backend.workspace()
    yield made
    made.close()


def record(workspace: Workspace, work: Callable[[], Any], *generators: torch.Generator) -> tuple[Graph, Any]:
    """Warm up, then record."""
    with workspace.warming_up():
        work()
    return record_cold(workspace, work, *generators)


def record_cold(workspace: Workspace, work: Callable[[], Any], *generators: torch.Generator) -> tuple[Graph, Any]:
    graph = workspace.graph(generators)
    with workspace.capturing():
        try:
            graph.begin()
            result = work()
            graph.end()
        except BaseException:
            graph.abort()
            raise
    return graph, result


def test_backend_for_picks_by_device(device: torch.device) -> None:
    assert stepgraph.backend_for(device).name == {"cpu": "tape", "cuda": "cuda"}[device.type]


def test_graph_replay_reads_and_writes_the_same_addresses(workspace: Workspace, device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    graph, y = record(workspace, lambda: x * 2 + 1)
    address = y.data_ptr()
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [value * 2 + 1] * 4
    assert y.data_ptr() == address


def test_graphs_of_different_lanes_never_share_memory(workspace: Workspace, device: torch.device) -> None:
    """Within a lane, an earlier graph may overwrite what a later one has left: what it needed while it ran."""
    x = torch.ones(1 << 16, device=device)

    def in_lane(lane: int, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        graph = workspace.graph((), lane)
        with workspace.capturing():
            graph.begin()
            kept = work()
            graph.end()
        return graph, kept

    def with_scratch() -> torch.Tensor:
        return ((x * 2 + 1) * 3 + 1).sum()

    first, total = in_lane(1, with_scratch)
    others = [in_lane(lane, lambda lane=lane: x * (lane + 10)) for lane in (2, 3, 2)]
    for graph, _ in others:
        graph.replay()
    first.replay()
    assert total.item() == 10 * (1 << 16)
    for lane, (_, kept) in zip((2, 3, 2), others, strict=True):
        assert kept.unique().tolist() == [lane + 10]
    ranges = sorted((kept.data_ptr(), kept.data_ptr() + kept.nbytes) for _, kept in others)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))


def test_graph_recording_has_no_effect(workspace: Workspace, device: torch.device) -> None:
    x, counter = torch.ones(4, device=device), torch.zeros((), device=device)
    graph, _ = record_cold(workspace, lambda: (x.mul_(3), counter.add_(1)))
    assert x.tolist() == [1.0] * 4
    assert counter.item() == 0
    graph.replay()
    graph.replay()
    assert x.tolist() == [9.0] * 4
    assert counter.item() == 2


def test_graph_recording_leaves_random_state(workspace: Workspace, device: torch.device) -> None:
    x = torch.ones(64, device=device)
    torch.manual_seed(5)
    expected = [F.dropout(x, 0.5) for _ in range(4)]
    torch.manual_seed(5)
    first = F.dropout(x, 0.5)
    graph, y = record_cold(workspace, lambda: F.dropout(x, 0.5))
    received = [first]
    for _ in range(2):
        graph.replay()
        received.append(y.clone())
    received.append(F.dropout(x, 0.5))  # eager goes on where the replays left off
    assert all(torch.equal(a, b) for a, b in zip(expected, received, strict=True))


def test_graph_advances_registered_generators(workspace: Workspace, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    expected = [torch.rand(4, device=device, generator=generator) for _ in range(3)]
    generator.manual_seed(3)
    graph, y = record_cold(workspace, lambda: torch.rand(4, device=device, generator=generator), generator)
    for one in expected:
        graph.replay()
        assert torch.equal(one, y)


def test_swapped_random_state_is_drawn_from_at_each_replay(
    backend: Backend, workspace: Workspace, device: torch.device
) -> None:
    generator = torch.Generator(device)

    def work() -> tuple[torch.Tensor, ...]:
        before = torch.rand(4, device=device)
        backend.swap_random_state(generator)
        inside = torch.rand(4, device=device)
        backend.swap_random_state(generator)
        return before, inside, torch.rand(4, device=device)

    def seed() -> None:
        torch.manual_seed(5)
        generator.manual_seed(3)

    seed()
    expected = [work() for _ in range(3)]
    states = [backend.default_generator.get_state(), generator.get_state()]
    seed()
    graph, results = record_cold(workspace, work, generator)
    for drawn in expected:
        graph.replay()
        assert all(torch.equal(one, two) for one, two in zip(drawn, results, strict=True))
    assert torch.equal(states[0], backend.default_generator.get_state())
    assert torch.equal(states[1], generator.get_state())


def test_random_state_read_in_a_recording_is_set_in_it(
    backend: Backend, workspace: Workspace, device: torch.device
) -> None:
    generator = torch.Generator(device).manual_seed(3)

    def draw() -> torch.Tensor:
        return torch.rand(4, device=device, generator=generator)

    def work() -> tuple[torch.Tensor, ...]:
        first = draw()
        state = backend.get_random_state(generator)
        second = draw()
        backend.set_random_state(generator, state)
        return first, second, draw()

    graph, results = record_cold(workspace, work, generator)
    eager = torch.Generator(device).manual_seed(3)
    for _ in range(3):
        graph.replay()
        first, second = (torch.rand(4, device=device, generator=eager) for _ in range(2))
        assert all(torch.equal(one, two) for one, two in zip((first, second, second), results, strict=True))
    assert torch.equal(eager.get_state(), generator.get_state())


def test_graph_counts_nodes_and_knows_when_it_is_empty(workspace: Workspace, device: torch.device) -> None:
    x = torch.ones(4, device=device)
    seen = []
    graph = workspace.graph()
    with workspace.capturing():
        graph.begin()
        seen.append(graph.recorded_anything)
        x.add_(1)
        seen.append(graph.recorded_anything)
        graph.end()
    assert seen == [False, True]
    assert graph.nodes == 1
    empty, _ = record_cold(workspace, lambda: None)
    assert empty.nodes == 0
    empty.replay()


def test_graph_records_backward(workspace: Workspace, device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device)

    def work() -> None:
        for p in layer.parameters():
            p.grad = None
        layer(x).pow(2).sum().backward()

    graph, _ = record(workspace, work)
    captured = layer.weight.grad
    x.copy_(torch.randn(2, 4, device=device))
    graph.replay()
    received = captured.clone()
    work()
    assert torch.equal(received, layer.weight.grad)


class AsAttention(nn.Module):
    """Self-attention by `nn.MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "make", [AsAttention, lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)], ids=["attention", "layer"]
)
def test_graph_takes_the_path_through_attention_that_eager_takes(
    make: Callable[[], nn.Module], autocast: bool, workspace: Workspace, device: torch.device
) -> None:
    """These modules have a fused path, which they leave where anything overrides torch's functions."""
    module = make().to(device).eval()
    x = torch.randn(2, 5, 16, device=device)

    def work() -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out: torch.Tensor = module(x)
            return out

    graph, y = record(workspace, work)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(y, work())


def test_workspace_many_graphs_share_one_pool(workspace: Workspace, device: torch.device) -> None:
    x = torch.ones(1 << 16, device=device)

    def work() -> torch.Tensor:
        y = x
        for _ in range(8):
            y = (y + 1).sin()
        return y

    graphs = [record(workspace, work)[0] for _ in range(2)]
    before = workspace.pool_bytes()
    graphs += [record(workspace, work)[0] for _ in range(6)]
    assert 0 < workspace.pool_bytes() <= 2 * max(before, 1 << 21)
    for graph in graphs:
        graph.replay()


def test_workspace_records_again_after_all_graphs_are_freed(workspace: Workspace, device: torch.device) -> None:
    x = torch.ones(4, device=device)
    for _ in range(3):
        graph, y = record(workspace, lambda: x + 1)
        graph.replay()
        assert y.tolist() == [2.0] * 4
        del y
        graph.free()


def test_workspace_stream_orders_work_both_ways(workspace: Workspace, device: torch.device) -> None:
    x = torch.zeros(1 << 20, device=device)
    x += 1
    with workspace.stream():
        x *= 2
    x += 1
    assert x[0].item() == 3


def test_backend_knows_when_it_records(backend: Backend, workspace: Workspace, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    assert not backend.is_capturing()
    _, inside = record(workspace, lambda: (backend.is_capturing(), x + 1)[0])
    assert inside
    assert not backend.is_capturing()


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "host-read"),
    "bool": (lambda x: bool(x.sum() > 0), "host-read"),
    "float": (lambda x: float(x[0]), "host-read"),
    "print": (lambda x: f"{x}", "host-read"),
    "nonzero": (lambda x: x.nonzero(), "host-read"),
    "mask": (lambda x: x[x > 0.5], "host-read"),
    "mask set tensor": (lambda x: x.__setitem__(x > 0.5, x.sum()), "host-read"),
    "unique": (lambda x: torch.unique(x), "host-read"),
    "one_hot without classes": (lambda x: F.one_hot(x.long()), "host-read"),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, x.long()), "host-read"),
    "index with a 0-dim tensor": (lambda x: x[x.argmax()], "host-read"),
    "cpu": (lambda x: x.cpu(), "host-read"),
    "tensor": (lambda x: torch.tensor([1.0, 2.0], device=x.device), "host-data"),
    "as_tensor": (lambda x: torch.as_tensor([1.0], device=x.device), "host-data"),
    "list index": (lambda x: x[[0, 1]], "host-data"),
    "svd": (lambda x: torch.linalg.eigh(torch.outer(x, x)), "library-call"),
    "generator": (lambda x: torch.rand(2, device=x.device, generator=torch.Generator(x.device)), "generator"),
}


ONE_ELEMENT = lambda x: x.__setitem__(0, 1.0)  # noqa: E731
if "aten::lift_fresh" in operators_of(ONE_ELEMENT, torch.zeros(6)):  # a copy; newer versions of torch fill instead
    REFUSED["one element"] = (ONE_ELEMENT, "host-data")


@pytest.mark.parametrize("name", REFUSED)
def test_backend_refuses_with_line_and_goes_on(name: str, workspace: Workspace, device: torch.device) -> None:
    work, rule = REFUSED[name]
    x = torch.rand(6, device=device)
    before = x.clone()
    with pytest.raises(RuntimeError) as caught:
        record_cold(workspace, lambda: (x.mul_(2), work(x)))
    error = capture_error("step", caught.value, stepgraph.backend_for(device))
    assert error.rule == rule, str(caught.value)
    assert error.where.file == __file__
    assert torch.equal(x, before)
    # the process stays usable: eager, dropout included, and a mended recording
    assert F.dropout(x, 0.5).shape == x.shape
    graph, y = record(workspace, lambda: F.dropout(x, 0.5) * 0 + 1)
    graph.replay()
    assert y.tolist() == [1.0] * 6


ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill a mask": lambda x: x.clone().masked_fill_(x > 0.5, 0.0),
    "assign a number through a mask": lambda x: _assigned(x.clone(), x > 0.5, 0.0),
    "assign a number to a slice": lambda x: _assigned(x.clone(), slice(0, 2), 3.0),
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "one_hot": lambda x: F.one_hot(x.long(), 4),
    "repeat_interleave with size": lambda x: torch.repeat_interleave(
        x, torch.arange(6, device=x.device), output_size=15
    ),
    "sort": lambda x: x.sort()[0],
    "topk": lambda x: x.topk(2)[0],
    "gather": lambda x: x.gather(0, torch.arange(3, device=x.device)),
    "qr": lambda x: torch.linalg.qr(x.view(2, 3))[1],
    "full": lambda x: torch.full((3,), 2.0, device=x.device) + x[:3],
    "as_tensor of a tensor": lambda x: torch.as_tensor(x) + 1,
}
if "one element" not in REFUSED:
    ALLOWED["assign a number to one element"] = lambda x: _assigned(x.clone(), 0, 3.0)


def _assigned(x: torch.Tensor, where: Any, value: float) -> torch.Tensor:
    x[where] = value
    return x


@pytest.mark.parametrize("name", ALLOWED)
def test_backend_records_what_stays_on_the_device(name: str, workspace: Workspace, device: torch.device) -> None:
    work = ALLOWED[name]
    x = torch.rand(6, device=device)
    graph, y = record(workspace, lambda: work(x))
    x.copy_(torch.rand(6, device=device))
    graph.replay()
    assert torch.equal(y, work(x))


def test_backend_refusal_that_the_step_swallows_still_fails(workspace: Workspace, device: torch.device) -> None:
    x = torch.ones(4, device=device)

    def work() -> None:
        try:
            x.sum().item()
        except RuntimeError:
            x.add_(1)

    with pytest.raises(RuntimeError):
        record_cold(workspace, work)
    assert x.tolist() == [1.0] * 4


def test_graph_custom_function_and_inference_mode(workspace: Workspace, device: torch.device) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(3, device=device)

    def work() -> torch.Tensor:
        with torch.inference_mode():
            return Double.apply(x)

    graph, y = record(workspace, work)
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [8.0] * 3
