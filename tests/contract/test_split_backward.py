"""A split backward gives the gradients of an unsplit one and of torch's pipelines, and computes nothing twice."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.engine.backends import Graph, backend_for
from stepgraph.engine.record.pair.split_backward import input_gradients
from tests.harness import same_bits

WIDTH = 6


class Scale(torch.autograd.Function):
    """A function that computes both of its gradients whenever it is run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(self.linear(x), self.weight)


class Tied(nn.Module):
    """One matrix read by three products, transposed each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(self.linear(x).relu()).relu())


class TiedDirectly(nn.Module):
    """Weights that several nodes of the path lead to without anything between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(self.norm(x @ self.weight) @ self.weight) @ self.weight)


class Mixed(nn.Module):
    """A weight that is read on the path, and beside it through another node."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.weight + self.weight.exp() * x)


class Normed(nn.Module):
    """Weights that are computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(F.gelu(self.linear(x)))


class Chunked(nn.Module):
    """Nodes with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.scales = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        first, second = self.scales.unbind(0)
        return gate.sigmoid() * first * value + second


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, WIDTH)),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
    "scaled": Scaled,
    "tied": Tied,
    "normed": Normed,
    "chunked": Chunked,
    "tied directly": TiedDirectly,
    "mixed": Mixed,
}
TORCHS = ("layers", "attention", "scaled", "tied", "normed", "chunked")
"""Those that torch's pipelines split right, too."""


class Counting(TorchDispatchMode):
    """Counts the operators that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def products(self) -> dict[str, int]:
        """Those that cost something."""
        free = ("view", "t", "transpose", "detach", "_unsafe_view", "expand", "permute", "slice", "split", "alias")
        return {name: count for name, count in self.seen.items() if name not in free}


def build(name: str, device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    model = MODELS[name]().to(device)
    x = torch.randn(2, 4, WIDTH, device=device, requires_grad=True)
    y = model(x) * 2  # not a view: torch detaches it in place
    return model, x, y, torch.randn_like(y)


def assert_same(left: Sequence[Any], right: Sequence[Any]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or same_bits(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_split_backward_equals_the_unsplit_one(name: str, device: torch.device) -> None:
    model, x, y, dy = build(name, device)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True)
    grads, weights = input_gradients([y], [dy], [x], parameters)
    assert_same([*grads, *weights.gradients()], expected)


def torchs_split(name: str, device: torch.device) -> list[torch.Tensor | None] | None:
    """What torch's pipelines compute, or None where they cannot."""
    model, x, y, dy = build(name, device)
    grads, groups = stage_backward_input([y], [dy], [x], model.parameters())
    assert all(p.grad is None for p in model.parameters())
    try:
        stage_backward_weight(model.parameters(), groups)
    except RuntimeError:
        return None
    return [*grads, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", TORCHS)
def test_split_backward_equals_that_of_torchs_pipelines(name: str, device: torch.device) -> None:
    """Where that is right: torch 2.11 counts weights that are used twice several times, and fails for functions."""
    model, x, y, dy = build(name, device)
    parameters = list(model.parameters())
    unsplit = torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True)
    grads, weights = input_gradients([y], [dy], [x], parameters)
    torchs = torchs_split(name, device)
    is_right = torchs is not None and all(torch.allclose(a, b) for a, b in zip(torchs, unsplit, strict=True))
    assert is_right or name in ("scaled", "tied", "chunked")
    assert_same([*grads, *weights.gradients()], torchs if is_right else unsplit)


@pytest.mark.parametrize("name", MODELS)
def test_split_backward_computes_nothing_twice(name: str, device: torch.device) -> None:
    model, x, y, dy = build(name, device)
    parameters = list(model.parameters())
    with Counting() as whole:
        torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True)
    with Counting() as first:
        _, weights = input_gradients([y], [dy], [x], parameters)
    with Counting() as second:
        weights.gradients()
    products = Counter({n: c for n, c in whole.products().items() if "mm" in n or n in ("mul", "add", "gelu_backward")})
    split = Counter(first.products()) + Counter(second.products())
    assert products
    assert {n: split[n] for n in products} == dict(products)


@pytest.mark.parametrize("name", ["layers", "tied", "normed", "attention"])
def test_split_backward_defers_the_weights_products(name: str, device: torch.device) -> None:
    model, x, y, dy = build(name, device)
    with Counting() as alone:
        torch.autograd.grad(y, [x], dy, retain_graph=True)
    with Counting() as first:
        input_gradients([y], [dy], [x], list(model.parameters()))
    assert first.products() == alone.products()


def test_split_backward_without_inputs_runs_in_the_second_part(device: torch.device) -> None:
    model = MODELS["layers"]().to(device)
    x = torch.randn(4, WIDTH, device=device)
    y = model(x)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, list(model.parameters()), dy, retain_graph=True)
    with Counting() as first:
        grads, weights = input_gradients([y], [dy], [x], list(model.parameters()))
    assert grads == [None]
    assert not first.products()
    assert_same(weights.gradients(), expected)


def test_split_backward_from_a_loss_and_several_results(device: torch.device) -> None:
    model = MODELS["layers"]().to(device)
    bias = nn.Parameter(torch.randn(WIDTH, device=device))
    unused = nn.Parameter(torch.randn(1, device=device))
    frozen = nn.Parameter(torch.randn(1, device=device), requires_grad=False)
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    other = torch.randn(4, WIDTH, device=device)
    loss, extra, plain = model(x).pow(2).mean(), bias.exp(), other * 2
    parameters = [*model.parameters(), bias, unused, frozen]
    de = torch.randn_like(extra)
    expected = torch.autograd.grad(
        [loss, extra], [x, *parameters[:-1]], [torch.ones_like(loss), de], retain_graph=True, allow_unused=True
    )
    grads, weights = input_gradients([loss, extra, plain], [None, de, other], [x, other], parameters)
    assert_same([grads[0], *weights.gradients()], [*expected, None])
    assert grads[1] is None


def test_split_backward_of_a_weight_that_is_an_input(device: torch.device) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, device=device))
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    y = (x * weight).exp()
    expected = torch.autograd.grad(y.sum(), [x, weight], retain_graph=True)
    grads, weights = input_gradients([y.sum()], [None], [x, weight], [weight])
    assert_same([*grads, *weights.gradients()], [*expected, expected[1]])


def test_split_backward_lets_go_of_what_autograd_saved(device: torch.device) -> None:
    model, x, y, dy = build("layers", device)
    _, weights = input_gradients([y], [dy], [x], list(model.parameters()))
    first = weights.gradients()
    assert all(grad is not None for grad in first)
    assert weights.gradients() == []
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, list(model.parameters()), dy)


def test_split_backward_retains_the_graph_when_asked(device: torch.device) -> None:
    model, x, y, dy = build("layers", device)
    parameters = list(model.parameters())
    first = input_gradients([y], [dy], [x], parameters)[1].gradients(retain_graph=True)
    assert_same(first, input_gradients([y], [dy], [x], parameters)[1].gradients())


def recorded(graph: Graph, run: Callable[[], Any]) -> Any:
    graph.begin()
    try:
        made = run()
        graph.end()
    except BaseException:
        graph.abort()
        raise
    return made


def test_split_backward_can_be_recorded_as_two_graphs(device: torch.device) -> None:
    work = backend_for(device).workspace()
    with work.warming_up():  # the nodes belong to the stream they were made on
        model, x, y, dy = build("layers", device)
        parameters = list(model.parameters())
        torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True)
    first, second = work.graph(), work.graph()
    with work.capturing():
        grads, weights = recorded(first, lambda: input_gradients([y], [dy], [x], parameters))
        found = recorded(second, lambda: weights.gradients(retain_graph=True))
    for seed in range(3):
        torch.manual_seed(seed)
        dy.copy_(torch.randn_like(dy))
        expected = torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True)
        first.replay()
        second.replay()
        assert_same([*grads, *found], expected)
