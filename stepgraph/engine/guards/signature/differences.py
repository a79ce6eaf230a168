"""The differences between two calls name each thing that keeps one call from the other's graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stepgraph.core.ambient import AMBIENT_NAMES
from stepgraph.core.tensor_attributes import attributes_in
from stepgraph.core.tree import Structure, argument_name, step_into
from stepgraph.engine.guards.signature.key import Signature, alignment_in, describe_leaf


@dataclass(frozen=True, slots=True)
class Difference:
    """One change: where, what, and both values."""

    path: str
    what: str
    captured: str
    received: str
    kind: type | None = field(default=None, compare=False)
    """The type of a leaf, as received."""

    def __str__(self) -> str:
        return self.describe("captured")

    def describe(self, before: str) -> str:
        """In words; `before` says what the earlier value is."""
        return f"{self.path}: {self.what} ({before} {self.captured}, received {self.received})"


def find_differences(captured: Signature, received: Signature) -> list[Difference]:
    """Everything that differs between two signatures, by name."""
    found = _call_differences(captured, received)
    there = dict(zip(received.names(), received.leaves, strict=True))
    for path, one in zip(captured.names(), captured.leaves, strict=True):
        two: Any = there.get(path, one)
        if one != two:
            found.append(Difference(path, _what_changed(one, two), describe_leaf(one), describe_leaf(two), two[0]))
    for name, before, now in zip(AMBIENT_NAMES, captured.ambient, received.ambient, strict=True):
        if before != now:
            found.append(Difference(name, "changed", str(before), str(now)))
    found += _flag_differences("training", captured.training, received.training)
    found += _flag_differences(".grad is None", captured.no_grad, received.no_grad)
    return found


def _what_changed(one: Any, two: Any) -> str:
    if len(one) > 3 and len(two) > 3:
        names = ("type", "shape", "strides", "dtype", "device", "requires_grad", "conj bit", "neg bit")
        changed = [name for name, a, b in zip(names, one, two, strict=False) if a != b]
        if attributes_in(one) != attributes_in(two):
            changed.append("attributes")
        elif alignment_in(one) != alignment_in(two):
            changed.append("alignment")
        elif one[8:] != two[8:] and not changed:
            changed.append("parameter" if one[8:9] == ("itself",) else "sharing with another argument")
        if "shape" in changed and "strides" in changed:
            changed.remove("strides")
        return " and ".join(changed) + " changed"
    return "value changed" if one[0] is two[0] else "type changed"


def _call_differences(captured: Signature, received: Signature) -> list[Difference]:
    if captured.structure == received.structure:
        return []
    (args, kwargs), (new_args, new_kwargs) = captured.structure.children, received.structure.children
    names = captured.arguments or received.arguments
    found = _key_differences("the arguments", args, new_args, lambda k: argument_name(names, k))
    return found + _key_differences("the keyword arguments", kwargs, new_kwargs, str)


def _structure_differences(path: str, one: Structure, two: Structure) -> list[Difference]:
    if one == two:
        return []
    if one.kind is not two.kind:
        return [Difference(path, "type changed", _kind(one), _kind(two))]
    found = _key_differences(path, one, two, lambda k: step_into(one, k, path))
    return found or [Difference(path, "container changed", _kind(one), _kind(two))]


def _key_differences(path: str, one: Structure, two: Structure, name: Callable[[Any], str]) -> list[Difference]:
    found = [Difference(name(k), "missing", "present", "absent") for k in one.keys if k not in two.keys]
    found += [Difference(name(k), "extra", "absent", "present") for k in two.keys if k not in one.keys]
    if not found and one.keys != two.keys:
        found.append(Difference(path, "keys reordered", str(list(one.keys)), str(list(two.keys))))
    others = dict(zip(two.keys, two.children, strict=True))
    for key, child in zip(one.keys, one.children, strict=True):
        if key in others:
            found += _structure_differences(name(key), child, others[key])
    return found


def _kind(structure: Structure) -> str:
    return structure.kind.__name__ if structure.kind else "a leaf"


def _flag_differences(what: str, one: tuple[bool, ...], two: tuple[bool, ...]) -> list[Difference]:
    if not one or not two:  # not known yet
        return []
    if len(one) != len(two):
        return [Difference(what, "the step touches other objects", str(len(one)), str(len(two)))]
    changed = [i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    if len(changed) > 4:
        more = f"#{changed[0]} and {len(changed) - 1} more"
        return [Difference(more, what, str(one[changed[0]]), str(two[changed[0]]))]
    return [Difference(f"#{i}", what, str(one[i]), str(two[i])) for i in changed]
