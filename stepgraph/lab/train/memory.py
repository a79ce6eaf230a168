"""The memory of the device that a run trains on: in use, free, and the activations of an iteration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


class DeviceMemory:
    """Reads memory figures of a device. A CPU is asked for its free memory only: torch does not count its tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.activation_bytes: int | None = None
        """What the last measured iteration held above what it began with; None where it is not counted."""

    def used(self) -> int | None:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else None

    def free(self) -> int | None:
        """Memory that allocations can still get, the allocator's unused blocks included."""
        if self._device.type == "cuda":
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return torch.cuda.mem_get_info(self._device)[0] + unused
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the activations of an iteration."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        peak = torch.cuda.max_memory_allocated(self._device)
        self.activation_bytes = max(0, peak - before)


def in_mib(size: int | None) -> str:
    return "not counted" if size is None else f"{size / 2**20:.1f} MiB"
