"""`OtherUses` learns from backwards which parameters other code uses too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepgraph.core.errors import StateChanged, StepgraphWarning
from stepgraph.engine.grads.other_uses import OtherUses
from tests.module_harness import quiet


class Share(torch.autograd.Function):
    """A use of a parameter by a graph: its gradient is noted and handed over."""

    @staticmethod
    def forward(ctx: Any, uses: OtherUses, parameter: torch.Tensor, share: float | None) -> torch.Tensor:
        ctx.uses, ctx.parameter, ctx.share = uses, parameter, share
        uses.begin()
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        share = None if ctx.share is None else torch.full((3,), ctx.share)
        ctx.uses.hand_over("Layer.weight", ctx.parameter, share)
        ctx.uses.end()
        return None, share, None


@pytest.fixture
def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def passed(uses: OtherUses, parameter: torch.Tensor) -> bool:
    """Whether the next call hands the gradient to autograd."""
    return bool(uses.through_autograd({"Layer.weight": parameter}))


def test_parameter_in_question_passes_autograd(parameter: torch.nn.Parameter) -> None:
    assert passed(OtherUses(), parameter)


@pytest.mark.parametrize("shares", [[0.5], [0.5, 0.1], [0.5, float("nan"), 0.1], [None]], ids=str)
def test_parameter_without_other_uses_stays_inside(shares: list[float | None], parameter: torch.nn.Parameter) -> None:
    uses = OtherUses()
    before = uses.version
    sum(Share.apply(uses, parameter, share) for share in shares).backward()
    assert not passed(uses, parameter)
    assert uses.version > before
    assert uses.found([parameter]) == set()


@pytest.mark.parametrize("shares", [[0.5], [0.5, 0.1]], ids=str)
def test_other_use_is_found_for_good(shares: list[float], parameter: torch.nn.Parameter) -> None:
    uses = OtherUses()
    (sum(Share.apply(uses, parameter, share) for share in shares) + parameter.sum()).backward()
    for _ in range(2):
        assert passed(uses, parameter)
        assert uses.found([parameter]) == {id(parameter)}
        uses.ask_again()
        Share.apply(uses, parameter, 1.0).backward()
    uses.forget()
    Share.apply(uses, parameter, 1.0).backward()
    assert not passed(uses, parameter)


def test_answer_waits_for_calls_under_way(parameter: torch.nn.Parameter) -> None:
    """All calls of one backward go the same way."""
    uses = OtherUses()
    first, second = (Share.apply(uses, parameter, 1.0) for _ in range(2))
    first.backward()
    assert passed(uses, parameter)
    second.backward()
    assert not passed(uses, parameter)


def test_use_that_begins_later_is_told_once(parameter: torch.nn.Parameter) -> None:
    uses = OtherUses()
    Share.apply(uses, parameter, 1.0).backward()
    uses.ask_again()
    with quiet() as told:
        for _ in range(2):
            (Share.apply(uses, parameter, 1.0) + parameter.sum()).backward()
    assert [warning.category for warning in told] == [StepgraphWarning]
    assert "`Layer.weight` of a graphed module is now used by other code too" in str(told[0].message)


def test_use_that_begins_later_raises_under_strict(parameter: torch.nn.Parameter) -> None:
    uses = OtherUses()
    uses.is_strict = True
    Share.apply(uses, parameter, 1.0).backward()
    uses.ask_again()
    for _ in range(2):
        with pytest.raises(StateChanged, match=r"`Layer\.weight` of a graphed module is now used") as caught:
            (Share.apply(uses, parameter, 1.0) + parameter.sum()).backward()
        assert caught.value.rule == "gradient-order"
        assert passed(uses, parameter)
    Share.apply(uses, parameter, 1.0).backward()
    assert not passed(uses, parameter), "the use has ended"
    uses.forget()
    (Share.apply(uses, parameter, 1.0) + parameter.sum()).backward()
    assert passed(uses, parameter)


def test_aborted_backward_leaves_the_question_open(parameter: torch.nn.Parameter) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("the user's own error")

    uses = OtherUses()
    failing = Fails.apply(parameter)
    with pytest.raises(ValueError, match="own error"):
        (failing + Share.apply(uses, parameter, 1.0)).backward()
    assert passed(uses, parameter)
    Share.apply(uses, parameter, 1.0).backward()
    assert not passed(uses, parameter)
