"""`StepObjects` lists what a step touches: its modules, parameters and optimizers, each once, with their names.

Some of it is made in a call and ends with it: a loss module made on the spot, a copy of the model for an inner loop. It
must not be kept alive, nor make each call look like the first. So after each call the new objects are released, and
only those that somebody else still holds are taken back.

Ended objects leave two traces. Their classes: the values that a constructor and a `forward` read are baked into a
graph. And where one is built like a module that the step can name, it may have been a copy of that one, so that one
counts as called: its attributes and hooks are what the copy had.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.executed_code import ExecutedCode


class StepObjects:
    """The modules, parameters and optimizers of a step, each once, in the order found."""

    def __init__(self) -> None:
        self._modules: dict[int, torch.nn.Module] = {}
        self._named: dict[int, torch.nn.Module] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._named_optimizers: dict[int, Optimizer] = {}
        self._names: dict[int, str] = {}
        self.objects: list[Any] | None = None
        """The models and compiled functions that it can name, from before its first call."""
        self.buckets: dict[int, weakref.ref[torch.Tensor]] = {}
        """Gradients in DDP's memory, by id."""
        self.differentiates = False
        self.ran = ExecutedCode()
        self._ended: weakref.WeakKeyDictionary[type, None] = weakref.WeakKeyDictionary()

    @property
    def modules(self) -> list[torch.nn.Module]:
        return list(self._modules.values())

    @property
    def all_modules(self) -> list[torch.nn.Module]:
        """The modules that the step calls and those that it can name: it may use their weights directly."""
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
    def all_optimizers(self) -> list[Optimizer]:
        """The optimizers that the step steps and those that it can name: it may zero or clip their gradients."""
        return list((self._optimizers | self._named_optimizers).values())

    @property
    def named_modules(self) -> dict[str, torch.nn.Module]:
        """The modules by their paths."""
        return {self.name(module): module for module in self._modules.values()}

    def name(self, value: torch.nn.Module | torch.Tensor) -> str:
        """A module's or parameter's path, where it is known."""
        return self._names.get(id(value), type(value).__name__)

    def add_module(self, module: torch.nn.Module, name: str = "") -> None:
        """A module with all its parts; `name` is its path, if it is known."""
        if name:
            self._names.setdefault(id(module), name)
        if id(module) not in self._modules:
            self._add_parts(module, self._modules, frozen=True)

    def _add_parts(self, model: torch.nn.Module, place: dict[int, torch.nn.Module], *, frozen: bool) -> None:
        """The modules of a model and its parameters; `frozen`: also those without a gradient."""
        root = self._names.get(id(model)) or numbered(type(model).__name__, set(self._names.values()))
        for path, module in model.named_modules():
            place.setdefault(id(module), module)
            self._names.setdefault(id(module), f"{root}.{path}" if path else root)
        for path, parameter in model.named_parameters():
            if frozen or parameter.requires_grad:
                self.add_parameter(parameter, f"{root}.{path}")

    def add_parameter(self, parameter: torch.Tensor, name: str = "") -> None:
        self._parameters.setdefault(id(parameter), parameter)
        if name:
            self._names.setdefault(id(parameter), name)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.setdefault(id(optimizer), optimizer)
        self.add_reachable(optimizer)

    def add_reachable(self, value: Any) -> None:
        """Parameters that the step can name, even if it only zeroes their gradients."""
        if issubclass(type(value), torch.nn.Module):
            self._add_parts(value, self._named, frozen=False)
        elif issubclass(type(value), Optimizer):
            self._named_optimizers.setdefault(id(value), value)
            for group in value.param_groups:
                for parameter in group["params"]:
                    self.add_parameter(parameter)
        elif issubclass(type(value), torch.Tensor) and value.is_leaf and value.requires_grad:
            self.add_parameter(value)

    def add_accumulators(self, roots: Any, inputs: Container[int]) -> None:
        """Every leaf that a backward from these tensors gives a gradient to, except the call's own inputs (by id)."""
        for leaf in leaves_behind(roots):
            if id(leaf) not in inputs:
                self.add_parameter(leaf)

    # -- what ends with a call

    @property
    def _places(self) -> tuple[dict[int, Any], ...]:
        return self._modules, self._named, self._parameters, self._optimizers, self._named_optimizers

    @property
    def ended_kinds(self) -> list[type]:
        """The classes of modules and optimizers that were made in a call and ended with it."""
        return list(self._ended)

    def known(self) -> frozenset[int]:
        """All objects noted by now, by id."""
        return frozenset(key for place in self._places for key in place)

    def let_go(self, before: frozenset[int]) -> set[int]:
        """After a call: forget what was made since `before` and is gone by now. Returns it, by id."""
        new = [(place, key) for place in self._places for key in place if key not in before]
        builds = {key: _build(module) for key, module in self._modules.items() if key not in before}
        kinds = {key: type(optimizer) for key, optimizer in self._optimizers.items()}
        kinds |= {key: build[0] for key, build in builds.items()}
        held = [(place, key, weakref.ref(place.pop(key))) for place, key in new]
        if any(ref() is not None for _, _, ref in held):
            gc.collect()  # it may only be held by itself
        gone = {key for _, key, ref in held if ref() is None}
        for place, key, ref in held:
            value = ref()
            if value is not None:
                place[key] = value
        roots = {builds[key] for key in gone & builds.keys() if "." not in self._names[key]}
        for key in gone:
            self._names.pop(key, None)
        self._ended.update((kind, None) for key, kind in kinds.items() if key in gone)
        for module in self._named.values():
            if type(module) in {root[0] for root in roots} and _build(module) in roots:
                self.add_module(module)
        return gone


def numbered(name: str, taken: Container[str]) -> str:
    """A name that is not taken: `Linear`, `Linear#2`, ..."""
    spellings = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
    return next(spelling for spelling in spellings if spelling not in taken)


def _build(module: torch.nn.Module) -> tuple[type, ...]:
    """The classes of a module's parts; a copy has the same."""
    return tuple(map(type, module.modules()))


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
