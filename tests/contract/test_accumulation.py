"""Gradients that outlive a call: accumulated inside a step, across steps, across sessions, captured and eager in turn.

`.grad` is memory that everyone shares: two captured functions, the loop between them, a call that happens to run
eagerly. Wherever it comes from (None, another graph's buffer, a tensor of the user's), the next call must add to what
is there, and what it leaves must be there for whoever comes next. All is compared after every call, not at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from tests.harness import Program, assert_captured_equals_eager, assert_same_history, snapshot

MICROBATCHES, UPDATES = 3, 6

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


class Synced(nn.Module):
    """As data parallel wrappers do: gradients are averaged on the way back, unless under `no_sync()`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
        self.require_sync = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_sync = self.require_sync, False
        try:
            yield
        finally:
            self.require_sync = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out

    def sync(self) -> None:
        """What the reducer would do with every gradient."""
        if self.require_sync:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5).add_(0.25)


@dataclass
class Loop:
    """Accumulation over two functions, and the calls made so far: the state after each of them."""

    program: Program
    model: Synced
    optimizer: torch.optim.Optimizer
    device: torch.device
    history: list[Any] = field(default_factory=list)

    def accumulate(self, x: torch.Tensor, last: bool = True) -> torch.Tensor:
        """Forward and backward of a microbatch; the gradients are synchronised after the last one."""
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = self.model(x).pow(2).mean() / MICROBATCHES
            loss.backward()
            self.model.sync()
        return loss

    def update(self) -> None:
        self.optimizer.step()

    def update_and_zero(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def update_and_zero_in_place(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def note(self, result: torch.Tensor | None) -> None:
        kept = [] if result is None else [result.detach().clone()]
        self.history.append((kept, snapshot(self.program, self.device)))


def build(device: torch.device, optimizer: str = "adamw") -> Loop:
    torch.manual_seed(7)
    model = Synced().to(device)
    made = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(11)
    return Loop(Program(lambda: None, [], [model], [made]), model, made, device)


def batches(device: torch.device) -> torch.Tensor:
    return torch.randn(UPDATES, MICROBATCHES, 4, 8, device=device, generator=torch.Generator(device).manual_seed(3))


ZERO: dict[str, tuple[str, Callable[[torch.optim.Optimizer], None]]] = {
    "inside, to none": ("update_and_zero", lambda optimizer: None),
    "inside, in place": ("update_and_zero_in_place", lambda optimizer: None),
    "outside, to none": ("update", lambda optimizer: optimizer.zero_grad(set_to_none=True)),
    "outside, in place": ("update", lambda optimizer: optimizer.zero_grad(set_to_none=False)),
    "never": ("update", lambda optimizer: None),
}
"""Which function updates, and what the loop does after it."""


@pytest.mark.parametrize(
    ("optimizer", "start", "sessions"),
    [("adamw", "none", 1), ("adamw", "present", 2), ("adamw fused", "none", 2), ("sgd", "present", 1)],
    ids=lambda value: f"{value} sessions" if isinstance(value, int) else value,
)
@pytest.mark.parametrize("zero", ZERO)
def test_accumulation_across_two_functions_equals_eager(
    zero: str, optimizer: str, start: str, sessions: int, device: torch.device
) -> None:
    name, afterwards = ZERO[zero]

    def run(loop: Loop, accumulate: Any, update: Any) -> list[Any]:
        if start == "present":
            for parameter in loop.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
        for step in batches(device):
            for i, x in enumerate(step):
                loop.note(accumulate(x, last=i == MICROBATCHES - 1))
            update()
            afterwards(loop.optimizer)
            loop.note(None)
        return loop.history

    eager = build(device, optimizer)
    expected = run(eager, eager.accumulate, getattr(eager, name))
    loop = build(device, optimizer)
    with stepgraph.Session() as one, stepgraph.Session() as two:
        accumulate = stepgraph.capture(loop.accumulate, session=one)
        update = stepgraph.capture(getattr(loop, name), session=(one, two)[sessions - 1])
        received = run(loop, accumulate, update)
        reports = accumulate.report(), update.report()
    assert_same_history(expected, received, "captured differs from eager")
    assert reports[0].replays >= (UPDATES - 4) * MICROBATCHES
    assert reports[1].replays == UPDATES - 3
    assert [report.recaptures for report in reports] == [0, 0]
    assert set(reports[0].eager_reasons) == {"warm-up"}


def test_accumulation_flag_argument_has_a_graph_for_each_value(device: torch.device) -> None:
    """`last` is part of the signature: each of its values has a graph, and neither is taken for the other."""
    loop = build(device)
    with stepgraph.capture(loop.accumulate) as accumulate:
        for step in batches(device):
            for i, x in enumerate(step):
                accumulate(x, last=i == MICROBATCHES - 1)
        report = accumulate.report()
    named = {signature.partition("last=")[2].partition(",")[0].partition(" ")[0] for signature in report.signatures}
    assert named == {"True", "False"}
    assert report.recaptures == 0


def test_accumulation_no_sync_around_the_call_is_never_frozen(device: torch.device) -> None:
    """The branch taken by a flag on the model, which the step reads, is noticed: told, and counted."""

    def run(loop: Loop, accumulate: Any) -> list[Any]:
        for step in batches(device):
            for i, x in enumerate(step):
                with contextlib.nullcontext() if i == MICROBATCHES - 1 else loop.model.no_sync():
                    loop.note(accumulate(x))
            loop.update_and_zero()
        return loop.history

    eager = build(device)
    expected = run(eager, eager.accumulate)
    loop = build(device)
    with stepgraph.capture(loop.accumulate) as accumulate:
        with pytest.warns(stepgraph.StepgraphWarning, match="require_sync"):
            received = run(loop, accumulate)
        assert accumulate.report().captures >= 2, "a graph for each answer"
    assert_same_history(expected, received, "captured differs from eager")


SWITCHES: dict[str, Callable[[int], bool]] = {
    "every other call": lambda call: call % 2 == 0,
    "eager in the middle": lambda call: call % MICROBATCHES != 1,
    "eager first": lambda call: call % MICROBATCHES != 0,
    "eager last": lambda call: call % MICROBATCHES != MICROBATCHES - 1,
    "whole updates": lambda call: call // MICROBATCHES % 2 == 0,
}
"""Which calls are captured."""


@pytest.mark.parametrize(
    ("optimizer", "to_none"), [("adamw", True), ("adamw fused", False)], ids=["adamw to none", "adamw fused in place"]
)
@pytest.mark.parametrize("switch", SWITCHES)
def test_accumulation_captured_and_eager_calls_in_turn(
    switch: str, optimizer: str, to_none: bool, device: torch.device
) -> None:
    """An eager call adds to the buffer that a graph left, a graph to what an eager call left."""

    def run(loop: Loop, accumulate: Any, update: Any) -> list[Any]:
        for number, step in enumerate(batches(device)):
            for i, x in enumerate(step):
                captured = SWITCHES[switch](number * MICROBATCHES + i)
                loop.note((accumulate if captured else loop.accumulate)(x, last=True))
            (update if number % 4 else loop.update)()
            loop.optimizer.zero_grad(set_to_none=to_none)
            loop.note(None)
        return loop.history

    eager = build(device, optimizer)
    expected = run(eager, eager.accumulate, eager.update)
    loop = build(device, optimizer)
    with stepgraph.Session() as session:
        accumulate = stepgraph.capture(loop.accumulate, session=session)
        update = stepgraph.capture(loop.update, session=session)
        assert_same_history(expected, run(loop, accumulate, update), "captured differs from eager")
        assert accumulate.report().replays >= UPDATES - 1
        assert update.report().replays == UPDATES - 2 - 3  # two of them are the loop's own


def test_accumulation_gradients_kept_by_the_loop_are_its_own(device: torch.device) -> None:
    """Copies taken between calls stay; so does a tensor of the user's that was `.grad` before a captured call."""
    loop = build(device)
    (weight, *_) = loop.model.parameters()
    with stepgraph.capture(loop.accumulate) as accumulate:
        copies = []
        for step in batches(device):
            accumulate(step[0])
            assert weight.grad is not None
            copies.append((weight.grad.clone(), weight.grad.sum().item()))
        mine = torch.ones_like(weight)
        weight.grad = mine
        accumulate(batches(device)[0][0])
        assert accumulate.report().replays == UPDATES - 2
    assert all(copy.sum().item() == total for copy, total in copies)
    assert mine.sum().item() == weight.numel() or weight.grad is mine


INSIDE: dict[str, bool | None] = {"to none": True, "in place": False, "as it comes": None}


@pytest.mark.parametrize("zero", INSIDE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accumulation_inside_one_step(optimizer: str, zero: str, device: torch.device) -> None:
    """Microbatches in one step with clipping, the gradients zeroed in the step, or by the loop every second call."""

    def build_one(device: torch.device) -> Program:
        model = Synced().to(device)
        made = OPTIMIZERS[optimizer](model.parameters())
        to_none = INSIDE[zero]

        def step(stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if to_none is not None:
                made.zero_grad(set_to_none=to_none)
            losses = []
            for i, x in enumerate(stacked.unbind(0)):
                with contextlib.nullcontext() if i == MICROBATCHES - 1 else model.no_sync():
                    loss = model(x).pow(2).mean() / MICROBATCHES
                    loss.backward()
                    model.sync()
                losses.append(loss.detach())
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            made.step()
            return torch.stack(losses), norm

        def before_call(index: int) -> None:
            if to_none is None and index % 2:
                made.zero_grad(set_to_none=index % 4 == 1)

        return Program(
            step,
            [(torch.randn(MICROBATCHES, 4, 8, device=device),) for _ in range(16)],
            [model],
            [made],
            before_call=before_call,
        )

    report = assert_captured_equals_eager(build_one, device)
    assert report.recaptures == 0
    assert set(report.eager_reasons) == {"warm-up"}


def test_accumulation_number_of_microbatches_as_an_argument(device: torch.device) -> None:
    """Another number of microbatches is another graph, never the old one with fewer or more of them."""

    def build_one(device: torch.device) -> Program:
        model = nn.Linear(8, 4).to(device)
        made = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, num_microbatches: int) -> torch.Tensor:
            made.zero_grad()
            total = torch.zeros((), device=device)
            for micro in x.chunk(num_microbatches):
                loss = model(micro).pow(2).mean() / num_microbatches
                loss.backward()
                total += loss.detach()
            made.step()
            return total

        numbers = [1, 2, 4] * 6
        return Program(step, [(torch.randn(8, 8, device=device), n) for n in numbers], [model], [made])

    assert assert_captured_equals_eager(build_one, device).graphs == 3


@pytest.mark.parametrize("own_grads", [False, True], ids=["gradients of the step", "gradients of the loop"])
@pytest.mark.parametrize("first", ["step", "zero_grad"])
def test_accumulation_gradients_dropped_between_optimizer_steps(
    first: str, own_grads: bool, device: torch.device
) -> None:
    """Between two cuts nothing may be recorded at all, and yet `.grad` be another: the optimizer must find it so."""

    def program(device: torch.device) -> Program:
        model = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(x: torch.Tensor) -> torch.Tensor:
            if first == "step":
                optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        def before_call(index: int) -> None:
            if own_grads:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.1)

        batches = [(torch.randn(3, 4, device=device),) for _ in range(8)]
        return Program(step, batches, [model], [optimizer], before_call=before_call)

    assert_captured_equals_eager(program, device)


def point_into(flat: torch.Tensor, model: nn.Module) -> None:
    """Make each gradient a piece of one tensor."""
    begin = 0
    for parameter in model.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()


@pytest.mark.parametrize("zero", ["in the step", "outside"])
@pytest.mark.parametrize("fused", [False, True])
def test_accumulation_into_views_is_visible_in_the_flat_buffer(fused: bool, zero: str, device: torch.device) -> None:
    """After a graph that began without gradients has given them addresses of its own."""

    def build(device: torch.device) -> Program:
        model = nn.Linear(4, 3).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)

        def step(x: torch.Tensor) -> torch.Tensor:
            if zero == "in the step":
                optimizer.zero_grad(set_to_none=False)
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        def before_call(index: int) -> None:
            if index < 6:
                optimizer.zero_grad()
            elif index in (6, 14):
                point_into(flat, model)
            elif zero == "outside":
                flat.mul_(0.5)

        batches = [(torch.randn(2, 4, device=device),) for _ in range(18)]
        return Program(step, batches, [model], [optimizer], tensors=[flat], before_call=before_call)

    assert_captured_equals_eager(build, device)


@pytest.mark.parametrize("turns", ["0000011111", "00000110021", "0000012121212"], ids=["once", "back", "in turn"])
@pytest.mark.parametrize("zero", ["in the step", "outside", "never"])
def test_accumulation_writes_only_the_current_flat_buffer(zero: str, turns: str, device: torch.device) -> None:
    """Pointed anew each time, as well where the memory is the same."""

    def build(device: torch.device) -> Program:
        model = nn.Linear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        flats = [torch.zeros(15, device=device) for _ in range(3)]

        def step(x: torch.Tensor) -> torch.Tensor:
            if zero == "in the step":
                optimizer.zero_grad(set_to_none=False)
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        def before_call(index: int) -> None:
            flat = flats[int(turns[index])]
            if zero == "outside":
                flat.zero_()
            point_into(flat, model)

        batches = [(torch.randn(2, 4, device=device),) for _ in turns]
        return Program(step, batches, [model], [optimizer], tensors=flats, before_call=before_call)

    report = assert_captured_equals_eager(build, device)
    assert (report.captures, report.recaptures) == (1, 0)


def test_accumulation_new_gradients_leave_the_flat_buffer_alone(
    device: torch.device,
) -> None:
    """Two steps of one session: what the first adds to is not where the second's gradients go."""

    def run(graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        flat = torch.zeros(15, device=device)

        def add(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        def make(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            return add(x)

        found = []
        with stepgraph.Session() as session:
            steps = [stepgraph.capture(step, session=session) if graphed else step for step in (add, make)]
            for index in range(16):
                if index % 2 == 0:
                    point_into(flat, model)
                steps[index % 2](torch.randn(2, 4, device=device))
                found += [flat.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found

    assert all(torch.equal(one, two) for one, two in zip(run(True), run(False), strict=True))


def test_accumulation_is_visible_in_the_users_own_gradients(device: torch.device) -> None:
    """Set as `.grad` after the capture, and held."""

    def build(device: torch.device) -> Program:
        model = nn.Linear(4, 3).to(device)
        mine = [torch.zeros_like(p) for p in model.parameters()]

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        def before_call(index: int) -> None:
            for parameter, grad in zip(model.parameters(), mine, strict=True):
                grad.zero_()
                if index in (6, 9):
                    parameter.grad = grad

        batches = [(torch.randn(2, 4, device=device),) for _ in range(12)]
        return Program(step, batches, [model], tensors=mine, before_call=before_call)

    assert_captured_equals_eager(build, device)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_accumulation_other_gradient_strides_have_another_graph(device: torch.device) -> None:
    """A norm over other strides adds in another order: its last bits may differ."""
    torch.manual_seed(0)
    model = nn.Linear(300, 200, bias=False).to(device)
    expected = nn.Linear(300, 200, bias=False).to(device)
    expected.load_state_dict(model.state_dict())

    def accumulate(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        module(x).square().mean().backward()
        assert module.weight.grad is not None
        return module.weight.grad.norm()

    with stepgraph.capture(lambda x: accumulate(model, x), warmup=2) as step:
        for index in range(12):
            x = torch.rand(4, 300, device=device)
            for module in (model, expected):
                zero = torch.full_like(module.weight, 0.1)
                module.weight.grad = zero if index % 3 else zero.t().contiguous().t()
            assert step(x).equal(accumulate(expected, x))
            assert model.weight.grad is not None
            assert expected.weight.grad is not None
            assert model.weight.grad.equal(expected.weight.grad)
            assert model.weight.grad.stride() == expected.weight.grad.stride()
        report = step.report()
        assert report.graphs == 2
        assert report.replays == 9  # two to warm up, and one with each other layout of the gradient


@pytest.mark.parametrize("how", ["views of a flat buffer", "tensors"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_accumulation_is_visible_in_gradients_the_step_drops(how: str, optimizer: str, device: torch.device) -> None:
    """They are new ones at each call, and the step ends with `zero_grad()`."""

    def run(captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        stepping = OPTIMIZERS[optimizer](model.parameters())

        def step(x: torch.Tensor) -> None:
            model(x).pow(2).mean().backward()
            stepping.step()
            stepping.zero_grad()

        found = []
        with stepgraph.capture(step) if captured else contextlib.nullcontext(step) as call:
            for _ in range(9):
                flat, begin, held = torch.zeros(15, device=device), 0, []
                for p in model.parameters():
                    view = flat[begin : begin + p.numel()].view_as(p)
                    p.grad = view if how == "views of a flat buffer" else torch.zeros_like(p)
                    held.append(p.grad)
                    begin += p.numel()
                call(torch.randn(2, 4, device=device))
                assert all(p.grad is None for p in model.parameters())
                found += [flat.clone(), *(t.detach().clone() for t in (*held, *model.parameters()))]
        return found

    assert all(torch.equal(one, two) for one, two in zip(run(True), run(False), strict=True))


def test_accumulation_with_a_flat_buffer_at_times_is_not_stale(device: torch.device) -> None:
    """A call brings gradients to where its graph has them, and back: to memory that other graphs have used since."""

    def run(captured: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to(device)
        flat = torch.zeros(544, device=device)

        def accumulate(x: torch.Tensor) -> None:
            model(x).pow(2).mean().backward()

        found: list[torch.Tensor | None] = []
        with stepgraph.capture(accumulate) if captured else contextlib.nullcontext(accumulate) as call:
            for what in "aaabbfbanbabfaanabfbbaznaba":
                if what == "f":
                    begin = 0
                    for p in model.parameters():
                        p.grad = flat[begin : begin + p.numel()].view_as(p)
                        begin += p.numel()
                elif what in "nz":
                    model.zero_grad(set_to_none=what == "n")
                else:
                    call(torch.randn(4 if what == "a" else 40, 16, device=device))
                found += [flat.clone(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        return found

    for one, two in zip(run(True), run(False), strict=True):
        assert (one is None) == (two is None)
        assert one is None or two is None or torch.equal(one, two)
