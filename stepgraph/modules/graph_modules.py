"""`stepgraph.graph_modules` graphs the named parts of any model, in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.modules.manager import CudaGraphManager
from stepgraph.modules.options import ModuleOptions
from stepgraph.modules.report import ModuleReport, report_on
from stepgraph.modules.scopes import Part, ScopeRegistry, read_scope
from stepgraph.modules.session import ModuleSession
from stepgraph.pair.module_method import called_method, put_in_place
from stepgraph.session.options import listed
from stepgraph.session.session import Session


def graph_modules(
    model: torch.nn.Module,
    scope: Sequence[str] | str = (),
    *,
    warmup: int = 3,
    strict: bool = False,
    max_runners: int = 16,
    max_signatures: int = 8,
    safe_hooks: Sequence[Any] = (),
    ignore: Sequence[str] = (),
    outputs: str = "guarded",
    generators: Sequence[torch.Generator] = (),
    audit: str | int = "auto",
    single_mempool: bool = False,
    registry: ScopeRegistry | None = None,
    session: Session | None = None,
) -> GraphedModules:
    """Graph the parts of a model that a scope names; the rest goes on eagerly.

    Example:
        >>> handle = stepgraph.graph_modules(model, scope=["attn", "moe_router"])
        >>> for batch in loader:                     # train as before: warm-up, capture and replay by themselves
        ...     loss = model(batch).mean()
        ...     loss.backward()
        >>> print(handle.report())

    A scope is any of the words `attn`, `mlp`, `moe`, `moe_router`, `moe_preprocess`, `mamba`, or paths and globs
    (`"layers.*.self_attn"`); without one, whole layers are graphed. Gradients flow as in eager. Dropping the handle
    keeps the graphs; `close()` ends them. Before the rounds that `audit` names, each kind of call is recorded again,
    without effect, and compared: a module that would run other operations by now is captured anew, with a warning.
    """
    parts = (registry or ScopeRegistry()).resolve(model, read_scope(scope))
    options = ModuleOptions(
        warmup=warmup,
        strict=strict,
        max_signatures=max_signatures,
        max_runners=max_runners,
        safe_hooks=listed("safe_hooks", safe_hooks),
        ignore=listed("ignore", ignore),
        outputs=outputs,
        generators=listed("generators", generators),
        single_mempool=single_mempool,
        audit=audit,
    )
    return GraphedModules(ModuleSession(session, model), parts, options)


class GraphedModules:
    """The graphed parts of a model: look at them, drop their graphs, end them."""

    def __init__(self, shared: ModuleSession, parts: Sequence[Part], options: ModuleOptions) -> None:
        self._shared = shared
        self._restore = contextlib.ExitStack()
        for part in parts:
            method = called_method(part.module, part.method)
            manager = CudaGraphManager(options, part.module, method, session=shared, name=part.path)
            self._restore.callback(put_in_place(part.module, method, manager))

    @property
    def paths(self) -> list[str]:
        """The graphed parts."""
        return [manager.name for manager in self._shared.managers]

    def report(self) -> ModuleReport:
        """What happened so far, part by part."""
        return report_on(self._shared)

    def create_cudagraphs(self) -> None:
        """Capture now what the last round has recorded, without waiting for the warm-up to end."""
        self._shared.create_cudagraphs()

    def reset(self) -> None:
        """Drop all graphs; the next calls warm up and capture anew."""
        self._shared.delete_cuda_graphs()

    def close(self) -> None:
        """End the graphs; the modules are as they were before. Closing twice is fine."""
        self._shared.close()
        self._restore.close()

    def __enter__(self) -> GraphedModules:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
