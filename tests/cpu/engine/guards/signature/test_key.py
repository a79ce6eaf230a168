"""Signatures: equal for calls that one graph serves, different for all others, and every difference told by name."""

import contextlib
import copy
import dataclasses
import enum
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tree import flatten
from stepgraph.engine.guards.signature import (
    AMBIENT_NAMES,
    AmbientReader,
    Difference,
    Signature,
    ambient_key,
    find_differences,
    leaf_key,
)

ARGUMENTS = ("batch", "scale")


def signature(
    *args: Any,
    training: tuple[bool, ...] = (),
    no_grad: tuple[bool, ...] = (),
    arguments: Any = ARGUMENTS,
    **kwargs: Any,
) -> Signature:
    leaves, structure = flatten((args, kwargs))
    keys = tuple(leaf_key(leaf) for leaf in leaves)
    return Signature(structure, keys, ambient_key(), training, no_grad, arguments)


def named(one: Signature, two: Signature) -> list[tuple[str, str]]:
    """The differences as (path, what); the empty list also means equal keys, and both ways round."""
    found = find_differences(one, two)
    assert bool(found) == bool(find_differences(two, one)) == (one.key != two.key)
    assert (hash(one.key) == hash(two.key)) or found
    return [(d.path, d.what) for d in found]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Batch:
    ids: Any
    mask: Any = None


FLOATS = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3)
TENSORS = st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype), SHAPES, st.sampled_from(DTYPES))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.sampled_from([*Colour, torch.float16, torch.device("cpu"), torch.Size([2]), range(3)]),
)
CALLS = st.recursive(
    st.one_of(TENSORS, VALUES),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.builds(Batch, children, children),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=50)
@given(CALLS, CALLS)
def test_signature_of_equal_calls_is_equal(batch: Any, scale: Any) -> None:
    one, two = signature(batch, scale=scale), signature(copy.deepcopy(batch), scale=copy.deepcopy(scale))
    assert one.key == two.key
    assert hash(one.key) == hash(two.key)
    assert named(one, two) == []
    assert named(one, one) == []


@settings(deadline=None, max_examples=50)
@given(CALLS, CALLS)
def test_differences_are_empty_exactly_where_keys_are_equal(one: Any, two: Any) -> None:
    named(signature(one), signature(two))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.one_of(TENSORS, VALUES), min_size=1, max_size=5), st.data())
def test_differences_name_the_one_leaf_that_changed(leaves: list[Any], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(leaves) - 1))
    other = data.draw(st.one_of(TENSORS, VALUES).filter(lambda v: leaf_key(v) != leaf_key(leaves[index])))
    changed = [*leaves[:index], other, *leaves[index + 1 :]]
    assert [path for path, _ in named(signature(leaves), signature(changed))] == [f"batch[{index}]"]


TENSOR = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (torch.zeros(2, 4), "shape changed"),
        (torch.zeros(6), "shape changed"),
        (torch.zeros(3, 2).t(), "strides changed"),
        (torch.zeros(1, 3).expand(2, 3), "strides changed"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "dtype changed"),
        (torch.zeros(2, 3, requires_grad=True), "requires_grad changed"),
        (torch.zeros(2, 3, requires_grad=True) * 1, "requires_grad changed"),
        (torch.zeros(2, 3, device="meta"), "device changed"),
        (torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False), "type changed"),
        (torch.zeros(2, 4, dtype=torch.float64), "shape and dtype changed"),
        (1.0, "type changed"),
        (None, "type changed"),
    ],
    ids=str,
)
def test_differences_of_a_tensor(other: Any, what: str) -> None:
    assert named(signature({"x": TENSOR, "y": TENSOR}), signature({"x": TENSOR, "y": other})) == [("batch['y']", what)]


def test_differences_of_a_conjugate_view() -> None:
    plain = torch.zeros(2, dtype=torch.complex64)
    assert named(signature(plain), signature(plain.conj())) == [("batch", "conj bit changed")]


def test_differences_separate_a_leaf_from_a_computed_tensor() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    assert named(signature(leaf), signature(leaf * 1)) == [("batch", "requires_grad changed")]


def test_signature_separates_conj_from_neg() -> None:
    base = torch.zeros(2, dtype=torch.complex64)
    assert leaf_key(base.conj()) != leaf_key(torch._neg_view(base))


def test_signature_of_a_negative_view() -> None:
    plain = torch.zeros(2)
    assert leaf_key(torch._neg_view(plain)) != leaf_key(plain)


def test_signature_of_a_parameter_has_its_address() -> None:
    """A parameter is not copied in: a graph has its address baked in."""
    parameter = torch.nn.Parameter(torch.ones(2))
    before, kept = leaf_key(parameter), parameter.data
    assert leaf_key(parameter) == before
    parameter.data = parameter.data.clone()
    assert leaf_key(parameter) != before
    parameter.data = kept
    assert leaf_key(parameter) == before


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "two", "what"),
    [
        (1, 2, "value changed"),
        (1, True, "type changed"),
        (1, 1.0, "type changed"),
        (True, 1.0, "type changed"),
        (0.0, -0.0, "value changed"),
        (1.0, NAN, "value changed"),
        (0.1, 0.1 + 2**-56, "value changed"),
        ("1", b"1", "type changed"),
        ("mean", "sum", "value changed"),
        (None, 0, "type changed"),
        (Colour.RED, Colour.BLUE, "value changed"),
        (Colour.RED, 1, "type changed"),
        (1 + 0j, 1.0, "type changed"),
        (1 + 0j, 2j, "value changed"),
        (complex(0.0, 0.0), complex(0.0, -0.0), "value changed"),
        (torch.float32, torch.float64, "value changed"),
        (range(2), range(3), "value changed"),
    ],
    ids=repr,
)
def test_differences_of_a_plain_value(one: Any, two: Any, what: str) -> None:
    assert named(signature(TENSOR, scale=one), signature(TENSOR, scale=two)) == [("scale", what)]


@pytest.mark.parametrize("make", [lambda: float("nan"), lambda: complex(float("nan"), 1.0)], ids=["float", "complex"])
def test_signature_of_nan_is_equal_to_itself(make: Callable[[], Any]) -> None:
    assert named(signature(make()), signature(make())) == []


def test_signature_takes_other_objects_by_identity() -> None:
    one, two = object(), object()
    assert named(signature(one), signature(one)) == []
    assert named(signature(one), signature(two)) == [("batch", "value changed")]


@pytest.mark.parametrize(
    "leaf", [np.ones(2), np.float32(1.0), np.float64(1.0), np.int64(1), np.bool_(True)], ids=lambda v: type(v).__name__
)
def test_signature_refuses_numpy(leaf: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        leaf_key(leaf)
    error = caught.value
    assert error.rule == "host-data"
    assert type(leaf).__name__ in error.what
    assert error.why
    assert "torch.as_tensor" in error.fix


# -- structure


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, [("batch['b']", "missing")]),
        ({"a": 1}, {"a": 1, "b": 2}, [("batch['b']", "extra")]),
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, [("batch['b']", "missing"), ("batch['c']", "extra")]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, [("batch", "keys reordered")]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}, [("batch['a']", "keys reordered")]),
        ([1, 2], [1], [("batch[1]", "missing")]),
        ([1, [2]], [1, 2], [("batch[1]", "type changed")]),
        ((1, 2), [1, 2], [("batch", "type changed")]),
        (Batch([1]), Batch([1, 2]), [("batch.ids[1]", "extra")]),
        (OrderedDict(a=1, b=2), OrderedDict(a=1), [("batch['b']", "missing")]),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), [("batch", "keys reordered")]),
        (
            OrderedDict(a=1, b=2),
            OrderedDict(b=1, a=2),
            [("batch", "keys reordered"), ("batch['a']", "value changed"), ("batch['b']", "value changed")],
        ),
    ],
    ids=repr,
)
def test_differences_of_structure(one: Any, two: Any, expected: list[tuple[str, str]]) -> None:
    assert named(signature(one), signature(two)) == expected


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.text(max_size=2), VALUES, min_size=1, max_size=4), st.data())
def test_differences_name_a_missing_and_an_extra_key(full: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(full)))
    part = {k: v for k, v in full.items() if k != key}
    assert named(signature(full), signature(part)) == [(f"batch[{key!r}]", "missing")]
    assert named(signature(part), signature(full)) == [(f"batch[{key!r}]", "extra")]


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.text(max_size=2), VALUES, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_differences_name_reordered_keys(full: dict[str, Any], random: Any) -> None:
    keys = list(full)
    random.shuffle(keys)
    expected = [] if keys == list(full) else [("batch", "keys reordered")]
    assert named(signature(full), signature({k: full[k] for k in keys})) == expected


def test_differences_name_arguments() -> None:
    assert named(signature(1, 2), signature(1)) == [("scale", "missing")]
    assert named(signature(1), signature(1, 2)) == [("scale", "extra")]
    assert named(signature(1, 2, 3), signature(1, 2)) == [("args[2]", "missing")]
    assert named(signature(batch=1), signature(batch=1, lr=2)) == [("lr", "extra")]
    assert named(signature(batch=1, lr=2), signature(lr=2, batch=1)) == [("the keyword arguments", "keys reordered")]
    assert named(signature(1, scale=2), signature(1, 2)) == [("scale", "extra"), ("scale", "missing")]


def test_difference_reads_as_a_sentence() -> None:
    (found,) = find_differences(signature(torch.zeros(4, 2)), signature(torch.zeros(2, 2)))
    assert str(found) == "batch: shape changed (captured f32[4, 2] cpu, received f32[2, 2] cpu)"
    assert found == Difference("batch", "shape changed", "f32[4, 2] cpu", "f32[2, 2] cpu")


# -- flags of the process, of modules and of gradients


@contextlib.contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def flag(owner: Any, name: str, value: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    return lambda: setting(lambda: getattr(owner, name), lambda v: setattr(owner, name, v), value)


SDPA = torch.backends.cuda


class SeesFunctions(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeesOperators(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MATH_REDUCTION = (SDPA.fp16_bf16_reduction_math_sdp_allowed, SDPA.allow_fp16_bf16_reduction_math_sdp)
FILL: Any = torch.utils.deterministic
SITUATIONS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], set[str]]] = {
    "no_grad": (torch.no_grad, {"grad mode"}),
    "inference_mode": (torch.inference_mode, {"grad mode", "inference mode"}),
    "autocast cpu": (lambda: torch.autocast("cpu", torch.bfloat16), {"autocast on cpu"}),
    "autocast cuda": (
        lambda: setting(
            lambda: torch.is_autocast_enabled("cuda"), lambda v: torch.set_autocast_enabled("cuda", v), True
        ),
        {"autocast on cuda"},
    ),
    "autocast dtype": (
        lambda: setting(
            lambda: torch.get_autocast_dtype("cpu"), lambda v: torch.set_autocast_dtype("cpu", v), torch.float16
        ),
        {"default dtype of autocast on cpu"},
    ),
    "autocast cache": (
        lambda: setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
        {"autocast cache"},
    ),
    "default dtype": (
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        {"default dtype"},
    ),
    "deterministic": (
        lambda: setting(
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            not torch.are_deterministic_algorithms_enabled(),
        ),
        {"deterministic algorithms"},
    ),
    "matmul precision": (flag(SDPA.matmul, "fp32_precision", "tf32"), {"float32 precision of matmul"}),
    "conv precision": (flag(torch.backends.cudnn.conv, "fp32_precision", "ieee"), {"float32 precision of conv"}),
    "cudnn deterministic": (
        flag(torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic),
        {"cudnn deterministic"},
    ),
    "cudnn benchmark": (
        flag(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
        {"cudnn benchmark"},
    ),
    "cudnn enabled": (flag(torch.backends.cudnn, "enabled", False), {"cudnn enabled"}),
    "flash": (lambda: setting(SDPA.flash_sdp_enabled, SDPA.enable_flash_sdp, False), {"flash attention"}),
    "memory-efficient": (
        lambda: setting(SDPA.mem_efficient_sdp_enabled, SDPA.enable_mem_efficient_sdp, False),
        {"memory-efficient attention"},
    ),
    "math": (lambda: setting(SDPA.math_sdp_enabled, SDPA.enable_math_sdp, False), {"math attention"}),
    "cudnn attention": (lambda: setting(SDPA.cudnn_sdp_enabled, SDPA.enable_cudnn_sdp, False), {"cudnn attention"}),
    "math reduction": (lambda: setting(*MATH_REDUCTION, True), {"reduction in math attention"}),
    "fp16 accumulation": (flag(SDPA.matmul, "allow_fp16_accumulation", True), {"fp16 accumulation"}),
    "fast path": (
        lambda: setting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
        {"fast path of attention modules"},
    ),
    "fill": (
        lambda: flag(FILL, "fill_uninitialized_memory", not FILL.fill_uninitialized_memory)(),
        {"fill of new memory"},
    ),
    "anomaly": (
        lambda: setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
        {"anomaly mode"},
    ),
    "device": (lambda: torch.device("meta"), {"torch-function modes"}),
    "function mode": (SeesFunctions, {"torch-function modes"}),
    "saved-tensor hooks": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        {"saved-tensor hooks"},
    ),
}
OBSERVERS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "dispatch modes": SeesOperators,
    "saved-tensor hooks": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_ambient_flag_changes_the_key_and_is_named(name: str) -> None:
    enter, expected = SITUATIONS[name]
    before = signature(TENSOR)
    with enter():
        within = signature(TENSOR)
    assert {path for path, _ in named(before, within)} == expected
    assert named(before, signature(TENSOR)) == [], "the flag is as before"


@pytest.mark.parametrize("name", SITUATIONS)
def test_ambient_reader_notices_each_flag(name: str) -> None:
    enter, _ = SITUATIONS[name]
    reader = AmbientReader()
    before = reader.read()
    assert reader.read() is before
    with enter():
        within = reader.read()
        assert within == ambient_key() != before
        assert reader.read() is within, "one object for as long as nothing changes"
    assert reader.read() == before == ambient_key()


def test_ambient_modes_are_compared_by_identity() -> None:
    one, two = SeesFunctions(), SeesFunctions()
    with one:
        first = signature(TENSOR)
        assert named(first, signature(TENSOR)) == []
    with two:
        assert named(first, signature(TENSOR)) == [("torch-function modes", "changed")]
    with one:
        assert named(first, signature(TENSOR)) == []


def test_ambient_mode_that_is_gone_is_not_mistaken_for_another() -> None:
    keys = []
    for _ in range(20):
        with SeesFunctions():
            keys.append(ambient_key())
    assert len(set(keys)) == 20


def test_ambient_default_device_is_compared_by_name() -> None:
    with torch.device("meta"):
        one = signature(TENSOR)
    with torch.device("meta"):
        assert named(one, signature(TENSOR)) == []
    with torch.device("cpu"):
        (found,) = find_differences(one, signature(TENSOR))
    assert (found.captured, found.received) == ("('device meta',)", "('device cpu',)")


@pytest.mark.parametrize("name", OBSERVERS)
def test_ambient_observers_count_where_they_are_asked_for(name: str) -> None:
    plain, asking = AmbientReader(), AmbientReader(observers=True)
    before = plain.read(), asking.read()
    assert before[0] == before[1] == ambient_key() == ambient_key(observers=True)
    with OBSERVERS[name]():
        assert plain.read() is before[0]
        within = asking.read()
        assert within == ambient_key(observers=True)
        assert [n for n, a, b in zip(AMBIENT_NAMES, before[1], within, strict=True) if a != b] == [name]
        assert asking.read() is within
        with OBSERVERS[name]():
            assert asking.read() != within
        assert asking.read() == within
    assert asking.read() == before[1]


def test_ambient_autocast_dtype_changes_the_key() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        one = signature(TENSOR)
    with torch.autocast("cpu", torch.float16):
        two = signature(TENSOR)
    assert [path for path, _ in named(one, two)] == ["autocast on cpu"]


def test_ambient_names_are_as_many_as_values() -> None:
    assert len(AMBIENT_NAMES) == len(ambient_key()) == len(set(AMBIENT_NAMES))


def test_differences_name_modules_and_parameters() -> None:
    one = signature(training=(True, True), no_grad=(True, False))
    two = signature(training=(True, False), no_grad=(False, False))
    assert one.key != two.key
    assert find_differences(one, two) == [
        Difference("#1", "training", "True", "False"),
        Difference("#0", ".grad is None", "True", "False"),
    ]


def test_differences_of_many_modules_are_one_line() -> None:
    one, two = signature(training=(True,) * 9), signature(training=(False,) * 9)
    (found,) = find_differences(one, two)
    assert found.path == "#0 and 8 more"


def test_differences_of_other_objects_are_reported() -> None:
    (found,) = find_differences(signature(training=(True,)), signature(training=(True, True)))
    assert found == Difference("training", "the step touches other objects", "1", "2")


# -- in words


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: signature(), "no arguments"),
        (lambda: signature(TENSOR, scale="mean"), "batch=f32[2, 3] cpu, scale='mean'"),
        (lambda: signature({"ids": torch.zeros(2, dtype=torch.int64)}), "batch['ids']=int64[2] cpu"),
        (lambda: signature(Batch(torch.zeros(1, requires_grad=True), 0.5)), None),
        (lambda: signature(torch.zeros(2, dtype=torch.complex64).conj()), "batch=complex64[2] cpu conj"),
        (lambda: signature(torch.nn.Parameter(torch.zeros(2))), "batch=f32[2] cpu Parameter requires_grad (leaf)"),
        (lambda: signature(torch.nn.Identity()), "batch=<Identity object>"),
        (lambda: signature(NAN, -0.0), "batch=nan, scale=-0.0"),
        (lambda: signature(1, training=(False, False)), "batch=1, eval"),
        (lambda: signature(1, training=(False, True)), "batch=1"),
        (lambda: signature(1, no_grad=(True,)), "batch=1, no .grad yet"),
        (lambda: signature(1, 2, 3), "batch=1, scale=2, args[2]=3"),
    ],
)
def test_describe_is_one_line_with_names(made: Callable[[], Signature], expected: str | None) -> None:
    if expected is None:
        expected = "batch.ids=f32[1] cpu requires_grad (leaf), batch.mask=0.5"
    assert made().describe() == expected


def test_describe_says_that_gradients_are_off() -> None:
    with torch.inference_mode():
        described = signature(1).describe()
    assert described.startswith("batch=1, ")
    assert "inference" in described
    with torch.no_grad():
        assert re.search("no.?grad", signature(1).describe()), "a report must not say `grad mode` where it is off"


FLAGS = {
    "grad mode": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast dtype": lambda: torch.autocast("cpu", torch.float16),
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, False, True),
    "cudnn benchmark": lambda: _set(torch._C._set_cudnn_benchmark, True, False),
    "flash": lambda: _set(torch._C._set_sdp_use_flash, False, True),
    "precision": lambda: _set(torch.set_float32_matmul_precision, "high", "highest"),
    "bf16 reduction": lambda: _set(torch._C._set_cublas_allow_bf16_reduced_precision_reduction, False, True),
}


@contextlib.contextmanager
def _set(setter: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


@pytest.mark.parametrize("flag", FLAGS)
def test_ambient_reader_reads_what_the_key_is(flag: str) -> None:
    reader = AmbientReader()
    before = reader.read()
    assert before == ambient_key()
    for _ in range(2):
        with FLAGS[flag]():
            changed = reader.read()
            assert changed == ambient_key()
            assert changed != before
            assert reader.read() is changed
        assert reader.read() == ambient_key()
