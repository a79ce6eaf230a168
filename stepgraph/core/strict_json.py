"""Plain values as JSON that every reader takes: a number that is not finite is null. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Return a copy of plain values in which None stands for numbers that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return value


def as_json(values: Mapping[str, Any], indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Return the text of plain values; `default` makes plain ones of others.

    Example:
        >>> as_json({"loss": float("nan")})
        '{"loss": null}'
    """
    return json.dumps(finite(values), indent=indent, allow_nan=False, default=default)
