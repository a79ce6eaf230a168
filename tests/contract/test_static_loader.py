"""Static buffers for microbatches: found by what a microbatch looks like, filled ahead of the iteration."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stepgraph


def source(device: torch.device, *, width: int = 4, first: float = 0.0) -> Iterator[dict[str, Any]]:
    """Microbatches of one tensor, which holds their number."""
    return ({"x": torch.full((2, width), value, device=device), "n": 3} for value in itertools.count(first))


def values(microbatches: Any) -> list[float]:
    return [microbatch["x"][0, 0].item() for microbatch in microbatches.data_iterator()]


def addresses(microbatches: Any) -> list[int]:
    return [microbatch["x"].data_ptr() for microbatch in microbatches.data_iterator()]


@pytest.fixture
def loader(device: torch.device) -> stepgraph.StaticBufferLoader:
    return stepgraph.StaticBufferLoader(stepgraph.backend_for(device))


def test_loader_fills_the_same_buffers_again(loader: stepgraph.StaticBufferLoader, device: torch.device) -> None:
    data = source(device)
    first = loader.load(data, 3)
    assert values(first) == [0, 1, 2]
    before = addresses(first)
    assert len(set(before)) == 3
    second = loader.load(data, 3)
    assert second is first
    assert values(second) == [3, 4, 5]
    assert addresses(second) == before
    assert next(second.data_iterator())["n"] == 3
    assert next(data)["x"][0, 0].item() == 6  # not read any further


def test_loader_buffers_are_on_the_backends_device(device: torch.device) -> None:
    """Host memory, pinned or not, and device memory are all welcome."""
    loader = stepgraph.StaticBufferLoader(stepgraph.Session(stepgraph.backend_for(device)))
    places = [torch.ones(2), torch.full((2,), 2.0, device=device)]
    if device.type == "cuda":
        places.append(torch.full((2,), 3.0).pin_memory())
    loads = []
    for index, tensor in enumerate(places):
        loads.append(loader.load(iter([tensor, tensor]), 2))
        buffers = list(loads[-1].data_iterator())
        assert [buffer.tolist() for buffer in buffers] == [[index + 1.0] * 2] * 2
        assert {buffer.device.type for buffer in buffers} == {device.type}
        assert buffers[0].data_ptr() != buffers[1].data_ptr()
    assert [load is loads[0] for load in loads] == {"cpu": [True, True], "cuda": [True, False, True]}[device.type]


def test_loader_host_data_has_the_strides_of_eager(loader: stepgraph.StaticBufferLoader, device: torch.device) -> None:
    """`.to(device)` makes a copy dense where it copies; a kernel may depend on that."""
    whole = torch.arange(20.0).view(4, 5)
    for tensor in (whole[:, 1:], whole.t(), whole[0].expand(3, 5)):
        (buffer,) = loader.load(iter([tensor]), 1).data_iterator()
        assert buffer.stride() == tensor.to(device).stride()
        assert torch.equal(buffer, tensor.to(device))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 5),
        torch.zeros(2, 4, dtype=torch.float64),
        torch.zeros(4, 2).t(),
        torch.zeros(2, 4, requires_grad=True),
        (torch.zeros(2, 4),),
        {"x": torch.zeros(2, 4)},
        None,
        7,
    ],
    ids=["shape", "dtype", "strides", "requires_grad", "tuple", "dict", "none", "number"],
)
def test_loader_different_microbatch_has_other_buffers(
    loader: stepgraph.StaticBufferLoader, other: Any, device: torch.device
) -> None:
    plain = torch.zeros(2, 4)
    first = loader.load(iter([plain]), 1)
    second = loader.load(iter([other]), 1)
    assert second is not first
    assert repr(second) != repr(first)
    assert loader.load(iter([plain]), 1) is first
    assert loader.load(iter([other]), 1) is second


def test_loader_plain_values_belong_to_the_layout(loader: stepgraph.StaticBufferLoader) -> None:
    def load(number: float) -> Any:
        return loader.load(iter([{"x": torch.ones(2), "scale": number}]), 1)

    assert load(1.0) is load(1.0)
    assert load(1.0) is not load(2.0)
    assert next(load(2.0).data_iterator())["scale"] == 2.0
    assert load(1) is not load(1.0)


def test_loader_fewer_microbatches_use_the_first_buffers(
    loader: stepgraph.StaticBufferLoader, device: torch.device
) -> None:
    data = source(device)
    four = loader.load(data, 4)
    held = loader.num_bytes
    assert held == four.num_bytes == 4 * 2 * 4 * 4
    two = loader.load(data, 2)
    assert two is not four
    assert addresses(two) == addresses(four)[:2]
    assert loader.num_bytes == held


def test_loader_chunks_own_their_buffers(loader: stepgraph.StaticBufferLoader, device: torch.device) -> None:
    loaded = loader.load([source(device), None, source(device, first=10.0)], 2)
    first, none, third = loaded.data_iterator()
    assert none is None
    assert [m["x"][0, 0].item() for m in first] == [0, 1]
    assert [m["x"][0, 0].item() for m in third] == [10, 11]
    assert loaded.num_bytes == 4 * 2 * 4 * 4
    assert repr(loaded).startswith("chunk 0: 2 x (microbatch['x']=f32[2, 4] ")
    assert "; chunk 1: none; chunk 2: 2 x (" in repr(loaded)


def test_loader_keeps_no_more_layouts_than_allowed(device: torch.device) -> None:
    loader = stepgraph.StaticBufferLoader(stepgraph.backend_for(device), max_layouts=2)
    kept = [loader.load(source(device, width=width), 1) for width in (1, 2)]
    held = loader.num_bytes
    extra = loader.load(source(device, width=3), 1)
    assert values(extra) == [0]
    assert loader.num_bytes == held
    assert loader.load(source(device, width=3), 1) is not extra
    gone = weakref.ref(next(extra.data_iterator())["x"])
    del extra
    gc.collect()
    assert gone() is None
    assert [loader.load(source(device, width=width), 1) for width in (1, 2)] == kept


def test_loader_reset_frees_the_buffers(loader: stepgraph.StaticBufferLoader, device: torch.device) -> None:
    data = source(device)
    buffer = weakref.ref(next(loader.load(data, 2).data_iterator())["x"])
    assert buffer() is not None
    loader.reset()
    gc.collect()
    assert buffer() is None
    assert loader.num_bytes == 0
    assert values(loader.load(data, 2)) == [2, 3]


def test_loader_after_an_iterator_that_ended_goes_on(
    loader: stepgraph.StaticBufferLoader, device: torch.device
) -> None:
    data = source(device)
    first = loader.load(data, 3)
    with pytest.raises(stepgraph.InvalidArgument, match="chunk 1 ended after 2 of 3 microbatches"):
        loader.load([source(device), itertools.islice(data, 2)], 3)
    with pytest.raises(ZeroDivisionError):  # an error of the data's own is handed on
        loader.load((1 // (1 - i) for i in range(3)), 3)
    assert loader.load(data, 3) is first
    assert values(first) == [5, 6, 7]


def test_loader_lets_go_of_the_tensors_it_read(loader: stepgraph.StaticBufferLoader) -> None:
    tensor = torch.ones(2)
    alive = weakref.ref(tensor)
    loaded = loader.load(iter([tensor]), 1)
    loader.release(loaded)
    del tensor
    assert alive() is None


def test_loader_released_buffers_keep_data_until_the_next_load(
    loader: stepgraph.StaticBufferLoader, device: torch.device
) -> None:
    """The next load waits for the work that was queued before the release."""
    data = source(torch.device("cpu"))
    for call in range(20):
        loaded = loader.load(data, 2)
        work = [microbatch["x"].double().sum() for microbatch in loaded.data_iterator()]
        loader.release(loaded)
        later = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        loader.load(data, 2)
        assert [w.item() for w in work] == [8.0 * (4 * call), 8.0 * (4 * call + 1)]
        assert later[0, 0].item() == 64
