"""A step's arguments: they arrive in buffers of their geometry, and what is written to them comes back."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from stepgraph.core.errors import CaptureError
from stepgraph.engine.backends import backend_for
from stepgraph.engine.memory.inputs import is_copied_in
from stepgraph.engine.step.arguments import StepArguments, on_device

BACKEND = backend_for("cpu")


def static_inputs(*leaves: Any) -> StepArguments:
    """Static inputs made and loaded as a capture does."""
    inputs = StepArguments(leaves, BACKEND)
    inputs.load(leaves)
    inputs.watch()
    return inputs


def note_use(inputs: StepArguments, *leaves: Any) -> None:
    """What a capture does once it has recorded the step."""
    inputs.note_use(leaves, [f"x{i}" for i in range(len(leaves))])


def geometries() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0)
    return {
        "contiguous": base.view(4, 6).clone(),
        "transposed": base.view(4, 6).t(),
        "strided": base.view(4, 6)[::2, 1::2],
        "offset": base[5:9],
        "channels last": base.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "expanded": base[:3].expand(4, 3),
        "expanded twice": base[:1].view(1, 1).expand(4, 3),
        "expanded in the middle": base[:6].view(2, 1, 3).expand(2, 4, 3),
        "overlapping windows": base.unfold(0, 4, 1),
        "scalar": base[7],
        "empty": base[:0],
        "integers": torch.arange(5),
        "mask": base > 3,
        "bf16": base.bfloat16(),
        "complex": torch.complex(base, -base),
    }


@pytest.mark.parametrize("name", geometries())
def test_inputs_arrive_with_their_strides(name: str) -> None:
    tensor = geometries()[name]
    buffer = static_inputs(tensor).leaves[0]
    assert buffer is not tensor
    assert buffer.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()
    assert (buffer.shape, buffer.stride(), buffer.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(buffer, tensor)


@pytest.mark.parametrize("name", geometries())
def test_inputs_load_again_at_the_same_address(name: str) -> None:
    first, second = geometries()[name], geometries()[name]
    inputs = static_inputs(first)
    address = inputs.leaves[0].data_ptr()
    base = second._base if second._base is not None else second
    base.add_(1) if base.dtype is not torch.bool else base.logical_not_()
    inputs.load([second])
    assert torch.equal(inputs.leaves[0], second)
    assert inputs.leaves[0].data_ptr() == address


@pytest.mark.parametrize("name", geometries())
def test_inputs_that_were_only_read_are_not_written_back(name: str) -> None:
    tensor = geometries()[name]
    inputs = static_inputs(tensor)
    inputs.leaves[0].clone()  # what a step does with it
    note_use(inputs, tensor)
    version = tensor._version
    inputs.store([tensor])
    assert tensor._version == version


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_inputs_keep_any_permutation_and_expansion(shape: list[int], random: Any, expand: bool) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape).permute(order)
    if expand:
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    inputs = static_inputs(tensor)
    assert inputs.leaves[0].stride() == tensor.stride()
    assert torch.equal(inputs.leaves[0], tensor)
    inputs.load([tensor + 1 if not expand else (tensor[0] + 1).expand_as(tensor)])
    assert torch.equal(inputs.leaves[0], tensor + 1)


def test_inputs_of_an_expanded_tensor_take_no_more_memory() -> None:
    assert static_inputs(torch.ones(3).expand(1000, 3)).num_bytes == 12


def test_inputs_copy_a_negated_and_a_conjugated_view() -> None:
    base = torch.complex(torch.arange(3.0), torch.ones(3))
    views = [base.conj(), base.conj().imag]
    inputs = static_inputs(*views)
    assert [torch.equal(buffer, view) for buffer, view in zip(inputs.leaves, views, strict=True)] == [True, True]


def test_inputs_keep_requires_grad() -> None:
    inputs = static_inputs(torch.ones(2, requires_grad=True), torch.ones(2))
    assert [leaf.requires_grad for leaf in inputs.leaves] == [True, False]
    assert inputs.leaves[0].is_leaf
    assert inputs.leaves[0].grad is None


def test_inputs_made_under_inference_mode_can_be_used_outside() -> None:
    with torch.inference_mode():
        inputs = static_inputs(torch.ones(2))
    assert not inputs.leaves[0].is_inference()


def test_inputs_load_an_inference_tensor() -> None:
    with torch.inference_mode():
        tensor = torch.arange(3.0)
    assert static_inputs(tensor).leaves[0].tolist() == [0.0, 1.0, 2.0]


def test_inputs_pass_plain_values_and_parameters_through() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    inputs = static_inputs(3, "mean", None, parameter)
    assert inputs.leaves[:3] == [3, "mean", None]
    assert inputs.leaves[3] is parameter
    assert inputs.num_bytes == 0
    note_use(inputs, 3, "mean", None, parameter)
    inputs.store([3, "mean", None, parameter])
    assert parameter.tolist() == [1.0, 1.0]


def test_inputs_of_a_subclass_stay_of_it() -> None:
    pair = TwoTensor(torch.ones(2), torch.zeros(2))
    buffer = static_inputs(pair).leaves[0]
    assert type(buffer) is TwoTensor
    assert (buffer.a.tolist(), buffer.b.tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_inputs_count_their_bytes() -> None:
    assert static_inputs(torch.ones(4), 1, torch.ones(2, dtype=torch.float64)).num_bytes == 32


def test_inputs_written_by_the_step_are_stored_back() -> None:
    inputs = static_inputs(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    inputs.leaves[1].add_(1)
    inputs.leaves[2][0] = 5.0
    note_use(inputs, *inputs.leaves)
    call = [torch.full((3,), 7.0) for _ in range(3)]
    inputs.load(call)
    inputs.leaves[1].add_(1)
    inputs.leaves[2][0] = 5.0
    inputs.store(call)
    assert [t.tolist() for t in call] == [[7.0] * 3, [8.0] * 3, [5.0, 7.0, 7.0]]


def test_inputs_written_by_the_step_are_stored_through_a_view() -> None:
    base = torch.zeros(3, 2)
    view = base.t()
    inputs = static_inputs(view)
    inputs.leaves[0][1].add_(1)
    note_use(inputs, view)
    inputs.store([view])
    assert base.tolist() == [[0.0, 1.0]] * 3


def test_inputs_gradient_is_given_to_the_callers_leaf() -> None:
    inputs = static_inputs(torch.ones(2, requires_grad=True))
    (inputs.leaves[0] * 3).sum().backward()
    mine = torch.ones(2, requires_grad=True)
    note_use(inputs, mine)
    inputs.store([mine])
    assert mine.grad is not None
    assert mine.grad.tolist() == [3.0, 3.0]
    assert mine.grad.data_ptr() != inputs.leaves[0].grad.data_ptr()
    inputs.store([mine])
    assert mine.grad.tolist() == [6.0, 6.0]


def test_inputs_computed_outside_are_refused_a_gradient() -> None:
    computed = torch.ones(2, requires_grad=True) * 2
    inputs = static_inputs(computed)
    inputs.leaves[0].sum().backward()
    with pytest.raises(CaptureError) as caught:
        note_use(inputs, computed)
    assert caught.value.rule == "outer-graph"
    assert "`x0`" in caught.value.what
    assert "x0.detach()" in caught.value.fix


def test_inputs_that_are_one_tensor_stay_one_tensor() -> None:
    tensor = torch.zeros(2)
    inputs = static_inputs(tensor, tensor)
    inputs.leaves[0].add_(1)
    assert inputs.leaves[1].tolist() == [1.0, 1.0], "eager sees the write through both arguments"


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (torch.ones(1), True),
        (torch.ones(1, requires_grad=True), True),
        (torch.nn.Buffer(torch.ones(1)), True),
        (torch.nn.Parameter(torch.ones(1)), False),
        (1.0, False),
        (None, False),
    ],
    ids=str,
)
def test_copied_in_is_data_not_parameters(leaf: Any, expected: bool) -> None:
    assert is_copied_in(leaf) is expected


def test_on_device_leaves_the_devices_own_tensors_alone() -> None:
    leaves = [torch.ones(2), 3, torch.nn.Parameter(torch.ones(1))]
    assert all(a is b for a, b in zip(on_device(leaves, BACKEND), leaves, strict=True))
