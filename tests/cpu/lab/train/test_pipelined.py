"""Models divided into the stages of a pipeline, and what its schedules refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.lab.models import GPT, GPTConfig
from stepgraph.lab.train import pretrain
from stepgraph.lab.train.checkpoint import CheckpointError
from stepgraph.lab.train.lora import add_lora
from stepgraph.lab.train.pipelined import RankStages, refuse_schedule, stages_of
from stepgraph.lab.train.ranks import Ranks
from stepgraph.lab.train.run import _make_core
from tests.train_harness import moe, tiny


def rank_of(pipeline_size: int, stage: int = 0) -> Ranks:
    ranks = Ranks()
    ranks.pipeline_size, ranks.stage = pipeline_size, stage
    return ranks


def divided(model: GPT, pipeline_size: int, num_chunks: int) -> list[RankStages]:
    """The stages of each rank."""
    return [stages_of(model, rank_of(pipeline_size, rank), None, num_chunks) for rank in range(pipeline_size)]


@pytest.mark.parametrize(
    ("layers", "ranks", "chunks", "sizes"),
    [
        (4, 2, 1, [["0:2"], ["1:2"]]),
        (4, 2, 2, [["0:1", "2:1"], ["1:1", "3:1"]]),
        (5, 2, 2, [["0:1", "2:1"], ["1:1", "3:2"]]),
        (7, 3, 2, [["0:1", "3:1"], ["1:1", "4:1"], ["2:1", "5:2"]]),
    ],
)
def test_stages_of_ranks_take_turns(layers: int, ranks: int, chunks: int, sizes: list[list[str]]) -> None:
    found = divided(GPT(replace(GPTConfig.tiny(), num_layers=layers)), ranks, chunks)
    assert [[f"{stage.place[0]}:{len(stage.blocks)}" for stage in rank.chunks] for rank in found] == sizes


def test_stages_in_turn_compute_the_whole_model() -> None:
    model = GPT(replace(GPTConfig.tiny(), num_layers=5))
    tokens = torch.randint(256, (2, 8))
    expected, x = model(tokens), tokens
    ranks = divided(model, 2, 2)
    for chunk in range(2):
        for rank in ranks:
            x = rank.chunks[chunk](x)
    assert torch.equal(x, expected)
    trained = [parameter for rank in ranks for parameter in rank.parameters()]
    assert {id(p) for p in trained} == {id(p) for p in model.parameters()}
    assert len(trained) == len(list(model.parameters())), "each belongs to one rank"


def test_ends_of_a_pipeline_know_the_tied_matrix() -> None:
    model = GPT(replace(GPTConfig.tiny(), num_layers=6, tie_embeddings=True))
    first, middle, last = divided(model, 3, 2)
    assert first.tied is model.embedding.weight
    assert middle.tied is None
    assert last.tied is model.head.weight


def test_stages_know_their_names_in_the_whole_model() -> None:
    model = GPT(replace(GPTConfig.tiny(), num_layers=5, tie_embeddings=True))
    add_lora(model, ["q_proj", "head"])
    state, seen = model.state_dict(), set()
    for rank in divided(model, 2, 2):
        own = rank.state_dict()
        assert own.keys() == rank.whole_names.keys()
        for name, names in rank.whole_names.items():
            assert all(torch.equal(own[name], state[whole]) for whole in names), name
            seen.update(names)
    assert seen == state.keys()


@pytest.mark.parametrize(
    ("changes", "chunks", "fix"),
    [
        ({"recompute_granularity": "full"}, 1, "model.recompute_granularity=none"),
        ({"num_layers": 1}, 1, "model.num_layers=2 or more"),
        ({"num_layers": 3}, 2, "model.num_layers=4 or more"),
        (None, 1, "model.kind=gpt"),
    ],
)
def test_models_without_stages_are_refused_with_a_fix(tmp_path: Path, changes: Any, chunks: int, fix: str) -> None:
    model = moe(tiny(tmp_path)) if changes is None else GPT(replace(GPTConfig.tiny(), **changes))
    with pytest.raises(InvalidArgument, match="not-trained") as caught:
        stages_of(model, rank_of(2), None, chunks)
    assert fix in str(caught.value)
    assert "cuda_graph_scope" not in str(caught.value)


def test_weights_of_another_model_do_not_fit_stages(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    pretrain(tiny(tmp_path, train__train_iters=1, checkpoint__save=saved), device="cpu", quiet=True)
    for changes, named in (
        ({"model__num_layers": 3}, r"only in the model: blocks\.2\."),
        ({"model__ffn_hidden_size": 32}, r"size mismatch for stage_1\.blocks\.0\.mlp"),
    ):
        cfg = tiny(tmp_path, checkpoint__pretrained_checkpoint=saved, **changes)
        with pytest.raises(CheckpointError, match=named):
            _make_core(cfg, torch.device("cpu"), None, rank_of(2, 1))


@pytest.mark.parametrize(
    ("overrides", "microbatches", "named"),
    [
        ("model.pipeline_model_parallel_size=4", 3, "model.pipeline_model_parallel_size"),
        (
            "model.pipeline_model_parallel_size=2 model.virtual_pipeline_model_parallel_size=2",
            3,
            "model.virtual_pipeline_model_parallel_size=2: 3 microbatches are no multiple of 2",
        ),
        (
            "model.pipeline_model_parallel_size=2 model.cuda_graph_impl=local model.cuda_graph_scope=full_iteration",
            4,
            "full_iteration",
        ),
    ],
)
def test_schedules_refuse_what_they_cannot_run(tmp_path: Path, overrides: str, microbatches: int, named: str) -> None:
    with pytest.raises(InvalidArgument, match="not-trained") as caught:
        refuse_schedule(tiny(tmp_path).override(overrides.split()), microbatches)
    assert named in str(caught.value)
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize(("chunks", "microbatches"), [(1, 3), (2, 2), (2, 6)])
def test_schedules_take_microbatches_that_fit(tmp_path: Path, chunks: int, microbatches: int) -> None:
    cfg = tiny(tmp_path, model__pipeline_model_parallel_size=2, model__virtual_pipeline_model_parallel_size=chunks)
    refuse_schedule(cfg, microbatches)
