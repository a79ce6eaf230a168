"""Buckets: the smallest size that fits, one signature for all batches of a bucket, results cut back where they grew."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tree import flatten
from stepgraph.engine.guards.signature import Signature, tensor_key
from stepgraph.engine.step.padding import BoundBuckets, Buckets, Padded, named_shapes, result_dims, result_names
from stepgraph.engine.step.padding.buckets import dotted
from stepgraph.engine.step.padding.layout import dense_strides, holds

SIZES = [4, 8, 16]


def parse(buckets: Any, pad_values: Any = None) -> Buckets:
    parsed = Buckets.parse(buckets, pad_values)
    assert parsed is not None
    return parsed


def call(*args: Any, arguments: tuple[str, ...] = ("batch", "other"), **kwargs: Any) -> tuple[list[str], list[Any]]:
    """The names and leaves of a call, as a captured step has them."""
    leaves, structure = flatten((args, kwargs))
    return Signature(structure, (), (), arguments=arguments).names(), leaves


def bound(buckets: Any, *args: Any, pad_values: Any = None, **kwargs: Any) -> tuple[BoundBuckets, list[Any]]:
    names, leaves = call(*args, **kwargs)
    return BoundBuckets(parse(buckets, pad_values), names, leaves), leaves


def pad(buckets: Any, *args: Any, pad_values: Any = None, **kwargs: Any) -> Padded:
    found, leaves = bound(buckets, *args, pad_values=pad_values, **kwargs)
    return found.pad(leaves)


def refused(make: Callable[[], object], rule: str = "buckets") -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.rule == rule
    assert caught.value.why
    assert caught.value.fix
    return caught.value


# -- names


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    ids: Any
    mask: Any = None


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("tree", "spellings"),
    [
        ({"ids": X, "n": 1}, ["batch.ids", "batch['ids']", 'batch["ids"]']),
        (Batch(X), ["batch.ids", "batch['ids']"]),
        (Pair(1, X), ["batch.second"]),
        ([1, X], ["batch.1", "batch[1]"]),
        ({3: X}, ["batch.3", "batch[3]"]),
        ({"a": [Batch({"x.y": X})]}, ["batch.a.0.ids.x.y", "batch['a'][0].ids['x.y']", "batch.a[0].ids['x.y']"]),
        (X, ["batch"]),
    ],
    ids=["dict", "dataclass", "namedtuple", "list", "int key", "nested", "tensor"],
)
def test_name_is_taken_in_both_spellings(tree: Any, spellings: list[str]) -> None:
    for name in spellings:
        for padded in (pad({name: {1: SIZES}}, tree), pad({name: {1: SIZES}}, batch=tree)):
            (tensor,) = (leaf for leaf in padded.leaves if isinstance(leaf, torch.Tensor))
            assert tensor.shape == (2, 4), name


def test_name_of_an_argument_without_one() -> None:
    assert pad({"args[1]": {1: SIZES}}, 5, X, arguments=()).leaves[1].shape == (2, 4)
    assert pad({"args.1": {1: SIZES}}, 5, X, arguments=()).leaves[1].shape == (2, 4)


KEYS = st.text(max_size=4)
TREES = st.recursive(
    st.just(0),
    lambda children: st.one_of(
        st.dictionaries(KEYS, children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3),
        st.builds(Batch, children, children),
        st.builds(Pair, children, children),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=40)
@given(TREES, st.data())
def test_name_as_messages_spell_it_finds_its_leaf(tree: Any, data: st.DataObject) -> None:
    names, leaves = call(tree)
    index = data.draw(st.integers(0, len(leaves) - 1))
    leaves[index] = X
    (member,) = BoundBuckets(parse({names[index]: {1: SIZES}}), names, leaves)._members
    assert member.index == index


@settings(deadline=None, max_examples=30)
@given(TREES, st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=4))
def test_unknown_name_lists_what_the_call_has(tree: Any, name: str) -> None:
    names, leaves = call(tree, X)
    assume(not any(dotted(n) == name or dotted(n).startswith(f"{name}.") for n in names))
    error = refused(lambda: BoundBuckets(parse({name: {0: SIZES}}), names, leaves))
    assert f"no leaf `{name}`" in error.what
    assert len(error.details) == len(names)
    assert all(line.startswith(n) for n, line in zip(names, error.details, strict=True))
    assert error.details[-1].endswith("f32[2, 3] cpu")


def test_unknown_name_proposes_the_nearest() -> None:
    error = refused(lambda: bound({"batch.inputids": {1: SIZES}}, {"input_ids": X, "labels": X}))
    assert error.fix == 'did you mean "batch.input_ids"?'


def test_unknown_name_in_a_large_call_lists_its_first_leaves() -> None:
    error = refused(lambda: bound({"nothing": {1: SIZES}}, [X] * 50))
    assert len(error.details) == 21
    assert error.details[-1] == "and 30 more"


def test_name_of_a_container_is_refused_with_its_leaves() -> None:
    error = refused(lambda: bound({"batch": {1: SIZES}}, {"ids": X}))
    assert "is a container" in error.what
    assert error.fix == 'did you mean "batch.ids"?'
    assert refused(lambda: bound({"batch": {1: SIZES}}, {"ids": X}, batc=X)).fix == error.fix


def test_name_that_fits_two_leaves_is_refused_unless_exact() -> None:
    tree = {"1": X, 1: X * 2}
    assert "more than one leaf" in refused(lambda: bound({"batch.1": {1: SIZES}}, tree)).what
    padded = pad({"batch['1']": {1: SIZES}}, tree)
    assert [leaf.shape[1] for leaf in padded.leaves] == [4, 3]


def test_name_given_in_two_spellings_is_refused() -> None:
    refused(lambda: parse({"batch.ids": {1: SIZES}, "batch['ids']": {0: SIZES}}))
    tree = {"1": X, "a": {"1": X}}
    assert "same leaf" in refused(lambda: bound({"batch.1": {1: SIZES}, 'batch["1"]': {0: [4]}}, tree)).what


# -- what the options may be


def test_parse_without_buckets_is_none() -> None:
    assert Buckets.parse(None) is None
    assert Buckets.parse({}, {}) is None


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ({"x": {1: []}}, "[] is not a list of sizes"),
        ({"x": {1: [4, 0]}}, "[4, 0] is not a list of sizes"),
        ({"x": {1: [-4]}}, "[-4] is not a list of sizes"),
        ({"x": {1: [4.0]}}, "[4.0] is not a list of sizes"),
        ({"x": {1: [True]}}, "[True] is not a list of sizes"),
        ({"x": {1: 512}}, "512 is not a list of sizes"),
        ({"x": {1: "48"}}, "'48' is not a list of sizes"),
        ({"x": {"1": [4]}}, "'1' is not a dimension"),
        ({"x": {True: [4]}}, "True is not a dimension"),
        ({"x": {}}, "no dimension is given"),
        ({"x": [4]}, "[4] is not a dict"),
        ([4], "[4] is not a dict"),
        ({0: {1: [4]}}, "0 is not a name"),
        ({"": {1: [4]}}, "'' is not a name"),
        ({"result": {1: [4]}}, "no argument has the sizes [4]"),
        ({"x": {1: [8]}, "result.y": {1: [4]}}, "no argument has the sizes [4]"),
        ({"result": {}}, "only results"),
    ],
)
def test_parse_refuses(buckets: Any, said: str) -> None:
    assert said in refused(lambda: Buckets.parse(buckets)).what


@pytest.mark.parametrize(
    ("pads", "said"),
    [
        ({"batch.labels": -100}, "`batch.labels` is not an argument with buckets"),
        ({"result": -100}, "`result` is not an argument with buckets"),
        ({"x": "0"}, "is not a number"),
        ({"x": torch.zeros(())}, "is not a number"),
        ({"x": None}, "is not a number"),
        ({"x": 1, "['x']": 1}, "is not an argument with buckets"),
        ({"a.x": 1, "a['x']": 1}, "is given twice"),
        ([1], "is not a dict"),
        ({1: 1}, "is not a name"),
    ],
)
def test_parse_refuses_pad_values(pads: Any, said: str) -> None:
    assert said in refused(lambda: Buckets.parse({"x": {1: [4]}, "result": {1: [4]}, "a.x": {1: [4]}}, pads)).what


def test_parse_refuses_pad_values_without_buckets() -> None:
    assert "not an argument with buckets" in refused(lambda: Buckets.parse(None, {"x": 0})).what


def test_parse_sorts_sizes_and_drops_repetitions() -> None:
    assert parse({"x": {1: (16, 4, 8, 4)}, "y": {0: range(4, 17, 4)}}).groups == ((4, 8, 16), (4, 8, 12, 16))


def test_parse_groups_dimensions_by_their_list() -> None:
    found = parse({"x": {1: [4, 8], 2: [8, 4]}, "y": {0: [4, 8], -1: [3]}, "result": {0: [3]}})
    assert found.groups == ((4, 8), (3,))
    assert [leaf.dims for leaf in found.arguments] == [((1, 0), (2, 0)), ((0, 0), (-1, 1))]
    assert [leaf.dims for leaf in found.results] == [((0, 1),)]


def test_parse_finds_a_pad_value_in_another_spelling() -> None:
    assert parse({"batch.labels": {1: [4]}}, {"batch['labels']": -100}).arguments[0].pad == -100


def test_describe_says_how_many_graphs() -> None:
    found = parse({"x": {0: [1, 2], 1: [4, 8, 16]}})
    assert (found.num_choices, found.describe()) == (6, "[1, 2] x [4, 8, 16]: 6 graphs")
    found.check_limit(6)
    error = refused(lambda: found.check_limit(5))
    assert "6 graphs, and max_graphs=5" in error.what
    assert "max_graphs=6" in error.fix


# -- padding


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "gaps": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
    "offset": lambda t: torch.cat([t, t], dim=0)[t.shape[0] :],
}


def tensor_of(shape: Sequence[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    made = LAYOUTS[layout](torch.arange(1, math.prod(shape) + 1).reshape(tuple(shape)).to(dtype))
    assert made.shape == tuple(shape)
    return made


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], list[torch.Tensor]]:
    """Buckets, pad values, and tensors that fit them."""
    lists = draw(st.lists(st.sets(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=2))
    buckets: dict[str, Any] = {}
    pads: dict[str, Any] = {}
    tensors = []
    for index in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
        given_dims = {}
        for dim in dims:
            sizes = draw(st.sampled_from(lists))
            shape[dim] = draw(st.integers(0, max(sizes)))
            given_dims[draw(st.sampled_from([dim, dim - len(shape)]))] = sorted(sizes)
        dtype = draw(st.sampled_from(DTYPES))
        buckets[f"batch[{index}]"] = given_dims
        if draw(st.booleans()):
            pads[f"batch.{index}"] = draw(st.sampled_from([0, 1] if dtype == torch.bool else [0, 1, 100]))
        tensors.append(tensor_of(shape, dtype, draw(st.sampled_from(list(LAYOUTS)))))
    return buckets, pads, tensors


CALLS = calls()


def sizes_given(buckets: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(i, d, tuple(s)) for i in range(len(tensors)) for d, s in buckets[f"batch[{i}]"].items()]


@settings(deadline=None, max_examples=60)
@given(CALLS)
def test_pad_takes_the_smallest_size_that_fits_a_whole_group(drawn: Any) -> None:
    buckets, pads, tensors = drawn
    padded = pad(buckets, tensors, pad_values=pads)
    given_sizes = sizes_given(buckets, tensors)
    for index, dim, sizes in given_sizes:
        largest = max(tensors[i].shape[d] for i, d, s in given_sizes if s == sizes)
        assert padded.leaves[index].shape[dim] == min(s for s in sizes if s >= largest)


@settings(deadline=None, max_examples=60)
@given(CALLS)
def test_pad_keeps_the_tensor_and_fills_the_rest(drawn: Any) -> None:
    buckets, pads, tensors = drawn
    padded = pad(buckets, tensors, pad_values=pads)
    for index, (tensor, made) in enumerate(zip(tensors, padded.leaves, strict=True)):
        expected = torch.full_like(made, pads.get(f"batch.{index}", 0))
        expected[tuple(slice(0, n) for n in tensor.shape)] = tensor
        assert torch.equal(made, expected)
        assert made.dtype == tensor.dtype
        bucketed = {d % tensor.dim() for d in buckets[f"batch[{index}]"]}
        assert all(made.shape[d] == tensor.shape[d] for d in range(tensor.dim()) if d not in bucketed)


@settings(deadline=None, max_examples=60)
@given(CALLS)
def test_pad_then_slice_back_gives_the_tensors_again(drawn: Any) -> None:
    """A step that returns its arguments, where the members of each group have one size."""
    buckets, pads, tensors = drawn
    found, leaves = bound(buckets, tensors, pad_values=pads)
    lengths = dict(zip(found.buckets.groups, found.lengths(leaves), strict=True))
    for index, dim, sizes in sizes_given(buckets, tensors):
        shape = list(tensors[index].shape)
        shape[dim] = lengths[sizes]
        tensors[index] = tensor_of(shape, tensors[index].dtype, "contiguous")
    padded = found.pad(tensors)
    said = {f"result[{i}]": dims for i, dims in enumerate(buckets.values())}
    structure = flatten(padded.leaves)[1]
    dims = result_dims(parse(buckets | said), {padded.choice: named_shapes(result_names(structure), padded.leaves)}, {})
    dims.check(padded.choice, padded.lengths)
    cut = dims.slice_back(result_names(structure), padded.leaves, padded.lengths)
    assert all(torch.equal(one, two) for one, two in zip(cut, tensors, strict=True))


@settings(deadline=None, max_examples=40)
@given(CALLS)
def test_pad_passes_on_what_has_its_size(drawn: Any) -> None:
    buckets, pads, tensors = drawn
    found, leaves = bound(buckets, tensors, pad_values=pads)
    first = found.pad(leaves)
    again = found.pad(first.leaves)
    assert all(one is two for one, two in zip(first.leaves, again.leaves, strict=True))
    assert again.made == []
    assert again.choice == again.lengths == first.choice


@settings(deadline=None, max_examples=40)
@given(CALLS, st.data())
def test_pad_gives_all_batches_of_a_bucket_one_signature(drawn: Any, data: st.DataObject) -> None:
    """Whatever its length, with gaps or without, by padding or as an example: one graph serves them all."""
    buckets, pads, tensors = drawn
    in_order = [all(a >= b for a, b in itertools.pairwise(t.stride())) for t in tensors]
    assume(all(o or min(t.shape) > 1 for o, t in zip(in_order, tensors, strict=True)))  # a size of 1 shows no order
    found, leaves = bound(buckets, tensors, pad_values=pads)
    padded = found.pad(leaves)
    keys = [tensor_key(leaf) for leaf in padded.leaves]
    for index, dim, _ in sizes_given(buckets, tensors):
        smallest = 1 if in_order[index] else 2
        size = data.draw(st.integers(smallest, max(smallest, padded.leaves[index].shape[dim])))
        leaves[index] = leaves[index].narrow(dim, 0, min(size, leaves[index].shape[dim]))
    assert [tensor_key(leaf) for leaf in found.example(leaves, padded.choice)] == keys
    other = found.pad(leaves)
    if other.choice == padded.choice:
        assert [tensor_key(leaf) for leaf in other.leaves] == keys


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pad_of_an_exact_tensor_copies_only_what_has_gaps(layout: str) -> None:
    exact = tensor_of((3, 8), torch.float32, layout)
    padded = pad({"batch": {1: SIZES}}, exact)
    assert (padded.leaves[0] is exact) == (layout != "gaps")
    assert torch.equal(padded.leaves[0], exact)
    assert padded.leaves[0].stride() == dense_strides((3, 8), exact.stride())


def test_pad_of_an_exact_row_of_a_larger_tensor_is_dense() -> None:
    row = torch.ones(2, 12)[:1, :8]  # contiguous for torch, with the stride of its whole
    assert pad({"batch": {1: SIZES}}, row).leaves[0].stride() == (8, 1)


def test_pad_keeps_channels_last() -> None:
    image = torch.rand(2, 3, 5, 7).to(memory_format=torch.channels_last)
    made = pad({"batch": {2: [8], 3: [8]}}, image).leaves[0]
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(made[:, :, :5, :7], image)


@pytest.mark.parametrize("shape", list(itertools.product((1, 2), repeat=4)), ids=str)
def test_pad_of_four_dimensions_is_laid_out_as_planned(shape: tuple[int, ...]) -> None:
    """Where sizes are 1 torch cannot tell channels-last from contiguous; the signature must not depend on its guess."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        image = torch.rand(shape).to(memory_format=memory_format)
        for dim in range(4):
            padded = pad({"batch": {dim: [3]}}, image).leaves[0]
            assert padded.stride() == dense_strides(padded.shape, image.stride())
            assert pad({"batch": {dim: [3]}}, padded).leaves[0] is padded


def test_pad_keeps_a_subclass() -> None:
    class Tagged(torch.Tensor):
        pass

    for shape in ((3,), (3, 1, 1, 1)):
        tagged = torch.ones(shape).as_subclass(Tagged)
        made = pad({"batch": {0: SIZES}}, tagged, pad_values={"batch": 7}).leaves[0]
        assert type(made) is Tagged
        assert made.flatten().tolist() == [1, 1, 1, 7]


def test_pad_of_an_expanded_tensor_is_dense() -> None:
    made = pad({"batch": {1: SIZES}}, torch.ones(1, 3).expand(4, 3)).leaves[0]
    assert (made.shape, made.stride()) == ((4, 4), (4, 1))
    made = pad({"batch": {0: SIZES}}, torch.ones(3, 1).expand(3, 4)).leaves[0]
    assert (made.shape, made.stride()) == ((4, 4), (4, 1))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_dense_strides_are_those_of_a_dense_tensor(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    made = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    strides = dense_strides(made.shape, made.stride())
    wide = [(s, n) for s, n in zip(strides, shape, strict=True) if n > 1]
    assert wide == [(s, n) for s, n in zip(made.stride(), shape, strict=True) if n > 1]
    assert dense_strides(shape, strides) == strides
    if made.is_contiguous():
        assert strides == torch.empty(shape).stride()
    gaps = torch.empty([n * 2 for n in made.shape]).as_strided(made.shape, [s * 2 for s in made.stride()])
    assert dense_strides(shape, gaps.stride()) == strides


def test_pad_leaves_other_leaves_alone() -> None:
    other, flag = torch.ones(3), object()
    padded = pad({"batch.x": {0: SIZES}}, {"x": torch.ones(3), "other": other, "flag": flag, "n": 3})
    assert padded.leaves[1] is other
    assert padded.leaves[2] is flag
    assert padded.leaves[3] == 3


def test_pad_of_members_of_different_sizes_takes_the_largest() -> None:
    padded = pad({"batch.x": {0: SIZES}, "batch.y": {-1: SIZES}}, {"x": torch.ones(3), "y": torch.ones(2, 5)})
    assert [tuple(leaf.shape) for leaf in padded.leaves] == [(8,), (2, 8)]
    assert (padded.choice, padded.lengths) == ((8,), (5,))


def test_pad_of_groups_is_independent() -> None:
    padded = pad({"batch": {0: [2, 4], 1: SIZES}}, torch.ones(3, 5))
    assert (padded.choice, padded.lengths) == ((4, 8), (3, 5))


def test_pad_past_the_largest_names_all() -> None:
    buckets = {"batch.ids": {1: SIZES}, "batch.labels": {1: SIZES}}
    batch = {"ids": torch.ones(2, 3), "labels": torch.ones(2, 17)}
    error = refused(lambda: pad(buckets, batch), "bucket-overflow")
    assert error.what == "argument `batch['labels']`, dimension 1: 17 is past the largest bucket, 16"
    assert error.details == ("received  f32[2, 17] cpu", "buckets   [4, 8, 16]")
    assert 'at least 17 to the list of "batch.ids", "batch.labels"' in error.fix


def test_pad_checks_each_call_again() -> None:
    found, _ = bound({"batch": {-1: SIZES, 0: [2]}}, torch.ones(2, 3))
    assert found.pad([torch.ones(1, 2, 3)]).leaves[0].shape == (2, 2, 4)
    assert "name one dimension twice" in refused(lambda: found.pad([torch.ones(2)])).what
    assert "has no dimension -1: f32[] cpu" in refused(lambda: found.pad([torch.ones(())])).what
    assert "is not a tensor to pad: NoneType" in refused(lambda: found.pad([None])).what
    assert "torch.sparse_coo" in refused(lambda: found.pad([torch.ones(2, 3).to_sparse()])).what
    assert "is not a tensor to pad" in refused(lambda: found.pad([torch.nn.Parameter(torch.ones(2, 3))])).what


@pytest.mark.parametrize("dim", [2, -3])
def test_bind_refuses_a_dimension_out_of_range(dim: int) -> None:
    error = refused(lambda: bound({"batch": {dim: SIZES}}, X))
    assert error.what == f"buckets: `batch` has no dimension {dim}: f32[2, 3] cpu"
    assert error.fix == "give a dimension between -2 and 1."


def test_bind_refuses_a_leaf_that_is_no_tensor() -> None:
    assert "`batch['n']` is not a tensor to pad: int" in refused(lambda: bound({"batch.n": {1: SIZES}}, {"n": 3})).what


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (torch.int64, -100, True),
        (torch.int64, 2**62 + 1, True),
        (torch.int64, 2**64, False),
        (torch.int64, 1.0, True),
        (torch.int64, 0.5, False),
        (torch.int64, float("inf"), False),
        (torch.int8, 127, True),
        (torch.int8, 128, False),
        (torch.uint8, -1, False),
        (torch.bool, False, True),
        (torch.bool, 1, True),
        (torch.bool, 2, False),
        (torch.bool, float("nan"), False),
        (torch.float32, 0.1, True),
        (torch.float32, -100, True),
        (torch.float32, 2**24 + 1, False),
        (torch.float32, float("-inf"), True),
        (torch.float32, float("nan"), True),
        (torch.float32, 1e39, False),
        (torch.float32, 1j, False),
        (torch.float16, 1e5, False),
        (torch.bfloat16, 257, False),
        (torch.bfloat16, 257.0, True),
        (torch.complex64, 1j, True),
        (torch.complex64, 1 + 0.1j, True),
        (torch.float8_e4m3fn, float("inf"), False),
        (torch.float8_e4m3fn, 1e10, False),
        (torch.float8_e5m2, 0, True),
    ],
    ids=str,
)
def test_holds_reports_which_numbers_a_dtype_has(dtype: torch.dtype, value: Any, expected: bool) -> None:
    assert holds(dtype, value) is expected


def test_pad_value_outside_the_dtype_is_refused_at_first_call() -> None:
    tree = {"labels": torch.zeros(2, 4, dtype=torch.uint8)}
    error = refused(lambda: bound({"batch.labels": {1: SIZES}}, tree, pad_values={"batch.labels": -100}))
    assert error.what == "pad_values: `batch['labels']` is uint8[2, 4] cpu, which does not hold -100"


def test_pad_value_is_held_to_the_dtype_of_each_call() -> None:
    found, _ = bound({"batch": {0: SIZES}}, torch.zeros(3), pad_values={"batch": 0.5})
    assert found.pad([torch.zeros(3)]).leaves[0].tolist() == [0, 0, 0, 0.5]
    assert "does not hold 0.5" in refused(lambda: found.pad([torch.zeros(3, dtype=torch.int64)])).what


def test_pad_value_of_a_mask_is_false() -> None:
    assert pad({"batch": {0: SIZES}}, torch.ones(3, dtype=torch.bool)).leaves[0].tolist() == [True, True, True, False]


def test_pad_of_one_tensor_passed_twice_alike_stays_one() -> None:
    both = torch.ones(3)
    for tensor in (both, torch.ones(4)):
        padded = pad({"batch.x": {0: SIZES}, "batch.y": {0: SIZES}}, {"x": tensor, "y": tensor})
        assert padded.leaves[0] is padded.leaves[1]
        assert len(padded.made) == (1 if tensor is both else 0)


@pytest.mark.parametrize("size", [3, 4])
def test_pad_of_one_tensor_with_two_pad_values_is_two(size: int) -> None:
    """Also where there is nothing to pad: the signature must not change with the length."""
    tensor = torch.ones(size)
    padded = pad({"batch.x": {0: SIZES}, "batch.y": {0: SIZES}}, {"x": tensor, "y": tensor}, pad_values={"batch.y": 7})
    one, two = padded.leaves
    assert one is not two
    assert (one.tolist()[3:], two.tolist()[3:]) == (([0], [7]) if size == 3 else ([1], [1]))
    if size == 4:
        assert two.data_ptr() == tensor.data_ptr()


def test_pad_remembers_a_bounded_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = bound({"batch": {0: [64]}}, torch.ones(3))
    monkeypatch.setattr("stepgraph.engine.step.padding.bound._MAX_PLANS", 5)
    for length in (*range(1, 40), *range(1, 40)):
        padded = found.pad([torch.ones(length)])
        assert (padded.lengths, padded.leaves[0].sum().item()) == ((length,), length)
    assert len(found._plans) <= 5


# -- what the step does to a padded tensor


def test_store_writes_back_what_the_step_wrote() -> None:
    x, y = torch.arange(3.0), torch.arange(3.0)
    padded = pad({"batch.x": {0: SIZES}, "batch.y": {0: SIZES}}, {"x": x, "y": y})
    padded.leaves[0].add_(1)
    before = y._version
    padded.store()
    assert x.tolist() == [1, 2, 3]
    assert y._version == before


def test_store_writes_back_to_a_tensor_with_gaps() -> None:
    whole = torch.zeros(2, 5)
    padded = pad({"batch": {1: SIZES}}, whole[:, :4])
    padded.leaves[0].fill_(1)
    padded.store()
    assert whole.tolist() == [[1, 1, 1, 1, 0]] * 2


def test_store_gives_leaves_their_gradient() -> None:
    x = torch.arange(3.0, requires_grad=True)
    for expected in ([0, 2, 4], [0, 4, 8]):
        padded = pad({"batch": {0: SIZES}}, x)
        assert padded.leaves[0].is_leaf
        padded.leaves[0].square().sum().backward()
        padded.store()
        assert x.grad is not None
        assert x.grad.tolist() == expected


def test_pad_of_a_computed_tensor_lets_gradients_through() -> None:
    """Capture refuses such a tensor by name if the step's backward reaches it; padding must not hide that."""
    x = torch.arange(3.0, requires_grad=True)
    padded = pad({"batch": {0: SIZES}}, x * 2, pad_values={"batch": 7})
    assert not padded.leaves[0].is_leaf
    assert padded.leaves[0].tolist() == [0, 2, 4, 7]
    padded.leaves[0].sum().backward()
    padded.store()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_pad_works_in_inference_mode() -> None:
    with torch.inference_mode():
        padded = pad({"batch": {0: SIZES}}, torch.ones(3))
        padded.store()
    assert padded.leaves[0].tolist() == [1, 1, 1, 0]


# -- all buckets


@settings(deadline=None, max_examples=30)
@given(CALLS)
def test_all_choices_are_the_product_largest_first(drawn: Any) -> None:
    buckets, pads, tensors = drawn
    found, leaves = bound(buckets, tensors, pad_values=pads)
    choices = found.all_choices(leaves)
    assert sorted(choices) == sorted(itertools.product(*found.buckets.groups))
    assert len(choices) == found.buckets.num_choices
    elements = [sum(leaf.numel() for leaf in found.example(leaves, choice)) for choice in choices]
    assert elements == sorted(elements, reverse=True)


def test_example_keeps_what_fits() -> None:
    found, leaves = bound({"batch": {0: SIZES}}, torch.arange(6.0), pad_values={"batch": -1})
    assert found.example(leaves, (4,))[0].tolist() == [0, 1, 2, 3]
    assert found.example(leaves, (8,))[0].tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert leaves[0].tolist() == [0, 1, 2, 3, 4, 5]


# -- results


BUCKETS = parse({"x": {1: SIZES}})


def seen(shape: Callable[..., tuple[int, ...]], *choices: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    """The shapes of a step's only result, in each choice."""
    return {choice: {"result": shape(*choice)} for choice in choices}


LISTS = ((3, 5, 8), (4, 7))
KINDS = st.one_of(st.sampled_from(["first", "second", "less", "product"]), st.sampled_from([1, 3, 4, 5, 7, 8]))
SHAPE_OF: Mapping[Any, Callable[[int, int], int]] = {
    "first": lambda a, b: a,
    "second": lambda a, b: b,
    "less": lambda a, b: a - 1,
    "product": lambda a, b: a * b,
}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(KINDS, max_size=3), min_size=1, max_size=3), st.permutations(list(itertools.product(*LISTS))))
def test_result_dims_of_all_choices_are_just_the_bucketed_ones(results: Any, choices: Any) -> None:
    """Widths that happen to be bucket sizes, sums and products of sizes: none is taken for a bucketed dimension."""
    buckets = parse({"x": {0: LISTS[0], 1: LISTS[1]}})
    shapes = {
        choice: {
            f"result[{i}]": tuple(SHAPE_OF[k](*choice) if isinstance(k, str) else k for k in kinds)
            for i, kinds in enumerate(results)
        }
        for choice in choices
    }
    found = result_dims(buckets, shapes, {3: "a", 4: "b", 5: "c", 7: "d", 8: "e"})
    for i, kinds in enumerate(results):
        expected = [(d, 0 if k == "first" else 1) for d, k in enumerate(kinds) if k in ("first", "second")]
        assert list(found.dims.get(f"result[{i}]", ())) == expected
    assert found.doubts == ()
    assert len(found.derived) == sum(k in ("less", "product") for kinds in results for k in kinds)
    for choice in choices:
        found.check(choice, (1, 1))


def test_result_dims_of_two_sizes_separate_width_from_length() -> None:
    shapes = seen(lambda length: (length, 8), (8,), (4,))
    assert result_dims(BUCKETS, shapes, {8: "parameter fc.weight"}).dims == {"result": ((0, 0),)}


def test_result_dims_of_one_size_rest_on_what_else_has_it() -> None:
    shapes = seen(lambda length: (2, length), (8,))
    found = result_dims(BUCKETS, shapes, {2: "dimension 0 of x"})
    assert (found.dims, found.doubts) == ({"result": ((1, 0),)}, ())
    found.check((8,), (5,))


def test_result_dims_in_doubt_are_asked_for() -> None:
    found = result_dims(BUCKETS, seen(lambda length: (2, length), (8,)), {8: "parameter fc.weight"})
    found.check((8,), (8,))  # nothing was padded, so nothing has to be known
    error = refused(lambda: found.check((8,), (5,)), "bucket-result")
    assert "dimension 1 of `result` has the bucket's size, 8, and parameter fc.weight is 8 too" in error.what
    assert '"result": {1: [4, 8, 16]} if it is, "result": {} if it is not' in error.fix


@pytest.mark.parametrize(("entry", "expected"), [({1: SIZES}, (2, 5)), ({-1: SIZES}, (2, 5)), ({}, (2, 8))], ids=str)
def test_result_dims_that_the_user_names_are_not_guessed(entry: Any, expected: tuple[int, ...]) -> None:
    buckets = parse({"x": {1: SIZES}, "result": entry})
    found = result_dims(buckets, seen(lambda length: (2, length), (8,)), {8: "parameter fc.weight"})
    found.check((8,), (5,))
    (cut,) = found.slice_back(["result"], [torch.ones(2, 8)], (5,))
    assert cut.shape == expected
    assert found.warning() is None


def test_result_dims_of_two_groups_are_refused_if_sizes_differ() -> None:
    buckets = parse({"x": {0: [4, 8], 1: [8]}})
    found = result_dims(buckets, seen(lambda rows, columns: (rows,), (8, 8)), {})
    found.check((8, 8), (5, 5))
    error = refused(lambda: found.check((8, 8), (5, 6)), "bucket-result")
    assert "the lists [4, 8] or [8] both have 8" in error.what
    settled = result_dims(buckets, seen(lambda rows, columns: (rows,), (8, 8), (4, 8)), {}, found)
    assert (settled.dims, settled.doubts) == ({"result": ((0, 0),)}, ())


def test_result_dims_refuse_a_guess_that_proved_wrong() -> None:
    first = result_dims(BUCKETS, seen(lambda length: (8,), (8,)), {})
    assert first.dims == {"result": ((0, 0),)}
    assert first.cuts((8,), (8,)) == set()  # nothing was cut while the batch was as large as the bucket
    now = result_dims(BUCKETS, seen(lambda length: (8,), (8,), (4,)), {})
    assert now.dims == {}
    error = refused(lambda: now.refuse_wrong_cuts(first.cuts((8,), (5,))), "bucket-result")
    assert "does not grow with the bucket" in error.what
    assert '"result": {}' in error.fix
    now.refuse_wrong_cuts(first.cuts((8,), (8,)))


@pytest.mark.parametrize(
    ("known", "dims"),
    [({("result", 1): 0, ("result", 0): None}, {"result": ((1, 0),)}), ({("result", 1): None}, {"result": ((0, 0),)})],
    ids=str,
)
def test_result_dims_of_one_size_rest_on_what_other_calls_showed(known: Any, dims: Any) -> None:
    found = result_dims(BUCKETS, seen(lambda length: (8, length), (8,)), {}, known)
    assert found.dims == dims
    assert found.guesses


def test_result_dims_are_sure_of_what_sizes_show() -> None:
    found = result_dims(BUCKETS, seen(lambda length: (8, length, 3), (8,), (4,)), {})
    assert found.sure == {("result", 0): None, ("result", 1): 0, ("result", 2): None}
    assert not found.guesses
    assert result_dims(BUCKETS, seen(lambda length: (8, length, 3), (8,)), {}).sure == {("result", 2): None}


def test_result_dims_report_results_that_stay_padded() -> None:
    found = result_dims(BUCKETS, seen(lambda length: (2, length - 1), (8,), (4,)), {})
    assert found.derived == ("result, dimension 1: 7 in bucket 8, 3 in bucket 4",)
    warning = found.warning()
    assert warning is not None
    assert "come back padded   [bucket-result]\n  result, dimension 1" in warning
    assert result_dims(BUCKETS, seen(lambda length: (length,), (8,), (4,)), {}).warning() is None


def test_result_dims_of_results_that_come_and_go() -> None:
    """A list of chunks has more leaves in a larger bucket; each is compared where it is."""
    shapes = {(4,): {"result[0]": (4, 4)}, (8,): {"result[0]": (4, 8), "result[1]": (3, 8)}}
    assert result_dims(BUCKETS, shapes, {}).dims == {"result[0]": ((1, 0),), "result[1]": ((1, 0),)}
    ranks = {(4,): {"result": (4,)}, (8,): {"result": (2, 8)}}
    found = result_dims(BUCKETS, ranks, {})
    assert (found.dims, found.derived) == ({}, ("result: [4], [2, 8]",))


def test_result_named_by_the_user_must_exist_and_have_the_size() -> None:
    shapes = {(8,): {"result['logits']": (2, 8, 3), "result['loss']": ()}}
    error = refused(lambda: result_dims(parse({"x": {1: SIZES}, "result.logit": {1: SIZES}}), shapes, {}))
    assert "what the step returns has no leaf `result.logit`" in error.what
    assert error.details == ("result['logits']  [2, 8, 3]", "result['loss']    []")
    assert error.fix == 'did you mean "result.logits"?'
    for dim in (0, 2, 3, -4):
        buckets = parse({"x": {1: SIZES}, "result.logits": {dim: SIZES}})
        error = refused(lambda buckets=buckets: result_dims(buckets, shapes, {}))
        assert re.search(rf"dimension {dim} of `result\['logits'\]` does not have the bucket's size, 8", error.what)


def test_result_named_by_the_user_may_be_absent_if_none_is_cut() -> None:
    """A step may return logits in eval only."""
    buckets = parse({"x": {1: SIZES}, "result.logits": {1: SIZES}})
    assert result_dims(buckets, {(8,): {"result['loss']": ()}}, {}).dims == {}
    error = refused(lambda: result_dims(buckets, {(8,): {"result['hidden']": (2, 8)}}, {}))
    assert "has no leaf `result.logits`" in error.what


def test_kind_of_a_call_has_all_but_bucketed_sizes() -> None:
    found, leaves = bound({"batch": {1: SIZES}}, X, 3)
    exact, rough = found.kind(leaves)
    for other, same in (
        ([torch.ones(2, 7), 3], (True, True)),
        ([torch.ones(4, 3), 3], (False, True)),
        ([torch.ones(2, 3), 4], (False, False)),
        ([torch.ones(2, 3, dtype=torch.float64), 3], (False, False)),
        ([torch.ones(2, 3), 3.0], (False, False)),
    ):
        now_exact, now_rough = found.kind(other)
        assert (now_exact == exact, now_rough == rough) == same


def test_argument_called_result_is_refused_with_result_entries() -> None:
    assert pad({"result": {}, "batch": {1: SIZES}}, X).leaves[0].shape == (2, 4)
    assert pad({"batch": {1: SIZES}}, X, arguments=("batch",), result=X).leaves[1] is X
    error = refused(lambda: bound({"result": {}, "batch": {1: SIZES}}, X, arguments=("batch",), result=X))
    assert "could be an argument or what the step returns" in error.what


def test_other_sizes_are_those_without_buckets() -> None:
    found, leaves = bound({"batch.x": {-1: SIZES}}, {"x": torch.ones(2, 3), "y": torch.ones(5, 3), "n": 16, "b": True})
    assert found.other_sizes(leaves) == {
        2: "dimension 0 of batch['x']",
        5: "dimension 0 of batch['y']",
        3: "dimension 1 of batch['y']",
        16: "argument batch['n']",
    }


def test_slice_back_gives_views_and_leaves_the_rest() -> None:
    found = result_dims(BUCKETS, {(c,): {"result[0]": (2, c), "result[1]": (3,)} for c in (4, 8)}, {})
    padded, other = torch.ones(2, 8), torch.ones(3)
    names = ["result[0]", "result[1]", "result[2]"]
    cut = found.slice_back(names, [padded, other, "text"], (5,))
    assert cut[0].shape == (2, 5)
    assert cut[0].data_ptr() == padded.data_ptr()
    assert cut[1] is other
    assert cut[2] == "text"
    assert found.slice_back(names, [padded, other, "text"], (8,))[0] is padded


def test_named_shapes_pass_over_what_is_no_tensor() -> None:
    leaves, structure = flatten({"logits": torch.ones(2, 3), "n": 4})
    assert named_shapes(result_names(structure), leaves) == {"result['logits']": (2, 3)}
    assert named_shapes(["result"], [X]) == {"result": (2, 3)}


# -- all of it together


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=6), st.sampled_from([4, 8, 16]))
def test_buckets_give_what_eager_gives_on_the_padded_batch(lengths: list[int], width: int) -> None:
    """A step whose width is one of the sizes, so that only comparing the buckets tells its dimensions apart."""
    embedding = torch.randn(10, width)

    def step(batch: Any) -> Any:
        hidden = embedding[batch["ids"]]
        kept = batch["labels"] != -100
        return {"hidden": hidden, "sum": (hidden * kept[..., None]).sum(), "mean": hidden.mean(1)}

    buckets = {"batch.ids": {1: SIZES}, "batch.labels": {1: SIZES}}
    batches = [{"ids": torch.randint(1, 10, (2, n)), "labels": torch.randint(1, 10, (2, n))} for n in lengths]
    found, leaves = bound(buckets, batches[0], pad_values={"batch.labels": -100})
    shapes = {}
    for choice in found.all_choices(leaves):
        ids, labels = found.example(leaves, choice)
        returned, structure = flatten(step({"ids": ids, "labels": labels}))
        shapes[choice] = named_shapes(result_names(structure), returned)
    dims = result_dims(found.buckets, shapes, found.other_sizes(leaves) | {width: "the embedding"})
    for batch, length in zip(batches, lengths, strict=True):
        padded = found.pad([batch["ids"], batch["labels"]])
        dims.check(padded.choice, padded.lengths)
        returned, structure = flatten(step({"ids": padded.leaves[0], "labels": padded.leaves[1]}))
        hidden, total, mean = dims.slice_back(result_names(structure), returned, padded.lengths)
        assert torch.equal(hidden, step(batch)["hidden"])
        assert torch.allclose(total, step(batch)["sum"], rtol=1e-4, atol=1e-4)  # summed in another order
        assert mean.shape == (2, width)
        assert hidden.shape == (2, length, width)
