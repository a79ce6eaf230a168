"""What a step writes to its arguments arrives in the caller's own tensors, whichever way it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import stepgraph
from tests.harness import same_bits

Make = Callable[[torch.device], tuple[Any, ...]]


def batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, training=True)


def foreach(averages: list[torch.Tensor], new: list[torch.Tensor]) -> None:
    torch._foreach_lerp_(averages, new, 0.1)


def data(x: torch.Tensor) -> None:
    x.data.mul_(2)


def part_of_data(x: torch.Tensor) -> torch.Tensor:
    x.data[1:].add_(1)
    return x.sum()


def to_nan(x: torch.Tensor) -> None:
    x.data.div_(x.data - x.data)


WRITES: dict[str, tuple[Callable[..., Any], Make]] = {
    "batch_norm": (
        batch_norm,
        lambda d: (torch.arange(12.0, device=d).view(4, 3), torch.zeros(3, device=d), torch.ones(3, device=d)),
    ),
    "foreach": (foreach, lambda d: ([torch.zeros(2, device=d)], [torch.ones(2, device=d)])),
    "data": (data, lambda d: (torch.ones(2, device=d),)),
    "part of data": (part_of_data, lambda d: (torch.ones(4, device=d),)),
    "nan": (to_nan, lambda d: (torch.ones(2, device=d),)),
    "complex": (data, lambda d: (torch.ones(2, device=d, dtype=torch.complex64),)),
    "a leaf": (data, lambda d: (torch.ones(2, device=d, requires_grad=True),)),
    "integers": (data, lambda d: (torch.ones(2, device=d, dtype=torch.int64),)),
}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def assert_same_writes(function: Callable[..., Any], make: Make, device: torch.device, **options: Any) -> None:
    """Eager and captured calls on tensors of their own leave the same bits in them, call by call."""
    mine, theirs = make(device), make(device)
    with stepgraph.capture(function, **options) as step:
        for _ in range(8):
            one, two = function(*mine), step(*theirs)
            pairs = zip(tensors_of((mine, one)), tensors_of((theirs, two)), strict=True)
            assert all(same_bits(a.detach(), b) for a, b in pairs)
        assert step.report().replays == 5


@pytest.mark.parametrize("name", WRITES)
def test_writes_that_torch_does_not_count_arrive(name: str, device: torch.device) -> None:
    assert_same_writes(*WRITES[name], device)


@pytest.mark.parametrize("name", [name for name in WRITES if name != "a leaf"])
def test_writes_in_inference_mode_arrive(name: str, device: torch.device) -> None:
    with torch.inference_mode():
        assert_same_writes(*WRITES[name], device)


def test_counted_writes_in_inference_mode_arrive(device: torch.device) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return (x * y).sum()

    with torch.inference_mode():
        assert_same_writes(step, lambda d: (torch.ones(3, device=d), torch.ones(3, device=d)), device)


def test_writes_to_a_tensor_on_the_host_arrive(device: torch.device) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data.add_(1)
        return x + y

    x, y = torch.zeros(3), torch.ones(3, device=device)
    with stepgraph.capture(step) as captured:
        for index in range(1, 7):
            assert captured(x, y).tolist() == [index + 1.0] * 3
            assert x.tolist() == [float(index)] * 3
        assert captured.report().replays == 3


def test_a_tensor_that_is_only_read_is_not_written_back(device: torch.device) -> None:
    x, mean, var = torch.rand(4, 3, device=device), torch.zeros(3, device=device), torch.ones(3, device=device)
    with stepgraph.capture(batch_norm) as step:
        for _ in range(4):
            step(x, mean, var)
        version = x._version
        step(x, mean, var)
        assert x._version == version


def rebinds() -> dict[str, Callable[[torch.Tensor], Any]]:
    def new_data(x: torch.Tensor) -> None:
        x.data = x * 2

    def set_memory(x: torch.Tensor) -> None:
        x.set_(x * 2)

    return {
        "data": new_data,
        "set_": set_memory,
        "unsqueeze_": lambda x: x.unsqueeze_(0).sum(),
        "t_": lambda x: x.t_().sum(),
    }


@pytest.mark.parametrize("name", rebinds())
def test_argument_given_other_memory_or_shape_is_refused(name: str, device: torch.device) -> None:
    with stepgraph.capture(rebinds()[name], warmup=1) as step:
        step(torch.ones(2, 3, device=device))
        x = torch.ones(2, 3, device=device)
        with pytest.raises(stepgraph.CaptureError, match="shape of argument `") as caught:
            step(x)
        assert caught.value.rule == "argument-changed"
        assert "copy_(new)" in caught.value.fix
        assert x.shape == (2, 3)
        assert x.eq(1).all()


def add_and_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return (a + b).sum()


@pytest.mark.parametrize("as_dict", [False, True], ids=["plain", "in containers"])
def test_arguments_that_begin_to_share_memory_are_noticed(as_dict: bool, device: torch.device) -> None:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return add_and_sum(batch["a"], batch["b"])

    function = step if as_dict else add_and_sum
    with stepgraph.capture(function) as captured:
        for index in range(8):
            a, b = torch.ones(4, device=device), torch.ones(4, device=device)
            b = a.view(4) if index >= 6 else b
            result = captured({"a": a, "b": b}) if as_dict else captured(a, b)
            assert result.item() == (16 if index >= 6 else 12)
            assert a.tolist() == [2.0] * 4
        report = captured.report()
        assert (report.replays, report.eager_reasons) == (3, {"warm-up": 5})
        a, b = torch.ones(4, device=device), torch.ones(4, device=device)
        assert (captured({"a": a, "b": b}) if as_dict else captured(a, b)).item() == 12
        assert captured.report().replays == 4


def test_arguments_that_keep_sharing_memory_are_refused(device: torch.device) -> None:
    with stepgraph.capture(add_and_sum, warmup=1) as step:
        for _ in range(3):
            step(torch.ones(4, device=device), torch.ones(4, device=device))
        a = torch.ones(4, device=device)
        step(a, a.view(4))
        with pytest.raises(stepgraph.CaptureError, match="shares memory") as caught:
            step(a, a.view(4))
        assert caught.value.rule == "shared-input"


def test_pieces_of_one_memory_that_do_not_overlap_are_replayed(device: torch.device) -> None:
    with stepgraph.capture(add_and_sum) as step:
        for _ in range(5):
            step(torch.ones(64, device=device), torch.ones(64, device=device))
        flat = torch.ones(128, device=device)
        assert step(flat[:64], flat[64:]).item() == 192
        assert flat.tolist() == [2.0] * 64 + [1.0] * 64
        assert step.report().replays == 3


def test_gradient_the_step_adds_to_is_refused_as_an_argument(device: torch.device) -> None:
    """The argument would be a copy of before the backward, and be written back over the new gradient."""
    weight = torch.nn.Parameter(torch.ones(3, device=device))

    def step(grad: torch.Tensor) -> torch.Tensor:
        (weight * weight).sum().backward()
        return grad.sum()

    weight.grad = torch.zeros_like(weight)
    with stepgraph.capture(step, warmup=2) as captured:
        assert [captured(weight.grad).item() for _ in range(2)] == [6.0, 12.0]
        with pytest.raises(stepgraph.CaptureError, match="shares memory") as caught:
            captured(weight.grad)
        assert caught.value.rule == "shared-input"
        assert weight.grad.tolist() == [4.0] * 3


# -- buckets


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
def test_writes_to_a_padded_argument_arrive(mode: Any, counted: bool, device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        (x if counted else x.data).add_(1)
        return x.sum()

    with mode(), stepgraph.capture(step, buckets={"x": {0: [4, 8]}}) as captured:
        for index in range(8):
            x = torch.full((3 if index % 2 else 7,), float(index), device=device)
            captured(x)
            assert x.tolist() == [index + 1.0] * len(x)
        assert captured.report().replays > 0


def test_a_padded_argument_that_is_only_read_is_not_written_back(device: torch.device) -> None:
    with stepgraph.capture(lambda x: x.sum(), buckets={"x": {0: [4]}}) as step:
        for _ in range(6):
            x = torch.ones(3, device=device)
            step(x)
            assert x._version == 0


def test_padded_argument_given_another_shape_is_refused(device: torch.device) -> None:
    with stepgraph.capture(lambda x: x.unsqueeze_(0).sum(), buckets={"x": {0: [4]}}) as step:
        with pytest.raises(stepgraph.CaptureError, match="argument `x`") as caught:
            step(torch.ones(3, device=device))
        assert caught.value.rule == "argument-changed"


def test_bucket_result_refusal_reports_that_the_step_has_run(device: torch.device) -> None:
    model = torch.nn.Linear(8, 4).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        out.sum().backward()
        return out.detach()

    with stepgraph.capture(step, buckets={"x": {0: [4]}}) as captured:
        with pytest.raises(stepgraph.InvalidArgument, match="the step of this call has run") as caught:
            captured(torch.ones(3, 8, device=device))
        assert caught.value.rule == "bucket-result"
        assert model.weight.grad is not None
        with pytest.raises(stepgraph.InvalidArgument) as caught:
            captured(torch.ones(3, 8, device=device))
        assert "has run" not in str(caught.value)
