"""Another thread trains while a step is warmed up and recorded: neither minds the other."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils import _python_dispatch

import stepgraph
from stepgraph.engine.backends.threads import compiled_code_runs_eagerly, for_this_thread, replaced
from stepgraph.engine.guards.hooks import is_own, refuse_hooks
from stepgraph.engine.guards.registration import RegistrationEvents
from stepgraph.engine.oplog.optimizer_steps import all_have_hooks, at_optimizer_steps
from tests.harness import same_bits

CALLS = 7
TIMEOUT = 60


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """One more thread of Python's; what is submitted runs there, one after the other."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


class Training:
    """A model, its optimizer, and one step after the other on batches of its own."""

    def __init__(self, device: torch.device, seed: int, make: Callable[..., torch.optim.Optimizer]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.model.to(device)
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.batches = [torch.randn(3, 4, generator=generator).to(device) for _ in range(4 * CALLS)]
        self.factor = torch.ones((), device=device)
        self.done = 0

    def step(self) -> None:
        self.train(self.batches[self.done])
        self.done += 1

    def train(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * self.factor
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def assert_same(self, twin: Training) -> None:
        for one, two in zip(self.model.parameters(), twin.model.parameters(), strict=True):
            assert same_bits(one.detach(), two.detach())
            assert one.grad is not None
            assert two.grad is not None
            assert same_bits(one.grad, two.grad)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def aside(function: Callable[[], Any], thread: ThreadPoolExecutor) -> Any:
    """A call in the other thread, where nobody looks: it is none of the step's."""

    def do() -> None:
        thread.submit(function).result(TIMEOUT)

    return ctypes.py_object(do)


def interrupted(training: Training, beside: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The step of a training, with something done by the other thread before, amid and after its work."""

    def step(x: torch.Tensor) -> torch.Tensor:
        beside.value()
        training.optimizer.zero_grad()
        loss = training.model(x).square().mean()
        loss.backward()
        beside.value()
        training.optimizer.step()
        beside.value()
        return loss.detach()

    return step


@pytest.mark.parametrize("nan_check", ["off", "device"])
@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_threads_train_beside_a_capture_as_if_alone(
    make: Callable[..., torch.optim.Optimizer], nan_check: str, device: torch.device, other: ThreadPoolExecutor
) -> None:
    theirs, alone = (Training(device, 1, torch.optim.Adagrad) for _ in range(2))
    ours, eager = (Training(device, 2, make) for _ in range(2))
    options: dict[str, Any] = {"nan_check": nan_check} if nan_check == "device" else {}
    with stepgraph.capture(interrupted(ours, aside(theirs.step, other)), **options) as step:
        for x in ours.batches[:CALLS]:
            assert same_bits(step(x), eager.train(x))
        report = step.report()
    assert (report.captures, report.replays) == (1, CALLS - 3)
    assert list(report.optimizers) == [type(ours.optimizer).__name__]
    ours.assert_same(eager)
    assert theirs.done == 3 * 7, "in each warm-up, in the recording and in three audits"
    for _ in range(theirs.done):
        alone.step()
    theirs.assert_same(alone)


def test_threads_own_nan_is_not_the_steps(device: torch.device, other: ThreadPoolExecutor) -> None:
    theirs = Training(device, 1, torch.optim.SGD)
    theirs.factor.fill_(float("nan"))
    ours = Training(device, 2, sgd)
    with stepgraph.capture(interrupted(ours, aside(theirs.step, other)), nan_check="device") as step:
        for x in ours.batches[:CALLS]:
            step(x)


def test_threads_work_is_not_recorded(device: torch.device, other: ThreadPoolExecutor) -> None:
    theirs = Training(device, 1, torch.optim.SGD)

    def work() -> None:
        state = torch.get_rng_state()
        theirs.step()
        assert theirs.factor.item() == 1.0
        torch.set_rng_state(state)
        assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]

    nodes = []
    for function in (work, lambda: None):
        ours = Training(device, 2, sgd)
        with stepgraph.capture(interrupted(ours, aside(function, other))) as step:
            for x in ours.batches[:CALLS]:
                step(x)
            nodes.append(step.report().nodes)
    assert nodes[0] == nodes[1]


def hooks_of_others(kind: str) -> dict[int, Any]:
    """The hooks on all optimizers' steps but for our own entry, which stays while there are other threads."""
    hooks = getattr(torch_optimizer, f"_global_optimizer_{kind}_hooks")
    return {key: hook for key, hook in hooks.items() if not is_own(hook)}


def process_state() -> list[Any]:
    """What belongs to the process and is changed during a capture."""
    stance = torch._dynamo.eval_frame._stance
    return [
        dict(torch_module._global_forward_pre_hooks),
        *(hooks_of_others(kind) for kind in ("pre", "post")),
        *(torch.autograd.backward, torch.overrides.has_torch_function, torch_module._has_any_global_hook),
        *(torch.get_rng_state, torch.random.set_rng_state, torch.manual_seed, stance, gc.isenabled()),
    ]


def test_threads_capture_inside_another_capture_on_the_tape(other: ThreadPoolExecutor) -> None:
    device, before = torch.device("cpu"), process_state()
    theirs, alone = (Training(device, 1, sgd) for _ in range(2))
    ours, eager = (Training(device, 2, sgd) for _ in range(2))
    with stepgraph.capture(theirs.train, ignore=["self.done"]) as inner:

        def call() -> None:
            inner(theirs.batches[theirs.done])
            theirs.done += 1

        with stepgraph.capture(interrupted(ours, aside(call, other))) as step:
            for x in ours.batches[:CALLS]:
                assert same_bits(step(x), eager.train(x))
            assert (step.report().captures, inner.report().captures) == (1, 1)
        assert inner.report().replays == theirs.done - 3
    for _ in range(theirs.done):
        alone.step()
    ours.assert_same(eager)
    theirs.assert_same(alone)
    assert process_state() == before


def test_threads_capture_at_the_same_time_on_the_tape(other: ThreadPoolExecutor) -> None:
    """Both are in the step at once, in each warm-up and in the recording, and one leaves while the other is in it."""
    device, before = torch.device("cpu"), process_state()
    barrier, left = threading.Barrier(2), threading.Event()

    def captured(seed: int, *, is_first: bool) -> None:
        ours, eager = (Training(device, seed, sgd) for _ in range(2))

        def in_between() -> None:
            barrier.wait(TIMEOUT)
            if not is_first:  # the first one has gone on, and left its call
                assert left.wait(TIMEOUT)

        beside = ctypes.py_object(in_between)

        def train(x: torch.Tensor) -> torch.Tensor:
            ours.optimizer.zero_grad()
            loss = ours.model(x).square().mean()
            beside.value()
            loss.backward()
            ours.optimizer.step()
            return loss.detach()

        with stepgraph.capture(train, audit=False) as step:  # in an audit one of them would be alone
            for x in ours.batches[:4]:
                result = step(x)
                left.set() if is_first else left.clear()
                assert same_bits(result, eager.train(x))
                barrier.wait(TIMEOUT)
            for x in ours.batches[4:CALLS]:
                assert same_bits(step(x), eager.train(x))
            assert (step.report().captures, step.report().replays) == (1, CALLS - 3)
        ours.assert_same(eager)

    def run(seed: int, *, is_first: bool) -> None:
        try:
            captured(seed, is_first=is_first)
        except BaseException:  # let the other one fail at once
            barrier.abort()
            left.set()
            raise

    beside = other.submit(run, 1, is_first=False)
    run(2, is_first=True)
    beside.result(TIMEOUT)
    assert process_state() == before


# -- the parts


def test_threads_of_autograd_are_the_steps(other: ThreadPoolExecutor) -> None:
    is_ours = for_this_thread()
    told: list[bool] = []
    done = threading.Event()

    def ask() -> None:  # as autograd's threads do: Python did not start them
        told.append(is_ours())
        done.set()

    _thread.start_new_thread(ask, ())
    assert done.wait(TIMEOUT)
    assert told == [True]
    assert is_ours()
    assert not other.submit(is_ours).result(TIMEOUT)


def test_threads_replacements_act_only_in_their_own_thread(other: ThreadPoolExecutor) -> None:
    owner = SimpleNamespace(ask=lambda: "torch's")
    original = owner.ask
    here = replaced(owner, "ask", lambda below: f"here over {below()}")
    inner = replaced(owner, "ask", lambda below: f"inner over {below()}")
    there = replaced(owner, "ask", lambda below: f"there over {below()}")
    with here:
        other.submit(there.__enter__).result(TIMEOUT)
        assert (owner.ask(), other.submit(lambda: owner.ask()).result(TIMEOUT)) == (
            "here over torch's",
            "there over torch's",
        )
        with inner:
            assert owner.ask() == "inner over here over torch's"
    assert (owner.ask(), other.submit(lambda: owner.ask()).result(TIMEOUT)) == ("torch's", "there over torch's")
    other.submit(there.__exit__, None, None, None).result(TIMEOUT)
    assert owner.ask is original


def test_threads_replacements_for_all_are_put_together(other: ThreadPoolExecutor) -> None:
    owner = SimpleNamespace(ask=lambda: "torch's")
    original = owner.ask
    first = replaced(owner, "ask", lambda below: f"first over {below()}", everywhere=True)
    here = replaced(owner, "ask", lambda below: f"here over {below()}")
    second = replaced(owner, "ask", lambda below: f"second over {below()}", everywhere=True)

    def asked() -> tuple[str, str]:
        return owner.ask(), other.submit(lambda: owner.ask()).result(TIMEOUT)

    with first:
        assert asked() == ("first over torch's",) * 2
        with here:
            assert asked() == ("here over first over torch's", "first over torch's")
            second.__enter__()
            assert asked() == ("second over here over first over torch's", "second over first over torch's")
        assert asked() == ("second over first over torch's",) * 2
    kept = owner.ask
    assert asked() == ("second over torch's",) * 2
    second.__exit__(None, None, None)
    assert owner.ask is original
    assert kept() == "torch's", "whoever has kept the replacement calls the function itself"


def test_threads_stance_of_the_compiler_is_left_with_the_last(other: ThreadPoolExecutor) -> None:
    def stance() -> Any:
        return torch._dynamo.eval_frame._stance

    before, there = stance(), compiled_code_runs_eagerly()
    with compiled_code_runs_eagerly():
        other.submit(there.__enter__).result(TIMEOUT)
        with compiled_code_runs_eagerly():
            assert stance().stance == "force_eager"
        assert stance().stance == "force_eager"
    assert stance().stance == "force_eager"
    other.submit(there.__exit__, None, None, None).result(TIMEOUT)
    assert stance() is before


def test_threads_step_on_while_hooks_are_taken_out(other: ThreadPoolExecutor) -> None:
    """torch walks through the hooks of the process at each step, and none may go during such a walk."""
    theirs, seen = Training(torch.device("cpu"), 1, sgd), []
    amid, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        amid.set()
        assert go_on.wait(TIMEOUT)

    with contextlib.ExitStack() as stack:
        stack.callback(torch_optimizer.register_optimizer_step_pre_hook(slow).remove)
        with at_optimizer_steps(seen.append, lambda optimizer, _: seen.append(optimizer)):
            stepping = other.submit(theirs.step)
            assert amid.wait(TIMEOUT)
        go_on.set()
        stepping.result(TIMEOUT)
        assert seen == []
        with at_optimizer_steps(seen.append, lambda optimizer, _: seen.append(optimizer)):
            assert len(torch_optimizer._global_optimizer_pre_hooks) == 2, "one entry is enough"
            assert len(torch_optimizer._global_optimizer_post_hooks) == 1
            theirs.step()
        assert seen == [theirs.optimizer] * 2
    assert not hooks_of_others("pre")
    other.shutdown()
    with at_optimizer_steps(seen.append, lambda optimizer, _: seen.append(optimizer)):
        pass
    if len(sys._current_frames()) == 1:
        assert not torch_optimizer._global_optimizer_pre_hooks, "nobody can be on a walk: our entry is gone"


def small(inputs: int, outputs: int) -> nn.Linear:
    """A layer that draws no random numbers: threads share the generator."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    for parameter in layer.parameters():
        parameter.data.fill_(0.1)
    return layer


@pytest.fixture(autouse=True)
def torch_flags() -> Iterator[None]:
    """Set torch's flags for dispatch modes back.

    A mode notes in variables of its module that it is entered, for all threads together, and sets them back to what it
    found. Where the modes of two threads overlap, the one that ends last finds them set, and leaves them so for good.
    Code that is compiled later in the process takes itself for being inside of a mode, and is compiled again.
    """
    flags = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    yield
    vars(_python_dispatch).update(flags)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_walk_on_while_others_begin_to_listen(other: ThreadPoolExecutor) -> None:
    """Another thread is amid torch's walks through hooks when somebody else begins to listen, and ends."""
    theirs, model = Training(torch.device("cpu"), 1, sgd), small(2, 2)
    amid, go_on, first = threading.Barrier(2), threading.Barrier(2), RegistrationEvents()

    def slow(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            amid.wait(TIMEOUT)
            go_on.wait(TIMEOUT)

    def listen() -> None:
        amid.wait(TIMEOUT)
        second = RegistrationEvents()
        second.listen_to([model])
        with at_optimizer_steps(lambda _: None, lambda *_: None):
            go_on.wait(TIMEOUT)
        second.close()

    with contextlib.ExitStack() as stack:
        stack.callback(first.close)
        first.listen_to([model])
        stack.enter_context(at_optimizer_steps(lambda _: None, lambda *_: None))
        for hook in (slow, lambda *_: None):  # a walk is not over after the slow one
            stack.callback(torch_optimizer.register_optimizer_step_pre_hook(hook).remove)
            stack.callback(torch_module.register_module_parameter_registration_hook(hook).remove)
        stepping = other.submit(theirs.step)
        listen()
        stepping.result(TIMEOUT)
        building = other.submit(model.register_parameter, "scale", nn.Parameter(torch.zeros(1)))
        listen()
        building.result(TIMEOUT)
        assert first.count == 1


@pytest.mark.usefixtures("eager_switches")
def test_threads_build_and_step_while_listeners_come_and_go() -> None:
    """torch's dictionaries of hooks are walked through by some threads while others begin and end to listen."""
    model, done = small(2, 2), threading.Event()

    def build() -> None:
        while not done.is_set():
            other = nn.Sequential(small(2, 2), nn.BatchNorm1d(2))
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            for parameter in other.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()

    def listen() -> None:
        for _ in range(400):
            events = RegistrationEvents()
            events.listen_to([model])
            with at_optimizer_steps(lambda _: None, lambda *_: None):
                refuse_hooks("step", [model], (), str, everywhere=True)
                all_have_hooks()
            events.close()

    with ThreadPoolExecutor(max_workers=4) as pool:
        builders, listeners = [pool.submit(build) for _ in range(2)], [pool.submit(listen) for _ in range(2)]
        try:
            for listener in listeners:
                listener.result(TIMEOUT)
        finally:
            done.set()
        for builder in builders:
            builder.result(TIMEOUT)


@pytest.mark.usefixtures("eager_switches")
def test_threads_each_capture_a_training_on_the_tape() -> None:
    def train(momentum: float) -> list[torch.Tensor]:
        model = nn.Sequential(small(2, 4), nn.Tanh(), small(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        with stepgraph.capture(step, backend="tape", warmup=1) as captured:
            losses = [captured(torch.ones(3, 2)) for _ in range(4)]
            assert captured.report().replays == 2
        return losses

    expected = train(0.9)
    with ThreadPoolExecutor(max_workers=3) as pool:
        for training in [pool.submit(train, 0.9) for _ in range(3)]:
            assert all(map(same_bits, training.result(TIMEOUT), expected))
