"""The training loop on real gloo ranks: DDP gives eager's losses for every implementation, bit for bit."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.lab.train import finetune, pretrain
from stepgraph.lab.train.checkpoint import held
from stepgraph.lab.train.ranks import Ranks
from tests.distributed.ranks import meeting_place
from tests.processes import run_to_end
from tests.train_harness import tiny

pytestmark = pytest.mark.xdist_group("training ranks")  # one worker: tests share what two ranks trained
ROOT = Path(__file__).parents[2]
Result = list[dict[str, Any]]
"""What each rank reported of a run."""


def train(folder: Path, runs: Mapping[str, Sequence[str]], ranks: int = 2) -> dict[str, Result]:
    """Run `torchrun`'s environment without torchrun: a process for each rank, which does one run after another."""
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(ranks)}
    arguments: list[str] = []
    for name, wanted in runs.items():
        (folder / name).mkdir(parents=True)
        arguments += [*(["--then"] if arguments else []), str(folder / name), *wanted]
    command = [sys.executable, str(ROOT / "tests" / "train_worker.py"), *arguments]
    with meeting_place() as place:
        environments = [os.environ | given | place | {"RANK": str(rank)} for rank in range(ranks)]
        done = run_to_end([command] * ranks, environments, ROOT)
    assert [rank.returncode for rank in done] == [0] * ranks, [rank.stderr[-3000:] for rank in done]
    return {
        name: [json.loads((folder / name / f"result_{rank}.json").read_text()) for rank in range(ranks)]
        for name in runs
    }


LONGER = ["train.train_iters=14", "train.global_batch_size=8"]
"""DDP warms up for 11 iterations before the graph of an iteration is captured."""
GATHERED = "ddp.overlap_param_gather=true"
DELAYED = ["model.delay_wgrad_compute=true", "model.gradient_accumulation_fusion=true"]
STAGES = [
    *("model.pipeline_model_parallel_size=2", "train.global_batch_size=8", "train.train_iters=5"),
    *("train.eval_interval=3", "train.eval_iters=1", "model.share_embeddings_and_output_weights=true"),
]
"""Two stages of a model with a tied embedding."""
CHUNKS = [*STAGES, "model.virtual_pipeline_model_parallel_size=2", "model.num_layers=5"]
"""Four stages of it on two ranks; the last one has two layers, the others one."""
UNTIED = [
    *("train.global_batch_size=8", "train.train_iters=3", "train.eval_interval=3", "train.eval_iters=1"),
    *("model.num_layers=4", "optimizer.clip_grad=0", "model.share_embeddings_and_output_weights=false"),
]
"""Sums that do not depend on how the model is divided."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Result]:
    """All runs of two ranks, by name."""
    short = ["train.global_batch_size=8", "train.train_iters=6"]
    each = [*short, "checkpoint.save_interval=1"]
    middle = [*short, "checkpoint.save_interval=4"]
    return train(
        folder,
        {
            "eager": ["eager", *LONGER],
            "iteration": ["iteration", *LONGER],
            "te": ["te", *LONGER],
            "short": ["te", "train.global_batch_size=8", "--short", "1"],
            "plain": ["eager", *each, saving(folder, "plain")],
            "te gathered": ["te", GATHERED, *each, saving(folder, "te gathered")],
            "te hooks": ["te", GATHERED, *middle, saving(folder, "te hooks")],
            "te resumed": ["te", GATHERED, *short, loading(folder, "te hooks", 4)],
            "stages": ["eager", *STAGES],
            "te stages": ["te", *STAGES, saving(folder, "te stages")],
            "chunks": ["eager", *CHUNKS, saving(folder, "chunks")],
            "te chunks": ["te", *CHUNKS, "checkpoint.save_interval=3", saving(folder, "te chunks")],
            "layers resumed": ["layers", *CHUNKS, "model.cuda_graph_warmup_steps=1", *resumed_from_te_chunks(folder)],
            "untied chunks": ["eager", *CHUNKS, *UNTIED, "--built", saving(folder, "untied chunks")],
            **{
                f"{name} delayed": [
                    name,
                    *DELAYED,
                    *short,
                    "checkpoint.save_interval=6",
                    saving(folder, f"{name} delayed"),
                ]
                for name in ("eager", "scopes", "te")
            },
        },
    )


@pytest.fixture(scope="module")
def trained_longer(folder: Path, trained: dict[str, Result]) -> dict[str, Result]:
    """More runs of two ranks, for the tests that only `make test-long` runs."""
    short = ["train.global_batch_size=8", "train.train_iters=6"]
    each = [*short, "checkpoint.save_interval=1"]
    return trained | train(
        folder,
        {
            "scopes": ["scopes", *LONGER],
            "eager gathered": ["eager", GATHERED, *each, saving(folder, "eager gathered")],
            "scopes gathered": ["scopes", GATHERED, *each, saving(folder, "scopes gathered")],
            "scopes hooks": ["scopes", GATHERED, *short, "checkpoint.save_interval=4", saving(folder, "scopes hooks")],
            "scopes resumed": ["scopes", GATHERED, *short, loading(folder, "scopes hooks", 4)],
            "scopes stages": ["scopes", *STAGES, saving(folder, "scopes stages")],
            "scopes delayed gathered": ["scopes", GATHERED, *DELAYED, *short],
            "te delayed gathered": ["te", GATHERED, *DELAYED, *short],
            "te layers stages": ["te", *STAGES, "model.cuda_graph_scope=[]", saving(folder, "te layers stages")],
            "layers chunks": ["layers", *CHUNKS, saving(folder, "layers chunks")],
            "scopes chunks": ["scopes", *CHUNKS, saving(folder, "scopes chunks")],
            "te layers chunks": ["te", *CHUNKS, "model.cuda_graph_scope=[]", saving(folder, "te layers chunks")],
        },
    )


def saving(folder: Path, run: str) -> str:
    return f"checkpoint.save={folder / run / 'saved'}"


def loading(folder: Path, run: str, step: int) -> str:
    return f"checkpoint.load={folder / run / 'saved' / f'step_{step:08d}'}"


def resumed_from_te_chunks(folder: Path) -> list[str]:
    return [loading(folder, "te chunks", 3), saving(folder, "layers resumed")]


def losses_of(result: Result) -> list[dict[str, float]]:
    return [rank["losses"] for rank in result]


@pytest.mark.parametrize("implementation", ["iteration", "te"])
def test_ddp_losses_equal_eager(trained: dict[str, Result], implementation: str) -> None:
    first, second = losses_of(trained["eager"])
    assert first == second, "every rank reports the mean"
    graphed = trained[implementation]
    assert losses_of(graphed) == [first, second]
    assert all(rank["replays"] > 0 for rank in graphed), graphed


@pytest.mark.long
def test_ddp_losses_of_scopes_equal_eager(trained_longer: dict[str, Result]) -> None:
    graphed = trained_longer["scopes"]
    assert losses_of(graphed) == losses_of(trained_longer["eager"])
    assert all(rank["replays"] > 0 for rank in graphed), graphed


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, id="pipeline", marks=pytest.mark.long), pytest.param(4, id="pipeline and data parallel")]
)
def test_pipeline_losses_equal_eager(tmp_path: Path, ranks: int) -> None:
    given = ["model.pipeline_model_parallel_size=2", "train.global_batch_size=16", "train.train_iters=4"]
    given += ["train.eval_interval=2", "train.eval_iters=1"]
    chunks = [*given, "model.virtual_pipeline_model_parallel_size=2", "model.num_layers=4"]
    runs = {"eager": ["eager", *given], "graphed": ["layers", *given]}
    runs |= {"eager chunks": ["eager", *chunks], "graphed chunks": ["layers", *chunks]}
    found = train(tmp_path, runs, ranks)
    for suffix in ("", " chunks"):
        assert losses_of(found[f"graphed{suffix}"]) == losses_of(found[f"eager{suffix}"])
        assert all(rank["replays"] > 0 for rank in found[f"graphed{suffix}"]), found


def test_one_rank_short_of_memory_means_all_are_eager(trained: dict[str, Result]) -> None:
    for rank in trained["short"]:
        assert rank["replays"] == 0
        assert sum(count for reason, count in rank["eager"].items() if reason.startswith("memory")) == 4


def weights(folder: Path, step: int, shard: int = 0) -> dict[str, torch.Tensor]:
    path = folder / "saved" / f"step_{step:08d}" / f"shard_{shard:05d}.pt"
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return {name: tensor for name, tensor in found.items() if name.startswith("state.model")}


def assert_equal_ends(folder: Path, last_stage: int) -> None:
    """The copies of a tied embedding on the first and the last stage stay equal."""
    first, last = (weights(folder, 5, rank) for rank in (0, 1))
    name = f"state.model.stage_{last_stage}.head.weight"
    assert torch.equal(first["state.model.stage_0.embedding.weight"], last[name])


def assert_stages_train_as_in_eager(folder: Path, found: dict[str, Result], run: str) -> None:
    assert losses_of(found[run]) == losses_of(found["stages"]), run
    assert all(rank["replays"] > 0 for rank in found[run]), found[run]
    assert_equal_ends(folder / run, 1)


def test_parts_of_stages_train_as_in_eager(folder: Path, trained: dict[str, Result]) -> None:
    assert_stages_train_as_in_eager(folder, trained, "te stages")


@pytest.mark.long
@pytest.mark.parametrize("run", ["scopes stages", "te layers stages"])
def test_other_parts_of_stages_train_as_in_eager(folder: Path, trained_longer: dict[str, Result], run: str) -> None:
    assert_stages_train_as_in_eager(folder, trained_longer, run)


def assert_same_weights(folder: Path, run: str, other: str, step: int) -> None:
    for rank in (0, 1):
        one, two = (weights(folder / name, step, rank) for name in (run, other))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), (run, rank)


def assert_chunks_train_as_in_eager(folder: Path, found: dict[str, Result], run: str) -> None:
    """Losses, evaluations and weights of an interleaved pipeline."""
    assert losses_of(found[run]) == losses_of(found["chunks"])
    assert [rank["evaluations"] for rank in found[run]] == [rank["evaluations"] for rank in found["chunks"]]
    assert all(rank["replays"] > 0 and set(rank["eager"]) == {"warm-up", "evaluation"} for rank in found[run])
    assert_same_weights(folder, run, "chunks", 5)
    assert_equal_ends(folder / run, 3)


def test_parts_of_chunks_train_as_in_eager(folder: Path, trained: dict[str, Result]) -> None:
    assert_chunks_train_as_in_eager(folder, trained, "te chunks")


@pytest.mark.long
@pytest.mark.parametrize("run", ["layers chunks", "scopes chunks", "te layers chunks"])
def test_other_parts_of_chunks_train_as_in_eager(folder: Path, trained_longer: dict[str, Result], run: str) -> None:
    assert_chunks_train_as_in_eager(folder, trained_longer, run)


def test_whole_chunks_resume_as_an_unbroken_run(folder: Path, trained: dict[str, Result]) -> None:
    for rank, unbroken in zip(trained["layers resumed"], trained["chunks"], strict=True):
        assert rank["losses"] == {step: loss for step, loss in unbroken["losses"].items() if int(step) > 3}
        assert rank["evaluations"] == {"5": unbroken["evaluations"]["5"]}
        assert rank["replays"] == 1
    assert_same_weights(folder, "layers resumed", "chunks", 5)


def test_chunks_train_as_one_process(folder: Path, tmp_path: Path, trained: dict[str, Result]) -> None:
    cfg = tiny(tmp_path).override([*UNTIED, f"checkpoint.save={tmp_path / 'saved'}"])
    report = pretrain(cfg, device="cpu", quiet=True)
    for rank in trained["untied chunks"]:
        assert rank["losses"] == {str(step): loss for step, loss in report.losses.items()}
        assert rank["evaluations"] == {str(step): loss for step, loss in report.eval_losses.items()}
    found = weights(folder / "untied chunks", 3, 0) | weights(folder / "untied chunks", 3, 1)
    for name, expected in weights(tmp_path, 3).items():
        layer = re.search(r"blocks\.(\d)", name)
        stage = int(layer[1]) if layer else 0 if "embedding" in name else 3
        inside = re.sub(r"blocks\.\d", "blocks.0", name.removeprefix("state.model."))
        assert torch.equal(found.pop(f"state.model.stage_{stage}.{inside}"), expected), name
    assert not found


def assert_gathered_equal_plain(folder: Path, found: dict[str, Result], implementation: str) -> None:
    """After each step: a checkpoint gathers all parameters, of which a rank has updated a share."""
    run = f"{implementation} gathered"
    assert losses_of(found[run]) == losses_of(found["plain"])
    assert all((rank["replays"] > 0) == (implementation != "eager") for rank in found[run])
    for step in range(1, 7):
        one, other = (weights(folder / name, step) for name in ("plain", run))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), step


def test_gathered_parameters_equal_plain_ones(folder: Path, trained: dict[str, Result]) -> None:
    assert_gathered_equal_plain(folder, trained, "te")


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["eager", "scopes"])
def test_other_gathered_parameters_equal_plain_ones(
    folder: Path, trained_longer: dict[str, Result], implementation: str
) -> None:
    assert_gathered_equal_plain(folder, trained_longer, implementation)


@pytest.mark.parametrize("implementation", ["scopes", "te"])
def test_delayed_weight_gradients_train_as_in_eager(
    folder: Path, trained: dict[str, Result], implementation: str
) -> None:
    """They are averaged after the backward; two ranks get the sums of DDP in a run without delayed gradients."""
    graphed = trained[f"{implementation} delayed"]
    assert losses_of(graphed) == losses_of(trained["eager delayed"]) == losses_of(trained["plain"])
    assert all(rank["replays"] > 0 for rank in graphed), graphed
    runs = [weights(folder / name, 6) for name in (f"{implementation} delayed", "eager delayed", "plain")]
    assert all(torch.equal(runs[0][key], other[key]) for other in runs[1:] for key in runs[0])


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["scopes", "te"])
def test_delayed_weight_gradients_of_gathered_parameters(
    trained_longer: dict[str, Result], implementation: str
) -> None:
    graphed = trained_longer[f"{implementation} delayed gathered"]
    assert losses_of(graphed) == losses_of(trained_longer["plain"])
    assert all(rank["replays"] > 0 for rank in graphed), graphed


def assert_hooks_gather(found: dict[str, Result], implementation: str) -> None:
    """No checkpoint gathers between the steps: every loss depends on what hooks gathered, also after a resume."""
    assert losses_of(found[f"{implementation} hooks"]) == losses_of(found["plain"])
    late = {step: loss for step, loss in found["plain"][0]["losses"].items() if int(step) > 4}
    assert found[f"{implementation} resumed"][0]["losses"] == late


def test_hooks_gather_before_each_use(trained: dict[str, Result]) -> None:
    assert_hooks_gather(trained, "te")


@pytest.mark.long
def test_hooks_of_scopes_gather_before_each_use(trained_longer: dict[str, Result]) -> None:
    assert_hooks_gather(trained_longer, "scopes")


TUNED = [*UNTIED, "dataset.kind=sft"]
LORA = ["peft.scheme=lora", "peft.dim=4"]
DIVIDED = {
    "tuned stages": ["te", *TUNED, "model.pipeline_model_parallel_size=2"],
    "tuned chunks": ["eager", *CHUNKS, *TUNED],
    "lora stages": ["eager", *TUNED, *LORA, "model.pipeline_model_parallel_size=2"],
    "tuned data parallel": ["eager", *TUNED],
}
"""Fine-tuning on two ranks, of weights that one process has saved."""


def pretrained_by_one(folder: Path) -> str:
    """Pretrain in this process; return the setting that names the checkpoint."""
    saved = folder / "one" / "saved"
    if not saved.exists():
        pretrain(tiny(folder / "one").override([*UNTIED, f"checkpoint.save={saved}"]), device="cpu", quiet=True)
    return f"checkpoint.pretrained_checkpoint={saved}"


def tuned_by_one(folder: Path, *settings: str) -> dict[str, dict[str, float]]:
    """Fine-tune in this process; return the losses as a rank writes them."""
    report = finetune(tiny(folder).override([*TUNED, *settings]), device="cpu", quiet=True)
    found = {"losses": report.losses, "evaluations": report.eval_losses}
    return {name: {str(step): loss for step, loss in values.items()} for name, values in found.items()}


@pytest.fixture(scope="module")
def tuned(folder: Path) -> dict[str, Result]:
    """Runs of two ranks that begin with weights of one process."""
    start = pretrained_by_one(folder)
    return train(folder, {run: [*given, start, "--built", saving(folder, run)] for run, given in DIVIDED.items()})


@pytest.mark.parametrize("run", ["tuned stages", "tuned chunks", "lora stages"])
def test_stages_start_from_weights_of_one_process(
    folder: Path, tmp_path: Path, tuned: dict[str, Result], run: str
) -> None:
    settings = LORA if run == "lora stages" else []
    expected = tuned_by_one(tmp_path, *settings, pretrained_by_one(folder))
    for rank in tuned[run]:
        assert {name: rank[name] for name in expected} == expected
    anew = tuned_by_one(tmp_path, *settings)
    assert anew["losses"]["1"] != expected["losses"]["1"], "the weights are those of the checkpoint"


def test_data_parallel_ranks_start_from_weights_of_one(tuned: dict[str, Result]) -> None:
    """The means of two microbatches each, averaged, differ from the mean of four in their last bits."""
    assert losses_of(tuned["tuned data parallel"])[0]["1"] == pytest.approx(tuned["tuned stages"][0]["losses"]["1"])


@pytest.mark.parametrize("run", ["tuned stages", "tuned chunks"])
def test_one_process_starts_from_weights_of_stages(
    folder: Path, tmp_path: Path, tuned: dict[str, Result], run: str
) -> None:
    assert tuned[run]
    one = tmp_path / "saved"
    tuned_by_one(tmp_path, pretrained_by_one(folder), f"checkpoint.save={one}")
    losses = [
        tuned_by_one(tmp_path, f"checkpoint.pretrained_checkpoint={saved}")["losses"]
        for saved in (one, folder / run / "saved")
    ]
    assert losses[0] == losses[1]


def test_second_run_of_a_torchrun_program_has_a_group_of_its_own(tmp_path: Path) -> None:
    given = ["eager", "train.train_iters=2", "--own-groups"]
    found = train(tmp_path, dict.fromkeys(("first", "second", "third"), given))
    assert found["second"] == found["first"]
    assert found["third"] == found["first"]


def test_all_ranks_refuse_a_folder_that_another_run_saves_to(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    arguments = [str(tmp_path / "run"), "eager", "train.train_iters=2", f"checkpoint.save={saved}"]
    (tmp_path / "run").mkdir()
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    command = [sys.executable, str(ROOT / "tests" / "train_worker.py"), *arguments]
    with held(saved, Ranks()), meeting_place() as place:
        done = run_to_end([command] * 2, [os.environ | given | place | {"RANK": str(rank)} for rank in range(2)], ROOT)
    assert [rank.returncode for rank in done] == [1, 1]
    assert "another run saves to" in done[0].stderr
    assert f"checkpoints cannot be saved to {saved}: rank 0 failed" in done[1].stderr
    assert not [path for path in saved.iterdir() if path.name.startswith("step_")]
