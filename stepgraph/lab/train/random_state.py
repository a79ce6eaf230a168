"""The random states of a process as one value: torch's generators, the named states of the tracker, Python, NumPy."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from stepgraph.engine.backends.random.tracker import get_cuda_rng_tracker


def get_random_states(device: torch.device) -> dict[str, Any]:
    """Return all random states that training on a device draws from."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "tracker": get_cuda_rng_tracker(device).get_states(),
        "python": random.getstate(),
        "numpy": None,
    }
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, [int(key) for key in keys], *(number + 0 for number in rest)]
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Continue with the random states that `get_random_states` returned."""
    torch.set_rng_state(states["cpu"])
    if states["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)
    get_cuda_rng_tracker(device).set_states(states["tracker"])
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy")
    if states["numpy"] is not None and numpy is not None:
        numpy.random.set_state(tuple(states["numpy"]))
