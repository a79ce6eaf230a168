"""One mechanism of a comparison, measured in a process of its own, which `server` starts.

No mechanism inherits another's allocator, compiled code or CUDA context. The processes are forked from a server that
has imported torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from stepgraph.config.container import ConfigContainer
from stepgraph.config.environment import Environment
from stepgraph.lab.bench.hardware import gpu_of
from stepgraph.lab.bench.mechanisms import all_mechanisms, named
from stepgraph.lab.bench.run import benchmark
from stepgraph.lab.bench.server import attempted

MAX_KERNELS = 20_000
"""Kernels of the timeline that a record keeps, for the picture of a report, which says where there were more."""


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Return the record of one mechanism: its figures, or the error that it ended with."""
    return attempted({"mechanism": request["mechanism"], "pass": request["pass"]}, lambda: _figures(request))


def _figures(request: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(request["device"])
    cfg = ConfigContainer.from_dict(request["config"])
    mechanism = named(request["mechanism"], all_mechanisms(cfg, Environment.read(device.type)))
    gpu = gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    found = benchmark(
        mechanism.configured(cfg),
        device=device,
        steps=request["steps"],
        gpu=gpu,
        implementation=mechanism.make,
        model_provider=mechanism.model_provider,
    )
    kernels = found.timeline.kernels
    first = kernels[0].start_us if kernels else 0.0
    return found.to_dict() | {
        "timeline_us": [[round(k.start_us - first, 2), round(k.duration_us, 2)] for k in kernels[:MAX_KERNELS]],
        "compiler": compiler_counts() if "compile" in mechanism.name or "reduce" in mechanism.name else None,
    }


def compiler_counts() -> dict[str, int]:
    """Return what torch's compiler counted: its graphs, breaks between them, and CUDA graphs that it skipped."""
    counters = sys.modules["torch._dynamo.utils"].counters if "torch._dynamo.utils" in sys.modules else {}
    return {
        "graphs": int(counters.get("stats", {}).get("unique_graphs", 0)),
        "breaks": sum(counters.get("graph_break", {}).values()),
        "cuda_graphs_skipped": int(counters.get("inductor", {}).get("cudagraph_skips", 0)),
    }


_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.cudagraph_trees")


def prepare() -> None:
    """Import all that a job may need, in the server: neither CUDA nor a process of the compiler's pool is started."""
    with _environment(TORCH_WARM_POOL="0", PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        for name in (*_COMPILER, "stepgraph.lab.bench.flops", "stepgraph.lab.train"):
            importlib.import_module(name)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables of the environment during a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
