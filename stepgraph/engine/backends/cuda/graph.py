"""A CUDA workspace records graphs on one stream, in one pool. Only this module touches `torch.cuda`'s graphs.

It adds to `torch.cuda.CUDAGraph`: one stream and one pool for each session, also for warm-up, so that a capture takes
the memory that warm-up cached; the garbage collector held off, because destroying a graph during a capture breaks it;
`thread_local` error mode, so that a DataLoader's pin-memory thread cannot break it; and a failed capture that leaves
the process usable: the stream capture is ended, its pool is left, and the random generators are taken out of capture
mode, in which torch leaves them ("Offset increment outside graph capture encountered unexpectedly").
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from stepgraph.core.collector import collector_at_rest
from stepgraph.core.errors import CaptureRefused
from stepgraph.core.storage import storage_of
from stepgraph.engine.backends.base import Graph, RandomUse, Workspace
from stepgraph.engine.backends.cuda.nodes import read_nodes
from stepgraph.engine.backends.cuda.order import StreamOrder, order_of_draws
from stepgraph.engine.backends.cuda.rng import Origin, StateCalls, advance_under_capture, offset_under_capture
from stepgraph.engine.backends.nodes import Nodes
from stepgraph.engine.backends.resizing import refusing_resizes


def _runtime() -> Any | None:
    """The CUDA runtime's Python bindings, where they are installed; importing them takes a tenth of a second."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return runtime


def _register(graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
    """Register generators with a graph.

    A generator's first graph makes the tensors that hold its seed and offset on the device, and every later capture and
    replay fills them: made under inference mode they could only be filled under it (pytorch#166792). The default
    generator is among them because `capture_begin` would register it by itself, in whatever mode it is called.
    """
    with torch.inference_mode(False):
        for generator in generators:
            graph.register_generator_state(generator)


def _begin(graph: torch.cuda.CUDAGraph, pool: Any) -> bool:
    """Begin a capture; whether that, and so each replay, needs inference mode.

    It does where another library's graph was captured under inference mode and is alive: it shares the generator's
    tensors for seed and offset.
    """
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        return False
    except RuntimeError as error:
        if "inference tensor" not in str(error) or torch.is_inference_mode_enabled():
            raise
    with torch.inference_mode():
        graph.capture_begin(pool, capture_error_mode="thread_local")
    return True


class CudaGraph(Graph):
    """One `torch.cuda.CUDAGraph` in a workspace's pool."""

    def __init__(self, workspace: CudaWorkspace, generators: Sequence[torch.Generator], lane: int) -> None:
        self._workspace, self._runtime = workspace, _runtime()
        self._lane = lane
        self._generators = tuple(generators)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._nodes: int | None = None
        self._in_inference_mode = self._replays_from = False
        self._refused: CaptureRefused | None = None
        self.random = RandomUse()
        self._known = (workspace.default_generator, *self._generators)
        self._states = [g.graphsafe_get_state() for g in self._known]  # a fork moves them between generators
        self.follow = workspace.order.follow
        _register(self._graph, self._known)

    def begin(self) -> None:
        self._in_inference_mode = _begin(self._graph, self._workspace.pool_of(self._lane))
        self._workspace.random.graph = self

    def refuse(self, error: CaptureRefused) -> None:
        self._refused = self._refused or error
        raise error

    def end(self) -> None:
        if self._refused is not None:
            raise self._refused
        if not self._replays_from:
            self._note_moved()
        self._workspace.random.graph = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._graph.capture_end()
        self._nodes = self._count_nodes()
        self._graph.instantiate()
        self._workspace.alive.add(self)

    def abort(self) -> None:
        self._workspace.random.graph = None
        broken = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._graph.capture_end()
        except RuntimeError:
            broken = True
        with contextlib.suppress(RuntimeError):
            self._graph.reset()
        if broken:
            self._workspace.abandon_pool(self._generators, self._lane)

    def replay(self) -> None:
        if self.random.draws:
            self._workspace.draws.follow()
        if self._in_inference_mode:
            with torch.inference_mode():
                self._graph.replay()
        else:
            self._graph.replay()

    @property
    def launch(self) -> Callable[[], None]:
        if self._in_inference_mode or self.random.draws:
            return self.replay
        return functools.partial(torch._C._CUDAGraph.replay, self._graph)

    def will_replay_from(self) -> None:
        self._note_moved()
        self._replays_from = True
        # torch gives a graph's kernels the generators' positions only if the graph moves them; `replay_from` undoes it
        advance_under_capture(self._states)

    def _note_moved(self) -> None:
        pairs = zip(self._known, self._states, strict=True)
        self.random.moved = [generator for generator, state in pairs if offset_under_capture(state)]

    def random_origin(self) -> Origin:
        return Origin(self._states)

    def replay_from(self, origin: Origin) -> None:
        with origin.in_place():
            self.replay()

    def free(self) -> None:
        self._workspace.before_free()
        self._workspace.alive.discard(self)
        self._graph.reset()

    @property
    def recorded_anything(self) -> bool:
        runtime = self._runtime
        if runtime is None:
            return True
        stream = runtime.cudaStream_t(int(self._workspace.capture_stream.cuda_stream))
        info = runtime.cudaStreamGetCaptureInfo(stream)
        graph = info[3] if int(info[0]) == 0 and len(info) > 3 else None
        if graph is None:
            return True
        error, _, count = runtime.cudaGraphGetNodes(graph, 0)
        return int(error) != 0 or count > 0

    @property
    def nodes(self) -> int | None:
        return self._nodes

    def read_nodes(self) -> Nodes | None:
        return read_nodes(self._graph.raw_cuda_graph())

    def _count_nodes(self) -> int | None:
        runtime = self._runtime
        if runtime is None:
            return None
        error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(self._graph.raw_cuda_graph()), 0)
        return int(count) if int(error) == 0 else None


class _Pool:
    """A private memory pool, kept alive by an empty graph.

    When the last graph of a pool is freed, torch forgets the pool, and asserts if its id is used again
    (CachingHostAllocator.h: use_count > 0).
    """

    def __init__(self, stream: torch.cuda.Stream, generators: Sequence[torch.Generator]) -> None:
        self.id: Any = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        _register(self._anchor, generators)
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            _begin(self._anchor, self.id)
            self._anchor.capture_end()

    def free(self) -> None:
        self._anchor.reset()


class CudaWorkspace(Workspace):
    """One side stream and one private memory pool on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device_index = device.index or 0
        self.capture_stream = torch.cuda.Stream(device)
        self.order = StreamOrder(torch.device("cuda", self.device_index))
        self.draws = order_of_draws(device)
        self._callers: dict[int, torch.cuda.Stream] = {}
        """The streams of calls that were recorded: the graphs' static memory comes from them."""
        self.random = StateCalls()
        self.alive: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        """Graphs that may be replayed."""
        self._warms_in_pool = True
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what building the model left cached is of no use to a private pool
        self._pools: dict[int, _Pool] = {}
        """A pool for each lane."""
        self._pool_ids: set[tuple[int, ...]] = set()
        self._closed = False
        self.pool_of(0)

    def before_free(self) -> None:
        """Before static memory of a graph is freed: wait for a replay on another stream that may still use it."""
        with contextlib.suppress(RuntimeError):  # at the exit of the process nothing is left to wait for
            self.order.queue_behind(self._callers.values())

    def pool_of(self, lane: int) -> Any:
        assert not self._closed, "the workspace is closed"
        if lane not in self._pools:
            self._new_pool(lane, (self.default_generator,))
        return self._pools[lane].id

    def _new_pool(self, lane: int, generators: Sequence[torch.Generator]) -> None:
        self._pools[lane] = _Pool(self.capture_stream, generators)
        self._pool_ids.add(tuple(self._pools[lane].id))

    @property
    def default_generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device_index]

    def graph(self, generators: Sequence[torch.Generator] = (), lane: int = 0) -> CudaGraph:
        return CudaGraph(self, [g for g in generators if g.device.type == "cuda"], lane)

    def abandon_pool(self, generators: Sequence[torch.Generator], lane: int) -> None:
        """Leave a pool that a broken capture was recording to, and record to a new one from now on.

        torch ends a pool's recording only when the capture ended well. Its device allocator can be reset; the one for
        pinned memory cannot, and would refuse the pool. The random generators are left in capture mode, too; the empty
        capture of the new pool takes them out of it, in place, because other graphs know them.
        """
        pool = self._pools.pop(lane)
        with contextlib.suppress(RuntimeError):  # it had not begun
            torch._C._cuda_endAllocateToPool(self.device_index, pool.id)
            torch._C._cuda_releasePool(self.device_index, pool.id)
        pool.free()  # graphs recorded before keep it in being; without any its memory can go
        self._new_pool(lane, (self.default_generator, *generators))

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self._device)
        if outer == self.capture_stream:
            yield
            return
        self._callers[int(outer.cuda_stream)] = outer
        self.order.queue_behind([outer])
        self.capture_stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.capture_stream):
                yield
        finally:
            outer.wait_stream(self.capture_stream)

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        # graphs overwrite free memory of the pool: what an eager call leaves behind must not be there
        self._warms_in_pool = not self.alive
        with self.stream():
            self._route_to_pool()
            try:
                yield
            finally:
                self._route_away()

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        # on the default stream, whose free memory, left over from building the model, no other stream can use
        self._route_away()
        default = torch.cuda.default_stream(self._device)
        default.wait_stream(self.capture_stream)
        try:
            with torch.cuda.stream(default):
                yield
        finally:
            self.capture_stream.wait_stream(default)
            self._route_to_pool()

    def _route_to_pool(self) -> None:
        """Let eager work on the stream, also in autograd's threads, allocate from the pool of the captures."""
        if self._warms_in_pool and hasattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool"):
            torch._C._cuda_beginAllocateCurrentStreamToPool(self.device_index, self.pool_of(0))

    def _route_away(self) -> None:
        if self._warms_in_pool and hasattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool"):
            torch._C._cuda_endAllocateToPool(self.device_index, self.pool_of(0))
            torch._C._cuda_releasePool(self.device_index, self.pool_of(0))

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        try:
            with (
                collector_at_rest(),
                self.stream(),
                self.random.watched(),
                refusing_resizes(lambda: self.random.graph),
            ):
                yield
        finally:
            torch.cuda.empty_cache()  # what the preparations left cached on the capture stream, the caller cannot use

    def renew(self) -> None:
        self._pools.pop(0).free()
        torch.cuda.empty_cache()
        self._new_pool(0, (self.default_generator,))

    def _segments(self) -> list[Any]:
        return [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", ())) in self._pool_ids]

    def pool_bytes(self) -> int:
        return sum(segment["total_size"] for segment in self._segments())

    def held(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        found = [(own.data_ptr(), t) for t in tensors if t.is_cuda and (own := storage_of(t)) is not None]
        ranges = [(s["address"], s["total_size"]) for s in self._segments()] if found else []
        return [t for begin, t in found if any(0 <= begin - address < size for address, size in ranges)]

    def close(self) -> None:
        self._closed = True
        for pool in self._pools.values():
            pool.free()
        self._pools.clear()
