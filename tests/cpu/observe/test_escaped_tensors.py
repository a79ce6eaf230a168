"""Tensors that a step leaves somewhere: what is a place, and what is not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from stepgraph.observe.escaped_tensors import kept_tensor, setting_apart


def test_search_in_another_thread_keeps_no_tensor() -> None:
    """In the middle of a search its lists hold every new tensor there is, those of other threads too."""
    begun, ended = threading.Event(), threading.Event()

    def pausing(_: list[torch.Tensor]) -> list[torch.Tensor]:
        begun.set()
        assert ended.wait(10)
        return []

    with ThreadPoolExecutor(1) as other, setting_apart():
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
