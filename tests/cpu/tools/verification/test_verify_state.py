"""The state that `verify` and `frozen` compare and restore: trees of containers, and memory that only the log sees."""

from __future__ import annotations

import functools
import inspect
import queue
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.observe.holdings import Holdings
from stepgraph.engine.oplog import Vocabulary
from stepgraph.engine.oplog.writes import WriteLog, Writes
from stepgraph.tools.verification.report import Verdict


@functools.lru_cache
def cached(size: int) -> torch.Tensor:
    return torch.zeros(size)


def in_list_of_a_torch_module() -> Callable[[], torch.Tensor]:
    layer = nn.Linear(2, 2)
    layer.memory = [torch.zeros(3)]  # type: ignore[assignment]
    return lambda: layer.memory[0]  # type: ignore[index, return-value]


def in_containers_of_a_plain_module() -> Callable[[], torch.Tensor]:
    module = nn.Module()
    module.hidden = ({"q": [torch.zeros(3)]},)  # type: ignore[assignment]
    return lambda: module.hidden[0]["q"][0]  # type: ignore[index, return-value]


def in_list_of_optimizer_state() -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["Q"] = [{"left": torch.zeros(3)}]
    return lambda: optimizer.state[parameter]["Q"][0]["left"]  # type: ignore[no-any-return]


def in_state_of_all_parameters() -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    optimizer.state["global"] = torch.zeros(3)  # type: ignore[index]
    return lambda: optimizer.state["global"]  # type: ignore[index, return-value]


HOLDERS = {
    "cache": lambda: functools.partial(cached, 3),
    "list of a module of torch's": in_list_of_a_torch_module,
    "containers of a plain module": in_containers_of_a_plain_module,
    "list in an optimizer's state": in_list_of_optimizer_state,
    "optimizer's state of all": in_state_of_all_parameters,
}


class Soap(torch.optim.Optimizer):
    """Keeps a list of matrices for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["GG"] = [torch.zeros(size, size) for size in parameter.shape]
            for dim, matrix in enumerate(state["GG"]):
                grad = parameter.grad.transpose(0, dim).flatten(1)
                matrix.lerp_(grad @ grad.t(), 0.1)
            parameter.sub_(state["GG"][0] @ parameter.grad, alpha=self.param_groups[0]["lr"])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.clone()
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from tensors_in(item)


@pytest.mark.parametrize("holder", HOLDERS)
def test_verify_compares_and_restores_held_tensors(holder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added changes from call to call, out of the watch's reach: the graph keeps the first value."""
    tensor, calls = HOLDERS[holder](), 0
    tensor().zero_()

    def tick() -> None:
        nonlocal calls
        calls += 1
        monkeypatch.setenv("STEPGRAPH_TEST_ADDS", str(max(0, calls % 8 - 4)))

    monkeypatch.setenv("STEPGRAPH_TEST_ADDS", "0")
    read = compile("float(__import__('os').getenv('STEPGRAPH_TEST_ADDS'))", "<torch>", "eval")

    def step(x: torch.Tensor) -> torch.Tensor:
        tensor().add_(eval(read))
        return x * 2

    graphed = stepgraph.capture(step, audit=False, warmup=1)
    report = stepgraph.verify(graphed, [torch.ones(2)], steps=8, on_step=tick)
    assert report.verdict is Verdict.DIFFERENT
    assert torch.equal(tensor(), torch.zeros(3))


@pytest.mark.parametrize("is_trained", [False, True])
def test_verify_restores_lists_in_an_optimizers_state(is_trained: bool) -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer, x = Soap(layer.parameters()), torch.randn(6, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (layer(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3 if is_trained else 0):
        step(x)
    before = list(tensors_in(dict(optimizer.state)))
    report = stepgraph.verify(step, [x], steps=4)
    assert report.verdict is Verdict.EQUAL, report
    after = list(tensors_in(dict(optimizer.state)))
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))


def test_frozen_restores_lists_on_a_module_of_torch() -> None:
    tensor = in_list_of_a_torch_module()

    def step(x: torch.Tensor) -> torch.Tensor:
        tensor().add_(1)
        return x * 2

    stepgraph.frozen(step, torch.ones(2))
    assert torch.equal(tensor(), torch.zeros(3))


@functools.lru_cache
def table() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


def test_verify_takes_a_step_with_a_cached_inference_tensor() -> None:
    """torch lets nobody write to it from outside."""
    table()
    assert stepgraph.verify(lambda x: x * table(), [torch.ones(2)], steps=3)


def test_memory_out_of_reach_cannot_be_judged() -> None:
    """A queue's contents are found by no walk: the log sees the write, and the bytes are put back."""
    hidden: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    held = torch.zeros(3)
    hidden.put(held)
    address = held.data_ptr()
    del held

    def step(x: torch.Tensor) -> torch.Tensor:
        tensor = hidden.get()
        tensor.add_(x)
        hidden.put(tensor)
        return x * 2

    report = stepgraph.verify(step, [torch.ones(3)], steps=3)
    assert report.verdict is Verdict.CANNOT_JUDGE
    assert not report.equal
    line = inspect.getsourcelines(step)[1] + 2
    assert f"{__file__}:{line}" in report.sentence
    assert report.to_dict()["unsaved"][0].startswith(f"{__file__}:{line}")
    tensor = hidden.get()
    assert (tensor.data_ptr(), tensor.tolist()) == (address, [0.0] * 3)


def test_memory_that_a_call_leaves_behind_cannot_be_judged() -> None:
    hidden: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def step(x: torch.Tensor) -> torch.Tensor:
        tensor = torch.zeros(3) if hidden.empty() else hidden.get()
        tensor.add_(x)
        hidden.put(tensor)
        return x * 2

    report = stepgraph.verify(step, [torch.ones(3)], steps=3)
    assert report.verdict is Verdict.CANNOT_JUDGE
    assert report.comparison.unsaved[0] is not None


def written(saved: list[torch.Tensor], call: Callable[[], Any], *given: torch.Tensor) -> tuple[Writes, list[Any]]:
    writes = Writes([tensor.untyped_storage() for tensor in saved])
    with WriteLog(Vocabulary(), given, writes):
        call()
    writes.restore()
    return writes, writes.unsaved()


def test_writes_leave_out_what_is_saved_given_or_made() -> None:
    saved, given = torch.zeros(2), torch.zeros(2)

    def call() -> None:
        made = torch.ones(2)
        for tensor in (saved, given, made):
            tensor.add_(1)

    assert written([saved], call, given)[1] == []


def test_writes_find_every_form_of_write() -> None:
    tensors = {name: torch.zeros(2) for name in ("in place", "out", "view", "list", "item")}

    def call() -> None:
        tensors["in place"].add_(1)
        torch.add(torch.ones(2), 1, out=tensors["out"])
        tensors["view"][:1].copy_(torch.ones(1))
        torch._foreach_add_([tensors["list"]], 1)
        tensors["item"][0] = 3

    assert len(written([], call)[1]) == 5
    assert all(torch.equal(tensor, torch.zeros(2)) for tensor in tensors.values())


def test_writes_count_an_opaque_call_by_its_bytes() -> None:
    """Compiled code and kernels of Triton do not say what they write."""
    read, changed = torch.zeros(2), torch.zeros(2)
    writes = Writes()
    with WriteLog(Vocabulary(), (), writes) as log:
        log.note_call("kernel", [read, changed], lambda: changed.fill_(1))
    writes.restore()
    assert len(writes.unsaved()) == 1
    assert torch.equal(changed, torch.zeros(2))


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


CONTAINERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "dict": ({"a": 1, "b": 2}, lambda held: (held.pop("a"), held.update(c=3))),
    "ordered": (OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "list": ([1, 2], lambda held: held.append(3)),
    "deque": (deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "set": ({1}, lambda held: held.add(2)),
    "object": (SimpleNamespace(a=1), lambda held: vars(held).update(a=2, b=3)),
    "slots": (Slotted(), lambda held: setattr(held, "value", 2)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_holdings_restore_what_changed_in_place(kind: str) -> None:
    held, change = CONTAINERS[kind]
    told = lambda: list(held.items()) if isinstance(held, dict) else getattr(held, "value", repr(held))  # noqa: E731
    before, module = told(), nn.Module()
    module.deep = ({"in": [held]},)  # type: ignore[assignment]
    holdings = Holdings([("module", module)])
    change(held)
    module.deep = None  # type: ignore[assignment]
    assert told() != before
    holdings.restore()
    assert told() == before
    assert module.deep[0]["in"][0] is held  # type: ignore[index]


def test_verify_restores_variables_of_the_step() -> None:
    average, calls = torch.zeros(2), 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal average, calls
        calls += 1
        average = average * 0.5 + x
        return x * 2

    before = average
    with pytest.raises(stepgraph.CaptureError):
        stepgraph.verify(step, [torch.ones(2)], steps=3)
    assert (average is before, calls) == (True, 0)
