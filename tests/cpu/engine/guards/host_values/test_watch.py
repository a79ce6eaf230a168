"""What a step's code can name is watched: each place that Python looks at, each way to change what is there."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.core.executed_code import globals_in
from stepgraph.core.frames import is_users_code
from stepgraph.core.plain_values import same
from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.guards.host_values.watch import Watch

Case = tuple[Callable[..., Any], Callable[[], object], list[str]]
"""A step, a change, and what is told of it."""
FACTOR = 1.0


@dataclasses.dataclass
class Config:
    scale: float = 1.0


def scaled(x: float) -> float:
    return x * FACTOR


def told_of(
    step: Callable[..., Any],
    change: Callable[[], object],
    modules: dict[str, nn.Module] | None = None,
    ignore: tuple[str, ...] = (),
) -> list[str]:
    """What a watch tells after a change; its row holds before, and never where there is something to tell."""
    watch, row = Watch(step, ignore, modules), GuardRow()
    watch.expect(row)
    assert row.holds()
    assert watch.changed() == []
    change()
    told = [str(one) for one in watch.changed()]
    assert not (told and row.holds())
    assert told == [str(one) for one in watch.changed()]
    return told


def function_in_a_cell() -> Case:
    function = F.mse_loss

    def step(x: Any) -> Any:
        return function(x, x)

    def change() -> None:
        nonlocal function
        function = F.l1_loss

    return step, change, ["function: <function mse_loss> -> <function l1_loss>"]


def function_in_a_dict() -> Case:
    losses = {"loss": F.mse_loss}
    told = ["losses['loss']: <function mse_loss> -> <function l1_loss>"]
    return (lambda x: losses["loss"](x, x)), lambda: losses.update(loss=F.l1_loss), told


def method_of_a_class() -> Case:
    class Owner:
        def part(self, x: float) -> float:
            return x

        def step(self, x: float) -> float:
            return self.part(x)

    def other(self: Owner, x: float) -> float:
        return 2 * x

    names = [f"<function method_of_a_class.<locals>.{name}>" for name in ("Owner.part", "other")]
    return Owner().step, lambda: setattr(Owner, "part", other), [f"Owner.part: {names[0]} -> {names[1]}"]


def attribute_of_a_class() -> Case:
    class Settings:
        scale = 1.0

    return (lambda x: x * Settings.scale), lambda: setattr(Settings, "scale", 2.0), ["Settings.scale: 1.0 -> 2.0"]


def attribute_of_a_class_in_a_classmethod() -> Case:
    class Owner:
        scale = 1.0

        @classmethod
        def part(cls, x: float) -> float:
            return x * cls.scale

        def step(self, x: float) -> float:
            return self.part(x)

    return Owner().step, lambda: setattr(Owner, "scale", 2.0), ["Owner.scale: 1.0 -> 2.0"]


def attribute_that_hides_that_of_the_class() -> Case:
    class Owner:
        scale = 1.0

    owner = Owner()
    return (lambda x: x * owner.scale), lambda: setattr(owner, "scale", 2.0), ["owner.scale: 1.0 -> 2.0"]


def attribute_that_hides_an_equal_one_of_the_class() -> Case:
    class Base:
        scale = 1.0

    class Owner(Base):
        pass

    owner = Owner()
    told = ["owner.scale: its class's 1.0 -> 1.0"]  # what it is changed to later would be noticed by nobody
    return (lambda x: x * owner.scale), lambda: setattr(owner, "scale", 1.0), told


def attribute_asked_for_by_a_string() -> Case:
    owner = types.SimpleNamespace(base=1.0)
    step = lambda x: x * getattr(owner, "scale", 1.0)  # noqa: E731
    return step, lambda: setattr(owner, "scale", 2.0), ["owner.scale: absent -> 2.0"]


def attribute_of_a_python_module() -> Case:
    settings = types.ModuleType("settings")
    vars(settings)["scale"] = 1.0
    return (lambda x: x * settings.scale), lambda: vars(settings).update(scale=2.0), ["settings.scale: 1.0 -> 2.0"]


def attribute_of_a_function() -> Case:
    def helper(x: float) -> float:
        return x * helper.scale  # type: ignore[attr-defined]

    vars(helper)["scale"] = 1.0
    return (lambda x: helper(x)), lambda: vars(helper).update(scale=2.0), ["helper.scale: 1.0 -> 2.0"]


def cell_filled_later() -> Case:
    def make(fill: bool) -> tuple[Callable[..., Any], Callable[[], None]]:
        def change() -> None:
            nonlocal late
            late = 2.0

        if fill:
            late = 1.0
        return (lambda x: x * late), change

    return *make(False), ["late: absent -> 2.0"]


def defaults_replaced() -> Case:
    def helper(x: float, scale: float = 1.0) -> float:
        return x * scale

    return (lambda x: helper(x)), lambda: setattr(helper, "__defaults__", (2.0,)), ["scale: 1.0 -> 2.0"]


def keyword_defaults_changed() -> Case:
    def step(x: float, *, scale: float = 1.0) -> float:
        return x * scale

    kept: Any = step.__kwdefaults__
    return step, lambda: kept.update(scale=2.0), ["scale: 1.0 -> 2.0"]


def body_of_a_function() -> Case:
    def helper(x: float) -> float:
        return x

    def other(x: float) -> float:
        return 2 * x

    name = "body_of_a_function.<locals>.helper"
    lines = [f"<code of line {function.__code__.co_firstlineno}>" for function in (helper, other)]
    return (
        (lambda x: helper(x)),
        lambda: setattr(helper, "__code__", other.__code__),
        [f"{name}.__code__: {lines[0]} -> {lines[1]}"],
    )


def behind_no_grad() -> Case:
    config = Config()

    @torch.no_grad()
    def helper(x: Any) -> Any:
        return x * config.scale

    return (lambda x: helper(x)), lambda: setattr(config, "scale", 2.0), ["config.scale: 1.0 -> 2.0"]


def behind_a_context_decorator() -> Case:
    config = Config()

    class Around(contextlib.ContextDecorator):
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    @Around()
    def step(x: Any) -> Any:
        return x * config.scale

    return step, lambda: setattr(config, "scale", 2.0), ["config.scale: 1.0 -> 2.0"]


def behind_a_cache() -> Case:
    config = Config()

    @functools.cache
    def scale() -> float:
        return config.scale

    return (lambda x: x * scale()), lambda: setattr(config, "scale", 2.0), ["config.scale: 1.0 -> 2.0"]


def behind_a_partialmethod() -> Case:
    config = Config()

    class Owner:
        def part(self, x: float, power: int) -> float:
            return float(x * config.scale**power)

        square = functools.partialmethod(part, power=2)

        def step(self, x: float) -> float:
            return self.square(x)

    return Owner().step, lambda: setattr(config, "scale", 2.0), ["config.scale: 1.0 -> 2.0"]


def behind_super_and_an_inherited_call() -> Case:
    class Base:
        def __init__(self) -> None:
            self.config = Config()

        def part(self, x: float) -> float:
            return x * self.config.scale

        def __call__(self, x: float) -> float:
            return self.part(x)

    class Child(Base):
        def part(self, x: float) -> float:
            return super().part(x)

    child = Child()
    return child, lambda: setattr(child.config, "scale", 2.0), ["self.config.scale: 1.0 -> 2.0"]


def behind_a_method_of_an_object() -> Case:
    class Loss:
        def compute(self, x: float) -> float:
            return scaled(x)

    loss = Loss()
    return (lambda x: loss.compute(x)), lambda: globals().update(FACTOR=2.0), ["FACTOR: 1.0 -> 2.0"]


def behind_a_method_in_a_list() -> Case:
    class Term:
        def __init__(self) -> None:
            self.scale = 1.0

        def value(self, x: float) -> float:
            return x * self.scale

    term = Term()
    terms = [term.value]
    return (lambda x: sum(one(x) for one in terms)), lambda: setattr(term, "scale", 2.0), ["self.scale: 1.0 -> 2.0"]


def behind_an_autograd_function() -> Case:
    config = Config()

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * config.scale

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    return (lambda x: Scale.apply(x)), lambda: setattr(config, "scale", 2.0), ["config.scale: 1.0 -> 2.0"]


def behind_a_weak_reference() -> Case:
    config = Config()
    reference = weakref.ref(config)
    return (lambda x: x * reference().scale), lambda: setattr(config, "scale", 2.0), ["reference().scale: 1.0 -> 2.0"]


def in_a_set() -> Case:
    active = {1, 2}
    return (lambda x: 1 in active), lambda: (active.discard(1), active.add(7)), ["active: {1, 2} -> {2, 7}"]


def in_an_array() -> Case:
    weights = np.ones(2)
    return (lambda x: x * weights), lambda: weights.fill(2), ["weights: an array -> the same array with other contents"]


def in_a_deque() -> Case:
    queue = collections.deque([1.0, 2.0])
    return (
        (lambda x: x * queue[0]),
        lambda: queue.appendleft(queue.pop()),
        ["queue[0]: 1.0 -> 2.0", "queue[1]: 2.0 -> 1.0"],
    )


def in_a_tuple() -> Case:
    tensors = (torch.ones(2), torch.ones(2))
    told = ["tensors[1]: a tensor -> the same tensor, which moved to another address"]
    return (lambda x: x * tensors[1]), lambda: setattr(tensors[1], "data", torch.zeros(2)), told


def in_a_large_dict() -> Case:
    table = dict.fromkeys(range(3000), 1.0)
    return (lambda x: x * table[0]), lambda: table.update({2999: 2.0}), ["table[2999]: 1.0 -> 2.0"]


def in_a_large_list() -> Case:
    table = [1.0] * 3000
    return (lambda x: x * table[0]), lambda: table.__setitem__(2999, 2.0), ["table[2999]: 1.0 -> 2.0"]


def in_a_dict_with_odd_keys() -> Case:
    class Key:
        __hash__ = None  # type: ignore[assignment]

    class Hashed(Key):
        def __hash__(self) -> int:
            return 1

    table = {Hashed(): 1.0, "a": 2.0}
    key = next(iter(table))
    return (
        (lambda x: x * table[key]),
        lambda: table.update({key: 3.0}),
        [f"table[<Hashed at {id(key):#x}>]: 1.0 -> 3.0"],
    )


def key_deleted() -> Case:
    table = {"a": 1.0, "b": 2.0}
    return (lambda x: x * table["a"]), lambda: table.pop("b"), ["table['b']: 2.0 -> gone"]


def key_deleted_from_a_defaultdict() -> Case:
    table = collections.defaultdict(lambda: 7.0, a=1.0)
    return (lambda x: x * table["a"]), lambda: table.pop("a"), ["table['a']: 1.0 -> gone"]


def attribute_deleted() -> Case:
    config = types.SimpleNamespace(a=1.0, b=2.0)
    return (lambda x: x * config.a + config.b), lambda: delattr(config, "b"), ["config.b: 2.0 -> gone"]


def attribute_that_is_not_spelled() -> Case:
    config, name = types.SimpleNamespace(a=1.0, b=2.0), "b"
    return (lambda x: x * getattr(config, name)), lambda: setattr(config, "b", 3.0), ["config.b: 2.0 -> 3.0"]


def attributes_at_large() -> Case:
    config = types.SimpleNamespace(a=1.0)
    return (lambda x: x * sum(vars(config).values())), lambda: setattr(config, "a", 3.0), ["config.a: 1.0 -> 3.0"]


def slot_of_one_name() -> Case:
    class Owner:
        __slots__ = "_scale"

    owner = Owner()
    owner._scale = 1.0
    return (lambda x: x * owner._scale), lambda: setattr(owner, "_scale", 2.0), ["owner._scale: 1.0 -> 2.0"]


def slot_beside_a_dict() -> Case:
    class Base:
        __slots__ = ("scale",)

    class Owner(Base):
        pass

    owner = Owner()
    owner.scale = 1.0
    return (lambda x: x * owner.scale), lambda: delattr(owner, "scale"), ["owner.scale: 1.0 -> gone"]


def dataclass_replaced() -> Case:
    config = Config()

    def change() -> None:
        nonlocal config
        config = Config(2.0)

    return (lambda x: x * config.scale), change, ["config: Config(scale=1.0) -> Config(scale=2.0)"]


def whole_number_for_a_fraction() -> Case:
    config = types.SimpleNamespace(scale=1)
    return (lambda x: x * config.scale), lambda: setattr(config, "scale", 1.0), ["config.scale: 1 -> 1.0"]


def number_of_a_scheduler() -> Case:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    told = ["scheduler.last_epoch: 0 -> 1"]
    return (lambda x: x * scheduler.last_epoch), lambda: setattr(scheduler, "last_epoch", 1), told


CASES = [
    value
    for value in list(globals().values())
    if isinstance(value, types.FunctionType) and value.__annotations__.get("return") == "Case"
]


@pytest.fixture(autouse=True)
def factor() -> Iterator[None]:
    yield
    globals()["FACTOR"] = 1.0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_watch_reports_what_changed(case: Callable[[], Case]) -> None:
    step, change, told = case()
    assert told_of(step, change) == told


# -- what is no change


def test_watch_takes_an_equal_value_for_the_same() -> None:
    pair, limit, scale = (1.0, "a"), float("nan"), 1.5

    def step(x: float) -> float:
        return x * pair[0] * limit * scale

    def change() -> None:
        nonlocal pair, limit, scale
        pair, limit, scale = (float("1"), "a"), float("nan"), float("1.5")

    assert told_of(step, change) == []


def test_watch_takes_a_method_for_its_object_and_function() -> None:
    class Owner:
        def part(self, x: float) -> float:
            return x

    one, two = Owner(), Owner()
    part = one.part

    def step(x: float) -> float:
        return part(x)

    def rebind(owner: Owner) -> None:
        nonlocal part
        part = owner.part

    assert told_of(step, lambda: rebind(one)) == []
    assert len(told_of(step, lambda: rebind(two))) == 1


def test_watch_runs_no_code_of_the_user() -> None:
    class Touchy(dict[str, float]):
        def fail(self, *_: object) -> Any:
            raise AssertionError("the user's code ran")

        __eq__ = __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __missing__ = fail
        __repr__ = __getattr__ = values = items = keys = get = fail
        __hash__ = None  # type: ignore[assignment]
        scale = property(fail)

    touchy = Touchy(a=1.0)
    vars(touchy)["weight"] = 1.0
    told = told_of(lambda x: x * touchy["a"] * touchy.scale, lambda: dict.__setitem__(touchy, "a", 2.0))
    assert told == ["touchy['a']: 1.0 -> 2.0"]


def test_watch_makes_no_key_in_a_defaultdict() -> None:
    table: dict[str, float] = collections.defaultdict(float, a=1.0)
    told_of(lambda x: x * table["a"], lambda: table.pop("a"))
    assert list(table) == []


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (1 << 70, 1 << 70, True),
        ((1, (2.0,)), (1, (2.0,)), True),
        ((1, (2.0,)), (1, (2,)), False),
        (frozenset({1}), frozenset({True}), False),
        (np.float32(1), np.float32(1), True),
        (np.float32(1), np.float64(1), False),
        (torch.device("cpu"), torch.device("cpu"), True),
        (range(3), range(3), True),
        ([1], [1], False),
        (functools.partial(scaled, x=1), functools.partial(scaled, x=1), True),
        (functools.partial(scaled, x=1), functools.partial(scaled, x=2), False),
    ],
)
def test_same_distinguishes_constants_of_a_graph(one: Any, two: Any, expected: bool) -> None:
    assert same(one, two) is expected


# -- names


def test_watch_distinguishes_two_of_the_same_name() -> None:
    class Owner:
        def __init__(self) -> None:
            self.scale = 1.0

        def part(self, x: float) -> float:
            return x * self.scale

    owners = [Owner(), Owner(), Owner()]
    first, second, third = (owner.part for owner in owners)

    def step(x: float) -> float:
        return first(x) + second(x) + third(x)

    def change() -> None:
        for owner in owners:
            owner.scale = 2.0

    told = ["self.scale: 1.0 -> 2.0", "self.scale (Owner): 1.0 -> 2.0", "self.scale (Owner#2): 1.0 -> 2.0"]
    assert told_of(step, change) == told
    for owner in owners:
        owner.scale = 1.0
    assert told_of(step, change, ignore=("self.scale",)) == told[1:]


def test_watch_ignores_a_name_with_all_behind_it() -> None:
    config, table = Config(), {"a": 1.0, "b": 1.0}

    def change() -> None:
        config.scale = 2.0
        table.update(a=2.0, b=2.0, c=2.0)

    told = told_of(lambda x: x * config.scale * table["a"], change, ignore=("config", "table['a']", "len(table)"))
    assert told == ["table['b']: 1.0 -> 2.0"]


# -- modules


class Layer(nn.Module):
    """A user's layer with one of each kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self._scale = 1.0
        self.mask = torch.ones(2)
        self.act = F.relu
        self.table = {"a": 1.0}
        self.shape = (1, 2)
        self.config = types.SimpleNamespace(scale=1.0)
        self.active = {0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 0 in self.active and self.shape:
            x = self.act(self.linear(x)) * self._scale * self.mask
        return x * self.table["a"] * self.config.scale * FACTOR


def _swap(module: nn.Module, kind: type) -> None:
    module.__class__ = kind


CHANGES: dict[str, tuple[Callable[[Layer], object], str]] = {
    "private": (lambda m: setattr(m, "_scale", 2.0), "m._scale: 1.0 -> 2.0"),
    "tensor": (lambda m: setattr(m, "mask", torch.zeros(3)), "m.mask: a tensor of shape [2] -> a tensor of shape [3]"),
    "moved": (
        lambda m: setattr(m.mask, "data", torch.zeros(2)),
        "m.mask: a tensor -> the same tensor, which moved to another address",
    ),
    "function": (lambda m: setattr(m, "act", F.gelu), "m.act: <function relu> -> <function gelu>"),
    "dict": (lambda m: m.table.update(a=2.0), "m.table['a']: 1.0 -> 2.0"),
    "tuple": (lambda m: setattr(m, "shape", (2, 2)), "m.shape: (1, 2) -> (2, 2)"),
    "object": (lambda m: setattr(m.config, "scale", 2.0), "m.config.scale: 1.0 -> 2.0"),
    "set": (lambda m: m.active.clear(), "m.active: {0} -> set()"),
    "global": (lambda m: globals().update(FACTOR=2.0), "FACTOR: 1.0 -> 2.0"),
    "forward": (lambda m: setattr(m, "forward", scaled), "m.forward: <function Layer.forward> -> <function scaled>"),
    "class": (lambda m: _swap(m, nn.Identity), "m.__class__: <class Layer> -> <class Identity>"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_watch_sees_what_a_module_of_the_user_computes_with(name: str) -> None:
    layer = Layer()
    change, told = CHANGES[name]
    modules = {"m": layer, "m.linear": layer.linear}
    assert told_of(lambda x: x, lambda: change(layer), modules) == [told]


def test_watch_leaves_the_state_of_a_module_to_its_guards() -> None:
    layer = Layer()

    def change() -> None:
        layer.eval()
        layer.linear.bias = None
        layer.register_buffer("extra", torch.ones(1))

    assert told_of(lambda x: x, change, {"m": layer, "m.linear": layer.linear}) == []


def test_watch_sees_the_forward_of_a_class_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Child(Layer):
        pass

    told = told_of(lambda x: x, lambda: monkeypatch.setattr(Layer, "forward", scaled), {"m": Child()})
    assert told == ["Layer.forward: <function Layer.forward> -> <function scaled>"]
    told = told_of(lambda x: x, lambda: setattr(Child, "forward", scaled), {"m": Child()})
    assert told == ["Child.forward: its class's <function scaled> -> <function scaled>"]


@pytest.mark.parametrize(
    ("module", "attribute", "value"),
    [
        (nn.Dropout(0), "p", 0.5),
        (nn.MSELoss(), "reduction", "sum"),
        (nn.CrossEntropyLoss(), "ignore_index", 1),
        (nn.GELU(), "approximate", "tanh"),
        (nn.Conv1d(2, 2, 3), "padding", (1,)),
        (nn.Conv2d(2, 2, 3), "stride", (2, 2)),
        (nn.Softmax(dim=0), "dim", 1),
        (nn.BatchNorm1d(2), "momentum", None),
        (nn.BatchNorm1d(2), "track_running_stats", False),
        (nn.Embedding(2, 2), "max_norm", 1.0),
        (nn.GroupNorm(1, 2), "num_groups", 2),
        (nn.LayerNorm(2), "eps", 1.0),
        (nn.Hardtanh(-1, 1), "max_val", 0.5),
        (nn.Upsample(scale_factor=2), "mode", "bilinear"),
        (nn.MultiheadAttention(2, 1), "num_heads", 2),
        (nn.LSTM(2, 2), "batch_first", True),
        (nn.TransformerEncoderLayer(2, 1, 2), "norm_first", True),
        (nn.TransformerEncoderLayer(2, 1, 2), "activation", F.gelu),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_watch_sees_what_a_layer_of_torch_computes_with(module: nn.Module, attribute: str, value: Any) -> None:
    (told,) = told_of(lambda x: x, lambda: setattr(module, attribute, value), {"m": module})
    assert told.startswith(f"m.{attribute}: ")


# -- what may be drawn from


class Owner:
    """Draws from one iterator, and has another."""

    def __init__(self) -> None:
        self.batches = iter([1, 2])
        self.others = iter([3])
        self.rng = np.random.default_rng(0)

    def step(self) -> Any:
        return next(self.batches), self.rng.random(), self.helper().other()

    def other(self) -> Any:  # never called here; another object has a method of this name
        return next(self.others)

    def helper(self) -> Any:
        return Other()


class Other:
    def other(self) -> None:
        pass


def test_watch_sees_what_is_drawn_from_and_moves_nothing() -> None:
    owner = Owner()
    watch = Watch(owner.step)
    assert watch.drawn() == []
    owner.step()
    assert set(map(str, watch.drawn())) == {"the iterator `self.batches`", "the random generator `self.rng`"}
    assert watch.unseen() == []
    assert (next(owner.batches), next(owner.others)) == (2, 3)
    assert watch.changed() == []


def numbers() -> Any:
    yield from range(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2, 3]),
        lambda: iter((1, 2, 3)),
        lambda: iter(range(3)),
        lambda: iter({"a": 1, "b": 2}),
        itertools.count,
        numbers,
        lambda: (n for n in (1, 2, 3)),
        lambda: enumerate([1, 2, 3]),
        lambda: zip(iter([1, 2]), itertools.count(), strict=False),
        lambda: map(str, iter([1, 2])),
        lambda: itertools.cycle([1, 2]),
        lambda: itertools.islice(itertools.count(), 4),
        lambda: iter(torch.utils.data.DataLoader([1, 2])),
        lambda: enumerate(iter(torch.utils.data.DataLoader([1, 2]))),
        lambda: random.Random(0),
        lambda: np.random.RandomState(0),
    ],
)
def test_watch_sees_each_draw(make: Callable[[], Any]) -> None:
    source = make()
    watch = Watch(lambda: source)
    assert watch.drawn() == []
    for _ in range(2):
        source.random() if isinstance(source, random.Random) else next(source) if hasattr(
            source, "__next__"
        ) else source.rand()
        assert len(watch.drawn()) == 1
    assert Watch(lambda: source, ignore=["source"]).drawn() == []


def test_watch_names_an_iterator_that_keeps_its_place_to_itself() -> None:
    hidden = itertools.groupby([1, 1, 2])
    held = {"it": itertools.groupby([1])}
    file = io.StringIO("a")
    assert list(map(str, Watch(lambda: (hidden, held["it"], file)).unseen())) == ["the iterator `hidden`"]


# -- code


def test_watch_follows_a_long_chain_of_functions() -> None:
    scope: dict[str, Any] = {"WEIGHT": 1.0}
    lines = [f"def f{i}(x): return f{i + 1}(x)" for i in range(900)]
    exec("\n".join([*lines, "def f900(x): return x * WEIGHT"]), scope)
    assert told_of(scope["f0"], lambda: scope.update(WEIGHT=2.0)) == ["WEIGHT: 1.0 -> 2.0"]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("<stdin>", True),
        ("<string>", True),
        ("<ipython-input-1-abc>", True),
        ("<doctest README.md[0]>", True),
        (__file__, True),
        ("<frozen importlib._bootstrap>", False),
        ("<eval_with_key>.0", False),
        (functools.__file__, False),
        (torch.__file__, False),
    ],
)
def test_code_is_the_users_wherever_they_typed_it(file: str, expected: bool) -> None:
    assert is_users_code(compile("1", file, "eval")) is expected


def test_globals_are_separated_from_attributes() -> None:
    names = [f"name_{i}" for i in range(300)]
    code = compile(
        f"def f(x):\n return x.attribute, [x.other for y in inner], ({', '.join(names)})", "<string>", "exec"
    )
    function = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    assert globals_in(function) == {"inner", *names}


def test_watch_leaves_alone_attributes_that_no_code_names() -> None:
    class Slotted:
        __slots__ = ("calls", "scale")

    class Trainer:
        def __init__(self) -> None:
            self.scale, self.global_step, self.slotted = 1.0, 0, Slotted()
            self.slotted.scale, self.slotted.calls = 1.0, 0

        def step(self, x: float) -> float:
            return x * self.scale * self.slotted.scale

    trainer = Trainer()
    assert told_of(trainer.step, lambda: setattr(trainer, "global_step", 1)) == []
    assert told_of(trainer.step, lambda: setattr(trainer.slotted, "calls", 1)) == []
    assert told_of(trainer.step, lambda: setattr(trainer, "scale", 2.0)) == ["self.scale: 1.0 -> 2.0"]


def test_watch_sees_what_a_function_imports_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = types.ModuleType("settings_of_the_user")
    settings.WEIGHT = 1.0
    monkeypatch.setitem(sys.modules, "settings_of_the_user", settings)

    def by_name(x: float) -> float:
        from settings_of_the_user import WEIGHT  # type: ignore[import-not-found]

        return x * WEIGHT

    def by_module(x: float) -> float:
        import settings_of_the_user as other

        return x * other.WEIGHT

    told = ["settings_of_the_user.WEIGHT: 1.0 -> 2.0"]
    assert told_of(by_name, lambda: setattr(settings, "WEIGHT", 2.0)) == told
    settings.WEIGHT = 1.0
    assert told_of(by_module, lambda: setattr(settings, "WEIGHT", 2.0)) == told
