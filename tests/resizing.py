"""A module that resizes storages while it is called, in each engine: `python tests/resizing.py DEVICE ENGINE`.

For each way to resize it prints the name, and the rule that refused it or `equal`: trained as without graphs, in eager.
What resizes memory may end the process, so that tests look at how this one ends.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import stepgraph

CALLS = 7


def unsharded(m: Resizing, x: torch.Tensor) -> torch.Tensor:
    """As FSDP does: memory comes before the use, and goes after it."""
    m.kept.untyped_storage().resize_(16)
    m.kept.fill_(2.0)
    y = m.layer(x * m.kept)
    m.kept.untyped_storage().resize_(0)
    return y


def typed(m: Resizing, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of typed storages
        m.kept.storage().resize_(4)
        m.kept.fill_(2.0)
        y = m.layer(x * m.kept)
        m.kept.storage().resize_(0)
    return y


def number(m: Resizing, x: torch.Tensor) -> torch.Tensor:
    m.scale.untyped_storage().resize_(4)
    m.scale.fill_(2.0)
    y = m.layer(x * m.scale)
    m.scale.untyped_storage().resize_(0)
    return y


def made_inside(m: Resizing, x: torch.Tensor) -> torch.Tensor:
    y = m.layer(x * 2)
    other = y.detach() + 1
    other.untyped_storage().resize_(0)
    return y


def argument(m: Resizing, x: torch.Tensor) -> torch.Tensor:
    y = m.layer(x * 2)
    x.untyped_storage().resize_(0)
    return y


def same_size(m: Resizing, x: torch.Tensor) -> torch.Tensor:
    m.kept.untyped_storage().resize_(16)
    m.kept.fill_(2.0)
    return m.layer(x * m.kept)


def in_backward(m: Resizing, x: torch.Tensor) -> torch.Tensor:
    class Freeing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            m.kept.untyped_storage().resize_(16)
            m.kept.fill_(2.0)
            return grad * m.kept

    return Freeing.apply(m.layer(x))


KINDS: Mapping[str, Callable[[Resizing, torch.Tensor], torch.Tensor]] = MappingProxyType(
    {each.__name__: each for each in (unsharded, typed, number, made_inside, argument, same_size, in_backward)}
)


class Resizing(nn.Module):
    """A layer, a buffer and a number; `how` resizes a storage in its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("scale", torch.ones(()))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KINDS[self.how](self, x)


class Training:
    """Some steps of training, and what they leave."""

    def __init__(self, device: torch.device, how: str) -> None:
        torch.manual_seed(0)
        self.model = Resizing(how).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = [torch.full((3, 4), float(i + 1), device=device).sin() for i in range(CALLS)]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, step: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [*map(step, self.batches), *self.model.layer.parameters()]


def outcome(engine: str, device: torch.device, how: str) -> str:
    """The rule that refuses it, or whether it trains as without graphs."""
    training, eager = Training(device, how), Training(device, how)
    step: Any = training.step
    if engine in ("raise", "eager", "modules"):
        on_error: Any = engine
        step = stepgraph.capture(training.step, on_error=on_error)
    elif engine.startswith("callables"):
        sample = torch.ones(3, 4, device=device)
        try:
            stepgraph.make_graphed_callables(training.model, (sample,), num_warmup_iters=int(engine[-1]))
        except stepgraph.StepgraphError as error:
            training.run(training.step)  # the program goes on
            return error.rule
    else:
        stepgraph.graph_modules(training.model, ["forward"], warmup=2)
    try:
        found = training.run(step)
    except stepgraph.StepgraphError as error:
        where = getattr(error, "where", None)
        return error.rule if where is not None and where.file == __file__ else f"{error.rule}, without its line"
    return "equal" if all(map(torch.equal, found, eager.run(eager.step))) else "DIFFERENT"


def judged(tool: str, device: torch.device) -> str:
    """What a function that judges a step says of one that resizes a storage."""
    training = Training(device, "unsharded")
    try:
        if tool == "verify":
            return str(stepgraph.verify(training.step, [(x,) for x in training.batches]))
        return str(stepgraph.frozen(stepgraph.capture(training.step), training.batches[0]))
    except stepgraph.StepgraphError as error:
        return error.rule


def main() -> None:
    warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
    torch.set_num_threads(1)
    if sys.argv[2] in ("verify", "frozen"):
        print("unsharded", judged(sys.argv[2], torch.device(sys.argv[1])))
        return
    for how in KINDS:
        print(how, outcome(sys.argv[2], torch.device(sys.argv[1]), how), flush=True)


if __name__ == "__main__":
    main()
