"""`stepgraph.graph_modules` graphs the named parts of any model, in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.config.objects import checked_settings
from stepgraph.core.errors import InvalidArgument
from stepgraph.core.frames import warn_user
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import quantities, with_article
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.call.options import Audit, Hook, Outputs, PairOnError, expect, reads_options, renamed
from stepgraph.engine.call.report import outline
from stepgraph.engine.call.session import Session
from stepgraph.engine.parts.modules.manager import ModuleGraphs
from stepgraph.engine.parts.modules.options import ModuleOptions, options_of
from stepgraph.engine.parts.modules.report import ModuleReport, report_on
from stepgraph.engine.parts.modules.scopes import Part, ScopeRegistry, read_scope
from stepgraph.engine.parts.modules.session import ModuleSession
from stepgraph.engine.parts.modules.static_buffers import CudagraphBufferMetadata, static_buffers
from stepgraph.engine.record.pair.module_method import called_method, put_in_place


def _older_names(given: dict[str, Any]) -> None:
    renamed(given, "max_signatures", "max_graphs")
    if given.get("outputs") == "guarded":
        warn_user("outputs='guarded' is an older name of outputs='copy'   [option]\nFix: outputs='copy'.")
        given["outputs"] = "copy"
    if given.get("config") is not None:
        given["config"] = checked_settings(given["config"])
        given.update({name: value for name, value in options_of(given["config"]).items() if name not in given})


@reads_options(
    ModuleOptions,
    older=_older_names,
    registry="What the words of a scope mean for the classes of your layers.",
    config="A ConfigContainer, or Megatron's configuration: checked, and read for what is not given here.",
)
def graph_modules(
    model: torch.nn.Module,
    scope: Sequence[str] | str = (),
    *,
    warmup: int = 3,
    max_graphs: int = 8,
    max_runners: int = 16,
    strict: bool = False,
    on_error: PairOnError = "eager",
    outputs: Outputs = "copy",
    generators: Sequence[torch.Generator] = (),
    ignore: Sequence[str] = (),
    safe_hooks: Sequence[Hook] = (),
    audit: Audit = "auto",
    single_mempool: bool = False,
    registry: ScopeRegistry | None = None,
    config: Any = None,
    session: Session | None = None,
) -> GraphedModules:
    """Graph the parts of a model that a scope names; the other parts run eagerly.

    Example:
        >>> handle = stepgraph.graph_modules(model, scope=["attn", "moe_router"])
        >>> for batch in loader:                     # train as before: warm-up, capture and replay are automatic
        ...     loss = model(batch).mean()
        ...     loss.backward()
        >>> print(handle.report())

    A scope is any of the words `attn`, `mlp`, `moe`, `moe_router`, `moe_preprocess`, `mamba`, or paths and globs
    (`"layers.*.self_attn"`); without a scope, whole layers are graphed. Gradients flow as in eager. The graphs stay if
    the handle is dropped; `close()` frees them. Before the rounds that `audit` names, each kind of call is recorded
    again, without effect, and compared. A module whose operations have changed is captured again, with a warning.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"graph_modules was given {model!r}, {with_article(type(model))}, but it graphs parts of a torch.nn.Module",
            rule="option",
            why="a scope names modules inside a model.",
            fix="call graph_modules(model, scope). For a function use stepgraph.capture(function).",
        )
    why = "it maps the words of a scope to submodules of your layers."
    expect("registry", registry, (ScopeRegistry,), why, "pass ScopeRegistry().register(MyLayer, attn='attention').")
    parts = (registry or ScopeRegistry()).resolve(model, read_scope(scope) or getattr(config, "scope", ()))
    for part in parts:
        refuse_graphed(part.module, part.method, part.path)
    options = ModuleOptions(
        warmup=warmup,
        max_graphs=max_graphs,
        max_runners=max_runners,
        strict=strict,
        on_error=on_error,
        outputs=outputs,
        generators=generators,
        ignore=ignore,
        safe_hooks=safe_hooks,
        audit=audit,
        single_mempool=single_mempool,
        eager_reason=getattr(config, "reason_for_eager", None),
    )
    return GraphedModules(ModuleSession(session, model), parts, options)


def refuse_graphed(module: torch.nn.Module, method: str, path: str = "") -> None:
    """Refuse to graph a method that has graphs."""
    installed = [vars(module).get(name) for name in (method, "_compiled_call_impl")]
    if any(isinstance(graphs, ModuleGraphs) and not graphs.session.is_closed for graphs in installed):
        raise InvalidArgument(
            f"`{path or type(module).__name__}` is graphed already",
            rule="scope",
            why="a graph cannot be recorded inside the recording of another graph.",
            fix="call close() on the first handle, or leave this part out of the scope.",
        )


class GraphedModules:
    """The graphed parts of a model, with a report, `reset()` and `close()`."""

    def __init__(self, shared: ModuleSession, parts: Sequence[Part], options: ModuleOptions) -> None:
        self._shared = shared
        with interrupts_held() as raise_held, contextlib.ExitStack() as restore:  # all parts, or none
            for part in parts:
                method = called_method(part.module, part.method)
                manager = ModuleGraphs(options, part.module, method, session=shared, name=part.path)
                restore.callback(put_in_place(part.module, method, manager))
            raise_held()
            self._restore = restore.pop_all()

    def __repr__(self) -> str:
        managers = self._shared.managers
        sums = (sum(counts) for counts in zip((0, 0, 0), *(manager.tally() for manager in managers), strict=True))
        return outline(quantities(graphed_modules=len(managers)), *sums, is_closed=self._shared.is_closed)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model whose parts are graphed."""
        return self._shared.model

    @property
    def paths(self) -> list[str]:
        """The paths of the graphed parts."""
        return [manager.name for manager in self._shared.managers]

    @property
    def replays(self) -> int:
        """Replayed forwards so far; cheaper than a report."""
        return sum(manager.tally()[1] for manager in self._shared.managers)

    @property
    def audits(self) -> int:
        """Audits so far; cheaper than a report."""
        return self._shared.turns.audits

    def report(self) -> ModuleReport:
        """Return the counts of captures, replays and eager calls, part by part."""
        return report_on(self._shared)

    def static_buffers(self) -> list[CudagraphBufferMetadata]:
        """List the memory at the edges of the graphs. It holds what the last replays left there: read it only."""
        return static_buffers(self._shared)

    @entry_point
    def create_cudagraphs(self) -> None:
        """Capture the calls of the last round now, without waiting for the end of the warm-up."""
        self._shared.create_cudagraphs()

    def reset(self) -> None:
        """Free all graphs; the next calls warm up and are captured again."""
        self._shared.delete_cuda_graphs()

    def close(self) -> None:
        """Free the graphs and restore the modules. It may be called twice."""
        self._shared.close()
        self._restore.close()

    def __enter__(self) -> GraphedModules:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
