"""What a training step is, in loops that know nothing of stepgraph."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgraph.tools.script.steps import StepCalls, StepEvents, StepFinder

Loop = Callable[[Callable[[str], None]], None]


class Diary:
    """What happened, in order: the events of steps, and what a loop says it does.

    `b` begins, `r` reaches, `e` ends; the loop's own words stand between them.
    """

    def __init__(self) -> None:
        self.words: list[str] = []

    def step_begins(self, index: int) -> None:
        self.words.append(f"b{index}")

    def step_reaches(self, index: int) -> None:
        self.words.append(f"r{index}")

    def step_ends(self, index: int) -> None:
        self.words.append(f"e{index}")


@contextlib.contextmanager
def watched() -> Iterator[Diary]:
    diary = Diary()
    finder = StepFinder(diary)
    with StepEvents(finder).watching():
        yield diary
        finder.finish()


def events(loop: Loop) -> str:
    """The diary of a loop; several `reaches` in a row are one."""
    with watched() as diary:
        loop(diary.words.append)
    found: list[str] = []
    for word in diary.words:
        if found[-1:] != [word] or not word.startswith("r"):
            found.append(word)
    return " ".join(found)


def steps(loop: Loop) -> list[str]:
    """What a loop says within each step: between its beginning and the last that it reaches."""
    with watched() as diary:
        loop(diary.words.append)
    found = re.findall(r"b(\d+)((?: (?!b\d|e\d)\S+)*) r\1(?: (?!r\d)\S+)*? e\1", " ".join(diary.words))
    return [re.sub(r" r\d+", "", said).strip() for _, said in found]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def batch() -> torch.Tensor:
    return torch.randn(3, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- loops


def test_loop_with_zero_grad_first_leaves_loading_out() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            optimizer.zero_grad()
            loss = model(batch()).sum()
            loss.backward()
            optimizer.step()

    assert events(loop) == "load b0 r0 load e0 b1 r1 load e1 b2 r2 e2"


def test_loop_with_zero_grad_last_has_it_in_the_step() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            say("load")
            model(batch()).sum().backward()
            optimizer.step()
            say("log")
            optimizer.zero_grad()

    assert events(loop).startswith("load b0 r0 log r0 load e0 b1 r1 log r1 load e1")
    assert steps(loop) == ["log", "log", "log"]


def test_zero_grad_of_the_module_counts() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            model(batch()).sum().backward()
            optimizer.step()
            say("log")
            model.zero_grad()

    assert steps(loop) == ["log", "log"]


def test_zero_grad_between_forward_and_backward() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            loss = model(batch()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert events(loop) == "load b0 r0 load e0 b1 r1 load e1 b2 r2 e2"


def test_loop_in_functions_is_the_same() -> None:
    model = net()
    optimizer = sgd(model)

    def train_step(say: Callable[[str], None]) -> None:
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()

    def epoch(say: Callable[[str], None]) -> None:
        for _ in range(2):
            say("load")
            train_step(say)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            epoch(say)
            say("save")

    assert events(loop) == "load b0 r0 load e0 b1 r1 save load e1 b2 r2 load e2 b3 r3 save e3"


def test_loop_at_module_level() -> None:
    program = (
        "model = net()\noptimizer = sgd(model)\n"
        "for _ in range(2):\n    say('load')\n    optimizer.zero_grad()\n    model(batch()).sum().backward()\n"
        "    optimizer.step()\n"
        "while True:\n    say('tune')\n    model(batch()).sum().backward()\n    optimizer.step()\n    break\n"
    )

    def loop(say: Callable[[str], None]) -> None:
        exec(compile(program, "script.py", "exec"), {"net": net, "sgd": sgd, "batch": batch, "say": say})

    assert events(loop) == "load b0 r0 load e0 b1 r1 tune e1 b2 r2 e2"


def test_second_training_loop_begins_its_own_steps() -> None:
    model = net()
    optimizer = sgd(model)

    def train(say: Callable[[str], None], what: str) -> None:
        for _ in range(2):
            say(what)
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()

    def loop(say: Callable[[str], None]) -> None:
        train(say, "first")
        train(say, "second")

    assert events(loop) == "first b0 r0 first e0 b1 r1 second e1 b2 r2 second e2 b3 r3 e3"


def test_accumulation_is_one_step() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        optimizer.zero_grad()
        for index in range(6):
            say("load")
            model(batch()).sum().backward()
            if (index + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert events(loop) == "load b0 load load r0 load e0 b1 load load r1 e1"


def test_two_views_in_one_step() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            sum(model(view).sum() for view in (batch(), batch())).backward()
            optimizer.step()

    assert events(loop) == "b0 r0 e0 b1 r1 e1"


def test_gan_with_two_optimizers_is_one_step() -> None:
    generator, critic = nn.Linear(2, 2), net()
    of_generator, of_critic = sgd(generator), sgd(critic)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            of_critic.zero_grad()
            (critic(batch()) - critic(generator(batch()).detach())).sum().backward()
            of_critic.step()
            say("between")
            of_generator.zero_grad()
            critic(generator(batch())).sum().backward()
            of_generator.step()

    assert steps(loop) == ["between", "between", "between"]
    assert events(loop).count("load") == 3


def test_gan_in_functions_is_one_step() -> None:
    generator, critic = nn.Linear(2, 2), net()
    of_generator, of_critic = sgd(generator), sgd(critic)

    def train_critic() -> None:
        of_critic.zero_grad()
        critic(generator(batch()).detach()).sum().backward()
        of_critic.step()

    def train_generator() -> None:
        of_generator.zero_grad()
        critic(generator(batch())).sum().backward()
        of_generator.step()

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            train_critic()
            say("between")
            train_generator()

    assert steps(loop) == ["between", "between", "between"]


def test_several_optimizers_in_a_loop_are_one_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers = [sgd(part) for part in model]

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            model(batch()).sum().backward()
            for optimizer in optimizers:
                say("optimizer")
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    assert steps(loop) == 3 * ["optimizer optimizer"]


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_scaler_reaches_with_and_without_a_skip(factor: float) -> None:
    model = net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            say("load")
            optimizer.zero_grad()
            scaler.scale(model(batch()).sum() * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            say("update")
            scaler.update()

    assert events(loop) == "load b0 r0 update r0 load e0 b1 r1 update r1 e1"


def test_closure_of_lbfgs_is_in_the_step() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    closures = "closure closure closure"
    x = batch()

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):

            def closure() -> torch.Tensor:
                say("closure")
                optimizer.zero_grad()
                loss = model(x).square().sum()
                loss.backward()
                return loss

            say("load")
            optimizer.step(closure)

    assert events(loop) == f"load b0 {closures} r0 load e0 b1 {closures} r1 e1"


def test_closure_with_accumulation_as_in_lightning() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for index in range(4):
            say("load")

            def closure() -> torch.Tensor:
                loss: torch.Tensor = model(batch()).sum()
                loss.backward()
                return loss

            if index % 2:
                optimizer.step(closure)
                optimizer.zero_grad()
            else:
                closure()

    assert events(loop) == "load b0 load r0 load e0 b1 load r1 e1"


class WrappedOptimizer(torch.optim.Optimizer):
    """As Accelerate wraps one: an `Optimizer` that has another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_wrapped_optimizer_and_model() -> None:
    model = nn.DataParallel(net())
    optimizer = WrappedOptimizer(sgd(model))

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            say("load")
            model(batch()).sum().backward()
            optimizer.step()
            say("log")
            optimizer.zero_grad()

    assert events(loop) == "load b0 r0 log r0 load e0 b1 r1 log r1 e1"


def test_compiled_model_is_seen() -> None:
    model = torch.compile(net(), backend="eager")
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()

    assert events(loop) == "load b0 r0 load e0 b1 r1 load e1 b2 r2 e2"


def test_optimizer_in_backward_reaches() -> None:
    model = nn.Linear(2, 1)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            model(batch()).sum().backward()

    assert events(loop) == "load b0 r0 load e0 b1 r1 load e1 b2 r2 e2"


def test_recomputed_forwards_begin_no_step() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            checkpoint(model, batch().requires_grad_(), use_reentrant=False).sum().backward()
            optimizer.step()

    assert events(loop) == "b0 r0 e0 b1 r1 e1"


# -- forwards that begin no step


def test_validation_without_gradients_begins_no_step() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                say("validate")
                model(batch())

    assert events(loop) == "b0 r0 validate e0 b1 r1 validate e1"


def test_validation_in_eval_mode_begins_no_step() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        model.eval()
        model(batch())
        for _ in range(2):
            model.train()
            say("load")
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            say("validate")
            model(batch())

    assert events(loop) == "b0 load e0 b0 r0 validate load e0 b1 r1 validate e1"


def test_training_in_eval_mode_has_steps() -> None:
    model = net().eval()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert events(loop) == "load b0 r0 load e0 b1 r1 load e1 b2 r2 e2"


def test_rollouts_begin_no_step() -> None:
    policy = net()
    optimizer = sgd(policy)

    def act() -> torch.Tensor:
        with torch.no_grad():
            action: torch.Tensor = policy(batch())
            return action

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            for _ in range(3):
                act()
                say("act")
            policy(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert events(loop) == "act act act b0 r0 act act act e0 b1 r1 e1"


def test_forwards_between_epochs_are_in_no_step() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            for _ in range(2):
                model(batch()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            say("look")
            model(batch())
            say("looked")

    assert steps(loop) == ["", "", "", ""]


def test_transforms_of_data_begin_no_step() -> None:
    model, transform = net(), nn.Sequential(nn.Identity(), nn.Dropout())
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            x = transform(batch())
            say("load")
            optimizer.zero_grad()
            nn.MSELoss()(model(x), torch.zeros(3, 1)).backward()
            optimizer.step()

    assert events(loop) == "load b0 r0 load e0 b1 r1 e1"


def test_script_without_an_optimizer_has_no_step() -> None:
    model = net()

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            model(batch())

    assert events(loop) == "b0 e0"
    assert steps(loop) == []


# -- code without modules


def test_functional_code_with_zero_grad_first() -> None:
    weight = torch.randn(2, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("load")
            optimizer.zero_grad()
            say("forward")
            (batch() @ weight).sum().backward()
            optimizer.step()

    assert events(loop) == "load forward b0 r0 load e0 b1 forward r1 load e1 b2 forward r2 e2"


def test_functional_code_without_zero_grad() -> None:
    weight = torch.randn(2, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(3):
            say("forward")
            (batch() @ weight).sum().backward()
            optimizer.step()
            weight.grad = None

    assert events(loop) == "forward b0 r0 e0 b1 forward r1 e1 b2 forward r2 e2 b3 e3"


def test_functional_call_of_a_module() -> None:
    model = net()
    optimizer = sgd(model)

    def loop(say: Callable[[str], None]) -> None:
        for _ in range(2):
            say("load")
            optimizer.zero_grad()
            torch.func.functional_call(model, dict(model.named_parameters()), batch()).sum().backward()
            optimizer.step()

    assert events(loop) == "load b0 r0 load e0 b1 r1 e1"


# -- what goes wrong in a loop


def test_step_that_raises_does_not_hide_later_ones() -> None:
    model = net()
    optimizer = sgd(model)

    def fail() -> float:
        raise KeyError

    def loop(say: Callable[[str], None]) -> None:
        for index in range(4):
            say("load")
            model(batch()).sum().backward()
            with contextlib.suppress(KeyError):
                optimizer.step(fail if index == 1 else None)

    assert events(loop) == "load b0 r0 load e0 b1 load r1 load e1 b2 r2 e2"


class Stop(BaseException):
    pass


def test_listener_may_raise_and_is_asked_again() -> None:
    model = net()
    optimizer = sgd(model)

    class Stopper(Diary):
        def step_begins(self, index: int) -> None:
            super().step_begins(index)
            if index:
                raise Stop

    stopper = Stopper()
    caught = 0
    with StepEvents(StepFinder(stopper)).watching():
        for _ in range(4):
            try:
                model(batch()).sum().backward()
                optimizer.step()
            except Stop:
                caught += 1
    assert caught == 3


def test_hooks_are_gone_afterwards() -> None:
    before = nn.Module.zero_grad, torch.optim.Optimizer.zero_grad, torch.amp.GradScaler.step
    with watched() as diary:
        assert nn.Module.zero_grad is not before[0]
    model = net()
    model(batch()).sum().backward()
    sgd(model).step()
    assert diary.words == []
    assert (nn.Module.zero_grad, torch.optim.Optimizer.zero_grad, torch.amp.GradScaler.step) == before


# -- a function that the user names


def test_calls_of_a_named_function_are_steps() -> None:
    diary = Diary()

    def train_step(depth: int) -> int:
        diary.words.append("in")
        return train_step_seen(depth - 1) if depth else 7

    calls = StepCalls(diary)
    train_step_seen = calls.wrapped(train_step)
    assert train_step_seen(1) == 7
    diary.words.append("between")
    assert train_step_seen(0) == 7
    assert diary.words == ["b0", "in", "in", "r0", "between", "e0", "b1", "in", "r1"]
    calls.finish()
    calls.finish()
    assert diary.words[-2:] == ["r1", "e1"]
    assert train_step_seen.__name__ == "train_step"


def test_named_function_that_raises_has_no_step() -> None:
    diary = Diary()
    calls = StepCalls(diary)
    called = calls.wrapped(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        called()
    calls.finish()
    assert diary.words == ["b0", "e0"]
