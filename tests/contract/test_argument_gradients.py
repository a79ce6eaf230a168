"""`.grad` of a leaf that is passed to a step is what eager would have left: None, the same tensor, or a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stepgraph
from tests.harness import same_bits

Step = Callable[[torch.Tensor], Any]


def plain(d: torch.Tensor) -> None:
    (d * d).sum().backward()


def fresh(d: torch.Tensor) -> None:
    d.grad = None
    (d * d).sum().backward()


def zeroed(d: torch.Tensor) -> None:
    if d.grad is not None:
        d.grad.zero_()
    (d * d).sum().backward()


def zeroed_together(d: torch.Tensor) -> None:
    if d.grad is not None:
        torch._foreach_zero_([d.grad])
    (d * d).sum().backward()


def read(d: torch.Tensor) -> torch.Tensor:
    (d * d).sum().backward()
    assert d.grad is not None
    return d.grad.clone()


def returned(d: torch.Tensor) -> torch.Tensor | None:
    (d * d).sum().backward()
    return d.grad


def dropped(d: torch.Tensor) -> torch.Tensor:
    (d * d).sum().backward()
    assert d.grad is not None
    norm = d.grad.norm()
    d.grad = None
    return norm


def descended(d: torch.Tensor) -> torch.Tensor:
    """An optimizer by hand: the argument is written to as well."""
    loss = (d * d).sum()
    loss.backward()
    assert d.grad is not None
    with torch.no_grad():
        d.sub_(d.grad, alpha=0.1)
    return loss.detach()


def unused(d: torch.Tensor) -> torch.Tensor:
    return d.detach() * 2


STEPS: list[Step] = [plain, fresh, zeroed, zeroed_together, read, returned, dropped, descended, unused]


def look(leaf: torch.Tensor, result: Any) -> list[torch.Tensor | None]:
    found = [leaf.detach(), leaf.grad, result]
    return [None if tensor is None else tensor.detach().clone() for tensor in found]


def same(one: list[torch.Tensor | None], two: list[torch.Tensor | None]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, two, strict=True))


def new_leaf(device: torch.device, size: int = 3) -> torch.Tensor:
    return torch.arange(1.0, size + 1, device=device).requires_grad_()


@pytest.mark.pairwise
@pytest.mark.parametrize("function", STEPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("between", ["kept", "none", "zeroed", "held"])
@pytest.mark.parametrize("buckets", [None, {"d": {0: [3]}}, {"d": {0: [4, 8]}}], ids=["", "full bucket", "buckets"])
def test_gradients_of_a_leaf_are_those_of_eager(
    function: Step, between: str, buckets: Any, device: torch.device
) -> None:
    mine, theirs = new_leaf(device), new_leaf(device)
    # a padded step is the eager one here: the padding is 0, and so is its gradient
    options = {} if buckets is None else {"buckets": buckets}
    held = []
    if between == "held":
        for leaf in (mine, theirs):
            leaf.grad = torch.zeros_like(leaf)
            held.append(leaf.grad)
    with stepgraph.capture(function, **options) as step:
        for index in range(12):
            for leaf in (mine, theirs):
                if between == "none" or (between == "zeroed" and index == 8):
                    leaf.grad = None
                elif between == "zeroed" and leaf.grad is not None:
                    leaf.grad.zero_()
            kept = [leaf.grad for leaf in (mine, theirs)]
            assert same(look(mine, function(mine)), look(theirs, step(theirs))), index
            stays = [leaf.grad is grad for leaf, grad in zip((mine, theirs), kept, strict=True)]
            assert stays[0] == stays[1], index
            assert not held or same_bits(*held), index
        assert step.report().replays >= 5


def test_a_leaf_with_and_without_a_gradient_has_two_graphs(device: torch.device) -> None:
    with stepgraph.capture(plain) as step:
        for index in range(12):
            leaf = new_leaf(device)
            if index % 2:
                leaf.grad = torch.ones_like(leaf)
            step(leaf)
            assert leaf.grad is not None
            assert leaf.grad.tolist() == [2.0 * i + index % 2 for i in (1, 2, 3)]
        assert step.report().graphs == 2


def test_gradient_of_other_strides_is_added_to_in_place(device: torch.device) -> None:
    with stepgraph.capture(plain) as step:
        for index in range(10):
            leaf = torch.ones(2, 3, device=device, requires_grad=True)
            leaf.grad = torch.ones(3, 2, device=device).t() if index % 2 else torch.ones(2, 3, device=device)
            held, strides = leaf.grad, leaf.grad.stride()
            step(leaf)
            assert leaf.grad is held
            assert held.stride() == strides
            assert held.eq(3).all()


def test_leaf_keeps_requires_grad_that_the_step_sets(device: torch.device) -> None:
    def step(x: torch.Tensor) -> None:
        x.requires_grad_()
        (x * x).sum().backward()

    with stepgraph.capture(step) as captured:
        for _ in range(6):
            x = torch.ones(3, device=device)
            captured(x)
            assert x.requires_grad
            assert x.grad is not None
            assert x.grad.tolist() == [2.0] * 3
        assert captured.report().replays == 3


def double_gradient(leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.mul_(2)


def hooks() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "hook": lambda d: d.register_hook(lambda grad: grad * 2),
        "post-accumulate": lambda d: d.register_post_accumulate_grad_hook(double_gradient),
    }


@pytest.mark.parametrize("kind", hooks())
@pytest.mark.parametrize("buckets", [None, {"d": {0: [4]}}], ids=["", "buckets"])
def test_a_hook_of_an_argument_is_refused(kind: str, buckets: Any, device: torch.device) -> None:
    leaf = new_leaf(device)
    hooks()[kind](leaf)
    with stepgraph.capture(plain, warmup=1, **({} if buckets is None else {"buckets": buckets})) as step:
        if buckets is None:
            step(leaf)
            assert leaf.grad is not None
            assert leaf.grad.tolist() == [4.0, 8.0, 12.0]
            leaf.grad = None
        with pytest.raises(stepgraph.CaptureError, match="argument `d` has a hook") as caught:
            step(leaf)
        assert caught.value.rule == "module-hook"


@pytest.mark.parametrize("kind", hooks())
def test_a_hook_that_comes_after_the_capture_is_noticed(kind: str, device: torch.device) -> None:
    with stepgraph.capture(plain) as step:
        for _ in range(5):
            step(new_leaf(device))
        leaf = new_leaf(device)
        hooks()[kind](leaf)
        step(leaf)
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [4.0, 8.0, 12.0]


def test_gradient_passed_as_an_argument_and_written_is_refused(device: torch.device) -> None:
    def step(d: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        (d * d).sum().backward()
        return grad.sum()

    leaf = new_leaf(device)
    leaf.grad = torch.zeros_like(leaf)
    with stepgraph.capture(step, warmup=1) as captured:
        captured(leaf, leaf.grad)
        with pytest.raises(stepgraph.CaptureError, match="shares memory") as caught:
            captured(leaf, leaf.grad)
        assert caught.value.rule == "shared-input"


def test_a_gradient_that_is_an_argument_too_and_read_is_replayed(device: torch.device) -> None:
    leaf = new_leaf(device)
    leaf.grad = torch.ones_like(leaf)
    with stepgraph.capture(lambda d, grad: (d * grad).sum().detach()) as step:
        assert [step(leaf, leaf.grad).item() for _ in range(6)] == [6.0] * 6
        assert step.report().replays == 3
