"""The training loop with every kind of model and implementation equals eager, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.config.container import ConfigContainer
from stepgraph.core.errors import NonFinite
from stepgraph.lab.models import GPT
from stepgraph.lab.recipes import recipe
from stepgraph.lab.recipes.build import build_model
from stepgraph.lab.recipes.fit import for_cpu
from stepgraph.lab.train import finetune, pretrain
from stepgraph.lab.train.checkpoint import checkpoints_in
from tests.train_harness import gpt, tiny

GRAPHED = ("scopes", "layers", "iteration", "te")


WHOLE: dict[str, dict[int, float]] = {}
"""The losses of unbroken runs, by implementation."""


def train(folder: Path, implementation: str = "eager", provider: Any = gpt, **settings: Any) -> Any:
    return pretrain(tiny(folder, implementation, **settings), model_provider=provider, device="cpu", quiet=True)


RESUMED = [(implementation, at) for implementation in GRAPHED for at in (1, 2, 4)]
"""At 1 a run is saved in the warm-up, at 2 before the capture, at 4 after it."""
OTHERS = [("scopes", 1), ("layers", 4), ("te", 1), ("iteration", 2)]


@pytest.mark.parametrize(
    ("implementation", "at"),
    [pytest.param(*case, marks=[pytest.mark.long] if case in OTHERS else []) for case in RESUMED],
)
def test_resumed_losses_equal_an_unbroken_run(tmp_path: Path, implementation: str, at: int) -> None:
    if implementation not in WHOLE:
        WHOLE[implementation] = train(tmp_path / "log", implementation, scheduler__lr_decay_iters=6).losses
    saving = {"checkpoint__save": str(tmp_path / "saved"), "scheduler__lr_decay_iters": 6}
    train(tmp_path / "log", implementation, train__train_iters=at, **saving)
    resumed = train(tmp_path / "log", implementation, checkpoint__load=str(tmp_path / "saved"), **saving)
    assert resumed.start == at
    assert resumed.losses == {step: loss for step, loss in WHOLE[implementation].items() if step > at}


@pytest.mark.parametrize("implementation", GRAPHED)
def test_lora_leaves_base_weights_alone(tmp_path: Path, implementation: str) -> None:
    models: list[nn.Module] = []
    before: dict[str, torch.Tensor] = {}

    def provider(cfg: Any) -> nn.Module:
        models.append(gpt(cfg))
        before.update({name: tensor.clone() for name, tensor in models[-1].state_dict().items()})
        return models[-1]

    settings: dict[str, Any] = {"peft__scheme": "lora", "peft__dim": 4}
    graphed = finetune(tiny(tmp_path, implementation, **settings), model_provider=provider, device="cpu", quiet=True)
    after = {name.replace(".base.", "."): tensor for name, tensor in models[-1].state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    trained = [name for name, p in models[-1].named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert graphed.replays > 0
    eager = finetune(tiny(tmp_path, **settings), model_provider=provider, device="cpu", quiet=True)
    assert graphed.losses == eager.losses


@pytest.mark.parametrize("implementation", GRAPHED)
def test_capture_survives_a_skipped_iteration(tmp_path: Path, implementation: str) -> None:
    """Iteration 3 is the one that the warm-up of 2 ends with."""
    settings = {"train__iterations_to_skip": [3]}
    graphed = train(tmp_path, implementation, **settings)
    assert graphed.skipped == (3,)
    assert graphed.replays > 0
    assert graphed.losses == train(tmp_path, **settings).losses


def test_errors_leave_no_graphs(tmp_path: Path) -> None:
    def stop(name: str, step: int) -> None:
        if step == 5:
            raise KeyError("the user's own")

    model: list[nn.Module] = []

    def provider(cfg: Any) -> nn.Module:
        model.append(gpt(cfg))
        return model[0]

    for implementation in GRAPHED:
        model.clear()
        with pytest.raises(KeyError, match="the user's own"):
            pretrain(tiny(tmp_path, implementation), model_provider=provider, device="cpu", on_event=stop, quiet=True)
        assert not [m for m in model[0].modules() if "forward" in vars(m)], implementation
    assert not stepgraph.get_cuda_rng_tracker("cpu").is_initialized()


class Spoiled(GPT):
    """A model whose loss becomes infinite after some calls."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.left.sub_(1)
        return super().forward(*args, **kwargs) / self.left.clamp(0, 1)


def spoiled(cfg: Any) -> nn.Module:
    model = gpt(cfg)
    model.__class__ = Spoiled
    model.register_buffer("left", torch.tensor(9.0))
    return model


def test_nan_inside_the_graph_stops_the_run(tmp_path: Path) -> None:
    """In full iteration the flag is inside the graph, by default."""
    with pytest.raises(NonFinite):
        train(tmp_path, "iteration", spoiled, checkpoint__save=str(tmp_path), checkpoint__save_interval=1)
    assert [step for step, _ in checkpoints_in(tmp_path)] == [1, 2, 3, 4], "bad parameters are not saved"


KINDS: dict[str, dict[str, list[list[str]]]] = {
    "gpt2_small": {"local": [["attn"], ["mlp"], [], ["full_iteration"]], "transformer_engine": [["attn", "mlp"], []]},
    "qwen3_30b_a3b": {
        "local": [["attn", "moe_router", "moe_preprocess"], ["moe"], ["full_iteration"]],
        "transformer_engine": [["attn", "moe_router", "moe_preprocess"], ["moe"]],
    },
    "deepseek_v3": {"local": [["full_iteration"]], "transformer_engine": [["attn", "moe_router", "moe_preprocess"]]},
    "gpt_oss_20b": {"local": [["attn"]], "transformer_engine": [["attn", "moe_router"]]},
    "nemotron_h": {"local": [["mamba", "attn"], ["full_iteration"]], "transformer_engine": [["mamba", "attn"]]},
}
"""Kinds of models, by their recipes, with legal pairs of implementation and scope."""
LONG = [("deepseek_v3", "local"), ("gpt_oss_20b", "local"), ("nemotron_h", "local")]
ALL_PAIRS = [(name, impl, scope) for name, found in KINDS.items() for impl, scopes in found.items() for scope in scopes]
PAIRS = [(name, impl, scope) for name, impl, scope in ALL_PAIRS if (name, impl) not in LONG]


def small(name: str, folder: Path, iterations: int) -> ConfigContainer:
    """A recipe cut far down: the same parts in the smallest sizes that a CPU trains in milliseconds."""
    cfg = for_cpu(recipe(name))
    cfg.model.vocab_size = 256 if cfg.model.image_token_id is None else cfg.model.vocab_size
    cfg.model.seq_length = 16
    cfg.mixed_precision = "fp32"
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = iterations, 2, 1
    cfg.model.hidden_dropout = 0.1
    cfg.logger.log_dir = str(folder)
    return cfg


EAGER: dict[tuple[str, int], dict[int, float]] = {}
"""The losses of eager runs, by recipe and number of iterations."""


def assert_recipe_trains_as_in_eager(folder: Path, name: str, impl: str, scope: list[str], iterations: int) -> None:
    if (name, iterations) not in EAGER:
        cfg = small(name, folder, iterations)
        cfg.model.cuda_graph_impl = "none"
        EAGER[name, iterations] = pretrain(cfg, device="cpu", quiet=True).losses
    cfg = small(name, folder, iterations)
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = impl, scope
    report = pretrain(cfg, device="cpu", quiet=True)
    assert report.losses == EAGER[name, iterations]
    assert report.replays > 0
    assert report.eager_reasons == {"warm-up": 3}


@pytest.mark.parametrize(("name", "impl", "scope"), PAIRS)
def test_recipes_train_as_in_eager(tmp_path: Path, name: str, impl: str, scope: list[str]) -> None:
    """Three iterations of warm-up, the capture, and three replays: each would show a wrong update of the one before."""
    assert_recipe_trains_as_in_eager(tmp_path, name, impl, scope, 7)


@pytest.mark.long
@pytest.mark.parametrize(("name", "impl", "scope"), ALL_PAIRS)
def test_recipes_train_longer_as_in_eager(tmp_path: Path, name: str, impl: str, scope: list[str]) -> None:
    assert_recipe_trains_as_in_eager(tmp_path, name, impl, scope, 20)


MOE_SCOPE = ["attn", "moe_router", "moe_preprocess"]
DELAYED = [
    *((None, "local", scope) for scope in (["attn"], ["attn", "mlp"], [])),
    *((None, "transformer_engine", scope) for scope in (["attn", "mlp"], [])),
    *((4, impl, MOE_SCOPE) for impl in ("local", "transformer_engine")),
]
TRAINED: dict[tuple[int | None, bool], tuple[dict[int, float], dict[str, torch.Tensor]]] = {}
"""The losses and weights of eager runs, by the number of experts, with delayed weight gradients and without."""


def train_delayed(
    folder: Path, experts: int | None, impl: str, scope: list[str], *, delay: bool = True, **changes: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train, and return the report and the weights."""
    models: list[nn.Module] = []

    def provider(cfg: Any) -> nn.Module:
        models.append(build_model(cfg.model))
        return models[0]

    settings = {"model__num_moe_experts": experts, "model__hidden_dropout": 0.1, "train__train_iters": 6, **changes}
    cfg = tiny(folder, **settings, model__delay_wgrad_compute=delay, model__gradient_accumulation_fusion=delay)
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = impl, scope
    report = pretrain(cfg, model_provider=provider, device="cpu", quiet=True)
    return report, {name: p.detach().clone() for name, p in models[0].named_parameters()}


@pytest.mark.parametrize(("experts", "impl", "scope"), DELAYED, ids=str)
def test_delayed_gradients_with_scopes_train_as_in_eager(
    tmp_path: Path, experts: int | None, impl: str, scope: list[str]
) -> None:
    """Each weight has one use here, so that the sums are also those of a run without delayed gradients."""
    graphed, weights = train_delayed(tmp_path, experts, impl, scope)
    for delay in (True, False):
        if (experts, delay) not in TRAINED:
            eager, expected = train_delayed(tmp_path, experts, "none", [], delay=delay)
            TRAINED[experts, delay] = eager.losses, expected
        losses, expected = TRAINED[experts, delay]
        assert graphed.losses == losses, delay
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == [], delay
    assert graphed.eager_reasons == {"warm-up": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"model__share_embeddings_and_output_weights": True},
        {"model__cuda_graph_use_single_mempool": True},
        {"model__recompute_granularity": "selective", "model__recompute_modules": ["core_attn", "mlp"]},
    ],
    ids=["tied", "single pool", "recompute"],
)
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_delayed_gradients_with_other_settings(tmp_path: Path, impl: str, changes: dict[str, Any]) -> None:
    graphed, weights = train_delayed(tmp_path, None, impl, ["attn", "mlp"], **changes)
    eager, expected = train_delayed(tmp_path, None, "none", [], **changes)
    assert graphed.losses == eager.losses
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert graphed.eager_reasons == {"warm-up": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"delay_wgrad_compute": True},
        {"recompute_granularity": "full", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ],
)
def test_delayed_gradients_and_recompute_train_as_in_eager(tmp_path: Path, changes: dict[str, Any]) -> None:
    losses = []
    for impl, scope, changed in (("none", [], {}), ("none", [], changes), ("local", ["full_iteration"], changes)):
        cfg = small("gpt2_small", tmp_path, 6)
        cfg.model.hidden_dropout = 0.0
        cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = impl, scope
        for name, value in changed.items():
            setattr(cfg.model, name, value)
        losses.append(pretrain(cfg, device="cpu", quiet=True).losses)
    assert losses[2] == losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # the two uses of the tied matrix are added in another order
