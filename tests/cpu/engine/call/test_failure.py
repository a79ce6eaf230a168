"""A host read inside torch is told with the function that reads, and with a fix that works when it is followed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.core.errors import Location
from stepgraph.engine.call.failure import fix_in_torch

Step = Callable[[torch.Tensor], Any]
Case = tuple[Step, Step, str, str]
"""What is refused, the same with the fix, the function of torch, and a piece of the fix."""


def distribution() -> Case:
    def step(x: torch.Tensor, *, validate_args: bool = True) -> torch.Tensor:  # torch's compiler changes the default
        made = torch.distributions.Categorical(logits=x, validate_args=validate_args)
        return made.log_prob(made.sample()).mean()

    fixed = lambda x: step(x, validate_args=False)  # noqa: E731
    # in a function for it, in newer versions of torch
    return step, fixed, "torch/distributions/distribution.py, ", "validate_args=False"


def batch_norm() -> Case:
    norm, fixed = nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6, momentum=0.1)
    return lambda x: norm(x), lambda x: fixed(x), "torch/nn/modules/batchnorm.py, forward", "momentum=0.1"


DETECTED = "torch/nn/modules/transformer.py, _detect_is_causal_mask"
MASK = nn.Transformer.generate_square_subsequent_mask(6)
SHAPE = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}


def transformer() -> Case:
    model = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **SHAPE)  # type: ignore[arg-type]
    return (
        lambda x: model(x, x, src_mask=MASK, tgt_mask=MASK),
        lambda x: model(x, x, src_mask=MASK, tgt_mask=MASK, src_is_causal=True, tgt_is_causal=True),
        DETECTED,
        "src_is_causal and tgt_is_causal",
    )


def encoder() -> Case:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(**SHAPE), 1)  # type: ignore[arg-type]
    return lambda x: model(x, mask=MASK), lambda x: model(x, mask=MASK, is_causal=True), DETECTED, "is_causal=True"


def decoder() -> Case:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(**SHAPE), 1)  # type: ignore[arg-type]
    return (
        lambda x: model(x, x, tgt_mask=MASK),
        lambda x: model(x, x, tgt_mask=MASK, tgt_is_causal=True),
        DETECTED,
        "tgt_is_causal",
    )


def nested() -> Case:
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[:, -2:] = True

    def made(*, enabled: bool) -> Step:
        layer = nn.TransformerEncoderLayer(**SHAPE)  # type: ignore[arg-type]
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=enabled).eval()
        return torch.no_grad()(lambda x: model(x, src_key_padding_mask=padding))

    piece = "enable_nested_tensor=False"
    return made(enabled=True), made(enabled=False), "torch/nn/modules/transformer.py, forward", piece


def average() -> Case:
    model = nn.Linear(8, 1)
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        averaged.update_parameters(model)
        return loss

    return step, lambda x: model(x).mean(), "torch/optim/swa_utils.py, update_parameters", "outside, after the step"


def packed() -> Case:
    rnn = nn.GRU(8, 2, batch_first=True)
    lengths, inside = [6, 5, 4, 3], torch.arange(6) < torch.tensor([[6], [5], [4], [3]])

    def step(x: torch.Tensor) -> Any:
        return rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))

    def fixed(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = rnn(x)[0]
        return out * inside[..., None]

    return step, fixed, "torch/nn/utils/rnn.py, pack_padded_sequence", "leave the batch padded"


def clipped() -> Case:
    weight = nn.Parameter(torch.ones(8))

    def step(x: torch.Tensor, *, checked: bool = True) -> torch.Tensor:
        (x * weight).sum().backward()
        return nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=checked)

    return step, lambda x: step(x, checked=False), "torch/nn/utils/clip_grad.py", "error_if_nonfinite off"


CASES = [distribution, batch_norm, transformer, encoder, decoder, nested, average, packed, clipped]


def run(step: Step, calls: int = 4) -> stepgraph.CaptureError | None:
    with warnings.catch_warnings(), stepgraph.capture(step, warmup=2, backend="tape") as captured:
        warnings.simplefilter("ignore")
        try:
            for _ in range(calls):
                captured(torch.rand(4, 6, 8))
        except stepgraph.CaptureError as error:
            return error
    return None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_read_inside_torch_is_reported_with_a_fix_that_works(case: Callable[[], Case]) -> None:
    step, fixed, function, piece = case()
    error = run(step)
    assert error is not None
    assert any(line.startswith(f"in    {function}") for line in error.details), error.details
    assert piece in error.fix
    assert error.where is not None
    assert error.where.file == __file__
    assert run(fixed) is None


def test_read_by_the_users_own_line_names_no_function_of_torch() -> None:
    for step in (lambda x: x * x.mean().item(), lambda x: x * (1.0 in x), lambda x: x * float(x.sum())):
        error = run(step)
        assert error is not None
        assert not any(line.startswith("in ") for line in error.details)
        assert error.fix.startswith("return the tensor")


def test_read_of_anomaly_mode_inside_the_step_is_reported() -> None:
    weight = nn.Parameter(torch.ones(8))

    def step(x: torch.Tensor) -> None:
        with torch.autograd.set_detect_anomaly(True):
            (x * weight).sum().backward()

    error = run(step)
    assert error is not None
    assert "op    detect_anomaly()" in error.details
    assert "around the call" in error.fix


def test_read_of_lengths_is_refused_where_they_are_an_argument() -> None:
    """Its result has another size with other lengths."""
    pack = nn.utils.rnn.pack_padded_sequence
    step = stepgraph.capture(lambda x, lengths: pack(x, lengths)[0], warmup=2, backend="tape")
    with step, pytest.raises(stepgraph.CaptureError) as told:
        for _ in range(3):
            step(torch.rand(4, 2, 3), torch.tensor([4, 3]))
    assert told.value.rule == "host-read"


def test_fix_is_known_for_no_other_function() -> None:
    assert fix_in_torch(Location("nn/functional.py", 1, "gaussian_nll_loss")) is None
    assert fix_in_torch(Location("nn/modules/transformer.py", 1, "generate_square_subsequent_mask")) is None
