"""Tensors that are no single block of strided memory, wherever they stand: right as in eager, or refused by a rule."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import stepgraph

RULES = ("tensor-class", "tape-limit", "host-read", "host-value", "sparse-grad")
"""What a step with such a tensor may be refused by. On a GPU some are recorded."""
Make = Callable[[torch.device], torch.Tensor]
Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def compressed(layout: torch.layout) -> Make:
    size = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return lambda device: torch.eye(8, device=device).to_sparse(layout=layout, **size)  # type: ignore[arg-type]


def nested(layout: torch.layout) -> Make:
    return lambda device: torch.nested.nested_tensor(
        [torch.ones(3, 4, device=device), torch.ones(5, 4, device=device)], layout=layout
    )


def quantized(device: torch.device) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.eye(8, device=device), 0.1, 0, torch.qint8)


KINDS: dict[str, tuple[Make, Use]] = {
    "coo": (compressed(torch.sparse_coo), torch.sparse.mm),
    "csr": (compressed(torch.sparse_csr), torch.sparse.mm),
    "csc": (compressed(torch.sparse_csc), lambda t, h: t.to_dense() @ h),
    "bsr": (compressed(torch.sparse_bsr), lambda t, h: t.to_dense() @ h),
    "nested": (nested(torch.strided), lambda t, h: h * torch.nested.to_padded_tensor(t, 0.0).mean()),
    "jagged": (nested(torch.jagged), lambda t, h: h + t.values()),  # type: ignore[no-untyped-call]
    "quantized": (quantized, lambda t, h: t.dequantize() @ h),
}
GLOBAL: dict[str, torch.Tensor] = {}


class Part(nn.Module):
    """A layer that takes a tensor of this kind as an argument, from itself or a global, makes it, or returns it."""

    def __init__(self, kind: str, place: str, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        (self.make, self.use), self.place, self.device = KINDS[kind], place, device
        self.layer = nn.Linear(4, 4).to(device)
        if place == "buffer":
            self.register_buffer("held", self.make(device))
        elif place == "parameter":
            self.held = nn.Parameter(self.make(device), requires_grad=False)
        elif place in ("attribute", "result"):
            self.__dict__["held"] = self.make(device)
        elif place == "global":
            GLOBAL["held"] = self.make(device)
        self.given = (self.make(device),) if place == "argument" else ()

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> Any:
        h = self.layer(x)
        if self.place == "result":
            return h, self.held
        found = given if given is not None else GLOBAL["held"] if self.place == "global" else None
        if found is None:
            found = self.make(self.device) if self.place == "inside" else self.held
        return self.use(found, h)


PLACES = ("argument", "buffer", "parameter", "attribute", "global", "inside", "result")


class Training:
    """Trains the part, alone or in a captured step; its losses are compared with those of eager."""

    def __init__(self, kind: str, place: str, device: torch.device) -> None:
        self.model = nn.Sequential(Part(kind, place, device))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, 0.01)
        self.device = device

    @property
    def part(self) -> Part:
        part = self.model[0]
        assert isinstance(part, Part)
        return part

    def step(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        made = self.part(x, *given)
        loss: torch.Tensor = (made[0] if isinstance(made, tuple) else made).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def losses(self, step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        batches = (torch.full((8, 4), 0.5 + index, device=self.device) for index in range(6))
        return [step(x, *self.part.given).clone() for x in batches]


@contextlib.contextmanager
def right_or_refused() -> Iterator[None]:
    try:
        yield
    except stepgraph.StepgraphError as error:
        if error.rule not in RULES or not error.why or not error.fix:
            raise


def equals_eager(training: Training, step: Callable[..., torch.Tensor], kind: str, place: str) -> bool:
    other = Training(kind, place, training.device)
    return all(map(torch.equal, training.losses(step), other.losses(other.step)))


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """torch warns of each kind when the first is made; a fallback to eager is a warning of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_capture_is_right_or_refuses_by_rule(kind: str, place: str, device: torch.device) -> None:
    training = Training(kind, place, device)
    with right_or_refused():
        assert equals_eager(training, stepgraph.capture(training.step), kind, place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["coo", "csr", "nested", "quantized"])
def test_capture_goes_on_in_eager_and_counts(kind: str, place: str, device: torch.device) -> None:
    training = Training(kind, place, device)
    step = stepgraph.capture(training.step, on_error="eager")
    assert equals_eager(training, step, kind, place)
    report = step.report()
    assert report.replays or any(rule in reason for rule in RULES for reason in report.eager_reasons)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_graph_modules_equals_eager_or_counts(kind: str, place: str, device: torch.device) -> None:
    training = Training(kind, place, device)
    with stepgraph.graph_modules(training.model, scope=["0"]) as handle:
        assert equals_eager(training, training.step, kind, place)
        (row,) = handle.report().rows
    assert row.forwards or any(rule in reason for rule in RULES for reason in row.eager_reasons)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["coo", "nested", "quantized"])
def test_callables_are_right_or_refuse_by_rule(kind: str, place: str, device: torch.device) -> None:
    training = Training(kind, place, device)
    sample = (torch.ones(8, 4, device=device), *training.part.given)
    with right_or_refused():
        stepgraph.make_graphed_callables(training.part, sample)
        assert equals_eager(training, training.step, kind, place)


@pytest.mark.parametrize("kind", ["coo", "nested"])
def test_callable_refuses_a_special_tensor_for_a_plain_one(kind: str, device: torch.device) -> None:
    graphed = stepgraph.make_graphed_callables(lambda x: x * 2, (torch.ones(8, 8, device=device),))
    with pytest.raises(stepgraph.SignatureMismatch):
        graphed(KINDS[kind][0](device))


def test_capture_tells_a_sparse_argument_from_an_expanded_one(device: torch.device) -> None:
    """torch answers that the strides of a COO tensor are zeros, as are those of a number that was expanded."""
    step = stepgraph.capture(lambda x: x.to_dense() * 2 if x.is_sparse else x * 2)
    for _ in range(5):
        step(torch.ones((), device=device).expand(8, 8))
    with pytest.raises(stepgraph.InvalidArgument) as caught:
        step(torch.eye(8, device=device).to_sparse())
    assert caught.value.rule == "tensor-class"


def test_capture_notices_other_memory_of_a_sparse_tensor(device: torch.device) -> None:
    """Nothing but the shape of a tensor in reach is used, so that it is captured on the tape, too."""
    held = {"rows": torch.eye(8, device=device).to_sparse()}
    step = stepgraph.capture(lambda x: x * held["rows"].shape[0])
    for _ in range(5):
        step(torch.ones(3, device=device))
    assert step.report().replays
    held["rows"].sparse_resize_and_clear_((9, 9), 2, 0)
    assert torch.equal(step(torch.ones(3, device=device)), torch.full((3,), 9.0, device=device))


@pytest.mark.parametrize("place", ["argument", "attribute", "result"])
@pytest.mark.parametrize("kind", KINDS)
def test_verify_judges_or_refuses_by_rule(kind: str, place: str, device: torch.device) -> None:
    training = Training(kind, place, device)
    batch = (torch.ones(8, 4, device=device), *training.part.given)
    with right_or_refused():
        report = stepgraph.verify(training.step, [batch], steps=4)
        assert report.equal or "tape-limit" in str(report)
    other = Training(kind, place, device)
    assert all(map(torch.equal, training.model.parameters(), other.model.parameters())) or place == "parameter"


@pytest.mark.parametrize("kind", ["coo", "nested", "quantized"])
def test_frozen_reports_or_refuses_by_rule(kind: str, device: torch.device) -> None:
    training = Training(kind, "attribute", device)
    with right_or_refused():
        assert str(stepgraph.frozen(training.step, torch.ones(8, 4, device=device)))


# -- parameters that have no shape yet


@pytest.mark.parametrize("engine", ["capture", "modules"])
def test_lazy_modules_equal_eager_from_their_first_call_on(engine: str, device: torch.device) -> None:
    def training() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
        model = nn.Sequential(nn.LazyLinear(4, device=device), nn.Tanh(), nn.LazyLinear(2, device=device))

        def step(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return torch.stack([loss.detach(), *(p.grad.sum() for p in model.parameters() if p.grad is not None)])

        return model, step

    _, eager = training()
    model, step = training()
    graphed = stepgraph.capture(step) if engine == "capture" else step
    if engine == "modules":
        stepgraph.graph_modules(model, scope=["0", "2"])
    for index in range(7):
        x = torch.full((3, 5), 0.1 + index, device=device)
        torch.manual_seed(0)  # with which the first call makes the parameters
        expected = eager(x)
        torch.manual_seed(0)
        assert torch.equal(graphed(x), expected)


# -- control flow that torch compiles


def double_or_triple(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x * 2,))
    return found


@pytest.mark.parametrize("on_error", ["raise", "eager"])
def test_cond_with_a_backward_is_eager_or_refused(on_error: Any, device: torch.device) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = double_or_triple(x)
        y.sum().backward()  # type: ignore[no-untyped-call]
        return y.detach()

    x = torch.ones(3, device=device, requires_grad=True)
    step = stepgraph.capture(call, on_error=on_error)
    with right_or_refused():
        for _ in range(5):
            x.grad = None
            assert torch.equal(step(x), torch.full_like(x, 4.0))
            assert x.grad is not None
            assert torch.equal(x.grad, torch.full_like(x, 4.0))


def test_verify_of_cond_judges_or_refuses(device: torch.device) -> None:
    with right_or_refused():
        assert str(stepgraph.verify(double_or_triple, [(torch.ones(3, device=device),)], steps=3))


def test_lazy_modules_are_refused_where_they_must_be_called(device: torch.device) -> None:
    x = torch.ones(3, 5, device=device)
    model = nn.LazyLinear(4, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    unlike: Callable[[torch.Tensor], torch.Tensor] = stepgraph.capture(lambda x: x * len(list(model.parameters())))
    for call in (
        lambda: stepgraph.make_graphed_callables(model, (x,)),
        lambda: stepgraph.verify(step, [(x,)], steps=2),
        lambda: stepgraph.frozen(step, x),
        lambda: [unlike(x) for _ in range(5)],
    ):
        with pytest.raises(stepgraph.StepgraphError) as caught:
            call()
        assert caught.value.rule == "lazy-module"
        assert isinstance(model.weight, nn.UninitializedParameter)


def test_tensor_of_a_transform_in_reach_is_right_or_refused(device: torch.device) -> None:
    """What `torch.vmap` hands to a function is kept beyond the transform, where the step can reach it."""
    held: dict[str, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        held["last"] = x
        return x * 2

    torch.vmap(keep)(torch.ones(4, 3, device=device))
    step = stepgraph.capture(lambda x: x * len(held) + torch.vmap(lambda row: row * 2)(x))
    with right_or_refused():
        for _ in range(5):
            assert torch.equal(step(torch.ones(4, 3, device=device)), torch.full((4, 3), 3.0, device=device))
        assert step.report().replays


class Scaled(torch.Tensor):
    """A wrapper around a tensor, with a number that each operation multiplies by."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor, scale: int) -> None:
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["inner"], self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of = next(arg for arg in args if isinstance(arg, cls))
        moves = func.overloadpacket in (torch.ops.aten.empty_like, torch.ops.aten.copy_, torch.ops.aten.detach)
        given = [(arg.inner, arg.scale) if type(arg) is cls else (arg, 1) for arg in args]
        plain = [arg if moves or scale == 1 else arg * scale for arg, scale in given]
        if func is torch.ops.aten.copy_.default:
            args[0].inner.copy_(plain[1])
            return args[0]
        made = func(*plain, **(kwargs or {}))
        return cls(made, of.scale) if moves else made


def test_wrapper_subclass_is_one_kind_of_call(device: torch.device) -> None:
    """Its inner tensors are new at each call, and stand for the same arguments."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum()

    with warnings.catch_warnings(), stepgraph.capture(step) as captured:
        warnings.simplefilter("error")
        for number in range(10):
            x = TwoTensor(*(torch.full((2, 4), value, device=device) for value in (number + 1.0, -3.0 * number)))
            expected, received = step(x), captured(x)
            assert (received.a.item(), received.b.item()) == (expected.a.item(), expected.b.item())
        assert (captured.report().captures, captured.report().replays) == (1, 7)


def test_wrapper_with_another_context_is_another_kind_of_call(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).sum()

    with stepgraph.capture(step) as captured:
        for number in range(30):
            x = Scaled(torch.full((2, 4), float(number), device=device), 2 if number < 20 or number % 2 else 5)
            assert captured(x).item() == step(x).item(), number
        assert captured.report().captures == 2
