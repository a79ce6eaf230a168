"""A captured step as a method: each instance has a step of its own, which lives and dies with it.

It lies among the instance's attributes under a name of its own, so that looking up the method goes the way of all
methods: a subclass may have another one, and call this by `super()`. A copy of the instance has none yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepgraph.errors import InvalidArgument


class BoundSteps:
    """The steps of one captured method."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = f"__stepgraph_{name}_{id(self):x}"

    def of(self, instance: Any, make: Callable[[], Any]) -> Any:
        """The step of an instance, or of a class whose class method it is; made at the first call."""
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
                f"{self._name}: a captured method of {type(instance).__name__}, whose instances have no __dict__",
                rule="option",
                why="each instance has a captured step of its own, which has to be kept with it.",
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
