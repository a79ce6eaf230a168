"""The order of copies and computing on a GPU: who waits for whom, seen through events on a stream that is kept busy."""

from __future__ import annotations

import pytest
import torch

import stepgraph
from stepgraph.engine.backends import CopyStream

pytestmark = pytest.mark.gpu

LONG = 1_000_000_000
"""Cycles: some half a second, for which the host never waits before it has asked."""


@pytest.fixture
def stream() -> CopyStream:
    return stepgraph.backend_for("cuda").copy_stream()


def copied(stream: CopyStream, target: torch.Tensor, source: torch.Tensor, *, after_caller: bool) -> torch.cuda.Event:
    """Queue a copy; the event is reached when it is done."""
    done = torch.cuda.Event()
    with stream.copying(after_caller=after_caller):
        target.copy_(source, non_blocking=True)
        done.record()
    return done


def busy() -> torch.cuda.Event:
    """Keep the current stream busy; the event is reached when it is free again."""
    free = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    free.record()
    return free


def test_copy_waits_for_marked_use_and_not_for_what_follows(stream: CopyStream) -> None:
    buffer, pinned = torch.zeros(4, device="cuda"), torch.ones(4).pin_memory()
    torch.cuda.synchronize()
    in_use = busy()
    seen = buffer.clone()
    stream.mark_used()
    later = busy()
    done = copied(stream, buffer, pinned, after_caller=False)
    done.synchronize()
    assert in_use.query()
    assert not later.query()
    assert seen.tolist() == [0.0] * 4
    assert buffer.tolist() == [1.0] * 4


def test_copy_after_the_caller_waits_for_all_it_has_queued(stream: CopyStream) -> None:
    buffer, source = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    stream.mark_used()
    torch.cuda.synchronize()
    queued = busy()
    source.fill_(3.0)
    done = copied(stream, buffer, source, after_caller=True)
    done.synchronize()
    assert queued.query()
    assert buffer.tolist() == [3.0] * 4


def test_caller_waits_for_the_copy(stream: CopyStream) -> None:
    buffer, pinned = torch.zeros(4, device="cuda"), torch.full((4,), 2.0).pin_memory()
    torch.cuda.synchronize()
    with stream.copying(after_caller=False):
        torch.cuda._sleep(LONG)
        buffer.copy_(pinned, non_blocking=True)
    assert (buffer + 1).tolist() == [3.0] * 4


def test_loader_reads_on_the_callers_stream_copies_on_its_own() -> None:
    """An iterator that works on the GPU does so where it would in eager."""
    streams = []

    def data() -> object:
        while True:
            streams.append(torch.cuda.current_stream())
            yield torch.full((2,), float(len(streams)), device="cuda")

    loader = stepgraph.StaticBufferLoader("cuda")
    iterator, side = data(), torch.cuda.Stream()
    for call in range(3):
        with torch.cuda.stream(side):
            loaded = loader.load(iterator, 2)
            found = [microbatch.sum() for microbatch in loaded.data_iterator()]
            loader.release(loaded)
            assert [value.item() for value in found] == [2.0 * (2 * call + 1), 2.0 * (2 * call + 2)]
    assert set(streams) == {side}


def test_wrapper_never_fills_buffers_that_a_replay_still_reads() -> None:
    """The host runs ahead: each replay reads its microbatch long after the next call has begun."""
    weight = torch.ones(1024, device="cuda")

    def run(*, data_iterator: object, **rest: object) -> torch.Tensor:
        torch.cuda._sleep(LONG // 4)
        return next(data_iterator) * weight  # type: ignore[call-overload]

    call = {"forward_step_func": None, "model": None, "num_microbatches": 1}
    with stepgraph.FullCudaGraphWrapper(run, backend="cuda") as wrapped:
        results = []
        for index in range(6):
            pinned = torch.full((1024,), float(index)).pin_memory()
            results.append(wrapped(data_iterator=iter([pinned]), **call))
            torch.cuda._sleep(LONG // 4)
        assert [result.unique().tolist() for result in results] == [[float(index)] for index in range(6)]
