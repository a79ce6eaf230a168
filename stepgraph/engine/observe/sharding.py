"""FSDP shards the parameters of a model over the ranks: `fully_shard` (FSDP2) and `FullyShardedDataParallel` (FSDP1).

In each step it gathers parameters into memory that it has allocated for the moment, puts plain tensors in the place of
the sharded ones, and frees the memory again. No engine records that yet. So a call of such a model is refused before
anything is tried: FSDP that is interrupted in the middle of a step keeps its parameters gathered.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from stepgraph.core.catalogue import entry
from stepgraph.core.errors import CaptureError

_MARK = "_is_fsdp_managed_module"
"""torch's own note on all modules, wrapped or inside, whose parameters FSDP manages: the compiler asks for it."""
_WRAPPERS = frozenset(("FSDPModule", "FullyShardedDataParallel"))


def _is_sharded(module: torch.nn.Module) -> bool:
    if vars(module).get(_MARK, False):
        return True
    return any(base.__name__ in _WRAPPERS for base in type(module).__mro__)


def refuse_sharded(name: str, modules: Iterable[torch.nn.Module], whose: str = "step") -> None:
    """Refuse a step or module that uses one of these modules, if FSDP manages its parameters."""
    found = next(filter(_is_sharded, modules), None)
    if found is not None:
        why, fix = entry("fsdp").reason_and_fix(whose)
        what = f"{name}: the {whose} uses a model that FSDP shards: {type(found).__name__}"
        raise CaptureError(what, rule="fsdp", why=why, fix=fix)
