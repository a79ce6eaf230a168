"""Splits nested state into JSON and named tensors, and joins the two again.

State dicts mix tensors with plain values: numbers, strings, lists, tuples, dicts with keys of several types. Pickle
stores them all, but loading a pickle runs code that the file names. Here the plain part becomes JSON with its types
spelled out, and each tensor gets a name. Reading both runs no code, and floats keep every bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import with_article

_PLAIN = (bool, int, str)


def split(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON value of nested state, and its tensors by name. Refuse objects of other classes."""
    tensors: dict[str, torch.Tensor] = {}
    return _encoded(state, "state", tensors), tensors


def join(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the nested state that `split` was given. Raise ValueError for JSON that `split` does not write."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "float" and isinstance(content, str):
            return float.fromhex(content)
        if kind == "tensor" and content in tensors:
            return tensors[content]
        if kind == "dict" and isinstance(content, list) and all(isinstance(i, list) and len(i) == 2 for i in content):
            return {join(key, tensors): join(inner, tensors) for key, inner in content}
        if kind in ("list", "tuple") and isinstance(content, list):
            items = [join(inner, tensors) for inner in content]
            return items if kind == "list" else tuple(items)
    raise ValueError(f"`{str(value)[:60]}` is not a value that stepgraph writes")


def _encoded(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in _PLAIN:
        return value
    if type(value) is float:
        return {"float": value.hex() if math.isfinite(value) else str(value)}
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _encoded(inner, f"{path}.{key}", tensors)] for key, inner in value.items()]}
    if type(value) in (list, tuple):
        items = [_encoded(inner, f"{path}.{index}", tensors) for index, inner in enumerate(value)]
        return {type(value).__name__: items}
    raise InvalidArgument(
        f"`{path}` is {with_article(type(value))}, which a checkpoint cannot hold",
        rule="checkpoint",
        why="a checkpoint has tensors and plain values only, so that loading it runs no code.",
        fix="keep tensors, numbers, strings, lists, tuples and dicts in the state.",
    )
