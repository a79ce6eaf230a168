"""These guards compare an optimizer inside a graph with its capture: numbers, parameters, state, code.

The numbers are baked into the graph, replays run no step hooks, and the graph holds the addresses of parameters and
state. Most of it is read at each call, which costs little. The state of each parameter is too much for that: only the
entries are read, and the end of a tensor's memory shows that its data was replaced.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.engine.backends.native.row import PLAIN_TENSORS, GuardRow, is_compared_by_identity
from stepgraph.engine.guards.layout import asks_addresses, change_of, layouts_of
from stepgraph.engine.guards.protocol import Change, Remedy
from stepgraph.engine.oplog.optimizer_steps import STEP_HOOKS_OF_ALL, all_have_hooks, step_hooks, without_schedulers

_CODE = ("step", "zero_grad")
_SCALER_NUMBERS = ("growth_factor", "backoff_factor", "growth_interval", "enabled")


class NumbersGuard:
    """The numbers of an optimizer that are baked into a graph."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._hooks = step_hooks(optimizer)
        self._num_hooks = self._count_hooks()
        self._list = optimizer.param_groups
        self._groups = [_GroupNumbers(group) for group in self._list]
        self._row = GuardRow()
        self.expect(self._row)

    def _count_hooks(self) -> list[int]:
        return list(map(len, self._hooks))

    def expect(self, row: GuardRow) -> None:
        row.attribute(self.optimizer, "param_groups", self._list)
        row.length(self._list, len(self._groups))
        for hooks, count in zip(self._hooks, self._num_hooks, strict=True):
            row.length(hooks, count)
        for index, group in enumerate(self._groups):
            row.item(self._list, index, group.group)
            group.expect(row)

    def changed(self) -> Sequence[Change]:
        """Report the first number that changed."""
        if self._row.holds():
            return ()
        groups, name = self.optimizer.param_groups, type(self.optimizer).__name__
        for index, (captured, group) in enumerate(zip(self._groups, groups, strict=False)):
            difference = captured.difference(group)
            if difference is not None:
                key, before, now = difference
                where = f"{name}.param_groups[{index}]{key}"
                return (Change(where, before, now, Remedy.MOVE_OUT, subject=self.optimizer),)
        if self._count_hooks() == self._num_hooks:
            return ()
        return (Change(f"a step hook of {name}", "", "was added or removed", Remedy.MOVE_OUT, subject=self.optimizer),)


class _GroupNumbers:
    """The numbers of one parameter group: plain ones compared by value, tensors by identity and address."""

    def __init__(self, group: dict[str, Any]) -> None:
        keys = [k for k in group if k != "params"]
        self._plain = [k for k in keys if not _has_tensor(group[k])]
        self._values = [list(v) if isinstance(v := group[k], list) else v for k in self._plain]
        self._tensors = [(k, group[k], _address(group[k])) for k in keys if _has_tensor(group[k])]
        self.group = group

    def expect(self, row: GuardRow) -> None:
        if self._tensors or any(isinstance(value, list) for value in self._values):  # these may change in place
            row.ask(lambda: self.difference(self.group) is None)
        else:
            row.items(self.group, dict(zip(self._plain, self._values, strict=True)))

    def difference(self, group: dict[str, Any]) -> tuple[str, str, str] | None:
        """Return the first difference: the key as written after the group, before, now (see `Change`)."""
        for key, value, address in self._tensors:
            if group.get(key) is not value or _address(value) != address:
                return f"[{key!r}]", "", "is a new tensor"
        now = [group.get(k) for k in self._plain]
        if _has_tensor(now):
            return "", "", "has a tensor instead of a number"
        if now == self._values:
            return None
        pairs = zip(self._plain, self._values, now, strict=True)
        return next((f"[{key!r}]", str(one), str(two)) for key, one, two in pairs if one != two)


def _has_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) or (
        issubclass(type(value), (tuple, list)) and any(issubclass(type(v), torch.Tensor) for v in value)
    )


def _address(value: Any) -> Any:
    return value.data_ptr() if issubclass(type(value), torch.Tensor) else [_address(v) for v in value if _has_tensor(v)]


class ParametersGuard:
    """The parameters that an optimizer steps, by group."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]

    def expect(self, row: GuardRow) -> None:
        """Add the check of `changed` to a row, for the present groups."""
        row.length(self._optimizer.param_groups, len(self._groups))
        for group, parameters in self._groups:
            row.item(group, "params", group["params"])
            row.ask(functools.partial(_same_list(parameters), group["params"], parameters))

    def changed(self) -> Sequence[Change]:
        """Report the first group with other parameters."""
        found = self._difference()
        return (Change(*found, Remedy.START_OVER),) if found is not None else ()

    def _difference(self) -> tuple[str, str, str] | None:
        groups, name = self._optimizer.param_groups, f"{type(self._optimizer).__name__}.param_groups"
        if len(groups) != len(self._groups):
            return f"a group of {name}", "", "was added or removed"
        for index, (group, (_, before)) in enumerate(zip(groups, self._groups, strict=True)):
            if len(group["params"]) != len(before):
                return f"a parameter of {name}[{index}]['params']", "", "was added or removed"
            if not _are_the_same(group["params"], before):
                return f"{name}[{index}]['params']", "", "has other parameters, or a new order"
        return None


class StateGuard:
    """The state that a captured optimizer's kernels read and write, and the optimizer's code.

    The guard compares the tensors by identity at each call. New data in one of them (`.data = ...`) is noticed by an
    event: the end of the old memory. Reading all addresses would cost half as much as all other checks. On the host it
    costs little beside a replay, and the tape keeps the memory that its graphs use, so that it does not end: there all
    addresses are read.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._state = optimizer, optimizer.state
        self._kept = list(optimizer.state.values())
        self._copies = self._read_copies()
        tensors = (v for _, copy in self._copies for v in copy.values() if type(v) in PLAIN_TENSORS)
        self._layouts = layouts_of(tensors)
        self._was_freed = False
        on_host = [layout for layout in self._layouts if layout[0].device.type == "cpu"]
        self._is_in_place = asks_addresses(on_host) if on_host else None
        note = functools.partial(_note_freed, weakref.ref(self))
        self._memory = [weakref.ref(layout[0].untyped_storage(), note) for layout in self._layouts]
        self._own_code, self._num_attributes = self._read_code(), len(vars(optimizer))
        self._code = [without_schedulers(getattr(optimizer, name)) for name in _CODE]

    def note_freed(self) -> None:
        """Note that memory of the state was freed."""
        self._was_freed = True

    def expect(self, row: GuardRow) -> None:
        row.attribute(self._optimizer, "state", self._state)
        row.attribute(self, "_was_freed", False)
        if self._is_in_place is not None:
            row.ask(self._is_in_place)
        row.length(self._state, len(self._kept))
        row.ask(functools.partial(_holds_just, self._state, self._kept))
        row.unwritten(self._copies)
        row.length(vars(self._optimizer), self._num_attributes)  # replaced code would be a new attribute
        for name, value in zip(_CODE, self._own_code, strict=True):
            if value is not None:
                row.item(vars(self._optimizer), name, value)
        for hooks in STEP_HOOKS_OF_ALL:
            row.length(hooks, len(hooks))  # including entries of stepgraph itself

    def changed(self) -> Sequence[Change]:
        """Report that the state was loaded or replaced, or the optimizer's code replaced."""
        found = self._difference()
        return (Change(found[0], "", found[1], Remedy.RECAPTURE),) if found is not None else ()

    def _difference(self) -> tuple[str, str] | None:
        name = type(self._optimizer).__name__
        if self._optimizer.state is not self._state or not _are_the_same(list(self._state.values()), self._kept):
            return f"the state of {name}", "was loaded or replaced"
        for kept, copy in self._copies:
            for key, value in copy.items():
                if issubclass(type(value), torch.Tensor) and kept.get(key) is not value:
                    return f"the state of {name}: {key!r}", "was replaced"
        for layout in self._layouts:
            what = change_of(layout)
            if what is not None:
                return f"the state of {name}: a tensor", what
        for attribute, before in zip(_CODE, self._code, strict=True):
            if without_schedulers(getattr(self._optimizer, attribute)) is not before:
                return f"{name}.{attribute}", "was replaced"
        self._own_code, self._num_attributes = self._read_code(), len(vars(self._optimizer))
        self._copies, self._was_freed = self._read_copies(), False
        return ("a step hook of all optimizers", "was added") if all_have_hooks() else None

    def _read_copies(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(kept, dict(kept)) for kept in self._kept if isinstance(kept, dict)]

    def _read_code(self) -> list[Any]:
        return list(map(vars(self._optimizer).get, _CODE))


class ScalerGuard:
    """The numbers of a recorded GradScaler that are baked into its kernels."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._tensors = (scaler._scale, scaler._growth_tracker)
        self._numbers = self._read()

    def _read(self) -> tuple[Any, ...]:
        return tuple(getattr(self._scaler, f"_{name}") for name in _SCALER_NUMBERS)

    def expect(self, row: GuardRow) -> None:
        names = ("scale", "growth_tracker", *_SCALER_NUMBERS)
        for name, value in zip(names, (*self._tensors, *self._numbers), strict=True):
            row.attribute(self._scaler, f"_{name}", value)

    def changed(self) -> Sequence[Change]:
        """Report the first number that changed. The scale itself may change: kernels read it at each replay."""
        scale, tracker = self._tensors
        if self._scaler._scale is not scale or self._scaler._growth_tracker is not tracker:
            return (Change("the state of GradScaler", "", "was loaded or replaced", Remedy.RECAPTURE),)
        now = self._read()
        if now == self._numbers:
            return ()
        pairs = zip(_SCALER_NUMBERS, self._numbers, now, strict=True)
        name, one, two = next(pair for pair in pairs if pair[1] != pair[2])
        return (Change(f"GradScaler {name}", str(one), str(two), Remedy.RECAPTURE),)


def _holds_just(state: dict[Any, Any], kept: list[Any]) -> bool:
    return list(state.values()) == kept  # compares by identity first; others are not equal, or raise, which fails too


def _note_freed(guard: weakref.ref[StateGuard], _: object) -> None:
    found = guard()
    if found is not None:
        found.note_freed()


def _are_the_same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return len(one) == len(two) and all(map(operator.is_, one, two))


def _same_list(parameters: Sequence[torch.Tensor]) -> Callable[[Any, Any], bool]:
    """Return a function that checks that two lists hold the same parameters, by identity.

    Python's `==` of lists compares by identity first, and is five times as fast as a loop; see `GuardRow.contents`.
    """
    return operator.eq if all(map(is_compared_by_identity, parameters)) else _are_the_same
