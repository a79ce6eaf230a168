"""A training process that is parked at a place, for tests that send it signals or start several ranks.

    python tests/train_worker.py FOLDER IMPLEMENTATION [section.field=value ...] [--park PLACE] [--settings]

Parked, it writes `parked_<rank>` to FOLDER and waits for a signal. In the end it writes its losses there, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stepgraph
from stepgraph.models import GPT
from stepgraph.train import finetune, pretrain
from stepgraph.train.memory import DeviceMemory
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
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    place = arguments[arguments.index("--park") + 1] if "--park" in arguments else ""
    parked = Parked(folder, place)
    if "--short" in arguments and int(arguments[arguments.index("--short") + 1]) == RANK:
        DeviceMemory.free = lambda self: 1000  # type: ignore[method-assign]
    cfg = tiny(folder / f"log_{RANK}", implementation)
    cfg.override(text for text in arguments if "=" in text)
    provider = (lambda cfg: watched(cfg, parked)) if place == "recording" else gpt
    run = finetune if cfg.dataset.kind == "sft" else pretrain
    report = run(cfg, model_provider=provider, device="cpu", on_event=parked, quiet="--loud" not in arguments)
    found = {"losses": report.losses, "replays": report.replays, "eager": dict(report.eager_reasons)}
    (folder / f"result_{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
