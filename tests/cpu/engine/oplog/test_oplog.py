"""The log of a call's operations: equal for equal calls, and the first difference named for others."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.oplog import Difference, Log, OpLog, Roles, Vocabulary, first_difference, left_out, noting_unseen


def logged(call: Callable[..., Any], vocabulary: Vocabulary, *args: torch.Tensor, **options: Any) -> Log:
    with OpLog(vocabulary, args, **options) as log:
        call(*args)
    return log.finish()


def difference(call: Callable[..., Any], change: Callable[[], object], *args: torch.Tensor) -> Difference | None:
    """The first difference between a call and one after a change."""
    vocabulary = Vocabulary()
    before = logged(call, vocabulary, *args)
    assert first_difference(before, logged(call, vocabulary, *args)) is None, "a call differs from itself"
    change()
    return first_difference(before, logged(call, vocabulary, *args))


def training(**parts: Any) -> tuple[nn.Module, torch.optim.Optimizer, types.SimpleNamespace]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    config = types.SimpleNamespace(loss=types.SimpleNamespace(weight=2.0), **parts)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), config


def test_logs_of_equal_training_steps_are_equal() -> None:
    model, optimizer, config = training()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = checkpoint(model, x, use_reentrant=False)
        (hidden.pow(2).mean() * config.loss.weight).backward()
        optimizer.step()

    step(torch.ones(3, 4))  # momentum is born here
    vocabulary = Vocabulary()
    logs = [logged(step, vocabulary, torch.randn(3, 4)) for _ in range(3)]
    assert len(logs[0]) > 30
    assert [first_difference(logs[0], log) for log in logs] == [None] * 3
    assert len(vocabulary.parts) < 3 * len(logs[0]), "parts are shared"


def test_log_changes_no_bit_of_what_runs() -> None:
    results = []
    for is_logged in (False, True):
        torch.default_generator.manual_seed(3)
        model, optimizer, _ = training()

        def step(
            x: torch.Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(3):
            x = torch.randn(3, 4)
            logged(step, Vocabulary(), x) if is_logged else step(x)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


def test_changed_number_is_named_with_line_and_both_values() -> None:
    model, _, config = training()

    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        loss = model(x).sum()
        (loss * config.loss.weight).backward()  # here

    model.eval()
    found = difference(step, lambda: setattr(config.loss, "weight", 3.0), torch.ones(2, 4))
    assert found is not None
    assert (found.operation, found.before, found.now) == ("aten.mul.Tensor", "2.0", "3.0")
    assert found.where is not None
    assert str(found).endswith("# here`: 2.0 -> 3.0")


def test_number_that_only_backward_reads_is_named_at_its_line() -> None:
    scale = [2.0]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * scale[0]

    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> None:
        weight.grad = None
        scaled = Scaled.apply(weight * x)
        scaled.sum().backward()

    found = difference(step, lambda: scale.__setitem__(0, 5.0), torch.ones(3))
    assert found is not None
    assert (found.before, found.now) == ("2.0", "5.0")
    assert "`return grad * scale[0]`" in str(found)


def test_operation_of_backward_has_the_line_of_its_forward() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> None:
        weight.grad = None
        y = weight.sin()  # here
        y.sum().backward()

    log = logged(step, Vocabulary(), torch.ones(3))
    lines = {str(log[index][0]): log[index][3] for index in range(len(log))}
    assert lines["aten.cos.default"] == lines["aten.sin.default"]
    assert lines["aten.detach.default"] == ("backward", "torch::autograd::AccumulateGrad")


def test_exchanged_tensor_is_noticed_by_identity() -> None:
    nets = {"target": nn.Linear(3, 3)}
    found = difference(lambda x: nets["target"](x), lambda: nets.update(target=nn.Linear(3, 3)), torch.ones(2, 3))
    assert found is not None
    assert "outside the call" in found.before
    assert found.before != found.now


def test_memory_that_died_is_not_mistaken_for_a_later_one() -> None:
    vocabulary = Vocabulary()
    seen = set()
    for _ in range(20):
        held = torch.ones(4)
        seen.add(vocabulary.memory(held.untyped_storage(), 0, lambda: 0))
        assert vocabulary.memory(held.untyped_storage(), 1, lambda: 1) in seen
        del held
        gc.collect()
    assert len(seen) == 20


def test_roles_name_memory_that_is_exchanged_on_purpose() -> None:
    vocabulary, logs = Vocabulary(), []
    for _ in range(2):
        weight = torch.ones(3)
        roles = Roles()
        roles.add("weight", weight)
        logs.append(logged(lambda x, weight=weight: x * weight, vocabulary, torch.ones(3), roles=roles))
    assert first_difference(*logs) is None
    found = first_difference(logs[0], logged(lambda x: x * weight, vocabulary, torch.ones(3)))
    assert found is not None
    assert found.before == "tensor 1 is weight"


@pytest.mark.parametrize(
    ("one", "two"), [(1, 1.0), (1, True), (0.0, -0.0), ("mean", "sum"), (2, 3), (1.0, 1.0000000000000002)]
)
def test_plain_values_differ_by_type_and_bits(one: Any, two: Any) -> None:
    box = [one]

    def step(x: torch.Tensor) -> None:
        if isinstance(box[0], str):
            torch.div(x, 2.0, rounding_mode={"mean": "floor", "sum": "trunc"}[box[0]])
        else:
            x * box[0]

    assert difference(step, lambda: box.__setitem__(0, two), torch.ones(2)) is not None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (torch.ones(2, 2).t(), "tensor 0 has strides (2, 1) -> strides (1, 2)"),
        (torch.ones(2, 2, dtype=torch.float64), "tensor 0 has dtype torch.float32 -> dtype torch.float64"),
        (torch.ones(1, 2), "tensor 0 has shape (2, 2) -> shape (1, 2)"),
    ],
)
def test_other_geometry_is_named(other: torch.Tensor, told: str) -> None:
    vocabulary = Vocabulary()
    logs = [logged(torch.abs, vocabulary, tensor) for tensor in (torch.ones(2, 2), other)]
    assert str(first_difference(*logs)).endswith(told)


def test_shared_arguments_of_other_strides_differ() -> None:
    """Which of them a tensor is cannot be told. That it has another form can."""
    vocabulary, base = Vocabulary(), torch.ones(3, 3)
    logs = [logged(lambda x, _: x.abs(), vocabulary, x, base) for x in (base.view(3, 3), base.view(3, 3), base.t())]
    assert first_difference(logs[0], logs[1]) is None
    found = first_difference(logs[0], logs[2])
    assert found is not None
    assert str(found).endswith("tensor 0 has strides (3, 1) -> strides (1, 3)")


def test_other_operation_and_other_input_are_named() -> None:
    vocabulary, x, y = Vocabulary(), torch.ones(2), torch.ones(2)
    before = logged(lambda x, y: (x + 1) * y, vocabulary, x, y)
    found = first_difference(before, logged(lambda x, y: (x - 1) * y, vocabulary, x, y))
    assert found is not None
    assert (found.index, found.before, found.now) == (0, "aten.add.Tensor", "aten.sub.Tensor")
    found = first_difference(before, logged(lambda x, y: (x + 1) * x, vocabulary, x, y))
    assert found is not None
    assert (found.before, found.now) == ("tensor 1 is argument 1", "tensor 1 is argument 0")


def test_shorter_and_longer_calls_are_reported() -> None:
    count = [2]

    def step(x: torch.Tensor) -> None:
        for _ in range(count[0]):
            x = x + 1

    found = difference(step, lambda: count.__setitem__(0, 3), torch.ones(2))
    assert found is not None
    assert (found.index, found.before, found.now) == (2, "the call ends", "aten.add.Tensor")
    count[0] = 2
    found = difference(step, lambda: count.__setitem__(0, 1), torch.ones(2))
    assert found is not None
    assert found.now == "the call ends"


def test_lines_may_move_without_a_difference() -> None:
    vocabulary = Vocabulary()
    before = logged(lambda x: x + 1, vocabulary, torch.ones(2))
    now = logged(
        lambda x: x + 1,
        vocabulary,
        torch.ones(2),
    )
    assert before.notes != now.notes
    assert first_difference(before, now) is None


def test_section_lasts_until_the_outermost_step_ends() -> None:
    def step(x: torch.Tensor) -> None:
        log.begin_section("Adam", "Adam")
        log.begin_section("Adam", "Adam")
        y = x + 1
        log.end_section("Adam")
        y = y * 2
        log.end_section("Adam")
        y.sub(1)

    x = torch.ones(2)
    with OpLog(Vocabulary(), [x]) as log:
        step(x)
    whole = log.finish()
    assert len(whole) == 3
    assert [str(whole.without(["Adam"])[0][0])] == ["aten.sub.Tensor"]


def test_operations_of_the_engine_are_left_out() -> None:
    def step(x: torch.Tensor) -> None:
        y = x + 1
        with left_out():
            y = y * 2
        y.sub(1)

    log = logged(step, Vocabulary(), torch.ones(2))
    assert [str(log[index][0]) for index in range(len(log))] == ["aten.add.Tensor", "aten.sub.Tensor"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_code_stays_compiled_under_a_log(backend: str) -> None:
    compiles = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiles.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    function = torch.compile(lambda x: (x.sin() + 1).cos(), backend=counting)
    x = torch.ones(4)
    expected = function(x)
    vocabulary = Vocabulary()
    first, second = (logged(function, vocabulary, x) for _ in range(2))
    assert first_difference(first, second) is None
    assert torch.equal(function(x), expected)
    assert len(compiles) == 1


@pytest.mark.slow
def test_compiled_code_frees_its_arguments_under_a_log() -> None:
    freed: list[int] = []

    def counted(call: Callable[..., Any], graph: Any, inputs: list[Any]) -> Any:
        given = [weakref.ref(value) for value in inputs if isinstance(value, torch.Tensor)]
        out = call(graph, inputs)
        freed.append(sum(value() is None for value in given))
        return out

    layer, x = nn.Linear(8, 8), torch.ones(2, 8)
    function = torch.compile(lambda x: layer(x).sin().exp().sum())
    function(x).backward()
    with replaced(CompiledFxGraph, "__call__", counted):
        function(x).backward()
        alone = freed.copy()
        with noting_unseen(), OpLog(Vocabulary(), [x]):
            function(x).backward()
    assert alone == [0, 1], "the backward frees what the forward has saved"
    assert freed == [*alone, *alone]


def test_result_in_the_place_of_a_freed_argument_is_new() -> None:
    inputs = [torch.ones(4)]

    def reuses_memory() -> torch.Tensor:
        place = inputs[0].untyped_storage()._cdata
        inputs.clear()
        with _disable_current_modes():  # as compiled code allocates
            made = [torch.ones(4) for _ in range(1000)]
        return next(tensor for tensor in made if tensor.untyped_storage()._cdata == place)

    with OpLog(Vocabulary()) as log:
        log.note_call("compiled code", inputs, reuses_memory).add_(1)
    _, _, (tensor,), _ = log.finish()[1]
    assert tensor[0][0] == "made"


@given(st.lists(st.sampled_from(["add", "mul", "sin", "view", "fresh", "outside"]), max_size=12), st.integers(0, 11))
@settings(max_examples=40)
def test_any_changed_operation_is_found_at_its_place(names: list[str], place: int) -> None:
    held = torch.ones(4)
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "add": lambda y: y + 1.5,
        "mul": lambda y: y * 2.5,
        "sin": torch.sin,
        "view": lambda y: y.view(2, 2).view(4),
        "fresh": lambda y: y + torch.zeros(4),
        "outside": lambda y: y + held,
    }

    def run(x: torch.Tensor, names: list[str]) -> None:
        for name in names:
            x = operations[name](x)

    vocabulary, x = Vocabulary(), torch.ones(4)
    before = logged(lambda x: run(x, names), vocabulary, x)
    assert first_difference(before, logged(lambda x: run(x, names), vocabulary, x)) is None
    changed = [*names[:place], "cut", *names[place:]]
    operations["cut"] = torch.tan
    found = first_difference(before, logged(lambda x: run(x, changed), vocabulary, x))
    assert found is not None
    assert found.now == "aten.tan.default"
    assert found.index == len(logged(lambda x: run(x, names[:place]), vocabulary, x))
