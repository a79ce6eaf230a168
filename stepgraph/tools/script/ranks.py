"""Lets the ranks of a `torchrun` agree on what they run and on how they exit.

Each rank runs the script in a process of its own, under a parent of its own. torchrun ends all ranks as soon as one
exits with another code than 0, so the parents first exchange what they found, and then exit alike. They talk through
the store that torchrun's agent keeps; ranks that were started in another way do not agree. The scripts meet elsewhere:
the agent's store still holds the addresses of an earlier run, so that each run has a store of its own (`meeting`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

__all__ = ["exchanged", "is_first_rank", "meeting", "num_ranks", "rank"]


def rank() -> int:
    """Return this process's rank; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """Return the number of ranks that `exchanged` asks; 1 without torchrun."""
    is_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(os.environ.get("WORLD_SIZE", "1")) if is_torchrun else 1


def is_first_rank() -> bool:
    """Return True in the one process that prints."""
    return rank() == 0


def exchanged(value: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Return what all ranks gave, in their order; every rank must call this equally often.

    A rank that gives nothing in time, since its parent was killed, is left out.
    """
    size = num_ranks()
    if size < 2:
        return [dict(value)]
    import torch.distributed

    dist: Any = torch.distributed

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
    prefix = f"stepgraph/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    call = store.add(f"{prefix}/calls/{rank()}", 1)
    keys = [f"{prefix}/{call}/{other}" for other in range(size)]
    store.set(keys[rank()], json.dumps(dict(value)))
    found = []
    for key in keys:
        try:
            store.wait([key], timedelta(seconds=timeout))
        except RuntimeError:  # its parent was killed
            continue
        found.append(json.loads(store.get(key)))
    return found


def meeting(timeout: float) -> dict[str, str]:
    """Return the environment in which the scripts of all ranks meet for one run: the first rank's keeps the store."""
    if num_ranks() < 2:
        return {}
    with socket.socket() as free:
        free.bind(("", 0))
        own = {"rank": rank(), "port": free.getsockname()[1]}
    ports = [one["port"] for one in exchanged(own, timeout) if one["rank"] == 0]
    return {"MASTER_PORT": str(ports[0]), "TORCHELASTIC_USE_AGENT_STORE": "False"} if ports else {}
