"""Tensors that a step leaves somewhere: what is a place, and what is not."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stepgraph.engine.observe.escaped_tensors import is_newborn, kept_tensor, tracking_new_objects


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_search_in_another_thread_does_not_count_as_a_holder() -> None:
    """In the middle of a search its lists hold every new tensor there is, those of other threads too."""
    begun, ended = threading.Event(), threading.Event()

    def pausing(_: list[torch.Tensor]) -> list[torch.Tensor]:
        begun.set()
        assert ended.wait(10)
        return []

    with ThreadPoolExecutor(1) as other, tracking_new_objects():
        tensor = torch.full((1,), 1234.5)

        def recorded(found: list[torch.Tensor]) -> list[torch.Tensor]:
            """The other search begins when this one has seen what is new; it pauses, or waits for this one's end."""
            other.submit(kept_tensor, [], pausing, kept_tensor)
            begun.wait(0.3)
            return [new for new in found if new.tolist() == [1234.5]]

        place = kept_tensor([], recorded, kept_tensor)
        ended.set()
    assert tensor.item() == 1234.5
    assert place is None


def test_new_tuple_that_holds_a_tensor_is_no_place() -> None:
    """It is what remains of the call, as any container that was made in it."""
    with tracking_new_objects():
        held = (torch.full((1,), 1234.5),)
        place = kept_tensor([], lambda found: [new for new in found if new.tolist() == [1234.5]], kept_tensor)
    assert held[0].item() == 1234.5
    assert place is None


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize(
    "search",
    [lambda: is_newborn(threading.current_thread()), lambda: kept_tensor([], lambda _: [], kept_tensor)],
    ids=["is_newborn", "kept_tensor"],
)
def test_search_leaves_tuples_that_other_threads_fill(search: Callable[[], object]) -> None:
    """A reference to a tuple that is being filled makes Python raise SystemError in the thread that fills it."""
    end = time.monotonic() + 1.5

    def fill() -> None:
        while time.monotonic() < end:
            tuple(number for number in range(50))

    with ThreadPoolExecutor(1) as other:
        filling = other.submit(fill)
        while not filling.done():
            search()
        filling.result()
