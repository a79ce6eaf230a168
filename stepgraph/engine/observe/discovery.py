"""Discovery finds what a step touches (`StepObjects`) while it runs: its modules, parameters and optimizers.

During warm-up torch's global hooks report the modules that are called and the optimizers that step, and the roots of
each backward lead to the accumulators of every leaf that gets a gradient, so that parameters used without a module are
found too. The hooks are removed when the call is over, and ignore other threads.

Compiled code calls no hooks, and must not: the compiler would trace them, and compile again once they are gone. So the
compiler is shown none, and the modules of compiled code are found through its closure. Where modules have forward
pre-hooks of their own, and in newer versions of torch for a module whose `compile()` was called, compiled code asks
before it runs whether there are hooks for all modules; so ours are taken out whenever such compiled code is called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from stepgraph.engine.backends.threads import for_this_thread, replaced
from stepgraph.engine.observe.finder import compilers, is_compiled, own_compilers, reachable
from stepgraph.engine.observe.step_objects import StepObjects
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps


@dataclass(frozen=True, slots=True)
class Reached:
    """The objects in reach of a function."""

    function: Callable[..., Any]
    objects: list[Any]


@contextlib.contextmanager
def discovering(
    touched: StepObjects,
    function: Callable[..., Any],
    inputs: Container[int],
    on_optimizer: Callable[[Optimizer], None],
    found: Reached | None = None,
) -> Iterator[frozenset[int]]:
    """Note what a call touches; gives the objects known before it, by id, for `StepObjects.let_go`.

    `inputs` are its tensors by id; `on_optimizer` sees optimizers before they step. `found`: the objects in reach that
    the same call has found already.
    """
    objects = touched.objects
    if objects is None:
        objects = found.objects if found is not None and found.function is function else reachable(function)
        touched.objects = [v for v in objects if issubclass(type(v), torch.nn.Module) or is_compiled(v)]
    for value in objects:
        touched.add_reachable(value)
    modules = [value for value in objects if issubclass(type(value), torch.nn.Module)]
    compiled = [compiler for value in objects for compiler in compilers(value)]
    asking: list[Any] = []
    if compiled:
        for module in modules:
            touched.add_module(module)
        has_hooks = any(m._forward_pre_hooks for m in touched.modules)
        asking = compiled if has_hooks else [compiler for module in modules for compiler in own_compilers(module)]

    parts = (part for module in modules for part in (*module.modules(), *module.parameters()))
    before = touched.known() | frozenset(map(id, (*objects, *parts)))

    def optimizer_hook(optimizer: Optimizer) -> None:
        touched.add_optimizer(optimizer)
        on_optimizer(optimizer)

    def backward(below: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        touched.differentiates = True
        touched.add_accumulators(tensors, inputs)
        below(tensors, *args, **kwargs)

    def grad(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        touched.differentiates = True
        return below(*args, **kwargs)

    with (
        at_optimizer_steps(optimizer_hook),
        _seeing_modules(touched.add_module, asking),
        replaced(torch.autograd, "backward", backward),  # torch has no hook for the roots of a backward
        replaced(torch.autograd, "grad", grad),
    ):
        yield before


@contextlib.contextmanager
def _seeing_modules(see: Callable[[torch.nn.Module], None], asking: Iterable[Any]) -> Iterator[None]:
    """Report each module that the step calls. `asking`: compiled code that asks whether there are such hooks."""
    is_ours = for_this_thread()

    def hook(module: torch.nn.Module, _: Any) -> None:
        if is_ours():
            see(module)

    compiler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)  # if it is in use at all
    hidden = _Hidden(hook if compiler is None else torch.compiler.disable(hook))

    def has_any_global_hook(below: Callable[[], bool]) -> bool:
        """torch warns of hooks for all modules when it calls a compiled one: ours are hidden."""
        hidden.take_out()
        try:
            return below()
        finally:
            hidden.put_in()

    def entered() -> Callable[[], None]:
        hidden.take_out()
        return hidden.put_in

    with contextlib.ExitStack() as stack:
        stack.callback(hidden.close)
        if compiler is not None:
            stack.enter_context(replaced(torch_module, "_has_any_global_hook", has_any_global_hook))
            compiler.register_start_callback(hidden.take_out)
            stack.callback(compiler.remove_start_callback, hidden.take_out)
            compiler.register_end_callback(hidden.put_in)
            stack.callback(compiler.remove_end_callback, hidden.put_in)
        for compiled in {id(one): one for one in asking if isinstance(getattr(one, _ENTERING, None), list)}.values():
            getattr(compiled, _ENTERING).append(entered)  # what torch calls at each call of this compiled code
            stack.callback(getattr(compiled, _ENTERING).remove, entered)
        hidden.put_in()
        yield


_ENTERING = "enter_exit_hooks"


class _Hidden:
    """A hook for all modules that can be taken out for a while, from any thread."""

    def __init__(self, hook: Callable[[torch.nn.Module, Any], None]) -> None:
        self._hook = hook
        self._handle: RemovableHandle | None = None
        self._times_out = 1
        self._is_closed = False
        self._changing = threading.RLock()

    def put_in(self, *_: Any) -> None:
        with self._changing:
            self._times_out = max(0, self._times_out - 1)  # a compilation that had begun before may end
            if self._handle is None and not self._times_out and not self._is_closed:
                self._handle = torch_module.register_module_forward_pre_hook(self._hook)

    def take_out(self, *_: Any) -> None:
        with self._changing:
            self._times_out += 1
            if self._handle is not None:
                self._handle.remove()
                self._handle = None

    def close(self) -> None:
        """Take it out for good: another thread may be compiling now."""
        with self._changing:
            self._is_closed = True
            self.take_out()


def scalers_of(function: Callable[..., Any]) -> list[torch.amp.GradScaler]:
    """The enabled GradScalers that a step can name."""
    return scalers_among(reachable(function))


def scalers_among(objects: Iterable[Any]) -> list[torch.amp.GradScaler]:
    """The enabled GradScalers among these objects."""
    return [value for value in objects if issubclass(type(value), torch.amp.GradScaler) and value.is_enabled()]
