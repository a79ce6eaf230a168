"""These blocks change an attribute of one instance, or the items of a list, and put them back at their end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def shadowed(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute on one instance, and leave the instance as it was."""
    missing = object()
    before = instance.__dict__.get(name, missing)
    instance.__dict__[name] = value
    try:
        yield
    finally:
        if before is missing:
            del instance.__dict__[name]
        else:
            instance.__dict__[name] = before


@contextlib.contextmanager
def exchanged(items: list[Any], others: list[Any]) -> Iterator[None]:
    """Put others into the very same list, by whichever name it is known, and leave it as it was."""
    before = list(items)
    items[:] = others
    try:
        yield
    finally:
        items[:] = before
