"""Reports of graphed modules and callables say what the watch has not looked at."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.guards.host_values import walk


class Sum(nn.Module):
    """A module that reads many objects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.many = [types.SimpleNamespace(w=1.0) for _ in range(50)]

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * sum(one.w for one in self.many)


@pytest.mark.parametrize("limit", [20_000, 20])
def test_report_of_modules_names_what_is_not_watched(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(walk, "MAX_OBJECTS", limit)
    model, x = nn.ModuleDict({"part": Sum()}), torch.ones(2, 2)
    with stepgraph.graph_modules(model, "part", warmup=2) as handle:
        for _ in range(4):
            model["part"](x).sum().backward()
        assert ("are not watched" in str(handle.report().equality)) is (limit == 20)
    graphed = stepgraph.make_graphed_callables(Sum(), (x,))
    assert ("are not watched" in str(graphed.forward.report().equality)) is (limit == 20)
    graphed.reset()
