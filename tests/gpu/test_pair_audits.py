"""Audits of graphed modules and callables on the GPU: no false alarm, and no memory but that of one recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.module_harness import Layer, Net, assert_graphed_equals_eager, quiet, training_of

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    """Attention with dropout, whose kernels draw their numbers in another way under capture."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self._dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).view(1, 4, 3, 1, 8).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self._dropout, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(4, 8))


def compiled() -> nn.Module:
    model = Net(Layer(dropout=0.0), Layer(dropout=0.0))
    for layer in model.layers:
        layer.compile()
    return model


def autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return model(x).float()


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "attention": (lambda: Net(Attention(), Attention()), {}),
    "attention under autocast": (lambda: Net(Attention(), Attention()), {"call": autocast}),
    "dropout": (lambda: Net(Layer(dropout=0.5), Layer(dropout=0.5)), {"microbatches": 2}),
    "inductor": (compiled, {}),
}


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_modules_audited_at_each_round_equal_eager(name: str, single: bool) -> None:
    make, options = MODELS[name]
    with quiet() as warned:
        report = assert_graphed_equals_eager(
            lambda device: training_of(make, device, **options),
            torch.device("cuda"),
            audit=1,
            single_mempool=single,
        )
    assert not [str(w.message) for w in warned if issubclass(w.category, stepgraph.StepgraphWarning)]
    assert report.recaptures == 0
    assert report.audits >= 4
    assert f"{len(report.rows)} of {len(report.rows)} kinds of calls" in report.equality


def test_audits_take_the_memory_of_one_recording() -> None:
    model = Net(*(Layer(512) for _ in range(4)), width=512).cuda()
    x = torch.randn(4096, 512, device="cuda")
    with stepgraph.graph_modules(model, "layers.*", warmup=1, audit=2) as handle:
        used = []
        for _ in range(14):
            model.zero_grad()
            model(x).square().mean().backward()
            used.append((handle.report().audits, handle.report().pool_bytes))
    without = used[2][1]
    after_one = next(size for audits, size in used if audits == 1)
    assert used[-1][0] >= 5
    assert used[-1][1] == after_one, "each audit takes what the one before has left"
    assert after_one - without <= without / 2, "one of four layers at a time"
