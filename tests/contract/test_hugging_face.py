"""Hugging Face's models with the attention mask made outside of the step: equal to eager on both backends.

This is what docs/equality.md advises. Without it their code looks into a mask, or asks whether it is being captured.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import stepgraph
from tests.contract.module_programs import Training, assert_orders_equal_eager, order
from tests.harness import assert_captured_equals_eager, assert_same_history, run
from tests.hugging_face import MODELS, WITH_EXPERTS, batch_of, full_mask, layers_of, model_of, program_of
from tests.seeding import seed

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow  # most of it is warm-up: the code of transformers is read through

CALLS, LAYERS, HIDDEN = 6, 2, 32


@pytest.mark.parametrize("dropout", [False, True], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])  # which takes no mask
def test_hugging_face_step_equals_eager(name: str, device: torch.device, *, dropout: bool) -> None:
    program = program_of(name, CALLS, LAYERS, HIDDEN, dropout=dropout, masked=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", stepgraph.StepgraphWarning)
        report = assert_captured_equals_eager(program, device)
    assert report.eager_reasons == {"warm-up": 3}
    assert report.segments == 1


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_layers_equal_eager(name: str, device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        model = model_of(name, LAYERS, HIDDEN, dropout=True).to(device)
        more = {"attention_mask": full_mask(name, device)} if name != "vit" else {}

        def loss(batch: torch.Tensor) -> torch.Tensor:
            labels = batch if name != "vit" else torch.zeros(len(batch), dtype=torch.long, device=device)
            found: torch.Tensor = model(batch, labels=labels, **more).loss
            return found

        def make(draw: torch.Generator, size: int) -> torch.Tensor:
            return batch_of(name, draw)[0]

        return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), make, lambda step: [loss])

    report = assert_orders_equal_eager(
        build,
        [order("F0 B0 F1 B1")] * 4,
        device,
        lambda training: stepgraph.graph_modules(training.model, layers_of(training.model)),
    )
    assert len(report.rows) == LAYERS
    for row in report.rows:
        assert set(row.eager_reasons) == {"warm-up"}, row
        assert row.forwards > 0, row


@pytest.mark.parametrize("dropout", [False, True], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_in_a_host_loop_still_gain(name: str, device: torch.device, *, dropout: bool) -> None:
    """The model as it is, masks made inside: the step cannot be captured, its modules can."""
    build = program_of(name, 9, LAYERS, HIDDEN, dropout=dropout)
    histories = []
    for graphed in (False, True):
        seed(7)
        program = build(device)
        seed(11)
        if not graphed:
            histories.append(run(program, program.step, device))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
            with stepgraph.capture(program.step, on_error="modules", warmup=2) as step:
                histories.append(run(program, step, device))
                report = step.report()
    assert_same_history(*histories, f"{name}: graphs for modules differ from eager")
    assert report.modules is not None
    replayed = {row.path.partition(".layers.")[2] for row in report.modules.rows if row.forwards}
    assert {f"{layer}.self_attn" for layer in range(LAYERS)} <= replayed
    experts = [why for path, why in report.modules.left_out.items() if path.endswith(".experts")]
    assert experts
    assert all("[host-read]" in why and "nonzero" in why for why in experts)
