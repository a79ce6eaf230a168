"""A static result holds all that a module's graph returns: static tensors, inputs, parameters, plain values.

A tensor is handed out as it lies, without a copy, because mostly the next graph reads it there. If a caller still
holds it, or a view of it, when a graph is to run that writes there, it would change under their eyes. So that is looked
at before (`BorrowedTensor`), and a tensor that was found to be kept is copied from then on.

A parameter or buffer of the module that is returned as such is handed out as the object that it is. The graph has no
part in it: autograd gives a parameter the gradients of its uses outside, as in eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.buffers.borrowed import BorrowedTensor, any_held, lend_by_address, lend_out
from stepgraph.errors import CaptureError
from stepgraph.tree import flatten, unflatten


@dataclass(frozen=True, slots=True)
class _Passed:
    """A result that is an argument of the call, by its index among the leaves."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """A result that is a parameter, a buffer or another leaf: the object itself."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A result that the graph computes, by its index among the result's tensors."""

    index: int


class StaticResult:
    """The results of a recorded call.

    `inputs` are its tensor arguments by leaf index. `objects` are tensors, by the id of what the call has returned,
    that are handed out themselves.
    """

    def __init__(
        self, tree: Any, inputs: dict[int, torch.Tensor], objects: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        leaves, structure = flatten(tree)
        self.structure = structure
        self.tensors: list[torch.Tensor] = []
        """The tensors that the graph computes, each once, with their autograd history."""
        passed = {id(tensor): index for index, tensor in inputs.items()}
        known = objects or {}
        found: dict[int, int] = {}
        self._leaves: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self._leaves.append(leaf)
            elif id(leaf) in passed:
                self._leaves.append(_Passed(passed[id(leaf)]))
            elif id(leaf) in known and leaf.grad_fn is None:
                self._leaves.append(_Object(known[id(leaf)]))
            else:
                if id(leaf) not in found:
                    found[id(leaf)] = len(self.tensors)
                    self.tensors.append(leaf)
                self._leaves.append(_Tensor(found[id(leaf)]))
        self._lent: list[BorrowedTensor] = []
        self._watched: dict[int, BorrowedTensor] = {}
        self._inputs = list(inputs.values())
        self.copied = [False] * len(self.tensors)
        """Which tensors are handed out as copies."""
        self.differentiable = [tensor.grad_fn is not None for tensor in self.tensors]
        self.constant = [i for i, differentiable in enumerate(self.differentiable) if not differentiable]
        """Which tensors no gradient comes back to."""
        self._single = len(self._leaves) == 1 and self.structure.kind is None and isinstance(self._leaves[0], _Tensor)

    def settle(self, state: Sequence[torch.Tensor]) -> None:
        """The recording has ended: get the tensors ready to be handed out.

        Those that lie in arguments are copied. Those that lie in the module's `state`, its parameters and buffers, show
        what happens to it later, as in eager.
        """
        arguments = {tensor.untyped_storage()._cdata for tensor in self._inputs}
        self.copied = [tensor.untyped_storage()._cdata in arguments for tensor in self.tensors]
        self._inputs = []
        self._lent = lend_out(self.tensors)
        kept = {tensor.untyped_storage()._cdata for tensor in state}
        self._watched = {i: lent for i, lent in enumerate(self._lent) if self._storage(i) not in kept}

    def is_own(self, index: int) -> bool:
        """Whether a tensor lies in memory of the graph's own and is handed out as it lies."""
        return not self.copied[index] and index in self._watched

    def _storage(self, index: int) -> int:
        return int(self.tensors[index].untyped_storage()._cdata)

    def held(self) -> list[int]:
        """The tensors, or views of them, that a caller still holds."""
        return [i for i, lent in self._watched.items() if lent.is_held()]

    def is_held(self) -> bool:
        """Whether a caller still holds a tensor."""
        return any_held(self._watched.values())

    def copy(self, indices: Iterable[int]) -> None:
        """Hand out copies of these tensors."""
        for index in self._watched.keys() & set(indices):
            self.copied[index] = True

    def hand_on(self, index: int, lent: BorrowedTensor) -> None:
        """Hand out a tensor that is copied by way of another one with the same values."""
        self._lent[index] = lent

    def forget_history(self) -> None:
        """Let go of what autograd has saved: no further backward is recorded."""
        self.tensors = [tensor.data for tensor in self.tensors]

    def give_up(self) -> None:
        """Let graphs that are captured later have the tensors' memory: copies are handed out from now on."""
        self._lent, self._watched = lend_by_address(self.tensors), {}
        self.copied = [True] * len(self.tensors)
        self.tensors = []

    def let_go(self) -> None:
        """The graphs are gone: hold nothing but what callers hold."""
        self.tensors = []

    def hand_out(self) -> tuple[torch.Tensor, ...]:
        """The tensors, free of history."""
        if len(self._lent) == 1:
            return (self._lent[0].copy() if self.copied[0] else self._lent[0].lend(),)
        return tuple([n.copy() if c else n.lend() for n, c in zip(self._lent, self.copied, strict=True)])

    def build(self, tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Any:
        """The result around these tensors, for a call with these arguments."""
        if self._single:
            return tensors[0]
        return unflatten(self.structure, [_fill(leaf, tensors, leaves) for leaf in self._leaves])

    @property
    def passed(self) -> list[int]:
        """The arguments that are results, by leaf index."""
        return [leaf.index for leaf in self._leaves if isinstance(leaf, _Passed)]

    @property
    def objects(self) -> list[torch.Tensor]:
        """The results that are parameters, buffers or other leaves, each once."""
        return list({id(leaf.tensor): leaf.tensor for leaf in self._leaves if isinstance(leaf, _Object)}.values())

    @property
    def plain_values(self) -> list[Any]:
        """What no replay computes again; for a parameter the one weak reference to it."""
        values = ["tensor" if isinstance(leaf, (_Passed, _Tensor)) else leaf for leaf in self._leaves]
        return [weakref.ref(value.tensor) if isinstance(value, _Object) else value for value in values]


def _fill(leaf: Any, tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Any:
    if isinstance(leaf, _Tensor):
        return tensors[leaf.index]
    if isinstance(leaf, _Object):
        return leaf.tensor
    return leaves[leaf.index] if isinstance(leaf, _Passed) else leaf


def leaf_results(tree: Any) -> dict[int, torch.Tensor]:
    """The tensors of a result that autograd accumulates gradients in, by id."""
    leaves = [t for t in flatten(tree)[0] if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    # a view that is made under no_grad says that it requires a gradient, and is nobody's parameter
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter) or not leaf._is_view()}


def another_leaf() -> CaptureError:
    """A result is a leaf that the call itself has made."""
    return CaptureError(
        "the module returns a leaf tensor that requires a gradient, and that is a new one at each call",
        rule="leaf-result",
        why="in eager the tensor itself gets the gradient; a replay would hand out the tensor of the capture.",
        fix="return the tensor without requires_grad, and set requires_grad outside the module.",
    )
