"""Several ranks look for a cause together: all of them decide what is called next.

A step with collectives has to be called equally often on every rank, in the same order; a rank that stops early leaves
the others waiting. What a rank has seen may differ from the others, so that each decision is made on what all have
seen. Without ranks a decision is a process's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed

__all__ = ["Agreement"]


def _alone(value: Any) -> list[Any]:
    return [value]


def _gathered(value: Any) -> list[Any]:
    dist: Any = torch.distributed
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@dataclass(frozen=True, slots=True)
class Agreement:
    """Decides for all ranks. `gather` returns what each of them gave, in their order."""

    gather: Callable[[Any], list[Any]] = _alone

    @classmethod
    def of_process_group(cls) -> Agreement:
        """The agreement of the ranks of torch's default process group; alone where there is none."""
        dist: Any = torch.distributed
        has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return cls(_gathered) if has_others else cls()

    def any(self, value: bool) -> bool:
        """True if it is true on some rank."""
        return any(self.gather(value))

    def all(self, value: bool) -> bool:
        """True if it is true on all ranks."""
        return all(self.gather(value))

    def least(self, value: int) -> int:
        """The smallest value of all ranks."""
        return int(min(self.gather(value)))

    def first(self, value: Any) -> tuple[Any, int | None]:
        """This rank's own value, or the first one that another rank has, with that rank."""
        values = self.gather(value)
        if value is not None:
            return value, None
        return next(((other, rank) for rank, other in enumerate(values) if other is not None), (None, None))
