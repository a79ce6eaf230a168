"""DistributedDataParallel is captured with the step, except for four things that no graph can record.

DDP's reducer is C++ code in autograd's accumulators: it copies gradients into buckets, reduces the buckets over the
ranks while backward still runs, and copies them back. All of that is device work, and is recorded. Four things are not:

- Its first iterations differ from the rest: it moves its buckets once, into the order in which gradients came, and
  times ten iterations with events that no capture may hold. So a step with a young DDP warms up for 11 calls, as
  torch's notes on CUDA graphs ask. Later it times every hundredth iteration, but not while a step is recorded.
- Its accumulators remember the stream they were made on, and work on the default stream cannot be recorded. Only the
  reducer holds the accumulators between two steps. So a DDP that was built on the default stream, as most are, is given
  a new reducer on the capture stream, as torch does when a DDP is unpickled; it is young again.
- `no_sync` and the broadcast of buffers are steered by two Python flags, which a replay must find and leave as eager.
- A backward that breaks off leaves the reducer waiting for the rest of its gradients. It is reset and makes new
  buckets, so graphs that use the old ones have to go.

Graphs of parts of a model (modules, callables) hold nothing of DDP. They give the gradients of DDP's parameters to
autograd, whose accumulators call the reducer as in eager. So buckets, `no_sync`, unused parameters, communication hooks
and later changes to any of these work as without graphs, on any stream. The reducer orders its buckets by the arrival
of the gradients in its first backward, and with three ranks or more the bits of a sum may depend on the place in a
bucket. A graph gives all its gradients at once, so until the buckets are settled they are passed on in eager's order
(`decides_buckets`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stepgraph.config.environment import blocking_wait
from stepgraph.core.collector import objects_of
from stepgraph.core.errors import CaptureError
from stepgraph.engine.backends import Backend
from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.observe.step_objects import StepObjects

WARMUP = 11
"""Eager calls for a young DDP: https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
"""
_TIMED = 10
"""The first iterations, each of which DDP times."""
_SAMPLE_RATE, _NEVER = 100, 2**31 - 1
"""DDP times every hundredth later iteration (torch's own value, which can be set, but not read)."""
_FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")
_STATELESS_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
_COMPRESSES_IN_CPP = "BuiltinCommHookType.FP16_COMPRESS"


def replicas(modules: Iterable[torch.nn.Module]) -> list[DistributedDataParallel]:
    """The DDP modules among these."""
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


def warmup_calls(wanted: int, modules: Iterable[torch.nn.Module]) -> int:
    """How many eager calls a step with these modules gets before it is captured."""
    return max(wanted, WARMUP) if any(map(_is_young, replicas(modules))) else wanted


def _is_young(ddp: DistributedDataParallel) -> bool:
    """Whether DDP still times each iteration, or has yet to move its buckets to their final places."""
    timed = int(ddp._get_ddp_logging_data().get("iteration", 0)) if ddp.logger is not None else 0
    return timed < _TIMED or not getattr(ddp, "_has_rebuilt_buckets", True)


@contextlib.contextmanager
def finding_default_stream(
    touched: StepObjects, backend: Backend
) -> Iterator[dict[int, tuple[DistributedDataParallel, str]]]:
    """While a step runs, find DDPs, by id, and a parameter of each, that accumulate on the default stream."""
    found: dict[int, tuple[DistributedDataParallel, str]] = {}

    def look(ddp: DistributedDataParallel, parameter: torch.Tensor) -> None:
        if id(ddp) not in found and not backend.can_record_here():
            found[id(ddp)] = (ddp, touched.name(parameter))

    owned = [(ddp, p) for ddp in replicas(touched.modules) for p in ddp.parameters() if p.requires_grad]
    parameters = [parameter for _, parameter in owned]
    untouched = [p for p in parameters if p._post_accumulate_grad_hooks is None]
    handles = [p.register_post_accumulate_grad_hook(functools.partial(look, ddp)) for ddp, p in owned]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for parameter in untouched:  # an empty dict of hooks would cost each later backward a look at it
            if not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def renew_reducer(ddp: DistributedDataParallel) -> bool:
    """Give DDP a new reducer, with accumulators on the current stream; False where it cannot be made again.

    Whoever else holds a parameter's accumulator, such as a kept loss, keeps the old one alive.
    """
    if not _can_be_renewed(ddp):
        return False
    gc.collect()  # graphs of autograd in cycles hold accumulators
    parameters, expects_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp.logger = ddp.reducer = None  # type: ignore[assignment]  # the old accumulators end here
    ddp._ddp_init_helper(parameters, expects_sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    made: Any = ddp  # mypy has seen that there is no logger
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        made.reducer._set_static_graph()
        made.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        made.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__qualname__))
        dist._register_comm_hook(made.reducer, state, hook)  # type: ignore[attr-defined]
    return True


def _can_be_renewed(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer is all that was made with DDP, and no backward is running."""
    methods = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
    parts = ("mixed_precision", "_delay_all_reduce_params", "_accum_grad_hooks", "_use_python_reducer")
    if not all(hasattr(ddp, name) for name in methods) or any(getattr(ddp, name, None) for name in parts):
        return False
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        return False
    return _hook_in_cpp(ddp) is None and not _is_mid_backward(ddp)


def _is_mid_backward(ddp: DistributedDataParallel) -> bool:
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def refuse_replicas(step: str, touched: StepObjects, safe_hooks: Collection[Any], backend: Backend) -> None:
    """Refuse a DDP that does at each step something that no graph can repeat."""
    for ddp in replicas(touched.modules):
        name = touched.name(ddp)
        if ddp.find_unused_parameters and not ddp.static_graph:
            raise CaptureError(
                f"{step}: `{name}` looks for unused parameters",
                rule="ddp-unused-parameters",
                why="at each step it asks the other ranks which parameters nobody used, and reads the answer on the "
                "host; a graph would go on with the answer of its capture.",
                fix="DistributedDataParallel(model, find_unused_parameters=False), or static_graph=True if the same "
                "parameters are unused at each step.",
            )
        for hook, _ in ddp._comm_hooks:
            spelled = getattr(hook, "__qualname__", type(hook).__qualname__)
            if not (_is_stateless(hook) or hook in safe_hooks or spelled in safe_hooks):
                raise CaptureError(
                    f"{step}: `{name}` has a communication hook, `{spelled}`",
                    rule="ddp-comm-hook",
                    why="a hook is Python code: it would run when the step is captured, and not at replays, so that "
                    "what it counts or remembers would stand still.",
                    fix="use torch's allreduce_hook, fp16_compress_hook or bf16_compress_hook, or, if all yours does "
                    f"is tensor work, admit it: stepgraph.capture(step, safe_hooks=[{spelled!r}]).",
                )
        if backend.runs_while_recording and _hook_in_cpp(ddp) == _COMPRESSES_IN_CPP:
            raise CaptureError(
                f"{step}: `{name}` has a communication hook in C++, `{_COMPRESSES_IN_CPP}`",
                rule="tape-limit",
                why="a collective communicates nothing while the tape records, and this hook does not take the Work "
                "that stands for it.",
                fix="model.register_comm_hook(None, default_hooks.fp16_compress_hook), which computes the same.",
            )
        variable = blocking_wait(os.environ)
        if variable is not None and backend.device.type == "cuda":
            raise CaptureError(
                f"{step}: `{name}` is captured with {variable}={os.environ[variable]} in the environment",
                rule="nccl-blocking-wait",
                fix=f"unset {variable} before init_process_group: os.environ.pop({variable!r}, None).",
            )


def _hook_in_cpp(ddp: DistributedDataParallel) -> str | None:
    """The name of a communication hook of torch's in C++; the hook itself cannot be read."""
    hook = ddp._get_ddp_logging_data().get("comm_hook") if ddp.logger is not None else None
    return str(hook) if hook and not ddp._comm_hooks else None


def _is_stateless(hook: Any) -> bool:
    home = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    return getattr(hook, "__module__", None) == home and hook.__qualname__ in _STATELESS_HOOKS


def flags_of_replicas(modules: Iterable[torch.nn.Module]) -> tuple[bool, ...]:
    """The flags of the DDP modules among these: in `no_sync` or not, after such a step or not."""
    return tuple(vars(ddp)[flag] for ddp in replicas(modules) for flag in _FLAGS)


class Replicas:
    """The DDP modules of one captured step: their flags before and after it was recorded."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._replicas = replicas(modules)
        self._slots = [(vars(ddp), flag) for ddp in self._replicas for flag in _FLAGS]
        self._before = self._after = self._read()

    def _read(self) -> list[bool]:
        return [attributes[flag] for attributes, flag in self._slots]

    def _write(self, values: list[bool]) -> None:
        for (attributes, flag), value in zip(self._slots, values, strict=True):
            attributes[flag] = value

    @property
    def is_needed(self) -> bool:
        return bool(self._slots)

    def fit(self) -> bool:
        """Whether DDP's flags are as the recording found them."""
        return not self._slots or self._read() == self._before

    def expect(self, row: GuardRow) -> None:
        """Put the checks of `fit` into a row of guards."""
        for (attributes, flag), value in zip(self._slots, self._before, strict=True):
            row.item(attributes, flag, value)

    def advance(self) -> None:
        """Leave DDP as the step leaves it in eager."""
        self._write(self._after)

    @contextlib.contextmanager
    def recording(self, drop_graphs: Callable[[], None]) -> Iterator[None]:
        """Around a recording: no timing, no effect on DDP, and a reducer that can be used if it breaks off."""
        for ddp in self._replicas:
            ddp._set_ddp_runtime_logging_sample_rate(_NEVER)
        try:
            yield
        except BaseException:
            broken = [ddp for ddp in self._replicas if _is_mid_backward(ddp)]
            for ddp in broken:  # let the reducer forget it; it then makes new buckets at its second step
                ddp.reducer._reset_state()
                ddp._has_rebuilt_buckets = False
            if broken:
                drop_graphs()
            raise
        finally:
            for ddp in self._replicas:
                ddp._set_ddp_runtime_logging_sample_rate(_SAMPLE_RATE)
            self._after = self._read()
            self._write(self._before)


def unwrapped(given: Any) -> Any:
    """The module inside a DDP; anything else is returned as it is."""
    return given.module if isinstance(given, DistributedDataParallel) else given


def in_ddp() -> bool:
    """Whether the calling code runs inside a DDP's forward."""
    return DistributedDataParallel._active_ddp_module is not None


def decides_buckets() -> bool:
    """Whether the order in which the DDP around the calling code gets its next gradients decides its buckets."""
    return not getattr(DistributedDataParallel._active_ddp_module, "_has_rebuilt_buckets", True)


def reduced_parameters() -> frozenset[int]:
    """The parameters, by id, of all DDPs of the process. Nothing on a parameter says that a reducer waits for it."""
    if not (dist.is_available() and dist.is_initialized()):
        return frozenset()
    return frozenset(id(parameter) for ddp in objects_of(DistributedDataParallel) for parameter in ddp.parameters())
