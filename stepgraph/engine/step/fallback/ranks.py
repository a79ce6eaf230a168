"""Ranks that train one model decide together which modules to graph.

Each rank searches by itself, and data may decide what it finds: a branch that only one rank takes, a number of tokens
that by chance was the same twice. NCCL requires that an operation is captured on all ranks of its group or on none, and
a rank with fewer graphs is the one that all others wait for. So a module is graphed if no rank refuses it.

The ranks exchange their refusals through the store of the process group, not by a collective: a rank that never comes
here (its own capture did not fail, or its arguments changed) would leave the others in it for good. They wait for a
limited time. Then one of them ends the exchange for all, in one operation of the store, and no rank graphs anything.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.engine.observe.ddp import replicas
from stepgraph.engine.oplog import Log
from stepgraph.engine.step.fallback.search import Refusal

PATIENCE = 60.0
"""Seconds that a rank waits for the others, besides the time of its own search."""
_AGREED, _ENDED = "agreed", "ended"


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that must graph the same modules, and the store that they share."""

    store: Any
    rank: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, modules: Iterable[torch.nn.Module], logs: Iterable[Log]) -> Group | None:
        """The group of a step with these modules, whose calls have run these operations; None if it is alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        wrapped = replicas(modules)
        if wrapped:
            ranks = dist.get_process_group_ranks(wrapped[0].process_group)
        elif any(_communicates(log) for log in logs):
            ranks = list(range(dist.get_world_size()))
        else:
            return None
        store = dist.distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(), tuple(ranks)) if len(ranks) > 1 else None

    def exchange(self, name: str, refused: Mapping[str, Refusal], seconds: float) -> Mapping[str, Refusal] | None:
        """Return the refusals of all ranks, by path; None if a rank did not come in time.

        `name` is that of the step; `seconds` is the time to wait.
        """
        place = f"stepgraph/engine/parts/modules/{name}/{'-'.join(map(str, self.ranks))}"
        place = f"{place}/{self.store.add(f'{place}/{self.rank}', 1)}"  # the number of this search, after a reset too
        told = {path: [refusal.reason, refusal.spreads] for path, refusal in refused.items()}
        self.store.set(f"{place}/{self.rank}", json.dumps(told))
        if self._verdict(place, seconds) != _AGREED:
            return None
        found: dict[str, Refusal] = {}
        for rank in self.ranks:
            for path, (reason, spreads) in json.loads(self.store.get(f"{place}/{rank}")).items():
                whose = "" if rank == self.rank else f" (on rank {rank})"
                if path not in found or rank == self.rank:
                    found[path] = Refusal(f"{reason}{whose}", spreads or (path in found and found[path].spreads))
        return found

    def _verdict(self, place: str, seconds: float) -> str:
        """The end of an exchange: the last rank to come agrees, and one that has waited too long ends it."""
        verdict, own = f"{place}/verdict", _AGREED
        if self.store.add(f"{place}/come", 1) < len(self.ranks):
            try:
                self.store.wait([verdict], datetime.timedelta(seconds=seconds))
            except RuntimeError:  # it is over in time
                own = _ENDED
        return bytes(self.store.compare_set(verdict, "", own)).decode()


def ended(group: Group, seconds: float) -> str:
    """The reason why no module is graphed after an exchange that was ended."""
    others = ", ".join(str(rank) for rank in group.ranks if rank != group.rank)
    return (
        f"ranks decide together, and not all of ranks {others} have searched after {seconds:.0f} s: the capture of one "
        "did not fail, or its arguments change"
    )


def _communicates(log: Log) -> bool:
    operations: Sequence[Any] = [log[index][0] for index in range(len(log))]
    return any("c10d" in getattr(operation, "namespace", "") for operation in operations)
