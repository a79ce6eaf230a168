"""A signature's key holds all of a call that a captured graph takes for granted.

Whatever would have made eager code launch other kernels belongs to the signature: each tensor's geometry, each plain
value, each module's training flag, grad mode, autocast, the numeric flags of the process, and which gradients are None.
A call is replayed only by the graph of its own signature. The key is a flat tuple, cheap to build and to hash; names
for its parts are made only when a difference must be named (`differences`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.core.ambient import AMBIENT_NAMES
from stepgraph.core.errors import CaptureError, InvalidArgument
from stepgraph.core.plain_values import BY_VALUE, is_compared_by_value, is_of_numpy, token
from stepgraph.core.storage import address_of, is_strided, shape_of, special_kind
from stepgraph.core.tensor_attributes import NONE, Attributes, attributes_in, attributes_on, refuse_unlike_buffers
from stepgraph.core.tensor_memory import Alignment, alignment_of
from stepgraph.core.tree import Structure, argument_name, flatten, hidden_tensor, paths
from stepgraph.core.wording import with_article

_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """A call's signature. Equal keys mean that one graph serves both calls."""

    structure: Structure
    leaves: tuple[Hashable, ...]
    ambient: tuple[Hashable, ...]
    training: tuple[bool, ...] = ()
    no_grad: tuple[bool, ...] = ()
    arguments: tuple[str, ...] = ()
    """Names of the positional parameters, for messages."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        return (self.structure, self.leaves, self.ambient, self.training, self.no_grad)

    def describe(self, *, brief: bool = False) -> str:
        """One line for reports: the tensors and plain values of the call, and what is unusual around it.

        `brief` counts the items of long lists instead of naming each.
        """
        named: list[tuple[str, Any]] = list(zip(self.names(), self.leaves, strict=True))
        parts: list[str] = []
        for owner, run in itertools.groupby(named, lambda leaf: _list_of(leaf[0])):
            items = list(run)
            if brief and owner is not None and len(items) > _MAX_ITEMS:
                parts.append(f"{owner}=[{len(items)} {'tensors' if all(len(k) > 3 for _, k in items) else 'values'}]")
            else:
                parts += [f"{name}={describe_leaf(key)}" for name, key in items]
        if self.training and not any(self.training):
            parts.append("eval")
        ambient = dict(zip(AMBIENT_NAMES, self.ambient, strict=True))
        parts += ["inference mode"] if ambient["inference mode"] else ["no grad"] * (not ambient["grad mode"])
        if self.no_grad and all(self.no_grad):
            parts.append("no .grad yet")
        return ", ".join(parts) or "no arguments"

    def names(self) -> list[str]:
        """The path of each leaf, from the arguments' names."""
        positional, keyword = self.structure.children
        found: list[str] = []
        for index, child in enumerate(positional.children):
            found += paths(child, argument_name(self.arguments, index))
        for key, child in zip(keyword.keys, keyword.children, strict=True):
            found += paths(child, str(key))
        return found


_MAX_ITEMS = 4
"""The items of a list that a brief description names."""


def _list_of(name: str) -> str | None:
    """The list that a leaf is an item of, by the leaf's path: `parameters` for `parameters[3]`."""
    owner, bracket, index = name.rpartition("[")
    return owner if bracket and index.removesuffix("]").isdigit() else None


_GRAD = 5
"""The place of "leaf" and "computed" in a tensor's key."""


def tensor_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """A tensor's part of the key: its geometry, and its attributes, if it has any."""
    is_usual = tensor.layout is torch.strided and not tensor.is_nested  # asked of each tensor: not `is_strided`
    geometry = (
        type(tensor),
        tensor.shape if is_usual else shape_of(tensor),
        tensor.stride() if is_usual else special_kind(tensor),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad and ("leaf" if tensor.is_leaf else "computed"),
        tensor.is_conj(),
        tensor.is_neg(),
    )
    attributes = attributes_on(tensor) if tensor.__dict__ else NONE
    return geometry if attributes is NONE else (*geometry, attributes)


@dataclass(frozen=True, slots=True)
class Inside:
    """What a wrapper subclass is taken apart into: its own operations depend on all of it."""

    tensors: tuple[Hashable, ...]
    same: tuple[int, ...]
    """The first of the tensors that is this one."""
    context: tuple[Hashable, ...]
    kept: tuple[Any, ...] = field(compare=False)
    """Objects that are told apart by identity."""

    @classmethod
    def of(cls, tensor: Any) -> Inside:
        names, context = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        ids, (leaves, structure) = list(map(id, inner)), flatten(context)
        same = tuple(map(ids.index, ids))
        return cls(tuple(map(leaf_key, inner)), same, (structure, *map(token, leaves)), tuple(leaves))


def is_computed(key: Hashable) -> bool:
    """True if a leaf's key is that of a tensor that autograd has computed, or may have computed."""
    return isinstance(key, tuple) and len(key) > _GRAD and key[_GRAD] in ("computed", True)


def leaf_key(leaf: Any) -> Hashable:
    """Any leaf's part of the key: tensors by geometry, plain values by value, other objects by identity."""
    if type(leaf) is torch.Tensor:
        return tensor_key(leaf)
    if issubclass(type(leaf), torch.Tensor):
        # a parameter is not copied in: it is the thing itself, and a graph has its address baked in
        own = ("itself", id(leaf), address_of(leaf)) if isinstance(leaf, torch.nn.Parameter) else ()
        is_wrapper = hasattr(type(leaf), "__tensor_flatten__") and not leaf.is_nested
        inside = (Inside.of(leaf),) if is_wrapper else ()
        return (*tensor_key(leaf), *own, *inside)
    if type(leaf) is float:
        return (float, leaf.hex())
    if type(leaf) is complex:
        return (complex, f"{leaf.real.hex()} {leaf.imag.hex()}")
    if issubclass(type(leaf), BY_VALUE):
        return (type(leaf), leaf)
    if is_of_numpy(leaf):
        raise InvalidArgument(
            f"a numpy {type(leaf).__name__} was passed to a captured step",
            rule="host-data",
            why="its values would be frozen at capture: only tensors are copied in at each call.",
            fix="pass torch.as_tensor(value), or, for a number that stays the same, value.item().",
        )
    return (type(leaf), "object", id(leaf))


def leaf_keys(leaves: Sequence[Any], *, gradients: bool = False, on: str | None = None) -> tuple[Hashable, ...]:
    """The keys of a call's leaves. A tensor that is passed twice is one tensor, and that is part of its key.

    `gradients`: so is the `.grad` or hooks that a backward would find on a tensor that is copied in. `on`: the kind of
    device whose tensors have an alignment, which is part of the key where it is not the usual one.
    """
    if len(leaves) == 1 and type(leaves[0]) is torch.Tensor and not (gradients and leaves[0].requires_grad):
        return _with_alignments([tensor_key(leaves[0])], leaves, on)
    keys: list[Any] = list(map(leaf_key, leaves))
    if gradients:
        for index, key in enumerate(keys):
            if len(key) > 5 and key[5] == "leaf" and not isinstance(leaves[index], torch.nn.Parameter):
                keys[index] = (*key[:5], gradient_mark(leaves[index]), *key[6:])
    if len(leaves) > 1 and len(set(map(id, leaves))) < len(leaves):
        first: dict[int, int] = {}
        for index, leaf in enumerate(leaves):
            if issubclass(type(leaf), torch.Tensor) and first.setdefault(id(leaf), index) != index:
                own = () if attributes_in(keys[index]) is NONE else (keys[index][8],)
                keys[index] = (*keys[index][:8], *own, first[id(leaf)])
    return _with_alignments(keys, leaves, on)


def _with_alignments(keys: list[Any], leaves: Sequence[Any], on: str | None) -> tuple[Hashable, ...]:
    if on is None:
        return tuple(keys)
    for index, leaf in enumerate(leaves):
        if issubclass(type(leaf), torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
            alignment = alignment_of(leaf, on)
            if alignment is not None and alignment.rest:
                keys[index] = (*keys[index], alignment)
    return tuple(keys)


def alignment_in(key: Any) -> Alignment | None:
    """The alignment of the tensor that a leaf's key is of, where it is not the usual one."""
    return next((part for part in key if isinstance(part, Alignment)), None)


def gradient_mark(tensor: torch.Tensor) -> str:
    """The part of the key for a tensor that needs a gradient: what a backward would find on it."""
    if not tensor.is_leaf:
        return "computed"
    mark, grad = "leaf", tensor.grad
    if grad is not None:
        mark = "leaf with .grad"
        if not is_strided(grad):
            mark += f" that is a {special_kind(grad)}"
        elif is_strided(tensor) and grad.stride() != tensor.stride():
            mark += f" of strides {list(grad.stride())}"
    return f"{mark}, hooks" if has_gradient_hooks(tensor) else mark


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks for its gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def refuse_gradient(name: str, leaf: torch.Tensor) -> None:
    """Refuse a leaf argument, for which the step gets a copy, whose gradient or hooks the copy cannot have."""
    if not leaf.requires_grad or not leaf.is_leaf:
        return
    if has_gradient_hooks(leaf):
        raise CaptureError(
            f"argument `{name}` has a hook for its gradient",
            rule="module-hook",
            why="the step gets a copy of the argument, without hooks, and a replay runs no Python.",
            fix=f"remove the hook and do its work on {name}.grad after the call, or register it inside the step on a "
            "tensor that is computed there.",
        )
    if leaf.grad is not None and leaf.grad.layout is not torch.strided:
        raise CaptureError(
            f"argument `{name}` has a sparse gradient",
            rule="sparse-grad",
            why="a sparse gradient has as many entries as the batch has rows: its memory differs from call to call.",
            fix=f"make it dense: {name}.grad = {name}.grad.to_dense().",
        )


def refuse_arguments(leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Refuse arguments that no graph of a module or a callable can take."""
    refuse_opaque(leaves)
    refuse_unlike_buffers(leaves, names)
    refuse_tensor_classes(leaves, names)


def refuse_opaque(leaves: Sequence[Any]) -> None:
    """Refuse objects that hide tensors: they are compared by identity, so that their tensors would be frozen."""
    for leaf in leaves:
        if issubclass(type(leaf), torch.Tensor) or is_compared_by_value(leaf):
            continue
        if type(leaf).__module__.partition(".")[0] == "torch":
            continue
        if issubclass(type(leaf), (torch.nn.Module, torch.optim.Optimizer)):
            continue
        hidden = hidden_tensor(leaf)
        if hidden is not None:
            raise InvalidArgument(
                f"an argument of type {type(leaf).__name__} holds tensors (`{hidden}`) that stepgraph cannot see",
                rule="opaque-argument",
            )


def refuse_tensor_classes(leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Refuse tensors that are more than strided memory: a buffer would not be one of them."""
    for leaf, name in zip(leaves, names, strict=True):
        if not issubclass(type(leaf), torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
            continue
        special = special_kind(leaf) or ("symbolic zero" if leaf._is_zerotensor() else "")
        if special or type(leaf) is not torch.Tensor:
            raise InvalidArgument(
                f"`{name}` is {with_article(special or type(leaf))}",
                rule="tensor-class",
                fix="pass and return plain tensors, and put them together elsewhere.",
            )


def describe_leaf(key: Any) -> str:
    """A leaf's key in words: `f32[4, 16] cpu`, `'mean'`, `<Linear object>`."""
    if len(key) > 3:
        kind, shape, stride, dtype, device, requires_grad, conj, neg, *same = (
            p for p in key if type(p) is not Alignment and type(p) is not Inside
        )
        name = _SHORT.get(dtype, str(dtype).removeprefix("torch."))
        notes = "" if kind is torch.Tensor else f" {kind.__name__}"
        notes += f" {stride}" if isinstance(stride, str) else ""
        notes += f" requires_grad ({requires_grad})" if requires_grad else ""
        notes += " conj" * conj + " neg" * neg
        if same and isinstance(same[0], Attributes):
            notes += f" with {same.pop(0)}"
        if same and same[0] == "memory":
            notes += f" (in the memory of leaf {same[1]})"
        elif same and same[0] != "itself":
            notes += f" (the same tensor as leaf {same[0]})"
        notes += f" ({alignment})" if (alignment := alignment_in(key)) is not None else ""
        return f"{name}{list(shape)} {device}{notes}"
    if len(key) == 3:
        return f"<{key[0].__name__} object>"
    if key[0] is float:
        return str(float.fromhex(key[1]))
    if key[0] is complex:
        return str(complex(*map(float.fromhex, key[1].split())))
    return repr(key[1])


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)
