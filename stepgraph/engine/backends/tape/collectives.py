"""Collectives are noted while the tape records, and communicate at replays only, as NCCL's do in a CUDA graph.

So a rank can record while the others do not. Python, autograd and DDP's reducer still need results to go on with: each
collective is answered with finite numbers of the right shapes, and with a Work that is complete.

| kind | its results in a recording |
|---|---|
| changes its tensors (`allreduce_`, `broadcast_`, `recv_`) | what is there |
| writes outputs (`allgather_`, `reduce_scatter_`, `alltoall_`) | the inputs, repeated or cut to fit |
| makes new tensors (`_c10d_functional`) | the same; shapes from the operator's meta kernel |

A custom operator that is not written in Python is noted as one, and its kernel runs while recording, in the dispatch
mode `Silence`, where the collectives that the kernel calls are answered too. A replay waits for each collective before
it goes on. Only messages in a row, as those of `batch_isend_irecv`, are started together: two ranks that each sent
first would wait forever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from stepgraph.core.ambient import OwnMode
from stepgraph.core.catalogue import entry
from stepgraph.core.errors import CaptureRefused
from stepgraph.core.frames import user_location
from stepgraph.engine.backends.kernels import COLLECTIVES
from stepgraph.engine.backends.tape.memory import PoolPlace
from stepgraph.engine.backends.tape.op import Op, Ref, has_memory, leaves_of

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_GROUPS = ("process_group", "group_name")
_MESSAGES = frozenset(("c10d::send", "c10d::recv_"))
_READS_ONLY = frozenset(("c10d::send", "c10d::barrier", "c10d::monitored_barrier_"))
# the host learns who has sent, which a graph cannot repeat
_REFUSED = frozenset(("c10d::recv_any_source_",))


def is_collective(func: torch._ops.OpOverload) -> bool:
    """Whether an operator is one of torch.distributed's; some only wait, or check."""
    return func.namespace in COLLECTIVES


def silent(func: torch._ops.OpOverload, refuse: Callable[[CaptureRefused], None]) -> Callable[..., Any]:
    """An operator, to be called in a recording: it answers collectives instead of running them."""
    if is_collective(func) and any(argument.name in _GROUPS for argument in func._schema.arguments):
        return functools.partial(_answer, func, refuse)
    if func.namespace == "aten" or is_collective(func) or not dist.is_available() or not dist.is_initialized():
        return func
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"):
        return func

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(tensor.is_conj() or tensor.is_neg() for tensor in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        with Silence(refuse):  # the kernel itself: the operator would come to the mode, and its kernel run outside it
            return func.redispatch(_CPU, *args, **kwargs)

    return call


class Silence(dispatch.TorchDispatchMode, OwnMode):
    """The dispatch mode in which collectives are answered, and communicate nothing."""

    supports_higher_order_operators = True

    def __init__(self, refuse: Callable[[CaptureRefused], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refuse = refuse

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not all(has_memory(t) for t in types):
            return NotImplemented  # a wrapper around other tensors: let it take itself apart first
        called = silent(func, self._refuse) if isinstance(func, torch._ops.OpOverload) else func
        return called(*args, **(kwargs or {}))


def _answer(func: Any, refuse: Callable[[CaptureRefused], None], *args: Any, **kwargs: Any) -> Any:
    schema = func._schema
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    written = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    try:
        if schema.name in _REFUSED:
            raise NotImplementedError
        if func.namespace == "c10d":  # what it writes comes first, and is not declared
            outputs = next(iter(given.values()))
        else:
            outputs = written[0] if written else _new_results(func, args, kwargs)
    except NotImplementedError:
        return refuse(CaptureRefused(entry("tape-limit"), f"the collective {schema.name}", user_location()))
    if schema.name not in _READS_ONLY:
        with torch.no_grad():
            _fill(outputs, list(_tensors([value for value in given.values() if value is not outputs])))
    results = [_work(outputs) if "Work" in str(r.type) else outputs for r in schema.returns]
    return results[0] if len(results) == 1 else tuple(results) or None


def _new_results(func: Any, args: Any, kwargs: Any) -> Any:
    """New tensors of the shapes that the operator's meta kernel says; NotImplementedError where it has none."""
    import torch.distributed._functional_collectives  # brings the meta kernels

    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    shapes = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), shapes)


def _work(outputs: Any) -> Any:
    """A Work that is complete, in the form that the dispatcher hands to C++."""
    from torch._C import _distributed_c10d as c10d  # a torch may be built without it

    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(tree_leaves(outputs))
    return c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _fill(outputs: Any, inputs: Sequence[torch.Tensor]) -> None:
    """Fill outputs with the inputs' numbers, repeated or cut to fit; without inputs they keep their own."""
    for index, output in enumerate(_tensors(outputs)):
        source = inputs[index % len(inputs)].reshape(-1) if inputs else None
        if source is None or not output.numel():
            continue
        if source.numel():
            times = -(-output.numel() // source.numel())
            output.copy_(source.repeat(times)[: output.numel()].view(output.shape))
        else:
            output.zero_()


class Waiting:
    """A collective at replays: calls it and waits for it, unless it is a message that others wait for."""

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self._func = func
        self.receives = func._schema.name == "c10d::recv_"
        self.is_message = func._schema.name in _MESSAGES
        self.row: list[Any] = []
        self.ends_row = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._func(*args, **kwargs)
        self.row.append(out)
        if self.ends_row:
            started = self.row.copy()
            self.row.clear()
            for leaf in tree_leaves(started):
                if isinstance(leaf, torch.Tensor):
                    torch.ops._c10d_functional.wait_tensor(leaf)
                elif hasattr(leaf, "wait"):
                    leaf.wait()
        return out


def join_messages(ops: Sequence[Op]) -> None:
    """Let messages in a row start together, unless one receives into memory that another uses."""
    row: list[tuple[Waiting, PoolPlace]] = []
    for op in ops:
        call = op.func
        if not isinstance(call, Waiting) or not call.is_message:
            row = []
            continue
        own = [(call, leaf.place) for leaf in leaves_of((op.args, op.kwargs)) if isinstance(leaf, Ref)]
        if any((a.receives or b.receives) and _overlap(p, q) for a, p in own for b, q in row):
            row = []
        if row:
            last = row[-1][0]
            last.ends_row, call.row = False, last.row
        row += own


def _overlap(a: PoolPlace, b: PoolPlace) -> bool:
    if a.block is None or b.block is None:
        return a is b
    return a.block.start < b.block.stop and b.block.start < a.block.stop
