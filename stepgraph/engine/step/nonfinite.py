"""NaN and inf are found without stopping the queue: the device computes flags, and a later call reads them.

Reading a loss on the host makes the host wait for the device at each step, and no capture can contain it. So one flag
for each gradient and each floating result is computed inside the graph. After the step the flags are copied to the host
behind everything else in the queue; a later call looks whether they have arrived, and `close()` waits for the rest.

Gradients are checked each time an optimizer steps with them; those that have changed since, or that no optimizer has
used, at the end of the step. Where the step uses a GradScaler only results are checked: overflowing gradients are its
daily business. Results that buckets may have padded are checked as they are handed out, outside the graph.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import NonFinite
from stepgraph.core.tensor_memory import version_of
from stepgraph.core.tree import flatten, paths
from stepgraph.engine.backends import Backend, Reading
from stepgraph.engine.oplog import left_out
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.engine.optim.scaler import noticing_scalers


@dataclass(frozen=True, slots=True)
class Flags:
    """One call's flags, on the device, and their names."""

    names: tuple[str, ...]
    bad: torch.Tensor


class FlagCollector:
    """Computes the flags of one call, eager or being recorded; none at all if it is not `wanted`.

    `left_out` says by its shape whether a result is checked elsewhere: it may have padding that is cut away.
    """

    def __init__(
        self,
        name: Callable[[Any], str],
        *,
        wanted: bool,
        gradients: bool,
        left_out: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self._name = name
        self._wanted = wanted
        self._gradients = wanted and gradients
        self._left_out = left_out
        self._looked_at: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """For each parameter, by id: the gradient that an optimizer has used, and its version."""
        self._parts: list[Flags] = []

    @contextlib.contextmanager
    def at_optimizers(self) -> Iterator[None]:
        """Check the gradients of each optimizer that steps in this block, just before it does."""

        def leave_to_scaler(_: Any) -> None:
            self._gradients = False
            self._parts.clear()

        def after(optimizer: Optimizer, _: Any) -> None:
            self._remember(_parameters(optimizer))  # its kernels may count as writes to the gradients

        with contextlib.ExitStack() as stack:
            if self._gradients:
                stack.enter_context(at_optimizer_steps(self.see_optimizer, after))
                stack.enter_context(noticing_scalers(leave_to_scaler))
            yield

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Check the gradients that an optimizer is about to use."""
        self._see_gradients(_parameters(optimizer))

    def finish(
        self, result: Any, parameters: Collection[torch.Tensor], arguments: Iterable[tuple[str, Any]] = ()
    ) -> Flags | None:
        """Check the results, and the gradients that no optimizer has used as they are, also those of arguments."""
        if not self._wanted:
            return None
        leaves, structure = flatten(result)
        named = zip(paths(structure, "result"), leaves, strict=True)
        self._parts += _flags((name, leaf) for name, leaf in named if not self._is_left_out(leaf))
        self._see_gradients(p for p in parameters if not self._was_looked_at(p))
        if self._gradients:
            known = set(map(id, parameters))
            found = [(name, leaf) for name, leaf in arguments if _has_gradient(leaf) and id(leaf) not in known]
            self._parts += _flags((f"{name}.grad", leaf.grad) for name, leaf in found if not self._is_left_out(leaf))
        return _joined(self._parts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [part.bad for part in self._parts]

    def _is_left_out(self, leaf: Any) -> bool:
        return self._left_out is not None and issubclass(type(leaf), torch.Tensor) and self._left_out(leaf.shape)

    def _see_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._gradients:
            found = {id(p): p for p in parameters if p.grad is not None}.values()
            self._remember(found)
            self._parts += _flags((f"{self._name(p)}.grad", p.grad) for p in found)

    def _remember(self, parameters: Iterable[torch.Tensor]) -> None:
        self._looked_at |= {id(p): (weakref.ref(p.grad), version_of(p.grad)) for p in parameters if p.grad is not None}

    def _was_looked_at(self, parameter: torch.Tensor) -> bool:
        grad, writes = self._looked_at.get(id(parameter), (None, 0))
        return grad is not None and grad() is parameter.grad is not None and version_of(parameter.grad) == writes


def _has_gradient(leaf: Any) -> bool:
    return issubclass(type(leaf), torch.Tensor) and leaf.is_leaf and leaf.requires_grad and leaf.grad is not None


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def flags_over(named: Iterable[tuple[str, Any]]) -> Flags | None:
    """Flags for those of these values that can hold a NaN or an infinity."""
    return _joined(_flags(named))


def _joined(parts: Sequence[Flags]) -> Flags | None:
    if not parts:
        return None
    with left_out():
        return Flags(tuple(name for part in parts for name in part.names), torch.cat([part.bad for part in parts]))


def _flags(named: Iterable[tuple[str, Any]]) -> list[Flags]:
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    parts = []
    with torch.no_grad(), left_out():
        for name, value in named:
            if _can_be_bad(value):
                tensor = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
                by_dtype[tensor.dtype].append((name, tensor))
        for dtype in [dtype for dtype in by_dtype if dtype.itemsize == 1]:  # float8: nothing computes with it
            by_dtype[torch.float32] += [(name, tensor.float()) for name, tensor in by_dtype.pop(dtype)]
        for found in by_dtype.values():
            # the largest magnitude is finite exactly when every element is; one fused kernel for all tensors
            largest = torch._foreach_norm([tensor for _, tensor in found], math.inf)
            bad = torch.stack(list(largest)).isfinite().logical_not()
            parts.append(Flags(tuple(name for name, _ in found), bad))
    return parts


def _can_be_bad(value: Any) -> bool:
    if not issubclass(type(value), torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
        return False
    return value.is_complex() or (value.is_floating_point() and value.dtype is not torch.float4_e2m1fn_x2)


class FlagReader:
    """Reads flags when they have arrived on the host, and raises for the first that is set."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._raised = 0
        """Calls that did nothing but raise for an earlier one."""
        self.pending: deque[tuple[int, tuple[str, ...], Reading]] = deque()

    def post(self, call: int, flags: Flags | None, backend: Backend) -> None:
        """Send a call's flags to the host. `call` counts the calls that ran, with this one."""
        if flags is not None:
            self.pending.append((call + self._raised, flags.names, backend.read_later(flags.bad)))

    def drain(self) -> None:
        """Wait for all flags and check them."""
        self.check(wait=True)

    def check(self, *, wait: bool = False) -> None:
        """At the beginning of a call: check the flags that have arrived; with `wait`, outside a call, all of them."""
        while self.pending and (wait or self.pending[0][2].is_ready()):
            call, names, reading = self.pending.popleft()
            told = zip(names, reading.value().tolist(), strict=True)
            bad = list(dict.fromkeys(name for name, is_bad in told if is_bad))
            if bad:
                self.pending.clear()
                self._raised += not wait
                more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
                raise NonFinite(
                    f"{self._step}: `{bad[0]}` was not finite in call {call}{more}",
                    rule="non-finite",
                    details=[f"`{name}`" for name in bad[1:8]],
                    why="a flag that the step computed on the device says that it held a NaN or an infinity.",
                    fix="go back to an earlier checkpoint; calls are counted from 1. To find the operation, "
                    "run that batch eagerly under torch.autograd.set_detect_anomaly(True).",
                )
