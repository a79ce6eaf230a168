"""A `Program` is the state that a training step shares with the rest of the process, by name.

Two runs can be compared only if they begin at the same state, and a user's program must not notice that its step was
called to be looked at. So the state is found, read and restored in one place. It is found as the watch finds it
(`finder`): models, optimizers, schedulers, scalers, tensors and generators that the step can name, the containers and
caches that hold them (`holdings`), its variables, and the arguments of a call. It is restored in place, in the same
tensors, because graphs use their addresses; what was made meanwhile (gradients, optimizer state) is taken away again.
Python's and numpy's random generators are restored too. This takes as much memory as the model and the optimizers'
state.

No search finds everything. So the log of a call also says which memory it wrote to (`oplog.writes`): what is not among
that found here is restored as well, and a comparison that depends on it is not judged.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim.optimizer import Optimizer

from stepgraph.core.collector import state_of
from stepgraph.core.storage import is_strided, refuse_lazy, storage_of
from stepgraph.core.tensor_memory import SavedContents
from stepgraph.core.tree import flatten, paths
from stepgraph.engine.backends import backend_for
from stepgraph.engine.backends.random.tracker import CudaRNGStatesTracker, tracker_for
from stepgraph.engine.guards.host_values.parts import Place
from stepgraph.engine.observe.finder import devices, named_reachable, named_with_variables
from stepgraph.engine.observe.holdings import STATEFUL, Holdings
from stepgraph.engine.observe.own_changes import ModelState
from stepgraph.engine.observe.step_objects import numbered
from stepgraph.engine.oplog.writes import Writes

__all__ = ["KINDS", "Key", "Program", "program_of"]

Key = tuple[str, str]
"""The kind and the name of a value."""
KINDS = ("outputs", "arguments", "gradients", "parameters", "optimizer state", "buffers", "tensors", "random state")
"""All kinds of values, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Program:
    """The objects with state that a step uses, by name."""

    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    """Schedulers and scalers: objects with `state_dict` and `load_state_dict`."""
    holders: Mapping[str, Any] = field(default_factory=dict)
    """Other objects that the step can name: containers, caches, objects of the user's. They are restored."""
    variables: tuple[Place, ...] = ()
    """Globals and closed-over variables that the step can name. They are restored."""
    arguments: tuple[torch.Tensor, ...] = ()
    """Tensors of a call: a step may change them, and they say where a program without state runs."""

    @property
    def device(self) -> torch.device:
        """The device of the first tensor that is on a GPU, else the CPU."""
        held = (self.modules, self.optimizers, self.tensors)
        found = devices([*(value for group in held for value in group.values()), *self.arguments])
        return next((device for device in found if device.type == "cuda"), torch.device("cpu"))

    @property
    def tracker(self) -> CudaRNGStatesTracker:
        return tracker_for(backend_for(self.device))

    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters by name, those that only an optimizer holds included; each once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for root, module in self.modules.items():
            for path, parameter in module.named_parameters():
                found.setdefault(id(parameter), (f"{root}.{path}", parameter))
        for name, optimizer in self.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                for j, parameter in enumerate(group["params"]):
                    found.setdefault(id(parameter), (f"{name}.group{i}[{j}]", parameter))
        return dict(found.values())

    def buffers(self) -> dict[str, torch.Tensor]:
        found = {id(b): (f"{root}.{path}", b) for root, m in self.modules.items() for path, b in m.named_buffers()}
        return dict(found.values())

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """The step's tensors that are no parameters."""
        known = {id(value) for value in (*self.parameters().values(), *self.buffers().values())}
        return {name: tensor for name, tensor in self.tensors.items() if id(tensor) not in known}

    def values(self) -> dict[Key, Any]:
        """Everything that must be equal, as it is now: the tensors themselves, not copies."""
        parameters = self.parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        found: dict[Key, Any] = {("parameters", name): value for name, value in parameters.items()}
        found |= {("gradients", name): value.grad for name, value in parameters.items()}
        found |= {("buffers", name): value for name, value in self.buffers().items()}
        for name, tensor in self.own_tensors().items():
            found[("tensors", name)] = tensor
            found |= {("gradients", name): tensor.grad} if tensor.is_leaf and tensor.requires_grad else {}
        for name, optimizer in self.optimizers.items():
            found |= {("optimizer state", key): value for key, value in _optimizer_values(name, optimizer, names)}
        for name, other in self.others.items():
            leaves, _ = flatten(other.state_dict())
            found |= {("optimizer state", f"{name}.state_dict()[{i}]"): value for i, value in enumerate(leaves)}
        found |= {("random state", name): state for name, state in self._random_states().items()}
        return found

    def _random_states(self) -> dict[str, Any]:
        found: dict[str, Any] = {"torch, cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["torch, cuda"] = torch.cuda.get_rng_state(self.device)
        found |= {name: state_of(generator) for name, generator in self.generators.items()}
        found |= {f"tracker {name}": state for name, state in self.tracker.get_states().items()}
        return found

    def reseed(self, seed: int) -> None:
        """Give every generator of torch another state, each its own."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        for place, generator in enumerate(self.generators.values(), 1):
            generator.manual_seed(seed + place)

    def save(self) -> Saved:
        """Remember the state as it is now."""
        return Saved(self)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[Saved]:
        """Restore the state at the end of the block, however it ends."""
        saved = self.save()
        try:
            yield saved
        finally:
            saved.restore()


def _optimizer_values(name: str, optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    held: dict[Any, Any] = optimizer.state
    for key, state in dict.items(held):  # past the subclass that notes reads
        of = repr(key) if type(key) in (str, int) else names.get(id(key), "...")
        leaves, structure = flatten(state)
        yield from zip(paths(structure, f"{name}.state[{of}]"), leaves, strict=True)
    for i, group in enumerate(optimizer.param_groups):
        yield from ((f"{name}.group{i}[{key!r}]", value) for key, value in group.items() if key != "params")


class Saved:
    """The state of a program at one moment: what it holds, and copies of the contents of its tensors."""

    def __init__(self, program: Program) -> None:
        refuse_lazy([*program.parameters().items(), *program.buffers().items()], "the program")
        modules = list({id(m): m for root in program.modules.values() for m in root.modules()}.values())
        roots: list[tuple[str, Any]] = [*program.modules.items(), *program.optimizers.items(), *program.others.items()]
        self._holdings = Holdings([*roots, *program.holders.items()], program.variables)
        tensors = [*program.parameters().values(), *program.own_tensors().values(), *program.arguments]
        tensors += [tensor for _, tensor in self._holdings.tensors]
        self._grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
        self._model = ModelState(modules, [tensor for tensor, _ in self._grads])
        tensors += [grad for _, grad in self._grads if grad is not None]
        tensors += program.buffers().values()
        kept = [t for t in {id(t): t for t in tensors}.values() if _can_be_written(t)]
        self._contents = SavedContents(kept)
        self._random = _random_states(program)
        self.writes = Writes(filter(None, map(storage_of, kept)))
        """What calls write to besides; for calls that are logged with it."""

    def restore(self) -> None:
        """Bring the program back."""
        self._holdings.restore()
        self._model.restore()
        for tensor, grad in self._grads:
            tensor.grad = grad
        self._contents.put_back()
        self.writes.restore()
        for restore in self._random:
            restore()


def _random_states(program: Program) -> list[Callable[[], Any]]:
    """Functions that restore all random generators: torch's, the program's own, Python's and numpy's."""
    host, python, named = torch.get_rng_state(), random.getstate(), program.tracker.get_states()
    found: list[Callable[[], Any]] = [lambda: torch.set_rng_state(host), lambda: random.setstate(python)]
    if torch.cuda.is_initialized():
        on_devices = torch.cuda.get_rng_state_all()
        found.append(lambda: torch.cuda.set_rng_state_all(on_devices))
    found += [functools.partial(generator.set_state, state_of(generator)) for generator in program.generators.values()]
    if named:
        found.append(lambda: program.tracker.set_states(named))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        drawn = numpy.random.get_state()
        found.append(lambda: numpy.random.set_state(drawn))
    return found


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Check that a tensor has memory that torch lets us write, and that no two of its elements share it.

    One whose elements do is a view of another.
    """
    if tensor.is_meta or tensor.is_inference() or isinstance(tensor, UninitializedTensorMixin):
        return False
    if not is_strided(tensor):
        return True
    return not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def program_of(
    step: Callable[..., Any], batch: Iterable[Any] = (), generators: Iterable[torch.Generator] = ()
) -> Program:
    """Find the state of a step: what it can name, and what the arguments of a call hold."""
    found, variables = named_with_variables(step)
    leaves = flatten(tuple(batch))[0]
    objects = [value for value in leaves if issubclass(type(value), (torch.nn.Module, Optimizer, *STATEFUL))]
    found += [pair for value in objects for pair in named_reachable(functools.partial(_nothing, value))]
    given = [value for value in leaves if issubclass(type(value), torch.Generator)]
    found += [("generator", generator) for generator in (*generators, *given)]
    kinds: dict[type, dict[str, Any]] = {torch.nn.Module: {}, Optimizer: {}, torch.Tensor: {}, torch.Generator: {}}
    others: dict[str, Any] = {}
    holders: dict[str, Any] = {}
    seen: set[int] = set()
    for label, value in found:
        key = _address(value)
        place = next((place for kind, place in kinds.items() if issubclass(type(value), kind)), None)
        if place is None:
            place = others if issubclass(type(value), STATEFUL) else holders
        if key not in seen and not _is_default(value):
            seen.add(key)
            place[numbered(label, place)] = value
    modules, optimizers, tensors, made = kinds.values()
    held = Holdings([*modules.items(), *holders.items()], without=[*optimizers.values(), *others.values()])
    parts = (part for module in modules.values() for part in (*module.parameters(), *module.buffers()))
    seen.update(map(id, parts))
    for label, tensor in held.tensors:
        if id(tensor) not in seen:
            tensors[numbered(label, tensors)] = tensor
    arguments = tuple(value for value in leaves if issubclass(type(value), torch.Tensor))
    return Program(modules, optimizers, tensors, made, others, holders, tuple(variables), arguments)


def _address(value: Any) -> int:
    """What tells an object from others; a generator has several Python objects."""
    return int(getattr(value, "_cdata", 0)) if issubclass(type(value), torch.Generator) else id(value)


def _is_default(value: Any) -> bool:
    """Check for torch's own generators, which every program has."""
    if not issubclass(type(value), torch.Generator):
        return False
    known = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
    return any(_address(value) == _address(one) for one in known)


def _nothing(*_: Any) -> None:
    """Stands for a function that holds the arguments of a call."""
