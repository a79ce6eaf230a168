"""Real CUDA graphs. The only module that touches `torch.cuda`'s graphs.

What it adds to `torch.cuda.CUDAGraph`: one stream and one pool a session, also for warm-up, so that the memory that
eager warm-up cached is what the capture takes; the garbage collector held off (destroying another graph during a
capture breaks it); `thread_local` error mode, so that a DataLoader's pin-memory thread cannot; and a failed capture
that leaves the process usable: the stream capture is ended and the random generators are taken out of capture mode,
which torch leaves them in ("Offset increment outside graph capture encountered unexpectedly").
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stepgraph.backends.base import Backend, Graph, Workspace


def _runtime() -> Any | None:
    """The CUDA runtime's Python bindings, where they are installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return runtime


class CudaGraph(Graph):
    """One `torch.cuda.CUDAGraph` in a workspace's pool."""

    def __init__(self, workspace: CudaWorkspace, generators: Sequence[torch.Generator]) -> None:
        self._workspace = workspace
        self._generators = tuple(generators)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._nodes: int | None = None
        for generator in self._generators:
            self._graph.register_generator_state(generator)

    def begin(self) -> None:
        self._graph.capture_begin(self._workspace.pool_id, capture_error_mode="thread_local")

    def end(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._graph.capture_end()
        self._nodes = self._count_nodes()
        self._graph.instantiate()

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._graph.capture_end()
        for generator in (torch.cuda.default_generators[self._workspace.device_index], *self._generators):
            # pytorch leaves a generator in capture mode when the capture failed; a cloned state is out of it
            generator.graphsafe_set_state(generator.clone_state())
        with contextlib.suppress(RuntimeError):
            self._graph.reset()

    def replay(self) -> None:
        self._graph.replay()

    def free(self) -> None:
        self._graph.reset()

    @property
    def recorded_anything(self) -> bool:
        runtime = self._workspace.runtime
        if runtime is None:
            return True
        stream = runtime.cudaStream_t(self._workspace.stream_handle)
        info = runtime.cudaStreamGetCaptureInfo(stream)
        graph = info[3] if int(info[0]) == 0 and len(info) > 3 else None
        if graph is None:
            return True
        error, _, count = runtime.cudaGraphGetNodes(graph, 0)
        return int(error) != 0 or count > 0

    @property
    def nodes(self) -> int | None:
        return self._nodes

    def _count_nodes(self) -> int | None:
        runtime = self._workspace.runtime
        if runtime is None:
            return None
        error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(self._graph.raw_cuda_graph()), 0)
        return int(count) if int(error) == 0 else None


class CudaWorkspace(Workspace):
    """One side stream and one private memory pool on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device_index = device.index or 0
        self._stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what building the model left cached is of no use to a private pool
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        self._anchor: CudaGraph | None = None
        self.runtime = _runtime()

    @property
    def pool_id(self) -> Any:
        assert self._pool is not None, "the workspace is closed"
        return self._pool.id

    @property
    def stream_handle(self) -> int:
        return int(self._stream.cuda_stream)

    def graph(self, generators: Sequence[torch.Generator] = ()) -> CudaGraph:
        return CudaGraph(self, [g for g in generators if g.device.type == "cuda"])

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self._device)
        if outer == self._stream:
            yield
            return
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    @contextlib.contextmanager
    def warming_up(self, *, first: bool = False) -> Iterator[None]:
        if first:
            # state made now lives on; among a pool's blocks it would only break them up
            with self.stream():
                yield
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        else:
            with self.stream(), self._allocating_in_pool():
                yield

    @contextlib.contextmanager
    def _allocating_in_pool(self) -> Iterator[None]:
        """Let eager work on the stream, in autograd's threads too, allocate from the pool that captures will use."""
        begin: Callable[..., None] | None = getattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", None)
        if begin is None:
            yield
            return
        begin(self.device_index, self.pool_id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.device_index, self.pool_id)
            torch._C._cuda_releasePool(self.device_index, self.pool_id)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        enabled = gc.isenabled()
        gc.disable()
        try:
            with self.stream():
                self._drop_anchor()
                yield
        finally:
            if enabled:
                gc.enable()

    def _drop_anchor(self) -> None:
        """Keep one empty graph in the pool for as long as it is used.

        When the last graph of a pool is freed, torch's host allocator forgets the pool and asserts at the next capture
        (CachingHostAllocator.h: use_count > 0).
        """
        if self._anchor is None:
            self._anchor = CudaGraph(self, ())
            self._anchor.begin()
            self._anchor.end()

    def pool_bytes(self) -> int:
        if self._pool is None:
            return 0
        pool = tuple(self.pool_id)
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == pool)

    def close(self) -> None:
        if self._anchor is not None:
            self._anchor.free()
            self._anchor = None
        self._pool = None


class CudaBackend(Backend):
    """CUDA graphs on one GPU."""

    name = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)

    def workspace(self) -> CudaWorkspace:
        with torch.cuda.device(self.device):
            return CudaWorkspace(self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
