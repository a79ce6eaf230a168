"""`stepgraph bench` on a GPU: a run has all its figures, and every mechanism trains what eager trains."""

from __future__ import annotations

import pytest
import torch

from stepgraph.config.container import ConfigContainer
from stepgraph.config.environment import Environment
from stepgraph.lab import recipes
from stepgraph.lab.bench.hardware import find_gpu
from stepgraph.lab.bench.mechanisms import mechanisms_for, named
from stepgraph.lab.bench.run import BenchResult, benchmark

pytestmark = pytest.mark.gpu


def small() -> ConfigContainer:
    cfg = recipes.gpt2_small()
    cfg.model.num_layers, cfg.model.hidden_size, cfg.model.num_attention_heads = 2, 128, 2
    cfg.model.ffn_hidden_size, cfg.model.seq_length, cfg.model.vocab_size = 512, 64, 512
    cfg.train.micro_batch_size, cfg.train.global_batch_size = 1, 2
    return cfg


def run(name: str) -> BenchResult:
    mechanism = named(name, mechanisms_for(small(), Environment.read("cuda")))
    cfg = mechanism.configured(small())
    return benchmark(cfg, device=torch.device("cuda"), steps=4, gpu=find_gpu("h100"), implementation=mechanism.make)


def test_bench_run_has_all_its_figures_on_a_gpu() -> None:
    found = run("ours-whole")
    values = found.to_dict()
    for name in ("step_ms", "step_ms_p10", "step_ms_p90", "tflops_per_gpu", "mfu", "tokens_per_s", "kernels"):
        assert values[name] > 0, name
    assert 0 < values["busy_fraction"] <= 1
    assert values["graph_launches"] >= 1
    assert values["capture_seconds"] > 0
    assert values["replays"] >= 4
    memory = values["memory"]
    assert memory["reserved"] >= memory["allocated"] > 0
    assert memory["over_eager"] > 0
    assert values["losses"] == run("eager").to_dict()["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compile", "reduce-overhead", "torch-callables", "ours-whole-compile"])
def test_bench_mechanism_trains_alike_on_a_gpu(name: str) -> None:
    eager, found = run("eager").to_dict()["losses"], run(name).to_dict()["losses"]
    assert found.keys() == eager.keys()
    for step in ("1", "2", "3"):
        assert found[step] == pytest.approx(eager[step], rel=1e-2), step
