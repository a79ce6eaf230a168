"""What the suites compare by: states are copies, and differ where a bit does."""

from __future__ import annotations

import pytest
import torch

from tests.harness import State, assert_same_history, different, same_bits

ZERO, MINUS_ZERO = torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), -0.0])


def test_state_holds_copies() -> None:
    """Also of a tensor that is the only one of its kind."""
    for shape in ((2,), (), (0, 3), (3, 4)):
        for count in (1, 2):
            tensors = {str(i): torch.zeros(shape) for i in range(count)}
            state = State(tensors | {"listed": [torch.zeros(shape)], "int": torch.zeros(shape, dtype=torch.int64)})
            for tensor in tensors.values():
                tensor.add_(1)
            for name in tensors:
                assert state[name].shape == shape, (shape, count)
                assert not state[name].any(), (shape, count)
    assert not State({"a": torch.nn.Parameter(torch.ones(2))})["a"].requires_grad
    across = torch.randn(3, 4).t()
    assert same_bits(State({"a": across, "b": across})["b"], across)


def test_state_differs_where_a_bit_does() -> None:
    state = State({"a": ZERO, "b": MINUS_ZERO, "c": (ZERO, 1)})
    assert same_bits(state, State({"b": MINUS_ZERO.clone(), "a": ZERO.clone(), "c": (ZERO.clone(), 1)}))
    for name, value in {
        "another bit": MINUS_ZERO,
        "another type": ZERO.double(),
        "another shape": ZERO[None],
        "nothing": None,
    }.items():
        other = State({"a": value, "b": MINUS_ZERO, "c": (ZERO, 1)})
        assert different(state, other) == ["a"], name
        assert not same_bits(state, other), name
    assert different(state, State({"a": ZERO, "b": MINUS_ZERO, "c": (MINUS_ZERO, 1)})) == ["c"]
    assert different(State({"inner": state}), State({"inner": State({"a": ZERO, "b": ZERO})})) == [
        "inner: b",
        "inner: c",
    ]
    assert same_bits(dict(state), dict(state))
    assert not same_bits(dict(state), dict(state) | {"b": ZERO})
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.complex128, torch.bool):
        one, two = (State({"a": torch.zeros(3, dtype=dtype), "b": torch.zeros((), dtype=dtype)}) for _ in range(2))
        assert same_bits(one, two), dtype


def test_history_that_differs_is_named() -> None:
    state = State({"a": ZERO})
    history = [([ZERO], state), ([ZERO], state)]
    assert_same_history(history, [([ZERO.clone()], State({"a": ZERO.clone()}))] * 2, "one differs from two")
    for name, other in {
        "after call 1: a": ([ZERO], State({"a": MINUS_ZERO})),
        "after call 1: b": ([ZERO], State({"a": ZERO, "b": 1})),
        "result of call 1": ([MINUS_ZERO], state),
    }.items():
        with pytest.raises(AssertionError, match=f"one differs from two: {name}"):
            assert_same_history(history, [history[0], other], "one differs from two")
    for other in ([history[0]], [history[0], ([ZERO, ZERO], state)]):
        with pytest.raises((AssertionError, ValueError)):
            assert_same_history(history, other, "one differs from two")
