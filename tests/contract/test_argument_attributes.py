"""Python attributes on tensor arguments, and classes of tensors: seen by the step as in eager, or refused by name."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.core.tensor_attributes import Attributes


class Kind(enum.Enum):
    """A plain value."""

    DOUBLED = 2.0
    TRIPLED = 3.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    scale = getattr(x, "scale", 1.0)
    if isinstance(scale, tuple):
        scale = scale[0]
    return x * (scale.value if isinstance(scale, Kind) else float(scale or 0))


class Scaling(nn.Module):
    """Reads an attribute of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(x) * self.weight


def with_attribute(value: Any, device: torch.device | str, name: str = "scale") -> torch.Tensor:
    x = torch.ones(2, device=device)
    if value is not ABSENT:
        setattr(x, name, value)
    return x


ABSENT = object()
VALUES = (3.0, ABSENT, 4.0, Kind.TRIPLED, (2.0, "a"), None, True, "5")


@pytest.mark.parametrize("place", ["device", "host"])
def test_attribute_of_an_argument_is_seen_by_the_step(place: str, device: torch.device) -> None:
    where = device if place == "device" else torch.device("cpu")
    with stepgraph.capture(scaled, warmup=1, backend=stepgraph.backend_for(device)) as step:
        for _ in range(3):
            for value in VALUES:
                received = step(with_attribute(value, where))
                assert torch.equal(received.cpu(), scaled(with_attribute(value, "cpu")))
        report = step.report()
    assert (report.graphs, report.replays) == (len(VALUES), 2 * len(VALUES))


def test_attribute_of_an_argument_is_seen_by_a_module(device: torch.device) -> None:
    model = nn.Sequential(Scaling()).to(device)
    with stepgraph.graph_modules(model, scope=["0"], warmup=1) as handle:
        for value in (3.0, 3.0, ABSENT, ABSENT, 4.0, 4.0, 3.0, ABSENT):
            result = model(with_attribute(value, device))
            result.sum().backward()
            assert result[0].item() == (1.0 if value is ABSENT else value)
        assert handle.report().rows[0].forwards >= 4
        model(with_attribute(torch.ones(2, device=device), device, "mask"))
        assert any("[tensor-attribute]" in reason for reason in handle.report().rows[0].eager_reasons)


@pytest.mark.parametrize("sample", [3.0, ABSENT])
def test_attribute_of_an_argument_must_be_that_of_the_sample(sample: Any, device: torch.device) -> None:
    graphed = stepgraph.make_graphed_callables(Scaling().to(device), (with_attribute(sample, device),))
    assert graphed(with_attribute(sample, device))[0].item() == (1.0 if sample is ABSENT else sample)
    with pytest.raises(stepgraph.SignatureMismatch, match="x: attributes changed"):
        graphed(with_attribute(4.0, device))
    with pytest.raises(stepgraph.InvalidArgument, match="`x` has an attribute `scale` that is a Tensor"):
        stepgraph.make_graphed_callables(Scaling().to(device), (with_attribute(torch.ones(2, device=device), device),))


@pytest.mark.parametrize(
    "value", [torch.ones(2), [1], {"a": 1}, (1, [2]), len, object()], ids=lambda v: type(v).__name__
)
def test_attribute_that_is_no_plain_value_is_refused(value: Any, device: torch.device) -> None:
    with stepgraph.capture(lambda batch: batch["x"] + 1) as step:
        with pytest.raises(stepgraph.InvalidArgument) as caught:
            step({"x": with_attribute(value, device, "mask")})
        assert caught.value.rule == "tensor-attribute"
        assert "`batch['x']` has an attribute `mask`" in caught.value.what
    loader = stepgraph.StaticBufferLoader(stepgraph.backend_for(device))
    with pytest.raises(stepgraph.InvalidArgument, match="attribute `mask`"):
        loader.load(iter([with_attribute(value, device, "mask")]), 1)


def test_attribute_marks_of_libraries_are_left_alone(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x._do_not_clear = True  # type: ignore[attr-defined]
        return x + 1

    with stepgraph.capture(step, warmup=1) as captured:
        for index in range(4):
            x = torch.ones(2, device=device)
            if index % 2:
                torch._dynamo.mark_dynamic(x, 0)
            assert captured(x).tolist() == [2.0, 2.0]
        assert captured.report().graphs == 1


def test_attribute_that_changes_is_named_under_strict(device: torch.device) -> None:
    with stepgraph.capture(scaled, warmup=1, max_graphs=1, strict=True) as step:
        for _ in range(2):
            step(with_attribute(3.0, device))
        with pytest.raises(stepgraph.SignatureMismatch, match=r"attributes changed .*\.scale=3\.0.*\.scale=4\.0"):
            step(with_attribute(4.0, device))


def add(x: torch.Tensor) -> None:
    x.aux = x * 2  # type: ignore[attr-defined]


def change(x: torch.Tensor) -> None:
    x.scale = 2.0  # type: ignore[attr-defined]


def remove(x: torch.Tensor) -> None:
    del x.scale  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("how", "told"), [(add, "`x.aux` was added"), (change, "`x.scale` was changed"), (remove, "`x.scale` was removed")]
)
def test_attribute_that_the_step_itself_changes_is_refused(
    how: Callable[[torch.Tensor], None], told: str, device: torch.device
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        how(x)
        return x * 2

    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return step(x)

    with stepgraph.capture(step) as captured, pytest.raises(stepgraph.CaptureError, match=told) as caught:
        captured(with_attribute(3.0, device))
    assert caught.value.rule == "argument-changed"
    model = nn.Sequential(Part()).to(device)
    with stepgraph.graph_modules(model, scope=["0"], warmup=1) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            model(with_attribute(3.0, device))
        assert handle.report().rows[0].eager_reasons["capture failed: [argument-changed]"] == 2


class Unit(torch.Tensor):
    """A tensor with an attribute of its class, and maybe one of its own."""

    factor = 3.0


class Quiet(torch.Tensor):
    """The same, whose results are plain tensors."""

    factor = 3.0
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("kind", [Unit, Quiet])
@pytest.mark.parametrize("place", ["device", "host"])
def test_class_of_a_tensor_is_that_of_the_argument(kind: Any, place: str, device: torch.device) -> None:
    def step(x: Any) -> torch.Tensor:
        assert type(x) is kind
        return (x * x.factor * getattr(x, "scale", 1.0)).as_subclass(torch.Tensor)

    where = device if place == "device" else torch.device("cpu")
    with stepgraph.capture(step, warmup=1, backend=stepgraph.backend_for(device)) as captured:
        for scale in (1.0, 1.0, 2.0, 2.0, 1.0):
            x = torch.ones(2, device=where).as_subclass(kind)
            x.scale = scale
            assert captured(x).tolist() == [3.0 * scale] * 2
        assert captured.report().replays == 3


def test_class_of_a_tensor_is_watched(device: torch.device) -> None:
    class Own(torch.Tensor):
        factor = 3.0

    with stepgraph.capture(lambda x: (x * x.factor).as_subclass(torch.Tensor), warmup=1) as step:
        for _ in range(3):
            step(torch.ones(2, device=device).as_subclass(Own))
        Own.factor = 4.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"Own.*factor: 3\.0 -> 4\.0"):
            assert step(torch.ones(2, device=device).as_subclass(Own)).tolist() == [4.0, 4.0]


def test_attributes_of_a_padded_argument_are_seen(device: torch.device) -> None:
    with stepgraph.capture(scaled, warmup=1, buckets={"x": {0: [4]}}) as step:
        for scale in (3.0, 3.0, 4.0, 4.0):
            assert step(with_attribute(scale, device)).tolist() == [scale] * 2


def test_attributes_are_compared_as_constants_of_a_graph() -> None:
    same = [{"a": float("nan")}, {"a": (1, "b"), "c": None}, {}]
    assert all(Attributes(found) == Attributes(dict(reversed(found.items()))) for found in same)
    others = [{"a": 0.0}, {"a": -0.0}, {"a": 0}, {"a": False}, {"a": None}, {"a": (0,)}, {"b": 0}, {"a": []}, {}]
    assert len({Attributes(found) for found in others}) == len(others)
