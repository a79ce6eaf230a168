"""Listening to torch's registration hooks: what is counted, and that letting go never breaks anyone's registration."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import stepgraph
from stepgraph.engine.guards.registration import RegistrationEvents

_DICTIONARIES = (
    torch_module._global_parameter_registration_hooks,
    torch_module._global_buffer_registration_hooks,
    torch_module._global_module_registration_hooks,
)


def counts() -> list[int]:
    """Who listens in each dictionary. Ours share an entry, which may stay when nobody does."""
    return [sum(len(getattr(hook, "calls", [hook])) for hook in hooks.values()) for hooks in _DICTIONARIES]


@contextlib.contextmanager
def walked_by(hook: Callable[..., None]) -> Iterator[None]:
    """While a hook that does something is on torch's way, and another one after it."""
    hooks = (hook, lambda *_: None)
    handles = [torch_module.register_module_parameter_registration_hook(one) for one in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture
def before() -> list[int]:
    """How many hooks there were, with those gone that other tests have left behind."""
    gc.collect()
    sweeper = RegistrationEvents()
    sweeper.listen_to([])
    sweeper.close()
    return counts()


def test_registration_counts_what_is_registered_on_its_modules() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    events = RegistrationEvents()
    events.listen_to([model])
    other.weight = nn.Parameter(torch.zeros(2, 2))
    assert events.count == 0
    model.weight = nn.Parameter(torch.zeros(2, 2))
    model.register_buffer("mask", torch.ones(2))
    model.add_module("more", nn.Tanh())
    assert events.count == 3
    events.close()
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert events.count == 3


def test_registration_hooks_are_gone_once_closed_or_dropped(before: list[int]) -> None:
    closed, dropped = RegistrationEvents(), RegistrationEvents()
    for events in (closed, dropped):
        events.listen_to([nn.Linear(2, 2)])
    assert counts() == [n + 2 for n in before]
    closed.close()
    del dropped, events
    assert counts() == before


@pytest.mark.parametrize("way", ["collected", "closed"])
def test_registration_survives_a_listener_ending_during_the_walk(way: str, before: list[int]) -> None:
    """The garbage collector may run at any moment, also while torch walks through its hooks."""
    events: list[RegistrationEvents] = [RegistrationEvents()]
    events[0].listen_to([nn.Linear(2, 2)])

    def end(*_: object) -> None:
        if way == "closed" and events:
            events[0].close()
        events.clear()

    with walked_by(end):
        nn.Linear(2, 2)
    assert not events
    assert counts() == before  # the entry had to stay, and does nothing
    assert all(hooks for hooks in _DICTIONARIES)
    RegistrationEvents().listen_to([])  # dropped at once
    gc.collect()
    assert counts() == before


def test_registration_survives_collection_of_a_captured_step() -> None:
    model = nn.Linear(4, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    step = stepgraph.capture(forward, backend="tape")
    for _ in range(5):
        step(torch.ones(2, 4))
    circle: list[object] = [step]
    circle.append(circle)
    del step, circle

    def collect(*_: object) -> None:
        gc.collect()

    with walked_by(collect):
        nn.Linear(2, 2)


def test_registration_walk_of_another_thread_is_left_alone() -> None:
    inside, go_on, errors = threading.Event(), threading.Event(), []
    events = RegistrationEvents()
    events.listen_to([nn.Linear(2, 2)])

    def wait(module: nn.Module, name: str, value: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait(10)

    def build() -> None:
        try:
            nn.Linear(2, 2)
        except RuntimeError as error:
            errors.append(error)

    with walked_by(wait):
        thread = threading.Thread(target=build)
        thread.start()
        assert inside.wait(10)
        events.close()
        go_on.set()
        thread.join(10)
    assert not errors
