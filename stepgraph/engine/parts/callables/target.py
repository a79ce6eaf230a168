"""`target_of` describes one graphed callable: a module, a method of one, or a function with the modules it reaches.

Of a DistributedDataParallel the module inside is graphed. DDP's own forward stays eager: it sends buffers, prepares its
reducer, and calls the graphed module. The gradients go through autograd to the reducer. The other design, collectives
of the reducer inside the backward's graph, would bake in what DDP decides at each step: `no_sync`, unused parameters,
its first iterations.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from stepgraph.core.errors import CaptureError
from stepgraph.engine.backends.random.tracker import tracker_for
from stepgraph.engine.call.failure import capture_error, cause_of
from stepgraph.engine.call.options import PairOptions
from stepgraph.engine.observe.ddp import unwrapped
from stepgraph.engine.observe.finder import reachable
from stepgraph.engine.record.pair.module_method import called_method
from stepgraph.engine.record.pair.shared import PairSession
from stepgraph.engine.record.pair.target import PairTarget

_OPTIONS = PairOptions(strict=True, on_error="raise", ignore=("current_microbatch", "is_first_microbatch"))
"""A failure is raised. Training loops set the ignored attributes on layers before each call; no graph reads them."""


class _Holder(torch.nn.Module):
    """The modules that a function can reach, as one module."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)


def target_of(
    given: Callable[..., Any],
    index: int,
    shared: PairSession,
    outside: Callable[[torch.nn.Module], set[int]],
    *,
    with_order: bool,
    need_backward: bool,
) -> PairTarget:
    """Return the target for a callable. With an order the caller calls the graphs, so own hooks do not run."""
    is_module = isinstance(given, torch.nn.Module)
    kind = type(given).__name__ if is_module else getattr(given, "__qualname__", "function")
    module = _module_of(unwrapped(given))
    if isinstance(given, DistributedDataParallel):
        kind = f"{kind} of {type(module).__name__}"
    target = PairTarget(
        module,
        called_method(module) if is_module else "forward",
        f"callables[{index}] ({kind})",
        _OPTIONS,
        shared,
        outside,
        function=None if is_module else given,
        runs_own_hooks=not with_order,
        need_backward=need_backward,
    )
    target.random = tracker_for(shared.session.backend)
    return target


def refuse_ddp(given: Callable[..., Any], target: PairTarget, *, with_order: bool) -> None:
    """Refuse a DDP that the graphs cannot hand their gradients to."""
    what = why = ""
    if any(isinstance(module, DistributedDataParallel) for module in target.module.modules()):
        what = "contains a DistributedDataParallel"
        why = "DDP's forward and its reducer do other work at each step, and a graph would repeat that of one step."
    elif isinstance(given, DistributedDataParallel) and with_order:
        what = "is passed with an order"
        why = "with an order you call the graphed callables yourself, and DDP's own forward would not run."
    elif isinstance(given, DistributedDataParallel) and given.mixed_precision is not None:
        what = "has mixed_precision"
        why = "DDP then gives the module other parameters at each forward, and graphs read those of the capture."
    if what:
        raise CaptureError(
            f"{target.name} {what}",
            rule="ddp-callable",
            why=why,
            fix="pass the DDP itself without an order (torch.autocast for lower precision), or pass layers of "
            "ddp.module and call the DDP.",
        )


def _module_of(given: Callable[..., Any]) -> torch.nn.Module:
    """Return the module whose parameters a callable uses."""
    owner: Any = given.__self__ if isinstance(given, types.MethodType) else given
    return owner if issubclass(type(owner), torch.nn.Module) else _Holder(_modules_of(given))


def _modules_of(function: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules that a function can reach, without those inside others."""
    found = [value for value in reachable(function) if issubclass(type(value), torch.nn.Module)]
    inside = {id(inner) for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if id(module) not in inside]


@contextlib.contextmanager
def named(target: PairTarget) -> Iterator[None]:
    """Name the callable in any error of its capture."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (any error gets the name of the callable)
        name, raised = target.name, capture_error(target.name, error, target.shared.session.backend)
        if isinstance(raised, CaptureError) and not raised.what.startswith(name):
            raised = CaptureError(
                f"{name}: {raised.what}", rule=raised.rule, details=raised.details, why=raised.why, fix=raised.fix
            )
        raise raised from cause_of(raised, error)
