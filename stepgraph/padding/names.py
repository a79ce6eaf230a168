"""The names of leaves, as users write them.

Messages spell a leaf as Python would (`batch['input_ids']`, `batch.mask`, `pair[1]`); users rather write dots all the
way (`batch.input_ids`, `pair.1`). Both are taken: two names are one leaf if they are the same with dots for brackets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.errors import InvalidArgument
from stepgraph.signature import describe_leaf, tensor_key

_INDEX = re.compile(r"\[(['\"]?)(.*?)\1\]")
_MAX_LISTED = 20


def dotted(name: str) -> str:
    """A leaf's name with dots for brackets: `batch.input_ids` for `batch['input_ids']`."""
    return _INDEX.sub(r".\2", name)


def invalid(what: str, *, why: str, fix: str, details: Sequence[str] = ()) -> InvalidArgument:
    """The error for buckets or pad values that cannot be meant."""
    return InvalidArgument(what, rule="buckets", details=details, why=why, fix=fix)


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
        why="each name stands for one tensor, and a misspelt one must not be passed over.",
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
