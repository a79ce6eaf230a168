"""Threads that call one step, or one graphed module, at once: `python tests/threads_at_once.py DEVICE ENGINE`.

Each thread goes on until some of its calls have been made. A call may be refused as one too many, and then it has done
nothing: so the model is where as many eager steps leave it. What goes wrong here may end the process, so that tests
look at how this one ends.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import stepgraph

THREADS, CALLS = 3, 12


def model_on(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)


def step_of(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graphed(engine: str, model: nn.Module, x: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """What the threads call: a whole step, or the forward of a module."""
    if engine == "capture":
        return stepgraph.capture(step_of(model))
    if engine == "graph_modules":
        stepgraph.graph_modules(model, ["forward"], warmup=2)
    else:
        stepgraph.make_graphed_callables(model, (x,))

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(x)
        return found

    return forward


def main() -> None:
    device, engine = torch.device(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
    torch.set_num_threads(1)
    model, twin, x = model_on(device), model_on(device), torch.ones(4, 8, device=device)
    call, start = graphed(engine, model, x), threading.Barrier(THREADS)
    made: list[Any] = []
    wrong: list[BaseException] = []

    def run() -> None:
        start.wait()
        left = CALLS
        while left and not wrong:
            try:
                made.append(call(x))
                left -= 1
            except stepgraph.CaptureError as error:
                if error.rule != "concurrent-call":
                    wrong.append(error)
            except BaseException as error:  # noqa: BLE001 (whatever it is, it is not to be)
                wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    assert len(made) == THREADS * CALLS
    if engine == "capture":
        eager = step_of(twin)
        for _ in made:
            eager(x)
    else:
        with torch.no_grad():
            assert all(torch.equal(one, twin(x)) for one in made)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    print("whole")


if __name__ == "__main__":
    main()
