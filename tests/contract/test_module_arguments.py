"""What a graphed module may be called with: anything eager takes, and never another call's values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.module_harness import (
    Layer,
    Net,
    Note,
    Training,
    assert_graphed_equals_eager,
    only_row,
    quiet,
    training_of,
)


class Norm(enum.Enum):
    NONE = "none"
    LAYER = "layer"


@dataclass
class PackedSequence:
    """Several sequences in one row: where each begins, and plain facts about them."""

    cu_seqlens: torch.Tensor
    max_seqlen: int
    qkv_format: str = "thd"
    padding: torch.Tensor | None = None


class Pair(NamedTuple):
    scale: torch.Tensor
    power: int


@dataclass
class Options:
    bias: torch.Tensor
    packed: PackedSequence
    norm: Norm = Norm.NONE
    nested: dict[str, Any] = field(default_factory=dict)


class Anything(nn.Module):
    """Takes arguments of every kind, each of which changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(
        self,
        x: torch.Tensor,
        pair: Pair,
        options: Options,
        *rest: Any,
        factor: float = 1.0,
        mode: str = "mul",
        layers: dict[str, Any] | None = None,
        nothing: None = None,
    ) -> torch.Tensor:
        hidden = self.inner(x) * pair.scale**pair.power + options.bias
        segment = torch.bucketize(torch.arange(x.shape[0], device=x.device), options.packed.cu_seqlens, right=True)
        hidden = hidden * (segment.unsqueeze(1) + options.packed.max_seqlen)
        if options.packed.padding is not None:
            hidden = hidden.masked_fill(options.packed.padding, 0.5)
        if options.norm is Norm.LAYER:
            hidden = F.layer_norm(hidden, [8])
        hidden = hidden * factor if mode == "mul" else hidden + factor
        for value in rest:
            hidden = hidden + value
        if layers is not None:
            hidden = hidden + layers["a"][0] + layers["b"]["c"]
        return hidden


def everything(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A call with all kinds of arguments; which tensors, differs at each."""
    lengths = torch.tensor([0, 1, 4], dtype=torch.int32, device=x.device)
    packed = PackedSequence(lengths, max_seqlen=3, padding=x > 1)
    pair = Pair(x[:, :1].abs(), 2)
    options = Options(x.mean(0), packed, Norm.LAYER, {"unused": [None, 1, "text"]})
    layers = {"a": [x.sum(), None], "b": {"c": x[0] * 2}}
    return model["part"](x, pair, options, x.mean(), 2, 0.5, factor=1.5, mode="add", layers=layers)


def test_arguments_of_every_kind(device: torch.device) -> None:
    """Trap: keyword arguments, None and numbers. Each tensor is this call's, each plain value is part of the call."""
    assert_graphed_equals_eager(
        lambda device: training_of(
            lambda: nn.ModuleDict({"part": Anything()}), device, microbatches=2, call=everything
        ),
        device,
        "part",
    )


def changing(model: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
    """Four kinds of calls that differ in one plain value each."""
    packed = PackedSequence(torch.tensor([0, 2, 4], device=x.device), max_seqlen=4 if index % 4 == 1 else 3)
    options = Options(x.mean(0), packed, Norm.LAYER if index % 4 == 2 else Norm.NONE)
    return model["part"](x, Pair(x.abs(), 2), options, mode="add" if index % 4 == 3 else "mul")


def build_changing(device: torch.device) -> Training:
    training = training_of(lambda: nn.ModuleDict({"part": Anything()}), device)
    optimizer, count = training.optimizers[0], [0]

    def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
        optimizer.zero_grad()
        loss = changing(training.model, batch[0], count[0]).pow(2).mean()
        count[0] += 1
        loss.backward()
        note(loss)
        optimizer.step()
        return loss.detach()

    training.step = step
    training.batches = [torch.randn(1, 4, 8, device=device) for _ in range(24)]
    return training


def test_arguments_each_plain_value_has_graphs_of_its_own(device: torch.device) -> None:
    report = assert_graphed_equals_eager(build_changing, device, "part")
    row = only_row(report, "part")
    assert row.signatures == 4
    assert row.eager_calls == 4 * 3


def test_arguments_past_max_graphs_run_eager_and_are_counted(device: torch.device) -> None:
    report = assert_graphed_equals_eager(build_changing, device, "part", max_graphs=2)
    row = only_row(report, "part")
    assert row.signatures == 2
    assert row.eager_reasons["past max_graphs=2"] == 12


def test_arguments_new_under_strict_are_refused_with_differences(device: torch.device) -> None:
    model = nn.ModuleDict({"layer": Layer()}).to(device)
    layer, x, mask = model["layer"], torch.randn(4, 8, device=device), torch.ones(4, 1, device=device)
    with stepgraph.graph_modules(model, "layer", strict=True, max_graphs=1, warmup=1):
        for _ in range(3):
            layer(x, mask=mask).sum().backward()
        with pytest.raises(stepgraph.SignatureMismatch) as raised:
            layer(x[:2].double(), mask=mask[:2].int())
        assert raised.value.rule == "max-graphs"
        told = "\n".join(raised.value.details)
        assert "x: shape and dtype changed" in told
        assert "mask: shape and dtype changed" in told
        assert "f32[4, 8]" in told
        assert "f64[2, 8]" in told
        with pytest.raises(stepgraph.SignatureMismatch, match="mask: missing"):
            layer(x)


def test_arguments_of_another_kind_are_never_broadcast_or_cast(device: torch.device) -> None:
    """Trap: what a copy into the static argument would accept is another call."""
    model = nn.ModuleDict({"layer": nn.LayerNorm(8)}).to(device)
    eager = nn.LayerNorm(8).to(device)
    with stepgraph.graph_modules(model, "layer", warmup=1, max_graphs=2):
        for _ in range(3):
            model["layer"](torch.randn(4, 8, device=device)).sum().backward()
        for shape in [(1, 8), (8,), (2, 4, 8), (0, 8)]:
            for _ in range(3):
                other = torch.randn(shape, device=device)
                assert torch.equal(model["layer"](other), eager(other))
        other = torch.randn(4, 8, device=device, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="type") as expected:
            eager(other)
        with pytest.raises(RuntimeError) as raised:
            model["layer"](other)
        assert str(raised.value) == str(expected.value)


class Twice(nn.Module):
    """Adds its arguments, which may be one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return self.inner(a).tanh() * b + self.inner(c)


@pytest.mark.parametrize("same", [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 1, 2)])
def test_arguments_that_are_one_tensor(same: tuple[int, ...], device: torch.device) -> None:
    """One tensor in several places: one buffer, and its gradient is summed as eager sums it."""

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = [model["embed"](x).tanh() + i for i in range(3)]
        return model["part"](*[hidden[i] for i in same])

    assert_graphed_equals_eager(
        lambda device: training_of(
            lambda: nn.ModuleDict({"embed": nn.Linear(8, 8), "part": Twice()}), device, call=call
        ),
        device,
        "part",
    )


class Geometry(nn.Module):
    """A layer that looks at its argument's strides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + x.stride(0))


@pytest.mark.parametrize("how", ["expanded", "transposed", "sliced", "one row", "empty"])
def test_arguments_keep_their_strides(how: str, device: torch.device) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made = {
            "expanded": x[:1].expand(4, 8),
            "transposed": x.T.contiguous().T,
            "sliced": torch.cat([x, x], 1)[:, ::2],
            "one row": x[:1],
            "empty": x[:0],
        }
        result = model["part"](made[how])
        return result.sum() + model["part"].inner.weight.sum()

    assert_graphed_equals_eager(
        lambda device: training_of(lambda: nn.ModuleDict({"part": Geometry()}), device, call=call), device, "part"
    )


def test_arguments_with_overlapping_memory(device: torch.device) -> None:
    """Sliding windows lie over each other, in the buffer as in the caller's tensor."""

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model["part"](x.flatten().unfold(0, 8, 4))

    assert_graphed_equals_eager(
        lambda device: training_of(lambda: nn.ModuleDict({"part": nn.Linear(8, 8)}), device, call=call),
        device,
        "part",
    )


class Opaque:
    """An object whose tensors nobody sees."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


class TakesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, value: Any) -> torch.Tensor:
        return self.inner(x) * torch.as_tensor(getattr(value, "scale", value), device=x.device, dtype=x.dtype)


@pytest.mark.parametrize("kind", ["opaque", "numpy", "sparse", "subclass"])
def test_arguments_that_cannot_be_seen_into_run_eagerly(kind: str, device: torch.device) -> None:
    """An object with hidden tensors, an array, a sparse tensor, a tensor of another class: right, and counted."""
    numpy = pytest.importorskip("numpy")

    class Tagged(torch.Tensor):
        pass

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean().detach()
        if kind == "opaque":
            return model["part"](x, Opaque(scale))
        if kind == "numpy":
            return model["part"](x, numpy.float32(scale.item()))
        if kind == "sparse":
            return model["part"].inner(x) * model["other"](x.detach().to_sparse())
        return model["part"](x, scale.as_subclass(Tagged)).as_subclass(torch.Tensor)

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.sum(x) if x.is_sparse else x.sum()

    with quiet():
        report = assert_graphed_equals_eager(
            lambda device: training_of(
                lambda: nn.ModuleDict({"part": TakesObject(), "other": Sum()}), device, call=call
            ),
            device,
            ["other"] if kind == "sparse" else ["part"],
            replays=False,
        )
    assert report.replays == 0
    assert report.eager_calls == 8


class Cached(nn.Module):
    """Leaves something in a container that it is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        if self.kind == "key added":
            cache["y"] = y.detach() * 2
        elif self.kind == "key replaced":
            cache["first"] = cache["first"] + 1
        elif self.kind == "key taken out":
            y = y * cache.pop("first")
        else:
            cache.append(y.detach() * 2)
        return y


@pytest.mark.parametrize("kind", ["key added", "key replaced", "key taken out", "list grown"])
def test_arguments_that_a_module_changes_are_the_callers_own(kind: str, device: torch.device) -> None:
    """It runs eagerly then, on the very containers that it was given."""

    def build(device: torch.device) -> Training:
        def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            cache: Any = [] if kind == "list grown" else {"first": x.detach().mean()}
            y = model["part"](x, cache)
            left = cache if kind == "list grown" else list(cache.values())
            return y + sum(value.mean() for value in left)

        return training_of(lambda: nn.ModuleDict({"part": Cached(kind)}), device, call=call)

    with quiet():
        report = assert_graphed_equals_eager(build, device, ["part"], replays=False)
    assert report.rows[0].eager_reasons == {"warm-up": 3, "capture failed: [argument-changed]": 5}


def test_arguments_that_are_parameters_or_modules_are_not_copied(device: torch.device) -> None:
    """A parameter or a module that is passed in gets its gradients, and is noticed when it is replaced."""

    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, weight: nn.Parameter, module: nn.Module) -> torch.Tensor:
            return module(self.inner(x) @ weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.weight, self.lent = Borrows(), nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def build(device: torch.device) -> Training:
        training = training_of(
            Model, device, steps=18, call=lambda m, x: m.part(x, m.weight, m.lent), optimizer=torch.optim.SGD
        )

        def before_step(index: int) -> None:
            if index == 9:
                training.model.lent.weight.data = torch.ones(8, 8, device=device)

        training.before_step = before_step
        return training

    report = assert_graphed_equals_eager(build, device, "part")
    assert report.recaptures == 1


def test_arguments_of_all_layers_come_from_one_call(device: torch.device) -> None:
    """A mask that every layer is given, another one at each step, now and then none."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer(), Layer()), device, steps=20)
        optimizer, count = training.optimizers[0], [0]

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            mask = None if count[0] % 5 == 4 else (torch.rand(4, 1, device=device) > 0.3).float()
            count[0] += 1
            loss = training.model(batch[0], mask=mask).pow(2).mean()
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        training.step = step
        return training

    report = assert_graphed_equals_eager(build, device)
    assert all(row.signatures == 2 for row in report.rows)
