"""Watches the host values that a step changes: counters, lists that grow, attributes, an optimizer's numbers.

A replay changes none of them. Captured steps are watched by `values.watch` from the function on; a loop's body is no
function. So the walk begins at the variables that the body reads before it sets them, found by the lines that ran in
the step before, and at the functions that ran. Of the body's own variables only those carry a value from one step to
the next.

A change of a host value counts if a line inside the step makes it: the counting of a loop, between its microbatches,
does not. A change of the model counts also if no line is known to make it: a capture would refuse it.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from stepgraph.core.errors import Location
from stepgraph.core.executed_code import ExecutedCode
from stepgraph.core.plain_values import is_plain
from stepgraph.engine.guards.host_values.watch import Watch
from stepgraph.engine.observe.lines import line_of_change
from stepgraph.engine.observe.own_changes import ModelState, OwnChange, OwnNumbers
from stepgraph.engine.observe.step_objects import StepObjects

Line = tuple[types.CodeType, int]
Note = Callable[[str, str, Location | None, str], None]
"""Takes a rule, what happened, the line, and the module that was changed."""
_LOADS = frozenset(("LOAD_NAME", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST_CHECK"))
_STORES = frozenset(("STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF"))


class StepState:
    """The host values of one step, from its beginning on."""

    def __init__(
        self,
        touched: StepObjects,
        frames: Sequence[types.FrameType],
        lines: Sequence[Line],
        functions: Sequence[types.FunctionType],
        ran: ExecutedCode,
        numbers: OwnNumbers,
    ) -> None:
        """`frames` are the user's, innermost first; `lines` and `functions` ran in the step before, inside it."""
        self._touched, self._numbers = touched, numbers
        self._without_line: set[OwnChange] = set()
        """Changes of the model, at a line that is not known, between the first forward and the last optimizer."""
        values, read = _variables(frames, lines)
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            root = functools.partial(_root, *functions, **values)
            self._values = Watch(root, (), touched.named_modules, read, touched.all_optimizers, ran)
            self._model = ModelState(touched.all_modules, touched.all_parameters)

    def note_changes(
        self, note: Note, lines: Sequence[Line], sets: Mapping[int, Location | None], *, is_over: bool = False
    ) -> None:
        """Note what the step has changed by now; `is_over` if the next step begins.

        `lines` ran inside it; `sets` are the lines of the script that have set `.data` or `.requires_grad` of a tensor,
        by its id.
        """
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            found, own = list(self._changes()), list(self._model.changes(self._touched.name))
        codes = {code for code, _ in lines}
        ran = {(code.co_filename, line) for code, line in lines}
        for rule, what, name in found:
            where = line_of_use(name, lines) if rule == "iterator" else line_of_change(name, codes, ran)
            if where is not None:
                note(rule, what, where, "")
        for change in own:
            where = sets.get(change.key) if change.key is not None else line_of_change(change.name, codes, ran)
            if where is None and not is_over:
                self._without_line.add(change)
            is_inside = change in self._without_line if where is None else (where.file, where.line) in ran
            if is_inside:  # not between two steps, or two microbatches
                note("own-change", change.what, where, change.name.rpartition(".")[0])

    def _changes(self) -> Iterator[tuple[str, str, str]]:
        for change in self._values.changed():
            if change.is_users:
                yield "host-value", f"changes {change}", change.name
        for source in self._values.drawn():
            yield "iterator", f"draws from {source}", source.name
        for told in self._numbers.changes().values():
            yield "host-value", f"changes {told}", told.partition(":")[0]


def _root(*args: Any, **kwargs: Any) -> None:
    """Stands for the body of the loop."""


def _variables(
    frames: Sequence[types.FrameType], lines: Sequence[Line]
) -> tuple[dict[str, Any], dict[tuple[str, int], Callable[[], Any]]]:
    """The variables of loops that the step reads before it sets them: objects, and what reads a plain value."""
    objects: dict[str, Any] = {}
    read: dict[tuple[str, int], Callable[[], Any]] = {}
    for number, frame in enumerate(frames):
        for name in read_first(frame.f_code, lines):
            value = _variable(frame, name)
            if is_plain(value):
                read[name, number] = functools.partial(_variable, frame, name)
            elif not isinstance(value, (torch.Tensor, torch.nn.Module, types.FunctionType, types.ModuleType, type)):
                objects.setdefault(name, value)
    return objects, read


def _variable(frame: types.FrameType, name: str) -> Any:
    return frame.f_locals[name] if name in frame.f_locals else frame.f_globals.get(name)


def read_first(code: types.CodeType, lines: Sequence[Line]) -> list[str]:
    """The variables that code reads before it sets them, if these lines of it run in this order."""
    by_line = _by_line(code)
    found: dict[str, None] = {}
    stored: set[str] = set()
    for one, line in lines:
        if one is code:
            for instruction in by_line.get(line, ()):
                name = instruction.argval
                if instruction.opname in _LOADS and isinstance(name, str) and name not in stored:
                    found.setdefault(name)
                elif instruction.opname in _STORES:
                    stored.add(name)
    return list(found)


def line_of_use(name: str, lines: Iterable[Line]) -> Location | None:
    """The first of these lines that reads a variable or an attribute of this name."""
    last = name.rpartition(".")[2]
    for code, line in lines:
        if any(one.argval == last and one.opname.startswith("LOAD_") for one in _by_line(code).get(line, ())):
            return Location(code.co_filename, line, code.co_name)
    return None


@functools.lru_cache(maxsize=64)
def lines_with(code: types.CodeType, name: str) -> frozenset[int]:
    """The lines of code that have this name in them."""
    return frozenset(line for line, found in _by_line(code).items() if any(one.argval == name for one in found))


@functools.lru_cache(maxsize=512)
def _by_line(code: types.CodeType) -> dict[int, list[dis.Instruction]]:
    found: dict[int, list[dis.Instruction]] = {}
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else None
        if line is not None:
            found.setdefault(line, []).append(instruction)
    return found
