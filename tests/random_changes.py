"""Random programs whose step reads numbers from random places, which change at random between calls.

    python -m tests.random_changes 2000

Each call of the captured step begins with the weights that the same call of the eager program begins with, so that a
wrong call is seen by itself and leaves no trace in those after it. What must hold: a call that was audited, captured or
run eagerly is right; so is every call whose numbers are in reach of the watch and in plain sight of the operations. A
number that the watch cannot reach, or that only decides now and then which operations run, may be stale until the next
audit; none is past it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.progress import Progress
from torch import nn

import stepgraph
from tests.holders import CASES, HOLDERS, Held
from tests.seeding import seed

Use = Callable[[torch.Tensor, float], torch.Tensor]
PLAIN: dict[str, Use] = {
    "times": lambda y, w: y * w,
    "plus": lambda y, w: y + w,
    "filled": lambda y, w: y + torch.full_like(y, w),
    "in backward": lambda y, w: _Scaled.apply(y, w),
}
"""Uses that show every value."""
DECIDING: dict[str, Use] = {
    "branch": lambda y, w: y.sin() if w > 2.5 else y.tanh(),
    "loop": lambda y, w: _looped(y, w),
    "now and then": lambda y, w: y * 0.5 if int(w * 10) % 7 == 0 else y,
}
"""Uses that show some values only."""
USES = {**PLAIN, **DECIDING}


class _Scaled(torch.autograd.Function):
    """A number that only backward reads."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, w: float) -> torch.Tensor:
        ctx.w = w
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.w, None


def _looped(y: torch.Tensor, w: float) -> torch.Tensor:
    for _ in range(int(w)):
        y = y + 0.25
    return y


@dataclass(frozen=True)
class Plan:
    """A program: where its numbers are and how each is used; what happens before each call."""

    numbers: tuple[tuple[tuple[str, int], str], ...]
    events: tuple[tuple[int, float] | None, ...]
    audit: int


values = st.sampled_from([1.0, 2.0, 2.4, 2.6, 2.8, 3.0, 3.5])
plans = st.builds(
    Plan,
    st.lists(st.tuples(st.sampled_from(CASES), st.sampled_from(sorted(USES))), min_size=1, max_size=3).map(tuple),
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), values)), min_size=8, max_size=14).map(tuple),
    st.integers(1, 5),
)


class Training:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        seed(3)
        self.model = nn.Linear(3, 3)
        self.held = [HOLDERS[name](depth, 2.0) for (name, depth), _ in plan.numbers]
        reads = [(held, USES[use]) for held, (_, use) in zip(self.held, plan.numbers, strict=True)]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        model = self.model

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            y = model(x)
            for held, use in reads:
                y = use(y, held.read())
            loss = y.pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step = step

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def load(self, weights: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(weight)


def is_in_sight(held: Held, use: str) -> bool:
    return held.in_reach and use in PLAIN


def check(plan: Plan) -> None:
    """Run a plan eagerly and captured, call by call, and hold the rules above."""
    eager = Training(plan)
    before, after, batches = [], [], []
    for index, event in enumerate(plan.events):
        if event is not None:
            eager.held[event[0] % len(eager.held)].write(event[1])
        batches.append(torch.full((2, 3), 0.1 * (index + 1)))
        before.append(eager.weights())
        eager.step(batches[-1])
        after.append(eager.weights())
    captured = Training(plan)
    stale = False
    with warnings.catch_warnings(), stepgraph.capture(captured.step, warmup=2, audit=plan.audit) as step:
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        for index, event in enumerate(plan.events):
            if event is not None:
                place = event[0] % len(captured.held)
                captured.held[place].write(event[1])
                stale = stale or not is_in_sight(captured.held[place], plan.numbers[place][1])
            captured.load(before[index])
            report = step.report()
            checked = report.audits + report.captures + report.eager_calls
            step(batches[index])
            report = step.report()
            if report.audits + report.captures + report.eager_calls > checked:
                stale = False
            is_right = all(map(torch.equal, after[index], captured.weights()))
            assert is_right or stale, f"call {index} is wrong, and nothing says so: {plan}"


def run_many(count: int) -> None:
    """Check so many plans."""
    with Progress() as progress:
        task = progress.add_task("programs", total=count)

        @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(plans)
        def each(plan: Plan) -> None:
            check(plan)
            progress.advance(task)

        each()
    print(f"{count} programs: no call was wrong past an audit")


if __name__ == "__main__":
    run_many(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
