"""`capture(on_error="modules")`: a step that cannot be captured goes on with graphs for its modules, equal to eager."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.harness import Program, assert_same_history, run
from tests.module_harness import Layer
from tests.seeding import seed

CALLS, WIDTH, ROWS = 10, 8, 6


class Experts(nn.Module):
    """Sends each row to one of two experts, with a loop on the host: its shapes follow the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            out = out.index_add(0, rows, (expert(x[rows]) * weights[rows, index, None]).to(out.dtype))
        return x + out


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.attn, self.moe = Layer(WIDTH, dropout), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.attn(x))


class Model(nn.Module):
    """Two blocks with experts. `tied`: the weight of the embedding is used once more, without its module."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 2)
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight) if self.tied else self.head(x)


def batches(device: torch.device, microbatches: int = 1) -> list[tuple[torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(microbatches, ROWS, WIDTH, generator=draw).to(device),) for _ in range(CALLS)]


def program_of(
    kind: str, *, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> Callable[[torch.device], Program]:
    """A training: `plain`, with accumulation, under autocast with a scaler, clipped, or with a schedule."""

    def build(device: torch.device) -> Program:
        model = Model(tied=kind == "tied").to(device)
        chosen = optimizer(model.parameters(), lr=1e-2)
        num_micro = 3 if kind in ("accumulation", "tied") else 1
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0, enabled=kind == "amp")
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, CALLS)
        dtype = torch.bfloat16 if device.type == "cpu" else torch.float16

        def step(batch: torch.Tensor) -> torch.Tensor:
            chosen.zero_grad(set_to_none=kind != "tied")
            losses = []
            for x in batch.unbind(0):
                with torch.autocast(device.type, dtype=dtype, enabled=kind == "amp"):
                    loss = model(x).float().pow(2).mean() / num_micro
                scaler.scale(loss).backward()
                losses.append(loss.detach())
            if kind == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(chosen)
            scaler.update()
            if kind == "schedule":
                schedule.step()
            return torch.stack(losses)

        return Program(step, batches(device, num_micro), [model], [chosen])

    return build


@contextlib.contextmanager
def telling() -> Iterator[list[str]]:
    """Collect what stepgraph warns of."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
        told += [str(w.message) for w in caught if issubclass(w.category, stepgraph.StepgraphWarning)]


def captured(program: Program, **options: Any) -> Any:
    return stepgraph.capture(program.step, **{"on_error": "modules", "warmup": 1, "audit": False, **options})


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "accumulation",
        "tied",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("amp", "clip", "schedule")),
    ],
)
def test_step_with_experts_equals_eager(kind: str, device: torch.device) -> None:
    build = program_of(kind)
    seed(7)
    eager = build(device)
    seed(11)
    expected = run(eager, eager.step, device)
    if device.type == "cuda":  # equality with eager means nothing where eager differs from itself
        seed(7)
        again = build(device)
        seed(11)
        assert_same_history(expected, run(again, again.step, device), "eager differs from eager")
    seed(7)
    program = build(device)
    seed(11)
    with telling(), captured(program, audit="auto" if kind == "plain" else False) as step:
        received = run(program, step, device)
        report = step.report()
    assert_same_history(expected, received, f"{kind}: graphs for modules differ from eager")
    assert report.modules.replays > 0
    replayed = {row.path for row in report.modules.rows if row.forwards}
    assert {"Model.embed", "Model.layers.0.attn", "Model.layers.1.attn", "Model.layers.0.moe.gate"} <= replayed


class Norm(nn.Module):
    """Uses its argument twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_sum_of_gradients_keeps_its_order(device: torch.device) -> None:
    """A norm uses its argument twice, and the residual around it once more."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.moe, self.last = nn.Linear(WIDTH, WIDTH), Norm(), Experts(), Norm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(x + self.moe(self.norm(x)))

    def build(device: torch.device) -> Program:
        model = Residual().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch[0]).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        return Program(step, batches(device), [model], [optimizer])

    seed(7)
    eager = build(device)
    expected = run(eager, eager.step, device)
    seed(7)
    program = build(device)
    with telling(), captured(program) as step:
        assert_same_history(expected, run(program, step, device), "the order of a sum")
        report = step.report()
    assert {row.path.removeprefix("Residual.") for row in report.modules.rows} == {"first", "norm", "moe.gate", "last"}
    assert all(row.forwards for row in report.modules.rows)


def test_gradient_penalty_leaves_modules_eager(device: torch.device) -> None:
    model = Model().to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = slope.pow(2).sum()
        loss.backward()
        return loss

    with telling(), stepgraph.capture(step, on_error="modules", warmup=1, audit=False) as graphed:
        for (batch,) in batches(device)[:7]:
            graphed(batch[0])
        report = graphed.report()
    assert not report.modules.rows
    assert "[partial-backward]" in report.modules.left_out["Model.embed"]


def test_report_says_what_stayed_eager_and_why(device: torch.device) -> None:
    program = program_of("plain")(device)
    with telling() as told, captured(program) as step:
        run(program, step, device)
        report = step.report()
    assert len([text for text in told if "[host-read]" in text]) == 1
    assert len([text for text in told if "get graphs: " in text]) == 1
    assert report.eager_reasons["capture failed: [host-read]"] == report.eager_calls - report.eager_reasons["warm-up"]
    (why,) = {reason for path, reason in report.modules.left_out.items() if path == "Model.layers.*.moe"}
    assert "[host-read]" in why
    assert "nonzero()" in why
    assert "Model.layers.*.attn" in str(report)
    assert "modules graphed" in report.verdict
    values = report.to_dict()["modules"]
    assert values["left_out"]
    assert values["replays"] == report.modules.replays


@pytest.mark.slow
def test_search_runs_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepgraph.engine.step.fallback import fallback

    searches: list[Any] = []
    found = fallback.search

    def counted(*given: Any, **more: Any) -> Any:
        searches.append(given)
        return found(*given, **more)

    monkeypatch.setattr(fallback, "search", counted)
    program = program_of("plain")(device)
    with telling(), captured(program) as step:
        run(program, step, device)
        step(torch.randn(1, ROWS + 1, WIDTH, device=device))
        step(torch.randn(1, ROWS + 1, WIDTH, device=device))
        assert len(searches) == 1
        step.reset()
        run(program, step, device)
        assert len(searches) == 2


def test_strict_raises_whatever_on_error_says(device: torch.device) -> None:
    program = program_of("plain")(device)
    step = captured(program, strict=True)
    step(*program.batches[0])
    with pytest.raises(stepgraph.CaptureError, match="host-read"):
        for batch in program.batches:
            step(*batch)


def test_model_is_untouched_between_calls(device: torch.device) -> None:
    program = program_of("plain")(device)
    (model,) = program.modules
    with telling(), captured(program) as step:
        for batch in program.batches:
            step(*batch)
            assert all("forward" not in vars(module) for module in model.modules())
        assert step.report().modules.replays > 0
        other = copy.deepcopy(model)
        assert pickle.loads(pickle.dumps(other)) is not None


@pytest.mark.parametrize("end", ["close", "session", "delete", "reset"])
def test_graphs_are_freed_at(end: str, device: torch.device) -> None:
    program = program_of("plain")(device)
    session = stepgraph.Session()
    step = captured(program, session=session)
    with telling():
        run(program, step, device)
    assert session.num_graphs > 0
    if end == "close":
        step.close()
        assert session.num_graphs == 0
        with pytest.raises(stepgraph.ClosedError):
            step(*program.batches[0])
    elif end == "session":
        session.close()
        with pytest.raises(stepgraph.ClosedError):
            step(*program.batches[0])
    elif end == "reset":
        step.reset()
        assert session.num_graphs == 0
        with telling():
            run(program, step, device)
        assert session.num_graphs > 0
    else:
        alive = weakref.ref(session)
        del step, session
        gc.collect()
        assert alive() is None
    (model,) = program.modules
    model(torch.randn(ROWS, WIDTH, device=device)).sum().backward()


def test_dropped_graphs_are_captured_again(device: torch.device) -> None:
    program = program_of("plain")(device)
    with telling(), stepgraph.Session() as session:
        step = captured(program, session=session)
        run(program, step, device)
        before = step.report().modules.replays
        session.drop_graphs()
        run(program, step, device)
        assert step.report().modules.replays > before


def train(batch: torch.Tensor) -> torch.Tensor:
    """A step that a copy or a pickle of its captured form can name."""
    return batch.sum()


@pytest.mark.slow
def test_copies_and_pickles_go_on_with_modules(device: torch.device) -> None:
    class Trainer:
        def __init__(self) -> None:
            seed(7)
            self.program = program_of("plain")(device)

        def step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.program.step(batch)

    step = stepgraph.capture(train, on_error="modules", warmup=1, audit=False)
    assert repr(pickle.loads(pickle.dumps(step))) == repr(step)
    trainer = Trainer()
    bound = stepgraph.capture(trainer.step, on_error="modules", warmup=1, audit=False)
    with telling():
        for batch in trainer.program.batches:
            bound(*batch)
        other = copy.deepcopy(bound)
        for batch in trainer.program.batches:
            other(*batch)
    assert bound.report().modules.replays > 0
    assert other.report().modules.replays > 0
    bound.close()
    other.close()


def test_decorated_method_goes_on_with_modules(device: torch.device) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Model().to(device)

        @stepgraph.capture(on_error="modules", warmup=1, audit=False)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.model.zero_grad()
            loss = self.model(x).pow(2).mean()
            loss.backward()
            return loss

    trainer = Trainer()
    with telling():
        for (batch,) in batches(device):
            trainer.step(batch[0])
    assert trainer.step.report().modules.replays > 0
    trainer.step.close()


def test_signature_with_a_graph_keeps_it(device: torch.device) -> None:
    """Only one signature reads on the host: the other is captured as a whole, before and after."""
    model = Model().to(device)

    def step(x: torch.Tensor, *, routed: bool) -> torch.Tensor:
        model.zero_grad()
        hidden = model(x) if routed else model.head(model.layers[0].attn(model.embed(x)))
        loss = hidden.pow(2).mean()
        loss.backward()
        return loss

    with telling(), stepgraph.capture(step, on_error="modules", warmup=1, audit=False) as graphed:
        for (batch,) in batches(device):
            graphed(batch[0], routed=False)
            graphed(batch[0], routed=True)
        report = graphed.report()
    assert report.graphs == 1
    assert report.recaptures == 0
    assert report.replays > CALLS // 2
    assert report.modules.replays > 0


def test_step_without_capturable_modules_runs_eagerly(device: torch.device) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * x.sum().item()

    model = Reading().to(device)
    with (
        telling() as told,
        stepgraph.capture(lambda x: model(x).sum(), on_error="modules", warmup=1, audit=False) as step,
    ):
        for (batch,) in batches(device)[:6]:
            step(batch[0])
        report = step.report()
    assert any("none of its modules can be captured" in text for text in told)
    assert not report.modules.rows
    assert report.replays == 0


def test_step_that_raises_is_restored(device: torch.device) -> None:
    program = program_of("plain")(device)
    (model,) = program.modules
    fails: list[bool] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = program.step(batch)
        if fails:
            raise KeyError("stop")
        return loss

    with telling(), stepgraph.capture(step, on_error="modules", warmup=1, audit=False, ignore=["fails"]) as graphed:
        for index, batch in enumerate(program.batches):
            fails[:] = [True] * (index in (3, 4, 9))
            if fails:
                with pytest.raises(KeyError, match="stop"):
                    graphed(*batch)
            else:
                graphed(*batch)
            assert all("forward" not in vars(module) for module in model.modules())
        assert graphed.report().modules.replays > 0


def test_wrapper_of_a_full_iteration_refuses_modules() -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="on_error='modules' is not one of 'raise', 'eager'"):
        stepgraph.FullCudaGraphWrapper(lambda **_: None, on_error="modules")
    with pytest.raises(stepgraph.InvalidArgument, match="on_error='modules' is not one of 'raise', 'eager'"):
        stepgraph.graph_modules(nn.Linear(2, 2), "forward", on_error="modules")
