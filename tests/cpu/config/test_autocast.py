"""Graphs under autocast, as `mixed_precision` configures it: bits of eager, and another graph for another state."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.lab.models import GPT, GPTConfig

TINY = replace(GPTConfig.tiny(), num_layers=1, hidden_size=32, ffn_size=32)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def config(scope: str, precision: str) -> stepgraph.ConfigContainer:
    cfg = stepgraph.ConfigContainer()
    stepgraph.set_cuda_graph_overrides(cfg, "local", scope)
    cfg.model.cuda_graph_warmup_steps = 2
    cfg.mixed_precision = precision  # type: ignore[assignment]
    return cfg.validate(stepgraph.Environment())


def autocast(cfg: stepgraph.ConfigContainer, *, cache: bool = True) -> AbstractContextManager[Any]:
    precision = cfg.mixed_precision
    if not precision.autocast_enabled:
        return contextlib.nullcontext()
    return torch.autocast("cpu", DTYPES[precision.autocast_dtype], cache_enabled=cache)


def losses(model: torch.nn.Module, contexts: list[AbstractContextManager[Any]]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for context in contexts:
        tokens = torch.randint(TINY.vocab_size, (2, 16))
        with context:
            loss = model(tokens, tokens)
        loss.backward()
        found.append(loss.detach().clone())
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


def twins() -> tuple[GPT, GPT]:
    torch.manual_seed(0)
    eager, graphed = GPT(TINY), GPT(TINY)
    graphed.load_state_dict(eager.state_dict())
    return eager, graphed


@pytest.mark.parametrize(("scope", "cache"), [("attn", True), ("attn,mlp", False), ("mlp", True), ("", True)])
@pytest.mark.parametrize("precision", ["bf16_autocast", "fp32"])
def test_cuda_graph_under_autocast_has_the_bits_of_eager(precision: str, scope: str, cache: bool) -> None:
    cfg = config(scope, precision)
    eager, graphed = twins()
    with stepgraph.graph_modules(graphed, config=cfg) as handle:
        found = losses(graphed, [autocast(cfg, cache=cache) for _ in range(4)])
        rows = handle.report().rows
    expected = losses(eager, [autocast(cfg, cache=cache) for _ in range(4)])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(row.forwards > 0 for row in rows)


def test_cuda_graph_of_another_autocast_state_is_another_one() -> None:
    cfg = config("", "bf16_autocast")
    eager, graphed = twins()

    def contexts() -> list[AbstractContextManager[Any]]:
        kinds = [True] * 3 + [False] * 3 + [True, False]
        return [autocast(cfg) if kind else contextlib.nullcontext() for kind in kinds]

    with stepgraph.graph_modules(graphed, config=cfg) as handle:
        found = losses(graphed, contexts())
        row = handle.report().rows[0]
    assert all(torch.equal(one, other) for one, other in zip(found, losses(eager, contexts()), strict=True))
    assert row.eager_reasons == {"warm-up": 4}, "two steps of each state"


@pytest.mark.parametrize(
    ("name", "dtype", "is_autocast"),
    [
        ("bf16_mixed", "bf16", False),
        ("fp16_mixed", "fp16", False),
        ("bf16_autocast", "fp32", True),
        ("fp32", "fp32", False),
    ],
)
def test_cuda_graph_precision_names_set_their_fields(name: str, dtype: str, is_autocast: bool) -> None:
    precision = config("attn", name).mixed_precision
    assert (precision.params_dtype, precision.autocast_enabled) == (dtype, is_autocast)
    assert (precision.bf16, precision.fp16) == (name == "bf16_mixed", name == "fp16_mixed")
