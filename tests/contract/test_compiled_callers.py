"""Graphs called from compiled code: the compiler breaks off before them and goes on after, and traces none of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.parts.callables.make_graphed import report
from tests.harness import same_bits

Call = Callable[[torch.Tensor], torch.Tensor]
CALLS = 6


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Trainer:
    """A model with dropout and what trains it."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4))
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @stepgraph.capture(warmup=1)
    def captured(self, x: torch.Tensor) -> torch.Tensor:
        return self.train(x)

    def around(self, call: Call) -> Call:
        """The model's work by graphs, and the step around it eager."""

        def step(x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = call(x).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        return step


def of_function(trainer: Trainer, x: torch.Tensor) -> tuple[Call, Callable[[], int]]:
    step = stepgraph.capture(trainer.train, warmup=1)
    return step, lambda: step.report().replays


def of_method(trainer: Trainer, x: torch.Tensor) -> tuple[Call, Callable[[], int]]:
    return lambda value: trainer.captured(value), lambda: trainer.captured.report().replays  # type: ignore[attr-defined]


def of_iteration(trainer: Trainer, x: torch.Tensor) -> tuple[Call, Callable[[], int]]:
    def forward_backward(*, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int) -> Any:
        return forward_step_func(next(data_iterator))

    wrapped = stepgraph.FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=1)

    def call(value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = wrapped(
            forward_step_func=trainer.train, data_iterator=iter([value]), model=trainer.model, num_microbatches=1
        )
        return result

    return call, lambda: wrapped.report().replays


def of_modules(trainer: Trainer, x: torch.Tensor) -> tuple[Call, Callable[[], int]]:
    handle = stepgraph.graph_modules(trainer.model, scope=["0", "1"], warmup=1)
    return trainer.model, lambda: handle.report().rows[0].forwards


def of_callables(trainer: Trainer, x: torch.Tensor) -> tuple[Call, Callable[[], int]]:
    torch.manual_seed(0)
    graphed = stepgraph.make_graphed_callables(trainer.model, (x.clone(),))
    return graphed, lambda: report(graphed).forwards


ENTRIES: dict[str, Any] = {
    "function": of_function,
    "method": of_method,
    "iteration": of_iteration,
    "modules": of_modules,
    "callables": of_callables,
}


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_compiled_caller_replays_and_equals_eager(entry: str, backend: str, device: torch.device) -> None:
    x = torch.ones(3, 4, device=device)
    losses, states, replays = [], [], 0
    for graphed in (False, True):
        trainer = Trainer(device)
        inside = entry in ("modules", "callables")
        call: Call = trainer.model if inside else trainer.train
        if graphed:
            call, count = ENTRIES[entry](trainer, x)
            call = torch.compile(lambda value, call=call: call(value * 2) + 1, backend=backend)
        else:
            call = lambda value, call=call: call(value * 2) + 1  # noqa: E731
        step = trainer.around(call) if inside else call
        torch.manual_seed(1)
        losses.append([step(x * index) for index in range(CALLS)])
        states.append(list(trainer.model.state_dict().values()))
        replays = count() if graphed else 0
    assert all(map(same_bits, *losses))
    assert all(map(same_bits, *states))
    assert replays == CALLS - {"callables": 0, "modules": 1}.get(entry, 2)  # a whole step is compared with an eager one


def test_compiled_caller_traces_nothing_of_the_step(device: torch.device) -> None:
    """The first call, which is warm-up, and the second, which is captured, come from compiled code as well."""
    graphs: list[list[str]] = []

    def noting(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes if node.op.startswith("call")])
        return module.forward

    trainer = Trainer(device)
    step = stepgraph.capture(trainer.train, warmup=1)
    caller = torch.compile(lambda value: step(value * 2) + 1, backend=noting)
    for _ in range(4):
        caller(torch.ones(3, 4, device=device))
    assert [len(graph) for graph in graphs] == [1, 1], graphs
    with pytest.raises(Exception, match="stepgraph replays graphs here"):
        torch.compile(lambda value: step(value), backend="eager", fullgraph=True)(torch.ones(3, 4, device=device))


def test_compiled_code_inside_a_step_called_from_compiled_code(device: torch.device) -> None:
    """What the step itself compiles is compiled as ever."""
    compiled = 0

    def counting(module: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return module.forward

    inner = torch.compile(lambda value: value.sin() + 1, backend=counting)
    inner(torch.ones(3, 4, device=device))
    assert compiled == 1
    with stepgraph.capture(lambda value: inner(value) * 2, warmup=1) as step:
        caller = torch.compile(lambda value: step(value * 2) + 1, backend="eager")
        for index in range(4):
            x = torch.full((3, 4), float(index), device=device)
            assert same_bits(caller(x), ((x * 2).sin() + 1) * 2 + 1)
        assert step.report().replays == 3
