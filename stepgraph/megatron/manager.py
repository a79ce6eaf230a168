"""`CudaGraphManager` graphs the calls of a module by Megatron's contract.

There are two ways to use it. A module keeps a manager and passes its calls on:

    self.cudagraph_manager = CudaGraphManager(config)
    ...
    def __call__(self, *args, **kwargs):
        return self.cudagraph_manager(self, args, kwargs)

Or the manager takes the place of a method:

    CudaGraphManager(config, base_module=layer, function_name="forward")
    layer(x)                            # graphed
    layer.forward(x, eager=True)        # the original

Both have the graphs of `graph_modules` behind them: `ModuleGraphs`. Each manager has its own memory and its own order
of calls; managers with one `session` share both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from stepgraph.config.spellings import at_least_one_step
from stepgraph.core.errors import InvalidArgument, StepgraphError, nearest
from stepgraph.core.frames import untraced
from stepgraph.core.tracebacks import entry_point, trim
from stepgraph.core.wording import quantities, with_article
from stepgraph.engine.call.options import checked
from stepgraph.engine.call.report import outline
from stepgraph.engine.guards.signature import argument_names
from stepgraph.engine.parts.modules.graph_modules import refuse_graphed
from stepgraph.engine.parts.modules.manager import ModuleGraphs
from stepgraph.engine.parts.modules.options import options_from
from stepgraph.engine.parts.modules.report import ModuleReport, report_on
from stepgraph.engine.parts.modules.session import ModuleSession
from stepgraph.engine.parts.modules.static_buffers import CudagraphBufferMetadata, static_buffers
from stepgraph.engine.record.pair.module_method import called_method, put_in_place

_KEYWORDS = ("eager", "cache_key")
"""Keywords of an installed method that are not passed on."""


class CudaGraphManager:
    """Graphs the calls of a module that is passed to it, or takes the place of a module's method.

    `config` is read for `cuda_graph_impl`, `cuda_graph_warmup_steps`, `cuda_graph_max_runners` and
    `cuda_graph_use_single_mempool`. `num_warmup_steps` overrides its warm-up. With `inline_capture=True` a kind of call
    is captured after its first eager call, whatever the warm-up of the config: before that call returns if no backward
    follows it, else at the first call after its backward. With `need_backward=False` calls run without gradients.
    `pg_collection` and `cache_key` are accepted for Megatron's callers. They have no effect: calls in flight are
    counted here, and graphs are found by the signature of a call.

    Example:
        >>> CudaGraphManager(config, base_module=layer, function_name="forward")
        >>> layer(x).sum().backward()
    """

    @entry_point
    def __init__(
        self,
        config: Any = None,
        base_module: torch.nn.Module | None = None,
        function_name: str | None = None,
        need_backward: bool = True,
        pg_collection: Any = None,
        inline_capture: bool = False,
        num_warmup_steps: int | None = None,
        *,
        session: ModuleSession | None = None,
    ) -> None:
        self._arguments = (config, None, None, need_backward, pg_collection, inline_capture, num_warmup_steps)
        options = options_from(config)
        if num_warmup_steps is not None:
            is_zero = num_warmup_steps == 0 and not isinstance(num_warmup_steps, bool)
            steps = at_least_one_step(0) if is_zero else checked("num_warmup_steps", num_warmup_steps, int)
            options = replace(options, warmup=steps)
        elif checked("inline_capture", inline_capture, bool):
            options = replace(options, warmup=1)
        self.options, self._need_backward = options, need_backward
        self._is_inline = inline_capture and options.warmup == 1
        self.session = session if session is not None else ModuleSession()
        self._graphs: dict[torch.nn.Module, _Calls] = {}
        """The graphs of each module that was passed."""
        self._under_way: set[tuple[int, int]] = set()
        """The threads and modules of calls that have not returned."""
        self._installed: _Calls | None = None
        self._take_back: Callable[[], None] = lambda: None
        if function_name is not None:
            method = _installable(base_module, function_name)
            assert base_module is not None
            self._installed = self._graphs[base_module] = self._calls(base_module, method)
            self._take_back = put_in_place(base_module, method, self._installed)

    def __reduce__(self) -> Any:
        """Let a copy, by copy.deepcopy or pickle, be a manager without graphs that is not installed."""
        return CudaGraphManager, self._arguments

    def __repr__(self) -> str:
        tallies = [graphs.tally() for graphs in self._graphs.values()]
        sums = (sum(counts) for counts in zip((0, 0, 0), *tallies, strict=True))
        return outline(quantities(graphed_modules=len(tallies)), *sums, is_closed=self.session.is_closed)

    # -- calling

    @untraced
    def __call__(
        self, module: Any = None, args: Any = None, kwargs: Any = None, cache_key: Any = None, **others: Any
    ) -> Any:
        """Call a module's forward, with its hooks, or the installed method: by replay where a graph fits."""
        try:
            is_call = isinstance(module, torch.nn.Module) and isinstance(args, (tuple, list))
            if not is_call or not isinstance(kwargs, Mapping) or others:
                raise _called_as_forward(module)
            graphs = self._graphs.get(module)
            if graphs is None:
                graphs = self._graphs_of(module)
            if graphs is self._installed:
                return graphs(*args, **kwargs)
            call = (threading.get_ident(), id(module))
            if call in self._under_way:
                raise _called_inside(module)
            self._under_way.add(call)
            try:
                return _with_hooks(graphs, args, kwargs)
            finally:
                self._under_way.discard(call)
        except StepgraphError as error:
            trim(error)
            raise

    def _graphs_of(self, module: torch.nn.Module) -> _Calls:
        if self._installed is not None:
            owner, method = type(self._installed.module).__name__, self._installed.function_name
            raise InvalidArgument(
                f"the manager of {owner}.{method} was called with another module, {type(module).__name__}",
                rule="option",
                why="a manager with a function_name has the graphs of that method.",
                fix="make another manager for the other module: CudaGraphManager(config).",
            )
        method = called_method(module)
        refuse_graphed(module, method)
        made = self._graphs[module] = self._calls(module, method)
        return made

    def _calls(self, module: torch.nn.Module, method: str) -> _Calls:
        return _Calls(self.options, module, method, self._need_backward, self._is_inline, self.session)

    # -- around the graphs

    def report(self) -> ModuleReport:
        """Return the report on all modules of its session."""
        return report_on(self.session)

    def static_buffers(self) -> list[CudagraphBufferMetadata]:
        """List the memory at the edges of the graphs. It holds what the last replays left there: read it only."""
        return static_buffers(self.session)

    def reset(self) -> None:
        """Free all graphs of its session; the next calls warm up and are captured again."""
        self.session.delete_cuda_graphs()

    def close(self) -> None:
        """Free all graphs of its session and restore the method. Calls run eagerly afterwards."""
        self.session.close()
        self._take_back()


class _Calls(ModuleGraphs):
    """The graphs of one method, called with Megatron's keywords."""

    def __init__(
        self,
        options: Any,
        module: torch.nn.Module,
        method: str,
        need_backward: bool,
        is_inline: bool,
        session: ModuleSession,
    ) -> None:
        super().__init__(options, module, method, need_backward, session=session)
        self._is_inline = is_inline

    @untraced
    def __call__(self, *args: Any, eager: bool = False, cache_key: Any = None, **kwargs: Any) -> Any:
        """Call the method; with `eager=True` the original."""
        if eager:
            return self.original(*args, **kwargs)
        if not self._is_inline:
            return super().__call__(*args, **kwargs)
        eager_calls = self.eager_reasons["warm-up"]
        result = super().__call__(*args, **kwargs)
        if self.eager_reasons["warm-up"] > eager_calls and self.session.recorder.is_settled:
            self.session.create_cudagraphs()
        return result


def _with_hooks(graphs: _Calls, args: Any, kwargs: Any) -> Any:
    """Call a module that is not installed in its forward's place, with the module's own hooks around the graphs."""
    module = graphs.module
    if not (module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks):
        return graphs(*args, **kwargs)
    take_back = put_in_place(module, graphs.function_name, graphs)
    try:
        return torch.nn.Module.__call__(module, *args, **kwargs)
    finally:
        take_back()


def _installable(module: Any, name: str) -> str:
    """The attribute that a manager takes the place of, or an error."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            f"CudaGraphManager has function_name={name!r} and base_module={module!r}",
            rule="option",
            why="the manager takes the place of a method of a torch.nn.Module.",
            fix=f"pass base_module=layer, function_name={name!r}.",
        )
    if not callable(getattr(module, name, None)):
        near = nearest(name, [each for each in dir(module) if callable(getattr(module, each, None))])
        raise InvalidArgument(
            f"{type(module).__name__} has no method {name!r}",
            rule="option",
            why="the manager takes the place of a method.",
            fix=f"did you mean {near!r}?" if near else "pass function_name='forward', for example.",
        )
    method = called_method(module, name)
    refuse_graphed(module, method)
    taken = [word for word in _KEYWORDS if word in argument_names(getattr(module, name))]
    if taken:
        raise InvalidArgument(
            f"{type(module).__name__}.{name} has a parameter `{taken[0]}`",
            rule="option",
            why="an installed manager reads eager= and cache_key= itself.",
            fix="give the parameter another name, or use graph_modules, which passes all keywords on.",
        )
    return method


def _called_as_forward(module: Any) -> InvalidArgument:
    return InvalidArgument(
        f"CudaGraphManager was called with {_described(module)}, not as manager(module, args, kwargs)",
        rule="option",
        why="a manager does not stand in the place of a forward; it is given the module and the arguments of the call.",
        fix='CudaGraphManager(config, base_module=layer, function_name="forward") installs itself. '
        "Or call manager(layer, (x,), {}).",
    )


def _described(module: Any) -> str:
    return "no module" if module is None else with_article(type(module))


def _called_inside(module: torch.nn.Module) -> InvalidArgument:
    return InvalidArgument(
        f"the forward of {type(module).__name__} calls the manager that calls this forward",
        rule="option",
        why="the manager graphs the module's forward, so the call would never end.",
        fix="call the manager in __call__, or pass base_module and function_name to graph another method.",
    )
