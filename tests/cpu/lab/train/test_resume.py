"""A resumed run has all that the first one had, or is refused: state, data, and the folder to itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.lab.train import pretrain
from stepgraph.lab.train.checkpoint import CheckpointError, held, load, save
from stepgraph.lab.train.data import TokenWindows, digest_of_tokens
from stepgraph.lab.train.instruction_data import Instructions, example_of
from stepgraph.lab.train.ranks import Ranks
from tests.train_harness import gpt, tiny

SMALL = {"model__num_layers": 1, "train__train_iters": 2}


def train(folder: Path, **settings: Any) -> Any:
    return pretrain(tiny(folder, **(SMALL | settings)), model_provider=gpt, device="cpu", quiet=True)


def first_run(folder: Path, **settings: Any) -> str:
    """Train two iterations; return the folder of the checkpoint."""
    saved = str(folder / "saved")
    train(folder, checkpoint__save=saved, **settings)
    return saved


def rewritten(saved: str, change: Callable[[dict[str, Any], dict[str, Any]], Any], folder: Path) -> str:
    """A checkpoint whose states were changed, with manifest and digests that fit."""
    found = load(Path(saved), Ranks())
    change(found.shard, found.rank)
    return str(save(folder, found.step, shard=found.shard, rank=found.rank, config=found.config, ranks=Ranks()))


@pytest.mark.parametrize("name", ["optim", "rng"])
def test_resume_without_a_state_is_refused(tmp_path: Path, name: str) -> None:
    saved = first_run(tmp_path, **{f"checkpoint__save_{name}": False})
    with pytest.raises(CheckpointError, match=r"has no (state of the optimizer|random states)") as caught:
        train(tmp_path, checkpoint__load=saved, train__train_iters=3)
    assert caught.value.rule == "checkpoint"
    assert f"checkpoint.load_{name}=false" in caught.value.fix
    found = train(tmp_path, checkpoint__load=saved, train__train_iters=3, **{f"checkpoint__load_{name}": False})
    assert found.step == 3


def of_optimizer(values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(shard: dict[str, Any], rank: dict[str, Any]) -> None:
        state = shard["optimizer"]["state"]
        state[next(iter(state))].update(values)

    return change


CRAFTED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "optimizer of another shape": (of_optimizer({"exp_avg": torch.zeros(3)}), "the state of the optimizer"),
    "optimizer with another name": (of_optimizer({"momentum": torch.zeros(())}), "the state of the optimizer"),
    "optimizer of numbers": (of_optimizer({"exp_avg": 3}), "the state of the optimizer"),
    "optimizer without groups": (lambda s, r: s["optimizer"].pop("param_groups"), "the state of the optimizer"),
    "optimizer of a list": (lambda s, r: s.update(optimizer=[1]), "the state of the optimizer"),
    "no data": (lambda s, r: r.pop("data"), "the position in the data"),
    "negative position": (lambda s, r: r["data"].update(position=-5), "the position in the data"),
    "position of another type": (lambda s, r: r["data"].update(position="5"), "the position in the data"),
    "no model": (lambda s, r: s.pop("model"), "the model"),
    "model of a list": (lambda s, r: s.update(model=[1, 2]), "the model"),
    "model of numbers": (lambda s, r: s.update(model={3: 4}), "the model"),
    "random states of a list": (lambda s, r: r.update(random=[1]), "the random states"),
    "short random state": (lambda s, r: r["random"].update(cpu=torch.zeros(3)), "the random states"),
    "python's random state": (lambda s, r: r["random"].update(python=(3, (1, 2), None)), "the random states"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return first_run(tmp_path_factory.mktemp("resume"))


@pytest.mark.parametrize("name", CRAFTED)
def test_resume_names_the_crafted_state(tmp_path: Path, saved: str, name: str) -> None:
    change, what = CRAFTED[name]
    crafted = rewritten(saved, change, tmp_path / "crafted")
    with pytest.raises((CheckpointError, InvalidArgument), match=what) as caught:
        train(tmp_path, checkpoint__load=crafted, train__train_iters=3)
    assert caught.value.rule == "checkpoint"
    assert "step_00000002" in str(caught.value)


def test_resume_with_other_tokens_of_equal_length_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    file.write_bytes(array("H", [n % 90 for n in range(500)]).tobytes())
    given = {"dataset__kind": "tokens", "dataset__data_path": str(file)}
    saved = first_run(tmp_path, **given)
    assert train(tmp_path, checkpoint__load=saved, train__train_iters=3, **given).step == 3
    file.write_bytes(array("H", [n % 91 for n in range(500)]).tobytes())
    with pytest.raises(InvalidArgument, match="position in other data") as caught:
        train(tmp_path, checkpoint__load=saved, train__train_iters=3, **given)
    assert caught.value.rule == "data"


def test_fingerprint_of_tokens_is_of_their_bytes() -> None:
    tokens = torch.arange(5000, dtype=torch.int32)
    whole = TokenWindows(tokens, 10, 1, "x").fingerprint
    assert whole.endswith(digest_of_tokens(tokens.clone()))
    other = tokens.clone()
    other[-1] = 0
    assert TokenWindows(other, 10, 1, "x").fingerprint != whole
    assert digest_of_tokens(tokens[7:9]) == digest_of_tokens(torch.tensor([7, 8], dtype=torch.int32))


def test_fingerprint_of_examples_is_of_their_tokens() -> None:
    def fingerprint(answer: int) -> str:
        return Instructions([example_of([1, 2], [answer], 8)], 8, 1, packed=False, name="x").fingerprint

    assert fingerprint(3) == fingerprint(3) != fingerprint(4)


HOLDER = """
import sys, time
from pathlib import Path
from stepgraph.lab.train.checkpoint import held
from stepgraph.lab.train.ranks import Ranks
with held(Path(sys.argv[1]), Ranks()):
    print("held", flush=True)
    time.sleep(60)
"""


def test_second_run_in_one_folder_is_refused(tmp_path: Path) -> None:
    """The lock of a run ends with its process, however that ends."""
    folder = tmp_path / "saved"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"another run saves to .*: process {other.pid} on") as caught:
            train(tmp_path, checkpoint__save=str(folder))
        assert caught.value.rule == "checkpoint-folder"
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert train(tmp_path, checkpoint__save=str(folder)).step == 2
    with held(folder, Ranks()):
        pass


def test_most_recent_checkpoints_of_a_run_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (folder / "step_00000000").mkdir(parents=True)
    (folder / "step_00000000" / "notes.txt").write_text("of another program")
    given = {"checkpoint__save_interval": 1, "checkpoint__most_recent_k": 2, "train__train_iters": 4}
    train(tmp_path, checkpoint__save=str(folder), **given)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        *("step_00000000", "step_00000003", "step_00000004")
    ]
    rows = [json.loads(line) for line in (tmp_path / "stepgraph-train.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "checkpoint"] == [1, 2, 3, 4]
