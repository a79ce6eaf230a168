"""Frozen values on CUDA: what the nodes of a graph show beyond the operations."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.tools.frozen_values.frozen import examine
from stepgraph.tools.frozen_values.frozen_report import FrozenReport, FrozenValue, State

pytestmark = pytest.mark.gpu
pytest.importorskip("cuda.bindings", reason="nodes are read by cuda-bindings")
HIDDEN = ("FROZEN", "NODES")


def value_of(report: FrozenReport, name: str) -> FrozenValue:
    return next(value for value in report.values if value.name == name)


def training(**options: Any) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1)) for _ in range(4)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    config = SimpleNamespace(weight=0.5, unused=3.0)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        _ = config.unused
        loss = model(x).square().mean() * config.weight
        loss.backward()
        optimizer.step()
        return loss

    return train_step, model, optimizer


def test_frozen_shows_number_in_parameter_bytes() -> None:
    weight = 0.5
    report = stepgraph.frozen(lambda x: x * weight, torch.ones(64, device="cuda"))
    found = value_of(report, "weight")
    assert (report.backend, report.compared) == ("cuda", "operations and nodes")
    assert found.state is State.WATCHED
    assert any("kernel" in node and "0.5 -> 0.4375" in node for node in found.nodes), found.nodes


def test_frozen_takes_no_address_for_a_value() -> None:
    step, _, _ = training(fused=True)
    report = stepgraph.frozen(step, torch.randn(32, 64, device="cuda"))
    assert report.findings == ()
    unused, weight = value_of(report, "config.unused"), value_of(report, "config.weight")
    assert (unused.state, unused.nodes) == (State.NO_EFFECT, ())
    assert weight.state is State.WATCHED
    assert all("0.5 -> 0.4375" in node or "->" in node for node in weight.nodes)
    assert 1 <= len(weight.nodes) <= 4, weight.nodes


def test_frozen_sees_rate_inside_fused_optimizer() -> None:
    step, _, _ = training(fused=True)
    report = stepgraph.frozen(step, torch.randn(32, 64, device="cuda"))
    rate = value_of(report, "optimizer.param_groups[0]['lr']")
    assert rate.state is State.WATCHED
    assert any("0.001 -> 0.000875" in node for node in rate.nodes), rate.nodes


def test_frozen_calls_foreach_optimizer_live() -> None:
    step, _, _ = training()
    report = stepgraph.frozen(step, torch.randn(32, 64, device="cuda"))
    assert value_of(report, "optimizer.param_groups[0]['lr']").state is State.LIVE


def test_frozen_finds_tensor_on_the_host() -> None:
    on_host, on_device = torch.tensor(0.5), torch.tensor(0.5, device="cuda")
    report = stepgraph.frozen(lambda x: x * on_host * on_device, torch.ones(8, device="cuda"))
    assert value_of(report, "on_device").state is State.TENSOR
    found = value_of(report, "on_host")
    assert report.findings == (found,)
    assert "on the host" in found.reason
    assert on_host.item() == 0.5


@torch.library.custom_op("stepgraph_tests::hidden_scale", mutates_args=())
def hidden_scale(x: torch.Tensor) -> torch.Tensor:
    """Multiply by a number that no operation of the log shows."""
    return x * float(os.environ.get("_".join(HIDDEN), "0.5"))


def test_frozen_sees_nodes_where_operations_are_equal() -> None:
    report = examine(hidden_scale, (torch.ones(64, device="cuda"),), {}, env={"FROZEN_NODES": "0.25"})
    found = value_of(report, "os.environ['FROZEN_NODES']")
    assert found.state is State.BAKED
    assert any("0.5 -> 0.25" in node for node in found.nodes), found.nodes
    assert found.entries[0].operation.startswith("kernel")


def test_frozen_leaves_program_on_cuda_as_it_was() -> None:
    step, model, optimizer = training(fused=True)
    x = torch.randn(32, 64, device="cuda")
    weights, state = [p.detach().clone() for p in model.parameters()], torch.cuda.get_rng_state()
    stepgraph.frozen(step, x)
    assert all(map(torch.equal, weights, model.parameters()))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_frozen_asks_graph_in_use_on_cuda() -> None:
    step, _, _ = training(fused=True)
    x = torch.randn(32, 64, device="cuda")
    with stepgraph.capture(step, ignore=["config.weight"]) as captured:
        for _ in range(5):
            captured(x)
        report = stepgraph.frozen(captured, x)
        assert [value.name for value in report.findings] == ["config.weight"]
        captures, replays = captured.report().captures, captured.replays
        captured(x)
        assert (captured.report().captures, captured.replays) == (captures, replays + 1)
