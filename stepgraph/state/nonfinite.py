"""NaN and inf noticed without stopping the queue: flags computed on the device, read one call later.

Reading a loss on the host to look for NaN makes the host wait for the device at each step, and no capture can contain
it. So the question is asked on the device: one flag for each gradient and each floating result, computed inside the
graph. After the step the flags are copied to the host behind everything else in the queue, and nobody waits for the
copy: a later call looks whether it has arrived, and `close()` waits for what is left.

Gradients are looked at when an optimizer steps with them, the rest at the end of the step. Where a GradScaler is in
use only results are: overflowing gradients are its daily business.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from stepgraph.backends import Backend, Reading
from stepgraph.errors import NonFinite
from stepgraph.tree import flatten, paths


@dataclass(frozen=True, slots=True)
class Flags:
    """One call's flags, on the device, and what each stands for."""

    names: tuple[str, ...]
    bad: torch.Tensor


class FlagCollector:
    """Computes the flags of one call, eager or being recorded; none at all if it is not `wanted`."""

    def __init__(self, name: Callable[[Any], str], *, wanted: bool, gradients: bool) -> None:
        self._name = name
        self._wanted = wanted
        self._gradients = wanted and gradients
        self._seen: set[int] = set()
        self._parts: list[Flags] = []

    @contextlib.contextmanager
    def at_optimizers(self) -> Iterator[None]:
        """Look at the gradients of each optimizer that steps meanwhile, just before it does."""
        with contextlib.ExitStack() as stack:
            if self._gradients:
                hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self.see_optimizer(optimizer))
                stack.callback(hook.remove)
            yield

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Look at the gradients that an optimizer is about to use."""
        self._see_gradients(p for group in optimizer.param_groups for p in group["params"])

    def finish(self, result: Any, parameters: Iterable[torch.Tensor]) -> Flags | None:
        """Look at the results, and at the gradients that no optimizer has used."""
        if not self._wanted:
            return None
        leaves, structure = flatten(result)
        self._add(zip(paths(structure, "result"), leaves, strict=True))
        self._see_gradients(parameters)
        if not self._parts:
            return None
        return Flags(
            tuple(name for part in self._parts for name in part.names), torch.cat([part.bad for part in self._parts])
        )

    def _see_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._gradients:
            found = [p for p in parameters if p.grad is not None and id(p) not in self._seen]
            self._seen.update(map(id, found))
            self._add((f"{self._name(p)}.grad", p.grad) for p in found)

    def _add(self, named: Iterable[tuple[str, Any]]) -> None:
        by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name, value in named:
            if _can_be_bad(value):
                tensor = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
                by_dtype[tensor.dtype].append((name, tensor))
        with torch.no_grad():
            for found in by_dtype.values():
                # the largest magnitude is finite exactly when every element is; one fused kernel for all tensors
                largest = torch._foreach_norm([tensor for _, tensor in found], math.inf)
                bad = torch.stack(list(largest)).isfinite().logical_not()
                self._parts.append(Flags(tuple(name for name, _ in found), bad))


def _can_be_bad(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
        return False
    return value.is_floating_point() or value.is_complex()


class FlagReader:
    """Reads flags when they have arrived on the host, and raises for the first that is set."""

    def __init__(self, step: str) -> None:
        self._step = step
        self.pending: deque[tuple[int, tuple[str, ...], Reading]] = deque()

    def post(self, call: int, flags: Flags | None, backend: Backend) -> None:
        """Send a call's flags on their way to the host."""
        if flags is not None:
            self.pending.append((call, flags.names, backend.read_later(flags.bad)))

    def check(self, *, wait: bool = False) -> None:
        """Look at the flags that have arrived; with `wait`, at all."""
        while self.pending and (wait or self.pending[0][2].is_ready()):
            call, names, reading = self.pending.popleft()
            bad = [name for name, is_bad in zip(names, reading.value().tolist(), strict=True) if is_bad]
            if bad:
                self.pending.clear()
                more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
                raise NonFinite(
                    f"{self._step}: `{bad[0]}` was not finite in call {call}{more}",
                    rule="non-finite",
                    details=[f"`{name}`" for name in bad[1:8]],
                    why="a flag that the step computed on the device says that it held a NaN or an infinity.",
                    fix="go back to a checkpoint of before that call; calls are counted from 1. To find the operation, "
                    "run that batch eagerly under torch.autograd.set_detect_anomaly(True).",
                )
