"""One replay through each engine, timed in turns: the other end of `host_cost.py --against`.

It runs with the stepgraph of any checkout, also of one without `stepgraph.lab.bench`. So it uses public names only, and
a clock of its own. Each line on stdin is a number of calls, the answer a line of JSON with the median of each engine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import stepgraph


def median_us(call: Callable[[], Any], calls: int) -> float:
    """Median host time of a call in microseconds, the queue drained before each."""
    times = []
    for _ in range(calls + 20):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[20:]) * 1e6


def small_layers(count: int, device: str) -> torch.nn.Sequential:
    """A chain of linear layers, two parameters each."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(count))).to(device)


def replay_ways(device: str) -> dict[str, Callable[[], Any]]:
    """One replay through each engine, by public names only, warmed up."""
    x = torch.randn(4, 16, device=device)
    model = small_layers(75, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    @stepgraph.capture
    def whole_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    part = small_layers(4, device)
    handle = stepgraph.graph_modules(torch.nn.Sequential(part), scope=["0"])
    callable_ = stepgraph.make_graphed_callables(small_layers(4, device), (x.clone().requires_grad_(),))
    argument = x.clone().requires_grad_()
    ways: dict[str, Callable[[], Any]] = {
        "whole step": lambda: whole_step(x),
        "module pair": lambda: part(argument).sum().backward(),
        "callable pair": lambda: callable_(argument).sum().backward(),
    }
    for call in ways.values():
        for _ in range(8):
            call()
    counts = (whole_step.report().replays, handle.report().replays)
    assert all(counts), "nothing was replayed"
    ways["handle"] = handle.report  # keeps it alive
    return ways


def take_turns() -> None:
    """Take one turn for each line that comes in; its times are a line that goes out."""
    ways = replay_ways("cuda" if torch.cuda.is_available() else "cpu")
    ways.pop("handle")
    print(stepgraph.__file__, flush=True)
    for line in sys.stdin:
        calls = int(line)
        print(json.dumps({name: median_us(call, calls) for name, call in ways.items()}), flush=True)


if __name__ == "__main__":
    take_turns()
