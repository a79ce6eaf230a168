"""Trees: taken apart and put together again, with every leaf named as Python spells it."""

import dataclasses
import enum
import functools
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

from stepgraph.core.tree import LEAF, Structure, flatten, paths, tree_map, unflatten


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    ids: Any
    mask: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    ids: Any
    scale: Any = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    ids: Any
    extra: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSlotted:
    ids: Any
    made: Any = dataclasses.field(default=None, init=False)


class Base:
    """A slot that is no field."""

    __slots__ = ("hidden",)


@dataclasses.dataclass(slots=True)
class OnSlots(Base):
    ids: Any


class Words(dict[Any, Any]):
    """A dict with attributes."""


class Ordered(OrderedDict[Any, Any]):
    """An OrderedDict with attributes."""


class Counting(defaultdict[Any, Any]):
    """A defaultdict with attributes."""


class Named(Pair):
    """A namedtuple with attributes."""


class Itself(dict[str, Any]):
    """A dict whose attributes are its items."""

    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


class Point:
    """Registered with torch's pytree below."""

    def __init__(self, x: Any, y: Any, label: str) -> None:
        self.x, self.y, self.label = x, y, label

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y, self.label) == (other.x, other.y, other.label)

    def __hash__(self) -> int:
        return hash(self.label)

    def __repr__(self) -> str:
        return f"Point({self.x!r}, {self.y!r}, {self.label!r})"


@pytest.fixture(scope="module", autouse=True)
def registered_point() -> Any:
    torch_pytree.register_pytree_node(Point, lambda p: ([p.x, p.y], p.label), lambda v, label: Point(*v, label))
    yield
    torch_pytree._deregister_pytree_node(Point)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=3), st.binary(max_size=2)
)
KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 3))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mapping = st.dictionaries(KEYS, children, max_size=3)
    return st.one_of(
        mapping,
        mapping.map(OrderedDict),
        mapping.map(lambda d: defaultdict(list, d)),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(deque),
        st.builds(Pair, children, children),
        st.builds(Plain, children, children),
        st.builds(Plain, children),
        st.builds(Frozen, children),
        st.builds(Slotted, children),
        st.builds(FrozenSlotted, ids=children),
        st.builds(Point, children, children, st.text(max_size=2)),
    )


TREES = st.recursive(SCALARS, containers, max_leaves=12)


def same_types(one: Any, two: Any) -> bool:
    """Whether two trees are of the same types all the way down; `==` alone takes an OrderedDict for a dict."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same_types(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(two) and all(map(same_types, one, two))
    if dataclasses.is_dataclass(one):
        return all(same_types(getattr(one, f.name), getattr(two, f.name)) for f in dataclasses.fields(one))
    return True


@settings(deadline=None, max_examples=75)
@given(TREES)
def test_flatten_and_unflatten_are_inverse(tree: Any) -> None:
    leaves, structure = flatten(tree)
    again = unflatten(structure, leaves)
    assert again == tree
    assert same_types(again, tree)
    assert flatten(again) == (leaves, structure)


@settings(deadline=None, max_examples=50)
@given(TREES)
def test_unflatten_puts_other_leaves_in_the_same_places(tree: Any) -> None:
    leaves, structure = flatten(tree)
    marked = unflatten(structure, [f"leaf {i}" for i in range(len(leaves))])
    assert flatten(marked) == ([f"leaf {i}" for i in range(len(leaves))], structure)
    assert flatten(tree)[0] == leaves, "the tree it came from is untouched"


@settings(deadline=None, max_examples=50)
@given(TREES)
def test_paths_name_each_leaf_once(tree: Any) -> None:
    leaves, structure = flatten(tree)
    found = paths(structure, "batch")
    assert len(found) == len(leaves)
    assert len(set(found)) == len(found)


PYTHON_TREES = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        st.dictionaries(KEYS, children, max_size=3),
        st.dictionaries(KEYS, children, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, children, max_size=3).map(lambda d: defaultdict(list, d)),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Pair, children, children),
        st.builds(Frozen, children, children),
        st.builds(Slotted, children),
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=75)
@given(PYTHON_TREES)
def test_paths_are_python_that_finds_the_leaf(tree: Any) -> None:
    leaves, structure = flatten(tree)
    for path, leaf in zip(paths(structure, "batch"), leaves, strict=True):
        found = eval(path, {"batch": tree})
        assert found is leaf, path


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"ids": 1, 2: 2}, ["batch['ids']", "batch[2]"]),
        ([1, (2, 3)], ["batch[0]", "batch[1][0]", "batch[1][1]"]),
        (Pair(1, [2]), ["batch.first", "batch.second[0]"]),
        (Frozen({"a": 1}), ["batch.ids['a']", "batch.scale"]),
        (OrderedDict(ids=1, mask=2), ["batch['ids']", "batch['mask']"]),
        (defaultdict(list, ids=1), ["batch['ids']"]),
        (deque([1, 2]), ["batch[0]", "batch[1]"]),
        (5, ["batch"]),
        ({}, []),
    ],
    ids=["dict", "list", "namedtuple", "dataclass", "OrderedDict", "defaultdict", "deque", "leaf", "empty"],
)
def test_paths_spell(tree: Any, expected: list[str]) -> None:
    assert paths(flatten(tree)[1], "batch") == expected


def test_paths_of_a_lone_leaf_without_a_name() -> None:
    assert paths(LEAF) == ["value"]


@settings(deadline=None, max_examples=50)
@given(TREES)
def test_structure_does_not_depend_on_leaves(tree: Any) -> None:
    leaves, structure = flatten(tree)
    other = flatten(unflatten(structure, [torch.zeros(1)] * len(leaves)))[1]
    assert other == structure
    assert hash(other) == hash(structure)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (defaultdict(list, a=1), defaultdict(int, a=1)),
        ([1], (1,)),
        ([1], [1, 2]),
        ([1], [[1]]),
        ([], {}),
        ([], None),
        (Pair(1, 2), (1, 2)),
        (Plain(1, 2), Slotted(1, 2)),
        (Point(1, 2, "a"), Point(1, 2, "b")),
        (deque([1], maxlen=2), deque([1], maxlen=3)),
    ],
    ids=repr,
)
def test_structure_distinguishes_containers(one: Any, two: Any) -> None:
    assert flatten(one)[1] != flatten(two)[1]


def test_structure_is_a_key() -> None:
    tree = {"a": [1, Frozen(2)], "b": Point(torch.ones(2), None, "p")}
    found: dict[Structure, str] = {flatten(tree)[1]: "known"}
    tree["b"] = Point(torch.zeros(3), None, "p")
    assert found[flatten(tree)[1]] == "known"


def test_flatten_keeps_the_callers_key_order() -> None:
    assert flatten({"z": 1, "a": 2})[0] == [1, 2]


def test_flatten_takes_tensors_as_leaves() -> None:
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    leaves, structure = flatten({"x": tensors[0], "p": tensors[1]})
    assert leaves[0] is tensors[0]
    assert leaves[1] is tensors[1]
    assert structure.children == (LEAF, LEAF)


def test_flatten_uses_torch_registrations() -> None:
    leaves, structure = flatten(Point(1, [2, 3], "p"))
    assert leaves == [1, 2, 3]
    again = unflatten(structure, [4, 5, 6])
    assert again == Point(4, [5, 6], "p")


def test_flatten_opens_torchs_own_named_results() -> None:
    result = torch.max(torch.tensor([[1.0, 3.0], [5.0, 2.0]]), dim=1)
    leaves, structure = flatten(result)
    assert [leaf.tolist() for leaf in leaves] == [[3.0, 5.0], [1, 0]]
    assert type(unflatten(structure, leaves)) is type(result)


def test_unflatten_of_a_defaultdict_keeps_its_factory() -> None:
    leaves, structure = flatten(defaultdict(list, a=1))
    assert unflatten(structure, leaves)["new"] == []


def test_unflatten_of_a_dataclass_runs_no_constructor() -> None:
    made = []

    @dataclasses.dataclass
    class Counted:
        ids: Any

        def __post_init__(self) -> None:
            made.append(self.ids)

    _, structure = flatten(Counted(1))
    assert unflatten(structure, [2]).ids == 2
    assert made == [1]


def test_flatten_passes_a_field_that_was_never_set() -> None:
    @dataclasses.dataclass
    class Late:
        ids: Any
        later: Any = dataclasses.field(init=False)

    leaves, structure = flatten(Late(1))
    assert leaves == [1]
    assert not hasattr(unflatten(structure, [2]), "later")


def test_flatten_takes_a_dataclass_type_as_a_leaf() -> None:
    assert flatten(Plain) == ([Plain], LEAF)


# -- what instances hold beside fields and items


def with_attributes(instance: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)
    return instance


HOLDERS: dict[str, tuple[Any, list[str]]] = {
    "dataclass": (with_attributes(Plain(1, 2), made=3, also=[4]), ["ids", "mask", "also[0]", "made"]),
    "frozen": (with_attributes(Frozen(1), made=2), ["ids", "scale", "made"]),
    "slots": (with_attributes(OnSlots(1), hidden=2), ["ids", "hidden"]),
    "dict": (with_attributes(Words(a=1), scale=2), ["['a']", "scale"]),
    "OrderedDict": (with_attributes(OrderedDict(b=1, a=2), scale=3), ["['b']", "['a']", "scale"]),
    "OrderedDict's subclass": (with_attributes(Ordered(b=1, a=2), scale=3), ["['b']", "['a']", "scale"]),
    "defaultdict's subclass": (with_attributes(Counting(list, a=1), scale=2), ["['a']", "scale"]),
    "namedtuple's subclass": (with_attributes(Named(1, 2), scale=3), ["first", "second", "scale"]),
    "its own dict": (Itself(a=1, b=2), ["['a']", "['b']"]),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_attributes_are_part_of_the_tree(kind: str) -> None:
    tree, names = HOLDERS[kind]
    leaves, structure = flatten(tree)
    assert [path.removeprefix("b").removeprefix(".") for path in paths(structure, "b")] == names
    other = unflatten(structure, [f"leaf {i}" for i in range(len(leaves))])
    assert flatten(other) == ([f"leaf {i}" for i in range(len(leaves))], structure)
    assert type(other) is type(tree)
    assert eval(paths(structure, "other")[-1]) == f"leaf {len(leaves) - 1}"
    assert flatten(tree)[0] == leaves, "the tree it came from is untouched"


@pytest.mark.parametrize(
    "kind", ["dataclass", "frozen", "dict", "OrderedDict", "OrderedDict's subclass", "namedtuple's subclass"]
)
def test_structure_distinguishes_instances_by_attributes(kind: str) -> None:
    tree, _ = HOLDERS[kind]
    structure = flatten(tree)[1]
    other = with_attributes(unflatten(structure, flatten(tree)[0]), one_more=1)
    assert flatten(other)[1] != structure


def test_unflatten_of_a_dicts_subclass_keeps_what_it_is() -> None:
    made = unflatten(*reversed(flatten(Counting(list, a=1))))
    assert made["new"] == []
    ordered = unflatten(*reversed(flatten(Ordered(b=1, a=2))))
    ordered.move_to_end("b")
    assert list(ordered) == ["a", "b"]
    itself = unflatten(*reversed(flatten(Itself(a=1))))
    itself.b = 2
    assert itself == {"a": 1, "b": 2}
    assert unflatten(*reversed(flatten(defaultdict(None, a=1)))) == {"a": 1}


def test_structure_holds_no_instance_of_the_tree() -> None:
    first = with_attributes(Plain(torch.ones(1)), made=torch.ones(2))
    structure = flatten(first)[1]
    other = unflatten(structure, [torch.zeros(1), None, torch.zeros(2)])
    assert other.made is not first.made
    assert other.made.tolist() == [0.0, 0.0]


def test_flatten_ends_where_a_dataclass_comes_back_to_itself() -> None:
    parent = Plain(1)
    parent.mask = with_attributes(Plain(2), parent=parent)
    leaves, structure = flatten(parent)
    assert leaves == [1, 2, None, parent]
    assert paths(structure, "node")[-1] == "node.mask.parent"


def test_flatten_leaves_whole_what_is_more_than_its_attributes() -> None:
    @dataclasses.dataclass
    class Failure(Exception):
        code: int

    @dataclasses.dataclass(eq=False)
    class Block(torch.nn.Module):
        width: int

        def __post_init__(self) -> None:
            super().__init__()

        __hash__ = torch.nn.Module.__hash__

    @dataclasses.dataclass(frozen=True)
    class Size:
        width: int

    class Sizes(Size, enum.Enum):
        SMALL = 1

    for whole in (Failure(1), Block(1), Sizes.SMALL):
        assert flatten(whole) == ([whole], LEAF)


def test_flatten_takes_a_cached_property_once_it_is_there() -> None:
    @dataclasses.dataclass
    class Lazy:
        ids: int

        @functools.cached_property
        def double(self) -> int:
            return self.ids * 2

    lazy = Lazy(1)
    assert flatten(lazy)[0] == [1]
    assert lazy.double == 2
    leaves, structure = flatten(lazy)
    assert leaves == [1, 2]
    assert unflatten(structure, [3, 6]).double == 6


def test_tree_map_goes_into_dataclasses_and_keeps_the_rest() -> None:
    tree = {"a": [1, Plain(2, mask=Pair(3, None))], "b": (Frozen(4), Slotted(5, [6]))}
    mapped = tree_map(lambda leaf: None if leaf is None else leaf * 10, tree)
    assert mapped == {"a": [10, Plain(20, mask=Pair(30, None))], "b": (Frozen(40, 10.0), Slotted(50, [60]))}
    assert tree["a"][1] == Plain(2, mask=Pair(3, None))
    assert tree_map(str, 1) == "1"

    @dataclasses.dataclass
    class Derived:
        ids: int

        def __post_init__(self) -> None:
            self.double = self.ids * 2

    assert vars(tree_map(lambda leaf: leaf + 1, Derived(1))) == {"ids": 2, "double": 3}  # mapped, not derived again
