"""Transformer Engine's own layers in bf16, as one step and by layer: equal to eager bit for bit.

Its layers keep host state that each call rewrites (the arguments of `autocast`, recipes in `fp8_meta`), run parts under
torch.compile, and choose attention's kernel by looking at what they are given.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stepgraph
from tests.contract.module_programs import Training, assert_orders_equal_eager, order
from tests.harness import Program, assert_captured_equals_eager

te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, MICROBATCHES, STEPS = 8, 256, 4, 64, 2, 2, 12
WARM_UP = 3
DROPOUT = pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])


class Layers(nn.Module):
    """Transformer Engine's layers, one after the other."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN,
                4 * HIDDEN,
                HEADS,
                hidden_dropout=dropout,
                attention_dropout=dropout,
                params_dtype=torch.bfloat16,
                self_attn_mask_type="causal",
                layer_number=number + 1,
                fuse_qkv_params=True,
            )
            for number in range(LAYERS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def loss_of(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The loss of a microbatch, the model called as one that may also run in FP8 is."""
    with te.autocast(enabled=False):
        out = model(hidden)
    return out.float().pow(2).mean() / MICROBATCHES


def microbatch(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=draw).to(torch.bfloat16)


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)


def program_of(dropout: float) -> Program:
    model = Layers(dropout).to(DEVICE)
    optimizer = fused_adam(model)

    def step(microbatches: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)
        for hidden in microbatches.unbind():
            loss = loss_of(model, hidden)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    draw = torch.Generator().manual_seed(1)
    batches = [(torch.stack([microbatch(draw) for _ in range(MICROBATCHES)]).to(DEVICE),) for _ in range(STEPS)]
    return Program(step, batches, [model], [optimizer])


def training_of(dropout: float) -> Training:
    model = Layers(dropout).to(DEVICE)
    return Training(
        model,
        fused_adam(model),
        lambda draw, size: microbatch(draw),
        lambda step: [lambda hidden: loss_of(model, hidden)],
    )


@DROPOUT
def test_te_step_equals_eager(dropout: float) -> None:
    report = assert_captured_equals_eager(lambda device: program_of(dropout), DEVICE)
    assert report.eager_reasons == {"warm-up": WARM_UP}, str(report)
    assert report.replays == STEPS - WARM_UP, str(report)


@DROPOUT
def test_te_layers_equal_eager(dropout: float) -> None:
    report = assert_orders_equal_eager(
        lambda device: training_of(dropout),
        [order("F0 B0 F1 B1")] * STEPS,
        DEVICE,
        lambda training: stepgraph.graph_modules(training.model, ["layers.*"]),
    )
    assert len(report.rows) == LAYERS
    for row in report.rows:
        assert set(row.eager_reasons) == {"warm-up"}, row
        assert row.forwards > row.eager_calls, row
        assert row.backwards == row.forwards, row
