"""An `EagerCall` describes an eager call that will be recorded: its arguments without their data, and its surroundings.

When the call has been made, it also has the operations, the number of results, and the geometry of their gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.core.storage import memory_of
from stepgraph.core.tree import Structure
from stepgraph.engine.guards.signature import AMBIENT_NAMES, Signature
from stepgraph.engine.memory.inputs import ArgMetadata, SharedBuffer, tensors_among
from stepgraph.engine.oplog import Log
from stepgraph.engine.record.pair.runner import Runner


@dataclass(frozen=True, slots=True)
class SameTensor:
    """An argument that is the same tensor as an earlier one, which is given by leaf index."""

    index: int


@dataclass(frozen=True, slots=True)
class NotedArguments:
    """The leaves of a call's arguments, with geometry in place of tensors, and the tensors themselves."""

    leaves: list[Any]
    tensors: dict[int, torch.Tensor]
    """By leaf index, each once."""
    aliased: frozenset[int]
    """Tensors that share memory with another one, by leaf index."""

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> NotedArguments:
        """Note the arguments of a call. Parameters are noted as the objects they are."""
        tensors = tensors_among(leaves)
        first = {id(tensor): index for index, tensor in tensors.items()}
        storages = {index: memory_of(tensor) for index, tensor in tensors.items()}
        counts = Counter(storages.values())
        shared = (index for index, memory in storages.items() if memory is not None and counts[memory] > 1)
        aliased = frozenset(shared)
        return cls([_noted(index, leaf, first) for index, leaf in enumerate(leaves)], tensors, aliased)


def _noted(index: int, leaf: Any, first: dict[int, int]) -> Any:
    at = first.get(id(leaf))
    if at is None:
        return leaf
    return ArgMetadata(leaf) if at == index else SameTensor(at)


@dataclass(eq=False, slots=True)
class EagerCall:
    """A call that was made eagerly, with its backward, and that graphs are recorded for."""

    signature: Signature
    structure: Structure
    leaves: list[Any]
    """The arguments, with geometry in place of tensors."""
    ambient: tuple[Hashable, ...]
    training: tuple[bool, ...]
    """The mode of each module inside."""
    in_ddp: bool
    """True if it was made inside DDP's forward: DDP must see every gradient."""
    fork: str | None
    """The named random state that was forked."""
    aliased: frozenset[int] = frozenset()
    """Arguments that share memory with another one, by leaf index."""
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """Copies of the tensors, by leaf index, if a recording needs values to work with."""
    elsewhere: frozenset[int] = frozenset()
    """Arguments with several uses in the call and others outside, by leaf index."""
    num_results: int = 0
    is_differentiable: bool = False
    log: Log | None = None
    """The operations of its forward."""
    grads: dict[int, ArgMetadata] = field(default_factory=dict)
    """The results that gradients came back to."""
    backward_ambient: tuple[Hashable, ...] | None = None

    @property
    def metas(self) -> list[ArgMetadata | None]:
        """The gradient's geometry for each result."""
        return [self.grads.get(index) for index in range(self.num_results)]

    @property
    def backward_autocast(self) -> tuple[Hashable, Hashable]:
        """The state of autocast around its backward."""
        assert self.backward_ambient is not None
        return self.backward_ambient[_CUDA], self.backward_ambient[_CPU]


_CUDA, _CPU = AMBIENT_NAMES.index("autocast on cuda"), AMBIENT_NAMES.index("autocast on cpu")


@dataclass(frozen=True, slots=True)
class CallBuffers:
    """Static memory for arguments of a call, by leaf index; the other arguments get their own memory."""

    own: Mapping[int, torch.Tensor] = field(default_factory=dict)
    shared: Mapping[int, SharedBuffer] = field(default_factory=dict)
    """Arguments that several calls are given."""
    given: Mapping[int, tuple[Runner, torch.Tensor]] = field(default_factory=dict)
    """Arguments that are another runner's results."""

    def tensors(self) -> dict[int, torch.Tensor]:
        """The memory."""
        shared = {i: buffer.tensor for i, buffer in self.shared.items()}
        return {**self.own, **shared, **{i: tensor for i, (_, tensor) in self.given.items()}}
