"""Programs that compare everything global in their process before and after: `python -m tests.leaves_alone KIND`.

`names` asks for every public name and then imports every module, `uses` makes the calls below, and `command ARGS` runs
one command of the command line. Each prints the changes that it found, by what made them, as JSON on its last line.
What other libraries do when they are imported is not the question, so those are imported first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.process_state import changed, state

_LIBRARIES = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.testing", "typer"),
    *("matplotlib.pyplot", "torch._inductor", "safetensors.torch"),
)


class Watch:
    """What was changed, by what changed it."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self._before = state()

    def look(self, name: str) -> None:
        now = state()
        if changed(self._before, now):
            gc.collect()  # what nobody has closed ends here
            now = state()
        different = changed(self._before, now)
        if different:
            self.found[name] = different
        self._before = now


def names() -> dict[str, list[str]]:
    """Every name that the package lists, in the order of the list, then every module below it."""
    watch = Watch()
    stepgraph = importlib.import_module("stepgraph")
    watch.look("stepgraph")
    for name in stepgraph.__all__:
        getattr(stepgraph, name)
        watch.look(name)
    for module in pkgutil.walk_packages(stepgraph.__path__, "stepgraph."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            for name in getattr(sys.modules[module.name], "__all__", ()):
                getattr(sys.modules[module.name], name)
            watch.look(module.name)
    return watch.found


def uses() -> dict[str, list[str]]:
    """Each function that users call, on a step that draws no random numbers."""
    watch = Watch()
    for name, use in calls().items():
        watch = Watch()  # what the use before has left, garbage included, is not this one's
        use()
        watch.look(name)
        if watch.found:
            return watch.found
    return watch.found


def calls() -> Mapping[str, Callable[[], Any]]:
    """The calls, by the public name."""
    import stepgraph

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(6.0).reshape(2, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def captured() -> None:
        with stepgraph.capture(step) as graphed:
            for _ in range(6):
                graphed(x)
            assert graphed.replays
            str(graphed.report())

    def modules() -> None:
        with stepgraph.graph_modules(model, "0") as graphed:
            for _ in range(6):
                step(x)
            str(graphed.report())

    def callables() -> None:
        stepgraph.make_graphed_callables(lambda x: x * 2, (x.clone(),))(x)

    def verified() -> None:
        assert stepgraph.verify(step, [x, 2 * x], steps=4)

    def refused() -> None:
        with stepgraph.capture(lambda x: x * float(x.sum()), on_error="raise") as graphed:
            for _ in range(4):
                with contextlib.suppress(stepgraph.StepgraphError):
                    graphed(x)

    def loader() -> None:
        batches = stepgraph.StaticBufferLoader(stepgraph.backend_for(x.device))
        batches.load(iter([{"x": x}]), 1)

    def tracker() -> None:
        stepgraph.get_cuda_rng_tracker(x.device).get_states()

    return {
        "capture": captured,
        "capture, refused": refused,
        "graph_modules": modules,
        "make_graphed_callables": callables,
        "verify": verified,
        "frozen": lambda: stepgraph.frozen(step, x),
        "explain": lambda: str(stepgraph.explain("the process hangs at exit")),
        "doctor": lambda: str(stepgraph.doctor()),
        "StaticBufferLoader": loader,
        "get_cuda_rng_tracker": tracker,
        "tree_map": lambda: stepgraph.tree_map(torch.clone, [x]),
    }


def command(*words: str) -> dict[str, list[str]]:
    """A command, in this process."""
    from stepgraph.commands.cli import main

    sys.argv = ["stepgraph", *words]
    watch = Watch()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    assert code in (0, 1), printed.getvalue()
    watch.look(" ".join(words))
    return watch.found


def run(kind: str, *words: str) -> None:
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    found = {"names": names, "uses": uses, "command": command}[kind](*words)
    print(json.dumps(found))


if __name__ == "__main__":
    run(*sys.argv[1:])
