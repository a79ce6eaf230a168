"""`buckets=`: batches of many lengths on a few graphs, equal to eager on the padded batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from tests.harness import Program, assert_same_history, run

SIZES = [4, 8, 16]
LENGTHS = (3, 7, 15, 2, 4, 8, 16, 1, 11, 5, 12, 6, 16, 3)


def program(device: torch.device, lengths: tuple[int, ...] = LENGTHS, *, accumulate: bool = False) -> Program:
    model = nn.Sequential(nn.Embedding(20, 12), nn.Dropout(0.1), nn.Linear(12, 20)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not accumulate:
            optimizer.zero_grad()
        logits = model(batch["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "logits": logits}

    batches = [
        ({name: torch.randint(0, 20, (3, length), device=device) for name in ("ids", "labels")},) for length in lengths
    ]
    return Program(step, batches, [model], [optimizer])


def padded(batch: dict[str, torch.Tensor], sizes: list[int] = SIZES) -> dict[str, torch.Tensor]:
    length = batch["ids"].shape[1]
    room = (0, next(size for size in sizes if size >= length) - length)
    return {"ids": F.pad(batch["ids"], room), "labels": F.pad(batch["labels"], room, value=-100)}


def by_hand(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step in eager on the padded batch, with its outputs cut back."""

    def padded_step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = step(padded(batch))
        return {"loss": result["loss"], "logits": result["logits"][:, : batch["ids"].shape[1]]}

    return padded_step


OPTIONS: dict[str, Any] = {
    "buckets": {"batch.ids": {1: SIZES}, "batch.labels": {1: SIZES}},
    "pad_values": {"batch.labels": -100},
}


def assert_equal_to_padded_eager(build: Callable[[torch.device], Program], device: torch.device) -> stepgraph.Report:
    torch.manual_seed(7)
    eager = build(device)
    torch.manual_seed(11)
    expected = run(eager, by_hand(eager.step), device)
    torch.manual_seed(7)
    made = build(device)
    torch.manual_seed(11)
    with stepgraph.capture(made.step, **OPTIONS) as step:
        assert_same_history(expected, run(made, step, device), "captured differs from eager on the padded batch")
        return step.report()


@pytest.mark.parametrize("accumulate", [False, True])
def test_buckets_equal_eager_on_the_padded_batch(accumulate: bool, device: torch.device) -> None:
    report = assert_equal_to_padded_eager(lambda d: program(d, accumulate=accumulate), device)
    assert report.graphs == len(SIZES)


def test_buckets_are_all_captured_at_once_the_largest_first(device: torch.device) -> None:
    made = program(device, lengths=(7, 7, 7, 7, 7, 3, 16, 2, 13))
    with stepgraph.capture(made.step, **OPTIONS) as step:
        for i, batch in enumerate(made.batches):
            step(*batch)
            assert step.report().graphs == (0 if i < 3 else len(SIZES)), i
        report = step.report()
        assert report.eager_reasons == {"warm-up": 3, "comparison": 2}, "only the first bucket warms up"
        (largest, middle, smallest) = sorted(report.signatures, key=len, reverse=True)[:3]
        assert "[3, 16]" in largest or "[3, 16]" in middle or "[3, 16]" in smallest


def test_buckets_captured_ahead_leave_gradients_as_they_were(device: torch.device) -> None:
    """A step that adds to the gradients it finds: capturing other buckets must not touch them."""
    model = nn.Linear(1, 4).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x.unsqueeze(-1)).pow(2).sum()
        loss.backward()
        return loss

    reference = nn.Linear(1, 4).to(device)
    reference.load_state_dict(model.state_dict())
    with stepgraph.capture(step, warmup=1, buckets={"x": {0: [4, 8]}}) as captured:
        for length in (3, 4, 8, 2, 7, 4):
            x = torch.randn(length, device=device)
            captured(x)
            room = (0, (4 if length <= 4 else 8) - length)
            reference(F.pad(x, room).unsqueeze(-1)).pow(2).sum().backward()
            assert torch.equal(model.weight.grad, reference.weight.grad)


def test_bucket_past_the_largest_is_an_error_that_names_it(device: torch.device) -> None:
    made = program(device, lengths=(20,))
    with (
        pytest.raises(stepgraph.InvalidArgument, match="20 is past the largest bucket, 16"),
        stepgraph.capture(made.step, **OPTIONS) as step,
    ):
        step(*made.batches[0])


def test_buckets_past_max_graphs_are_refused() -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="max_graphs"):
        stepgraph.capture(lambda x: x, max_graphs=2, buckets={"x": {0: [1, 2, 3]}})


def test_buckets_give_writes_back_to_the_callers_tensor(device: torch.device) -> None:
    @torch.no_grad()
    def double(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()

    with stepgraph.capture(double, warmup=1, buckets={"x": {0: [4, 8]}}) as step:
        for length in (3, 3, 4, 7, 2):
            x = torch.arange(length, dtype=torch.float32, device=device)
            before = x.clone()
            total = step(x)
            assert torch.equal(x, before * 2)
            assert torch.equal(total, (before * 2).sum())


EIGHT = {"x": {1: [8, 16]}}


def lengths_of(step: Callable[..., Any], device: torch.device, lengths: tuple[int, ...], *args: Any) -> list[Any]:
    """What the step returns for batches of four rows and these lengths."""
    return [step(torch.ones(4, length, device=device), *args) for length in lengths]


def test_buckets_results_may_depend_on_a_flag(device: torch.device) -> None:
    model = nn.Linear(1, 50).to(device)

    @torch.no_grad()
    def evaluate(x: torch.Tensor, want_logits: bool) -> Any:
        logits = model(x.unsqueeze(-1))
        return (logits.mean(), logits) if want_logits else logits.mean()

    with stepgraph.capture(evaluate, buckets=EIGHT) as step:
        for flag in (False, True, False, True):
            for length, result in zip((5, 13, 7, 6, 3), lengths_of(step, device, (5, 13, 7, 6, 3), flag), strict=True):
                assert not flag or result[1].shape == (4, length, 50)
        assert step.report().graphs == 4


def test_buckets_results_may_depend_on_the_mode(device: torch.device) -> None:
    model = nn.Linear(1, 50).to(device)

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = model(x.unsqueeze(-1))
        return {"loss": logits.mean()} if model.training else {"loss": logits.mean(), "logits": logits}

    with stepgraph.capture(evaluate, buckets=EIGHT | {"result.logits": {1: [8, 16]}}) as step:
        for training in (True, False, True, False):
            model.train(training)
            for length, result in zip((5, 13, 7, 6, 3), lengths_of(step, device, (5, 13, 7, 6, 3)), strict=True):
                assert training or result["logits"].shape == (4, length, 50)


@pytest.mark.parametrize("by", ["flag", "mode", "closure"])
def test_buckets_results_of_one_name_may_have_two_meanings(by: str, device: torch.device) -> None:
    """The length under one flag, a width that is a bucket's size under another."""
    model, state = nn.Linear(1, 1).to(device), {"wide": False}

    @torch.no_grad()
    def evaluate(x: torch.Tensor, flag: bool) -> torch.Tensor:
        wide = {"flag": flag, "mode": not model.training, "closure": state["wide"]}[by]
        y = model(x.unsqueeze(-1)).squeeze(-1)
        return y.sum(1, keepdim=True) * torch.ones(16, device=x.device) if wide else y

    with stepgraph.capture(evaluate, buckets=EIGHT) as step:
        for wide in (False, True, False, True):
            model.train(not wide)
            state["wide"] = wide
            flag = wide if by == "flag" else False
            for length, result in zip((5, 13, 7, 6, 3), lengths_of(step, device, (5, 13, 7, 6, 3), flag), strict=True):
                assert result.shape == ((4, 16) if wide else (4, length))


def test_buckets_cut_no_dimension_that_grew_with_them_by_chance(device: torch.device) -> None:
    """Eight rows in the bucket of 8 and sixteen in that of 16: nothing to compare."""
    with stepgraph.capture(lambda x: x * 2, buckets=EIGHT) as step:
        assert step(torch.ones(8, 8, device=device)).shape == (8, 8)
        with pytest.raises(stepgraph.InvalidArgument, match="dimension 0 of x is 16 too") as caught:
            step(torch.ones(16, 13, device=device))
        assert caught.value.rule == "bucket-result"
        for rows, length in ((4, 16), (4, 5), (16, 13), (8, 5), (8, 3), (16, 9), (4, 12), (16, 10)):
            x = torch.rand(rows, length, device=device)  # from two sizes of other rows it is known
            assert torch.equal(step(x), x * 2)


def test_buckets_leave_a_result_whole_once_a_guess_proved_wrong(device: torch.device) -> None:
    width = torch.ones(16, device=device)
    step = stepgraph.capture(lambda x: x.mean(1, keepdim=True) * width.clone(), buckets={"x": {1: [16, 32]}})
    assert step(torch.ones(4, 10, device=device)).shape == (4, 10)
    with pytest.raises(stepgraph.InvalidArgument, match="does not grow with the bucket"):
        step(torch.ones(4, 20, device=device))
    for rows in (4, 3):  # also for rows that no call had before
        for length in (11, 10, 20, 12, 13):
            assert step(torch.ones(rows, length, device=device)).shape == (rows, 16)
    step.close()


@pytest.mark.parametrize(
    ("pads", "dtype", "is_mask", "told"),
    [
        (None, torch.float32, False, "buckets pad `y` with 0"),
        (None, torch.int64, False, "buckets pad `x` and `y` with 0"),
        ({"x": -1.0}, torch.float32, False, "buckets pad `y` with 0"),
        ({"y": 0}, torch.int64, False, None),
        ({"y": -100}, torch.float32, False, None),
        (None, torch.float32, True, None),
    ],
)
def test_integers_padded_with_the_default_warn_once(
    pads: dict[str, float] | None, dtype: torch.dtype, is_mask: bool, told: str | None, device: torch.device
) -> None:
    buckets = {"x": {0: SIZES}, "y": {0: SIZES}}
    step = stepgraph.capture(lambda x, y: x * y, buckets=buckets, pad_values=pads)
    with step, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for length in (4, 3, 3, 7, 8, 2, 5):
            y = torch.ones(length, dtype=torch.bool if is_mask else torch.int64, device=device)
            step(torch.ones(length, dtype=dtype, device=device), y)
            assert not seen or length != 4, "nothing is padded"
    found = [str(warning.message) for warning in seen if "[pad-value]" in str(warning.message)]
    assert len(found) == (told is not None)
    for text in found:
        assert told in text
        assert 'pad_values={"y": -100}' in text
        assert "mask" in text
