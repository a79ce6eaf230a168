"""A training process that is parked at a place, for tests that send it signals or start several ranks.

    python tests/train_worker.py FOLDER IMPLEMENTATION [section.field=value ...] [--park PLACE] [--built]
    python tests/train_worker.py FOLDER ... --then FOLDER ... --then FOLDER ...

Parked, it writes `parked_<rank>` to FOLDER and waits for a signal. In the end it writes its losses there, as JSON. One
process can do several runs, one after another in one process group: to start a process takes longer than a run. With
`--own-groups` each run has a process group of its own, as under torchrun.
With `--built` the model is the one that the configuration describes, which has no dropout by default.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph.lab.models import GPT
from stepgraph.lab.train import finetune, pretrain
from stepgraph.lab.train.memory import DeviceMemory
from tests.distributed.ranks import end_together
from tests.train_harness import gpt, tiny

RANK = int(os.environ.get("RANK", "0"))


class Parked:
    """Waits at a place, once, until a signal arrives: `time.sleep` returns to Python, which runs the handler."""

    def __init__(self, folder: Path, place: str) -> None:
        self.folder, self.place, self.was_here = folder, place, False

    def __call__(self, name: str, step: int) -> None:
        if name == self.place and not self.was_here and (name != "replay" or step == 4):
            self.was_here = True
            (self.folder / f"parked_{RANK}").write_text(str(step))
            until = time.monotonic() + 60
            while not (self.folder / "go_on").exists() and time.monotonic() < until:
                time.sleep(0.01)


class Watched(GPT):
    """A model that parks inside its forward while it is recorded."""

    parked: list[Parked]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if stepgraph.is_graph_capturing():
            self.parked[0]("recording", 0)
        return super().forward(tokens, targets, **kwargs)


def watched(cfg: Any, parked: Parked) -> nn.Module:
    model = gpt(cfg)
    model.__class__, model.parked = Watched, [parked]
    return model


def main(folder: Path, implementation: str, *arguments: str) -> None:
    place = arguments[arguments.index("--park") + 1] if "--park" in arguments else ""
    parked = Parked(folder, place)
    cfg = tiny(folder / f"log_{RANK}", implementation)
    cfg.override(text for text in arguments if "=" in text)
    provider = (lambda cfg: watched(cfg, parked)) if place == "recording" else None if "--built" in arguments else gpt
    run = finetune if cfg.dataset.kind == "sft" else pretrain
    is_short = "--short" in arguments and int(arguments[arguments.index("--short") + 1]) == RANK
    with short_of_memory() if is_short else contextlib.nullcontext():
        report = run(cfg, model_provider=provider, device="cpu", on_event=parked, quiet="--loud" not in arguments)
    found = {"losses": report.losses, "replays": report.replays, "eager": dict(report.eager_reasons)}
    found["evaluations"] = report.eval_losses
    (folder / f"result_{RANK}.json").write_text(json.dumps(found))


@contextlib.contextmanager
def short_of_memory() -> Iterator[None]:
    known = DeviceMemory.free
    DeviceMemory.free = lambda self: 1000  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMemory.free = known  # type: ignore[method-assign]


def split(arguments: Sequence[str]) -> list[list[str]]:
    """The arguments of each run."""
    runs: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--then":
            runs.append([])
        else:
            runs[-1].append(argument)
    return runs


def run_all(runs: Sequence[Sequence[str]]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    is_shared = len(runs) > 1 and "--own-groups" not in runs[0]
    if is_shared:
        dist.init_process_group("gloo")
    for folder, *arguments in runs:
        main(Path(folder), *arguments)
    if is_shared:
        end_together()


if __name__ == "__main__":
    run_all(split(sys.argv[1:]))
