"""The tape refuses what CUDA refuses, at the user's line, and lets pass what CUDA records."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stepgraph.core.errors import CaptureRefused
from stepgraph.engine.backends.tape.mode import TapeBackend
from tests.cpu.engine.backends.tape.recording import record, refused, same_bits
from tests.harness import operators_of

VALUES = [torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0]), torch.tensor([2.0, 7.0, 1.0, 8.0, 2.0, 8.0])]
MASK = torch.tensor([True, False, True, False, True, False])
COUNTS = torch.tensor([1, 0, 2, 1, 1, 1])
INDEX = torch.tensor(2)
MATRIX = torch.eye(3) + 0.1
STRAY = torch.Generator()


def assign(x: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    y = x.clone()
    y[key] = value
    return y


HOST_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 1),
    "if": lambda x: x if x.sum() > 1 else -x,
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "index": lambda x: range(INDEX),
    "in": lambda x: 3.0 in x,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "np.asarray": lambda x: np.asarray(x),
    "print": lambda x: print(x),
    "repr": lambda x: repr(x),
    "format": lambda x: f"{x.sum():.2f}",
    "nonzero": lambda x: x.nonzero(),
    "argwhere": lambda x: torch.argwhere(x),
    "where(cond)": lambda x: torch.where(x > 2),
    "mask index": lambda x: x[MASK],
    "masked_select": lambda x: torch.masked_select(x, MASK),
    "unique": lambda x: torch.unique(x),
    "unique with counts": lambda x: torch.unique(x, return_counts=True),
    "unique along a dim": lambda x: torch.unique(MATRIX, dim=0),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "mask = tensor": lambda x: assign(x, MASK, x[:3]),
    "0-dim index": lambda x: x[INDEX],
    "slice to a tensor": lambda x: x[:INDEX],
    "0-dim index = number": lambda x: assign(x, INDEX, 1.0),
    "allclose": lambda x: torch.allclose(x, x),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, COUNTS),
    "bincount": lambda x: torch.bincount(COUNTS),
    "histc without range": lambda x: torch.histc(x),
    "one_hot": lambda x: F.one_hot(COUNTS),
    "inv": lambda x: torch.linalg.inv(MATRIX),
    "solve": lambda x: torch.linalg.solve(MATRIX, MATRIX),
    "cholesky": lambda x: torch.linalg.cholesky(MATRIX),
}
HOST_DATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: torch.tensor([1.0, 2.0]),
    "tensor of a number": lambda x: torch.tensor(1.0),
    "Tensor": lambda x: torch.Tensor([1.0, 2.0]),
    "as_tensor of a list": lambda x: torch.as_tensor([1.0]),
    "as_tensor of an array": lambda x: torch.as_tensor(np.ones(3)),
    "asarray": lambda x: torch.asarray([1.0]),
    "from_numpy": lambda x: torch.from_numpy(np.ones(3)),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "list index": lambda x: x[[0, 1]],
    "array index": lambda x: x[np.array([0, 1])],
}
KNOWN = torch.default_generator


def rewound(x: torch.Tensor) -> torch.Tensor:
    state = KNOWN.get_state()
    drawn = torch.rand(3)
    KNOWN.set_state(state)
    return drawn - torch.rand(3)


OTHERS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "stray generator": ("generator", lambda x: torch.rand(3, generator=STRAY)),
    "stray generator, in place": ("generator", lambda x: x.clone().normal_(generator=STRAY)),
    "manual_seed": ("reseed", lambda x: torch.manual_seed(1)),
    "random.manual_seed": ("reseed", lambda x: torch.random.manual_seed(1)),
    "set_rng_state of another seed": ("reseed", lambda x: torch.set_rng_state(STRAY.get_state())),
    "get_state and set_state": ("reseed", rewound),
    "seeded again": ("reseed", lambda x: (torch.rand(3), KNOWN.manual_seed(KNOWN.initial_seed()), torch.rand(3))),
    "nested made": (
        "tape-limit",
        lambda x: torch._nested_tensor_from_mask(x.view(1, 6, 1), COUNTS[None] >= 0),
    ),
    "swap with a stray generator": ("generator", lambda x: TapeBackend().swap_random_state(STRAY)),
    "svd": ("library-call", lambda x: torch.linalg.svd(MATRIX)),
    "eigh": ("library-call", lambda x: torch.linalg.eigh(MATRIX)),
    "sparse made": ("tape-limit", lambda x: MATRIX.to_sparse()),
    "sparse used": ("tape-limit", lambda x: torch.sparse.mm(SPARSE, MATRIX)),
    "cond": ("tape-limit", lambda x: torch.cond(x.sum() > 1, lambda v: v + 1, lambda v: v - 1, (x,))),
}
SPARSE = MATRIX.to_sparse()


BY_VERSION: dict[str, tuple[str, dict[str, Callable[[torch.Tensor], Any]], Callable[[torch.Tensor], Any]]] = {
    "combinations": ("aten::masked_select", HOST_READS, lambda x: torch.combinations(x)),
    "combinations of three": ("aten::masked_select", HOST_READS, lambda x: torch.combinations(x, 3, True)),
    "element = number": ("aten::lift_fresh", HOST_DATA, lambda x: assign(x, 0, 1.0)),
    "element of a row = number": ("aten::lift_fresh", HOST_DATA, lambda x: assign(x.view(2, 3), (1, -1), 2)),
}
"""What needs the host by one operator in some versions of torch, and stays on the device without it in others."""
WITHOUT_HOST: dict[str, Callable[[torch.Tensor], Any]] = {}
for _name, (_operator, _refused, _function) in BY_VERSION.items():
    (_refused if _operator in operators_of(_function, VALUES[0]) else WITHOUT_HOST)[_name] = _function


def is_at(error: CaptureRefused, function: Callable[..., Any]) -> bool:
    """Whether the refusal names a line of that function's own source."""
    lines = {line for _, _, line in function.__code__.co_lines()}
    lines |= {line for _, _, line in assign.__code__.co_lines()}
    return error.where is not None and error.where.file == __file__ and error.where.line in lines


@pytest.mark.parametrize("name", HOST_READS)
def test_host_read_is_refused_with_code_900_at_its_line(name: str) -> None:
    error = refused(HOST_READS[name], VALUES[0])
    assert (error.row.id, error.row.code) == ("host-read", 900)
    assert is_at(error, HOST_READS[name])
    assert error.operation


@pytest.mark.parametrize("name", HOST_DATA)
def test_host_data_is_refused_as_an_unpinned_copy_at_its_line(name: str) -> None:
    error = refused(HOST_DATA[name], VALUES[0])
    assert error.row.id == "host-data"
    assert is_at(error, HOST_DATA[name])


def test_seeding_a_generator_itself_is_refused_at_the_end() -> None:
    error = refused(lambda x: torch.default_generator.manual_seed(1), VALUES[0])
    assert error.row.id == "reseed"
    assert error.where is None  # a method of a C object: only its effect is seen


def test_seeding_a_generator_is_refused_at_the_next_operator() -> None:
    def seeds(x: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(1)
        return x + 1

    error = refused(seeds, VALUES[0])
    assert error.row.id == "reseed"
    assert is_at(error, seeds)


def test_draw_of_another_thread_is_refused_by_its_cause() -> None:
    def beside(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()
        return x + 1

    error = refused(beside, VALUES[0])
    assert error.row.id == "reseed"
    assert "another thread" in error.operation
    assert "torch.Generator of its own" in error.row.fix


def test_state_that_is_set_to_what_it_is_is_no_refusal() -> None:
    before = KNOWN.get_state()
    expected = [torch.rand(3) for _ in range(2)]
    KNOWN.set_state(before)
    graph, drawn = record(TapeBackend().workspace(), lambda: (KNOWN.set_state(KNOWN.get_state()), torch.rand(3))[1])
    for wanted in expected:
        graph.replay()
        assert same_bits(drawn, wanted)


@pytest.mark.parametrize("name", OTHERS)
def test_other_work_is_refused_by_its_rule_at_its_line(name: str) -> None:
    rule, function = OTHERS[name]
    error = refused(function, VALUES[0])
    assert error.row.id == rule
    assert is_at(error, function)


@pytest.mark.parametrize("name", ["item", "numpy", "mask index", "mask = tensor", "inv", "tensor", "cpu"])
def test_refusal_leaves_the_program_as_it_was(name: str) -> None:
    x, state = VALUES[0].clone(), torch.get_rng_state()

    def step(value: torch.Tensor) -> Any:
        value.mul_(torch.rand(6))
        return {**HOST_READS, **HOST_DATA}[name](value)

    refused(step, x)
    assert same_bits(x, VALUES[0])
    assert same_bits(torch.get_rng_state(), state)


def test_refusal_under_a_module_names_the_module_line() -> None:
    class Reading(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.mean().item()

    error = refused(torch.nn.Sequential(torch.nn.Linear(6, 6), Reading()), VALUES[0])
    assert error.where is not None
    assert (error.where.file, error.where.function) == (__file__, "forward")
    assert "x.mean().item()" in str(error.where)


def test_refusal_in_backward_names_the_functions_line() -> None:
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * grad.max().item()

    x = VALUES[0].clone().requires_grad_()
    error = refused(lambda: Reading.apply(x).sum().backward())
    assert error.where is not None
    assert error.where.function == "backward"
    assert x.grad is None


def test_refusal_that_the_step_catches_still_breaks_the_capture() -> None:
    workspace = TapeBackend().workspace()
    graph = workspace.graph()

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            scale = x.sum().item()
        except RuntimeError:
            scale = 1.0
        return x * scale

    with workspace.capturing():
        graph.begin()
        step(VALUES[0])
        with pytest.raises(CaptureRefused) as caught:
            graph.end()
        graph.abort()
    assert caught.value.row.code == 900
    mended, y = record(workspace, lambda: VALUES[0] * 2)
    mended.replay()
    assert same_bits(y, VALUES[0] * 2)


def test_refusals_end_with_the_capture() -> None:
    refused(lambda: VALUES[0].sum().item())
    assert VALUES[0].sum().item() == 23.0
    assert torch.tensor([1.0]).tolist() == [1.0]
    assert f"{VALUES[0].sum():.0f}" == "23"


def test_host_reads_are_free_between_graphs() -> None:
    workspace = TapeBackend().workspace()
    with workspace.capturing():
        assert VALUES[0].tolist()[0] == 3.0
        assert torch.tensor([1.0]).sum().item() == 1.0


ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    **WITHOUT_HOST,
    "mask = number": lambda x: assign(x, MASK, 0.0),
    "computed mask = number": lambda x: assign(x, x > 2, 0.0),
    "slice = number": lambda x: assign(x, slice(1, 3), 2.0),
    "slice = tensor": lambda x: assign(x, slice(1, 3), x[3:5]),
    "element = tensor": lambda x: assign(x, 0, x[1]),
    "index tensor = number": lambda x: assign(x, COUNTS, 1.0),
    "all = number": lambda x: assign(x, ..., 3.0),
    "element.fill_": lambda x: x.clone()[0].fill_(1.0),
    "repeat_interleave with output_size": lambda x: torch.repeat_interleave(x, COUNTS, output_size=6),
    "repeat_interleave of a number": lambda x: torch.repeat_interleave(x, 2),
    "one_hot(n)": lambda x: F.one_hot(x.long(), 10),
    "histc with range": lambda x: torch.histc(x, 4, 0.0, 10.0),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "randperm": lambda x: torch.randperm(8),
    "rand": lambda x: x * torch.rand(6),
    "randint": lambda x: torch.randint(0, 9, (5,)),
    "bernoulli": lambda x: torch.bernoulli(x / 10),
    "normal_": lambda x: torch.empty(3).normal_(1.0, 2.0),
    "dropout": lambda x: F.dropout(x, 0.5),
    "sort": lambda x: torch.sort(x),
    "argsort": lambda x: torch.argsort(x, stable=True),
    "topk": lambda x: torch.topk(x, 3),
    "gather": lambda x: torch.gather(x, 0, COUNTS),
    "scatter_add": lambda x: torch.zeros(3).scatter_add(0, COUNTS, x),
    "index tensor": lambda x: x[COUNTS],
    "index_add": lambda x: torch.zeros(3).index_add(0, COUNTS, x),
    "embedding": lambda x: F.embedding(COUNTS, x[:3, None]),
    "as_tensor(tensor)": lambda x: torch.as_tensor(x) * 2,
    "full": lambda x: torch.full((3,), 2.5),
    "arange": lambda x: torch.arange(6) * x,
    "scalar arithmetic": lambda x: (x * 2.5 + 1) / 3 - 2**x,
    "where(three)": lambda x: torch.where(x > 2, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(MASK, -1.0),
    "cumsum": lambda x: x.cumsum(0),
    "clamp": lambda x: x.clamp(2.0, 5.0),
    "max": lambda x: x.view(2, 3).max(dim=1),
    "to dtype": lambda x: x.to(torch.bfloat16),
    "qr": lambda x: torch.linalg.qr(torch.outer(x, x)),
    "inv_ex": lambda x: torch.linalg.inv_ex(MATRIX * x[:1]),
    "einsum": lambda x: torch.einsum("i,j->ij", x, x),
    "cat and split": lambda x: torch.cat([x, x]).split(4),
    "constant reshape": lambda x: x.view(2, 3).t().contiguous().flatten(),
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1.0),
    "rrelu": lambda x: F.rrelu(x - 4, training=True),
    "sdpa with dropout": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 2)] * 3, dropout_p=0.5),
    "out=": lambda x: torch.add(x, 1, out=torch.empty(6)),
    "result without tensors": lambda x: (x.shape, x.dtype, x.numel(), x.is_contiguous()),
    "deepcopy": lambda x: __import__("copy").deepcopy(x) + 1,
}


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_records_replays_right(name: str) -> None:
    function, x = ALLOWED[name], VALUES[0].clone()
    torch.manual_seed(3)
    graph, result = record(TapeBackend().workspace(), function, x)
    assert same_bits(x, VALUES[0]), "capture has no effect"
    found = []
    for value in VALUES:
        x.copy_(value)
        graph.replay()
        found.append([t.clone() for t in tensors_of(result)])
    torch.manual_seed(3)
    expected = [tensors_of(function(value.clone())) for value in VALUES]
    assert [[same_bits(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(found, expected, strict=True)] == [
        [True] * len(expected[0])
    ] * 2


def test_torch_tensor_of_a_tensor_is_a_copy_on_the_device() -> None:
    x = VALUES[0].clone()
    with pytest.warns(UserWarning, match="copy construct"):
        expected = torch.tensor(x)
    graph, y = record(TapeBackend().workspace(), lambda: torch.tensor(x))
    x.copy_(VALUES[1])
    graph.replay()
    assert same_bits(expected, VALUES[0])
    assert same_bits(y, VALUES[1])


def test_registered_generator_advances_as_in_eager() -> None:
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    graph, y = record(TapeBackend().workspace(), lambda: torch.rand(3, generator=generator), generators=[generator])
    assert same_bits(generator.get_state(), state)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(y.clone())
    eager = torch.Generator().manual_seed(3)
    assert all(same_bits(drawn, torch.rand(3, generator=eager)) for drawn in found)
    assert same_bits(generator.get_state(), eager.get_state())
