"""Checkpoints: all state comes back, nothing in a file is run, and a failed save leaves the last good one alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.engine.backends.random.tracker import get_cuda_rng_tracker
from stepgraph.lab.train.checkpoint import (
    CheckpointError,
    checkpoints_in,
    digest_of,
    held,
    keep_most_recent,
    load,
    load_weights,
    refuse_later_checkpoints,
    save,
)
from stepgraph.lab.train.plain_state import join, split
from stepgraph.lab.train.random_state import get_random_states, set_random_states
from stepgraph.lab.train.ranks import Ranks

CPU = torch.device("cpu")


class Planted:
    """Pickled, it makes whoever loads it create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def write(folder: Path, step: int, size: int = 4) -> Path:
    state = {"model": {"weight": torch.full((size,), float(step))}, "lr": 0.1}
    return save(folder, step, shard=state, rank={"position": step}, config={"seed": 1}, ranks=Ranks())


def relist(path: Path, name: str) -> None:
    """Make the manifest agree with a changed file, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text())
    data = (path / name).read_bytes()
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest_of(manifest)}))


def edit_manifest(path: Path, *, is_signed: bool = True, **fields: Any) -> None:
    """Change fields of the manifest, and its digest with them."""
    manifest = json.loads((path / "manifest.json").read_text()) | fields
    digest = {"sha256": digest_of(manifest)} if is_signed else {}
    (path / "manifest.json").write_text(json.dumps(manifest | digest))


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, 2.5, float("inf"), -0.0, None, True, "x"], 3: ("t", [])},
        {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}}, "betas": (0.9, 0.95)},
        {"bf16": torch.randn(3).bfloat16(), "long": torch.arange(4), "empty": torch.empty(0)},
    ],
)
def test_split_and_join_give_back_the_state(state: Any) -> None:
    value, tensors = split(state)
    again = join(json.loads(json.dumps(value, allow_nan=False)), tensors)
    assert repr(again) == repr(state)


def test_split_refuses_other_objects() -> None:
    with pytest.raises(ValueError, match=r"`state.a` is a Path.*|`state.a` is a PosixPath"):
        split({"a": Path()})


def test_save_and_load_keep_every_bit(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + 0.2)
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    shard = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(tmp_path, 7, shard=shard, rank={"random": get_random_states(CPU)}, config={}, ranks=Ranks())
    saved = load(tmp_path, Ranks())
    assert saved.step == 7
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.shard["model"][name])
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(saved.shard["optimizer"])
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


def test_random_states_come_back() -> None:
    tracker = get_cuda_rng_tracker("cpu")
    tracker.reset()
    tracker.add("model-parallel-rng", 5)

    def draw() -> list[Any]:
        with tracker.fork():
            named = torch.rand(3).tolist()
        return [torch.rand(3).tolist(), named, random.random()]

    try:
        value, tensors = split(get_random_states(CPU))
        first = draw()
        set_random_states(join(json.loads(json.dumps(value)), tensors), CPU)
        assert draw() == first
    finally:
        tracker.reset()


def test_load_takes_the_latest_finished_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 5)
    write(tmp_path, 100)
    (tmp_path / "step_00000200.partial").mkdir()
    assert load(tmp_path, Ranks()).step == 100
    assert load(tmp_path / "step_00000005", Ranks()).step == 5
    write(tmp_path, 300)
    assert not list(tmp_path.glob("*.partial")), "a save cleans up what an earlier one left"
    with pytest.raises(CheckpointError, match="step_00000300"):
        refuse_later_checkpoints(tmp_path, 100)
    refuse_later_checkpoints(tmp_path, 300)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


TENSORS = "safetensors" if importlib.util.find_spec("safetensors") is not None else "pt"
FILES = (
    f"shard_00000.{TENSORS}",
    "shard_00000.json",
    f"rank_00000.{TENSORS}",
    "rank_00000.json",
    "config.json",
    "manifest.json",
)


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip])
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    damage(path / name)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, Ranks())
    assert "step_00000001" in caught.value.fix
    assert name in str(caught.value) or name == "manifest.json"
    assert load(tmp_path / "step_00000001", Ranks()).step == 1


@pytest.mark.parametrize("relisted", [False, True])
@pytest.mark.parametrize("name", [*FILES, "planted.pkl"])
def test_planted_pickle_is_refused_and_not_run(tmp_path: Path, name: str, relisted: bool) -> None:
    path = write(tmp_path / "saved", 1)
    (path / name).write_bytes(pickle.dumps(Planted(tmp_path / "run")))
    if relisted and name not in ("manifest.json", "planted.pkl"):
        relist(path, name)
    with pytest.raises(CheckpointError, match=name):
        load(path, Ranks())
    assert not (tmp_path / "run").exists()


def test_pickle_in_a_torch_file_is_not_run(tmp_path: Path) -> None:
    path = write(tmp_path / "saved", 1)
    name = f"shard_00000.{TENSORS}"
    torch.save({"state": Planted(tmp_path / "run")}, path / name)
    relist(path, name)
    with pytest.raises(CheckpointError, match=name):
        load(path, Ranks())
    assert not (tmp_path / "run").exists()


def test_load_refuses_another_number_of_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    edit_manifest(path, world_size=4)
    with pytest.raises(CheckpointError, match="saved by 4 ranks"):
        load(path, Ranks())


def test_file_size_limit_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="was not written") as caught:
            write(tmp_path, 2, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step_00000001" in caught.value.why
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert load(tmp_path, Ranks()).step == 1
    assert load(write(tmp_path, 2), Ranks()).step == 2, "saving works again afterwards"


def test_full_device_gives_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full refuses every write with ENOSPC; the tensors of the checkpoint are written there."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    write(tmp_path, 1)
    real = Path.open

    def redirected(self: Path, *args: Any, **kwargs: Any) -> Any:
        return real(Path("/dev/full") if self.suffix == f".{TENSORS}" else self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", redirected)
    with pytest.raises(CheckpointError, match="was not written"):
        write(tmp_path, 2, size=1_000_000)
    monkeypatch.undo()
    assert [step for step, _ in checkpoints_in(tmp_path)] == [1]
    shutil.rmtree(tmp_path)


def write_stages(folder: Path, **second: Any) -> Path:
    """Write what two ranks of a pipeline save, with other entries for the second."""
    shards = [
        {"model": {"stage_0.a": torch.zeros(2)}, "names": {"stage_0.a": ["blocks.0.a", "head.a"]}},
        {"model": {"stage_1.a": torch.ones(2)}, "names": {"stage_1.a": ["blocks.1.a"]}, **second},
    ]
    parts = []
    for stage, shard in enumerate(shards):
        part = save(folder / str(stage), 5, shard=shard, rank={}, config={}, ranks=Ranks())
        for file in list(part.glob("shard_*")):
            file.rename(part / file.name.replace("00000", f"{stage:05d}"))
        parts.append(part)
    manifest = json.loads((parts[0] / "manifest.json").read_text())
    for file in parts[1].glob("shard_*"):
        shutil.move(file, parts[0])
    (parts[0] / "manifest.json").write_text(json.dumps(manifest | {"world_size": 2, "pipeline_size": 2}))
    for file in list(parts[0].glob("shard_00001*")):
        relist(parts[0], file.name)
    return parts[0]


def test_weights_have_the_names_of_the_whole_model(tmp_path: Path) -> None:
    found = load_weights(write_stages(tmp_path)).tensors
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "blocks.0.a": [0, 0],
        "head.a": [0, 0],
        "blocks.1.a": [1, 1],
    }
    plain = load_weights(write(tmp_path / "plain", 3).parent).tensors
    assert {name: tensor.tolist() for name, tensor in plain.items()} == {"weight": [3.0] * 4}


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"names": None}, r"does not say which part of the model its 2 pipeline ranks had.*\[checkpoint\]"),
        ({"names": {"stage_1.b": ["b"]}}, r"shard_00001.json cannot be used: it does not name all weights"),
        ({"model": None}, r"shard_00001.json cannot be used: it has no weights"),
    ],
)
def test_weights_of_stages_without_names_are_refused(tmp_path: Path, second: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as caught:
        load_weights(write_stages(tmp_path, **second))
    assert "Fix: " in str(caught.value)


# -- what is not a checkpoint of ours


def test_manifest_that_changed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    edit_manifest(path, is_signed=False, step=7)
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be used: its contents changed") as caught:
        load(tmp_path, Ranks())
    assert caught.value.rule == "checkpoint-damaged"
    edit_manifest(path, step=7)
    with pytest.raises(CheckpointError, match="it is of step 7, and the folder of step 5"):
        load(path, Ranks())
    path.rename(tmp_path / "best")  # a name that says nothing
    assert load(tmp_path / "best", Ranks()).step == 7


@pytest.mark.parametrize("fields", [{"step": True}, {"step": "5"}, {"world_size": None}, {"files": []}])
def test_manifest_of_other_types_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    edit_manifest(write(tmp_path, 5), **fields)
    with pytest.raises(CheckpointError, match="it is not a manifest of stepgraph-checkpoint-1"):
        load(tmp_path, Ranks())


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # a file whose reading fails


@pytest.mark.parametrize("change", [pipe, folder, unreadable])
@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.json", "config.json", "shard_00000.pt"])
def test_pipes_and_folders_in_a_checkpoint_are_named(tmp_path: Path, change: Callable[[Path], None], name: str) -> None:
    path = write(tmp_path, 5)
    change(path / name)
    with pytest.raises(CheckpointError, match=name) as caught:
        load(tmp_path, Ranks())
    assert caught.value.rule == "checkpoint-damaged"
    assert "it is missing" not in str(caught.value)


@pytest.mark.parametrize("name", ["run", "step_00000005"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_text("weights")])
def test_pipe_or_file_as_a_checkpoint_is_named(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    make(tmp_path / name)
    for read in (lambda path: load(path, Ranks()), load_weights):
        with pytest.raises(CheckpointError, match=f"{name} is not a folder") as caught:
            read(tmp_path / name)
        assert caught.value.rule == "checkpoint"
    with pytest.raises(CheckpointError, match=r"has no checkpoint: .*too long"):
        load(tmp_path / ("x" * 300), Ranks())


@pytest.mark.parametrize(
    "crafted",
    [
        {"dict": [["step", {"float": "0x1p99999"}]]},
        {"dict": [["step", {"tensor": ["state"]}]]},
        {"dict": [[{"list": []}, 1]]},
        {"list": [1]},
    ],
)
def test_crafted_json_is_named(tmp_path: Path, crafted: Any) -> None:
    path = write(tmp_path, 5)
    (path / "rank_00000.json").write_text(json.dumps(crafted))
    relist(path, "rank_00000.json")
    with pytest.raises(CheckpointError, match=r"rank_00000\.json") as caught:
        load(tmp_path, Ranks())
    assert caught.value.rule == "checkpoint-damaged"


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:TypedStorage", "ignore:Sparse")
@pytest.mark.parametrize("name", ["sparse", "quantized", "meta", "parameter", "number"])
def test_other_tensors_than_a_save_writes_are_named(tmp_path: Path, name: str) -> None:
    made: dict[str, Callable[[], Any]] = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "meta": lambda: torch.empty(2, device="meta"),
        "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
        "number": lambda: 3,
    }
    path = write(tmp_path, 5)
    torch.save({"state.model.weight": made[name]()}, path / "shard_00000.pt")
    relist(path, "shard_00000.pt")
    with pytest.raises(CheckpointError, match="it holds something else than tensors"):
        load(tmp_path, Ranks())


def test_only_checkpoints_of_ours_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    others = tmp_path / "step_00000000"
    others.mkdir()
    (others / "notes.txt").write_text("of another program")
    (tmp_path / "step_00000005").symlink_to(tmp_path / "step_00000001")
    (tmp_path / "step_00000002" / "notes.txt").write_text("mine")
    (tmp_path / "step_00000099.partial").write_text("a file")
    said = keep_most_recent(tmp_path, 1)
    assert [path.name for _, path in checkpoints_in(tmp_path)] == ["step_00000000", "step_00000002", "step_00000004"]
    assert (tmp_path / "step_00000002" / "notes.txt").read_text() == "mine"
    assert len(said) == 1
    assert "step_00000002 was not removed" in said[0]
    assert (others / "notes.txt").exists()


def test_folder_is_held_by_one_run(tmp_path: Path) -> None:
    with held(tmp_path, Ranks()):
        text = f"another run saves to .*: process {os.getpid()} on"
        with pytest.raises(CheckpointError, match=text) as caught, held(tmp_path, Ranks()):
            pass
        assert caught.value.rule == "checkpoint-folder"
        write(tmp_path, 5)
        assert load(tmp_path, Ranks()).step == 5, "it may be read"
    with held(tmp_path, Ranks()):
        pass


def test_folder_named_as_a_checkpoint_is_not_called_another_run(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    later = tmp_path / "step_00000200"
    later.mkdir()
    with pytest.raises(CheckpointError, match=r"step_00000200 without a manifest\.json of ours") as raised:
        refuse_later_checkpoints(tmp_path, 100)
    assert raised.value.rule == "checkpoint-folder"
