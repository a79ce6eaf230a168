"""get_mismatch_errors: every difference between two calls at once, by argument name and path."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stepgraph import ArgMetadata, InvalidArgument, get_mismatch_errors

X = torch.zeros(4, 8)


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclass
class Packed:
    cu_seqlens: torch.Tensor
    max_seqlen: int
    extra: Any = None


def test_mismatch_of_equal_calls_is_empty() -> None:
    packed = Packed(torch.zeros(3, dtype=torch.int32), 4, {"a": [X, None]})
    again = Packed(torch.ones(3, dtype=torch.int32), 4, {"a": [X.clone(), None]})
    assert get_mismatch_errors((X, packed), {"mode": Mode.A}, (X.clone(), again), {"mode": Mode.A}) == []


@pytest.mark.parametrize(
    ("received", "told"),
    [
        (X[:2], "x: shape changed (captured f32[4, 8] cpu, received f32[2, 8] cpu)"),
        (X.double(), "x: dtype changed (captured f32[4, 8] cpu, received f64[4, 8] cpu)"),
        (X.T.contiguous().T, "x: strides changed (captured f32[4, 8] cpu, received f32[4, 8] cpu)"),
        (X.clone().requires_grad_(), "x: requires_grad changed (captured f32[4, 8] cpu, received f32[4, 8] cpu"),
        (X.to("meta"), "x: device changed (captured f32[4, 8] cpu, received f32[4, 8] meta)"),
        (3, "x: type changed (captured f32[4, 8] cpu, received 3)"),
        (None, "x: type changed (captured f32[4, 8] cpu, received None)"),
        ([X], "x: type changed (captured a leaf, received list)"),
    ],
)
def test_mismatch_of_a_tensor_names_what_changed(received: Any, told: str) -> None:
    (error,) = get_mismatch_errors((X,), {}, (received,), {}, names=["x"])
    assert error.startswith(told)


def test_mismatch_reports_every_difference_at_once() -> None:
    packed = Packed(torch.zeros(3, dtype=torch.int32), 4)
    other = Packed(torch.zeros(5, dtype=torch.int32), 6)
    errors = get_mismatch_errors(
        (X, packed),
        {"mask": X, "mode": Mode.A, "gone": 1, "nested": {"a": (X, 1)}},
        (X[:2], other),
        {"mask": X.half(), "mode": Mode.B, "new": 1, "nested": {"a": (X, 2)}},
        names=["hidden_states", "packed"],
    )
    paths = [error.partition(":")[0] for error in errors]
    assert paths == [
        "gone",
        "new",
        "hidden_states",
        "packed.cu_seqlens",
        "packed.max_seqlen",
        "mask",
        "mode",
        "nested['a'][1]",
    ]


def test_mismatch_without_names_counts_arguments() -> None:
    assert get_mismatch_errors((X, 1), {}, (X, 2), {}) == ["args[1]: value changed (captured 1, received 2)"]


def test_mismatch_takes_metadata_for_tensors_that_are_gone() -> None:
    kept = ArgMetadata(X)
    assert get_mismatch_errors((kept,), {"m": [kept]}, (X,), {"m": [X]}) == []
    (error,) = get_mismatch_errors((kept,), {}, (X[:1],), {}, names=["x"])
    assert error == "x: shape changed (captured f32[4, 8] cpu, received f32[1, 8] cpu)"
    assert get_mismatch_errors((X,), {}, (ArgMetadata(X[:1]),), {}, names=["x"]) != []


def test_mismatch_treats_leaves_and_computed_tensors_alike() -> None:
    leaf = X.clone().requires_grad_()
    assert get_mismatch_errors((leaf,), {}, (leaf * 2,), {}) == []


def test_mismatch_of_sparse_tensors_is_reported() -> None:
    (error,) = get_mismatch_errors((X,), {}, (X.to_sparse(),), {}, names=["x"])
    assert error.startswith("x: strides changed")


def test_metadata_makes_a_tensor_of_the_same_geometry() -> None:
    for tensor in (X, X.T, X[:, ::2], X[:1].expand(4, 8), X.bfloat16().requires_grad_()):
        made = ArgMetadata(tensor).empty(torch.device("cpu"))
        assert ArgMetadata(made) == ArgMetadata(tensor)
        zeros = ArgMetadata(tensor).zeros_like()
        assert ArgMetadata(zeros) == ArgMetadata(tensor)
        assert not zeros.any()
    assert ArgMetadata(X) != ArgMetadata(X.T)
    assert len({ArgMetadata(X), ArgMetadata(X.clone()), ArgMetadata(X.T)}) == 2


def test_metadata_is_made_of_any_argument() -> None:
    meta = ArgMetadata(X)
    assert (meta.type, meta.shape, meta.dtype, meta.device) == (torch.Tensor, X.shape, X.dtype, X.device)
    assert (meta.value, meta.requires_grad) == (X.data_ptr(), False)
    number, nothing = ArgMetadata(3), ArgMetadata(None)
    assert (number.type, number.value, number.shape) == (int, 3, None)
    assert number == ArgMetadata(3)
    assert len({number, nothing, meta, ArgMetadata(True), ArgMetadata(4), ArgMetadata(1)}) == 6
    assert get_mismatch_errors((number, nothing), {}, (3, None), {}) == []
    for arg in (3, None, X.to_sparse()):
        with pytest.raises(InvalidArgument, match="no tensor can be made like a"):
            ArgMetadata(arg).zeros_like()
