"""Copies of a captured step: an object that holds one can be copied, pickled and saved as it could without.

Graphs are bound to the addresses of one model, so that a copy has none: it is a step of the copied function that warms
up and captures by itself. A bound method is bound to the copy of its object. A step that is found under its own name in
a Python module, as a decorated function is, is copied as functions are: it is the same one, and pickled by that name.
"""

from __future__ import annotations

import operator
import sys
import types
from dataclasses import replace
from typing import Any

from stepgraph.session.options import Options


def has_own_name(step: Any) -> bool:
    """Whether a step is what its name stands for in the Python module that it is from."""
    module = sys.modules.get(getattr(step, "__module__", None) or "")
    try:
        return operator.attrgetter(step.__qualname__)(module) is step
    except AttributeError:  # a function in a function, an object without a name
        return False


def options_of_copy(options: Options, memo: dict[int, Any]) -> Options:
    """The options of a copy: generators and hooks of the object that is copied (`memo`) are those of the new one."""
    generators = tuple(memo.get(id(generator), generator) for generator in options.generators)
    return replace(
        options, generators=generators, safe_hooks=tuple(_of_copy(hook, memo) for hook in options.safe_hooks)
    )


def _of_copy(hook: Any, memo: dict[int, Any]) -> Any:
    if isinstance(hook, types.MethodType) and id(hook.__self__) in memo:
        return types.MethodType(hook.__func__, memo[id(hook.__self__)])
    return memo.get(id(hook), hook)
