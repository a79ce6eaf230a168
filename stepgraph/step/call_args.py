"""The arguments of one call: taken apart, to be compared and copied, and as the caller passed them.

What runs eagerly for good runs on the caller's own containers, so that what the step puts into them is there as without
a capture. Warm-up does so only where an obstacle may lead there; else it is given new ones, as the recording will be,
and a step that puts something into them is refused at the first call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.tree import Structure, unflatten


@dataclass(frozen=True, slots=True)
class CallArgs:
    """A call's arguments."""

    leaves: Sequence[Any]
    structure: Structure
    own: tuple[tuple[Any, ...], dict[str, Any]] | None
    """`args` and `kwargs` of the caller, who knows nothing of these leaves if they are padded: then None."""

    def with_leaves(self, leaves: Sequence[Any], *, own: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments to call the step with: the caller's `own` if these are its leaves, else built anew around them."""
        if own and self.own is not None and all(map(operator.is_, leaves, self.leaves)):
            return self.own
        args, kwargs = unflatten(self.structure, leaves)
        return args, kwargs
