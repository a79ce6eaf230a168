"""Named random states in a captured step: every replay draws what eager would, from every state, after every call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph import CudaRNGStatesTracker, get_cuda_rng_tracker
from tests.harness import Program, assert_captured_equals_eager, different, same_bits, snapshot

Loss = Callable[[torch.Tensor], torch.Tensor]
OTHER = "data-parallel-rng"


@pytest.fixture(autouse=True)
def no_names_left(device: torch.device) -> Iterator[None]:
    yield
    get_cuda_rng_tracker(device).reset()


def with_names(device: torch.device) -> CudaRNGStatesTracker:
    """The process's tracker, started over with two names."""
    tracker = get_cuda_rng_tracker(device)
    tracker.reset()
    tracker.add("model-parallel-rng", 101)
    tracker.add(OTHER, 202)
    return tracker


def trained(tracker: CudaRNGStatesTracker, device: torch.device, loss_of: Callable[[nn.Module], Loss]) -> Program:
    """A plain loop over a small model, whose random states are compared too."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = loss_of(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(x)
        value.backward()
        optimizer.step()
        return value

    batches = [(torch.randn(8, 16, device=device),) for _ in range(14)]
    return Program(step, batches, [model], [optimizer], named_states=tracker.get_states)


# -- programs


def dropout_and_noise(device: torch.device) -> Program:
    tracker = with_names(device)

    def loss_of(model: nn.Module) -> Loss:
        def loss(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                hidden = F.dropout(model(x), 0.3)
            noise = torch.randn(x.shape, device=device)
            return (hidden + 0.1 * noise).pow(2).mean()

        return loss

    return trained(tracker, device, loss_of)


def two_names(device: torch.device) -> Program:
    tracker = with_names(device)

    def loss_of(model: nn.Module) -> Loss:
        def loss(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                with tracker.fork():
                    x = F.dropout(model(x), 0.2)
                with tracker.fork(OTHER):
                    x = x + torch.rand(x.shape, device=device)
                x = F.dropout(x, 0.1)
            return x.pow(2).mean()

        return loss

    return trained(tracker, device, loss_of)


def asked_for_in_the_step(device: torch.device) -> Program:
    with_names(device)

    def loss_of(model: nn.Module) -> Loss:
        def loss(x: torch.Tensor) -> torch.Tensor:
            assert get_cuda_rng_tracker(device).is_initialized()
            with get_cuda_rng_tracker(device).fork(name=OTHER):
                return F.dropout(model(x), 0.5).pow(2).mean()

        return loss

    return trained(get_cuda_rng_tracker(device), device, loss_of)


def nested(device: torch.device) -> Program:
    tracker = with_names(device)

    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, device=device)

    def loss_of(model: nn.Module) -> Loss:
        def loss(x: torch.Tensor) -> torch.Tensor:
            x = draw(model(x))
            with tracker.fork():
                x = draw(x)
                with tracker.fork(OTHER):
                    x = draw(x)
                    with tracker.fork():  # the outermost one again: it goes on where it is
                        x = draw(x)
                        with tracker.fork():
                            x = draw(x)
                    x = draw(x)
                x = draw(x)
            return draw(x).pow(2).mean()

        return loss

    return trained(tracker, device, loss_of)


def exception_inside(device: torch.device) -> Program:
    tracker = with_names(device)

    def loss_of(model: nn.Module) -> Loss:
        def loss(x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(KeyError), tracker.fork(), tracker.fork(OTHER):
                x = F.dropout(x, 0.5)
                raise KeyError
            return F.dropout(model(x), 0.5).pow(2).mean()

        return loss

    return trained(tracker, device, loss_of)


def backward_in_the_fork(device: torch.device) -> Program:
    """All of the step inside a fork, an optimizer that draws, too: it runs between graphs, and draws from the name."""
    tracker = with_names(device)
    program = trained(tracker, device, lambda model: lambda x: F.dropout(model(x), 0.2).pow(2).mean())
    (model,) = program.modules
    optimizer = Langevin(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            optimizer.zero_grad()
            loss = F.dropout(model(x), 0.2).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss + torch.rand((), device=device)

    program.step, program.optimizers = step, [optimizer]
    return program


class Langevin(torch.optim.Optimizer):
    """Gradient descent with noise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])


def checkpointed(device: torch.device) -> Program:
    tracker = with_names(device)

    def loss_of(model: nn.Module) -> Loss:
        def block(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                x = F.dropout(model(x), 0.4)
            x = F.dropout(x, 0.1)
            with tracker.fork(OTHER):
                return F.dropout(model(x).sigmoid(), 0.2)

        def loss(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(block, x, use_reentrant=False, context_fn=tracker.checkpoint_contexts)
            return x.pow(2).mean()

        return loss

    return trained(tracker, device, loss_of)


def checkpointed_in_the_fork(device: torch.device) -> Program:
    tracker = with_names(device)

    def loss_of(model: nn.Module) -> Loss:
        def block(x: torch.Tensor) -> torch.Tensor:
            x = F.dropout(model(x), 0.4)
            with tracker.fork(OTHER):
                return F.dropout(model(x).sigmoid(), 0.2)

        def loss(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=tracker.checkpoint_contexts,
                )
            return x.pow(2).mean()

        return loss

    return trained(tracker, device, loss_of)


def checkpoints_nested(device: torch.device) -> Program:
    tracker = with_names(device)

    def loss_of(model: nn.Module) -> Loss:
        def inner(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork(OTHER):
                return F.dropout(model(x).sigmoid(), 0.3)

        def outer(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                x = F.dropout(x, 0.3)
            x = checkpoint(inner, x, use_reentrant=False, context_fn=tracker.checkpoint_contexts)
            return F.dropout(x, 0.1) * x

        def loss(x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(outer, model(x), use_reentrant=False, context_fn=tracker.checkpoint_contexts)
            return x.pow(2).mean()

        return loss

    return trained(tracker, device, loss_of)


def recomputed_twice(device: torch.device) -> Program:
    """Two backward passes through one checkpoint: each recomputes."""
    tracker = with_names(device)
    program = trained(tracker, device, lambda model: lambda x: model(x).sum())
    (model,), (optimizer,) = program.modules, program.optimizers

    def block(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return F.dropout(model(x).sigmoid(), 0.4)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        out = checkpoint(block, x, use_reentrant=False, context_fn=tracker.checkpoint_contexts)
        out.sum().backward(retain_graph=True)
        out.pow(2).sum().backward()
        optimizer.step()
        return out

    program.step = step
    return program


def backward_that_draws(device: torch.device) -> Program:
    tracker = with_names(device)

    class NoisyGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            with tracker.fork(OTHER):
                grad = grad + 0.01 * torch.randn_like(grad)
            return F.dropout(grad, 0.1)

    def loss_of(model: nn.Module) -> Loss:
        def loss(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                return F.dropout(NoisyGradient.apply(model(x)), 0.2).pow(2).mean()

        return loss

    return trained(tracker, device, loss_of)


def states_put_back_by_hand(device: torch.device) -> Program:
    """A checkpoint of the user's own: states are read in the forward, and set for the recomputation."""
    tracker = with_names(device)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.states = tracker.get_states()
            ctx.save_for_backward(x)
            with tracker.fork():
                return F.dropout(x, 0.5)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            now = tracker.get_states()
            tracker.set_states(ctx.states)
            with torch.enable_grad(), tracker.fork():
                again = F.dropout(x.detach().requires_grad_(), 0.5)
            tracker.set_states(now)
            return grad * (again != 0) * 2

    return trained(tracker, device, lambda model: lambda x: Again.apply(model(x)).pow(2).mean())


def validated_without_gradients(device: torch.device) -> Program:
    tracker = with_names(device)
    program = trained(tracker, device, lambda model: lambda x: model(x).sum())
    (model,) = program.modules

    @torch.no_grad()
    def step(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return F.dropout(model(x), 0.3) + torch.rand(x.shape, device=device)

    program.step = step
    return program


PROGRAMS = {
    build.__name__: build
    for build in (
        dropout_and_noise,
        two_names,
        asked_for_in_the_step,
        nested,
        exception_inside,
        backward_in_the_fork,
        checkpointed,
        checkpointed_in_the_fork,
        checkpoints_nested,
        recomputed_twice,
        backward_that_draws,
        states_put_back_by_hand,
        validated_without_gradients,
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_fork_captured_equals_eager(name: str, device: torch.device) -> None:
    report = assert_captured_equals_eager(PROGRAMS[name], device, strict=True)
    assert report.captures == 1
    assert report.replays >= 10


def test_fork_draws_from_every_state_it_should(device: torch.device) -> None:
    """The programs above prove nothing if their states stand still."""
    program = two_names(device)
    before = snapshot(program, device)
    with stepgraph.capture(program.step, warmup=1) as step:
        for batch in program.batches[:3]:
            step(*batch)
    changed = different(before, snapshot(program, device))
    assert {"rng model-parallel-rng", f"rng {OTHER}", f"rng {device.type}"} <= set(changed)


@pytest.mark.parametrize("around", [False, True], ids=["fork in the checkpoint", "checkpoint in the fork"])
def test_checkpoint_contexts_repeat_the_masks_of_the_forward(around: bool, device: torch.device) -> None:
    tracker = with_names(device)
    weight = torch.ones(64, 64, device=device, requires_grad=True)

    def block(w: torch.Tensor) -> torch.Tensor:
        w = F.dropout(w * w, 0.5)
        with tracker.fork():
            return F.dropout(w * w, 0.5)

    def recomputed(w: torch.Tensor) -> torch.Tensor:
        contexts = tracker.checkpoint_contexts
        return checkpoint(block, w, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with_names(device)
        torch.manual_seed(3)
        weight.grad = None
        with tracker.fork(OTHER) if around else contextlib.nullcontext():
            out = function(weight)
        with tracker.fork():
            F.dropout(out.sin(), 0.5).sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected, states = run(block), tracker.get_states()
    assert same_bits(expected, run(recomputed))
    assert different(states, tracker.get_states()) == []


# -- states between calls


def test_set_states_between_replays_acts_without_a_capture(device: torch.device) -> None:
    tracker = with_names(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return x + torch.rand(8, device=device)

    x = torch.zeros(8, device=device)
    with stepgraph.capture(step, warmup=1) as captured:
        captured(x)
        kept = tracker.get_states()
        drawn = [captured(x) for _ in range(3)]
        tracker.set_states(kept)
        again = [captured(x) for _ in range(3)]
        tracker.set_states({name: state.clone() for name, state in kept.items()})
        with tracker.fork():
            eager = torch.rand(8, device=device)
        report = captured.report()
    assert all(same_bits(one, two) for one, two in zip(drawn, again, strict=True))
    assert same_bits(eager, drawn[0])
    assert (report.captures, report.recaptures) == (1, 0)


def test_resume_from_saved_states_equals_an_uninterrupted_run(device: torch.device, tmp_path: Any) -> None:
    def losses(program: Program, first: int, last: int) -> list[torch.Tensor]:
        with stepgraph.capture(program.step, warmup=1) as step:
            return [step(*batch) for batch in program.batches[first:last]]

    torch.manual_seed(1)
    program = checkpointed(device)
    losses(program, 0, 6)
    tracker = get_cuda_rng_tracker(device)
    default = tracker._backend.default_generator
    torch.save(
        {
            "model": program.modules[0].state_dict(),
            "optimizer": program.optimizers[0].state_dict(),
            "named": tracker.get_states(),
            "default": default.get_state(),
        },
        tmp_path / "saved.pt",
    )
    expected = losses(program, 6, 14)
    state = snapshot(program, device)

    torch.manual_seed(1)
    resumed = checkpointed(device)
    saved = torch.load(tmp_path / "saved.pt", map_location=device)
    resumed.modules[0].load_state_dict(saved["model"])
    resumed.optimizers[0].load_state_dict(saved["optimizer"])
    tracker.set_states(saved["named"])
    default.set_state(saved["default"].cpu())
    received = losses(resumed, 6, 14)
    assert all(same_bits(one, two) for one, two in zip(expected, received, strict=True))
    assert different(state, snapshot(resumed, device)) == []


# -- names that come and go


def late(tracker: CudaRNGStatesTracker, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        name = "late" if "late" in tracker.states else OTHER
        with tracker.fork(name):
            return x + torch.rand(8, device=device)

    return step


def test_name_added_after_capture_is_a_new_capture(device: torch.device) -> None:
    def run(capture_it: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
        tracker = with_names(device)
        step: Any = late(tracker, device)
        if capture_it:
            step = stepgraph.capture(step, warmup=1)
        drawn = []
        for index in range(12):
            if index == 6:
                tracker.add("late", 303)
            drawn.append(step(torch.zeros(8, device=device)))
        report = step.report() if capture_it else None
        if capture_it:
            step.close()
        return drawn, tracker.get_states(), report

    expected, states, _ = run(False)
    received, new_states, report = run(True)
    assert all(same_bits(one, two) for one, two in zip(expected, received, strict=True))
    assert different(states, new_states) == []
    assert report.recapture_reasons == {"random state `late` was added to the tracker": 1}


def test_name_added_after_capture_raises_under_strict(device: torch.device) -> None:
    tracker = with_names(device)
    with stepgraph.capture(late(tracker, device), warmup=1, strict=True) as step:
        for _ in range(3):
            step(torch.zeros(8, device=device))
        tracker.add("late", 303)
        with pytest.raises(stepgraph.StateChanged, match="`late` was added"):
            step(torch.zeros(8, device=device))


def test_names_made_again_are_a_new_capture(device: torch.device) -> None:
    tracker = with_names(device)
    x = torch.zeros(8, device=device)
    with stepgraph.capture(late(tracker, device), warmup=1) as step:
        drawn = [step(x) for _ in range(4)]
        with_names(device)
        again = [step(x) for _ in range(4)]
        assert step.report().recapture_reasons == {"the tracker's random states were made again": 1}
    assert all(same_bits(one, two) for one, two in zip(drawn, again, strict=True))


def test_name_that_is_gone_is_an_error_at_the_next_call(device: torch.device) -> None:
    tracker = with_names(device)
    x = torch.zeros(8, device=device)
    with stepgraph.capture(late(tracker, device), warmup=1) as step:
        step(x)
        step(x)
        tracker.reset()
        with pytest.raises(stepgraph.InvalidArgument, match="there is no random state"):
            step(x)


def test_name_that_the_step_does_not_ask_for_is_no_new_capture(device: torch.device) -> None:
    tracker = with_names(device)
    with stepgraph.capture(lambda x: F.dropout(x, 0.5), warmup=1, strict=True) as step:
        for _ in range(3):
            step(torch.ones(8, device=device))
        tracker.add("late", 303)
        step(torch.ones(8, device=device))
        assert step.report().captures == 1


def test_step_called_inside_and_outside_a_fork_has_two_graphs(device: torch.device) -> None:
    def run(capture_it: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
        torch.manual_seed(4)
        tracker = with_names(device)

        def step(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork(OTHER):
                x = x + torch.rand(8, device=device)
            return x + torch.rand(8, device=device)

        call: Any = stepgraph.capture(step, warmup=1, strict=True) if capture_it else step
        drawn = []
        for index in range(18):
            fork = [contextlib.nullcontext(), tracker.fork(), tracker.fork(OTHER)][index % 3]
            with fork:
                drawn.append(call(torch.zeros(8, device=device)))
        report = call.report() if capture_it else None
        return drawn, tracker.get_states(), report

    expected, states, _ = run(False)
    received, new_states, report = run(True)
    assert all(same_bits(one, two) for one, two in zip(expected, received, strict=True))
    assert different(states, new_states) == []
    assert (report.captures, report.recaptures) == (3, 0)


# -- failures


def test_capture_that_fails_inside_a_fork_leaves_every_state(device: torch.device) -> None:
    tracker = with_names(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork(), tracker.fork(OTHER):
            x = F.dropout(x, 0.5)
            if tracker._backend.is_capturing():
                raise KeyError("a bug in the user's code")
        return x

    with stepgraph.capture(step, warmup=1) as captured:
        captured(torch.ones(8, device=device))
        default = tracker._backend.default_generator
        before = {**tracker.get_states(), "default": default.get_state()}
        with pytest.raises(stepgraph.CaptureError, match="KeyError"):
            captured(torch.ones(8, device=device))
        assert tracker.active is None
        assert different(before, {**tracker.get_states(), "default": default.get_state()}) == []
        with tracker.fork():
            torch.rand(8, device=device)  # eager code goes on


@pytest.mark.parametrize("reentrant", [False, True])
def test_fork_in_a_recomputation_that_knows_no_names_is_refused(reentrant: bool, device: torch.device) -> None:
    tracker = with_names(device)

    def block(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return F.dropout(x.sigmoid(), 0.5)

    out = checkpoint(block, torch.ones(8, device=device, requires_grad=True), use_reentrant=reentrant)
    with pytest.raises(stepgraph.InvalidArgument, match="rng-recompute") as caught:
        out.sum().backward()
    assert "checkpoint_contexts" in caught.value.fix
    assert tracker.active is None


def test_checkpoint_in_a_fork_restored_by_torch_is_refused(device: torch.device) -> None:
    """torch sets the named state's seed on the default generator, which no graph can replay."""
    tracker = with_names(device)
    weight = torch.ones(8, device=device, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        with tracker.fork():
            out = checkpoint(lambda w: F.dropout(w.sigmoid(), 0.5), weight * x, use_reentrant=False)
        out.sum().backward()
        return out

    with stepgraph.capture(step, warmup=1) as captured:
        for _ in range(2):
            captured(torch.ones(8, device=device))
        with pytest.raises(stepgraph.CaptureError, match="reseed"):
            captured(torch.ones(8, device=device))


@pytest.mark.parametrize("named", [True, False], ids=["named state", "default state"])
def test_recomputation_in_another_graph_is_refused(named: bool, device: torch.device) -> None:
    tracker = with_names(device)
    options = {"preserve_rng_state": False, "context_fn": tracker.checkpoint_contexts} if named else {}
    model, other = nn.Linear(8, 8).to(device), nn.Linear(8, 8).to(device)
    optimizer = Langevin(other.parameters())

    def block(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork() if named else contextlib.nullcontext():
            return F.dropout(model(x).sigmoid(), 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        other.zero_grad()
        out = checkpoint(block, x, use_reentrant=False, **options)
        other(x).sum().backward()
        optimizer.step()  # cuts the graph
        out.sum().backward()
        return out

    with stepgraph.capture(step, warmup=1) as captured:
        for _ in range(2):
            captured(torch.ones(2, 8, device=device))
        with pytest.raises(stepgraph.CaptureError, match="rng-segment"):
            captured(torch.ones(2, 8, device=device))


def test_default_state_from_before_the_capture_is_refused_in_it(device: torch.device) -> None:
    module = torch.cuda if device.type == "cuda" else torch
    state = module.get_rng_state()

    def step(x: torch.Tensor) -> torch.Tensor:
        module.set_rng_state(state)
        return F.dropout(x, 0.5)

    with stepgraph.capture(step, warmup=1) as captured:
        captured(torch.ones(8, device=device))
        with pytest.raises(stepgraph.CaptureError, match="rng-segment"):
            captured(torch.ones(8, device=device))


def test_states_of_before_the_capture_are_refused_inside_it(device: torch.device) -> None:
    tracker = with_names(device)
    states = tracker.get_states()

    def step(x: torch.Tensor) -> torch.Tensor:
        tracker.set_states(states)
        with tracker.fork():
            return F.dropout(x, 0.5)

    with stepgraph.capture(step, warmup=1) as captured:
        captured(torch.ones(8, device=device))
        with pytest.raises(stepgraph.CaptureError, match="rng-segment"):
            captured(torch.ones(8, device=device))


def test_name_added_while_a_step_is_captured_is_refused(device: torch.device) -> None:
    tracker = with_names(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        if tracker._backend.is_capturing():
            tracker.add("late", 303)
        return x * 2

    with stepgraph.capture(step, warmup=1) as captured:
        captured(torch.ones(8, device=device))
        with pytest.raises(stepgraph.InvalidArgument, match="`late` was about to be added while a step is captured"):
            captured(torch.ones(8, device=device))


def test_tracker_of_ones_own_needs_its_generators_named(device: torch.device) -> None:
    def run(**options: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        tracker = CudaRNGStatesTracker(stepgraph.backend_for(device))
        tracker.add("mine", 5)

        def step(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork("mine"):
                return F.dropout(x, 0.5)

        call: Any = step
        if options:
            named = tracker.generators if options["named"] else ()
            call = stepgraph.capture(step, warmup=1, generators=named)
        return [call(torch.ones(32, device=device)) for _ in range(6)], tracker.get_states()

    with pytest.raises(stepgraph.CaptureError, match="generator"):
        run(named=False)
    (expected, states), (received, new_states) = run(), run(named=True)
    assert all(same_bits(one, two) for one, two in zip(expected, received, strict=True))
    assert different(states, new_states) == []


# -- inference mode


def test_names_made_under_inference_mode_work_in_a_step(device: torch.device) -> None:
    def build(target: torch.device) -> Program:
        with torch.inference_mode():
            program = two_names(target)
            tracker = get_cuda_rng_tracker(target)
            with tracker.fork():
                torch.rand(4, device=target)
            states = tracker.get_states()
            tracker.reset()
            tracker.set_states(states)
        assert not any(state.is_inference() for state in states.values())
        with torch.inference_mode(False):
            fresh = two_names(target)
        get_cuda_rng_tracker(target).set_states(states)
        fresh.batches = [(x.clone(),) for (x,) in program.batches]
        return fresh

    assert_captured_equals_eager(build, device)


def test_step_captured_first_in_inference_mode_can_train_later(device: torch.device) -> None:
    """Seed and offset of a generator live in tensors that its first graph makes."""

    def run(capture_it: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
        torch.manual_seed(2)
        program = two_names(device)
        (model,) = program.modules
        tracker = get_cuda_rng_tracker(device)

        def validate(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                return F.dropout(model(x), 0.5) + torch.rand(x.shape, device=device)

        evaluate: Any = stepgraph.capture(validate, warmup=1) if capture_it else validate
        train: Any = stepgraph.capture(program.step, warmup=1) if capture_it else program.step
        drawn = []
        for index, batch in enumerate(program.batches):
            with torch.inference_mode():
                drawn.append(evaluate(*batch))
            if index > 3:
                drawn.append(train(*batch).detach())
        return [value.clone() for value in drawn], snapshot(program, device)

    (expected, state), (received, new_state) = run(False), run(True)
    assert all(same_bits(one, two) for one, two in zip(expected, received, strict=True))
    assert different(state, new_state) == []


def test_own_generator_made_under_inference_mode_works_in_a_step(device: torch.device) -> None:
    def build(target: torch.device) -> Program:
        with torch.inference_mode():
            generator = torch.Generator(target).manual_seed(3)
            torch.rand(4, device=target, generator=generator)
            generator.set_state(generator.get_state())

        def step(x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(8, device=target, generator=generator)

        return Program(step, [(torch.zeros(8, device=target),)] * 12, generators=[generator])

    assert_captured_equals_eager(build, device)
