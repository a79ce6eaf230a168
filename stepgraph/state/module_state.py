"""What a step touches: its modules, parameters and optimizers, found while it runs.

During warm-up torch's global hooks tell which modules are called and which optimizers step, and the roots of each
backward lead to the accumulators of every leaf that a gradient flows to, so that parameters used without a module are
found too. The hooks are gone when the call is over. With compiled code no module hook is set (the compiler would trace
it, and compile again once it is gone); the closure tells the modules then.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from stepgraph.state.reach import is_compiled, reachable


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
    compiled = any(is_compiled(value) for value in objects)
    for value in objects:
        touched.add_reachable(value)

    def optimizer_hook(optimizer: Optimizer, *_: Any) -> None:
        touched.add_optimizer(optimizer)
        on_optimizer(optimizer)

    with contextlib.ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(optimizer_hook).remove)
        if compiled:
            for value in objects:
                if isinstance(value, torch.nn.Module):
                    touched.add_module(value)
        else:
            hook = register_module_forward_pre_hook(lambda module, _: touched.add_module(module))
            stack.callback(hook.remove)
        stack.enter_context(_backward_roots(lambda roots: touched.add_accumulators(roots, inputs)))
        yield


@contextlib.contextmanager
def _backward_roots(see: Callable[[Any], None]) -> Iterator[None]:
    """Show the roots of each backward. torch has no hook for this, so its one entry point is wrapped meanwhile."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        see(tensors)
        original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
