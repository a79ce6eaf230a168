"""The estimate of bytes against what torch's allocator really hands out on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stepgraph.config.container import ConfigContainer
from stepgraph.lab.recipes import recipe
from stepgraph.lab.recipes.build import build_model
from stepgraph.lab.recipes.fit import for_cpu
from stepgraph.lab.recipes.layers import with_layers
from stepgraph.lab.recipes.memory import LiveBytes, estimate_memory, run_microbatch

SLOW = pytest.mark.slow


def small(name: str, **settings: object) -> ConfigContainer:
    """A recipe as a CPU trains it, in float32, with few tokens."""
    cfg = for_cpu(recipe(name))
    cfg.mixed_precision = "fp32"
    cfg.model.vocab_size, cfg.model.seq_length = 512, 32
    for setting, value in settings.items():
        setattr(cfg.model, setting, value)
    return cfg


def allocated(cfg: ConfigContainer) -> tuple[int, int]:
    """Bytes of the weights, and the peak of a forward and backward beside weights and gradients, as allocated."""
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as making:
        model = build_model(cfg.model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(cfg.model.vocab_size - 1, (cfg.train.micro_batch_size, cfg.model.seq_length))
    run_microbatch(model, cfg, tokens)  # what torch allocates once and keeps is not a step's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        run_microbatch(model, cfg, tokens)
    return changes(making)[-1], max(changes(running))


def changes(run: profile) -> list[int]:
    """What is allocated after each allocation and release, from zero."""
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    total, found = 0, [0]
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        found.append(total)
    return found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("gpt2_small", {}, marks=SLOW),
        ("llama3_8b", {}),
        pytest.param("llama3_8b", {"recompute_granularity": "full"}, marks=SLOW),
        pytest.param("llama3_8b", {"delay_wgrad_compute": True}, marks=SLOW),
        pytest.param("qwen3_30b_a3b", {}, marks=SLOW),
        pytest.param("gpt_oss_20b", {}, marks=SLOW),
        ("deepseek_v3", {}),
        pytest.param("nemotron_h", {}, marks=SLOW),
    ],
    ids=str,
)
def test_estimate_is_what_is_allocated(name: str, settings: dict[str, object]) -> None:
    cfg = small(name, **settings)
    estimate = estimate_memory(cfg)
    weights, activations = allocated(cfg)
    assert estimate.weights == pytest.approx(weights, rel=0.01)
    assert estimate.gradients == pytest.approx(weights, rel=0.01)
    assert estimate.optimizer == 2 * estimate.gradients
    # torch's kernels may allocate scratch memory that no operation returns
    assert estimate.activations == pytest.approx(activations, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["llama3_8b", "nemotron_h", *(pytest.param(n, marks=pytest.mark.long) for n in ("deepseek_v3", "gpt_oss_20b"))],
)
def test_estimate_of_a_deep_stack_is_that_of_its_run(name: str) -> None:
    """Only shallow stacks are run for the estimate; here the deep one is run, too.

    In a hybrid stack the peak is inside one layer or another, by its depth, so what a kind adds is not constant.
    """
    cfg = small(name)
    deep = with_layers(recipe(name), 14).model
    cfg.model.num_layers = 14
    cfg.model.moe_layer_freq, cfg.model.hybrid_override_pattern = deep.moe_layer_freq, deep.hybrid_override_pattern
    _, activations = allocated(cfg)
    assert estimate_memory(cfg).activations == pytest.approx(activations, rel=0.1 if name == "nemotron_h" else 0.02)


def test_estimate_counts_a_tied_matrix_once_and_the_dtype() -> None:
    cfg = small("gpt2_small")
    whole = estimate_memory(cfg).weights
    cfg.mixed_precision = "bf16_mixed"
    assert estimate_memory(cfg).weights == whole // 2
    cfg.model.share_embeddings_and_output_weights = False
    assert estimate_memory(cfg).weights == whole // 2 + 2 * 512 * 256


def test_live_bytes_counts_what_is_alive() -> None:
    with LiveBytes() as live:
        x = torch.zeros(256)
        y = x + 1
        view = y[:10]
        assert live.now == 2 * 1024
        del x
        assert live.now == 1024
        del y
        assert live.now == 1024  # the view holds it
        del view
        x = torch.zeros(8)
        x += 1
    assert live.now == 32
    assert live.peak == 2 * 1024
