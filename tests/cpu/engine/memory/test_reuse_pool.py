"""The pool of static tensors: reused by geometry, once nobody needs them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stepgraph
from stepgraph.engine.memory.inputs import ArgMetadata
from stepgraph.engine.memory.reuse_pool import TensorReusePool


def meta(*shape: int, **options: object) -> ArgMetadata:
    return ArgMetadata(torch.empty(*shape, **options))  # type: ignore[call-overload]


@pytest.fixture
def pool() -> TensorReusePool:
    return TensorReusePool(torch.device("cpu"))


def test_tensor_given_back_is_taken_again(pool: TensorReusePool) -> None:
    first = pool.get(meta(4, 2))
    second = pool.get(meta(4, 2))
    assert first.data_ptr() != second.data_ptr()
    pool.insert(first)
    assert pool.get(meta(4, 2)).data_ptr() == first.data_ptr()
    assert pool.num_bytes == 2 * 4 * 2 * 4


def test_tensor_is_found_by_geometry_whatever_its_requires_grad(pool: TensorReusePool) -> None:
    tensor = pool.get(meta(4, requires_grad=True))
    assert not tensor.requires_grad
    pool.insert(tensor.detach())
    for other in (meta(5), meta(4, dtype=torch.float64), meta(2, 2)):
        assert pool.get(other).data_ptr() != tensor.data_ptr()
    assert pool.get(meta(4)).data_ptr() == tensor.data_ptr()


def test_strides_are_part_of_the_geometry(pool: TensorReusePool) -> None:
    across = ArgMetadata(torch.empty(2, 3).t())
    tensor = pool.get(across)
    assert tensor.stride() == (1, 3)
    pool.insert(tensor)
    assert pool.get(meta(3, 2)).data_ptr() != tensor.data_ptr()


def test_empty_tensors_are_distinguished(pool: TensorReusePool) -> None:
    first, second = pool.get(meta(0)), pool.get(meta(0))
    pool.insert(first)
    pool.insert(second)
    assert pool.get(meta(0)) is not pool.get(meta(0))


def test_tensor_given_back_twice_is_refused(pool: TensorReusePool) -> None:
    tensor = pool.get(meta(4))
    pool.insert(tensor)
    with pytest.raises(stepgraph.InvalidArgument, match="given back"):
        pool.insert(tensor)
    with pytest.raises(stepgraph.InvalidArgument, match="not of this pool"):
        pool.insert(torch.empty(4))
    with pytest.raises(stepgraph.InvalidArgument, match="of type int"):
        pool.get(ArgMetadata(3))


def test_pool_without_a_device_follows_the_metadata() -> None:
    pool = stepgraph.TensorReusePool()
    tensors = [pool.get(meta(2, device=device)) for device in ("cpu", "meta")]
    assert [tensor.device.type for tensor in tensors] == ["cpu", "meta"]
    assert [tensor is own for tensor, own in zip(tensors, pool.tensor_strong_refs, strict=True)] == [True, True]
    assert all(map(pool.owns, [*tensors, tensors[0][:1]]))
    assert not pool.owns(torch.empty(2))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
def test_no_tensor_is_ever_needed_twice(steps: list[tuple[int, bool]]) -> None:
    pool = TensorReusePool(torch.device("cpu"))
    taken: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    most = {0: 0, 1: 0, 2: 0}
    for kind, take in steps:
        if take:
            taken[kind].append(pool.get(meta(kind + 1)))
        elif taken[kind]:
            pool.insert(taken[kind].pop(0))
        most[kind] = max(most[kind], len(taken[kind]))
        held = [tensor.data_ptr() for tensors in taken.values() for tensor in tensors]
        assert len(set(held)) == len(held)
    assert pool.num_bytes == sum(4 * (kind + 1) * number for kind, number in most.items())
