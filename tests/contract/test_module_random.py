"""Random numbers in graphed modules: those of eager, at every call, and again in what is recomputed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from tests.module_harness import Layer, Net, Training, assert_graphed_equals_eager, quiet, training_of


@pytest.fixture
def tracker(device: torch.device) -> Iterator[stepgraph.CudaRNGStatesTracker]:
    """The device's tracker with two names, empty again afterwards."""
    found = stepgraph.get_cuda_rng_tracker(device)
    found.reset()
    found.add("model-parallel-rng", 123)
    found.add("other", 456)
    yield found
    found.reset()


def test_random_dropout_draws_eagers_sequence(device: torch.device) -> None:
    """Graphed and eager layers draw in turn from one generator."""
    assert_graphed_equals_eager(
        lambda device: training_of(
            lambda: Net(Layer(dropout=0.5), nn.Dropout(0.5), Layer(dropout=0.3)), device, microbatches=2
        ),
        device,
        ["layers.0", "layers.2"],
    )


class Noise(torch.autograd.Function):
    """Draws in the forward, and draws again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.rand_like(grad)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Noise.apply(self.inner(x))


def test_random_draws_in_the_backward(device: torch.device) -> None:
    assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(Noisy(), Layer(), Noisy()), device, microbatches=2), device
    )


class OwnGenerator(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.inner, self._generator = nn.Linear(8, 8), generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self._generator, device=x.device)
        return self.inner(x) * noise


def test_random_generator_of_the_callers(device: torch.device) -> None:
    """Listed under generators=, it goes on as in eager; unlisted, the module stays eager and says so."""
    generator = torch.Generator(device)

    def build(device: torch.device) -> Training:
        generator.manual_seed(5)
        return training_of(lambda: Net(OwnGenerator(generator)), device, microbatches=2, generators=[generator])

    assert_graphed_equals_eager(build, device, generators=[generator])
    with quiet():
        report = assert_graphed_equals_eager(build, device, replays=False)
    assert report.replays == 0


class HostDraw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * random.random()


def test_random_numbers_of_the_host_keep_a_module_eager(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        random.seed(3)
        return training_of(lambda: Net(HostDraw(), Layer()), device)

    with quiet() as seen:
        report = assert_graphed_equals_eager(build, device, replays=False)
    assert [row.forwards > 0 for row in report.rows] == [False, True]
    assert report.rows[0].eager_reasons["capture failed: [host-random]"] == 5
    assert any("draws from random" in str(warning.message) for warning in seen)


# -- named states


class Forks(nn.Module):
    """Draws from two named states and from the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tracker = stepgraph.get_cuda_rng_tracker(x.device)
        with tracker.fork():
            x = F.dropout(self.inner(x), 0.3)
            with tracker.fork("other"):
                x = F.dropout(x, 0.3)
        return F.dropout(x, 0.3)


def test_random_named_states_inside_a_module(tracker: stepgraph.CudaRNGStatesTracker, device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        tracker.reset()
        tracker.add("model-parallel-rng", 123)
        tracker.add("other", 456)
        return training_of(
            lambda: Net(Forks(), Layer(), Forks()), device, microbatches=2, named_states=tracker.get_states
        )

    assert_graphed_equals_eager(build, device)


@pytest.mark.parametrize("where", ["always", "every other step"])
def test_random_named_state_forked_around_a_module(
    where: str, tracker: stepgraph.CudaRNGStatesTracker, device: torch.device
) -> None:
    """Inside a fork and outside are different calls, each with graphs of its own."""

    def build(device: torch.device) -> Training:
        tracker.reset()
        tracker.add("model-parallel-rng", 123)
        count = [0]

        def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            if where == "every other step" and count[0] % 2:
                return model(x)
            with tracker.fork():
                return model(x)

        return training_of(
            lambda: Net(Layer(dropout=0.3), Layer(dropout=0.3)),
            device,
            steps=12,
            call=call,
            named_states=tracker.get_states,
        )

    report = assert_graphed_equals_eager(build, device)
    assert all(row.signatures == (1 if where == "always" else 2) for row in report.rows)


def test_random_name_added_after_capture_is_noticed(
    tracker: stepgraph.CudaRNGStatesTracker, device: torch.device
) -> None:
    def build(device: torch.device) -> Training:
        tracker.reset()
        tracker.add("model-parallel-rng", 123)
        tracker.add("other", 456)
        training = training_of(lambda: Net(Forks(), Layer()), device, steps=12, named_states=tracker.get_states)

        def before_step(index: int) -> None:
            if index == 5:
                tracker.add("third", 789)

        training.before_step = before_step
        return training

    report = assert_graphed_equals_eager(build, device)
    assert report.rows[0].recapture_reasons == {"random state `third` was added to the tracker": 1}
    assert report.rows[1].recapture_reasons == {}, "it never asks the tracker"


# -- activation checkpointing


class Checkpointed(nn.Module):
    """A block that is computed again in its backward, dropout and all; something may come before and after it."""

    def __init__(self, *, reentrant: bool, preserve: bool = True, twice: bool = False, inner: Any = None) -> None:
        super().__init__()
        self.before, self.after = nn.Dropout(0.2), nn.Dropout(0.2)
        self.block = Layer(dropout=0.4) if inner is None else inner
        self.second = Layer(dropout=0.4)
        self._options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
        self._twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, self.before(x), **self._options)
        if self._twice:
            x = checkpoint(self.second, self.before(x), **self._options)
            x = checkpoint(self.block, x, **self._options)
        return self.after(x)


@pytest.mark.pairwise
@pytest.mark.parametrize("zero", ["none", "never"])
@pytest.mark.parametrize("twice", [False, True], ids=["one block", "three blocks, one twice"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_recomputes_with_the_forwards_numbers(
    reentrant: bool, twice: bool, zero: str, device: torch.device
) -> None:
    """The forward and its recomputation are in different graphs, and draw the same numbers at every replay."""
    report = assert_graphed_equals_eager(
        lambda device: training_of(
            lambda: Net(Checkpointed(reentrant=reentrant, twice=twice), Layer()), device, microbatches=2, zero=zero
        ),
        device,
    )
    assert report.eager_calls == 2 * 3


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_with_calls_between_forward_and_backward(reentrant: bool, device: torch.device) -> None:
    """Several forwards, each from where the generator then is, before their backwards."""

    def build(device: torch.device) -> Training:
        training = training_of(
            lambda: Net(Checkpointed(reentrant=reentrant), Checkpointed(reentrant=reentrant)), device, microbatches=3
        )
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Any) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [training.model(x).pow(2).mean() for x in batch.unbind(0)]
            torch.rand(3, device=device)
            for loss in losses:
                loss.backward()
                note(loss)
            optimizer.step()
            return torch.stack([loss.detach() for loss in losses])

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)


def test_checkpointing_with_a_new_seed_before_the_backward(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Checkpointed(reentrant=False)), device)
        optimizer, count = training.optimizers[0], [0]

        def step(batch: torch.Tensor, note: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = training.model(batch[0]).pow(2).mean()
            count[0] += 1
            torch.manual_seed(count[0])
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)


def test_checkpointing_that_draws_again(device: torch.device) -> None:
    """preserve_rng_state=False: the recomputation draws other numbers, in eager as here."""
    assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(Checkpointed(reentrant=False, preserve=False)), device, microbatches=2),
        device,
    )


def test_checkpointing_for_results_that_gradients_come_to_later(device: torch.device) -> None:
    """A backward that is recorded in the middle of training goes back to the forward's numbers as well."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Layer(dropout=0.4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = checkpoint(self.block, x, use_reentrant=False)
            return hidden, hidden.sum()

    def build(device: torch.device) -> Training:
        training = training_of(lambda: nn.ModuleDict({"part": Two()}), device, steps=16)
        optimizer, count = training.optimizers[0], [0]

        def step(batch: torch.Tensor, note: Any) -> torch.Tensor:
            optimizer.zero_grad()
            hidden, total = training.model["part"](batch[0])
            count[0] += 1
            loss = total if count[0] % 2 else hidden.pow(2).mean()
            loss.backward()
            note(loss)
            optimizer.step()
            return loss.detach()

        training.step = step
        return training

    assert_graphed_equals_eager(build, device, "part")


def test_checkpointing_beside_a_backward_that_draws_stays_eager(device: torch.device) -> None:
    """One graph cannot begin both where the forward began and where the generator is now."""
    with quiet() as seen:
        report = assert_graphed_equals_eager(
            lambda device: training_of(
                lambda: Net(nn.Sequential(Noisy(), Checkpointed(reentrant=False)), Layer()), device
            ),
            device,
            replays=False,
        )
    assert [row.forwards > 0 for row in report.rows] == [False, True]
    assert report.rows[0].eager_reasons["capture failed: [rng-recompute]"] == 5
    assert any("as two modules" in str(warning.message) for warning in seen)


def test_checkpointing_over_named_states(tracker: stepgraph.CudaRNGStatesTracker, device: torch.device) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forks = Forks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts = stepgraph.get_cuda_rng_tracker(x.device).checkpoint_contexts
            return checkpoint(self.forks, F.dropout(x, 0.1), use_reentrant=False, context_fn=contexts)

    def build(device: torch.device) -> Training:
        tracker.reset()
        tracker.add("model-parallel-rng", 123)
        tracker.add("other", 456)
        return training_of(
            lambda: Net(Block(), Layer(), Block()), device, microbatches=2, named_states=tracker.get_states
        )

    assert_graphed_equals_eager(build, device)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_of_a_whole_graphed_module_from_outside(reentrant: bool, device: torch.device) -> None:
    """The caller checkpoints graphed layers: what is called again in the backward is replayed there."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
            self.layers = nn.ModuleList([Layer(dropout=0.4), Layer(dropout=0.4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(x)

    assert_graphed_equals_eager(lambda device: training_of(Outside, device, microbatches=2), device)
