"""A configuration decides what is captured: modules and whole iterations have the bits of eager, after its warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepgraph
from tests.module_harness import Layer, Net, assert_graphed_equals_eager, training_of


def configuration(impl: str, scope: str = "", **model: Any) -> stepgraph.ConfigContainer:
    cfg = stepgraph.set_cuda_graph_overrides(stepgraph.ConfigContainer(), impl, scope)
    for name, value in model.items():
        setattr(cfg.model, name, value)
    return cfg.validate()


@pytest.mark.parametrize(("steps", "microbatches"), [(2, 1), (1, 2)])
def test_modules_of_a_configuration_equal_eager(steps: int, microbatches: int, device: torch.device) -> None:
    cfg = configuration("local", cuda_graph_warmup_steps=steps).copy()
    cfg.train.global_batch_size = microbatches
    report = assert_graphed_equals_eager(
        lambda on: training_of(lambda: Net(Layer(), Layer()), on, microbatches=microbatches),
        device,
        config=cfg.validate(),
    )
    assert [row.eager_reasons["warm-up"] for row in report.rows] == [steps * microbatches] * 2


def test_iteration_of_a_configuration_equals_eager(device: torch.device) -> None:
    def iteration(*, model: torch.nn.Module, data_iterator: Any, num_microbatches: int, **rest: Any) -> list[Any]:
        losses = [model(next(data_iterator)).square().mean() for _ in range(num_microbatches)]
        torch.stack(losses).sum().backward()
        return [loss.detach() for loss in losses]

    cfg = configuration("local", "full_iteration", cuda_graph_warmup_steps=2)
    torch.manual_seed(0)
    eager, graphed = torch.nn.Linear(8, 8).to(device), torch.nn.Linear(8, 8).to(device)
    graphed.load_state_dict(eager.state_dict())
    batches = [torch.randn(4, 8, device=device) for _ in range(10)]
    call = {"forward_step_func": None, "num_microbatches": 2}
    with stepgraph.FullCudaGraphWrapper(iteration, config=cfg) as wrapper:
        ours = [wrapper(model=graphed, data_iterator=iter(batches[2 * i :]), **call) for i in range(5)]
        report = wrapper.report()
    theirs = [iteration(model=eager, data_iterator=iter(batches[2 * i :]), **call) for i in range(5)]
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, another) for one, another in zip(mine, other, strict=True))
    assert torch.equal(eager.weight.grad, graphed.weight.grad)  # type: ignore[arg-type]
    assert (dict(report.eager_reasons), report.replays) == ({"warm-up": 2}, 3)
