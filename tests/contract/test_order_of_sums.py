"""Parts that use a tensor several times while other code uses it too: gradients are added up in eager's order.

Autograd adds up the gradients of all uses one by one. A graph that added up its own uses first would have other bits.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import stepgraph
from tests.harness import same_bits
from tests.module_harness import quiet
from tests.seeding import seed

WIDTH = 8


class Plain(nn.Module):
    """Its argument has two uses, each parameter one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cell = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH // 2, WIDTH // 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return x + self.cell(x.view(len(x), 2, -1))[0].reshape(x.shape)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(3):
            y = self.norm(torch.tanh(self.inner(y) + x))
        return y * self.norm.weight.mean()


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.spectral_norm(self.inner)


class WeightNormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(self.inner)


class TiedInside(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.inner(x)), self.inner.weight.t()) * self.inner.bias


class Checkpointed(Plain):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inside(y: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.tanh(self.inner(y)))

        return x + checkpoint(inside, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class BesideReentrant(Reentrant):
    """A parameter has a use in the checkpoint, and one beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.inner.bias


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = TiedInside(), Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.last(x)) * self.first.inner.bias


PARTS: dict[str, Callable[[], nn.Module]] = {
    part.__name__: part
    for part in (
        *(Plain, Recurrent, Repeated, Normed, WeightNormed, TiedInside, Nested),
        *(Checkpointed, Reentrant, BesideReentrant),
    )
}


@dataclass(frozen=True)
class Sums:
    """A program: the parts of a model, and other uses of their parameters and arguments."""

    parts: Sequence[str]
    penalties: str = ""
    """Before, in the middle of, or after the forward: "bma"."""
    twice: str = ""
    """A second forward in the same backward: of the model, or of its first part only, on another or the same input."""
    residual: bool = False
    microbatches: int = 1
    one_backward: bool = False
    zero: str = "none"
    optimizer: str = "SGD"
    tied: bool = False
    single_mempool: bool = False
    steps: int = 6

    @classmethod
    def random(cls, number: int) -> Sums:
        draw = random.Random(number)
        return cls(
            parts=[draw.choice(list(PARTS)) for _ in range(draw.choice((1, 2, 3)))],
            penalties="".join(place for place in "bma" if draw.random() < 0.25),
            twice=draw.choice(("", "", "model", "part", "inside")),
            residual=draw.random() < 0.4,
            microbatches=draw.choice((1, 2, 3)),
            one_backward=draw.random() < 0.25,
            zero=draw.choice(("none", "zero", "never")),
            optimizer=draw.choice(("SGD", "RMSprop", "Adam")),
            tied=draw.random() < 0.3,
            single_mempool=draw.random() < 0.15,
        )

    def model(self) -> nn.ModuleList:
        parts = [PARTS[name]() for name in self.parts]
        layers = [part.inner for part in parts if type(getattr(part, "inner", None)) is nn.Linear]
        if self.tied and len(layers) > 1:
            layers[-1].weight = layers[0].weight
        return nn.ModuleList([nn.Linear(6, WIDTH), *parts, nn.Linear(WIDTH, 4)])

    def forward(self, model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        x, extra = model[0](x), torch.zeros((), device=x.device)
        for number, part in enumerate(model[1:-1]):
            y = part(x)
            if self.twice == "inside" and not number:
                y = y + 0.5 * part(torch.tanh(y))
            x = y + 0.1 * x if self.residual else y
            if "m" in self.penalties and not number:
                extra = penalty(model)
        return model[-1](x).square().mean() + extra

    def loss(self, model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        before = penalty(model) if "b" in self.penalties else 0.0
        loss = before + self.forward(model, x)
        if self.twice == "model":
            loss = loss + self.forward(model, x * 0.5)
        if self.twice == "part":
            loss = loss + (model[1](model[0](x)) * model[1](model[0](x * 0.3))).mean()
        return loss + penalty(model) if "a" in self.penalties else loss

    def train(self, device: torch.device, *, is_graphed: bool) -> tuple[list[torch.Tensor], Any]:
        """Gradients and parameters after each step, and the report of the graphs."""
        seed(7)
        model = self.model().to(device)
        rate = {"momentum": 0.9, "lr": 0.05} if self.optimizer == "SGD" else {"lr": 0.01}
        optimizer = getattr(torch.optim, self.optimizer)(model.parameters(), **rate)
        scope = [str(1 + number) for number in range(len(self.parts))]
        handle = None
        if is_graphed:
            handle = stepgraph.graph_modules(model, scope, warmup=1, single_mempool=self.single_mempool)
        found = []
        seed(11)
        for _ in range(self.steps):
            losses = (self.loss(model, torch.randn(5, 6, device=device)) for _ in range(self.microbatches))
            for loss in [sum(losses)] if self.one_backward else losses:
                loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            found += [p.detach().clone() for p in model.parameters()]
            if self.zero != "never":
                optimizer.zero_grad(set_to_none=self.zero == "none")
        report = None
        if handle is not None:
            report = handle.report()
            handle.close()
        return found, report

    def check(self, device: torch.device) -> Any:
        """Train eagerly and graphed, and compare. Return the report of the graphs."""
        with quiet():
            eager, _ = self.train(device, is_graphed=False)
            graphed, report = self.train(device, is_graphed=True)
        assert len(eager) == len(graphed)
        assert all(map(same_bits, eager, graphed)), f"graphed differs from eager: {self}"
        return report


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("other", [{"penalties": "b"}, {"penalties": "m"}, {"penalties": "a"}, {"twice": "model"}])
@pytest.mark.parametrize("part", ["Recurrent", "Normed", "TiedInside", "Repeated", "Checkpointed"])
def test_uses_of_a_weight_are_added_in_order(part: str, other: dict[str, Any], device: torch.device) -> None:
    report = Sums([part], **other, zero="never", steps=5).check(device)
    assert report.rows[0].forwards == 4 * (1 + ("twice" in other)), "only warm-up runs eagerly"


@pytest.mark.parametrize("single_mempool", [False, True])
def test_uses_of_an_argument_are_added_in_order(single_mempool: bool, device: torch.device) -> None:
    sums = Sums(["Plain", "Plain"], residual=True, single_mempool=single_mempool, steps=5)
    assert [row.forwards for row in sums.check(device).rows] == [4, 4]


def test_uses_of_a_weight_by_two_parts_are_added_in_order(device: torch.device) -> None:
    report = Sums(["TiedInside", "Repeated"], tied=True, microbatches=2, steps=5).check(device)
    assert [row.forwards for row in report.rows] == [9, 9]


def test_calls_in_one_backward_with_reentrant_checkpoint(device: torch.device) -> None:
    """Each share inside is added to .grad at once, and not their sum."""
    report = Sums(["Reentrant"], microbatches=3, one_backward=True, zero="never", steps=5).check(device)
    assert report.rows[0].forwards == 12


@pytest.mark.parametrize("penalties", ["", "a"])
def test_use_beside_a_reentrant_checkpoint(penalties: str, device: torch.device) -> None:
    """A graph cannot keep the order if other code uses the parameter too: the part runs eagerly, and says so."""
    sums = Sums(["BesideReentrant"], penalties=penalties, microbatches=2, zero="never", steps=5)
    (row,) = sums.check(device).rows
    if penalties:
        assert row.forwards == 0
        assert "[gradient-order]" in "".join(row.eager_reasons)
    else:
        assert row.forwards == 9


def test_hooks_of_a_weight_see_one_sum(device: torch.device) -> None:
    """Hooks on a parameter with several uses run once, with the whole gradient, in eager's order."""

    def train(is_graphed: bool) -> dict[str, list[torch.Tensor]]:
        seed(7)
        model, seen = Sums(["TiedInside"]).model().to(device), {}
        for name, p in model.named_parameters():
            found = seen[name] = []
            p.register_hook(lambda grad, found=found: found.append(grad.clone()))
            p.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.clone()))
        handle = stepgraph.graph_modules(model, ["1"], warmup=1) if is_graphed else None
        for _ in range(4):
            Sums(["TiedInside"], penalties="ba").loss(model, torch.randn(5, 6, device=device)).backward()
        if handle is not None:
            assert handle.report().rows[0].forwards == 3
            handle.close()
        return seen

    with quiet():
        eager, graphed = train(False), train(True)
    for name, seen in eager.items():
        assert len(seen) == len(graphed[name]) == 8
        assert all(map(same_bits, seen, graphed[name])), name


def test_penalty_that_gives_nothing_at_first_is_seen(device: torch.device) -> None:
    """The gradient of a penalty on a bias is zero as long as the bias is: the bits of the sum do not show it."""
    sums = Sums(["TiedInside"], penalties="a", zero="never", steps=6)

    def from_zero() -> nn.ModuleList:
        model = Sums.model(sums)
        with torch.no_grad():
            model[1].inner.bias.zero_()
        return model

    object.__setattr__(sums, "model", from_zero)
    assert sums.check(device).rows[0].forwards == 5


def test_gradients_of_warm_up_are_plain_tensors(device: torch.device) -> None:
    """Warm-up marks gradients; neither .grad nor torch.autograd.grad shows it."""
    model = nn.Sequential(TiedInside()).to(device)
    handle = stepgraph.graph_modules(model, ["0"], warmup=5)
    x = torch.randn(3, WIDTH, device=device, requires_grad=True)
    weight = model[0].inner.weight
    found = [*torch.autograd.grad(model(x).sum(), [weight, x]), *torch.autograd.grad(model(x).sum(), [x])]
    model(x).sum().backward()
    model(x).sum().backward(inputs=[weight])
    model(x).sum().backward(retain_graph=True)
    found += [weight.grad, x.grad]
    assert [type(grad) for grad in found] == [torch.Tensor] * 5
    handle.close()


def test_use_that_begins_later_is_graphed_again(device: torch.device) -> None:
    """From the backward on that shows it, the uses are added in order."""
    seed(7)
    eager = Sums(["TiedInside"]).model().to(device)
    graphed = Sums(["TiedInside"]).model().to(device)
    graphed.load_state_dict(eager.state_dict())
    with stepgraph.graph_modules(graphed, ["1"], warmup=1, audit=1) as handle, quiet() as told:
        for step in range(9):
            x = torch.randn(5, 6, device=device)
            for model in (eager, graphed):
                model.zero_grad()
                Sums(["TiedInside"], penalties="ba" if step >= 4 else "").loss(model, x).backward()
            if step != 4:
                assert all(map(same_bits, [p.grad for p in eager.parameters()], [p.grad for p in graphed.parameters()]))
        (row,) = handle.report().rows
    assert any("gradient-order" in str(warning.message) for warning in told)
    assert row.forwards == 7, "all but two of warm-up"


def test_use_that_calls_of_another_kind_show(device: torch.device) -> None:
    """Calls of another shape warm up with a penalty: graphs that were captured without one are captured again."""
    seed(7)
    eager = Sums(["TiedInside"]).model().to(device)
    graphed = Sums(["TiedInside"]).model().to(device)
    graphed.load_state_dict(eager.state_dict())
    with stepgraph.graph_modules(graphed, ["1"], warmup=1, audit=False) as handle, quiet():
        for rows, penalties in [*[(5, "")] * 4, *[(3, "a")] * 2, *[(5, "a")] * 4]:
            x = torch.randn(rows, 6, device=device)
            for model in (eager, graphed):
                Sums(["TiedInside"], penalties=penalties).loss(model, x).backward()
            assert all(map(same_bits, [p.grad for p in eager.parameters()], [p.grad for p in graphed.parameters()]))
        (row,) = handle.report().rows
    assert row.forwards >= 6


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))
def test_random_program_adds_in_order(number: int, device: torch.device) -> None:
    Sums.random(number).check(device)


def callables_of(model: nn.ModuleList, device: torch.device) -> None:
    x = torch.randn(5, WIDTH, device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[1] = stepgraph.make_graphed_callables(model[1], (x,))


@pytest.mark.parametrize("part", ["Recurrent", "Normed", "TiedInside"])
def test_uses_of_a_callables_weight_are_added_in_order(part: str, device: torch.device) -> None:
    sums = Sums([part], penalties="ba")

    def train(is_graphed: bool) -> list[torch.Tensor]:
        seed(7)
        model = sums.model().to(device)
        if is_graphed:
            callables_of(model, device)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
        seed(11)
        for _ in range(5):
            sums.loss(model, torch.randn(5, 6, device=device)).backward()
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        return found

    assert all(map(same_bits, train(False), train(True)))
