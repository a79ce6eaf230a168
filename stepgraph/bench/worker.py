"""One mechanism of a comparison, measured in a process of its own: `python -m stepgraph.bench.worker`.

The request is one JSON object on stdin, the record one JSON object in the file that the request names, so that nothing
that torch or a compiler prints can damage it. Each mechanism has its own process: none inherits another's allocator,
compiled code or CUDA context.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from stepgraph.bench.hardware import gpu_of
from stepgraph.bench.mechanisms import mechanisms_for, named
from stepgraph.bench.run import benchmark
from stepgraph.config.container import ConfigContainer
from stepgraph.config.environment import Environment

MAX_KERNELS = 4000
"""Kernels of the timeline that a record keeps, for the picture of a report."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Return the record of one mechanism: its figures, or the error that it ended with."""
    begun = time.perf_counter()
    record: dict[str, Any] = {"mechanism": request["mechanism"], "pass": request["pass"]}
    try:
        record |= _figures(request)
    except Exception as error:  # noqa: BLE001 (whatever fails is this mechanism's result)
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        record["error"] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
    return record | {"worker_s": time.perf_counter() - begun}


def _figures(request: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(request["device"])
    cfg = ConfigContainer.from_dict(request["config"])
    mechanism = named(request["mechanism"], mechanisms_for(cfg, Environment.read(device.type)))
    gpu = gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    found = benchmark(
        mechanism.configured(cfg),
        device=device,
        steps=request["steps"],
        gpu=gpu,
        implementation=mechanism.make,
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


def main() -> int:
    """Measure what stdin asks for, and write the record."""
    request = json.load(sys.stdin)
    record = measure(request)
    Path(request["file"]).write_text(json.dumps(record), encoding="utf-8")
    return 1 if "error" in record else 0


if __name__ == "__main__":
    sys.exit(main())
