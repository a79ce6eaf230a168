"""Parts of megatron-core's own layers as graphs: its linear layers return their bias beside the product."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from tests.harness import same_bits

pytestmark = pytest.mark.gpu
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

STEPS, SEQUENCE, VOCABULARY = 8, 16, 32
TRACKER = "_CUDA_RNG_STATE_TRACKER.states_['model-parallel-rng']"
"""Megatron's attention puts another generator object here at each call; nothing is drawn from it without dropout."""
NAMES = [TRACKER, f"tensor_parallel.random.{TRACKER}"]
"""As the code of a part reads it, and as that of a whole layer does."""


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """torch.distributed and Megatron's groups, with this process alone in each."""
    from megatron.core import parallel_state

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build() -> nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(123, use_cudagraphable_rng=True, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        add_bias_linear=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, position_embedding_type="rope")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 + (parameter.dim() == 1))
    return model.cuda()


def train(scope: list[str] | None) -> tuple[list[torch.Tensor], Any]:
    """Losses, parameters and gradients of a short training, and the report of its graphs."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    positions = torch.arange(SEQUENCE, device="cuda")[None]
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda", dtype=torch.bool).triu(1)
    handle = stepgraph.graph_modules(model, scope, ignore=NAMES) if scope is not None else None
    found = []
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad()
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        found += [p.detach().clone() for p in model.parameters()]
    report = handle.report() if handle is not None else None
    if handle is not None:
        handle.close()
    return found, report


@pytest.mark.parametrize("scope", [["decoder.layers.*.self_attention"], ["decoder.layers.*.mlp"], ["decoder.layers.*"]])
def test_megatron_parts_train_as_in_eager(scope: list[str], group_of_one: None) -> None:
    expected, _ = train(None)
    again, _ = train(None)
    assert all(map(same_bits, expected, again)), "eager differs from eager"
    received, report = train(scope)
    assert report.replays > 0, str(report)
    assert len(received) == len(expected)
    assert all(map(same_bits, expected, received))
