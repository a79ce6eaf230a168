"""Imports of torch by stepgraph, where numpy is not installed.

torch needs no numpy, but warns once, when it is imported without: "Failed to initialize NumPy". In a program that
imports torch by itself the warning is between torch and its user, and stepgraph has no part in it. A command of
stepgraph imports torch for its user, and so does the first use of a public name in a program that has not imported it
yet. There the warning would stand above a table that it has nothing to do with.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["importing_torch"]

_NO_NUMPY = re.compile("Failed to initialize NumPy")


@contextlib.contextmanager
def importing_torch() -> Iterator[None]:
    """Import torch in this block, if at all, without its warning that numpy is missing.

    The block adds one entry to Python's warning filters and takes this entry away again. `warnings.catch_warnings`
    would also take away what torch adds, and have Python repeat warnings that it has shown.
    """
    if "torch" in sys.modules:
        yield
        return
    filters: Any = warnings.filters
    entry = ("ignore", _NO_NUMPY, UserWarning, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        filters[:] = [other for other in filters if other is not entry]
