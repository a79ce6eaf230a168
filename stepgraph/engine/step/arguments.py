"""`StepArguments` holds a step's arguments in static buffers and copies the step's writes back to the caller.

Eager code writes to the caller's tensors, leaves gradients on them, and may call `requires_grad_()` on them. A replay
does all of that to buffers. The recording shows which of this the step does; after each replay `store` does the same to
the caller's tensors. Steps whose writes cannot be copied back, because arguments share memory, are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.storage import memory_of
from stepgraph.core.tensor_attributes import as_given
from stepgraph.core.tensor_memory import geometry, moved_argument, overlap, version_of
from stepgraph.engine.backends import Backend
from stepgraph.engine.guards.signature import refuse_gradient
from stepgraph.engine.memory.inputs import StaticInputs, buffer_like, is_copied_in, tensors_among


def on_device(leaves: Sequence[Any], backend: Backend) -> list[Any]:
    """Return a call's leaves, with tensors in host memory moved to the backend's device. Meta tensors have no data."""
    return [
        as_given(leaf.to(backend.device, non_blocking=True), leaf)
        if is_copied_in(leaf) and not backend.owns(leaf) and not leaf.is_meta
        else leaf
        for leaf in leaves
    ]


class StepArguments:
    """The arguments of a recorded step."""

    def __init__(self, leaves: Sequence[Any], backend: Backend) -> None:
        tensors = tensors_among(leaves)
        self._indices = list(tensors)
        with torch.inference_mode(False), torch.no_grad():
            buffers = {i: buffer_like(tensor, backend.device) for i, tensor in tensors.items()}
            self._inputs = StaticInputs(buffers)
        placed = {id(tensor): buffers[i] for i, tensor in tensors.items()}
        self.leaves = [placed.get(id(leaf), leaf) for leaf in leaves]
        """The call's leaves, with buffers instead of tensors."""
        self._needs_no_grad = any(tensor.requires_grad for tensor in tensors.values())
        self.only: tuple[int, Callable[[Any], Any]] | None = None
        """The one leaf to copy, and its copy function, if a load is a single plain copy."""
        if len(buffers) == 1 and not self._inputs.has_repeated and not self._needs_no_grad:
            self.only = (self._indices[0], functools.partial(self._inputs.targets[0].copy_, non_blocking=True))
        self._versions: list[int] = []
        self._places: list[Hashable] = []
        self._state: list[tuple[str, torch.Tensor, int]] = []
        self._mutated: frozenset[int] = frozenset()
        self._grads: dict[int, torch.Tensor] = {}
        """The `.grad` that the step finds on leaves. `load` fills it from the caller's before each replay."""
        self._grad_versions: dict[int, int] = {}
        self._grads_left: dict[int, torch.Tensor | None] = {}
        """The `.grad` that the step leaves, if the step replaced the one that it found."""
        self._grads_written: tuple[int, ...] = ()
        """Leaves whose `.grad` was kept, and may have been written to in place."""
        self._required: tuple[int, ...] = ()
        """Inputs that the step makes require a gradient."""

    @property
    def num_bytes(self) -> int:
        return self._inputs.num_bytes + sum(grad.untyped_storage().nbytes() for grad in self._grads.values())

    @property
    def written(self) -> frozenset[int]:
        """Inputs that the step writes to, found by `note_use`."""
        return self._mutated

    def written_now(self) -> frozenset[int]:
        """Return the inputs written to since `watch`, by eager code or by a recording; replays are not counted."""
        pairs = zip(self._indices, self._versions, strict=True)
        return frozenset(i for i, before in pairs if version_of(self.leaves[i]) != before)

    @property
    def writes_back(self) -> bool:
        """True if `store` has work to do."""
        return bool(self._mutated or self._grads_left or self._grads_written or self._required)

    def hold_grads(self, leaves: Sequence[Any], names: Sequence[str]) -> None:
        """Before a recording: let the step find the `.grad` of the caller's leaves, as eager code does.

        Without this a recording begins without gradients, and `store` adds those that it leaves to the caller's.
        """
        for i in self._indices:
            if not leaves[i].requires_grad or not leaves[i].is_leaf:
                continue
            refuse_gradient(names[i], leaves[i])
            grad = leaves[i].grad
            if grad is None:
                continue
            with torch.inference_mode(False), torch.no_grad():
                self._grads[i] = buffer_like(grad.detach(), self.leaves[i].device)

    def load(self, leaves: Sequence[Any]) -> None:
        """Copy a call's tensors in."""
        if self.only is not None:
            index, copy = self.only
            copy(leaves[index])
        elif self._needs_no_grad:
            with torch.no_grad():
                self._inputs.copy_all(leaves)
                for i, held in self._grads.items():
                    held.copy_(leaves[i].grad, non_blocking=True)
        else:
            self._inputs.copy_all(leaves)

    def watch(self) -> None:
        """Before a recording: give the buffers the `.grad` that a new call finds, and start to count writes."""
        for i in self._indices:
            if self.leaves[i].is_leaf:
                self.leaves[i].grad = self._grads.get(i)
        self._versions = [version_of(self.leaves[i]) for i in self._indices]
        self._places = [geometry(self.leaves[i]) for i in self._indices]
        self._grad_versions = {i: held._version for i, held in self._grads.items()}

    def refuse_rebound(self, names: Sequence[str]) -> None:
        """After a recording: raise if the step changed the memory or the shape of an argument."""
        for i, place in zip(self._indices, self._places, strict=True):
            if geometry(self.leaves[i]) != place:
                raise moved_argument(names[i])

    def note_use(
        self,
        leaves: Sequence[Any],
        names: Sequence[str],
        written: Iterable[int] | None = None,
        seen: Iterable[int] = (),
    ) -> None:
        """After a recording: remember which inputs the step wrote to, and which gradients it left.

        `written` overrides the count of writes, for buffers that several graphs share after one was replayed. `seen`
        are further inputs that eager calls wrote to.
        """
        self.refuse_rebound(names)
        counted = self.written_now() if written is None else frozenset(written)
        self._mutated = counted | frozenset(seen).intersection(self._indices)
        self._note_grads(leaves, names)
        for i in (*sorted(counted), *sorted(self._mutated - counted)):
            self._refuse_shared(i, leaves, names)
        now = (i for i in self._indices if self.leaves[i].is_leaf and self.leaves[i].requires_grad)
        self._required = tuple(i for i in now if not leaves[i].requires_grad)

    def _note_grads(self, leaves: Sequence[Any], names: Sequence[str]) -> None:
        self._grads_left = {}
        for i in self._indices:
            buffer, held = self.leaves[i], self._grads.get(i)
            grad = buffer.grad if buffer.is_leaf else None
            if grad is None and held is None:
                continue
            if not leaves[i].is_leaf:
                raise CaptureError(
                    f"argument `{names[i]}`: the step's backward reaches a tensor that was computed outside it",
                    rule="outer-graph",
                    why="the gradient would have to flow on into the caller's graph, which a replay cannot reach.",
                    fix=f"pass {names[i]}.detach(), or compute it inside the step.",
                )
            if grad is not held:
                self._grads_left[i] = grad
        written = [i for i, held in self._grads.items() if held._version != self._grad_versions[i]]
        kept = [i for i in self._grads if i not in self._grads_left]  # not every write to it is counted
        self._grads_written = tuple(dict.fromkeys((*written, *kept)))
        for i in self._grads:
            for j in self._indices:
                if overlap(leaves[i].grad, leaves[j]):
                    if i in written or j in self._mutated:
                        raise _shared(f"`{names[i]}.grad`", names[j])
                    self._grads_written = tuple(k for k in self._grads_written if k != i)

    def watch_state(self, leaves: Sequence[Any], state: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Before a recording: remember which of the step's own tensors share memory with an argument.

        Their names are for messages.
        """
        own = {memory_of(leaves[i]) for i in self._indices} - {None}
        self._state = [(name, tensor, version_of(tensor)) for name, tensor in state if memory_of(tensor) in own]

    def refuse_shared_state(
        self, leaves: Sequence[Any], names: Sequence[str], rewritten: Container[int] = frozenset()
    ) -> None:
        """After a recording: raise if an argument overlaps one of the step's own tensors, and the step writes to one.

        `rewritten` has the ids of tensors written to between the graphs: the parameters of optimizers that run there.
        """
        mutated = self.written_now() | self._mutated
        for name, tensor, before in self._state:
            written = version_of(tensor) != before or id(tensor) in rewritten
            for i in self._indices:
                if (written or i in mutated) and overlap(leaves[i], tensor):
                    target = name if written else f"argument `{names[i]}`"
                    raise CaptureError(
                        f"argument `{names[i]}` shares memory with {name}, and the step writes to {target}",
                        rule="shared-input",
                        why="stepgraph copies an argument into a separate buffer, so the write would be lost.",
                        fix=f"use that tensor inside the step instead of passing it. If you mean its values before the "
                        f"call, pass {names[i]}.clone().",
                    )

    def _refuse_shared(self, index: int, leaves: Sequence[Any], names: Sequence[str]) -> None:
        for i in self._indices:
            if i != index and overlap(leaves[i], leaves[index]):
                raise _shared(f"argument `{names[index]}`", names[i])

    def store(self, leaves: Sequence[Any]) -> None:
        """After a replay: write to the caller's tensors what eager code would have written."""
        if self.writes_back:
            with torch.no_grad():
                for i in self._mutated:
                    leaves[i].copy_(self.leaves[i])
                for i in self._required:
                    leaves[i].requires_grad_()
                for i in self._grads_written:
                    leaves[i].grad.copy_(self._grads[i])
                for i, grad in self._grads_left.items():
                    if grad is None:
                        leaves[i].grad = None
                    elif leaves[i].grad is not None and i not in self._grads:  # the step began with none
                        leaves[i].grad.add_(grad.to(leaves[i].device))
                    else:
                        leaves[i].grad = grad.detach().to(leaves[i].device, copy=True)


def _shared(written: str, other: str) -> CaptureError:
    return CaptureError(
        f"the step writes to {written}, which shares memory with `{other}`",
        rule="shared-input",
        why="stepgraph copies each argument into a separate buffer, so the other would not see the write.",
        fix=f"pass the whole tensor once and take the views inside the step, or pass {other}.clone().",
    )
