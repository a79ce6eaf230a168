"""The options `buckets=` and `pad_values=`, checked once and put into groups, and the names of leaves in them.

Dimensions with the same list of sizes are one group and get the same size at each call: the `input_ids`, `labels` and
mask of a batch are padded together. Groups with different lists are independent, and each combination of their sizes
is a graph. Names that begin with `result` name dimensions of the step's results.

Messages spell a leaf as Python would (`batch['input_ids']`, `batch.mask`, `pair[1]`); users may write dots instead
(`batch.input_ids`, `pair.1`). Two names are one leaf if they are the same with dots for brackets.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import counted
from stepgraph.engine.guards.signature import describe_leaf, tensor_key

Sizes: TypeAlias = tuple[int, ...]
Choice: TypeAlias = tuple[int, ...]
"""A size for each group, in the groups' order."""
Number: TypeAlias = bool | int | float | complex

RESULT = "result"
_EXAMPLE = 'buckets={"batch.input_ids": {1: [128, 256, 512]}}'
_INDEX = re.compile(r"\[(['\"]?)(.*?)\1\]")
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class BucketedLeaf:
    """One tensor with bucketed dimensions."""

    name: str
    """As the user wrote it."""
    dims: tuple[tuple[int, int], ...]
    """(dimension, group); a negative dimension counts from the end."""
    pad: Number = 0
    """The number that fills the padding; 0 is False for a boolean tensor."""
    is_pad_given: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """Which dimensions are padded, together with which others, and to which sizes."""

    groups: tuple[Sizes, ...]
    """Each group's sizes, smallest first."""
    arguments: tuple[BucketedLeaf, ...]
    results: tuple[BucketedLeaf, ...]
    """The results that the user named; the dimensions of others are found out."""

    @classmethod
    def parse(
        cls, buckets: Mapping[str, Mapping[int, Iterable[int]]] | None, pad_values: Mapping[str, Number] | None = None
    ) -> Buckets | None:
        """Read the two options of `stepgraph.capture`; None without buckets."""
        if not buckets:
            if pad_values:
                raise _pads_nothing(next(iter(pad_values)))
            return None
        pads = _read_pads(pad_values or {})
        groups: list[Sizes] = []
        found: dict[str, BucketedLeaf] = {}
        for name, given in _mapping(buckets, "buckets").items():
            path = dotted(_string(name, "buckets"))
            if path in found:
                raise same_leaf(found[path].name, name)
            dims = _read_dims(name, given, groups)
            is_given = path in pads and not _is_result(path)
            found[path] = BucketedLeaf(name, dims, pads.pop(path) if is_given else 0, is_given)
        for path in pads:
            raise _pads_nothing(path)
        results = tuple(leaf for path, leaf in found.items() if _is_result(path))
        arguments = tuple(leaf for path, leaf in found.items() if not _is_result(path))
        _check_lists(groups, arguments, results)
        return cls(tuple(groups), arguments, results)

    @property
    def num_choices(self) -> int:
        """How many combinations of sizes there are: the product over the groups, a graph each."""
        return math.prod(map(len, self.groups))

    def may_have_padded(self, shape: Sequence[int]) -> bool:
        """Whether a result of this shape may have padding in it."""
        return any(size in sizes for size in shape for sizes in self.groups)

    def describe(self) -> str:
        """The groups' sizes in a line: `[128, 256] x [1, 2, 4]: 6 graphs`."""
        lists = " x ".join(str(list(sizes)) for sizes in self.groups)
        return f"{lists}: {counted(self.num_choices, 'graphs')}"

    def check_limit(self, max_graphs: int) -> None:
        """Refuse more combinations than graphs are allowed: all given sizes are captured."""
        if self.num_choices > max_graphs:
            raise invalid(
                f"buckets: {self.describe()}, and max_graphs={max_graphs}",
                why="each combination of sizes is a graph, and groups with different lists are combined freely.",
                fix=f"give fewer sizes, give dimensions that grow together the same list, or "
                f"max_graphs={self.num_choices}.",
            )


def _is_result(path: str) -> bool:
    return path.partition(".")[0] == RESULT


def _read_dims(name: str, given: Any, groups: list[Sizes]) -> tuple[tuple[int, int], ...]:
    dims = []
    for dim, sizes in _mapping(given, f"buckets[{name!r}]").items():
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise invalid(
                f"buckets: {dim!r} is not a dimension of `{name}`",
                why="dimensions are counted: 0 is the first, -1 the last.",
            )
        wanted = _read_sizes(f"`{name}`, dimension {dim}", sizes)
        if wanted not in groups:
            groups.append(wanted)
        dims.append((dim, groups.index(wanted)))
    if not dims and not _is_result(dotted(name)):
        raise invalid(
            f"buckets: no dimension is given for `{name}`",
            why="only dimensions with sizes are padded; only a result may have none.",
        )
    return tuple(dims)


def _read_sizes(where: str, given: Any) -> Sizes:
    sizes = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else []
    if not sizes or not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sizes):
        raise invalid(
            f"buckets: {where}: {given!r} is not a list of sizes",
            why="a dimension is padded up to the smallest of its sizes that holds it: whole numbers of at least 1.",
        )
    return tuple(sorted(set(sizes)))


def _read_pads(given: Any) -> dict[str, Number]:
    pads: dict[str, Number] = {}
    for name, value in _mapping(given, "pad_values").items():
        if not isinstance(value, (bool, int, float, complex)):
            raise invalid(
                f"pad_values: {value!r} for `{name}` is not a number",
                why="padding is filled with one number.",
                fix='pad_values={"batch.labels": -100}, for example.',
            )
        path = dotted(_string(name, "pad_values"))
        if path in pads:
            raise invalid(
                f"pad_values: `{path}` is given twice",
                why="padding is filled with one number.",
                fix="give each leaf one value.",
            )
        pads[path] = value
    return pads


def _pads_nothing(name: str) -> InvalidArgument:
    return invalid(
        f"pad_values: `{name}` is not an argument with buckets",
        why="only bucketed arguments are padded, so this value would never be used.",
        fix=f'give its sizes too: buckets={{"{name}": {{1: [128, 256, 512]}}}}, or drop the value.',
    )


def _check_lists(groups: list[Sizes], arguments: tuple[BucketedLeaf, ...], results: tuple[BucketedLeaf, ...]) -> None:
    padded = {group for leaf in arguments for _, group in leaf.dims}
    for leaf in results:
        for dim, group in leaf.dims:
            if group not in padded:
                raise invalid(
                    f"buckets: `{leaf.name}`, dimension {dim}: no argument has the sizes {list(groups[group])}",
                    why="a result is cut back to the size that an argument had; equal lists say which.",
                    fix="give it the same list as the argument that it grows with.",
                )
    if not arguments:
        raise invalid("buckets: only results are named", why="only arguments are padded.")


def _mapping(given: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        raise invalid(
            f"{what}: {given!r} is not a dict",
            why="sizes are given for each leaf and dimension by name.",
            fix=f'{_EXAMPLE}, pad_values={{"batch.labels": -100}}, for example.',
        )
    return given


def _string(name: Any, what: str) -> str:
    if not isinstance(name, str) or not name:
        raise invalid(
            f"{what}: {name!r} is not a name of a leaf",
            why="leaves are named as you would write them, from the argument's name on.",
        )
    return name


# -- names and errors


def dotted(name: str) -> str:
    """A leaf's name with dots for brackets: `batch.input_ids` for `batch['input_ids']`."""
    return _INDEX.sub(r".\2", name)


def invalid(
    what: str, *, why: str, fix: str = f"{_EXAMPLE}, for example.", details: Sequence[str] = ()
) -> InvalidArgument:
    """The error for buckets or pad values that cannot be meant."""
    return InvalidArgument(what, rule="buckets", details=details, why=why, fix=fix)


def same_leaf(one: str, other: str, where: str = "") -> InvalidArgument:
    """The error for two entries of one tensor."""
    return invalid(
        f"buckets: `{one}` and `{other}` are the same leaf{where}",
        why="two entries for one tensor could contradict each other.",
        fix="put all dimensions of a tensor into one entry.",
    )


def find(name: str, names: Sequence[str], told: Sequence[str], whose: str) -> int:
    """The index of the leaf with this name, or an error that lists what there is; `told` describes each leaf."""
    if name in names:
        return names.index(name)
    known = [dotted(n) for n in names]
    wanted = dotted(name)
    matches = [i for i, n in enumerate(known) if n == wanted]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise invalid(
            f"buckets: `{name}` fits more than one leaf: {', '.join(names[i] for i in matches)}",
            why="each name stands for one tensor.",
            fix=f"spell it as the message does: {names[matches[0]]!r}.",
        )
    inside = [n for n in known if n.startswith(f"{wanted}.")]
    near = inside[:1] or difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    raise invalid(
        f"buckets: `{name}` is a container" if inside else f"buckets: {whose} has no leaf `{name}`",
        details=_listed(names, told, whose),
        why="each name stands for one tensor, and a misspelt one would be ignored.",
        fix=f'did you mean "{near[0]}"?' if near else "use one of the names above.",
    )


def _listed(names: Sequence[str], told: Sequence[str], whose: str) -> list[str]:
    width = max((len(n) for n in names[:_MAX_LISTED]), default=0)
    lines = [f"{name:{width}}  {text}" for name, text in zip(names[:_MAX_LISTED], told, strict=False)]
    more = len(names) - _MAX_LISTED
    return [*(lines or [f"{whose} has no leaves"]), *([f"and {more} more"] if more > 0 else [])]


def described(value: Any) -> str:
    """What a leaf is, for messages: `int64[4, 100] cpu`, `bool`."""
    return describe_leaf(tensor_key(value)) if isinstance(value, torch.Tensor) else type(value).__name__
