"""A user's object may hold a captured step: as a method, and in copies and pickles of the object.

A captured method has one step for each instance, which lives as long as the instance. The step is stored among the
instance's attributes under a private name. Python therefore looks the method up as usual: a subclass may override it
and call this one by `super()`. A copy of the instance has no step yet.

An object that holds a captured step can still be copied, pickled and saved. Graphs are bound to the addresses of one
model, so a copied step has no graphs: it is a step of the copied function that warms up and captures by itself. A bound
method is bound to the copy of its object. A step that a Python module holds under the step's own name, such as a
decorated function, is copied as functions are: the copy is the same object, and it is pickled by that name.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.step.options import StepOptions


class BoundSteps:
    """The steps of one captured method."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = f"__stepgraph_{name}_{id(self):x}"

    def of(self, instance: Any, make: Callable[[], Any]) -> Any:
        """Return the step of an instance, or of a class for a class method; made at the first call."""
        held = self._attributes(instance).get(self._key)
        if held is None or held.instance is not instance:  # as in a shallow copy
            held = _Held(instance, make())
            if isinstance(instance, type):
                setattr(instance, self._key, held)
            else:
                vars(instance)[self._key] = held
        return held.step

    def _attributes(self, instance: Any) -> Any:
        try:
            return vars(instance)
        except TypeError as error:
            raise InvalidArgument(
                f"{self._name} is a captured method of {type(instance).__name__}, whose instances have no __dict__",
                rule="option",
                why="each instance has its own captured step, which is stored among its attributes.",
                fix="leave `__slots__` out, or capture the bound method: step = stepgraph.capture(instance.method).",
            ) from error


class _Held:
    """An instance's step. It is not copied with the instance, nor pickled."""

    __slots__ = ("instance", "step")

    def __init__(self, instance: Any, step: Any) -> None:
        self.instance, self.step = instance, step

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def has_own_name(step: Any) -> bool:
    """Check whether the step's Python module holds it under its qualified name."""
    module = sys.modules.get(getattr(step, "__module__", None) or "")
    try:
        return operator.attrgetter(step.__qualname__)(module) is step
    except AttributeError:  # a function in a function, an object without a name
        return False


def options_of_copy(options: StepOptions, memo: dict[int, Any]) -> StepOptions:
    """Return the options of a copy: generators and hooks of the copied object become those in `memo`."""
    generators = tuple(memo.get(id(generator), generator) for generator in options.generators)
    return replace(
        options, generators=generators, safe_hooks=tuple(_of_copy(hook, memo) for hook in options.safe_hooks)
    )


def _of_copy(hook: Any, memo: dict[int, Any]) -> Any:
    if isinstance(hook, types.MethodType) and id(hook.__self__) in memo:
        return types.MethodType(hook.__func__, memo[id(hook.__self__)])
    return memo.get(id(hook), hook)
