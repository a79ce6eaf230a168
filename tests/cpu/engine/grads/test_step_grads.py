"""Copies of gradients in host memory, and stand-ins for gradients at their own addresses."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph.engine.grads.step_grads import GradCapture, at_same_address, copies_on_host

_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex128, torch.int8, torch.bool]


@st.composite
def _dense(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(_DTYPES))
    made = (torch.randn(shape, dtype=torch.float64) * 8).to(dtype)
    return made.permute(draw(st.permutations(range(len(shape)))))


@settings(max_examples=60, deadline=None)
@given(st.lists(_dense(), max_size=6))
def test_copies_have_bits_and_strides_of_the_originals(tensors: list[torch.Tensor]) -> None:
    copies = copies_on_host(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.dtype is tensor.dtype
        assert copy.shape == tensor.shape
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)


def test_copies_on_host_are_independent_of_originals_and_others() -> None:
    tensors = [torch.full((3, 5), float(i)) for i in range(4)]
    copies = copies_on_host(tensors)
    for tensor in tensors:
        tensor.zero_()
    copies[1].fill_(9.0)
    assert [copy.unique().tolist() for copy in copies] == [[0.0], [9.0], [2.0], [3.0]]


def test_copies_know_no_autograd_and_no_default_device() -> None:
    weight = torch.randn(4, requires_grad=True)
    with torch.device("meta"):
        (copy,) = copies_on_host([weight * 2])
    assert not copy.requires_grad
    assert copy.device.type == "cpu"
    assert torch.equal(copy, weight.detach() * 2)


@settings(max_examples=60, deadline=None)
@given(_dense(), st.integers(0, 3))
def test_at_same_address_has_form_and_memory_of_a_tensor(tensor: torch.Tensor, offset: int) -> None:
    if not tensor.numel():
        return
    flat = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)
    part = flat.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)  # as in a flat buffer
    for original in (tensor, part):
        found = at_same_address(original)
        assert found.data_ptr() == original.data_ptr()
        assert (found.shape, found.stride(), found.dtype) == (original.shape, original.stride(), original.dtype)
        assert torch.equal(found, original)
        assert found.untyped_storage()._cdata != original.untyped_storage()._cdata


def test_at_same_address_ends_by_itself_and_keeps_memory() -> None:
    grad = torch.arange(64.0)
    stand_in = at_same_address(grad)
    ended: list[object] = []
    watch = weakref.ref(stand_in.untyped_storage(), ended.append)
    view = stand_in[8:]
    del grad
    gc.collect()
    assert torch.equal(view, torch.arange(64.0)[8:]), "the memory is kept"
    del stand_in
    assert not ended, "a view of it is in use"
    del view
    assert ended == [watch]


def test_at_same_address_knows_no_autograd() -> None:
    grad = torch.ones(3, requires_grad=True)
    stand_in = at_same_address(grad)
    assert not stand_in.requires_grad
    assert not stand_in._is_view()


def test_gradient_in_the_way_of_a_graph_is_refused_by_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of a later graph that stays in the pool is an error of ours, and the tape says so."""
    monkeypatch.setattr(GradCapture, "move_out", lambda self, held: False)
    torch.manual_seed(0)
    models, order = [nn.Linear(4, 2), nn.Linear(4, 2)], random.Random(0)

    def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    with stepgraph.capture(train) as step, pytest.raises(stepgraph.StepgraphError, match="can still reach"):
        for _ in range(12):
            for model in order.sample(models, 2):
                step(model, torch.ones(3, 4))
            for model in models:
                model.zero_grad()
