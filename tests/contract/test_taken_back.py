"""A recording that fills a cache leaves no tensor there: the eager call after it makes its own, with eager's bits."""

from __future__ import annotations

import enum
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import stepgraph

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
CALLS, CHANGE = 16, 8


class Key(enum.Enum):
    """Not traced, as a number would be: a change is an audit."""

    FIRST = 1
    SECOND = 2


class Caches:
    """Places that keep a tensor for each key, filled when a key is asked for the first time."""

    def __init__(self, place: str, device: torch.device) -> None:
        self.place, self.device, self.key = place, device, Key.FIRST
        self.dict: dict[Any, Any] = {}
        self.list: list[Any] = [None] * 4
        self.nested: dict[str, dict[str, Any]] = {}
        self.own: torch.Tensor | None = None
        self.own_key: Key | None = None

    def make(self, key: Key) -> torch.Tensor:
        return torch.arange(4.0, device=self.device) + key.value

    def get(self) -> torch.Tensor:
        key = self.key
        if self.place == "dict":
            if key not in self.dict:
                self.dict[key] = self.make(key)
            return self.dict[key]
        if self.place == "list":
            if self.list[key.value] is None:
                self.list[key.value] = (self.make(key),)
            return self.list[key.value][0]
        if self.place == "new dict in a dict":
            inner = self.nested.setdefault(key.name, {})
            if "mask" not in inner:
                inner["mask"] = self.make(key)
            return inner["mask"]
        if self.own is None or self.own_key is not key:
            self.own, self.own_key = self.make(key), key
        return self.own


PLACES = ("dict", "list", "new dict in a dict", "attribute")


def run(caches: Caches, wrap: Wrap, *, reads_host: bool = False) -> list[torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        mask = caches.get()
        if reads_host and caches.key is Key.SECOND:
            mask.sum().item()
        return x * mask

    call, found = wrap(step), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        for index in range(CALLS):
            caches.key = Key.FIRST if index < CHANGE else Key.SECOND
            found.append(call(torch.full((4,), index + 1.0, device=caches.device)))
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("on_error", ["raise", "eager"])
def test_cache_that_an_audit_fills_is_filled_by_eager(place: str, on_error: Any, device: torch.device) -> None:
    eager = run(Caches(place, device), lambda step: step)
    graphed = run(Caches(place, device), lambda step: stepgraph.capture(step, on_error=on_error))
    assert all(map(torch.equal, graphed, eager))


@pytest.mark.parametrize("place", PLACES)
def test_cache_of_a_failed_recording_is_filled_by_eager(place: str, device: torch.device) -> None:
    eager = run(Caches(place, device), lambda step: step, reads_host=True)
    graphed = run(Caches(place, device), lambda step: stepgraph.capture(step, on_error="eager"), reads_host=True)
    assert all(map(torch.equal, graphed, eager))


class Masked(nn.Module):
    def __init__(self, caches: Caches) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).to(caches.device)
        self.caches = caches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.caches.get()


@pytest.mark.parametrize("place", PLACES)
def test_cache_in_a_graphed_module_is_filled_by_eager(place: str, device: torch.device) -> None:
    def outputs(*, graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Masked(Caches(place, device))
        if graphed:
            stepgraph.graph_modules(model, ["forward"], warmup=2)

        def step(x: torch.Tensor) -> torch.Tensor:
            out = model(x)
            out.sum().backward()
            return out.detach().clone()

        return run(model.caches, lambda _: step)

    assert all(map(torch.equal, outputs(graphed=True), outputs(graphed=False)))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_cached_parametrization_holds_no_memory_of_a_recording(device: torch.device) -> None:
    """Blocks whose first call is the step, and blocks in which the weight is there before."""
    model = nn.Linear(4, 4).to(device)
    parametrize.register_parametrization(model, "weight", Doubled())
    step = stepgraph.capture(lambda x: model(x).detach(), on_error="eager")
    x = torch.ones(2, 4, device=device)
    expected = model(x).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        for index in range(8):
            with parametrize.cached():
                if index % 2 == 0:
                    _ = model.weight
                assert torch.equal(step(x), expected), index
                assert torch.equal(model(x), expected), index


@pytest.mark.parametrize("maxsize", [None, 2], ids=["unbounded", "bounded"])
def test_lru_cache_that_a_recording_fills_keeps_older_results(maxsize: int | None, device: torch.device) -> None:
    flag = types.SimpleNamespace(on=False)

    @functools.lru_cache(maxsize=maxsize)
    def mask(key: int) -> torch.Tensor:
        return torch.arange(4.0, device=device) + key

    @stepgraph.capture(on_error="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * mask(1) if flag.on is True else x * 2

    x, older = torch.ones(4, device=device), mask(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        for index in range(CALLS):
            flag.on = index >= CHANGE
            assert torch.equal(step(x), x * (torch.arange(4.0, device=device) + 1) if flag.on else x * 2)
    assert mask(0) is older
    for key in (1, 2, 3, 4, 1):  # a bounded cache also drops results that were taken back
        assert torch.equal(mask(key), torch.arange(4.0, device=device) + key)
