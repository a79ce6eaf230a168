"""What graphed modules hand out: any structure, safe to keep, and not copied where nobody keeps it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.core.tree import flatten
from tests.module_harness import (
    Layer,
    Net,
    Note,
    Training,
    assert_graphed_equals_eager,
    quiet,
    same_bits,
    training_of,
)


@dataclass
class Routed:
    hidden: torch.Tensor
    logits: torch.Tensor | None
    num_experts: int
    extra: dict[str, Any]


class Both(NamedTuple):
    first: torch.Tensor
    second: Any


class Returns(nn.Module):
    """A layer whose result has the structure that a test asks for."""

    def __init__(self, build: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self._build = nn.Linear(8, 8), build

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x).tanh()
        return self._build(x, hidden)


STRUCTURES = {
    "tuple": lambda x, h: (h, h.argmax(-1), None, 3),
    "list": lambda x, h: [h, [h.sum(0), "text"]],
    "dict": lambda x, h: {"b": h, "a": {"c": h * 2, "none": None}},
    "ordered": lambda x, h: OrderedDict(out=h, number=1.5),
    "dataclass": lambda x, h: Routed(h, None, 4, {"load": h.detach().mean()}),
    "namedtuple": lambda x, h: Both(h, (h + 1, torch.float32)),
    "its argument": lambda x, h: (h, x),
    "a view of its argument": lambda x, h: (h, x[1:]),
    "twice the same": lambda x, h: (h, h),
    "views of one tensor": lambda x, h: h.chunk(2, -1),
    "a number without tensors": lambda x, h: (h, True, ...),
}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


@pytest.mark.parametrize("kind", STRUCTURES)
def test_results_of_every_structure(kind: str, device: torch.device) -> None:
    """Trap: results that are None or numbers. Each structure comes out as it went in."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: nn.ModuleDict({"part": Returns(STRUCTURES[kind])}), device)
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> Any:
            optimizer.zero_grad()
            result = training.model["part"](batch[0])
            note(result)
            loss = sum(tensor.pow(2).mean() for tensor in tensors_in(result))
            loss.backward()
            note(loss)
            optimizer.step()
            return result

        training.step = step
        return training

    assert_graphed_equals_eager(build, device, "part")


def test_results_that_are_the_argument_are_the_callers_tensor(device: torch.device) -> None:
    model = nn.ModuleDict({"part": Returns(STRUCTURES["its argument"])}).to(device)
    with stepgraph.graph_modules(model, "part", warmup=1) as handle:
        for _ in range(4):
            x = torch.randn(4, 8, device=device)
            assert model["part"](x)[1] is x
        assert handle.report().replays == 3


def test_results_with_a_plain_value_that_changes_stay_eager(device: torch.device) -> None:
    """A count that is read on the host, or a list whose length varies, is never the one of the capture."""
    for kind in ("a number", "a length"):
        count = iter(range(100))

        def varying(x: torch.Tensor, h: torch.Tensor, kind: str = kind, count: Any = count) -> Any:
            number = next(count)
            return (h, number) if kind == "a number" else [h] * (1 + number % 2)

        model = nn.ModuleDict({"part": Returns(varying)}).to(device)
        with stepgraph.graph_modules(model, "part", ignore=["count"]) as handle, quiet() as seen, torch.no_grad():
            for index in range(8):
                result = model["part"](torch.ones(4, 8, device=device))
                assert result[1] == index if kind == "a number" else len(result) == 1 + index % 2
            report = handle.report()
        assert report.replays == 0
        assert report.rows[0].eager_reasons == {"warm-up": 3, "capture failed: [varying-output]": 5}
        assert any("varying-output" in str(warning.message) for warning in seen)


class Tagged(torch.Tensor):
    """A tensor of a class of the user's."""


def test_results_of_another_tensor_class_stay_eager(device: torch.device) -> None:
    model = nn.ModuleDict({"part": Returns(lambda x, h: h.as_subclass(Tagged))}).to(device)
    with stepgraph.graph_modules(model, "part", warmup=1) as handle, quiet():
        for _ in range(4):
            assert type(model["part"](torch.ones(4, 8, device=device))) is Tagged
        assert handle.report().rows[0].eager_reasons["capture failed: [tensor-class]"] == 3


# -- kept by the caller


@pytest.mark.pairwise
@pytest.mark.parametrize("what", ["the result", "a view", "detached", "in a graph"])
@pytest.mark.parametrize("since", [0, 7])
@pytest.mark.parametrize("where", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_results_kept_over_steps_never_change(what: str, since: int, where: int, device: torch.device) -> None:
    """Trap: outputs overwritten by the next call. From the start, or only once the module replays."""
    keep: dict[str, Callable[[torch.Tensor], Any]] = {
        "the result": lambda hidden: hidden,
        "a view": lambda hidden: hidden.detach()[1:, ::2],
        "detached": torch.Tensor.detach,
        "in a graph": lambda hidden: hidden * 2,
    }

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer(), Layer()), device, steps=16)
        model, optimizer = training.model, training.optimizers[0]
        kept: list[Any] = []
        count = [0]

        def step(batch: torch.Tensor, note: Note) -> list[torch.Tensor]:
            optimizer.zero_grad()
            hidden = model.embed(batch[0])
            for index, layer in enumerate(model.layers):
                hidden = layer(hidden)
                if index == where and count[0] >= since:
                    kept.append(keep[what](hidden))
            count[0] += 1
            loss = model.head(hidden).pow(2).mean()
            loss.backward()
            note(loss)
            optimizer.step()
            return [value.detach().clone() for value in kept]

        training.step = step
        return training

    report = assert_graphed_equals_eager(build, device)
    if what != "the result":  # whose autograd graph is kept with it
        assert all(row.forwards >= 5 for row in report.rows), report


def test_results_kept_in_evaluation_never_change(device: torch.device) -> None:
    """Predictions collected over a whole evaluation."""
    model = Net(Layer(), Layer()).to(device).eval()
    eager = Net(Layer(), Layer()).to(device).eval()
    eager.load_state_dict(model.state_dict())
    batches = [torch.randn(4, 8, device=device) for _ in range(12)]
    with stepgraph.graph_modules(model, "layers.*") as handle, torch.no_grad():
        received = [model.layers[1](model.layers[0](x)) for x in batches]
        expected = [eager.layers[1](eager.layers[0](x)) for x in batches]
        assert all(map(same_bits, expected, received))
        assert handle.report().replays > 0


def test_results_static_are_overwritten_by_the_next_call(device: torch.device) -> None:
    """The fast mode: no look at who holds what, and never a copy."""
    model = nn.ModuleDict({"part": nn.Linear(8, 8)}).to(device)
    with stepgraph.graph_modules(model, "part", warmup=1, outputs="static") as handle, torch.no_grad():
        model["part"](torch.ones(4, 8, device=device))
        kept = model["part"](torch.ones(4, 8, device=device))
        latest = model["part"](torch.zeros(4, 8, device=device))
        assert kept.data_ptr() == latest.data_ptr()
        assert torch.equal(kept, latest)
        assert handle.report().graphs == 1
        assert handle.report().replays == 2


def test_results_changed_in_place_by_the_caller(device: torch.device) -> None:
    """As eager allows, for what a linear layer has returned. As eager forbids, for what a tanh has returned."""

    def build(device: torch.device) -> Training:
        return training_of(
            lambda: nn.ModuleDict({"part": nn.Linear(8, 8)}),
            device,
            call=lambda model, x: model["part"](x).add_(1).mul_(2),
        )

    assert_graphed_equals_eager(build, device, "part")
    model = nn.ModuleDict({"part": nn.Sequential(nn.Linear(8, 8), nn.Tanh())}).to(device)
    with stepgraph.graph_modules(model, "part", warmup=1):
        for _ in range(3):
            model["part"](torch.ones(4, 8, device=device)).sum().backward()
        with pytest.raises(stepgraph.CaptureError, match="changed in place") as raised:
            model["part"](torch.ones(4, 8, device=device)).mul_(2).sum().backward()
        assert raised.value.rule == "inplace-saved"


class ShowsState(nn.Module):
    """Returns a buffer that it changes, and one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.inner(x)
        self.total.add_(hidden.detach().sum(0))
        return hidden, self.total, self.inner.weight


def test_results_that_are_module_state_show_its_later_changes(device: torch.device) -> None:
    """Kept over steps they go on changing, in eager as here; and a gradient through the parameter counts."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: nn.ModuleDict({"part": ShowsState()}), device)
        optimizer = training.optimizers[0]
        kept: list[torch.Tensor] = []

        def step(batch: torch.Tensor, note: Note) -> list[torch.Tensor]:
            optimizer.zero_grad()
            hidden, total, weight = training.model["part"](batch[0])
            kept.extend([total.detach(), weight.detach()])
            loss = hidden.pow(2).mean() + weight.pow(2).sum()
            loss.backward()
            note(loss)
            optimizer.step()
            return [value.clone() for value in kept]

        training.step = step
        return training

    assert_graphed_equals_eager(build, device, "part")


class ShowsMask(nn.Module):
    """Returns a view of an argument that other layers are given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x, mask=mask), mask[1:]


def test_results_that_view_a_shared_argument_never_change(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(ShowsMask(), ShowsMask()), device, steps=16)
        model, optimizer = training.model, training.optimizers[0]
        kept: list[torch.Tensor] = []
        count = [0]

        def step(batch: torch.Tensor, note: Note) -> list[torch.Tensor]:
            optimizer.zero_grad()
            hidden, mask = model.embed(batch[0]), torch.rand(4, 1, device=device)
            for layer in model.layers:
                hidden, shown = layer(hidden, mask)
                if layer is model.layers[0] and count[0] > 6:
                    kept.append(shown)
            count[0] += 1
            loss = model.head(hidden).pow(2).mean()
            loss.backward()
            note(loss)
            optimizer.step()
            return [value.clone() for value in kept]

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)
