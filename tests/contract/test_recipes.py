"""Each recipe, cut to a CPU's size, captured ahead of time by its own settings, equals eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.config.container import ConfigContainer
from stepgraph.lab.recipes import RECIPES
from stepgraph.lab.recipes.build import build_model
from stepgraph.lab.recipes.fit import for_cpu
from stepgraph.lab.recipes.layers import fewest_layers, with_layers
from tests.harness import assert_same_history
from tests.module_harness import Note, Training
from tests.seeding import seed

QUICK = {"llama3_70b_sft", "gpt_oss_20b", "nemotron_h"}
SEQUENCE, MICROBATCHES = 16, 2


def tiny(name: str) -> ConfigContainer:
    cfg = for_cpu(RECIPES[name].make())
    cfg = with_layers(cfg, max(2, fewest_layers(cfg)))
    cfg.mixed_precision = "fp32"
    cfg.model.vocab_size, cfg.model.seq_length, cfg.model.hidden_dropout = 256, SEQUENCE, 0.1
    cfg.model.image_token_id = None
    cfg.model.cuda_graph_impl = "transformer_engine"
    return cfg


def training(cfg: ConfigContainer, device: torch.device, *, steps: int) -> Training:
    model = build_model(cfg.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
        optimizer.zero_grad()
        for index, tokens in enumerate(batch):
            stepgraph.set_current_microbatch(model, index)
            out: Any = model(tokens, targets=tokens)
            loss = out if isinstance(out, torch.Tensor) else out.out + 0.01 * out.aux_loss
            loss.backward()
            note(loss)
        optimizer.step()
        return loss.detach()

    batches = [torch.randint(255, (MICROBATCHES, 1, SEQUENCE), device=device) for _ in range(steps)]
    return Training(model, step, batches, [optimizer])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in RECIPES]
)
def test_recipe_captured_ahead_of_time_equals_eager(name: str, device: torch.device) -> None:
    cfg, histories = tiny(name), []
    for is_graphed in (False, True):
        seed(7)
        run = training(cfg, device, steps=5)
        helper = stepgraph.TECudaGraphHelper([run.model], cfg.model, SEQUENCE, 1, run.optimizers)
        if is_graphed:
            helper.create_cudagraphs()
        seed(11)
        histories.append(run.run(device))
        if is_graphed:
            assert helper.report().forwards > 0
            assert helper.paths
            helper.delete_cuda_graphs()
    assert_same_history(*histories, "graphed differs from eager")
