"""Parts of the reference models in graphs: experts that read on the host stay eager, the rest is replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph import ModuleReport
from stepgraph.lab.models import GPT, GPTConfig, Mamba, MambaConfig, MoEConfig, MoEGPT
from tests.contract.module_programs import Training, assert_orders_equal_eager, order

SEQUENCE = 12
PARTIAL = ["attn", "moe_router", "moe_preprocess"]
ROUTED = dataclasses.replace(
    MoEConfig.tiny(),
    num_experts=4,
    shared_ffn_size=32,
    shared_gate=True,
    bias_rate=1e-3,
    scores="sigmoid",
    dropout=0.1,
)


def tokens(draw: torch.Generator, size: int) -> torch.Tensor:
    return torch.randint(256, (size, SEQUENCE + 1), generator=draw)


def training_of(make_model: Callable[[], nn.Module]) -> Callable[[torch.device], Training]:
    """Train a language model; with experts, the auxiliary loss is added and the bias moved after each step."""

    def build(device: torch.device) -> Training:
        model = make_model().to(device)
        loads: list[torch.Tensor] = []

        def loss(x: torch.Tensor) -> torch.Tensor:
            out = model(x[:, :-1], x[:, 1:])
            if isinstance(out, torch.Tensor):
                return out
            loads.append(out.load)
            return out.out + 0.01 * out.aux_loss

        def after_step() -> None:
            if loads and model.config.bias_rate:
                model.update_bias(torch.stack(loads).sum(0))
            loads.clear()

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return Training(model, optimizer, tokens, lambda step: [loss], after_step=after_step)

    return build


def assert_equal(
    make_model: Callable[[], nn.Module],
    scope: list[str],
    device: torch.device,
    text: str = "F0 F1 B0 B1 E0",
    **options: Any,
) -> ModuleReport:
    report = assert_orders_equal_eager(
        training_of(make_model),
        [order(text)] * 7,
        device,
        lambda training: stepgraph.graph_modules(training.model, scope, audit=9, **options),
    )
    for row in report.rows:
        # what `preprocess` gives is needed until the experts' backward, though none of its own holds its runner
        held = 1 if row.path.endswith("preprocess") else 0
        assert sum(count for reason, count in row.eager_reasons.items() if reason != "warm-up") <= held, row
        assert row.forwards > row.eager_calls
    return report


@pytest.mark.parametrize("scope", [[], ["attn"], ["attn", "mlp"]], ids=str)
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_gpt_in_parts_equals_eager(device: torch.device, scope: list[str], dropout: float) -> None:
    config = dataclasses.replace(GPTConfig.tiny(), dropout=dropout)
    report = assert_equal(lambda: GPT(config), scope, device)
    assert len(report.rows) == 2 * max(1, len(scope))


@pytest.mark.parametrize("scope", [pytest.param([], marks=pytest.mark.slow), ["mamba"]], ids=str)
def test_mamba_in_parts_equals_eager(device: torch.device, scope: list[str]) -> None:
    assert_equal(lambda: Mamba(MambaConfig.tiny()), scope, device)


@pytest.mark.parametrize(
    "scope", [[], *(pytest.param(scope, marks=pytest.mark.slow) for scope in (["attn", "moe"], PARTIAL))], ids=str
)
@pytest.mark.parametrize("experts", ["grouped", "capacity"])
def test_experts_without_host_reads_equal_eager(device: torch.device, experts: Any, scope: list[str]) -> None:
    assert_equal(lambda: MoEGPT(dataclasses.replace(ROUTED, experts=experts)), scope, device)


@pytest.mark.parametrize(
    "scope",
    [*(pytest.param(scope, marks=pytest.mark.slow) for scope in (["attn"], ["attn", "moe_router"])), PARTIAL],
    ids=str,
)
def test_partial_moe_with_experts_reading_the_host_equals_eager(device: torch.device, scope: list[str]) -> None:
    report = assert_equal(lambda: MoEGPT(dataclasses.replace(ROUTED, experts="loop")), scope, device)
    assert not any("experts" in row.path for row in report.rows)


@pytest.mark.slow
def test_partial_moe_in_a_fixed_order_equals_eager(device: torch.device) -> None:
    config = dataclasses.replace(ROUTED, experts="loop")
    report = assert_equal(lambda: MoEGPT(config), PARTIAL, device, "F0 F1 B0 B1", single_mempool=True)
    assert report.fixed_order > 0


def test_partial_moe_runs_its_experts_eagerly_at_every_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(lambda: MoEGPT(dataclasses.replace(ROUTED, experts="loop")))(device)
    moe, calls = training.model.blocks[0].moe, []
    original = moe.experts.loop
    monkeypatch.setattr(moe.experts, "loop", lambda *args: calls.append(1) or original(*args))
    (loss,) = training.stages(0)
    with stepgraph.graph_modules(training.model, PARTIAL) as handle:
        for _ in range(10):
            loss(torch.randint(256, (4, SEQUENCE + 1), device=device)).backward()
        replayed = {row.path: row.forwards for row in handle.report().rows}
    assert len(calls) == 10
    assert replayed["blocks.0.moe.route"] == replayed["blocks.0.moe.combine"] == 7


def test_router_graph_touches_only_the_gradients_of_the_router(device: torch.device) -> None:
    """The method belongs to the whole layer, experts included; those get no gradient, and keep the one they have."""
    training = training_of(lambda: MoEGPT(dataclasses.replace(ROUTED, experts="loop")))(device)
    moe = training.model.blocks[0].moe
    (loss,) = training.stages(0)
    with stepgraph.graph_modules(training.model, PARTIAL) as handle:
        for _ in range(6):
            training.optimizer.zero_grad()
            loss(torch.randint(256, (4, SEQUENCE + 1), device=device)).backward()
        before = handle.report().replays
        x = torch.randn(4, SEQUENCE, 64, device=device, requires_grad=True)
        kept = {name: p.grad for name, p in moe.experts.named_parameters()}
        values = {name: grad.clone() for name, grad in kept.items()}
        training.model.blocks[1].zero_grad()
        for _ in range(5):
            routing = moe.route(x)
            (routing.weights.sum() + routing.hidden.sum() + routing.shared.sum() + routing.aux_loss).backward()
        assert handle.report().replays > before
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is kept[name]
        assert torch.equal(parameter.grad, values[name])
    assert all(parameter.grad is None for parameter in training.model.blocks[1].parameters())
    touched = [name for name, p in moe.named_parameters() if p.grad is not None and not name.startswith("experts")]
    assert {name.split(".")[0] for name in touched} == {"norm", "router", "shared"}


def test_whole_moe_that_reads_on_the_host_stays_eager_and_right(device: torch.device) -> None:
    with pytest.warns(stepgraph.StepgraphWarning, match="host-read"):
        report = assert_orders_equal_eager(
            training_of(lambda: MoEGPT(dataclasses.replace(ROUTED, experts="loop"))),
            [order("F0 B0 F1 B1")] * 7,
            device,
            lambda training: stepgraph.graph_modules(training.model, ["attn", "moe"]),
        )
    rows = {row.path: row for row in report.rows}
    assert rows["blocks.0.attn"].forwards == rows["blocks.1.attn"].forwards == 2 * 7 - 3
    for path in ("blocks.0.moe", "blocks.1.moe"):
        assert rows[path].forwards == 0
        assert any("host-read" in reason for reason in rows[path].eager_reasons)


def test_router_bias_moves_between_replays(device: torch.device) -> None:
    """The bias is a buffer that changes in place after each step; the graph reads it where it is."""
    training = training_of(lambda: MoEGPT(dataclasses.replace(ROUTED, experts="loop", bias_rate=0.5)))(device)
    moe = training.model.blocks[0].moe
    x = torch.randn(4, SEQUENCE, 64, device=device)
    seen = []
    with stepgraph.graph_modules(training.model, PARTIAL) as handle:
        for _ in range(10):
            load = moe.route(x).load.clone()
            seen.append(tuple(load.tolist()))
            moe.router.update_bias(load)
        assert handle.report().recaptures == 0
    assert len(set(seen[5:])) > 1


class Picks(nn.Module):
    """Takes indices, hands indices out, and keeps indices for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(6, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embedding(index) + self.linear(x).unsqueeze(1)
        best = embedded.max(1)
        top, where = best.values.topk(6)
        return x + F.pad(top, (0, 2)) * x.gather(1, index[:, :1]), where.remainder(6)


def test_indices_between_graphs_and_for_backwards_equal_eager(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        model = nn.ModuleList([Picks() for _ in range(3)]).to(device)

        def loss(x: torch.Tensor) -> torch.Tensor:
            index = torch.arange(4 * 6, device=device).view(4, 6).remainder(6)
            for picks in model:
                x, index = picks(x, index)
            return x.pow(2).mean()

        make = lambda draw, size: torch.randn(size, 8, generator=draw)  # noqa: E731
        return Training(model, torch.optim.AdamW(model.parameters()), make, lambda step: [loss])

    report = assert_orders_equal_eager(
        build, [order("F0 F1 B0 B1")] * 7, device, lambda training: stepgraph.graph_modules(training.model, ["*"])
    )
    assert {reason for row in report.rows for reason in row.eager_reasons} == {"warm-up"}
