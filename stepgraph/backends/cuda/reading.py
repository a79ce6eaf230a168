"""Small results on their way from the GPU to the host, with nobody waiting for them."""

from __future__ import annotations

import torch

from stepgraph.backends.base import Reading


class CudaReading(Reading):
    """A copy into pinned memory, queued on the caller's stream, and an event behind it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def is_ready(self) -> bool:
        return bool(self._arrived.query())

    def value(self) -> torch.Tensor:
        self._arrived.synchronize()
        return self._host
