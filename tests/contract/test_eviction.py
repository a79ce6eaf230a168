"""A larger signature takes the place of smaller ones, which are recorded again in its memory, and all equals eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.step import eviction
from tests.harness import Program, assert_captured_equals_eager

REASON = "made room for a larger signature"


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools count, too."""
    monkeypatch.setattr(eviction, "_WORTH_BYTES", 0)


def program(device: torch.device, sizes: list[int], *, fused: bool = True) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(size, 8, generator=draw).to(device),) for size in sizes]

    def before(index: int) -> None:
        if index and not fused:
            schedule.step()

    return Program(step, batches, [model], [optimizer], before_call=before)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        [n for _ in range(6) for n in (2, 4, 8, 16)],
        [n for n in (2, 4, 8, 16) for _ in range(5)] + [2, 4, 8, 16] * 2,
        [4] * 5 + [16] * 5 + [8] * 5 + [4, 8, 16] * 2,
    ],
    ids=["in turn", "one after the other", "largest in the middle"],
)
def test_larger_and_larger_signatures_equal_eager(sizes: list[int], fused: bool, device: torch.device) -> None:
    report = assert_captured_equals_eager(lambda device: program(device, sizes, fused=fused), device)
    assert report.recapture_reasons[REASON] >= 1


def test_evicted_graphs_are_counted_and_return_without_warm_up(device: torch.device) -> None:
    training = program(device, [2] * 5 + [4] * 5 + [2, 4, 2, 4])
    with stepgraph.capture(training.step) as step:
        for (batch,) in training.batches:
            step(batch)
        report = step.report()
    assert report.recapture_reasons == {REASON: 1}
    assert report.eager_reasons == {"warm-up": 6}
    assert (report.graphs, report.captures, report.replays) == (2, 3, 8)


def test_smaller_signatures_evict_nothing(device: torch.device) -> None:
    training = program(device, [16] * 5 + [8] * 5 + [4] * 5 + [16, 8, 4])
    with stepgraph.capture(training.step) as step:
        for (batch,) in training.batches:
            step(batch)
        assert (step.report().graphs, step.report().recaptures) == (3, 0)


def test_largest_signature_captured_again_keeps_the_others(device: torch.device) -> None:
    scale = [1.0]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * scale[0]

    with stepgraph.capture(step) as captured:
        for size in [16] * 5 + [4] * 5:
            captured(torch.ones(size, device=device))
        scale[0] = 2.0
        with pytest.warns(stepgraph.StepgraphWarning, match="scale"):
            captured(torch.ones(16, device=device))
        for _ in range(2):
            assert captured(torch.ones(16, device=device)).tolist() == [2.0] * 16
        assert REASON not in captured.report().recapture_reasons


def test_graphs_of_other_steps_in_the_session_stay(device: torch.device) -> None:
    with stepgraph.Session() as session:
        one = stepgraph.capture(lambda x: x * 2, session=session)
        two = stepgraph.capture(lambda x: x * 3, session=session)
        for size in [2] * 5 + [4] * 5:
            assert one(torch.ones(size, device=device)).tolist() == [2.0] * size
            assert two(torch.ones(size, device=device)).tolist() == [3.0] * size
        assert (one.report().recaptures, two.report().recaptures) == (0, 0)


def test_results_of_graphs_that_made_room_stay_as_they_are(device: torch.device) -> None:
    with stepgraph.capture(lambda x: x * 2, outputs="static") as step:
        held = [step(torch.full((4,), float(i), device=device)) for i in range(5)][-1]
        for i in range(5):
            step(torch.full((64,), float(i), device=device))
        assert held.tolist() == [8.0] * 4


def test_buckets_that_are_captured_ahead_stay(device: torch.device) -> None:
    training = program(device, [3] * 4 + [3, 7, 12, 16])
    with stepgraph.capture(training.step, buckets={"x": {0: [4, 8, 16]}}) as step:
        for (batch,) in training.batches:
            step(batch)
        assert (step.report().graphs, step.report().captures, step.report().recaptures) == (3, 3, 0)


def test_graphs_of_other_modes_make_room_too(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    with stepgraph.capture(lambda x: model(x).detach()) as step:
        for size in (2, 4):
            x = torch.ones(size, 8, device=device)
            for mode in [True] * 5 + [False] * 5:
                model.train(mode)
                result = step(x)
            assert torch.equal(result, model[0](x))
        assert step.report().recapture_reasons == {REASON: 2}


def test_value_changed_after_an_eviction_raises_under_strict(device: torch.device) -> None:
    scale = [1.0]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * scale[0]

    with stepgraph.capture(step, strict=True) as captured:
        for size in [4] * 5 + [16] * 5:
            captured(torch.ones(size, device=device))
        scale[0] = 2.0
        with pytest.raises(stepgraph.StateChanged, match="scale"):
            captured(torch.ones(4, device=device))
