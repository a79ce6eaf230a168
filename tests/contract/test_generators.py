"""Generators that a step itself seeds or sets back: eager draws the same numbers again, and so must every replay.

A generator's own methods are C++ and cannot be watched. What they leave behind is.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.core.errors import CaptureRefused
from stepgraph.engine.backends import Backend, Graph
from stepgraph.engine.backends.random.host_random import GeneratorWatch, refuse_rewound

SEED = 5


@pytest.fixture
def backend(device: torch.device) -> Backend:
    return stepgraph.backend_for(device)


def seeds_first(g: torch.Generator) -> torch.Tensor:
    g.manual_seed(SEED)
    return torch.rand(4, generator=g, device=g.device)


def seeds_last(g: torch.Generator) -> torch.Tensor:
    drawn = torch.rand(4, generator=g, device=g.device)
    g.manual_seed(SEED)
    return drawn


REWINDS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {"seeds first": seeds_first, "seeds last": seeds_last}


def draws(g: torch.Generator) -> torch.Tensor:
    return torch.rand(4, generator=g, device=g.device)


def draws_nothing(g: torch.Generator) -> torch.Tensor:
    return torch.ones(4, device=g.device)


def sets_what_is_set(g: torch.Generator) -> torch.Tensor:
    g.set_state(g.get_state())
    return torch.rand(4, generator=g, device=g.device)


def generator_of(backend: Backend, whose: str) -> torch.Generator:
    own = torch.Generator(backend.device) if whose == "own" else backend.default_generator
    return own.manual_seed(SEED)


def recorded(backend: Backend, work: Callable[[], Any], generator: torch.Generator) -> Graph:
    workspace = backend.workspace()
    graph = workspace.graph([] if generator is backend.default_generator else [generator])
    with workspace.capturing():
        try:
            graph.begin()
            work()
            graph.end()
        except BaseException:
            graph.abort()
            raise
    return graph


@pytest.mark.parametrize("whose", ["own", "default"])
@pytest.mark.parametrize("how", REWINDS)
def test_generator_that_work_rewinds_is_refused(how: str, whose: str, backend: Backend) -> None:
    """By the recording itself on the tape; on CUDA because the graph moves what eager calls leave where it was."""
    generator = generator_of(backend, whose)
    for _ in range(2):
        watch = GeneratorWatch([generator])
        REWINDS[how](generator)
    with pytest.raises(CaptureRefused) as caught:
        refuse_rewound(watch.unmoved(), [recorded(backend, lambda: REWINDS[how](generator), generator)])
    assert caught.value.row.id == "reseed"


@pytest.mark.parametrize("whose", ["own", "default"])
@pytest.mark.parametrize("work", [draws, draws_nothing, sets_what_is_set])
def test_generator_that_work_only_draws_from_is_not_refused(
    work: Callable[[torch.Generator], torch.Tensor], whose: str, backend: Backend
) -> None:
    generator = generator_of(backend, whose)
    for _ in range(2):
        watch = GeneratorWatch([generator])
        work(generator)
    graph = recorded(backend, lambda: work(generator), generator)
    refuse_rewound(watch.unmoved(), [graph])
    assert [id(g) for g in graph.random.moved] == ([] if work is draws_nothing else [id(generator)])
    assert graph.random.draws is (work is not draws_nothing)


def seed_default(device: torch.device, how: str) -> None:
    """Seed the device's default generator, by one of torch's functions or by the generator's own method."""
    if how == "method":
        stepgraph.backend_for(device).default_generator.manual_seed(SEED)
    elif how == "torch" or device.type == "cpu":
        torch.manual_seed(SEED)
    else:
        getattr(torch.cuda, how)(SEED)


@pytest.mark.parametrize("is_caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize("how", ["torch", "manual_seed", "manual_seed_all", "method"])
def test_generator_seeded_in_a_step_is_refused(how: str, is_caught: bool, device: torch.device) -> None:
    """Also with the seed that it has, and where the loop draws between calls: replays would draw other numbers."""

    def step(x: torch.Tensor) -> torch.Tensor:
        if is_caught:
            with contextlib.suppress(RuntimeError):
                seed_default(device, how)
        else:
            seed_default(device, how)
        return x + torch.rand(4, device=device)

    with stepgraph.capture(step, warmup=2) as captured:
        first = captured(torch.zeros(4, device=device))
        torch.rand(3, device=device)
        assert torch.equal(captured(torch.zeros(4, device=device)), first)
        torch.rand(3, device=device)
        with pytest.raises(stepgraph.CaptureError) as caught:
            captured(torch.zeros(4, device=device))
    assert caught.value.rule == "reseed"


def test_generator_watch_takes_each_generator_once(backend: Backend) -> None:
    generator = generator_of(backend, "own")
    assert GeneratorWatch([generator, generator]).unmoved() == [generator]


def test_generator_state_restored_in_the_step_is_never_frozen(device: torch.device) -> None:
    """CUDA records it where the state was read in the same graph; the tape refuses."""
    generator = torch.Generator(device).manual_seed(SEED)

    def step(x: torch.Tensor) -> torch.Tensor:
        state = generator.get_state()
        drawn = torch.rand(4, generator=generator, device=device)
        generator.set_state(state)
        return x + drawn - torch.rand(4, generator=generator, device=device)

    captured = stepgraph.capture(step, generators=[generator], warmup=2)
    for _ in range(2):
        assert captured(torch.zeros(4, device=device)).tolist() == [0.0] * 4
    if device.type == "cpu":
        with pytest.raises(stepgraph.CaptureError, match="reseed"):
            captured(torch.zeros(4, device=device))
    else:
        for _ in range(3):
            assert captured(torch.zeros(4, device=device)).tolist() == [0.0] * 4
    captured.close()


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
@pytest.mark.parametrize("draws_at", [lambda n: n >= 3, lambda n: n >= 12, lambda n: n % 4 == 3])
def test_draws_at_some_calls_are_no_seeding(draws_at: Callable[[int], bool], device: torch.device) -> None:
    """The other calls leave the generator where it was because they draw nothing."""

    def results(wrap: Callable[[Any], Any]) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(SEED)
        flags = types.SimpleNamespace(noisy=False)
        step, found = wrap(lambda x: x + torch.rand(4, device=device) if flags.noisy else x * 2), []
        for n in range(30):
            flags.noisy = draws_at(n)
            found.append(step(torch.full((4,), float(n), device=device)))
        return found, step

    (eager, _), (graphed, step) = results(lambda f: f), results(stepgraph.capture)
    assert all(map(torch.equal, eager, graphed))
    assert step.report().replays > 15
