"""`verify` and its parts: graphed steps that are right pass, and each kind of broken one is caught and named."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.engine.backends import Workspace, backend_for
from stepgraph.engine.grads.param_grads import GradSlot
from stepgraph.engine.guards.protocol import GuardSet
from stepgraph.tools.program import Program, program_of
from stepgraph.tools.script.steps import StepCalls
from stepgraph.tools.verification.bits import digest, measure, same_bits
from stepgraph.tools.verification.compare import Comparison, compare
from stepgraph.tools.verification.report import Verdict, VerifyReport
from stepgraph.tools.verification.script_trace import VerifyProbe
from stepgraph.tools.verification.trace import Keeper

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(count: int = 3) -> list[Batch]:
    return [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(count)]


class Training:
    """A small training: its model, its optimizer, its step, and all that it may change."""

    def __init__(self, *layers: nn.Module, optimizer: Any = torch.optim.SGD) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        self.scale = 1.0

    @property
    def state(self) -> Program:
        return Program({"model": self.model}, {"optimizer": self.optimizer})

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.model(x), y) * self.scale
        loss.backward()
        return loss.detach()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.backward(x, y)
        self.optimizer.step()
        return loss


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    made = backend_for("cpu").workspace()
    yield made
    made.close()


class ByHand:
    """A graph made by hand: static inputs, one recording, and a replay at each call."""

    def __init__(self, workspace: Workspace, work: Callable[..., Any], *inputs: torch.Tensor) -> None:
        self.inputs = [one.clone() for one in inputs]
        self.graph = workspace.graph()
        with workspace.capturing():
            self.graph.begin()
            self.output = work(*self.inputs)
            self.graph.end()

    def __call__(self, *given: torch.Tensor) -> Any:
        for static, one in zip(self.inputs, given, strict=True):
            static.copy_(one)
        self.graph.replay()
        return self.output.clone()


def with_gradients(training: Training) -> Training:
    """Gradients at fixed addresses, as a graph made by hand needs them."""
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return training


def named(found: Comparison) -> str:
    assert found.cause is not None
    return found.cause.rule


# -- what is right


def test_verify_passes_a_captured_step() -> None:
    training = Training(nn.BatchNorm1d(8), nn.Dropout(0.3), optimizer=torch.optim.AdamW)
    step = stepgraph.capture(training.step)
    report = stepgraph.verify(step, batches())
    assert report.equal, report
    assert (report.verdict, report.kind, report.backend) == (Verdict.EQUAL, "captured step", "tape")
    kinds = {row.kind for row in report.comparison.rows}
    assert kinds == {*("outputs", "arguments", "gradients", "parameters", "optimizer state", "buffers", "random state")}
    eager, graphed = report.comparison.costs
    assert (eager.replays, eager.launches is not None and eager.launches > 50) == (0, True)
    assert (graphed.replays or 0) >= 1
    step.close()


def test_verify_captures_a_plain_function() -> None:
    training = Training()
    report = stepgraph.verify(training.step, batches())
    assert report.equal, report
    assert report.kind == "function"
    assert bool(report)


def test_verify_judges_graphed_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    with stepgraph.graph_modules(model, ["0", "2"]) as handle:
        report = stepgraph.verify(handle, [x for x, _ in batches()])
        assert report.equal, report
        assert report.replays == 8, "two modules, two microbatches, forward and backward"
        assert stepgraph.verify(model, [x for x, _ in batches()]).equal


def test_verify_judges_graphed_callables() -> None:
    layer = nn.Linear(4, 3)
    graphed = stepgraph.make_graphed_callables(layer, (torch.randn(6, 4),), backend="tape")
    report = stepgraph.verify(graphed, [torch.randn(6, 4) for _ in range(3)])
    assert report.equal, report

    weight = torch.randn(4, 3, requires_grad=True)
    function = stepgraph.make_graphed_callables(lambda x: x @ weight, (torch.randn(6, 4),), backend="tape")
    report = stepgraph.verify(function, [torch.randn(6, 4) for _ in range(3)])
    assert report.equal, report
    assert report.kind == "graphed callable"


def test_verify_takes_a_step_that_calls_graphed_parts() -> None:
    training = Training(nn.Tanh())
    with stepgraph.graph_modules(training.model, ["0"]):
        report = stepgraph.verify(training.step, batches())
    assert report.equal, report
    assert report.replays >= 2


def test_verify_compares_named_and_own_generators() -> None:
    generator = torch.Generator()
    tracker = stepgraph.get_cuda_rng_tracker("cpu")
    tracker.reset()
    tracker.add("model-parallel-rng", 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            noise = torch.rand(6, 1)
        return (x.sum() + noise * torch.rand(6, 1, generator=generator) * y).sum()

    captured = stepgraph.capture(step, generators=[generator])
    before = (generator.get_state(), *tracker.get_states().values())
    report = stepgraph.verify(captured, batches())
    assert report.equal, report
    assert next(row for row in report.comparison.rows if row.kind == "random state").num_values == 3
    assert same_bits(before, (generator.get_state(), *tracker.get_states().values()))
    tracker.reset()


def test_verify_uses_the_reference_of_capturable_optimizers() -> None:
    training = Training(optimizer=torch.optim.Adam)
    captured = stepgraph.capture(training.step, optimizer="capturable")
    report = stepgraph.verify(captured, batches())
    assert report.equal, report
    assert training.optimizer.param_groups[0]["lr"] == 0.05


# -- the program is left as it was


def all_state(training: Training) -> Mapping[Any, Any]:
    return Keeper().keep(training.state.values())


@pytest.mark.parametrize("is_trained", [False, True])
def test_verify_leaves_the_program_as_it_was(is_trained: bool) -> None:
    training = Training(nn.BatchNorm1d(8), nn.Dropout(0.3), optimizer=torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return training.step(x, y)

    if is_trained:
        step(*batches(1)[0])
        scheduler.step()
    given = batches()
    before, parameters = all_state(training), list(training.model.parameters())
    grads, host = [p.grad for p in parameters], (random.getstate(), scheduler.state_dict())
    stepgraph.verify(step, given)
    assert same_bits(before, all_state(training))
    assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))
    assert all(a is b for a, b in zip(parameters, training.model.parameters(), strict=True))
    assert (random.getstate(), scheduler.state_dict()) == host


def test_verify_restores_after_an_exception() -> None:
    training = Training(optimizer=torch.optim.AdamW)
    calls = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError
        return training.step(x, y)

    given = batches()
    before = all_state(training)
    with pytest.raises(ZeroDivisionError):
        compare(step, step, given, training.state)
    assert same_bits(before, all_state(training))


def test_verify_keeps_the_graphs_that_a_step_had() -> None:
    model = nn.Linear(4, 2)
    with stepgraph.capture(lambda x: model(x).detach() * 2) as step:
        for x, _ in batches(5):
            step(x)
        assert stepgraph.verify(step, [x for x, _ in batches()]).equal
        replays = step.replays
        step(batches(1)[0][0])
        assert (step.replays, step.report().captures) == (replays + 1, 1)


def test_verify_leaves_an_optimizer_in_its_graph() -> None:
    """The learning rate changes during the comparison only, so that it may stay baked in afterwards."""
    training = Training()
    with stepgraph.capture(training.step) as step:
        for batch in batches(5):
            step(*batch)
        before = step.report()
        assert before.segments == 1
        assert stepgraph.verify(step, batches()).equal
        for batch in batches(5):
            step(*batch)
        assert step.report().segments == 1
        assert step.report().optimizers == before.optimizers


# -- what is broken


def test_frozen_learning_rate_is_named(workspace: Workspace) -> None:
    training = with_gradients(Training())
    broken = ByHand(workspace, training.step, *batches(1)[0])
    found = compare(training.step, broken, batches(), training.state)
    assert named(found) == "frozen-number"
    assert found.first is not None
    assert (found.first.kind, found.first.step) == ("parameters", 1)
    assert found.cause is not None
    assert found.cause.where is not None
    assert found.cause.where.source == "self.optimizer.step()"
    assert "-0.05" in found.cause.what


def test_frozen_scalar_is_named_with_its_line(workspace: Workspace) -> None:
    training = with_gradients(Training())
    calls = 0

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((training.model(x) - y) * training.scale).square().mean()

    def eager(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        training.scale = 1.0 if x[0, 0] < 100 else 3.0
        return loss(x, y)

    broken = ByHand(workspace, loss, *batches(1)[0])
    given = [batches(1)[0], batches(1)[0], (torch.full((6, 4), 200.0), torch.zeros(6, 1))]
    found = compare(eager, broken, given, training.state, steps=3)
    assert calls == 0
    assert named(found) == "frozen-number"
    assert found.cause is not None
    assert found.cause.where is not None
    assert "training.scale" in found.cause.where.source
    assert "1.0" in found.cause.what
    assert "3.0" in found.cause.what


def test_aliased_gradient_is_named() -> None:
    """As torch.cuda.make_graphed_callables does where `.grad` is None: autograd takes the static gradient itself."""
    training = Training()
    static = [torch.zeros_like(parameter) for parameter in training.model.parameters()]

    def step(backward: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = backward(x, y) + backward(x * 2, y)
        training.optimizer.step()
        return loss

    def replayed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(training.model(x), y)
        for buffer, grad in zip(static, torch.autograd.grad(loss, list(training.model.parameters())), strict=True):
            buffer.copy_(grad)
        for parameter, buffer in zip(training.model.parameters(), static, strict=True):
            if parameter.grad is None:
                parameter.grad = buffer
            else:
                parameter.grad += buffer
        return loss.detach()

    found = compare(
        lambda x, y: step(training.backward, x, y), lambda x, y: step(replayed, x, y), batches(), training.state
    )
    assert named(found) == "aliased-gradient"
    assert found.first is not None
    assert (found.first.kind, found.first.step) == ("gradients", 0)
    assert found.module is not None
    assert found.module.startswith("model.0")


def test_stale_parameter_is_named(workspace: Workspace) -> None:
    training = with_gradients(Training(nn.Tanh()))
    broken = ByHand(workspace, training.model, batches(1)[0][0])
    training.model[2].weight.data = training.model[2].weight.data.clone() * 2
    found = compare(training.model, broken, [x for x, _ in batches()], training.state)
    assert named(found) == "stale-parameter"
    assert found.cause is not None
    assert "`model.2.weight`" in found.cause.what
    assert "model.0.weight" not in found.cause.what


def test_missing_rng_registration_is_named() -> None:
    training = Training(nn.Dropout(0.5))
    frozen = torch.get_rng_state()

    def replayed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = torch.get_rng_state()
        torch.set_rng_state(frozen)
        loss = training.step(x, y)
        torch.set_rng_state(before)
        return loss

    found = compare(training.step, replayed, batches(), training.state)
    assert named(found) == "rng-not-registered"
    assert found.cause is not None
    assert "torch, cpu" in found.cause.what


def test_reused_output_is_named(workspace: Workspace) -> None:
    model = nn.Linear(4, 2)
    by_hand = ByHand(workspace, model, batches(1)[0][0])

    def broken(x: torch.Tensor) -> Any:
        by_hand(x)
        return by_hand.output

    state = Program({"model": model})
    found = compare(model, broken, [x for x, _ in batches()], state)
    assert (found.first, named(found)) == (None, "reused-output")
    assert not found.equal
    assert compare(model, by_hand, [x for x, _ in batches()], state).equal


def test_skipped_hook_is_named(workspace: Workspace) -> None:
    training = with_gradients(Training())
    broken = ByHand(workspace, training.backward, *batches(1)[0])

    def clip(grad: torch.Tensor) -> torch.Tensor:
        return grad.clamp(-0.01, 0.01)

    def harmless(module: nn.Module, args: Any) -> None:
        assert isinstance(module, nn.Module)

    training.model[1].weight.register_hook(clip)  # after the recording
    training.model[0].register_forward_pre_hook(harmless)

    def step(backward: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> Any:
        training.optimizer.zero_grad(set_to_none=False)
        loss = backward(x, y)
        training.optimizer.step()
        return loss

    found = compare(
        lambda x, y: step(training.backward, x, y), lambda x, y: step(broken, x, y), batches(), training.state
    )
    assert named(found) == "skipped-hook"
    assert found.cause is not None
    assert "clip on model.1.weight" in found.cause.what
    assert "harmless" not in found.cause.what
    assert found.module is not None
    assert found.module.startswith("model.1")


def test_batch_norm_touched_by_warm_up_is_named() -> None:
    training = Training(nn.BatchNorm1d(8))
    is_warm = False

    def with_warm_up(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal is_warm
        if not is_warm:
            with torch.no_grad():
                training.model(x)
            is_warm = True
        return training.step(x, y)

    found = compare(training.step, with_warm_up, batches(), training.state)
    assert named(found) == "buffers-at-warm-up"
    assert found.first is not None
    assert found.first.name.startswith("model.1.")
    assert found.module is not None
    assert found.module.startswith("model.1")


def test_eager_that_differs_from_eager_cannot_be_judged() -> None:
    training = Training()

    def noisy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = training.step(x, y)
        return loss * (1 + 1e-6 * drawn.random())

    drawn = random.Random(3)
    found = compare(noisy, noisy, batches(), training.state)
    assert named(found) == "eager-differs"
    assert not found.spread_is_zero
    report = VerifyReport("noisy", "function", "tape", 1, found)
    assert report.verdict in (Verdict.CANNOT_JUDGE, Verdict.DIFFERENT)
    assert any("learning rate" in line for line in report.advice)
    within = compare(noisy, noisy, batches(), training.state, rtol=1e-4)
    assert within.equal
    assert VerifyReport("noisy", "function", "tape", 1, within).verdict is Verdict.WITHIN


def test_unknown_cause_is_wrong_numbers() -> None:
    training = Training()

    def other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return training.step(x, y) + 1e-3

    found = compare(training.step, other, batches(), training.state)
    assert named(found) == "wrong-numbers"
    assert found.first is not None
    assert found.first.kind == "outputs"
    assert found.first.gap.max_abs == pytest.approx(1e-3, rel=1e-2)


def test_value_out_of_reach_is_named_by_line_and_module() -> None:
    """A captured step that reads a file: nothing watches it, and the logs of eager steps name the line."""
    training = Training(nn.Tanh())
    numbers: dict[int, float] = {}

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(sys.intern("1.0") if not numbers else numbers[len(numbers)])

    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 1))
    state = Program({"model": model})

    def eager(x: torch.Tensor) -> torch.Tensor:
        numbers[len(numbers) + 1] = 2.0 if x[0, 0] > 100 else 1.0
        result = model(x)
        return result.sum()

    def frozen(x: torch.Tensor) -> torch.Tensor:
        numbers[len(numbers) + 1] = 1.0
        return model(x).sum()

    given = [torch.zeros(2, 4), torch.ones(2, 4), torch.full((2, 4), 200.0)]
    found = compare(eager, frozen, given, state, steps=3)
    assert named(found) == "frozen-number"
    assert found.module is not None
    assert found.module.startswith("model.1: result")
    assert training.scale == 1.0


def test_probes_look_into_a_captured_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    captures = backend_for("cpu")

    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if captures.is_capturing() else x + x * 1.5

    model[1] = Other()
    report = stepgraph.verify(lambda x: model(x).sum().detach(), [x for x, _ in batches()])
    assert report.verdict is Verdict.DIFFERENT
    found = report.comparison
    assert named(found) == "other-path"
    assert found.module is not None
    assert found.module.startswith("model.1: result")
    text = str(report)
    assert text.startswith("DIFFERENT: ")
    assert "[other-path]" in text


def test_stale_parameter_of_a_graphed_callable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 3)
    graphed = stepgraph.make_graphed_callables(layer, (torch.randn(6, 4),), backend="tape", audit=False)
    layer.weight.data = layer.weight.data * 2
    monkeypatch.setattr(GuardSet, "changed", lambda guards: ())
    report = stepgraph.verify(graphed, [torch.randn(6, 4) for _ in range(2)], steps=2)
    assert named(report.comparison) == "stale-parameter"
    assert report.comparison.cause is not None
    assert ".weight`" in report.comparison.cause.what
    assert ".bias`" not in report.comparison.cause.what


def test_aliased_gradient_of_a_graphed_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number differs while nobody keeps a gradient; that a replay writes into one shows it."""

    def is_free(slot: GradSlot) -> bool:
        slot.given = None
        return True

    monkeypatch.setattr(GradSlot, "is_free", is_free)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with stepgraph.graph_modules(model, ["0"], warmup=1) as handle:
        report = stepgraph.verify(handle, [x for x, _ in batches()], steps=4)
    assert (named(report.comparison), report.comparison.first) == ("aliased-gradient", None)
    assert report.comparison.cause is not None
    assert "`Sequential.0.weight`" in report.comparison.cause.what


# -- reports and refusals


def test_report_says_it_in_text_and_in_json() -> None:
    report = stepgraph.verify(Training().step, batches())
    text = str(report)
    assert text.splitlines()[0].startswith("EQUAL: step: ")
    assert "optimizer state" in text
    values = report.to_dict()
    assert (values["verdict"], values["equal"], values["steps"]) == ("equal", True, 8)
    assert values["first_difference"] is values["cause"] is None
    assert [cost["side"] for cost in values["costs"]] == ["eager", "graphed"]


def test_verify_notes_a_single_batch() -> None:
    report = stepgraph.verify(Training().step, batches(1))
    assert report.equal
    assert "the same batch" in report.comparison.notes[0]


def test_verify_without_replays_cannot_judge() -> None:
    report = stepgraph.verify(Training().step, batches(), steps=2)
    assert report.verdict is Verdict.CANNOT_JUDGE or report.replays
    eager_only = VerifyReport("step", "function", "tape", 0, report.comparison)
    assert (eager_only.verdict, eager_only.equal) == (Verdict.CANNOT_JUDGE, False)
    assert "nothing was replayed" in eager_only.sentence


@pytest.mark.parametrize(
    ("step", "told"),
    [(nn.Linear(2, 2), "no part"), (3, "not a step")],
)
def test_verify_refuses_what_is_no_step(step: Any, told: str) -> None:
    with pytest.raises(stepgraph.InvalidArgument, match=told):
        stepgraph.verify(step, batches())


def test_verify_refuses_numbers_out_of_range() -> None:
    for name, value in {"steps": 0, "rtol": -1.0, "atol": math.nan}.items():
        with pytest.raises(stepgraph.InvalidArgument, match=name):
            stepgraph.verify(Training().step, batches(), **{name: value})
    with pytest.raises(stepgraph.InvalidArgument, match="`batches`: 5 is not iterable"):
        stepgraph.verify(Training().step, 5)  # type: ignore[arg-type]
    with pytest.raises(stepgraph.InvalidArgument, match="no batch"):
        stepgraph.verify(Training().step, [])


# -- the parts


def test_measure_counts_elements_and_ulps() -> None:
    one = torch.tensor([1.0, -2.0, 0.0, 4.0])
    two = one.clone()
    two[0] = torch.nextafter(one[0], torch.tensor(2.0))
    two[3] = 5.0
    gap = measure(one, two)
    assert (gap.differing, gap.elements, gap.max_abs, gap.max_rel) == (2, 4, 1.0, 0.25)
    assert gap.max_ulp == 1 << 21
    assert measure(one, two, rtol=0.3).is_within
    assert not measure(one, two, rtol=0.2).is_within
    assert not gap.is_within
    assert measure(torch.tensor(0.0), torch.tensor(-0.0)).max_ulp == 0
    assert measure(one, one.double()).note == "float32[4] against float64[4]"
    assert measure(torch.tensor(1.0), torch.tensor(math.nan)).max_abs == math.inf


def test_digest_sees_every_changed_element() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128):
        tensor = torch.zeros(257, dtype=dtype)
        known = digest(tensor)
        assert digest(tensor.clone()) == known
        for place in (0, 100, 256):
            other = tensor.clone()
            other[place] = 1
            assert digest(other) != known
    swapped = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert digest(swapped[0]) != digest(swapped[1])
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, 1))


def test_keeper_keeps_to_its_budget() -> None:
    keeper = Keeper(budget_bytes=64)
    first = keeper.keep({("outputs", "a"): torch.zeros(8), ("outputs", "b"): torch.zeros(8)})
    assert all(isinstance(value, torch.Tensor) for value in first.values())
    again = keeper.keep({("outputs", "a"): torch.zeros(8), ("outputs", "b"): torch.ones(8)})
    assert again[("outputs", "a")] is first[("outputs", "a")]
    assert again[("outputs", "b")] == digest(torch.ones(8))


def test_program_of_a_step_finds_its_state() -> None:
    training, generator, counter = Training(), torch.Generator(), torch.zeros(1)
    scaler = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        counter.add_(torch.rand(1, generator=generator))
        return scaler.scale(training.step(x, y))

    found = program_of(step)
    assert list(found.modules.values()) == [training.model]
    assert list(found.optimizers.values()) == [training.optimizer]
    assert (list(found.tensors), list(found.generators), list(found.others)) == (["counter"], ["generator"], ["scaler"])
    assert program_of(lambda model: model, (training.model,)).modules.keys()


class Running:
    """A script that runs in this process."""

    is_cuda_mapped = True

    def __init__(self, **options: Any) -> None:
        self.options = options

    def stop(self) -> None:
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.mark.parametrize("is_method", [False, True])
def test_probe_captures_the_function_that_is_named(tmp_path: Path, is_method: bool) -> None:
    training = Training()
    running: Any = Running(mode="graphed", seed=1, steps=6, trace=str(tmp_path / "trace.pt"))
    probe = VerifyProbe(running)
    step = StepCalls(running).wrapped(Training.step if is_method else training.step)
    with pytest.raises(KeyboardInterrupt), probe.running():
        for x, y in batches(8):
            step(*((training,) if is_method else ()), x, y)
    result = probe.result()
    facts = {"kind": "captured step", "backend": "tape", "steps": 6, "replays": 3}
    assert result["subjects"]["step"] == {**facts, "overwritten": [], "notes": []}
    saved = torch.load(tmp_path / "trace.pt", weights_only=False)
    assert [moment[:2] for moment in saved] == [("step", index) for index in range(6)]
    assert not hasattr(StepCalls.wrapped, "layers"), "nothing stays replaced"
