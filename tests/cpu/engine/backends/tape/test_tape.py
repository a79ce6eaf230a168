"""The tape as a device: capture without effect, baked addresses, pooled memory, and stale reads that are told."""

import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from stepgraph.core.errors import CaptureRefused, StaleMemoryError
from stepgraph.engine.backends.tape.mode import TapeBackend, TapeWorkspace
from tests.cpu.engine.backends.tape.recording import record, same_bits
from tests.processes import run_to_end

ROOT = Path(__file__).parents[5]
SIZE = 1024  # floats of a tensor that fills whole blocks of the pool
BYTES = 4 * SIZE


@pytest.fixture
def workspace() -> TapeWorkspace:
    return TapeBackend().workspace()


def numbers(start: float = 0.0) -> torch.Tensor:
    return torch.arange(start, start + SIZE)


# -- capture has no effect


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_results_are_nan_until_the_first_replay(workspace: TapeWorkspace, dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    graph, (y, view) = record(workspace, lambda: ((z := x + 1), z[1:]))
    assert y.isnan().all()
    assert view.isnan().all()
    graph.replay()
    assert y.tolist() == [2.0] * 3
    assert view.tolist() == [2.0] * 2


def test_gradients_are_nan_until_the_first_replay(workspace: TapeWorkspace) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    graph, _ = record(workspace, lambda: (p * 2).sum().backward())
    assert p.grad is not None
    assert p.grad.isnan().all()
    graph.replay()
    assert p.grad.tolist() == [2.0] * 3


def test_capture_leaves_model_optimizer_and_rng_unchanged(workspace: TapeWorkspace) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, 4)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    momentum = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    random = torch.get_rng_state()
    record(workspace, step)
    assert all(same_bits(before[k], v) for k, v in model.state_dict().items())
    assert all(same_bits(a, s["momentum_buffer"]) for a, s in zip(momentum, optimizer.state.values(), strict=True))
    assert same_bits(torch.get_rng_state(), random)


def test_aborted_capture_leaves_memory_and_random_state(workspace: TapeWorkspace) -> None:
    x, random = torch.ones(4), torch.get_rng_state()

    def step() -> None:
        x.mul_(torch.rand(4))
        raise KeyError

    with pytest.raises(KeyError):
        record(workspace, step)
    assert x.tolist() == [1.0] * 4
    assert same_bits(torch.get_rng_state(), random)
    assert not TapeBackend().is_capturing()


def test_tensor_kept_from_an_aborted_capture_is_plain_memory(workspace: TapeWorkspace) -> None:
    kept: list[torch.Tensor] = []

    def failing() -> None:
        kept.append(numbers() + 1)
        kept[0].sum().item()

    with pytest.raises(CaptureRefused):
        record(workspace, failing)
    graph, y = record(workspace, lambda: kept[0] * 2)
    kept[0].copy_(numbers(5.0))
    graph.replay()
    assert same_bits(y, numbers(5.0) * 2)


@pytest.mark.parametrize(
    "make",
    [lambda x: torch.empty(0).set_(x), lambda x: torch.empty(0).set_(x.untyped_storage())],
    ids=["tensor", "storage"],
)
def test_memory_reached_through_set_is_not_the_captures(workspace: TapeWorkspace, make: Any) -> None:
    x = numbers()
    record(workspace, lambda: make(x))
    assert same_bits(x, numbers())


def test_garbage_collector_is_held_off_and_comes_back(workspace: TapeWorkspace) -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), workspace.capturing():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_capturing_is_known_to_the_backend(workspace: TapeWorkspace) -> None:
    backend = TapeBackend()
    assert not backend.is_capturing()
    _, seen = record(workspace, backend.is_capturing)
    assert seen
    assert not backend.is_capturing()


def test_functions_replaced_while_recording_are_back(workspace: TapeWorkspace) -> None:
    def replaced() -> tuple[Any, ...]:
        return torch.get_rng_state, torch.set_rng_state, torch.manual_seed, torch.overrides.has_torch_function

    before = replaced()
    record(workspace, lambda: torch.rand(2))
    with pytest.raises(CaptureRefused):
        record(workspace, lambda: torch.manual_seed(0))
    assert replaced() == before


# -- addresses are baked


def test_replay_uses_the_addresses_of_the_capture(workspace: TapeWorkspace) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    graph, y = record(workspace, lambda: (p * 2).detach())
    old = p.data
    p.data = torch.full((3,), 5.0)
    graph.replay()
    assert y.tolist() == [2.0] * 3, "the memory that p had at capture"
    old.fill_(7.0)
    graph.replay()
    assert y.tolist() == [14.0] * 3


def test_replay_writes_to_the_same_memory(workspace: TapeWorkspace) -> None:
    x = torch.ones(3)
    graph, y = record(workspace, lambda: x + 1)
    address, kept = y.data_ptr(), y.clone()
    x.fill_(5.0)
    graph.replay()
    assert y.data_ptr() == address
    assert kept.isnan().all()
    assert y.tolist() == [6.0] * 3


def test_replay_outlives_the_tensors_it_uses(workspace: TapeWorkspace) -> None:
    x = torch.ones(3)
    graph, y = record(workspace, torch.add, x, 1)
    del x
    gc.collect()
    graph.replay()
    assert y.tolist() == [2.0] * 3


def test_graph_freed_lets_go_of_what_it_held(workspace: TapeWorkspace) -> None:
    x = torch.ones(3)
    watch = weakref.ref(x.untyped_storage())
    graph, _ = record(workspace, torch.add, x, 1)
    del x
    assert watch() is not None
    graph.free()
    assert watch() is None


def test_replay_keeps_the_callers_grad_mode(workspace: TapeWorkspace) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    graph, _ = record(workspace, lambda: (p * 2).sum().backward())
    with torch.no_grad():
        graph.replay()
        assert not torch.is_grad_enabled()
    graph.replay()
    assert torch.is_grad_enabled()


def test_nodes_count_work_and_not_views(workspace: TapeWorkspace) -> None:
    x = torch.ones(4, 4)
    assert record(workspace, lambda: x.t()[1:].unsqueeze(0).detach())[0].nodes == 0
    assert record(workspace, lambda: torch.empty(3))[0].nodes == 0
    assert record(workspace, lambda: (x + 1).t() * 2)[0].nodes == 2


# -- memory


def test_intermediates_share_memory(workspace: TapeWorkspace) -> None:
    x = numbers()

    def step() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = y + 1
        return y

    graph, y = record(workspace, step)
    graph.replay()
    assert same_bits(y, x + 50)
    assert workspace.pool_bytes() <= 3 * BYTES


def test_memory_freed_inside_capture_is_given_to_the_next_birth(workspace: TapeWorkspace) -> None:
    x = numbers()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        first = x + 1
        total = first.sum()
        del first
        return total, x * 3

    graph, (total, second) = record(workspace, step)
    graph.replay()
    assert total.item() == (x + 1).sum().item()
    assert same_bits(second, x * 3)
    assert workspace.pool_bytes() == BYTES + 512


def test_memory_kept_is_not_given_out_again(workspace: TapeWorkspace) -> None:
    x = numbers()
    graphs, kept = [], []
    for i in range(4):
        graph, y = record(workspace, lambda i=i: x + i)
        graphs.append(graph)
        kept.append(y)
    for graph in graphs:
        graph.replay()
    assert workspace.pool_bytes() == 4 * BYTES
    assert all(same_bits(y, x + i) for i, y in enumerate(kept))


def test_memory_dropped_between_captures_is_given_to_the_next(workspace: TapeWorkspace) -> None:
    x = numbers()
    for i in range(4):
        graph, y = record(workspace, lambda i=i: x + i)
        graph.replay()
        assert same_bits(y, x + i)
        del y
    assert workspace.pool_bytes() == BYTES


def test_memory_of_a_resized_out_argument_is_its_new_size(workspace: TapeWorkspace) -> None:
    x = numbers()

    def step() -> torch.Tensor:
        grown = torch.empty(0)
        torch.add(x, 1, out=grown)
        other = x * 3
        doubled = grown * 2
        del grown
        return doubled + other

    graph, y = record(workspace, step)
    graph.replay()
    assert same_bits(y, (x + 1) * 2 + x * 3)


def test_activations_live_until_the_backward_and_no_longer() -> None:
    layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False) for _ in range(8)])
    x, activation = torch.randn(64, 32), 64 * 32 * 4

    def forward() -> torch.Tensor:
        return layers(x).sum()

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    sizes = {}
    for function in (forward, without_gradients):
        workspace = TapeBackend().workspace()
        graph, loss = record(workspace, function)
        graph.replay()
        assert same_bits(loss, forward())
        sizes[function] = workspace.pool_bytes()
    assert sizes[forward] >= 8 * activation
    assert sizes[without_gradients] < 3 * activation


# -- stale reads


class Four:
    """g1 writes y; g2 reads y; y is dropped; g3 is captured in its place."""

    def __init__(self, workspace: TapeWorkspace) -> None:
        self.x = numbers()
        self.g1, y = record(workspace, lambda: self.x + 1)
        self.g2, self.total = record(workspace, torch.sum, y)
        del y
        before = workspace.pool_bytes()
        self.g3, self.z = record(workspace, lambda: self.x * 3)
        assert workspace.pool_bytes() == before, "g3 was given y's memory"

    def replay(self, order: str) -> None:
        for name in order.split():
            getattr(self, name).replay()


@pytest.mark.parametrize("order", ["g1 g2 g3", "g1 g3 g1 g2", "g3 g1 g2", "g1 g2 g2", "g2", "g1 g2 g3 g1 g2 g3"])
def test_replay_in_an_order_without_stale_reads(workspace: TapeWorkspace, order: str) -> None:
    four = Four(workspace)
    four.replay(order)
    if "g1" in order:
        assert four.total.item() == (four.x + 1).sum().item()


@pytest.mark.parametrize("order", ["g1 g3 g2", "g1 g2 g3 g2", "g3 g1 g3 g2"])
def test_replay_of_a_stale_read_is_refused(workspace: TapeWorkspace, order: str) -> None:
    four = Four(workspace)
    *first, last = order.split()
    four.replay(" ".join(first))
    with pytest.raises(StaleMemoryError) as caught:
        four.replay(last)
    assert caught.value.rule == "stale-memory"
    assert caught.value.why
    assert caught.value.fix
    four.replay("g1 g2")


def test_stale_read_of_memory_used_by_an_earlier_graph(workspace: TapeWorkspace) -> None:
    x = numbers()

    def with_scratch() -> torch.Tensor:
        scratch = x + 1
        return scratch.sum()

    earlier, _ = record(workspace, with_scratch)
    writer, y = record(workspace, lambda: x * 2)
    reader, total = record(workspace, lambda: y.sum())
    assert workspace.pool_bytes() < 2 * BYTES, "the later survivor lies in the earlier graph's scratch memory"
    writer.replay()
    reader.replay()
    assert total.item() == (x * 2).sum().item()
    earlier.replay()
    with pytest.raises(StaleMemoryError):
        reader.replay()
    writer.replay()
    reader.replay()


def test_kept_result_is_garbage_once_an_earlier_graph_replays(workspace: TapeWorkspace) -> None:
    """No graph reads it, so nothing can be refused; on a GPU whoever kept it would find something else there."""
    x = numbers()
    earlier, _ = record(workspace, lambda: (x + 1).sum())
    writer, kept = record(workspace, lambda: x * 2)
    writer.replay()
    writer.replay()
    assert torch.equal(kept, x * 2)
    earlier.replay()
    assert kept.isnan().all()
    writer.replay()
    assert torch.equal(kept, x * 2)


class Named:
    """`maker` leaves y, which Python can reach, where `earlier` has its scratch; `rewriter` writes to y itself."""

    def __init__(self, workspace: TapeWorkspace) -> None:
        x = numbers()
        self.earlier, _ = record(workspace, lambda: (x + 1).sum())
        self.maker, self.y = record(workspace, lambda: x * 2)
        assert workspace.pool_bytes() < 2 * BYTES, "y is in the scratch memory of the earlier graph"
        self.rewriter, _ = record(workspace, self.y.copy_, x)
        workspace.note_named([self.y, x], [self.maker])


def test_replay_over_named_memory_is_refused(workspace: TapeWorkspace) -> None:
    named = Named(workspace)
    named.maker.replay()
    with pytest.raises(StaleMemoryError, match="can still reach"):
        named.earlier.replay()
    assert torch.equal(named.y, numbers() * 2), "the refused replay has written nothing"


def test_replay_over_memory_that_was_named_after_one(workspace: TapeWorkspace) -> None:
    """What a graph overwrites is looked up once, and again after a change."""
    named = Named(workspace)
    workspace.note_named([named.y], [named.earlier, named.maker])
    for graph in (named.earlier, named.maker):
        graph.replay()
    workspace.note_named([named.y], [named.maker])
    with pytest.raises(StaleMemoryError, match="can still reach"):
        named.earlier.replay()


def test_replay_poisons_what_was_recorded_after_its_last_one(workspace: TapeWorkspace) -> None:
    x = numbers()
    earlier, _ = record(workspace, lambda: (x + 1).sum())
    earlier.replay()
    writer, kept = record(workspace, lambda: x * 2)
    writer.replay()
    assert torch.equal(kept, x * 2)
    earlier.replay()
    assert kept.isnan().all()


def test_pool_lets_go_of_memory_that_a_replay_has_poisoned(workspace: TapeWorkspace) -> None:
    x = numbers()
    earlier, _ = record(workspace, lambda: (x + 1).sum())
    writer, kept = record(workspace, lambda: x * 2)
    writer.replay()
    earlier.replay()
    assert kept.isnan().all()
    memory = weakref.ref(kept.untyped_storage())
    writer.free()
    del writer, kept
    record(workspace, lambda: torch.add(x, 1).zero_() is None)
    assert memory() is None


def test_replay_over_named_memory_that_nobody_holds(workspace: TapeWorkspace) -> None:
    named = Named(workspace)
    named.maker.replay()
    del named.y
    named.earlier.replay()


def test_graphs_that_write_named_memory_itself_are_replayed(workspace: TapeWorkspace) -> None:
    named = Named(workspace)
    for graph in (named.maker, named.rewriter, named.maker):
        graph.replay()
    assert torch.equal(named.y, numbers() * 2)


def test_all_writers_of_named_memory_may_use_it_as_scratch(workspace: TapeWorkspace) -> None:
    """The segments of one chain: an earlier one has its scratch where a later one leaves a gradient."""
    named = Named(workspace)
    workspace.note_named([named.y], [named.earlier, named.maker])
    for graph in (named.earlier, named.maker, named.earlier, named.maker):
        graph.replay()
    assert torch.equal(named.y, numbers() * 2)


def test_stale_read_of_memory_that_the_reader_itself_reuses(workspace: TapeWorkspace) -> None:
    x = numbers()
    box: list[torch.Tensor] = []
    writer, _ = record(workspace, lambda: box.append(x + 1))

    def read_then_reuse() -> tuple[torch.Tensor, torch.Tensor]:
        y = box.pop()
        total = y.sum()
        del y
        return total, x * 5

    reader, _ = record(workspace, read_then_reuse)
    assert workspace.pool_bytes() < 2 * BYTES, "the result lies where y was"
    writer.replay()
    reader.replay()
    with pytest.raises(StaleMemoryError):
        reader.replay()


def test_stale_read_of_memory_that_a_graph_writes_for_another(workspace: TapeWorkspace) -> None:
    x = numbers()
    box: list[torch.Tensor] = []
    record(workspace, lambda: box.append(x + 1))
    filler, _ = record(workspace, lambda: [y.fill_(3.0) for y in box] and None)
    box.clear()
    writer, z = record(workspace, lambda: x * 2)
    assert workspace.pool_bytes() == BYTES, "z lies where the filled tensor was"
    reader, _ = record(workspace, lambda: z.sum())
    writer.replay()
    filler.replay()
    with pytest.raises(StaleMemoryError):
        reader.replay()


def test_stale_read_of_memory_that_a_freed_graph_overwrote(workspace: TapeWorkspace) -> None:
    four = Four(workspace)
    four.replay("g1 g3")
    four.g3.free()
    with pytest.raises(StaleMemoryError):
        four.g2.replay()


def test_memory_written_again_through_a_view_is_read_first(workspace: TapeWorkspace) -> None:
    x = numbers()
    g1, y = record(workspace, lambda: x + 1)
    part, _ = record(workspace, lambda tensor: tensor[:10].fill_(0.0) is None, y)
    del y
    g3, _z = record(workspace, lambda: x * 3)
    g1.replay()
    g3.replay()
    with pytest.raises(StaleMemoryError):
        part.replay()


# -- what is recorded


def replays_as_eager(
    workspace: TapeWorkspace, step: Callable[[], Any], state: list[torch.Tensor], replays: int = 3
) -> None:
    """Run a step by replay and in eager from one state and seed, and compare what it writes and returns."""
    start = [t.detach().clone() for t in state]

    def restore() -> None:
        torch.manual_seed(11)
        with torch.no_grad():
            for tensor, value in zip(state, start, strict=True):
                tensor.copy_(value)
                tensor.grad = None

    def see(result: Any) -> list[torch.Tensor]:
        found = [*torch.utils._pytree.tree_leaves(result), *state, *[t.grad for t in state if t.grad is not None]]
        return [t.detach().clone() for t in found if isinstance(t, torch.Tensor)]

    restore()
    expected = []
    for _ in range(replays):
        for tensor in state:
            tensor.grad = None
        expected.append(see(step()))
    restore()
    graph, result = record(workspace, step)
    assert all(same_bits(a.detach(), b) for a, b in zip(state, start, strict=True))
    for wanted in expected:
        graph.replay()
        found = see(result)
        assert [same_bits(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


@torch.library.custom_op("stepgraph_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """Reads its values in a library of its own, as a kernel may."""
    return torch.from_numpy(x.detach().numpy() * 2 + 1)


@torch.library.custom_op("stepgraph_tests::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


def test_custom_op_is_opaque(workspace: TapeWorkspace) -> None:
    x = torch.ones(4)
    graph, y = record(workspace, lambda: opaque(x) * 3)
    assert graph.nodes == 2
    x.fill_(2.0)
    graph.replay()
    assert y.tolist() == [15.0] * 4


@torch.library.custom_op("stepgraph_tests::product", mutates_args=())
def product(x: torch.Tensor) -> torch.Tensor:
    """A kernel that calls operators in turn, which autocast then sees."""
    return x @ x


def test_custom_op_under_autocast_computes_as_eager_does(workspace: TapeWorkspace) -> None:
    x = torch.randn(4, 4)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return product(x) * 3

    graph, y = record(workspace, step)
    assert y.dtype is torch.bfloat16
    for _ in range(2):
        graph.replay()
        assert same_bits(y, step())
    assert not torch.is_autocast_enabled("cpu")


@torch.library.custom_op("stepgraph_tests::product_of_its_own", mutates_args=())
def product_of_its_own(x: torch.Tensor) -> torch.Tensor:
    return x @ x


product_of_its_own.register_autocast("cpu", torch.float32)


def test_custom_op_with_an_autocast_rule_computes_as_eager(workspace: TapeWorkspace) -> None:
    x = torch.randn(4, 4)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return product_of_its_own(x) * 3

    graph, y = record(workspace, step)
    assert y.dtype is torch.float32
    graph.replay()
    assert same_bits(y, step())


def test_custom_op_that_mutates(workspace: TapeWorkspace) -> None:
    x = torch.ones(4)
    replays_as_eager(workspace, lambda: scale_(x, 3.0), [x])
    assert x.tolist() == [27.0] * 4


def test_autograd_function(workspace: TapeWorkspace) -> None:
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    p = torch.nn.Parameter(torch.arange(4.0))

    def step() -> torch.Tensor:
        loss = Cubed.apply(p).sum()
        loss.backward()
        with torch.no_grad():
            p.sub_(p.grad * 0.01)
        return loss.detach()

    replays_as_eager(workspace, step, [p])


def test_tensor_subclass_takes_itself_apart(workspace: TapeWorkspace) -> None:
    a, b = torch.arange(4.0), torch.ones(4)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        pair = TwoTensor(a, b) * 2 + 1
        return pair.a, pair.b

    graph, (y, z) = record(workspace, step)
    a.add_(1)
    graph.replay()
    assert y.tolist() == [3.0, 5.0, 7.0, 9.0]
    assert z.tolist() == [3.0] * 4


def test_in_place_through_views(workspace: TapeWorkspace) -> None:
    x = torch.arange(12.0).view(3, 4)

    def step() -> torch.Tensor:
        x.t()[1].add_(1)
        y = x * 2
        y[:, ::2].zero_()
        y.view(-1)[3:7].mul_(x.view(-1)[:4])
        torch.add(y[0], 1, out=y[1])
        return y

    replays_as_eager(workspace, step, [x])


def test_complex_conjugate_views(workspace: TapeWorkspace) -> None:
    x = torch.complex(torch.arange(4.0), torch.ones(4))

    def step() -> tuple[torch.Tensor, ...]:
        x.mul_(1 + 0.5j)
        y = x.conj()
        return y * x, y.imag + 1, torch.view_as_real(x) * 2, torch.vdot(x, y), y

    replays_as_eager(workspace, step, [x])


def test_inference_mode_tensors(workspace: TapeWorkspace) -> None:
    x, layer = torch.ones(2, 4), torch.nn.Linear(4, 4)

    def step() -> torch.Tensor:
        with torch.inference_mode():
            y = layer(x)
            y.add_(1)
            return y.relu()

    replays_as_eager(workspace, step, [x])
    with torch.inference_mode():
        graph, y = record(workspace, lambda: x * 2)
        x.fill_(4.0)
        graph.replay()
        assert y.tolist() == [[8.0] * 4] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_repeats_its_dropout(workspace: TapeWorkspace, reentrant: bool) -> None:
    w = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8)

    def block(h: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(h @ w), 0.5)

    def step() -> torch.Tensor:
        h = x.clone().requires_grad_()
        for _ in range(2):
            h = checkpoint(block, h, use_reentrant=reentrant)
        loss = h.square().sum()
        loss.backward()
        with torch.no_grad():
            w.sub_(w.grad * 0.001)
        return loss.detach()

    replays_as_eager(workspace, step, [w], replays=4)


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "conv and batch norm": (
        lambda: torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.MaxPool2d(2)),
        (2, 2, 6, 6),
    ),
    "lstm": (lambda: torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5), (3, 2, 4)),
    "transformer": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1), (3, 2, 8)),
    "group norm": (lambda: torch.nn.GroupNorm(2, 4), (2, 4, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_module_trains_as_eager(workspace: TapeWorkspace, name: str) -> None:
    make, shape = MODULES[name]
    model, x = make(), torch.randn(shape)

    def step() -> torch.Tensor:
        out = model(x)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad * 0.1)
        return loss.detach()

    replays_as_eager(workspace, step, [*model.parameters(), *model.buffers()])


def test_autocast_is_recorded_as_its_casts(workspace: TapeWorkspace) -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).detach()

    graph, y = record(workspace, step)
    assert y.dtype is torch.bfloat16
    graph.replay()
    with torch.autocast("cpu", torch.bfloat16):
        graph.replay()
    assert same_bits(y, step())


# -- compiled code


def test_compiled_function_runs_its_eager_operators(workspace: TapeWorkspace) -> None:
    calls = []

    def counting(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(len(args))
            return module(*args)

        return call

    x = torch.ones(4)
    function = torch.compile(lambda v: (v * 2).relu() + 1, backend=counting)
    with workspace.warming_up():
        assert function(x).tolist() == [3.0] * 4
    graph, y = record(workspace, function, x)
    assert calls == []
    assert graph.nodes == 3
    x.fill_(4.0)
    graph.replay()
    assert y.tolist() == [9.0] * 4
    assert function(x).tolist() == [9.0] * 4
    assert calls == [1], "compiled again once the tape is left"


def test_function_compiled_before_runs_its_eager_operators_too(workspace: TapeWorkspace) -> None:
    x = torch.ones(4)
    function = torch.compile(lambda v: v.sin() + v.cos(), backend="eager")
    function(x)
    graph, y = record(workspace, function, x)
    x.fill_(2.0)
    graph.replay()
    assert same_bits(y, x.sin() + x.cos())


# -- storages that change their size


@pytest.mark.parametrize(
    "resize",
    [
        lambda kept: kept.resize_(2 * SIZE),
        lambda kept: kept.resize_as_(torch.empty(2 * SIZE)),
        lambda kept: torch.add(torch.ones(2 * SIZE), 1, out=kept),
        lambda kept: kept.untyped_storage().resize_(2 * BYTES),
    ],
    ids=["resize_", "resize_as_", "out", "storage"],
)
def test_resized_storage_is_refused_and_has_its_size_and_bytes(
    workspace: TapeWorkspace, resize: Callable[[torch.Tensor], Any]
) -> None:
    kept = numbers()
    storage = kept.untyped_storage()

    def step() -> None:
        kept.add_(1)
        resize(kept)

    with pytest.raises(CaptureRefused) as caught:
        record(workspace, step)
    assert caught.value.row.id == "storage-resize"
    assert storage.nbytes() == BYTES
    assert same_bits(torch.empty(0).set_(storage, 0, (SIZE,)), numbers())


SHRINKING = """
import torch
from stepgraph.engine.backends.tape.mode import TapeBackend
from tests.cpu.engine.backends.tape.recording import record

kept = torch.arange(1024.0)
unseen = torch.UntypedStorage.__base__.resize_  # as C++ code resizes it: the patch is on UntypedStorage

def step(resize):
    kept.add_(1)
    resize(kept.untyped_storage(), 0)
    raise ValueError

for resize in (unseen, torch.UntypedStorage.resize_, lambda storage, size: storage.resize_(size)):
    try:
        record(TapeBackend().workspace(), step, resize)
    except (ValueError, RuntimeError):
        print(torch.equal(kept, torch.arange(1024.0)))
"""


def test_storage_that_a_recording_frees_is_rolled_back_whole() -> None:
    """In a process of its own: what goes wrong here ends it."""
    [done] = run_to_end([[sys.executable, "-c", SHRINKING]], os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 3
