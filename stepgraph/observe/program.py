"""A `Program` is the state that a training step shares with the rest of the process, by name.

Two runs can be compared only if they begin at the same state, and a user's program must not notice that its step was
called to be looked at. So the state is found, read and restored in one place. It is found as the watch finds it
(`finder`): models, optimizers, schedulers, scalers, tensors and generators that the step can name, and the arguments of
a call. It is restored in place, in the same tensors, because graphs use their addresses; what was made meanwhile
(gradients, optimizer state) is taken away again. Python's and numpy's random generators are restored too. This takes as
much memory as the model and the optimizers' state. Plain Python values are not restored: a step that changes one cannot
be captured.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from stepgraph.backends import backend_for
from stepgraph.collector import state_of
from stepgraph.observe.finder import devices, named_reachable
from stepgraph.observe.own_changes import ModelState
from stepgraph.observe.step_objects import numbered
from stepgraph.rng.tracker import CudaRNGStatesTracker, tracker_for
from stepgraph.storage import is_strided, refuse_lazy
from stepgraph.tree import flatten

__all__ = ["KINDS", "Key", "Program", "program_of"]

Key = tuple[str, str]
"""The kind and the name of a value."""
KINDS = ("outputs", "arguments", "gradients", "parameters", "optimizer state", "buffers", "tensors", "random state")
"""All kinds of values, in the order of the table."""
_STATEFUL = (LRScheduler, torch.amp.GradScaler)


@dataclass(frozen=True, slots=True)
class Program:
    """The objects with state that a step uses, by name."""

    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    """Schedulers and scalers: objects with `state_dict` and `load_state_dict`."""
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
    for parameter, state in dict.items(optimizer.state):  # past the subclass that notes reads
        of = names.get(id(parameter), "...")
        for key, value in state.items() if isinstance(state, dict) else ():
            yield f"{name}.state[{of}][{key!r}]", value
    for i, group in enumerate(optimizer.param_groups):
        yield from ((f"{name}.group{i}[{key!r}]", value) for key, value in group.items() if key != "params")


class Saved:
    """The state of a program at one moment: the objects, and copies of the contents of their tensors."""

    def __init__(self, program: Program) -> None:
        self._program = program
        refuse_lazy([*program.parameters().items(), *program.buffers().items()], "the program")
        roots = program.modules.values()
        modules = list({id(module): module for root in roots for module in root.modules()}.values())
        self._optimizers = [_SavedOptimizer(optimizer) for optimizer in program.optimizers.values()]
        others = {id(one): one for other in program.others.values() for one in _with_nested(other)}.values()
        self._others = [(other, _copied(vars(other))) for other in others]
        tensors = [*program.parameters().values(), *program.own_tensors().values(), *program.arguments]
        self._grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
        self._model = ModelState(modules, [tensor for tensor, _ in self._grads])
        tensors += [grad for _, grad in self._grads if grad is not None]
        tensors += program.buffers().values()
        tensors += [value for one in self._optimizers for value in one.tensors()]
        tensors += [value for other in others for value in vars(other).values() if isinstance(value, torch.Tensor)]
        with torch.no_grad():
            self._contents = [
                (t, t.detach().clone()) for t in {id(t): t for t in tensors}.values() if _can_be_written(t)
            ]
        self._random = _random_states(program)

    def restore(self) -> None:
        """Bring the program back."""
        self._model.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        for other, attributes in self._others:
            vars(other).clear()
            vars(other).update(_copied(attributes))
        for tensor, grad in self._grads:
            tensor.grad = grad
        with torch.no_grad():
            for tensor, content in self._contents:
                (tensor.data if is_strided(tensor) else tensor).copy_(content)  # `data` of others has parts of its own
        for restore in self._random:
            restore()


def _with_nested(other: Any) -> Iterator[Any]:
    """A scheduler or scaler, and the schedulers that it chains."""
    yield other
    for value in vars(other).values():
        for nested in value if isinstance(value, (list, tuple)) else ():
            if isinstance(nested, _STATEFUL):
                yield from _with_nested(nested)


def _copied(value: Any) -> Any:
    """Copy dicts and lists, which are changed in place, at any depth; all else is kept as it is."""
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: _copied(item) for key, item in value.items()})
        return made
    return [_copied(item) for item in value] if type(value) is list else value


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


class _SavedOptimizer:
    """The structure of an optimizer's state and groups. The contents of tensors are kept elsewhere."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        items = dict.items(optimizer.state)
        self._state = {key: dict(state) if isinstance(state, dict) else state for key, state in items}
        self._groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]

    def tensors(self) -> Iterator[torch.Tensor]:
        groups = [dict(group, params=None) for _, group, _ in self._groups]
        for holder in (*self._state.values(), *groups):
            for value in holder.values() if isinstance(holder, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield value

    def restore(self) -> None:
        held = dict(dict.items(self._optimizer.state))
        for key in held.keys() - self._state.keys():
            dict.pop(self._optimizer.state, key)
        for key, state in self._state.items():
            now = held.get(key)
            if isinstance(now, dict) and isinstance(state, dict):
                now.clear()
                now.update(state)
            else:
                dict.__setitem__(self._optimizer.state, key, dict(state) if isinstance(state, dict) else state)
        for group, values, parameters in self._groups:
            group.clear()
            group.update(values)
            group["params"][:] = parameters
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Check that a tensor has memory, and that no two of its elements share it: such a one is a view of another."""
    if tensor.is_meta or isinstance(tensor, UninitializedTensorMixin):
        return False
    if not is_strided(tensor):
        return True
    return not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def program_of(
    step: Callable[..., Any], batch: Iterable[Any] = (), generators: Iterable[torch.Generator] = ()
) -> Program:
    """Find the state of a step: what it can name, and what the arguments of a call hold."""
    found, leaves = [*named_reachable(step)], flatten(tuple(batch))[0]
    objects = [value for value in leaves if isinstance(value, (torch.nn.Module, Optimizer, *_STATEFUL))]
    found += [pair for value in objects for pair in named_reachable(functools.partial(_nothing, value))]
    given = [value for value in leaves if isinstance(value, torch.Generator)]
    found += [("generator", generator) for generator in (*generators, *given)]
    kinds: dict[type, dict[str, Any]] = {torch.nn.Module: {}, Optimizer: {}, torch.Tensor: {}, torch.Generator: {}}
    others: dict[str, Any] = {}
    seen: set[int] = set()
    for label, value in found:
        key = _address(value)
        place = next((place for kind, place in kinds.items() if isinstance(value, kind)), None)
        if place is None and isinstance(value, _STATEFUL):
            place = others
        if place is not None and key not in seen and not _is_default(value):
            seen.add(key)
            place[numbered(label, place)] = value
    modules, optimizers, tensors, made = kinds.values()
    arguments = tuple(value for value in leaves if isinstance(value, torch.Tensor))
    return Program(modules, optimizers, tensors, made, others, arguments)


def _address(value: Any) -> int:
    """What tells an object from others; a generator has several Python objects."""
    return int(getattr(value, "_cdata", 0)) if isinstance(value, torch.Generator) else id(value)


def _is_default(value: Any) -> bool:
    """Check for torch's own generators, which every program has."""
    if not isinstance(value, torch.Generator):
        return False
    known = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
    return any(_address(value) == _address(one) for one in known)


def _nothing(*_: Any) -> None:
    """Stands for a function that holds the arguments of a call."""
