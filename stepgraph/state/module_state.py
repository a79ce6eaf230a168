"""What a step touches: its modules, parameters and optimizers, found while it runs.

During warm-up torch's global hooks tell which modules are called and which optimizers step, and the roots of each
backward lead to the accumulators of every leaf that a gradient flows to, so that parameters used without a module are
found too. The hooks are gone when the call is over, and mind no thread but the step's own.

Compiled code calls no hooks, and must not: the compiler would trace them, and compile again once they are gone. So it
is shown none, and of compiled code the closure tells the modules. Everything around it is seen by hooks as ever. Where
modules have forward pre-hooks of their own, compiled code also asks, before it runs, whether there are hooks for all
modules; so there ours are taken out whenever compiled code that the closure shows is called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from stepgraph.backends.threads import for_this_thread, replaced
from stepgraph.state.optimizer_steps import at_optimizer_steps
from stepgraph.state.reach import compilers, reachable


class Touched:
    """The modules, parameters and optimizers of a step, each once, in the order found."""

    def __init__(self) -> None:
        self._modules: dict[int, torch.nn.Module] = {}
        self._named: dict[int, torch.nn.Module] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._names: dict[int, str] = {}
        self._roots: Counter[str] = Counter()

    @property
    def modules(self) -> list[torch.nn.Module]:
        return list(self._modules.values())

    @property
    def all_modules(self) -> list[torch.nn.Module]:
        """Those that the step calls and those that it can name: it may use their weights in a way of its own."""
        return list((self._modules | self._named).values())

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters.values())

    @property
    def all_parameters(self) -> list[torch.Tensor]:
        """The parameters that get gradients, and all others of the modules."""
        found = dict(self._parameters)
        for module in self._named.values():
            found |= {id(p): p for p in module._parameters.values() if p is not None}
        return list(found.values())

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self._optimizers.values())

    @property
    def named_modules(self) -> dict[str, torch.nn.Module]:
        """The modules by their paths."""
        return {self.name(module): module for module in self._modules.values()}

    def name(self, value: torch.nn.Module | torch.Tensor) -> str:
        """A module's or parameter's path, as far as it is known."""
        return self._names.get(id(value), type(value).__name__)

    def add_module(self, module: torch.nn.Module, name: str = "") -> None:
        """A module with all that is in it."""
        if id(module) in self._modules:
            return
        root = name or self._root(module)
        for path, child in module.named_modules():
            if id(child) not in self._modules:
                self._modules[id(child)] = child
                self._names.setdefault(id(child), f"{root}.{path}" if path else root)
        for path, parameter in module.named_parameters():
            self.add_parameter(parameter, f"{root}.{path}")

    def _root(self, module: torch.nn.Module) -> str:
        """The name of a model: its own, or one that no other has."""
        if id(module) in self._names:
            return self._names[id(module)]
        kind = type(module).__name__
        self._roots[kind] += 1
        return kind if self._roots[kind] == 1 else f"{kind}#{self._roots[kind]}"

    def add_parameter(self, parameter: torch.Tensor, name: str = "") -> None:
        self._parameters.setdefault(id(parameter), parameter)
        if name:
            self._names.setdefault(id(parameter), name)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.setdefault(id(optimizer), optimizer)
        self.add_reachable(optimizer)

    def add_reachable(self, value: Any) -> None:
        """Parameters that the step can name, whatever it does with them: it may only zero their gradients."""
        if isinstance(value, torch.nn.Module):
            root = self._root(value)
            for path, module in value.named_modules():
                self._named.setdefault(id(module), module)
                self._names.setdefault(id(module), f"{root}.{path}" if path else root)
            for path, parameter in value.named_parameters():
                if parameter.requires_grad:
                    self.add_parameter(parameter, f"{root}.{path}")
        elif isinstance(value, Optimizer):
            for group in value.param_groups:
                for parameter in group["params"]:
                    self.add_parameter(parameter)
        elif isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
            self.add_parameter(value)

    def add_accumulators(self, roots: Any, inputs: Container[int]) -> None:
        """Every leaf that a backward from these tensors gives a gradient to, but for the call's own inputs (by id)."""
        for leaf in leaves_behind(roots):
            if id(leaf) not in inputs:
                self.add_parameter(leaf)


def leaves_behind(roots: Any) -> Iterator[torch.Tensor]:
    tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    nodes = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


@contextlib.contextmanager
def discovering(
    touched: Touched,
    function: Callable[..., Any],
    inputs: Container[int],
    on_optimizer: Callable[[Optimizer], None],
) -> Iterator[None]:
    """Note what a call touches. `inputs` are its tensors by id; `on_optimizer` sees optimizers before they step."""
    objects = list(reachable(function))
    for value in objects:
        touched.add_reachable(value)
    modules = [value for value in objects if isinstance(value, torch.nn.Module)]
    compiled = [compiler for value in objects for compiler in compilers(value)]
    asking: list[Any] = []
    if compiled:
        for module in modules:
            touched.add_module(module)
        if any(m._forward_pre_hooks for m in touched.modules):
            asking = compiled

    def optimizer_hook(optimizer: Optimizer) -> None:
        touched.add_optimizer(optimizer)
        on_optimizer(optimizer)

    def backward(below: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        touched.add_accumulators(tensors, inputs)
        below(tensors, *args, **kwargs)

    with (
        at_optimizer_steps(optimizer_hook),
        _seeing_modules(touched.add_module, asking),
        replaced(torch.autograd, "backward", backward),  # torch has no hook for the roots of a backward
    ):
        yield


@contextlib.contextmanager
def _seeing_modules(see: Callable[[torch.nn.Module], None], asking: Iterable[Any]) -> Iterator[None]:
    """Show each module that the step calls. `asking`: whose compiled code asks whether there are such hooks."""
    is_ours = for_this_thread()

    def hook(module: torch.nn.Module, _: Any) -> None:
        if is_ours():
            see(module)

    compiler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)  # if it is in use at all
    hidden = _Hidden(hook if compiler is None else torch.compiler.disable(hook))

    def has_any_global_hook(below: Callable[[], bool]) -> bool:
        """torch warns of hooks for all modules when it calls a compiled one: ours is not the user's business."""
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
        """Take it out for good: another thread may be compiling right now."""
        with self._changing:
            self._is_closed = True
            self.take_out()
