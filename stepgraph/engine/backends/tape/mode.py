"""The tape records and replays on the CPU, as CUDA graphs do on a GPU.

A dispatch mode sees every ATen operator that forward, backward, an optimizer, a custom operator or a collective runs.
While a `TapeGraph` records, each operator is executed, because Python needs real tensors to go on, and noted with the
addresses of its arguments. At the end everything it wrote is put back, so that capture itself has no effect; memory
made in the capture is filled with NaN until the first replay. A replay runs the noted operators again, into the same
memory. Collectives are noted and not executed (`collectives`).

It refuses what CUDA refuses (`refusals`), with the user's line. It models the pool's addresses (`memory`), raises when
a graph is about to read memory that another graph's replay has overwritten, and turns numbers that a caller has kept in
such memory into NaN. It does not model:

- The device boundary: `.to("cpu")` on a CPU tensor is no copy, so it passes.
- Streams, events and their order; everything runs in one.
- Kernels: it notes ATen operators, not launches, and knows nothing of cuBLAS or cuDNN.
- Compiled code: under the tape `torch.compile` runs its eager operators, in warm-up too.
- Messages that bypass the dispatcher: a process group written in Python, a store, a kernel's own threads. They are
  sent while recording, and not at replays.
- The order in which a replay waits: it waits for each collective at once, except for sends and receives in a row.
- Speed: a replay costs about what eager does.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from stepgraph.core.ambient import OwnMode
from stepgraph.core.catalogue import entry
from stepgraph.core.collector import collector_at_rest
from stepgraph.core.errors import CaptureRefused
from stepgraph.core.executed_code import TrackingPaused
from stepgraph.core.frames import user_location
from stepgraph.core.storage import storage_of
from stepgraph.engine.backends.base import Backend, Graph, Workspace
from stepgraph.engine.backends.kernels import LooksInside, may_be_python, python_kernel
from stepgraph.engine.backends.resizing import refusing_resizes
from stepgraph.engine.backends.tape.graph import Head, TapeGraph
from stepgraph.engine.backends.tape.memory import TapePool
from stepgraph.engine.backends.tape.op import PythonKernel, has_memory
from stepgraph.engine.backends.tape.refusals import HostReadGuard, OperatorGuard, is_lift, unseen_by_modules
from stepgraph.engine.backends.tape.rng import RandomCalls, recorded_rng_calls
from stepgraph.engine.backends.threads import compiled_code_runs_eagerly, control_flow_is_compiled

_QUESTIONS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")
)
"""What C++ code asks of a nested tensor where it cannot pass on an error: a refusal there would end the process."""


class RecordingMode(dispatch.TorchDispatchMode, OwnMode, LooksInside):
    """The dispatch mode that hands each operator to the graph being recorded."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: around a recording compiled code runs eagerly, and torch's wrapper costs as much as some operators."""
        return False

    def __init__(self, head: Head, guard: HostReadGuard, random: RandomCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._head, self._guard = head, guard
        self._operators = OperatorGuard(guard)
        self._kernel: PythonKernel | None = None
        """The kernel in Python that runs now."""
        self.random = random

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        graph = self._head.graph
        if graph is None or (self._kernel is not None and self._kernel.reads):
            return func(*args, **(kwargs or {}))
        if may_be_python(func) and (kernel := python_kernel(func, args, kwargs or {})) is not None:
            return graph.record(func, args, kwargs or {}, PythonKernel(kernel, self._looking_inside))
        with TrackingPaused():
            return self._record(graph, func, types, args, kwargs or {})

    @contextlib.contextmanager
    def _looking_inside(self, kernel: PythonKernel) -> Iterator[None]:
        """Record what a kernel in Python calls, and log it where the log above has handed it down."""
        above, self.above = self.above, None
        outer, self._kernel = self._kernel, kernel

        def note(_: CaptureRefused) -> None:
            kernel.reads = True

        guard = HostReadGuard(note)
        guard.running = self._guard.running
        try:
            with guard, self, above or contextlib.nullcontext():
                yield
        finally:
            self._kernel = outer

    def _record(
        self, graph: TapeGraph, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            graph.refuse(CaptureRefused(entry("tape-limit"), f"higher-order operator {func}", user_location()))
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        if not all(has_memory(t) for t in types):
            return NotImplemented  # a wrapper around other tensors: let it take itself apart first
        with torch._C.DisableTorchFunction():
            if self._operators.is_check(func):
                return 0 if func._schema.name == "aten::_local_scalar_dense" else func(*args, **kwargs)
            error = self._operators.refusal(func, args, kwargs)
            if error is not None:
                graph.refuse(error)
            if is_lift(func):
                graph.adopt(args[0])
                return func(*args)
            return graph.record(func, args, kwargs)


class TapeWorkspace(Workspace):
    """One pool of addresses and one recording head."""

    def __init__(self) -> None:
        self._pool = TapePool()
        self._head = Head()
        self._random = RandomCalls(self._head)

    def graph(self, generators: Sequence[torch.Generator] = (), lane: int = 0) -> TapeGraph:
        own = [g for g in generators if g is not torch.default_generator and g.device.type == "cpu"]
        return TapeGraph(self._head, self._pool, own, lane)

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        with compiled_code_runs_eagerly(), control_flow_is_compiled():
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        if self._pool.num_bytes:  # young garbage may hold memory that the graph could have
            gc.collect(1)
        guard, random = HostReadGuard(self._head.refuse), self._random
        recording = RecordingMode(self._head, guard, random)
        with collector_at_rest(), compiled_code_runs_eagerly(), refusing_resizes(lambda: self._head.graph):
            try:
                with recorded_rng_calls(random), unseen_by_modules(guard), guard, recording:
                    yield
            finally:
                self._pool.poison_unplayed()

    def pool_bytes(self) -> int:
        return self._pool.num_bytes

    def held(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        found = ((tensor, storage_of(tensor)) for tensor in tensors)
        return [tensor for tensor, own in found if own is not None and self._pool.find(own._cdata) is not None]

    def close(self) -> None:
        self._pool = TapePool()

    def note_named(self, tensors: Iterable[torch.Tensor], writers: Iterable[Graph]) -> None:
        traces = [graph.trace for graph in writers if isinstance(graph, TapeGraph) and graph.trace is not None]
        for tensor in self.held(tensors):
            self._pool.note_named(tensor.untyped_storage()._cdata, traces)


class TapeBackend(Backend):
    """Record and replay on the CPU."""

    name = "tape"
    runs_while_recording = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def workspace(self) -> TapeWorkspace:
        return TapeWorkspace()

    def is_capturing(self) -> bool:
        return torch._C._len_torch_dispatch_stack() > 0 and self._recorder() is not None

    def _recorder(self) -> RecordingMode | None:
        modes = dispatch._get_current_dispatch_mode_stack()
        return next((mode for mode in modes if isinstance(mode, RecordingMode)), None)

    @property
    def default_generator(self) -> torch.Generator:
        return torch.default_generator

    def _random(self) -> RandomCalls:
        recorder = self._recorder()
        return RandomCalls(Head()) if recorder is None else recorder.random  # without a graph it only makes the calls

    def swap_random_state(self, generator: torch.Generator) -> None:
        self._random().swap(generator)

    def get_random_state(self, generator: torch.Generator) -> torch.Tensor:
        return self._random().get(generator)

    def set_random_state(self, generator: torch.Generator, state: torch.Tensor) -> None:
        self._random().put(generator, state)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"
