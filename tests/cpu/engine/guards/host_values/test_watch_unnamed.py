"""Code that runs without being named is followed, too: chosen by a string, behind an operator, found in a registry."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import nn

from stepgraph.engine.guards.host_values.watch import Watch

Case = tuple[Callable[..., Any], Callable[[], object], list[str]]
"""A step, a change, and what is told of it."""
FACTOR = 1.0


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0


@dataclasses.dataclass(order=True)
class Config:
    scale: float = 1.0
    calls: int = 0


@pytest.fixture(autouse=True)
def factor() -> Any:
    set_factor(1.0)
    yield
    set_factor(1.0)


def set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


FACTOR_CHANGED = ["FACTOR: 1.0 -> 2.0"]


class Losses:
    """Chooses a method by a name that it puts together."""

    def __init__(self) -> None:
        self.kind = "plain"
        self.settings = Settings()
        self.history: list[float] = []

    def loss_plain(self, x: float) -> float:
        return x * self.settings.scale

    def loss_global(self, x: float) -> float:
        return x * FACTOR

    def step(self, x: float) -> Any:
        return getattr(self, "loss_" + self.kind)(x)

    def spelled(self, x: float) -> Any:
        return getattr(self, "loss_plain")(x)  # noqa: B009


class CallableLosses(Losses):
    def __call__(self, x: float) -> float:
        return x * self.settings.scale


def method_chosen_by_a_string() -> Case:
    losses = Losses()
    return losses.step, lambda: setattr(losses.settings, "scale", 2.0), ["self.settings.scale: 1.0 -> 2.0"]


def global_of_a_method_chosen_by_a_string() -> Case:
    return Losses().step, lambda: set_factor(2.0), FACTOR_CHANGED


def function_of_a_module_chosen_by_a_string() -> Case:
    module = types.ModuleType("some_losses")
    exec("WEIGHT = 1.0\ndef square(x): return x * x * WEIGHT", vars(module))
    name = "square"
    return lambda x: getattr(module, name)(x), lambda: setattr(module, "WEIGHT", 2.0), ["module.WEIGHT: 1.0 -> 2.0"]


def callable_object_in_a_partial() -> Case:
    losses = CallableLosses()
    step = functools.partial(losses, x=1.0)
    return step, lambda: setattr(losses.settings, "scale", 2.0), ["self.settings.scale: 1.0 -> 2.0"]


class Number:
    """Has an operator of each kind, and a number."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __mul__(self, other: float) -> float:
        return self.scale * other

    def __lt__(self, other: float) -> bool:
        return self.scale < other

    def __eq__(self, other: object) -> bool:
        return self.scale == other

    def __hash__(self) -> int:
        return hash(self.scale)

    def __index__(self) -> int:
        return int(self.scale)

    def __str__(self) -> str:
        return str(self.scale)


def _operator(step: Callable[[Number], Any]) -> Case:
    number = Number()
    return lambda x: step(number), lambda: setattr(number, "scale", 2.0), ["number.scale: 1.0 -> 2.0"]


def operator_times() -> Case:
    return _operator(lambda n: n * 2.0)


def operator_less() -> Case:
    return _operator(lambda n: n < 2.0)


def operator_equal() -> Case:
    return _operator(lambda n: n == 2.0)


def operator_index() -> Case:
    return _operator(lambda n: [1, 2, 3][n])  # type: ignore[call-overload]


def operator_text() -> Case:
    return _operator(str)


class Called(nn.Module):
    """A module with its own ways to be called and read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.extra = {"shift": 1.0}

    def forward(self, x: float) -> float:
        return x

    def __call__(self, x: float) -> float:
        return super().__call__(x) * self.scale  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return self.extra[name] if name == "shift" else super().__getattr__(name)

    def __getitem__(self, key: str) -> float:
        return self.extra[key]


def call_of_a_module() -> Case:
    module = Called()
    return lambda x: module(x), lambda: setattr(module, "scale", 2.0), ["module.scale: 1.0 -> 2.0"]


def computed_attribute_of_a_module() -> Case:
    module = Called()
    change = functools.partial(module.extra.__setitem__, "shift", 2.0)
    return lambda x: x + module.shift, change, ["module.extra['shift']: 1.0 -> 2.0"]


class Descriptor:
    def __init__(self) -> None:
        self.factor = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.factor if owner is None else self.factor * owner.hidden


class Described:
    scale = Descriptor()

    def __init__(self) -> None:
        self.hidden = 1.0


def descriptor_of_a_class() -> Case:
    described, descriptor = Described(), vars(Described)["scale"]
    descriptor.factor = 1.0
    told = ["Described.scale.factor: 1.0 -> 2.0"]
    return lambda x: x * described.scale, lambda: setattr(descriptor, "factor", 2.0), told


def object_that_a_descriptor_reads() -> Case:
    described = Described()
    told = ["described.hidden: 1.0 -> 2.0"]
    return lambda x: x * described.scale, lambda: setattr(described, "hidden", 2.0), told


def property_of_a_getter() -> Case:
    class Read:
        def __init__(self) -> None:
            self.hidden = 1.0

        scale = property(operator.attrgetter("hidden"))

    read = Read()
    return lambda x: x * read.scale, lambda: setattr(read, "hidden", 2.0), ["read.hidden: 1.0 -> 2.0"]


def getter_made_outside() -> Case:
    get, settings = operator.attrgetter("scale"), Settings()
    return lambda x: x * get(settings), lambda: setattr(settings, "scale", 2.0), ["settings.scale: 1.0 -> 2.0"]


class Scaling:
    """Reads a global in a method."""

    __slots__ = ()

    def scaled(self, x: float) -> float:
        return x * FACTOR

    def __call__(self, x: float) -> float:
        return x * FACTOR


def caller_made_outside() -> Case:
    call, scaling = operator.methodcaller("scaled", x=1.0), Scaling()
    return lambda x: call(scaling), lambda: set_factor(2.0), FACTOR_CHANGED


def object_without_slots() -> Case:
    scaling = Scaling()
    return lambda x: scaling(x), lambda: set_factor(2.0), FACTOR_CHANGED


def object_in_a_registry() -> Case:
    registry = {"plain": Scaling()}
    return lambda x: registry["plain"](x), lambda: set_factor(2.0), FACTOR_CHANGED


def class_in_a_registry() -> Case:
    registry = {"plain": Scaling}
    return lambda x: registry["plain"]()(x), lambda: set_factor(2.0), FACTOR_CHANGED


class Pair(NamedTuple):
    one: float

    def scaled(self) -> float:
        return self.one * FACTOR


def method_of_a_namedtuple() -> Case:
    pair = Pair(1.0)
    return lambda x: x * pair.scaled(), lambda: set_factor(2.0), FACTOR_CHANGED


class Mode(enum.Enum):
    TRAIN = 1

    def scaled(self) -> float:
        return FACTOR


def method_of_an_enum_member() -> Case:
    mode = Mode.TRAIN
    return lambda x: x * mode.scaled(), lambda: set_factor(2.0), FACTOR_CHANGED


def function_by_type() -> Case:
    @functools.singledispatch
    def scaled(x: Any) -> Any:
        return x

    @scaled.register
    def _(x: float) -> float:
        return x * FACTOR

    return lambda x: scaled(x), lambda: set_factor(2.0), FACTOR_CHANGED


def method_by_type() -> Case:
    class Dispatching:
        @functools.singledispatchmethod
        def scaled(self, x: Any) -> Any:
            return x

        @scaled.register
        def _(self, x: float) -> float:
            return x * FACTOR

    dispatching = Dispatching()
    return lambda x: dispatching.scaled(x), lambda: set_factor(2.0), FACTOR_CHANGED


class Meta(type):
    _scale = 1.0

    @property
    def scale(cls) -> float:
        return cls._scale


def property_of_a_metaclass() -> Case:
    class Made(metaclass=Meta):
        _scale = 1.0

    return lambda x: x * Made.scale, lambda: setattr(Made, "_scale", 2.0), ["Made._scale: 1.0 -> 2.0"]


def attribute_that_a_python_module_computes() -> Case:
    module = types.ModuleType("some_settings")
    exec("VALUES = {'scale': 1.0}\ndef __getattr__(name): return VALUES[name]", vars(module))
    change = functools.partial(module.VALUES.__setitem__, "scale", 2.0)
    return lambda x: x * module.scale, change, ["module.VALUES['scale']: 1.0 -> 2.0"]


def everything_by_a_function_in_a_closure() -> Case:
    from dataclasses import asdict

    config = Config()
    return lambda x: asdict(config), lambda: setattr(config, "scale", 2.0), ["config.scale: 1.0 -> 2.0"]


def method_behind_a_weak_reference() -> Case:
    losses = Losses()
    weak = weakref.WeakMethod(losses.spelled)
    told = ["self.settings.scale: 1.0 -> 2.0"]
    return lambda x: weak()(x), lambda: setattr(losses.settings, "scale", 2.0), told  # type: ignore[misc]


def dict_behind_a_proxy() -> Case:
    values = {"scale": 1.0}
    shown = types.MappingProxyType(values)
    return lambda x: x * shown["scale"], lambda: values.update(scale=2.0), ["shown['scale']: 1.0 -> 2.0"]


def dict_behind_a_view() -> Case:
    values = {"scale": 1.0}
    shown = values.values()
    return lambda x: x * sum(shown), lambda: values.update(scale=2.0), ["shown['scale']: 1.0 -> 2.0"]


@functools.lru_cache
def get_settings() -> Settings:
    return Settings()


@functools.cache
def get_options() -> dict[str, float]:
    return {"scale": 1.0}


def settings_from_a_cache() -> Case:
    get_settings.cache_clear()
    settings = get_settings()
    told = ["get_settings().scale: 1.0 -> 2.0"]
    return lambda x: x * get_settings().scale, lambda: setattr(settings, "scale", 2.0), told


def dict_from_a_cache() -> Case:
    get_options.cache_clear()
    options = get_options()
    told = ["get_options()['scale']: 1.0 -> 2.0"]
    return lambda x: x * get_options()["scale"], lambda: options.update(scale=2.0), told


def cache_cleared() -> Case:
    get_settings()
    told = ["get_settings(): 'as captured' -> 'other objects'"]
    return lambda x: x * get_settings().scale, get_settings.cache_clear, told


def globals_by_a_string() -> Case:
    return lambda x: x * globals()["FACTOR"], lambda: set_factor(2.0), FACTOR_CHANGED


CASES = [
    value
    for value in list(globals().values())
    if isinstance(value, types.FunctionType)
    and value.__annotations__.get("return") == "Case"
    and value is not _operator
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_watch_follows_code_that_is_not_named(case: Callable[[], Case]) -> None:
    step, change, told = case()
    watch = Watch(step)
    assert watch.changed() == []
    change()
    assert list(map(str, watch.changed())) == told


def test_watch_sees_what_is_imported_from_the_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package, settings = types.ModuleType("some_package"), types.ModuleType("some_package.settings")
    package.settings = settings  # type: ignore[attr-defined]
    settings.SCALE = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_package", package)
    monkeypatch.setitem(sys.modules, "some_package.settings", settings)
    scope: dict[str, Any] = {"__package__": "some_package", "__name__": "some_package.steps"}
    exec("def step(x):\n    from . import settings\n    return x * settings.SCALE", scope)
    watch = Watch(scope["step"])
    settings.SCALE = 2.0  # type: ignore[attr-defined]
    assert [str(change).partition(":")[2] for change in watch.changed()] == [" 1.0 -> 2.0"]


def test_watch_lets_a_cache_take_in_more() -> None:
    @functools.lru_cache
    def made(kind: str) -> Settings:
        return Settings()

    made("one")
    watch = Watch(lambda x: x * made("one").scale)
    made("two")
    assert watch.changed() == []
