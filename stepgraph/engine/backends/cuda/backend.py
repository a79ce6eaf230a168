"""The CUDA backend gives a session what it needs from one GPU: workspaces for graphs, side copies, host reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from stepgraph.engine.backends.base import Backend, CopyStream, Reading
from stepgraph.engine.backends.cuda.graph import CudaWorkspace


class CudaCopyStream(CopyStream):
    """One side stream, ordered with the caller's by events; the host waits for neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._used = torch.cuda.Event()

    @contextlib.contextmanager
    def copying(self, *, after_caller: bool) -> Iterator[None]:
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_event(self._used)  # nothing to wait for where nothing was marked yet
        if after_caller:
            self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def mark_used(self) -> None:
        self._used.record(torch.cuda.current_stream(self._device))


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


class CudaBackend(Backend):
    """CUDA graphs on one GPU."""

    name = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)

    def workspace(self) -> CudaWorkspace:
        with torch.cuda.device(self.device):
            return CudaWorkspace(self.device)

    def copy_stream(self) -> CudaCopyStream:
        return CudaCopyStream(self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @property
    def capture_probe(self) -> Callable[[], bool]:
        return getattr(torch._C, "_cuda_isCurrentStreamCapturing", self.is_capturing)

    @property
    def default_generator(self) -> torch.Generator:
        torch.cuda.init()
        return torch.cuda.default_generators[self.device.index]

    def swap_random_state(self, generator: torch.Generator) -> None:
        # not the states' values but the objects that hold them, which graphs know; nothing is left to do at a replay
        default = self.default_generator
        held = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        generator.graphsafe_set_state(held)

    def can_record_here(self) -> bool:
        return torch.cuda.current_stream(self.device) != torch.cuda.default_stream(self.device)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def read_later(self, tensor: torch.Tensor) -> CudaReading:
        return CudaReading(tensor)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
