"""One rank of a real gloo group: a model that FSDP shards, in each engine, compared with plain FSDP bit for bit."""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import stepgraph
from tests.distributed.ranks import end_together

CALLS = 8


class Training:
    """Some steps of a sharded model, on other data on each rank."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        fully_shard(self.model[0], **options)
        fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(100 + dist.get_rank())
        self.batches = [torch.randn(4, 8, generator=draw) for _ in range(CALLS)]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, step: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        losses = [step(x) for x in self.batches]
        shards: Any = self.model.parameters()
        return losses + [shard.to_local().detach() for shard in shards]


def expected(**options: Any) -> list[torch.Tensor]:
    plain = Training(**options)
    return plain.run(plain.step)


def refused(call: Callable[[], Any]) -> None:
    """The call is refused by the rule of FSDP, and the error names it."""
    rule = "none"
    try:
        call()
    except stepgraph.CaptureError as error:
        rule = error.rule if "FSDP" in error.what else error.what
    assert rule == "fsdp", rule


def raising() -> None:
    """Refused at the first call, before anything ran; afterwards the training goes on without graphs."""
    training = Training()
    with stepgraph.capture(training.step) as step:
        for _ in range(2):
            refused(lambda: step(training.batches[0]))
        assert step.report().refused == {"fsdp": 2}
    assert all(map(torch.equal, training.run(training.step), expected()))


def eager(on_error: Any) -> None:
    """Trained on in eager, with one warning, and counted."""
    for options in ({}, {"reshard_after_forward": False}):
        training = Training(**options)
        with stepgraph.capture(training.step, on_error=on_error) as step, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", stepgraph.StepgraphWarning)
            assert all(map(torch.equal, training.run(step), expected(**options)))
            assert step.report().eager_reasons == {"capture failed: [fsdp]": CALLS}
        found = [str(each.message) for each in told if each.category is stepgraph.StepgraphWarning]
        assert len(found) == 1, found
        assert found[0].endswith("The step goes on in eager.")


def unreached() -> None:
    """A model that no name leads to is known by its first call."""
    training = Training()
    hidden = ctypes.py_object(training)

    def train(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = hidden.value.step(x)
        return found

    with stepgraph.capture(train) as step:
        step(training.batches[0])
        refused(lambda: step(training.batches[1]))


def modules() -> None:
    """Graphed modules of a sharded model run eagerly, whether they are sharded themselves or lie in what is."""
    training = Training()
    with stepgraph.graph_modules(training.model, ["0", "2"], warmup=2) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        assert all(map(torch.equal, training.run(training.step), expected()))
        rows = handle.report().rows
    assert [dict(row.eager_reasons) for row in rows] == [{"capture failed: [fsdp]": CALLS}] * 2
    training = Training()
    with stepgraph.graph_modules(training.model, ["0"], on_error="raise"):
        refused(lambda: training.step(training.batches[0]))


def callables() -> None:
    training = Training()
    refused(lambda: stepgraph.make_graphed_callables(training.model, (training.batches[0],)))
    refused(lambda: stepgraph.make_graphed_callables(training.model[2], (training.batches[0],)))
    assert all(map(torch.equal, training.run(training.step), expected()))


def first_version() -> None:
    """FullyShardedDataParallel is refused too, at the first call."""
    model = FullyShardedDataParallel(nn.Linear(8, 2), device_id=torch.device("cpu"))

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    with stepgraph.capture(step) as captured:
        refused(lambda: captured(torch.ones(4, 8)))


SCENARIOS: dict[str, Callable[[], Any]] = {
    "raise": raising,
    "eager": lambda: eager("eager"),
    "modules": lambda: eager("modules"),
    "unreached": unreached,
    "first_version": first_version,
    "graph_modules": modules,
    "callables": callables,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    store = f"file://{sys.argv[3]}"
    dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
    for name in sys.argv[4:]:
        SCENARIOS[name]()
        print(name, flush=True)
    gc.collect()  # gloo's threads let go of tensors late, and abort the process if the interpreter is gone by then
    end_together()
    print("done")
