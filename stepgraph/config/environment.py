"""`Environment` is what rules know about the machine and the process: a frozen record, so that tests can make any."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER")
"""The environment variables that rules read."""
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the process that a configuration is checked for.

    Example:
        >>> Environment(compute_capability=(9, 0), variables={"NCCL_GRAPH_REGISTER": "0"})
    """

    te_version: str | None = None
    """The version of Transformer Engine; None where it is not installed."""
    compute_capability: tuple[int, int] | None = None
    """The GPU's; None without a GPU."""
    variables: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Environment variables."""
    world_size: int = 1
    """Number of processes of the run."""
    device: str | None = None
    """The device that the user asked for, "cuda" or "cpu"; None leaves the choice to the run."""

    @classmethod
    def read(cls, device: str | None = None) -> Environment:
        """The environment of this process. Asks torch for the GPU, and starts no CUDA context where there is none."""
        return cls(
            te_version=_installed("transformer_engine"),
            compute_capability=_compute_capability() if device != "cpu" else None,
            variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
            world_size=_world_size(),
            device=device,
        )

    @property
    def has_expandable_segments(self) -> bool:
        """True if the allocator was told to use expandable segments, by either variable."""
        told = [self.variables.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
        options = [option.replace(" ", "") for text in told for option in text.split(",")]
        return any(option.lower() == "expandable_segments:true" for option in options)

    def te_is_older_than(self, *version: int) -> bool:
        """True if Transformer Engine is installed, in a version before this one."""
        return self.te_version is not None and numbers_of(self.te_version) < version


def blocking_wait(environment: Mapping[str, str]) -> str | None:
    """The variable that makes NCCL's waits block the host, read as torch reads it: the newer name first.

    TORCH_NCCL_ASYNC_ERROR_HANDLING, which torch's notes on DDP and CUDA graphs want off, does no harm: captured
    collectives are not given to NCCL's watchdog (pytorch#102542), and a capture in thread_local mode ignores its
    queries.
    """
    name = next((name for name in _BLOCKING_WAIT if name in environment), None)
    return name if name is not None and environment[name].lower() in ("y", "yes", "1", "t", "true") else None


def numbers_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 12) for `2.12.0rc1+abc` is (2, 12, 0)."""
    found = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compute_capability() -> tuple[int, int] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _world_size() -> int:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    told = os.environ.get("WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) else 1
