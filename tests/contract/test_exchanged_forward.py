"""A forward that is exchanged after the capture: the new one runs, or the call is refused; never the old one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.module_harness import quiet

WAYS = ["graph_modules", "manager", "callables"]


def a_block(*, inside: bool) -> tuple[type, Any, Any]:
    """A class, a module to be graphed, and the module of that class in it, or itself."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)

    outer: Any = Outer() if inside else Block()
    return Block, outer, outer.block if inside else outer


def other(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x) * 100


def graph(way: str, part: nn.Module, x: torch.Tensor) -> Any:
    if way == "graph_modules":
        return stepgraph.graph_modules(nn.ModuleDict({"part": part}), "part", warmup=2)
    if way == "manager":
        return stepgraph.CudaGraphManager(None, part, "forward")
    return stepgraph.make_graphed_callables(part, (x,))


@pytest.mark.pairwise
@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside"])
@pytest.mark.parametrize("way", WAYS)
def test_exchanged_forward_is_never_the_old(way: str, inside: bool, where: str, device: torch.device) -> None:
    """Trap: the module warned, was captured again, and went on with the old function."""
    kind, part, block = a_block(inside=inside)
    part.to(device)
    x = torch.ones(2, 4, device=device)
    graph(way, part, x)
    for _ in range(5):
        part(x).sum().backward()
    if where == "class":
        kind.forward = other  # type: ignore[attr-defined]
    else:
        block.forward = other.__get__(block)
    follows = way != "callables" or (where == "instance" and not inside)
    with quiet():
        for _ in range(6):
            if follows:
                assert torch.equal(part(x), block.inner(x) * 100)
            else:
                with pytest.raises(stepgraph.StateChanged):
                    part(x)
        part.eval()
        assert torch.equal(part(x), block.inner(x) * 100), "in a mode without graphs"


def test_exchanged_forward_is_captured_again(device: torch.device) -> None:
    kind, part, _ = a_block(inside=False)
    part.to(device)
    x = torch.ones(2, 4, device=device)
    with quiet() as seen, graph("graph_modules", part, x) as handle:
        for index in range(10):
            if index == 5:
                kind.forward = other  # type: ignore[attr-defined]
            part(x).sum().backward()
        (row,) = handle.report().rows
    assert row.forwards == 3 + 4, "one eager round after the change"
    assert len(row.recapture_reasons) == 1
    assert "Block.forward" in str(seen[0].message)
    assert torch.equal(part(x), part.inner(x) * 100)


def test_exchanged_forward_of_the_module_stays_after_close(device: torch.device) -> None:
    _, part, _ = a_block(inside=False)
    part.to(device)
    x = torch.ones(2, 4, device=device)
    with graph("graph_modules", part, x):
        part(x)
        part.forward = other.__get__(part)
    assert torch.equal(part(x), part.inner(x) * 100)
