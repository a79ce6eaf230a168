"""Wrong arguments of `pretrain` are answered with what, why and fix, before or at the first iteration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.core.errors import InvalidArgument
from stepgraph.lab.train import finetune, pretrain
from stepgraph.lab.train.checkpoint import checkpoints_in
from tests.train_harness import gpt, tiny


class Plain(nn.Module):
    """A model without layers of a known class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, 8), nn.Linear(8, 128)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        return F.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), targets.flatten())


class Pair(Plain):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        return super().forward(tokens, targets), 1


class Logits(Plain):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.head(self.embedding(tokens))


class NoTargets(Plain):
    def forward(self, tokens: torch.Tensor) -> Any:  # type: ignore[override]
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize(
    ("provider", "what"),
    [
        (lambda cfg: Pair(), "returned a tuple"),
        (lambda cfg: Logits(), "a tensor of shape"),
        (lambda cfg: NoTargets(), "does not take `tokens` and `targets`"),
        (lambda cfg: None, "returned None"),
        (lambda: Plain(), "not a function of the configuration"),
        (Plain(), "not a function of the configuration"),
        ("gpt", "not a function of the configuration"),
    ],
)
def test_providers_that_give_no_loss_are_refused(tmp_path: Path, provider: Any, what: str) -> None:
    with pytest.raises(InvalidArgument, match="option") as caught:
        pretrain(tiny(tmp_path), model_provider=provider, device="cpu", quiet=True)
    assert what in str(caught.value)


@pytest.mark.parametrize("train", [pretrain, finetune])
def test_configuration_of_another_type_is_refused(train: Any) -> None:
    with pytest.raises(InvalidArgument, match="from_dict"):
        train({"model": {}}, device="cpu")


@pytest.mark.parametrize("implementation", ["scopes", "layers", "te"])
def test_model_without_known_layers_is_refused(tmp_path: Path, implementation: str) -> None:
    with pytest.raises(InvalidArgument, match="scope"):
        pretrain(tiny(tmp_path, implementation), model_provider=lambda cfg: Plain(), device="cpu", quiet=True)


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        *(("eager", None), ("eager", 4), ("iteration", None), ("iteration", 4), ("scopes", None), ("te", 4)),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("layers", None), ("layers", 4), ("te", None))),
    ],
)
def test_delayed_gradients_train_all_weights(tmp_path: Path, implementation: str, kind: int | None) -> None:
    seen: dict[str, Any] = {}

    def provider(cfg: Any) -> nn.Module:
        from stepgraph.lab.recipes.build import build_model

        seen["model"] = build_model(cfg.model)
        seen["before"] = {name: p.detach().clone() for name, p in seen["model"].named_parameters()}
        return seen["model"]  # type: ignore[no-any-return]

    changes: dict[str, Any] = {"model__num_moe_experts": kind, "model__num_layers": 1, "train__train_iters": 4}
    changes |= {"model__delay_wgrad_compute": True, "model__gradient_accumulation_fusion": True}
    report = pretrain(tiny(tmp_path, implementation, **changes), model_provider=provider, device="cpu", quiet=True)
    assert (report.replays > 0) == (implementation != "eager")
    still = [name for name, p in seen["model"].named_parameters() if torch.equal(p, seen["before"][name])]
    assert still == []


def test_save_folder_is_tried_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cfg, seen = tiny(tmp_path, checkpoint__save=str(tmp_path / "file" / "saved")), []
    with pytest.raises(RuntimeError, match="checkpoint-write"):
        pretrain(cfg, model_provider=gpt, device="cpu", on_event=lambda *event: seen.append(event), quiet=True)
    assert seen == []


def test_resume_at_the_end_says_so(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    pretrain(tiny(tmp_path, checkpoint__save=saved), model_provider=gpt, device="cpu", quiet=True)
    cfg = tiny(tmp_path, "te", checkpoint__load=saved, checkpoint__save=saved)
    report = pretrain(cfg, model_provider=gpt, device="cpu", quiet=True)
    assert "nothing was left to train after iteration" in report.verdict
    assert "NOTHING WAS REPLAYED" not in str(report)
    assert [step for step, _ in checkpoints_in(Path(saved))] == [6]


@pytest.mark.parametrize(("implementation", "of_each"), [("iteration", 1), ("scopes", 4), ("te", 2)])
def test_rows_count_the_replays_of_their_step(tmp_path: Path, implementation: str, of_each: int) -> None:
    cfg = tiny(tmp_path, implementation, model__num_layers=1)
    report = pretrain(cfg, model_provider=gpt, device="cpu", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "stepgraph-train.jsonl").read_text().splitlines()]
    counts = [row["replays"] for row in rows if row["kind"] == "train"]
    assert counts == [0, 0, *(of_each * number for number in range(1, 5))]
    assert counts[-1] == report.replays
