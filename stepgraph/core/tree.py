"""Pytrees as users write them: dicts, lists, tuples, namedtuples, dataclasses, and what is registered with torch.

torch's own pytree knows neither dataclasses nor, in its fast form, the order of dict keys. This one flattens a call in
a few microseconds into leaves and a structure that hashes, compares, names each leaf's path and builds the tree again.

An instance of a user's class is all that it holds: a dataclass's fields, and also what `__post_init__` or a cached
property has left on it; the items of a dict's subclass, and also its attributes. A structure holds none of these
values, so a tree built from one call's structure and another's leaves has nothing of the first call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils import _pytree as torch_pytree

from stepgraph.core.wording import counted, with_article


class Leaf:
    """A dataclass that is not taken apart."""

    __slots__ = ()


class Structure(NamedTuple):
    """The shape of a tree: a container's kind, its keys in order, context, and its children. A leaf has no kind."""

    kind: type | None
    keys: tuple[Any, ...] = ()
    context: Hashable = None
    children: tuple[Structure, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """The key of an attribute beside a container's items."""

    name: str


class _Fields(enum.Enum):
    """The context of a container whose keys are its attributes."""

    DATACLASS = enum.auto()


class _Items(NamedTuple):
    """The context of a dict of a class of the user's own."""

    base: type
    factory: Hashable
    is_its_own_dict: bool
    """Whether its attributes are its items: `self.__dict__ = self`."""


LEAF = Structure(None)
_DICTS = (dict, OrderedDict, defaultdict)
_VALUES = frozenset({type(None), bool, int, float, str, torch.Size})
_FLAT = _VALUES | {torch.Tensor}
_MADE_BY_PYTHON = 1 << 9
"""The flag of a class that is not one of the interpreter's own."""

_Opened = tuple[tuple[Any, ...], Hashable, Iterable[Any]]


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Take a tree apart into its leaves and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves.append, ())


class CallFlattener:
    """Takes calls apart. The structure of a call of tensors and plain values follows from its names."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Structure] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
        """The same as `flatten((args, kwargs))`."""
        if not (_FLAT.issuperset(map(type, args)) and _FLAT.issuperset(map(type, kwargs.values()))):
            return flatten((args, kwargs))
        key = (len(args), *kwargs)
        if key not in self._known:
            self._known[key] = flatten((args, kwargs))[1]
        return [*args, *kwargs.values()], self._known[key]


def _flatten(node: Any, emit: Callable[[Any], None], above: tuple[int, ...]) -> Structure:
    """`above` has the dataclass instances on the way here: one that comes back to itself is a leaf there."""
    opened = None if type(node) in _FLAT else _open(node)
    if opened is None or id(node) in above:
        emit(node)
        return LEAF
    keys, context, values = opened
    if context is _Fields.DATACLASS:
        above = (*above, id(node))
    return Structure(type(node), keys, context, tuple([_flatten(value, emit, above) for value in values]))


def _open(node: Any) -> _Opened | None:
    """A container's keys, context and values; None for a leaf."""
    kind = type(node)
    if kind is dict:
        return tuple(node), None, node.values()
    if kind is tuple or kind is list:
        return tuple(range(len(node))), None, node
    if issubclass(type(node), torch.Tensor):
        return None
    if kind is defaultdict or (kind is OrderedDict and not vars(node)):
        return tuple(node), _factory(node), node.values()
    if issubclass(type(node), tuple) and hasattr(node, "_fields"):
        beside = attributes_of(node)
        return (*node._fields, *map(Attribute, beside)), None, (*node, *beside.values())
    if issubclass(type(node), dict) and (kind is OrderedDict or kind not in torch_pytree.SUPPORTED_NODES):
        return _open_items(node)
    if kind in torch_pytree.SUPPORTED_NODES:
        values, context = torch_pytree.SUPPORTED_NODES[kind].flatten_fn(node)
        return tuple(range(len(values))), _Context(context), values
    if hasattr(kind, "__dataclass_fields__") and not issubclass(kind, (Leaf, enum.Enum, torch.nn.Module)):
        return _open_dataclass(node)
    return None


def _open_items(node: dict[Any, Any]) -> _Opened:
    """A dict's subclass: the items that it holds, whatever its methods make of them, and its attributes."""
    base = next(base for base in type(node).__mro__ if base in _DICTS)
    is_its_own_dict = getattr(node, "__dict__", None) is node
    beside = {} if is_its_own_dict else attributes_of(node)
    keys = (*cast(Any, base).keys(node), *map(Attribute, beside))
    values = (*cast(Any, base).values(node), *beside.values())
    return keys, _Items(base, _factory(node) if base is defaultdict else None, is_its_own_dict), values


def _open_dataclass(node: Any) -> _Opened | None:
    if next(base for base in type(node).__mro__ if not base.__flags__ & _MADE_BY_PYTHON) is not object:
        return None  # a list, an exception: it holds more than its attributes
    held = attributes_of(node)
    fields = [field.name for field in dataclasses.fields(node)]
    for name in fields:
        if name not in held and hasattr(node, name):  # a default that only the class has
            held[name] = getattr(node, name)
    names = [name for name in fields if name in held]
    if len(names) < len(held):
        names += sorted(held.keys() - set(names))
    return tuple(names), _Fields.DATACLASS, [held[name] for name in names]


def attributes_of(instance: Any) -> dict[str, Any]:
    """The values that an instance holds by name: in its `__dict__`, and in slots."""
    held = dict(getattr(instance, "__dict__", ()))
    for base in type(instance).__mro__:
        if "__slots__" in base.__dict__:
            for name, slot in base.__dict__.items():
                if type(slot) is types.MemberDescriptorType and hasattr(instance, name):
                    held[name] = getattr(instance, name)
    return held


def hidden_tensor(instance: Any) -> str | None:
    """The name of a tensor that an instance holds: on itself, in itself, or in a container on itself.

    Parameters in a container pass: whatever steps or averages parameters holds them so.
    """
    held = attributes_of(instance)
    for name, value in held.items():
        if issubclass(type(value), torch.Tensor):
            return name
    for name, container in (("", instance), *held.items()):
        for key, value in _items_of(container):
            if issubclass(type(value), torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                return f"{name}[{key!r}]"
    return None


def _items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    if issubclass(type(container), dict):
        return dict.items(container)
    return enumerate(container) if issubclass(type(container), (list, tuple, set, frozenset, deque)) else ()


def tree_map(func: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each leaf of a tree, and build the tree again: of containers, also of dataclasses.

    Example:
        >>> tree_map(torch.Tensor.clone, {"x": x, "packed": PackedSequence(offsets=y)})
    """
    leaves, structure = flatten(tree)
    return unflatten(structure, [func(leaf) for leaf in leaves])


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Build the tree again around other leaves."""
    return _unflatten(structure, iter(leaves))


def _unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    values = [_unflatten(child, leaves) for child in structure.children]
    if kind is tuple or kind is list:
        return kind(values)
    keys, context = structure.keys, structure.context
    if kind is dict:
        return dict(zip(keys, values, strict=True))
    if context is _Fields.DATACLASS:
        return _with_attributes(object.__new__(kind), keys, values)
    if isinstance(context, _Context):
        return torch_pytree.SUPPORTED_NODES[kind].unflatten_fn(values, context.value)
    num_items = sum(type(key) is not Attribute for key in keys)
    if isinstance(context, _Items):
        made = _build_items(kind, context, zip(keys[:num_items], values, strict=False))
    elif issubclass(kind, dict):
        pairs = dict(zip(keys, values, strict=True))
        return cast(Any, kind)(context, pairs) if kind is defaultdict else kind(pairs)
    else:
        made = kind(*values[:num_items])
    return _with_attributes(made, [key.name for key in keys[num_items:]], values[num_items:])


def _build_items(kind: type, context: _Items, pairs: Iterable[tuple[Any, Any]]) -> Any:
    """A dict of the user's class with these items; neither its constructor nor a method of its own is called."""
    base = cast(Any, context.base)
    made = base.__new__(kind)
    base.__init__(made, *([context.factory] if base is defaultdict else ()))
    for key, value in pairs:
        base.__setitem__(made, key, value)
    if context.is_its_own_dict:
        object.__setattr__(made, "__dict__", made)
    return made


def _with_attributes(made: Any, names: Iterable[str], values: Sequence[Any]) -> Any:
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def paths(structure: Structure, prefix: str = "") -> list[str]:
    """A name for each leaf, as Python would spell it: `batch['ids']`, `batch.mask`, `pair[1]`."""
    if structure.kind is None:
        return [prefix or "value"]
    found: list[str] = []
    for key, child in zip(structure.keys, structure.children, strict=True):
        found += paths(child, step_into(structure, key, prefix))
    return found


def step_into(structure: Structure, key: Any, prefix: str) -> str:
    if isinstance(key, Attribute):
        return f"{prefix}.{key.name}"
    by_name = structure.context is _Fields.DATACLASS or hasattr(structure.kind, "_fields")
    return f"{prefix}.{key}" if by_name else f"{prefix}[{key!r}]"


def argument_name(names: Sequence[str], index: int) -> str:
    """A positional argument's name in the step's own signature."""
    return names[index] if index < len(names) else f"args[{index}]"


def changed_containers(
    structure: Structure,
    leaves: Sequence[Any],
    call: tuple[Any, Any],
    names: Sequence[str] = (),
    *,
    removed: bool = False,
) -> str | None:
    """The first change that a call has made to the containers that it was given, in words, or None.

    `call` is the (args, kwargs) that were passed, and had this `structure` and these `leaves`; `names` are those of the
    positional parameters. `removed`: removed keys of a mapping count too; steps unpack their batch with `pop`.
    """
    (args, kwargs), (positional, keyword) = call, structure.children
    rest = iter(leaves)
    given = [(argument_name(names, i), node) for i, node in enumerate(args)]
    given += [(str(key), kwargs[key]) for key in keyword.keys]
    for (name, node), child in zip(given, (*positional.children, *keyword.children), strict=True):
        found = _changed(child, rest, node, name, removed)
        if found is not None:
            return found
    return None


def _changed(structure: Structure, leaves: Iterator[Any], node: Any, path: str, removed: bool) -> str | None:
    if structure.kind is None:
        return None if _is_same(next(leaves), node) else f"`{path}` was replaced by a new {type(node).__name__}"
    opened = _open(node) if type(node) is structure.kind else None
    if opened is None:
        return f"`{path}` is now {with_article(type(node))}"
    keys, context, values = opened
    now = {key: value for key, value in zip(keys, values, strict=True) if not _is_cached(node, key, structure)}
    if len(now) != len(structure.keys) and isinstance(node, Sequence):
        return f"`{path}` has {counted(len(now), 'items')} and had {len(structure.keys)}"
    is_mapping = isinstance(node, Mapping)
    if isinstance(context, _Context) and (len(now) != len(structure.keys) or context != structure.context):
        return _changed_registered(structure, leaves, node, path, removed=removed or not is_mapping)
    for key in now:
        if key not in structure.keys:
            return f"`{step_into(structure, key, path)}` was added"
    for key, child in zip(structure.keys, structure.children, strict=True):
        if key not in now and is_mapping and not removed:
            _taken(child, leaves)
            continue
        name = step_into(structure, key, path)
        found = _changed(child, leaves, now[key], name, removed) if key in now else f"`{name}` was removed"
        if found is not None:
            return found
    return None


def _changed_registered(
    structure: Structure, leaves: Iterator[Any], node: Any, path: str, *, removed: bool
) -> str | None:
    """The same for a node of a registered class, whose values have no keys and whose context has changed."""
    before, (now, built) = _taken(structure, leaves), flatten(node)
    rest = iter(before)
    if not removed and len(now) < len(before) and all(any(_is_same(old, leaf) for old in rest) for leaf in now):
        return None  # nothing but removals
    kind = type(node).__name__
    if len(built.keys) == len(structure.keys):
        return f"`{path}`, {with_article(kind)}, has other keys than it had, or other data beside its values"
    return f"`{path}`, {with_article(kind)}, has {counted(len(built.keys), 'values')} and had {len(structure.keys)}"


def _taken(structure: Structure, leaves: Iterator[Any]) -> list[Any]:
    """The leaves of a structure, drawn from those of all."""
    if structure.kind is None:
        return [next(leaves)]
    return [leaf for child in structure.children for leaf in _taken(child, leaves)]


def _is_same(one: Any, two: Any) -> bool:
    """Whether a leaf is the same, or an equal plain value."""
    return one is two or (type(one) is type(two) and type(one) in _VALUES and repr(one) == repr(two))


def _is_cached(node: Any, key: Any, structure: Structure) -> bool:
    """Whether a new attribute is a cached property, which the next call's instance computes for itself."""
    name = key.name if isinstance(key, Attribute) else key
    if key in structure.keys or not isinstance(name, str):
        return False
    return isinstance(inspect.getattr_static(type(node), name, None), functools.cached_property)


def _factory(node: dict[Any, Any]) -> Hashable:
    factory = getattr(node, "default_factory", None)
    return factory if isinstance(factory, Hashable) else None


class _Context:
    """A torch pytree context, compared by value; contexts need not hash."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return 0
