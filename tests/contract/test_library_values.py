"""What a library reads: watched where its code was seen to run, and nobody's business where it was not."""

from __future__ import annotations

import cProfile
import importlib
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepgraph

LIBRARY = """
import functools
import torch

scale = 1.0
woken = 0.0
loud = False

class Monitor:
    woken = 0.0

monitor = Monitor()

def report(x):
    if monitor.woken + woken < 0:
        return download(x)

def download(x):
    return x * monitor.woken

def scaled(x):
    if loud:
        report(x)
    return x * scale

def scaled_grad(grad):
    return grad * factor()

def factor():
    return scale

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * factor()

class Layer(torch.nn.Module):
    def forward(self, x):
        return Scaled.apply(x)

class Counting(torch.nn.Module):
    seen = 0
    def forward(self, x):
        monitor.seen = getattr(monitor, "seen", 0) + 1
        self.seen = self.seen + 1
        return x * scale

class Scaling(torch.nn.Module):
    def forward(self, x):
        return scaled(x)

inner = torch.compile(scaled, backend="eager")

@functools.lru_cache
def setting():
    return scale

def compiled(x):
    return inner(x)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library as pip would install it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "stepgraph_test_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "stepgraph_test_library", raising=False)
    yield importlib.import_module("stepgraph_test_library")
    del sys.modules["stepgraph_test_library"]


def told(step: Any, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = step(x)
    return result, "\n".join(str(w.message) for w in found if issubclass(w.category, stepgraph.StepgraphWarning))


def warmed(step: Any, x: torch.Tensor) -> None:
    for _ in range(5):
        step(x)
    assert step.report().replays > 0


def grad_of(model: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The gradient that the first layer of a model gets."""
    model.zero_grad()
    model(x).sum().backward()
    found = model[0].bias.grad
    assert found is not None
    return found.detach().clone()


def assert_module_notices(library: Any, layer: torch.nn.Module, device: torch.device) -> None:
    """A graphed layer has the gradients of the library's new scale."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer).to(device)
    stepgraph.graph_modules(model, ["1"])
    x = torch.ones(2, 2, device=device)
    for _ in range(6):
        before = grad_of(model, x)
    library.scale = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        assert torch.equal(grad_of(model, x), before * 2.0)


def test_module_of_a_library_that_counts_is_graphed(library: Any, device: torch.device) -> None:
    x = torch.ones(2, 2, device=device, requires_grad=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), library.Counting(), library.Counting()).to(device)
    with stepgraph.graph_modules(model, ["1", "2"], strict=True) as handle:
        for _ in range(8):
            model(x).sum().backward()
        assert [row.eager_calls for row in handle.report().rows] == [3, 3]
    layer = stepgraph.make_graphed_callables(library.Counting(), (x,))
    for _ in range(4):
        layer(x).sum().backward()
    assert stepgraph.engine.parts.callables.report(layer).forwards == 4


def test_value_read_by_executed_library_code_is_never_frozen(library: Any, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: library.scaled(x)) as step:
        warmed(step, x)
        library.scale = 3.0
        result, message = told(step, x)
        assert result.tolist() == [3.0, 3.0]
        assert "scale" in message
        assert "1.0 -> 3.0" in message


def test_flag_that_selects_library_code_is_noticed(library: Any, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: library.scaled(x)) as step:
        warmed(step, x)
        library.loud = True
        assert told(step, x)[1] == "", "other code runs, and the same operations"
        library.monitor.woken = -1.0  # from now on it is read
        assert "woken" in told(step, x)[1]


def test_value_named_only_by_unexecuted_library_code_is_ignored(library: Any, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: library.scaled(x), strict=True) as step:
        for index in range(8):
            library.monitor.woken = library.woken = float(index)  # as a thread of its own would
            assert told(step, x)[1] == ""
        assert step.report().replays == 5


def test_backward_of_a_library_is_watched_in_a_step(library: Any, device: torch.device) -> None:
    weight = torch.ones(2, device=device, requires_grad=True)

    def train(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = library.Scaled.apply(weight * x).sum()
        loss.backward()
        return loss.detach()

    with stepgraph.capture(train) as step:
        warmed(step, torch.ones(2, device=device))
        library.scale = 3.0
        assert "scale" in told(step, torch.ones(2, device=device))[1]
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("threads", [True, False])
def test_hook_of_a_library_on_a_tensor_is_watched_in_a_step(threads: bool, library: Any, device: torch.device) -> None:
    weight = torch.ones(2, device=device, requires_grad=True)

    def train(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        hidden = weight * x
        hidden.register_hook(library.scaled_grad)
        loss = hidden.sum()
        loss.backward()
        return loss.detach()

    with torch.autograd.set_multithreading_enabled(threads), stepgraph.capture(train) as step:
        warmed(step, torch.ones(2, device=device))
        library.scale = 3.0
        assert "scale" in told(step, torch.ones(2, device=device))[1]
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0, 3.0]
        assert sys.getprofile() is None


def test_backward_of_a_library_is_watched_in_a_graphed_module(library: Any, device: torch.device) -> None:
    assert_module_notices(library, library.Layer(), device)


def test_profiler_of_the_user_stays_and_everything_is_watched(library: Any, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    calls: list[str] = []

    def profile(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    with stepgraph.capture(lambda x: library.scaled(x)) as step:
        sys.setprofile(profile)
        try:
            for _ in range(5):
                step(x)
            assert sys.getprofile() is profile
        finally:
            sys.setprofile(None)
        assert "scaled" in calls
        audits = step.report().audits
        library.monitor.woken = 1.0
        assert told(step, x)[1] == "", "nothing depends on it"
        assert step.report().audits == audits + 1


def test_profiler_that_the_step_starts_is_left_to_it(library: Any, device: torch.device) -> None:
    profiler = cProfile.Profile()

    def profiled(x: torch.Tensor) -> torch.Tensor:
        profiler.enable()
        try:
            return library.scaled(x)
        finally:
            profiler.disable()

    x = torch.ones(2, device=device)
    with stepgraph.capture(profiled) as step:
        for _ in range(5):
            assert step(x).tolist() == [1.0, 1.0]
    assert sys.getprofile() is None
    assert any(entry.code is library.scaled.__code__ for entry in profiler.getstats())


def test_no_profiler_is_left_behind(library: Any, device: torch.device) -> None:
    weight = torch.ones(2, device=device, requires_grad=True)
    found: list[Any] = []

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = library.scaled(weight * x).sum()
        loss.backward()
        return loss.detach()

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("by intention")

    with stepgraph.capture(train) as step:
        warmed(step, torch.ones(2, device=device))
    with stepgraph.capture(fails) as step, pytest.raises(RuntimeError, match="by intention"):
        step(torch.ones(2, device=device))
    hidden = weight * 2
    hidden.register_hook(lambda grad: found.append(sys.getprofile()))
    hidden.sum().backward()
    thread = threading.Thread(target=lambda: found.append(sys.getprofile()))
    thread.start()
    thread.join()
    assert [*found, sys.getprofile()] == [None, None, None]


def test_step_inside_a_step_notes_for_both(library: Any, device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: library.scaled(x)) as inner, stepgraph.capture(lambda x: inner(x) + 1) as outer:
        for _ in range(5):
            outer(x)
        library.scale = 3.0
        assert told(outer, x)[0].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("how", ["function", "module", "in place", "of the library's own"])
def test_compiled_code_of_a_library_is_watched(how: str, library: Any, device: torch.device) -> None:
    model = library.Scaling().to(device)
    if how == "in place":
        model.compile(backend="eager")
    compiled = {
        "function": torch.compile(library.scaled, backend="eager"),
        "module": torch.compile(model, backend="eager"),
        "in place": model,
        "of the library's own": library.compiled,
    }[how]
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: compiled(x)) as step:
        warmed(step, x)
        library.scale = 3.0
        result, message = told(step, x)
        assert result.tolist() == [3.0, 3.0]
        assert "scale" in message


def test_cached_library_function_that_ran_before_is_watched(library: Any, device: torch.device) -> None:
    assert library.setting() == 1.0
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: x * library.setting()) as step:
        warmed(step, x)
        library.scale = 3.0
        library.setting.cache_clear()
        result, message = told(step, x)
        assert result.tolist() == [3.0, 3.0]
        assert "scale" in message


def test_library_function_called_only_by_a_hook_is_watched(library: Any, device: torch.device) -> None:
    class Hooked(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(x)
            hidden.register_hook(lambda grad: library.scaled_grad(grad))
            return hidden * 1

    assert_module_notices(library, Hooked(2, 2), device)


def test_library_is_watched_where_the_step_has_used_a_profiler(library: Any, device: torch.device) -> None:
    def profiled(x: torch.Tensor) -> torch.Tensor:
        profiler = cProfile.Profile()
        profiler.enable()
        profiler.disable()
        return library.scaled(x)

    x = torch.ones(2, device=device)
    with stepgraph.capture(profiled) as step:
        warmed(step, x)
        library.scale = 3.0
        assert told(step, x)[0].tolist() == [3.0, 3.0]
