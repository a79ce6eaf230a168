"""Objects that hold their captured step are copied, pickled and saved as without it; the copy captures by itself."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph


class Trainer:
    """Holds its own step."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        self.model = nn.Linear(4, 3).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.generator = torch.Generator(device)
        self.fast = stepgraph.capture(self._step, generators=[self.generator], **options)

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(x + torch.rand(4, generator=self.generator, device=x.device)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss


class Captured:
    """Holds its captured method under another name."""

    @stepgraph.capture
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def __init__(self) -> None:
        self.factor = 2.0
        self.other = self.step


@stepgraph.capture(warmup=1)
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, by_pickle, by_save]


@pytest.mark.parametrize("num_calls", [0, 5])
@pytest.mark.parametrize("copied", COPIES)
def test_copy_of_an_object_has_a_step_of_its_own(
    copied: Callable[[Any], Any], num_calls: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    trainer = Trainer(device, warmup=2)
    for _ in range(num_calls):
        trainer.fast(torch.randn(2, 4, device=device))
    other, eager = copied(trainer), copied(trainer)
    before = copy.deepcopy(trainer.model.state_dict())
    assert other.fast is not trainer.fast
    assert other.fast.report().eager_calls == 0
    for _ in range(5):
        x = torch.randn(2, 4, device=device)
        assert torch.equal(other.fast(x), eager._step(x).detach())
        assert torch.equal(other.model.weight, eager.model.weight)
    report = other.fast.report()
    assert (report.captures, report.eager_reasons) == (1, {"warm-up": 2})
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    for step in (trainer.fast, other.fast, eager.fast):
        step.close()


@pytest.mark.parametrize("copied", COPIES)
def test_copy_of_a_step_is_that_of_its_object(copied: Callable[[Any], Any], device: torch.device) -> None:
    trainer = Trainer(device)
    step = copied(trainer.fast)
    assert step is not trainer.fast
    assert step is step._function.__self__.fast
    assert step._function.__self__ is not trainer


def test_session_that_was_passed_is_shared_by_copy_not_by_pickle(device: torch.device) -> None:
    with stepgraph.Session() as session:
        trainer = Trainer(device)
        trainer.fast = stepgraph.capture(trainer._step, session=session)
        assert copy.deepcopy(trainer).fast._session is session
        assert by_pickle(trainer).fast._session is not session


@pytest.mark.parametrize("copied", COPIES)
def test_decorated_function_is_known_by_its_name(copied: Callable[[Any], Any]) -> None:
    assert copied([doubled])[0] is doubled
    assert copied(Captured.step) is Captured.step


@pytest.mark.parametrize("copied", COPIES)
def test_step_of_a_function_and_of_a_captured_method_is_copied(
    copied: Callable[[Any], Any], device: torch.device
) -> None:
    x = torch.ones(2, device=device)
    step = copied(stepgraph.capture(tripled, max_graphs=3))
    assert step(x).tolist() == [3.0, 3.0]
    assert step._options.max_graphs == 3
    holder = Captured()
    other = copied(holder)
    other.factor = 5.0
    assert other.other(x).tolist() == other.step(x).tolist() == [5.0, 5.0]
    assert holder.other(x).tolist() == [2.0, 2.0]
