"""Llama 3 8B, cut to a few layers of its full width, trains with both implementations of CUDA graphs.

The losses are those of eager, bit for bit, and the log of the run has no error of NCCL or of memory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepgraph.lab.recipes import recipe
from stepgraph.lab.recipes.fit import fit
from stepgraph.lab.train import RunReport, pretrain

pytestmark = pytest.mark.gpu
FREE_BYTES = 40 * 2**30
"""What the model is cut to fit: two layers of full width and the whole vocabulary."""
BAD_WORDS = ("nccl", "illegal memory access")


def train(folder: Path, impl: str, scope: Sequence[str]) -> RunReport:
    cfg = fit(recipe("llama3_8b"), FREE_BYTES).config
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = impl, list(scope)
    cfg.model.seq_length = 1024
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 10, 2, 1
    cfg.logger.log_dir = str(folder)
    return pretrain(cfg, quiet=True)


@pytest.mark.parametrize(
    ("impl", "scope"), [("local", ["full_iteration"]), ("transformer_engine", ["attn"]), ("local", ["attn", "mlp"])]
)
def test_llama_recipe_trains_with_cuda_graphs(
    tmp_path: Path,
    impl: str,
    scope: list[str],
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    with caplog.at_level(logging.DEBUG):
        eager = train(tmp_path / "eager", "none", [])
        graphed = train(tmp_path / "graphed", impl, scope)
    assert graphed.losses == eager.losses
    assert len(graphed.losses) == 10
    assert graphed.replays > 0
    assert graphed.eager_reasons == {"warm-up": 3}
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in recwarn]
    said += [line for file in (tmp_path / "graphed").rglob("*.jsonl") for line in file.read_text().splitlines()]
    events = [json.loads(line) for line in said if line.startswith("{")]
    assert any(event.get("captured") for event in events)
    config_free = [text for text in said if '"config"' not in text]  # the configuration names NCCL itself
    assert not [text for text in config_free if any(word in text.lower() for word in BAD_WORDS)]
