"""Uses of the public API for mypy: lines with `# refused` must be errors, all others must not.

This file is read by `test_typing.py` and never run.
"""

from typing import Any, assert_type

import torch

import stepgraph
from stepgraph.engine.parts.callables.graphed import GraphedCallable
from stepgraph.engine.step.step import CapturedStep


def train(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale


model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
session = stepgraph.Session()
x = torch.ones(2)

# capture: options

step = stepgraph.capture(train)
assert_type(step(x), torch.Tensor)
assert_type(step(x, scale=2.0), torch.Tensor)
stepgraph.capture(train, warmup=2, max_graphs=4, strict=True, on_error="eager", optimizer="inside", outputs="static")
stepgraph.capture(train, generators=[torch.Generator()], ignore=["scale"], safe_hooks=[train, "name"], audit=False)
stepgraph.capture(train, audit=1000, nan_check="device", session=session, backend="tape")
stepgraph.capture(train, buckets={"x": {0: [4, 8]}}, pad_values={"x": -1})
stepgraph.capture(train, on_error="modules")
stepgraph.capture(lambda: None)
stepgraph.capture(model.forward)
step("text")  # refused
step(x, scales=2.0)  # refused
stepgraph.capture(train, warmups=2)  # refused
stepgraph.capture(train, optimizer="in")  # refused
stepgraph.capture(train, outputs="guarded")  # refused
stepgraph.capture(train, on_error="ignore")  # refused
stepgraph.capture(train, audit="never")  # refused
stepgraph.capture(train, strict="yes")  # refused
stepgraph.capture(train, ignore=[3])  # refused
stepgraph.capture(train, session="abc")  # refused
stepgraph.capture(train, nan_check=True)  # refused
stepgraph.capture(5)  # refused
stepgraph.capture(optimizer)  # refused

# capture: decorators


@stepgraph.capture
def plain(x: torch.Tensor) -> int:
    return 1


@stepgraph.capture(warmup=1, optimizer="outside")
def with_options(x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
    return {"x": x * scale}


assert_type(plain(x), int)
assert_type(with_options(x, scale=1.0), dict[str, torch.Tensor])
assert_type(plain.report(), stepgraph.Report)
with plain as entered:
    assert_type(entered(x), int)
with_options(x)  # refused
plain()  # refused
stepgraph.capture(warmups=1)  # refused


class Trainer:
    @stepgraph.capture
    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @stepgraph.capture(warmup=1)
    def with_options(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, float]:
        return x, scale

    @classmethod
    @stepgraph.capture
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    @stepgraph.capture
    def static(x: torch.Tensor) -> torch.Tensor:
        return x

    def run(self) -> torch.Tensor:
        return self.plain(x)


trainer = Trainer()
assert_type(trainer.plain(x), torch.Tensor)
assert_type(trainer.with_options(x, scale=2.0), tuple[torch.Tensor, float])
assert_type(trainer.of_class(x), torch.Tensor)
assert_type(Trainer.static(x), torch.Tensor)
assert_type(Trainer.plain(trainer, x), torch.Tensor)
trainer.plain.report()
trainer.with_options.close()
trainer.plain()  # refused
trainer.plain("text")  # refused
trainer.with_options(x, 1.0, 2.0)  # refused
bound = stepgraph.capture(trainer.run)
assert_type(bound(), torch.Tensor)

# graph_modules

handle = stepgraph.graph_modules(model, ["attn"], warmup=2, max_graphs=4, max_runners=8, on_error="raise")
stepgraph.graph_modules(model, scope="attn mlp", outputs="copy", registry=stepgraph.ScopeRegistry(), session=session)
assert_type(handle.report(), stepgraph.ModuleReport)
stepgraph.graph_modules(None)  # refused
stepgraph.graph_modules(model, 0)  # refused
stepgraph.graph_modules(model, outputs="guarded")  # refused
stepgraph.graph_modules(model, max_signatures=2)  # refused
stepgraph.graph_modules(model, registry={})  # refused
stepgraph.graph_modules(model, optimizer="auto")  # refused
stepgraph.graph_modules(model, on_error="modules")  # refused

# make_graphed_callables

assert_type(stepgraph.make_graphed_callables(model, (x,), num_warmup_iters=3), torch.nn.Linear)
graphed = stepgraph.make_graphed_callables(train, (x,), audit=False)
assert_type(graphed(x, scale=1.0), torch.Tensor)
graphed.reset()
ordered = stepgraph.make_graphed_callables((model, model), ((x,), (x,)), order=[1, 2, -2, -1])
assert_type(ordered, tuple[GraphedCallable[..., Any], ...])
ordered[0](x).sum().backward()
stepgraph.make_graphed_callables((model, train), ((x,), (x,)), allow_unused_input=True)
stepgraph.make_graphed_callables((model, model), ((x,), (x,)), _order=[1, -1], _num_layers_per_chunk=2)
stepgraph.make_graphed_callables(model, (x,), num_warmup_iter=3)  # refused
stepgraph.make_graphed_callables(model, (x,), pool="pool")  # refused
graphed("text")  # refused

# pipelines

stages = stepgraph.graph_stage(object(), object(), warmup=1, on_error="raise", audit="auto")
stages.close()
stepgraph.graph_stage(object(), object(), on_error="ignore")  # refused
stepgraph.graph_stage(object(), object(), outputs="copy")  # refused
stepgraph.FullCudaGraphWrapper(train, 1, optimizers=[optimizer], optimizer="inside", nan_check="device")
stepgraph.FullCudaGraphWrapper(train, optimizer=optimizer)  # refused
stepgraph.FullCudaGraphWrapper(train, warmup=1)  # refused
stepgraph.FullCudaGraphWrapper(train, on_error="modules")  # refused


def takes_a_step(step: CapturedStep[[torch.Tensor], int]) -> int:
    return step(x)


takes_a_step(plain)
takes_a_step(step)  # refused

# the package

stepgraph.order.get_schedule_table(4, 2, 2)
stepgraph.captur(train)  # refused
