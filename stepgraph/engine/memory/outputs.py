"""A graph leaves its results in static tensors, which every replay overwrites. Callers get copies, or borrow them.

The caller of a whole step gets copies, or on request the static tensors themselves. The results of a module are lent
without a copy, because usually the next graph reads them in place. If a caller still held one, or a view of it, when a
graph writes there, the caller's values would change. So that is checked before (`BorrowedTensor`), and a tensor that a
caller has kept is copied from then on.

If a module returns one of its parameters or buffers, the caller gets that object itself. The graph is not involved:
autograd gives a parameter the gradients of its uses outside, as in eager.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.storage import memory_of
from stepgraph.core.tree import flatten, unflatten
from stepgraph.engine.memory.borrowed import (
    BorrowedTensor,
    any_held,
    copied_together,
    lend_by_address,
    lend_out,
    sharing_memory,
)


class StaticOutputs:
    """The results of a recorded call.

    `inputs` are its tensor arguments by leaf index. `objects` are tensors that callers get themselves, by the id of the
    tensor that the call returned.
    """

    def __init__(
        self,
        tree: Any,
        inputs: Mapping[int, torch.Tensor] | None = None,
        objects: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        leaves, self.structure = flatten(tree)
        self.tensors: list[torch.Tensor] = []
        """The tensors that the graph computes, each once, with their autograd history."""
        self._inputs, known = list((inputs or {}).values()), objects or {}
        passed = {id(tensor): index for index, tensor in (inputs or {}).items()}
        found: dict[int, int] = {}
        self._filled = list(leaves)
        """The leaves, with "tensor" as a placeholder for those that each call fills in."""
        self._computed: list[tuple[int, int]] = []
        """The positions of leaves that the graph computes, each with its index in `tensors`."""
        self._passed: list[tuple[int, int]] = []
        """The positions of leaves that are arguments of the call, each with its leaf index there."""
        self._objects: dict[int, torch.Tensor] = {}
        """The leaves that are parameters, buffers or other leaves of autograd: callers get these objects."""
        for position, leaf in enumerate(leaves):
            if not issubclass(type(leaf), torch.Tensor):
                continue
            self._filled[position] = "tensor"
            if id(leaf) in passed:
                self._passed.append((position, passed[id(leaf)]))
            elif id(leaf) in known and leaf.grad_fn is None:
                self._filled[position] = self._objects[position] = known[id(leaf)]
            else:
                if id(leaf) not in found:
                    found[id(leaf)] = len(self.tensors)
                    self.tensors.append(leaf)
                self._computed.append((position, found[id(leaf)]))
        self._groups: list[list[int]] = []
        """Indices of tensors that share their memory: their copies share one, too."""
        self._moved: dict[int, torch.Tensor] = {}
        """Memory outside the pool that `give` copies tensors to, by their index."""
        self._lent: list[BorrowedTensor] = []
        self._watched: dict[int, BorrowedTensor] = {}
        self.copied = [False] * len(self.tensors)
        """Flags of the tensors that callers get as copies."""
        self.differentiable = [tensor.grad_fn is not None for tensor in self.tensors]
        self.constant = [i for i, differentiable in enumerate(self.differentiable) if not differentiable]
        """Indices of tensors that get no gradient."""
        self._single = self.structure.kind is None and bool(self._computed)

    # -- whole steps: the static tensors themselves, or copies

    @property
    def tree(self) -> Any:
        """The result with the static tensors themselves, which the next call overwrites."""
        return self.build(self.tensors, ())

    @property
    def given(self) -> list[torch.Tensor]:
        """The tensors of `give`."""
        return [self._moved.get(index, tensor) for index, tensor in enumerate(self.tensors)]

    def give(self) -> Any:
        """Return the result in memory that the next call overwrites, and no other graph."""
        if not self._moved:
            return self.tree
        torch._foreach_copy_(list(self._moved.values()), [self.tensors[index] for index in self._moved])
        return self.build(self.given, ())

    def move_out(self, held: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        """Let `give` copy tensors that are in the pool, as `held` tells, to memory outside of it.

        Graphs that were captured before may write where the tensors are.
        """
        inside = set(map(id, held(self.tensors)))
        with torch.inference_mode(False), torch.no_grad():
            self._moved = {i: torch.empty_like(t) for i, t in enumerate(self.tensors) if id(t) in inside}

    def copier(self) -> Callable[[], Any]:
        """Return a function that makes the result with copies, which are safe to keep."""
        if self._single:
            return self.tensors[0].clone
        return functools.partial(self._copies, sharing_memory(self.tensors))

    def _copies(self, groups: Sequence[Sequence[int]]) -> Any:
        filled, tensors = self._filled.copy(), self.tensors
        together = _all_together(tensors, groups) if groups else {}
        for position, index in self._computed:
            filled[position] = together[index] if index in together else tensors[index].clone()
        return unflatten(self.structure, filled)

    # -- modules: lent tensors

    def settle(self, state: Sequence[torch.Tensor]) -> None:
        """Prepare the tensors to be lent, after the recording.

        Tensors that share memory with arguments are copied. Tensors that share memory with the module's `state`, its
        parameters and buffers, show later changes of the state, as in eager.
        """
        arguments = {memory_of(tensor) for tensor in self._inputs} - {None}
        self.copied = [memory_of(tensor) in arguments for tensor in self.tensors]
        self._inputs = []
        self._lent = lend_out(self.tensors)
        self._groups = sharing_memory(self.tensors)
        kept = {memory_of(tensor) for tensor in state}
        self._watched = {i: lent for i, lent in enumerate(self._lent) if memory_of(self.tensors[i]) not in kept}

    def is_own(self, index: int) -> bool:
        """Check whether a tensor is in memory of the graph and is lent without a copy."""
        return not self.copied[index] and index in self._watched

    def held(self) -> list[int]:
        """Return the indices of tensors that a caller still holds, or views of them."""
        return [i for i, lent in self._watched.items() if lent.is_held()]

    def is_held(self) -> bool:
        """Check whether a caller still holds a tensor."""
        return any_held(self._watched.values())

    def copy(self, indices: Iterable[int]) -> None:
        """Return these tensors as copies from now on."""
        chosen = set(indices)
        for group in self._groups:
            chosen.update(group if not chosen.isdisjoint(group) else ())
        for index in self._watched.keys() & chosen:
            self.copied[index] = True

    def hand_on(self, index: int, lent: BorrowedTensor) -> None:
        """Use another tensor with the same values as the source of a copied one."""
        self._lent[index] = lent
        self._groups = [group for group in self._groups if index not in group]

    def forget_history(self) -> None:
        """Drop the autograd history, once no further backward is recorded."""
        self.tensors = [tensor.data for tensor in self.tensors]

    def give_up(self) -> None:
        """Leave the tensors' memory to graphs that are captured later. Callers get copies from now on."""
        self._lent, self._watched = lend_by_address(self.tensors), {}
        self.copied = [True] * len(self.tensors)
        self.tensors = []

    def let_go(self) -> None:
        """Drop the tensors after the graphs were freed; tensors that callers hold stay alive."""
        self.tensors = []

    def hand_out(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors for the caller, without autograd history."""
        if len(self._lent) == 1:
            return (self._lent[0].copy() if self.copied[0] else self._lent[0].lend(),)
        groups = [group for group in self._groups if self.copied[group[0]]] if self._groups else ()
        together = _all_together([lent.tensor for lent in self._lent], groups) if groups else {}
        pairs = enumerate(zip(self._lent, self.copied, strict=True))
        return tuple([together[i] if i in together else n.copy() if c else n.lend() for i, (n, c) in pairs])

    def build(self, tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Any:
        """Build the result from these tensors, for a call with these arguments."""
        if self._single:
            return tensors[0]
        filled = self._filled.copy()
        for position, index in self._computed:
            filled[position] = tensors[index]
        for position, index in self._passed:
            filled[position] = leaves[index]
        return unflatten(self.structure, filled)

    @property
    def passed(self) -> list[int]:
        """Leaf indices of the arguments that are also results."""
        return [index for _, index in self._passed]

    @property
    def objects(self) -> list[torch.Tensor]:
        """The results that are parameters, buffers or other leaves of autograd, each once."""
        return list({id(tensor): tensor for tensor in self._objects.values()}.values())

    @property
    def plain_values(self) -> list[Any]:
        """The part of the result that no replay computes; for a parameter a weak reference."""
        weak = {position: weakref.ref(tensor) for position, tensor in self._objects.items()}
        return [weak.get(position, value) for position, value in enumerate(self._filled)]


def _all_together(tensors: Sequence[torch.Tensor], groups: Iterable[Sequence[int]]) -> dict[int, torch.Tensor]:
    """Copies of tensors that share their memory, by index."""
    made: dict[int, torch.Tensor] = {}
    for group in groups:
        made.update(zip(group, copied_together([tensors[index] for index in group]), strict=True))
    return made


def detached(tree: Any) -> Any:
    """Return a call's results without their autograd graph."""
    leaves, structure = flatten(tree)
    return unflatten(structure, [leaf.detach() if issubclass(type(leaf), torch.Tensor) else leaf for leaf in leaves])


def leaf_results(tree: Any) -> dict[int, torch.Tensor]:
    """Return the tensors of a result that autograd accumulates gradients in, by id."""
    leaves = [t for t in flatten(tree)[0] if issubclass(type(t), torch.Tensor) and t.requires_grad and t.is_leaf]
    # a view made under no_grad claims to require a gradient, but is no leaf that gets one
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter) or not leaf._is_view()}


def another_leaf() -> CaptureError:
    """Make the error for a result that is a leaf made by the call itself."""
    return CaptureError(
        "the module returns a leaf tensor that requires a gradient, a new one at each call",
        rule="leaf-result",
    )
