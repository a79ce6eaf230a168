"""Containers of the user's own as arguments and results: all that an instance holds takes part, and nothing is lost."""

from __future__ import annotations

import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch.utils import _pytree as torch_pytree

import stepgraph
from stepgraph.core.tree import changed_containers, flatten, unflatten

CALLS = 8


@dataclasses.dataclass
class Masked:
    """A tensor made in `__post_init__`, which is no field."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.mask = (self.x > 0).float()


@dataclasses.dataclass
class Cached:
    """A tensor that the first to ask for it leaves on the instance."""

    x: torch.Tensor

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        return (self.x > 0).float()


class AttributeDict(dict[str, Any]):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Labelled(dict[str, Any]):
    """A dict with attributes beside its items."""

    def __init__(self, label: Any, **items: Any) -> None:
        super().__init__(**items)
        self.label = label


def use_mask(batch: Any) -> torch.Tensor:
    return (batch.x * batch.mask).sum()


def asked_before(x: torch.Tensor) -> Cached:
    batch = Cached(x)
    assert batch.mask is not None
    return batch


def scaled(x: torch.Tensor, scale: Any) -> Any:
    batch = Masked(x)
    batch.scale = scale  # type: ignore[attr-defined]
    return batch


BATCHES: dict[str, tuple[Callable[[torch.Tensor, int], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor made in __post_init__": (lambda x, i: Masked(x), use_mask),
    "cached property, asked for by the step": (lambda x, i: Cached(x), use_mask),
    "cached property, asked for before": (lambda x, i: asked_before(x), use_mask),
    "number set later": (lambda x, i: scaled(x, 2.0 if i < 5 else 3.0), lambda b: b.x * b.scale),
    "tensor set later": (lambda x, i: scaled(x, x + i), lambda b: b.x * b.scale),
    "dict with a number": (lambda x, i: Labelled(2.0 if i < 5 else 3.0, x=x), lambda b: b["x"] * b.label),
    "dict with a tensor": (lambda x, i: Labelled(x + i, x=x), lambda b: b["x"] * b.label),
    "dict that is its attributes": (lambda x, i: AttributeDict(x=x, y=x + i), lambda b: b.x * b["y"] + b.y),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_argument_is_all_that_it_holds(kind: str, device: torch.device) -> None:
    make, function = BATCHES[kind]
    inputs = [torch.randn(4, device=device) for _ in range(CALLS)]
    expected = [function(make(x, i)) for i, x in enumerate(inputs)]
    with stepgraph.capture(function, warmup=1) as step:
        received = [step(make(x, i)) for i, x in enumerate(inputs)]
        assert step.report().replays >= CALLS - 4
    assert all(map(torch.equal, expected, received))


@dataclasses.dataclass
class Loss:
    """A result with a tensor that is no field."""

    value: torch.Tensor

    def __post_init__(self) -> None:
        self.perplexity = self.value.exp()


def test_result_that_is_kept_keeps_all_that_it_holds(device: torch.device) -> None:
    inputs = [torch.randn(4, device=device) for _ in range(CALLS)]
    with stepgraph.capture(lambda x: Loss(x.mean()), warmup=1) as step:
        kept = [step(x) for x in inputs]
        assert step.report().replays == CALLS - 1
    for x, loss in zip(inputs, kept, strict=True):
        assert torch.equal(loss.value, x.mean())
        assert torch.equal(loss.perplexity, x.mean().exp())


def test_microbatch_is_all_that_it_holds(device: torch.device) -> None:
    loader = stepgraph.StaticBufferLoader(stepgraph.backend_for(device))
    for _ in range(3):
        x = torch.randn(4)
        (found,) = loader.load(iter([Masked(x)]), 1).data_iterator()
        assert torch.equal(found.x.cpu(), x)
        assert torch.equal(found.mask.cpu(), (x > 0).float())


class Holder:
    """An object of an unknown class."""

    def __init__(self, held: Any) -> None:
        self.data = held


class OwnList(list[Any]):
    """A list of an unknown class."""


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (Holder, "data"),
        (Slotted, "data"),
        (lambda t: Holder({"x": t}), "data['x']"),
        (lambda t: Holder([0, t]), "data[1]"),
        (lambda t: Holder((t,)), "data[0]"),
        (lambda t: UserDict(x=t), "data['x']"),
        (lambda t: OwnList([t]), "[0]"),
        (lambda t: {t}, "[0]"),
    ],
    ids=["attribute", "slot", "dict", "list", "tuple", "UserDict", "list's subclass", "set"],
)
def test_object_that_hides_a_tensor_is_refused(make: Callable[[Any], Any], where: str, device: torch.device) -> None:
    with stepgraph.capture(lambda x, hidden: x + 1) as step, pytest.raises(stepgraph.InvalidArgument) as caught:
        step(torch.ones(2, device=device), make(torch.ones(2, device=device)))
    assert caught.value.rule == "opaque-argument"
    assert f"`{where}`" in caught.value.what


def test_object_that_holds_a_models_parameters_is_passed(device: torch.device) -> None:
    """As optimizers, averages and clipping of the user's own do."""
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    with stepgraph.capture(lambda x, owner: x + owner.data[0].detach(), warmup=1) as step:
        owner = Holder([weight])
        for value in range(5):
            assert step(torch.full((2,), float(value), device=device), owner).tolist() == [value + 1.0] * 2
        assert step.report().replays == 3


# -- containers that a call changes


@dataclasses.dataclass
class State:
    """A state that a step may set."""

    h: Any
    calls: int = 0


class Fields(MutableMapping[str, Any]):
    """Tensors by name in a class of the user's own, registered with torch's pytree."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


torch_pytree.register_pytree_node(
    Fields,
    lambda fields: (list(fields.held.values()), list(fields.held)),
    lambda values, names: Fields(**dict(zip(names, values, strict=True))),
)


def set_item(s: Any) -> None:
    s["h"] = s["h"] * 2


def count(s: Any) -> None:
    s["n"] += 1


def rename(s: Any) -> None:
    s["x"] = s.pop("h")


CHANGES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any], str]] = {
    "item replaced": (lambda t: {"h": t}, set_item, "`s['h']` was replaced by a new Tensor"),
    "number counted": (lambda t: {"n": 0}, count, "`s['n']` was replaced by a new int"),
    "item replaced behind one that was removed": (
        lambda t: {"n": [t], "h": t},
        lambda s: (s.pop("n"), set_item(s)),
        "`s['h']` was replaced by a new Tensor",
    ),
    "key added": (lambda t: {"h": t}, lambda s: s.update(x=1), "`s['x']` was added"),
    "key added to a subclass": (lambda t: Labelled(1, h=t), lambda s: s.update(x=1), "`s['x']` was added"),
    "key renamed": (lambda t: {"h": t}, rename, "`s['x']` was added"),
    "key added to a pytree": (
        lambda t: Fields(h=t),
        lambda s: s.update(x=t_of([s["h"]])),
        "`s`, a Fields, has 2 values and had 1",
    ),
    "key renamed in a pytree": (
        lambda t: Fields(h=t),
        rename,
        "`s`, a Fields, has other keys than it had, or other data beside its values",
    ),
    "one taken out of a pytree, two added": (
        lambda t: {"f": Fields(h=t, g=t + 1), "n": t},
        lambda s: (s["f"].pop("h"), s["f"].update(a=s["n"], b=s["n"])),
        "`s['f']`, a Fields, has 3 values and had 2",
    ),
    "pytree's item replaced behind a removed one": (
        lambda t: Fields(h=t, g=t + 1),
        lambda s: (s.pop("h"), s.update(g=s["g"] + 1)),
        "`s`, a Fields, has 1 value and had 2",
    ),
    "list item replaced": (lambda t: [t], lambda s: s.__setitem__(0, s[0] + 1), "`s[0]` was replaced by a new Tensor"),
    "appended": (lambda t: [t], lambda s: s.append(t_of(s)), "`s` has 2 items and had 1"),
    "nested append": (lambda t: {"log": []}, lambda s: s["log"].append(1), "`s['log']` has 1 item and had 0"),
    "container for a tensor": (lambda t: [t], lambda s: s.__setitem__(0, [s[0]]), "`s[0]` was replaced by a new list"),
    "tensor for a container": (lambda t: [[t]], lambda s: s.__setitem__(0, s[0][0]), "`s[0]` is now a Tensor"),
    "field set": (State, lambda s: setattr(s, "h", s.h + 1), "`s.h` was replaced by a new Tensor"),
    "attribute added": (State, lambda s: setattr(s, "extra", 1), "`s.extra` was added"),
    "attribute of a dict": (
        lambda t: Labelled(1, x=t),
        lambda s: setattr(s, "label", 2),
        "`s.label` was replaced by a new int",
    ),
}


def t_of(values: Any) -> Any:
    return values[0]


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("passed", ["positional", "keyword"])
def test_change_of_a_container_is_named(how: str, passed: str, device: torch.device) -> None:
    make, change, told = CHANGES[how]
    given = make(torch.ones(2, device=device))
    call: Any = ((1, given), {}) if passed == "positional" else ((1,), {"s": given})
    leaves, structure = flatten(call)
    args, kwargs = unflatten(structure, leaves)
    assert changed_containers(structure, leaves, (args, kwargs), ("x", "s")) is None
    change(args[1] if passed == "positional" else kwargs["s"])
    assert changed_containers(structure, leaves, (args, kwargs), ("x", "s")) == told


@pytest.mark.parametrize(
    "harmless",
    [
        lambda s: s["x"].add_(1),
        lambda s: s.__setitem__("x", s["x"]),
        lambda s: s.__setitem__("scale", float("0.5")),
        lambda s: s["batch"].mask,
        lambda s: s["pair"] + (1,),
        lambda s: s.pop("pair"),
        lambda s: s["fields"].pop("a"),
        lambda s: s["fields"].pop("b"),
        lambda s: s.update(x=s.pop("x")),
    ],
    ids=[
        "in place",
        "itself",
        "equal number",
        "cached property",
        "new tuple",
        "pop",
        "pop 1st",
        "pop 2nd",
        "reordered",
    ],
)
def test_use_of_a_container_is_no_change(harmless: Callable[[Any], Any], device: torch.device) -> None:
    x = torch.ones(2, device=device)
    fields = Fields(a=x + 1, b=x + 2)
    leaves, structure = flatten((({"fields": fields, "x": x, "scale": 0.5, "batch": Cached(x), "pair": (x,)},), {}))
    call = unflatten(structure, leaves)
    harmless(call[0][0])
    assert changed_containers(structure, leaves, call) is None


def test_change_of_an_unnamed_argument_is_named_by_its_place() -> None:
    leaves, structure = flatten(((1, [2]), {}))
    call = unflatten(structure, leaves)
    call[0][1].append(3)
    assert changed_containers(structure, leaves, call, ("x",)) == "`args[1]` has 2 items and had 1"


class Touchy:
    """Compares with nothing."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]


def test_leaves_are_compared_by_identity() -> None:
    one = Touchy()
    leaves, structure = flatten((([one],), {}))
    call = unflatten(structure, leaves)
    assert changed_containers(structure, leaves, call, ("s",)) is None
    call[0][0][0] = Touchy()
    assert changed_containers(structure, leaves, call, ("s",)) == "`s[0]` was replaced by a new Touchy"


def test_a_shape_is_a_value(device: torch.device) -> None:
    def step(x: torch.Tensor, shape: torch.Size, batch: dict[str, Any]) -> dict[str, Any]:
        assert type(shape) is type(batch["shape"]) is torch.Size
        return {"x": x.reshape(shape), "shape": shape}

    x = torch.ones(2, 3, device=device)
    with stepgraph.capture(step) as captured:
        for _ in range(6):
            result = captured(x, x.shape, {"shape": x.shape})
            assert type(result["shape"]) is torch.Size
            assert result["shape"].numel() == 6
        assert captured.report().replays == 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.complex64])
def test_a_single_element_of_a_row_is_an_argument(dtype: torch.dtype, device: torch.device) -> None:
    """Its stride is that of the row, which torch lets it keep."""
    tokens = torch.ones(1, 5, dtype=dtype, device=device)
    with stepgraph.capture(lambda x, y: x.sum() + y.sum()) as step:
        for _ in range(5):
            assert step(tokens[:, 1:], tokens[:, 0]).item() == 5
