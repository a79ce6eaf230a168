"""The one way in which an object of the user is touched: an attribute of one instance, for the length of a block."""

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
