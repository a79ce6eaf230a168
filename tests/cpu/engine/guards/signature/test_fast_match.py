"""Likeness: a call is told to look like another only if their signatures are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stepgraph.core.tree import flatten
from stepgraph.engine.guards.signature import ambient_key, leaf_keys
from stepgraph.engine.guards.signature.fast_match import FastMatch

Call = tuple[tuple[Any, ...], dict[str, Any]]


def tensors() -> dict[str, torch.Tensor]:
    base = torch.ones(4, 4)
    return {
        "plain": torch.ones(4, 4),
        "another plain": torch.zeros(4, 4),
        "other shape": torch.ones(4, 5),
        "other rank": torch.ones(4, 4, 1),
        "transposed": base.t(),
        "strided": torch.ones(4, 8)[:, ::2],
        "other dtype": torch.ones(4, 4, dtype=torch.float64),
        "needs grad": torch.ones(4, 4, requires_grad=True),
        "computed": torch.ones(4, 4, requires_grad=True) * 2,
        "parameter": nn.Parameter(torch.ones(4, 4)),
        "complex": torch.ones(4, 4, dtype=torch.complex64),
        "conjugate": torch.ones(4, 4, dtype=torch.complex64).conj(),
        "negative": torch.ones(4, 4, dtype=torch.complex64).conj().imag,
        "sparse": torch.ones(4, 4).to_sparse(),
    }


VALUES = [None, True, 0, 1, "a", 2.0, -0.0, 0.0]
LEAVES = st.one_of(st.sampled_from(sorted(tensors())), st.sampled_from(VALUES))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    known = tensors()
    named = known | {"a": "a"}
    args = tuple(named[x] if isinstance(x, str) else x for x in draw(st.lists(LEAVES, max_size=3)))
    names = draw(st.lists(st.sampled_from(["x", "y"]), unique=True))
    kwargs = {n: named[x] if isinstance(x, str) else x for n, x in ((n, draw(LEAVES)) for n in names)}
    return args, kwargs


def key(call: Call) -> Any:
    leaves, structure = flatten(call)
    return structure, leaf_keys(leaves, on="cpu")


@given(calls(), calls())
def test_likeness_is_never_found_where_signatures_differ(one: Call, two: Call) -> None:
    known = FastMatch.of(*one, "cpu")
    if known is not None:
        found = known.leaves_of(*two)
        assert found is None or key(one) == key(two)


@given(calls())
def test_likeness_gives_the_leaves_of_the_call(call: Call) -> None:
    known = FastMatch.of(*call, "cpu")
    if known is not None:
        found = known.leaves_of(*call)
        assert found is not None
        assert all(a is b for a, b in zip(found, flatten(call)[0], strict=True))


def test_likeness_is_found_for_tensors_of_the_same_geometry() -> None:
    known = FastMatch.of((torch.ones(4),), {"mask": torch.ones(4), "flag": True}, "cpu")
    assert known is not None
    assert known.leaves_of((torch.zeros(4),), {"mask": torch.zeros(4), "flag": True}) is not None
    assert known.leaves_of((torch.zeros(4),), {"flag": True, "mask": torch.zeros(4)}) is None
    assert known.leaves_of((torch.zeros(4),), {"mask": torch.zeros(4), "flag": False}) is None


def test_likeness_is_not_found_for_one_tensor_passed_twice() -> None:
    known, twice = FastMatch.of((torch.ones(4), torch.ones(4)), {}, "cpu"), torch.ones(4)
    assert known is not None
    assert known.leaves_of((twice, twice), {}) is None
    assert FastMatch.of((twice, twice), {}, "cpu") is None


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_likeness_is_not_made_where_gradients_cannot_be_compared(around: Any) -> None:
    with around():
        assert FastMatch.of((torch.ones(4),), {}, "cpu") is None


def test_likeness_found_under_other_flags_is_left_to_the_flags() -> None:
    """Flags are compared by their own key; where a call is told to look the same, its leaves do."""
    known, x = FastMatch.of((torch.ones(4),), {}, "cpu"), torch.ones(4)
    assert known is not None
    before = ambient_key()
    with torch.no_grad():
        assert ambient_key() != before
        assert known.leaves_of((x,), {}) in (None, [x])


def test_likeness_separates_computed_tensors_on_request() -> None:
    leaf = torch.ones(4, requires_grad=True)
    for tell_computed in (True, False):
        known = FastMatch.of((leaf,), {}, "cpu", tell_computed=tell_computed)
        assert known is not None
        assert (known.leaves_of((leaf * 2,), {}) is None) is tell_computed
