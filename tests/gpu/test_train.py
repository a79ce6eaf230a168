"""The training loop on a GPU: every implementation trains, and gives eager's losses where eager gives its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.config.container import ConfigContainer
from stepgraph.lab.recipes import recipe
from stepgraph.lab.recipes.fit import for_cpu
from stepgraph.lab.train import RunReport, finetune, pretrain
from tests.train_harness import gpt, tiny

pytestmark = pytest.mark.gpu
PAIRS = [
    ("local", ["full_iteration"]),
    ("local", ["attn", "mlp"]),
    ("local", []),
    ("transformer_engine", ["attn"]),
    ("transformer_engine", []),
]


def small(name: str, folder: Path, impl: str, scope: list[str]) -> ConfigContainer:
    """A recipe in small sizes, in its own precision."""
    cfg = for_cpu(recipe(name))
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = impl, scope
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 20, 4, 2
    cfg.model.hidden_dropout = 0.1
    cfg.logger.log_dir = str(folder)
    return cfg


@pytest.mark.parametrize(("impl", "scope"), PAIRS)
def test_gpt2_trains_as_in_eager_on_the_gpu(tmp_path: Path, impl: str, scope: list[str]) -> None:
    runs = [pretrain(small("gpt2_small", tmp_path, *pair), quiet=True) for pair in (("none", []), (impl, scope))]
    assert runs[1].losses == runs[0].losses
    assert runs[1].replays > 0
    assert runs[1].eager_reasons == {"warm-up": 3}
    assert runs[1].memory_after is not None


@pytest.mark.parametrize("implementation", ["scopes", "layers", "iteration", "te"])
def test_delayed_weight_gradients_train_on_the_gpu(tmp_path: Path, implementation: str) -> None:
    settings: dict[str, Any] = {"train__train_iters": 20, "model__delay_wgrad_compute": True}
    settings["model__gradient_accumulation_fusion"] = True
    eager, graphed = (
        pretrain(tiny(tmp_path, name, **settings), model_provider=gpt, quiet=True) for name in ("eager", implementation)
    )
    assert graphed.losses == eager.losses
    assert graphed.replays > 0
    assert graphed.eager_reasons == {"warm-up": 2}


def test_moe_router_scopes_train_on_the_gpu(tmp_path: Path) -> None:
    scope = ["attn", "moe_router", "moe_preprocess"]
    runs = [
        pretrain(small("qwen3_30b_a3b", tmp_path, *pair), quiet=True)
        for pair in (("none", []), ("none", []), ("transformer_engine", scope))
    ]
    assert runs[2].replays > 0
    if runs[0].losses == runs[1].losses:  # scatters may add in any order
        assert runs[2].losses == runs[0].losses


@pytest.mark.parametrize("implementation", ["scopes", "iteration", "te"])
def test_resume_and_packed_lora_on_the_gpu(tmp_path: Path, implementation: str) -> None:
    settings: dict[str, Any] = {
        "dataset__packed_sequence": True,
        "dataset__pad_cu_seqlens": True,
        "peft__scheme": "lora",
        "peft__dim": 4,
        "model__seq_length": 32,
        "scheduler__lr_decay_iters": 6,
    }

    def run(**more: Any) -> RunReport:
        return finetune(tiny(tmp_path / "log", implementation, **settings, **more), model_provider=gpt, quiet=True)

    whole = run()
    run(train__train_iters=3, checkpoint__save=str(tmp_path / "saved"))
    resumed = run(checkpoint__load=str(tmp_path / "saved"))
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 3}
    assert whole.replays > 0


def test_graphs_are_gone_after_a_run(tmp_path: Path) -> None:
    def allocated() -> int:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream
        return torch.cuda.memory_allocated()

    pretrain(tiny(tmp_path, "eager"), model_provider=gpt, quiet=True)
    before = allocated()
    for implementation in ("scopes", "iteration", "te"):
        pretrain(tiny(tmp_path, implementation), model_provider=gpt, quiet=True)
    assert allocated() <= before + 2**20
