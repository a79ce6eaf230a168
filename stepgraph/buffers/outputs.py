"""A graph leaves its results in static tensors, which every replay overwrites; callers get copies, or borrow them.

Of a whole step the caller gets copies (or, if they ask for that, the static tensors themselves). A tensor of a module
is lent, without a copy, because mostly the next graph reads it where it is. If a caller still holds it, or a view of
it, before a graph runs that writes there, it would change under their eyes. So that is looked at before
(`BorrowedTensor`), and a tensor that was found to be kept is copied from then on.

A parameter or buffer of the module that is returned as such is handed out as the object that it is. The graph has no
part in it: autograd gives a parameter the gradients of its uses outside, as in eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from stepgraph.buffers.borrowed import BorrowedTensor, any_held, lend_by_address, lend_out
from stepgraph.errors import CaptureError
from stepgraph.tree import flatten, unflatten


class StaticOutputs:
    """The results of a recorded call.

    `inputs` are its tensor arguments by leaf index. `objects` are tensors, by the id of what the call has returned,
    that are handed out themselves.
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
        """The leaves, with "tensor" in the place of those that each call fills in."""
        self._computed: list[tuple[int, int]] = []
        """The leaves that are results of the graph, each with its index among `tensors`."""
        self._passed: list[tuple[int, int]] = []
        """The leaves that are arguments of the call, each with its index among those."""
        self._objects: dict[int, torch.Tensor] = {}
        """The leaves that are parameters, buffers or other leaves of autograd: handed out themselves."""
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
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
        self._lent: list[BorrowedTensor] = []
        self._watched: dict[int, BorrowedTensor] = {}
        self.copied = [False] * len(self.tensors)
        """Which tensors are handed out as copies."""
        self.differentiable = [tensor.grad_fn is not None for tensor in self.tensors]
        self.constant = [i for i, differentiable in enumerate(self.differentiable) if not differentiable]
        """Which tensors no gradient comes back to."""
        self._single = self.structure.kind is None and bool(self._computed)

    # -- whole steps: the static tensors themselves, or copies of all

    @property
    def tree(self) -> Any:
        """The result with the static tensors themselves, overwritten by the next call."""
        return self.build(self.tensors, ())

    def copier(self) -> Callable[[], Any]:
        """What makes the result with copies, safe to keep."""
        return self.tensors[0].clone if self._single else self._copies

    def _copies(self) -> Any:
        filled = self._filled.copy()
        for position, index in self._computed:
            filled[position] = self.tensors[index].clone()
        return unflatten(self.structure, filled)

    # -- modules: lent, and looked after

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
        self._watched = {
            i: lent for i, lent in enumerate(self._lent) if self.tensors[i].untyped_storage()._cdata not in kept
        }

    def is_own(self, index: int) -> bool:
        """Whether a tensor lies in memory of the graph's own and is handed out as it lies."""
        return not self.copied[index] and index in self._watched

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
        filled = self._filled.copy()
        for position, index in self._computed:
            filled[position] = tensors[index]
        for position, index in self._passed:
            filled[position] = leaves[index]
        return unflatten(self.structure, filled)

    @property
    def passed(self) -> list[int]:
        """The arguments that are results, by leaf index."""
        return [index for _, index in self._passed]

    @property
    def objects(self) -> list[torch.Tensor]:
        """The results that are parameters, buffers or other leaves, each once."""
        return list({id(tensor): tensor for tensor in self._objects.values()}.values())

    @property
    def plain_values(self) -> list[Any]:
        """What no replay computes again; for a parameter the one weak reference to it."""
        weak = {position: weakref.ref(tensor) for position, tensor in self._objects.items()}
        return [weak.get(position, value) for position, value in enumerate(self._filled)]


def detached(tree: Any) -> Any:
    """A call's results without their autograd graph."""
    leaves, structure = flatten(tree)
    return unflatten(structure, [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


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
