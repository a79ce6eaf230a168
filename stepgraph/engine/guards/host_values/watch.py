"""Host values that a step reads: noted at capture, compared at replay, never silently frozen.

Python runs only when a step is recorded. A loss weight in a closure, a temperature in a global, a flag on `self` are
read once and are constants from then on. So a capture notes everything that the step's code can name (`walk` finds it):
plain values, and which tensor, function or object each name stands for. The watch is only a trigger: if a value
changed, the next call is an audit, and the operations decide whether the change matters. So watching a value too many
is cheap. A change of a value that is not watched is found only at the next audit.

Reading all values at each replay must cost almost nothing. So they are compared by identity in one row, in C. Only if
the row fails are the values compared one by one.
"""

from __future__ import annotations

import functools
import os
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from stepgraph.core.executed_code import ExecutedCode
from stepgraph.core.plain_values import attributes_of, cached_by
from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.backends.random.sources import Source, source_of
from stepgraph.engine.guards.host_values import parts
from stepgraph.engine.guards.host_values.decisions import Answers, HostValues, can_trace
from stepgraph.engine.guards.host_values.naming import Label
from stepgraph.engine.guards.host_values.parts import Names, Place, expect_places
from stepgraph.engine.guards.host_values.uses import Uses
from stepgraph.engine.guards.host_values.walk import MAX_ITEMS, MAX_OBJECTS, Walk, Wants
from stepgraph.engine.guards.layout import layout_of
from stepgraph.engine.guards.protocol import Change

_CUT_SHORT = (
    f"the step can name more than {MAX_OBJECTS:,} objects: values in the others are not watched, and a change there is "
    "found at the next audit"
)


class Watch:
    """The watched values of one step, as they were when the watch was made."""

    def __init__(
        self,
        function: Callable[..., Any],
        ignore: Collection[str] = (),
        modules: Mapping[str, torch.nn.Module] | None = None,
        read: Mapping[tuple[str, int], Callable[[], Any]] | None = None,
        eager: Iterable[Any] = (),
        ran: ExecutedCode | None = None,
        answers: Answers | None = None,
    ) -> None:
        """`read` are numbers that the step was seen to read, `eager` the optimizers that run at each replay.

        `ran` is the code that the step was seen to run. Values that `answers` cover are compared by these.
        """
        self.answers = answers if answers is not None else Answers()
        self._look = functools.partial(_look, function, frozenset(ignore), modules or {}, read or {}, list(eager), ran)
        self._ran = ran
        self._dropped: set[str] = set()
        self._notes: _Notes = self._look()
        self._row = self._new_row()

    def __len__(self) -> int:
        others = (parts.class_of, parts.layout_at, parts.geometry_at)
        return sum(place.read not in others for place in self._notes.places)

    def changed(self) -> list[Change]:
        """Return the changes; without changes this is fast."""
        if self._row.holds():
            return []
        notes = self._notes
        found = [change for place in self._compared() if (change := place.change()) is not None]
        found += [change for names in notes.names if len(names.where) != len(names.known) for change in names.changes()]
        found = [change for change in found if change.name not in self._dropped]
        if not self.answers.hold():
            found += self.answers.changes()
        if not found:  # new objects that are equal for the step: expect these from now on
            for place in notes.places:
                place.value = place.read(place.where, place.key)
            for names in notes.names:
                names.known = frozenset(names.where)
            self._row = self._new_row()
        return found

    def _compared(self) -> list[Place]:
        """The places that are compared by value."""
        answered = {place.spot for place in self.answers.places}
        return [place for place in self._notes.places if place.spot not in answered] if answered else self._notes.places

    def traceable(self, changes: Iterable[Change], others: Iterable[Place] = ()) -> list[Place]:
        """Return the places where a stand-in hears all that code asks.

        They are among those of the values that have changed, those that answers cover already, and `others`.
        """
        if self._notes.is_compiled:  # the compiler would compile the code again for a stand-in
            return []
        names = {change.name for change in changes}
        found = [place for place in self._notes.places if str(place.label) in names and can_trace(place)]
        return [place for place in (*others, *self.answers.places, *found) if self.only_asks([place])]

    def only_asks(self, places: Iterable[Place]) -> bool:
        """Check that the code that ran does nothing with these numbers but ask what a stand-in hears."""
        if self._ran is None or not self._ran.is_known:
            return False
        uses = Uses(self._ran.codes())
        return all(uses.only_ask(place) for place in places)

    @property
    def counts_of_libraries(self) -> set[str]:
        """The names of variables of installed modules, which may count whatever happens: garbage collections, calls."""
        places = (place for place in self._notes.places if not place.is_users)
        return {str(place.label) for place in places if type(place.where) is dict and "__spec__" in place.where}

    @property
    def ignored(self) -> list[Place]:
        """The places that are left out by name."""
        return self._notes.ignored

    def host_values(self) -> HostValues:
        """Note the present values, to be restored."""
        return HostValues((*self._notes.places, *self.answers.places))

    def noted(self, place: Place) -> Any:
        """Return the value that a place had when it was noted."""
        return next((own.value for own in self._notes.places if own.spot == place.spot), place.value)

    def expect(self, row: GuardRow) -> None:
        expect_places(self._compared(), row)
        if self.answers.places:
            row.ask(self.answers.hold)
        for names in self._notes.names:
            row.held(names.where, {}, len(names.known))

    def drop(self, names: Iterable[str]) -> None:
        """Stop watching these values, which turned out not to matter."""
        self._dropped.update(names)
        self._notes.places = [place for place in self._notes.places if str(place.label) not in self._dropped]
        self._row = self._new_row()

    def renew(self) -> None:
        """Expect the present values, after the step's own Python has run once more."""
        self._notes = self._look()
        self.drop(())

    @property
    def tensors(self) -> set[int]:
        """The ids of all tensors found."""
        return {id(place.where) for place in self._notes.places if place.read is parts.layout_at}

    @property
    def labels(self) -> set[str]:
        """The names of all values found."""
        return self._notes.labels

    @property
    def unlooked(self) -> str | None:
        """A sentence about values that were not covered, or are not compared by value, or None."""
        names = ", ".join(sorted({str(place.label) for place in self.answers.decided}))
        told = [_CUT_SHORT] if self._notes.is_cut_short else []
        return "; ".join([*told, f"compared by what the step asks of them: {names}"] if names else told) or None

    def drawn(self) -> list[Source]:
        """Return the step's iterators and random generators that were drawn from since."""
        return [s for s in self._notes.sources if s.is_seen and s.was_drawn_from()]

    def unseen(self) -> list[Source]:
        """Return iterators in variables of the step whose position cannot be read."""
        return [s for s in self._notes.sources if not s.is_seen and s.name.isidentifier()]

    def _new_row(self) -> GuardRow:
        row = GuardRow()
        self.expect(row)
        return row


class _Notes:
    """Visits a walk, and notes what it finds."""

    def __init__(self, ignore: frozenset[str], is_on_gpu: bool) -> None:
        self._ignore, self._is_on_gpu = ignore, is_on_gpu
        self.places: list[Place] = []
        self.ignored: list[Place] = []
        self.names: list[Names] = []
        self.sources: list[Source] = []
        self.is_cut_short = self.is_compiled = False
        self.labels: set[str] = set()
        """The spelling of everything found; kept only if names are to be ignored."""

    def put(self, place: Place) -> bool:
        if self._ignore:
            self.labels.add(str(place.label))
            if str(place.label) in self._ignore:
                self.ignored.append(place)
                return False
        self.places.append(place)
        return True

    def takes(self, value: Any) -> bool:
        return False

    def miss(self, label: Label, where: Mapping[Any, Any], wants: Wants) -> None:
        self.names.append(Names(label, where, wants, (), True, frozenset(where)))

    def enter(self, label: Label, value: Any, owner: Any, is_users: bool, wants: Wants | None) -> None:
        kind, source = type(value), source_of(str(label), value)
        if self._ignore:
            self.labels.add(str(label))
        note = functools.partial(self._note, value, is_users)
        if source is not None:
            is_live = source.generator is not None and not self._is_on_gpu  # the tape handles it
            if str(label) not in self._ignore and not is_live:
                self.sources.append(source)
        elif issubclass(kind, torch.Tensor):
            note(label, parts.geometry_at if layout_of(value) is None else parts.layout_at)
        elif issubclass(kind, (dict, list, deque)):
            note(label.length, parts.length_of)
            is_ordered = is_users and issubclass(kind, dict) and 1 < dict.__len__(value) <= MAX_ITEMS
            if is_ordered and str(label.length) not in self._ignore:
                note(label.order, parts.order_of)
        elif issubclass(kind, set) and set.__len__(value) <= MAX_ITEMS:
            note(label, parts.members_of)
        elif parts.is_bytes(value, MAX_ITEMS):
            note(label, parts.bytes_of)
        elif kind is functools._lru_cache_wrapper:
            if results := frozenset(map(id, cached_by(value))):
                self.put(Place(Label(f"{label}()"), value, results, "as captured", is_users, parts.results_in))
        elif wants is not None and kind not in (types.FunctionType, types.MethodType):
            is_class = issubclass(kind, type)
            own: Any = vars(value) if is_class else attributes_of(value)
            if own is not None:
                behind = value.__mro__[1:] if is_class else kind.__mro__
                self.names.append(Names(label, own, wants, behind, is_users, frozenset(own)))
            if not is_class:
                note(label.attribute("__class__"), parts.class_of)

    def _note(self, where: Any, is_users: bool, label: Label, read: Callable[[Any, Any], Any]) -> None:
        self.put(Place(label, where, None, read(where, None), is_users, read))


def _look(
    function: Callable[..., Any],
    ignore: frozenset[str],
    modules: Mapping[str, torch.nn.Module],
    read: Mapping[tuple[str, int], Callable[[], Any]],
    eager: list[Any],
    ran: ExecutedCode | None,
) -> _Notes:
    """Walk; if there is compiled code, walk again without the record of code that ran, which does not cover it."""
    parameters = (p for module in modules.values() for p in module._parameters.values() if p is not None)
    notes = _Notes(ignore, any(parameter.is_cuda for parameter in parameters))
    walk = Walk(notes, ran, [id(value) for value in eager])
    walk.go(function, modules)
    if walk.is_compiled and ran is not None and ran.is_known:
        ran.give_up()
        return _look(function, ignore, modules, read, eager, ran)
    notes.is_cut_short, notes.is_compiled = walk.is_cut_short, walk.is_compiled
    for (name, _), reader in read.items():
        if notes.put(Place(Label(name), reader, None, value := reader(), True, parts.result_of)):
            notes.enter(Label(name), value, None, True, None)
    spelled = walk.names.spelled
    if "environ" in spelled or "getenv" in spelled:
        entries: dict[bytes, bytes] = getattr(os.environ, "_data", {})  # `os.environ` itself decodes at each look
        for key, value in entries.items():
            if (name := os.fsdecode(key)) in spelled:
                notes.put(Place(Label("os.environ").item(name), entries, key, value, True))
        notes.miss(Label("os.environ"), entries, lambda key: os.fsdecode(key) in spelled)
    return notes
