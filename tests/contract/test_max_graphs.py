"""Which signatures are captured where there are more than `max_graphs`, and what is said of the others."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import stepgraph


def double(batch: dict[str, Any]) -> torch.Tensor:
    return torch.as_tensor(batch["x"] * 2)


def call_with_sizes(step: Any, sizes: Iterable[int], device: torch.device) -> None:
    for size in sizes:
        assert step({"x": torch.ones(size, device=device)}).tolist() == [2.0] * size


def warned(step: Any, batches: Iterable[dict[str, Any]]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", stepgraph.StepgraphWarning)
        for batch in batches:
            step(batch)
    return [str(warning.message) for warning in seen if warning.category is stepgraph.StepgraphWarning]


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_signature_that_repeats_takes_the_place_of_one_seen_once(device: torch.device) -> None:
    with stepgraph.capture(double, max_graphs=3) as step:
        call_with_sizes(step, [1, 2, 3, *[20] * 8], device)
        report = step.report()
        assert report.graphs == 1
        assert report.eager_reasons == {"warm-up": 6, "max_graphs=3 other signatures are warming up": 1}
        call_with_sizes(step, [30, *[30] * 5, *[40] * 6, *[50] * 6], device)  # and no more places than there are
        assert step.report().graphs == 3


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_signatures_that_alternate_in_pairs_are_captured(device: torch.device) -> None:
    with stepgraph.capture(double, max_graphs=1) as step:
        call_with_sizes(step, [2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3], device)
        assert step.report().graphs == 1


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_captured_signature_keeps_its_place_during_a_recheck(device: torch.device) -> None:
    layer = torch.nn.Linear(2, 2).to(device)
    with stepgraph.capture(lambda x: layer(x), max_graphs=1) as step:
        for size in (1, 1, 1, 1, 2, 2, 2, 2, 2):
            step(torch.ones(size, 2, device=device))
        layer.weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
        for size in (1, 2, 1, 2, 1):  # two eager calls, the second of which is compared with the capture
            step(torch.ones(size, 2, device=device))
        report = step.report()
    assert (report.graphs, report.captures) == (1, 2)


def test_endless_new_signatures_end_in_eager_and_keep_nothing(device: torch.device) -> None:
    with stepgraph.capture(double, max_graphs=2) as step:
        told = warned(step, ({"x": torch.ones(2, device=device), "id": f"sample {i}"} for i in range(200)))
        report = step.report()
        gc.collect()
        kept = [o for o in gc.get_objects() if type(o) is tuple and (str, "sample 3") in o]
        assert not kept
    assert report.eager_reasons == {"warm-up": 2, "max_graphs=2 other signatures are warming up": 198}
    assert len(told) == 1


def test_limit_is_reported_with_the_nearest_calls_difference(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with stepgraph.capture(double, max_graphs=1, warmup=1) as step:
        (warming,) = warned(step, [{"x": x, "file": "a.png"}, {"x": x, "file": "b.png"}])
    assert "batch['file']: value changed (warming up with 'a.png', received 'b.png')" in warming
    assert "captured" not in warming
    assert "Fix: leave `batch['file']` out of the call if the step does not use it, or raise max_graphs." in warming
    with stepgraph.capture(double, max_graphs=1, warmup=1) as step:
        (captured,) = warned(step, [{"x": x, "file": "a.png"}] * 3 + [{"x": x, "file": "b.png"}])
    assert "(captured 'a.png', received 'b.png')" in captured


@pytest.mark.parametrize(
    ("one", "two", "fix"),
    [
        (0, 1, "leave `batch['y']` out of the call if the step does not use it, pass it as a tensor if it does, or"),
        (object(), object(), "leave `batch['y']` out of the call if the step does not use it, or raise max_graphs."),
        (
            torch.ones(1),
            torch.ones(2),
            "pad inputs to a few shapes (buckets=), pass changing values as tensors, or raise",
        ),
    ],
    ids=["a number", "an object", "a tensor"],
)
def test_fix_past_the_limit_fits_what_differs(one: Any, two: Any, fix: str, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with stepgraph.capture(double, max_graphs=1) as step:
        (told,) = warned(step, [{"x": x, "y": one}, {"x": x, "y": two}])
    assert f"Fix: {fix}" in told
