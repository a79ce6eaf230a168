"""Arguments that a graphed module writes to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.module_harness import Training, assert_graphed_equals_eager, quiet, training_of


class Writes(nn.Module):
    """Writes to an argument, as a cache is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.mul_(0.5).add_(x.detach())
        return self.inner(x) + cache


def test_arguments_written_to_are_the_callers(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        cache = torch.zeros(4, 8, device=device)
        return training_of(
            lambda: nn.ModuleDict({"part": Writes()}),
            device,
            call=lambda model, x: model["part"](x, cache),
            tensors=[cache],
        )

    assert_graphed_equals_eager(build, device, "part")


@pytest.mark.parametrize("what", ["a computed tensor", "a view of another argument"])
def test_arguments_written_where_copying_back_fails_run_eager(what: str, device: torch.device) -> None:
    """An in-place change that autograd has to know of, or that another argument shows, cannot be copied back."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            y.mul_(2)
            return self.inner(x) + y

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if what == "a computed tensor":
            y = model["embed"](x)
            return model["part"](x, y) + y
        both = x.clone()
        return model["embed"](model["part"](both, both[:1]))

    with quiet():
        report = assert_graphed_equals_eager(
            lambda device: training_of(
                lambda: nn.ModuleDict({"embed": nn.Linear(8, 8), "part": InPlace()}), device, call=call
            ),
            device,
            "part",
            replays=False,
        )
    assert report.replays == 0
    assert any("capture failed" in reason for reason in report.rows[0].eager_reasons)
