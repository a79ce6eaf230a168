"""Decisions that a step takes on a host value, noted while it is recorded and asked again before each replay.

A counter that had no effect so far proves nothing: `if trainer.n % 50 == 49` has none at 49 calls of 50. So it is not
enough to compare recordings of neighbouring values. While a recording runs, a stand-in is in the place of the value
(`Trace`). It computes like the number, and it notes what is asked of it: each comparison, truth test, index and
conversion, with the expression that leads there (`n % 50 == 49`) and the answer. The recording is right for every value
that gives the same answers. They are asked again before a replay, which costs about a microsecond each, and a value
that gives another answer makes the call an audit.

A stand-in cannot be traced where it leaves Python: as an index, in a string, in a kernel. Then the answer is the number
itself. If that is the watched number, and no expression of it, every change of it is a change (`Decisions.exact`).

The stand-in is no `int`, since code in C would read a subclass of `int` past all notes. It says that it is one
(`isinstance`). Code that checks `type(value)` or `value is True` may take another path than it would: so a recording
with stand-ins that differs is made again without, and that one counts.
"""

from __future__ import annotations

import gc
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stepgraph.core.plain_values import is_plain, same
from stepgraph.core.tree import flatten, unflatten
from stepgraph.engine.guards.host_values.naming import describe_change
from stepgraph.engine.guards.host_values.parts import Place, attribute_of, item_at
from stepgraph.engine.guards.protocol import Change

NUMBERS = (int, float, bool)
_MAX_CHECKS = 64
"""A step that asks more is taken to depend on the value itself."""
_MAX_ANSWERS = 16
"""Sets of answers that are kept for one graph."""
Compute = Callable[[Sequence[Any]], Any]
"""Computes an expression from the values of all traced places."""
_EXACT, _TRUTH, _VALUE = "exact", "truth", "value"
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
_UNARY = ("neg", "pos", "abs", "invert")
_CONVERTED: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    *(("int", int), ("float", float), ("complex", complex), ("index", operator.index)),
    *(("str", str), ("repr", repr), ("hash", hash)),
)
_COARSE = frozenset(("mod", "floordiv", "and", "rshift"))
"""Operations with few results: an index like `n % 2` is an answer, and `n + 1` is the number itself."""
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a recording has asked of some values, and the answers."""

    places: tuple[Place, ...]
    seen: tuple[Any, ...]
    """Their values when they were asked."""
    checks: dict[Hashable, tuple[Compute, Any]] = field(default_factory=dict)
    exact: frozenset[Hashable] = frozenset()
    """The places, by spot, whose own value was asked for."""

    def values(self) -> tuple[Any, ...] | None:
        """The present values, or None if one has become something else."""
        found = tuple([place.read(place.where, place.key) for place in self.places])
        return found if all(type(a) is type(b) for a, b in zip(found, self.seen, strict=True)) else None

    def hold(self) -> bool:
        """Ask again, and compare the answers."""
        now = self.values()
        return now is not None and all(_answer(compute, now) == known for compute, known in self.checks.values())

    @property
    def decided(self) -> list[Place]:
        """The places whose value counts by its answers alone."""
        return [place for place in self.places if place.spot not in self.exact]

    def also_exact(self, place: Place, value: Any) -> Decisions:
        """The same, and for one value of one more place."""
        index = len(self.places)
        check = {(_EXACT, (_VALUE, place.spot)): (operator.itemgetter(index), value)}
        places, seen = (*self.places, place), (*self.seen, value)
        return Decisions(places, seen, self.checks | check, self.exact | {place.spot})


class Answers:
    """The answers for which one graph is right, and those for which it is known to be wrong."""

    def __init__(self, first: Decisions | None = None) -> None:
        self._right: list[Decisions] = [] if first is None else [first]
        self._wrong: list[Decisions] = []

    @property
    def places(self) -> tuple[Place, ...]:
        """The places that are compared by answers."""
        return self._right[-1].places if self._right else ()

    @property
    def decided(self) -> list[Place]:
        """Those of them whose value counts by its answers alone."""
        return self._right[-1].decided if self._right else []

    def agree(self, decisions: Decisions, before: Callable[[Place], Any]) -> None:
        """The graph is right for these answers, too. `before` gives the values of places that are new among them."""
        known = {place.spot for place in self.places}
        for place in decisions.places:
            if place.spot not in known:
                self._right = [each.also_exact(place, before(place)) for each in self._right or [Decisions((), ())]]
        traced = {place.spot for place in decisions.places}
        for place in self.places:
            if place.spot not in traced:
                decisions = decisions.also_exact(place, place.read(place.where, place.key))
        self._right = [*self._right[1 - _MAX_ANSWERS :], decisions]
        self._wrong = [each for each in self._wrong if each.checks != decisions.checks]

    def refuse(self, decisions: Decisions) -> None:
        """The graph is wrong for these answers."""
        self._wrong = [*self._wrong[1 - _MAX_ANSWERS :], decisions]

    def hold(self) -> bool:
        """Ask whether the graph is known to be right now, as far as these values go."""
        return not self._right or any(decisions.hold() for decisions in reversed(self._right))

    def changes(self) -> list[Change]:
        """Describe the values, if none of the answers holds."""
        latest = self._right[-1]
        pairs = zip(latest.places, latest.seen, strict=True)
        now = [(str(place.label), seen, place.read(place.where, place.key)) for place, seen in pairs]
        changed = [values for values in now if not same(values[1], values[2])]
        return [describe_change(*values) for values in changed or now]

    def are_refused(self) -> bool:
        """Ask whether the graph is known to be wrong now."""
        return any(decisions.hold() for decisions in self._wrong)


class Predicates:
    """All that recordings of one step have asked so far. The answers distinguish kinds of calls."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, tuple[Decisions, Compute]] = {}
        self.untraceable: set[Hashable] = set()
        """Places, by spot, whose own value was asked for, or where a stand-in was refused."""
        self.new_answers = 0
        """Audits that have found another answer."""

    def traced(self, places: Iterable[Place]) -> Trace:
        """Return a trace of these places, but for those where it is of no use."""
        return Trace(place for place in places if place.spot not in self.untraceable)

    def refuse(self, trace: Trace, *, all_places: bool) -> None:
        """Do not trace those places again whose own value was asked for, or none of them."""
        self.untraceable |= {place.spot for place in trace.places} if all_places else trace.decisions().exact

    def learn(self, decisions: Decisions) -> bool:
        """Add what a recording has asked, but for the values themselves. Return whether anything of it is new."""
        exact = {(_EXACT, (_VALUE, place.spot)) for place in decisions.places}
        new = decisions.checks.keys() - exact - self._asked.keys()
        if len(new) + len(self._asked) > _MAX_CHECKS:
            return False
        self._asked.update({key: (decisions, decisions.checks[key][0]) for key in new})
        return bool(new)

    def answers(self) -> tuple[Any, ...]:
        """The answers now."""
        return tuple([_answer(compute, decisions.values()) for decisions, compute in self._asked.values()])

    @property
    def places(self) -> list[Place]:
        """The places of the values that were asked about."""
        return list({place.spot: place for asked, _ in self._asked.values() for place in asked.places}.values())


def _answer(compute: Compute, values: Sequence[Any] | None) -> Any:
    try:
        return None if values is None else compute(values)
    except Exception as error:  # noqa: BLE001 (whatever the user's arithmetic raises for this value is its answer)
        return type(error)


class Trace:
    """Notes what is asked of the stand-ins for some places."""

    def __init__(self, places: Iterable[Place]) -> None:
        found = {place.spot: place for place in places if can_trace(place)}
        self.places = tuple(found.values())
        self._before = tuple([place.read(place.where, place.key) for place in self.places])
        self._checks: dict[Hashable, tuple[Compute, Any]] = {}
        self._exact: set[Hashable] = set()
        self._made: list[weakref.ref[Traced]] = []
        self.is_open, self.is_spoiled = True, False
        """Whether it notes what is asked, and whether code in C has refused a stand-in, so that more would be asked."""

    def begin(self) -> None:
        """Put the stand-ins in place."""
        for index, (place, value) in enumerate(zip(self.places, self._before, strict=True)):
            _write(place, self.stand_in(value, (_VALUE, place.spot), operator.itemgetter(index)))

    def end(self) -> None:
        """Put numbers back everywhere: the first ones, or what the step has made of them."""
        self.is_open = False
        for place, before in zip(self.places, self._before, strict=True):
            now = place.read(place.where, place.key)
            if type(now) is Traced:
                value = plain_value(now)
                _write(place, before if value == before and type(value) is type(before) else value)
        now = None
        for made in self._made:
            _give_back(made)

    def __enter__(self) -> Trace:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_spoiled = kind is not None and not kind.__module__.startswith("stepgraph.")
        self.end()

    def asked(self) -> set[Hashable]:
        """The places, by spot, of which anything was asked."""
        return set().union(*map(_places_in, self._checks))

    def decisions(self) -> Decisions:
        if len(self._checks) <= _MAX_CHECKS:
            return Decisions(self.places, self._before, dict(self._checks), frozenset(self._exact))
        found = Decisions((), ())
        for place, value in zip(self.places, self._before, strict=True):
            found = found.also_exact(place, value)
        return found

    def stand_in(self, value: Any, key: Hashable, compute: Compute) -> Any:
        """Return a stand-in for the value of an expression."""
        if type(value) not in NUMBERS:  # such as the complex root of a negative number
            return self.note((_EXACT, key), compute, value)
        made = Traced(value, key, compute, self)
        self._made.append(weakref.ref(made))
        return made

    def note(self, key: Hashable, compute: Compute, answer: Any) -> Any:
        """Note an answer."""
        if self.is_open and len(self._checks) <= _MAX_CHECKS:
            self._checks.setdefault(key, (compute, answer))
            kind, expression, *_ = cast(tuple[Any, ...], key)
            if kind == _EXACT and not (type(answer) in (int, bool) and _COARSE & _operations_in(expression)):
                self._exact |= _places_in(expression)  # each of its values has another answer
        return answer


def _parts_of(key: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the operations in the key of an expression."""
    waiting = [key]
    while waiting:
        part = waiting.pop()
        if isinstance(part, tuple) and part:
            yield part
            waiting += part[1:] if part[0] != _VALUE else ()


def _places_in(key: Any) -> set[Hashable]:
    return {part[1] for part in _parts_of(key) if part[0] == _VALUE}


def _operations_in(key: Any) -> set[Hashable]:
    return {part[0] for part in _parts_of(key) if isinstance(part[0], str)}


class Traced:
    """Stands for a number while a step is recorded."""

    __slots__ = ("__weakref__", "_compute", "_key", "_trace", "_value")

    def __init__(self, value: Any, key: Hashable, compute: Compute, trace: Trace) -> None:
        for name, item in (("_value", value), ("_key", key), ("_compute", compute), ("_trace", trace)):
            object.__setattr__(self, name, item)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(plain_value(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(_exactly(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_exactly(self), name, value)

    def __bool__(self) -> bool:
        value, key, compute, trace = _parts(self)
        return bool(trace.note((_TRUTH, key), lambda values: bool(compute(values)), bool(value)))

    def __reduce__(self) -> Any:
        return _same, (_exactly(self),)

    def __copy__(self) -> Any:
        return _exactly(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return _exactly(self)

    def __format__(self, spec: str) -> str:
        return format(_exactly(self), spec)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __round__(self, *digits: Any) -> Any:
        return round(_exactly(self), *digits)

    def __trunc__(self) -> Any:
        return int(_exactly(self))


def _parts(traced: Traced) -> tuple[Any, Hashable, Compute, Trace]:
    get = object.__getattribute__
    return get(traced, "_value"), get(traced, "_key"), get(traced, "_compute"), get(traced, "_trace")


def plain_value(value: Any) -> Any:
    """Return the number that a stand-in stands for."""
    return object.__getattribute__(value, "_value") if type(value) is Traced else value


def _exactly(traced: Traced) -> Any:
    """The number leaves Python, or is used in a way that is not traced: note that it is this one."""
    value, key, compute, trace = _parts(traced)
    return trace.note((_EXACT, key), compute, value)


def _same(value: Any) -> Any:
    return value


def _operand(other: Any) -> tuple[Any, Hashable, Compute] | None:
    """The value, the key and the computation of the other side of an operation, if it is a number too."""
    if type(other) is Traced:
        value, key, compute, _ = _parts(other)
        return value, key, compute
    return (other, (type(other), other), lambda _: other) if type(other) in NUMBERS else None


def _binary(name: str, operation: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[Traced, Any], Any]:
    def compute_it(self: Traced, other: Any) -> Any:
        operand = _operand(other)
        if operand is None:
            return operation(other, _exactly(self)) if swapped else operation(_exactly(self), other)
        value, key, compute, trace = _parts(self)
        second, its_key, its_compute = operand
        if swapped:
            value, second, key, its_key, compute, its_compute = second, value, its_key, key, its_compute, compute
        try:
            result = operation(value, second)
        except ArithmeticError:
            _exactly(self)
            raise
        return trace.stand_in(result, (name, key, its_key), lambda v: operation(compute(v), its_compute(v)))

    return compute_it


def _unary(name: str, operation: Callable[[Any], Any]) -> Callable[[Traced], Any]:
    def compute_it(self: Traced) -> Any:
        value, key, compute, trace = _parts(self)
        return trace.stand_in(operation(value), (name, key), lambda v: operation(compute(v)))

    return compute_it


def _comparison(name: str, operation: Callable[[Any, Any], Any]) -> Callable[[Traced, Any], Any]:
    def compare(self: Traced, other: Any) -> Any:
        operand = _operand(other)
        if operand is None:
            return operation(plain_value(self) if other is None else _exactly(self), other)
        value, key, compute, trace = _parts(self)
        second, its_key, its_compute = operand
        answer = operation(value, second)
        return trace.note((name, key, its_key), lambda v: operation(compute(v), its_compute(v)), answer)

    return compare


def _conversion(convert: Callable[[Any], Any]) -> Callable[[Traced], Any]:
    def conversion(self: Traced) -> Any:
        return convert(_exactly(self))

    return conversion


def _methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _BINARY:
        operation = getattr(operator, f"__{name}__")
        yield f"__{name}__", _binary(name, operation, swapped=False)
        yield f"__r{name}__", _binary(name, operation, swapped=True)
    for name in _UNARY:
        yield f"__{name}__", _unary(name, getattr(operator, name))
    for name in _COMPARED:
        yield f"__{name}__", _comparison(name, getattr(operator, name))
    for name, convert in _CONVERTED:
        yield f"__{name}__", _conversion(convert)


for _name, _method in _methods():
    setattr(Traced, _name, _method)


class HostValues:
    """Plain values and lists that code can name, at one moment, so that a recording that is dropped leaves no trace."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._plain = [(place, place.read(place.where, place.key)) for place in places if _is_writable(place)]
        self._lists = [(place.where, len(place.where)) for place in places if type(place.where) is list]

    def changed(self) -> list[Change]:
        """Return the changes of plain values."""
        now = [(place, before, place.read(place.where, place.key)) for place, before in self._plain]
        return [describe_change(str(place.label), a, b) for place, a, b in now if is_plain(b) and not same(a, b)]

    def restore(self) -> None:
        """Put back the values that have changed, and take out what was appended."""
        for place, before in self._plain:
            if is_plain(before) and place.read(place.where, place.key) is not before:
                _write(place, before)
        for items, length in self._lists:
            del items[length:]


def undecided(changes: Iterable[Change], trace: Trace | None) -> list[Change]:
    """Return the changes of values that count by more than the answers to what a recording has asked."""
    is_known = trace is not None and not trace.is_spoiled
    names = {str(place.label) for place in trace.decisions().decided} if trace is not None and is_known else ()
    return [change for change in changes if change.name not in names]


def without_stand_ins(tree: Any) -> Any:
    """Return a result with numbers in place of stand-ins."""
    leaves, structure = flatten(tree)
    is_plain = all(type(leaf) is not Traced for leaf in leaves)
    return tree if is_plain else unflatten(structure, list(map(plain_value, leaves)))


def can_trace(place: Place) -> bool:
    """Check whether a stand-in can be put in place of a value."""
    return _is_writable(place) and type(place.read(place.where, place.key)) in NUMBERS


def _is_writable(place: Place) -> bool:
    if place.read is item_at:
        return type(place.where) in (dict, list)
    return place.read is attribute_of and type(place.where) is types.CellType


def _write(place: Place, value: Any) -> None:
    if place.read is item_at:
        place.where[place.key] = value
    else:
        place.where.cell_contents = value


def _give_back(made: weakref.ref[Traced]) -> None:
    """Where the step has kept a stand-in, put the number."""
    kept = made()
    if kept is None:
        return
    for holder in gc.get_referrers(kept):
        _exchange(holder, kept, plain_value(kept))


def _exchange(holder: Any, kept: Traced, value: Any) -> None:
    """Put a value in the place of a stand-in. Loops, since a comprehension would hold the stand-in in a cell."""
    attributes = holder if type(holder) is dict else getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        for key, item in list(attributes.items()):
            if item is kept:
                attributes[key] = value
    if type(holder) is list:
        for index, item in enumerate(holder):
            if item is kept:
                holder[index] = value
    elif type(holder) is types.CellType and holder.cell_contents is kept:
        holder.cell_contents = value
