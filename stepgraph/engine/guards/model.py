"""The model guard finds what changed in a model since capture.

A graph holds the addresses of parameters and buffers, and the operations that the modules' code ran at capture. torch
has no event for a changed address or for a deleted attribute of a module, so both are read at each call, in bulk. There
are events for modules, parameters and buffers that are registered again (torch's registration hooks), and for hooks:
the modules are compared only after an event. In-place changes, such as `load_state_dict`, keep every address and need
no new capture.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.guards.hooks import HooksGuard, places_of
from stepgraph.engine.guards.layout import Layouts, layouts_of
from stepgraph.engine.guards.protocol import Change, Remedy
from stepgraph.engine.guards.registration import RegistrationEvents

_requires_grad = operator.attrgetter("requires_grad")
_children = operator.attrgetter("_modules")
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


class ModelGuard:
    """The addresses, flags, modules and hooks that a graph was captured with."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        parameters: Sequence[torch.Tensor],
        name: Callable[[Any], str],
        events: RegistrationEvents,
        *,
        hooked: Sequence[torch.nn.Module] | None = None,
        whole_step: bool = False,
        steady: Sequence[torch.Tensor] = (),
    ) -> None:
        """`hooked`: the modules whose hooks run in the graph; by default all. `steady`: see `GradientGuard`.

        `whole_step`: the graph accumulates gradients, so hooks of parameters run in it, and hooks on all modules of
        the process.
        """
        self._parameters, self._name, self._events = list(parameters), name, events
        known = set(map(id, parameters))
        owned: list[tuple[Any, Mapping[str, Any], str]]
        plain = [m for m in modules if isinstance(m._parameters, dict)]  # TorchScript modules cannot be changed
        owned = [(m, m._buffers, key) for m in plain for key in m._buffers]
        owned += [
            (m, m._parameters, key) for m in plain for key, p in m._parameters.items() if p is None or id(p) in known
        ]
        owned += [(m, m._modules, key) for m in plain for key in m._modules]
        owned += [
            (p, vars(p), key) for p in parameters for key, v in vars(p).items() if issubclass(type(v), torch.Tensor)
        ]
        self._plain = plain
        self._owners = [owner for owner, _, _ in owned]
        self._slots = [(d, key) for _, d, key in owned]
        self._slot_values = [d[key] for d, key in self._slots]
        held = (v for v in self._slot_values if issubclass(type(v), torch.Tensor))
        slots = list(zip(self._slots, self._slot_values, strict=True))
        filled = Counter(id(d) for d, _ in self._slots)
        wholes = {id(d): d for d, _ in self._slots if filled[id(d)] == len(d)}
        self._contents = [(d, dict(d)) for d in wholes.values()]
        self._lone_slots = [slot for slot in slots if id(slot[0][0]) not in wholes]
        self._layouts = Layouts(layouts_of({id(t): t for t in (*parameters, *held)}.values()))
        self._flags = list(map(_requires_grad, self._parameters))
        self._steady = {id(p) for p in steady}
        self._unsteady = [(p, p.requires_grad) for p in parameters if id(p) not in self._steady]
        self._parents = [m for m in plain if m._modules or isinstance(m, _CONTAINERS)]
        self._children = list(map(_children, self._parents))
        self._num_children = self._count_children()
        self._layout = self._read_layout()
        places = places_of(
            modules if hooked is None else hooked, parameters if whole_step else (), everywhere=whole_step
        )
        self._hooks = HooksGuard(places, self._hook_owner)
        self._events_seen = events.count
        events.listen_to(modules)

    def changed(self) -> Sequence[Change]:
        found = self._difference()
        return (Change(found[0], "", found[1], Remedy.START_OVER),) if found is not None else ()

    def _difference(self) -> tuple[str, str] | None:
        if self._slots and not all(map(operator.is_, [d.get(key) for d, key in self._slots], self._slot_values)):
            return self._replaced()
        moved = self._layouts.changed()
        if moved is not None:
            return f"`{self._tensor_name(moved[0])}`", moved[1]
        if list(map(_requires_grad, self._parameters)) != self._flags:
            return self._changed_flag()
        return self._changed_layout() or self._hooks.difference()

    def expect(self, row: GuardRow) -> None:
        """Add the check of `changed` to a row, without the flags and the form of steady parameters."""
        for where, values in self._contents:
            row.contents(where, values)
        for (where, key), value in self._lone_slots:
            row.item(where, key, value)
        self._layouts.expect(row, seen=self._steady)
        for parameter, flag in self._unsteady:
            row.attribute(parameter, "requires_grad", flag)
        row.attribute(self._events, "count", self._events_seen)
        for parent, children, count in zip(self._parents, self._children, self._num_children, strict=True):
            row.attribute(parent, "_modules", children)
            if not count:  # the children of others are checked as contents
                row.length(children, count)
        self._hooks.expect(row)

    def admit_hooks(self, names: Collection[str]) -> None:
        """Ignore hooks of functions with these names: the engine that replays the graph runs them."""
        self._hooks.admit(names)

    def _count_children(self) -> list[int]:
        return list(map(len, map(_children, self._parents)))

    def _replaced(self) -> tuple[str, str]:
        for owner, (where, key), value in zip(self._owners, self._slots, self._slot_values, strict=True):
            if where.get(key) is not value:
                gone = where.get(key) is None
                return f"`{self._name(owner)}.{key}`", "was removed" if gone else "was replaced"
        raise AssertionError("a tensor had been replaced")

    def _tensor_name(self, tensor: torch.Tensor) -> str:
        for owner, (_, key), value in zip(self._owners, self._slots, self._slot_values, strict=True):
            if value is tensor:
                return f"{self._name(owner)}.{key}"
        return self._name(tensor)

    def _hook_owner(self, owner: Any) -> str:
        return self._tensor_name(owner) if isinstance(owner, torch.Tensor) else self._name(owner)

    def _changed_flag(self) -> tuple[str, str]:
        for parameter, before in zip(self._parameters, self._flags, strict=True):
            if parameter.requires_grad != before:
                return f"requires_grad of `{self._tensor_name(parameter)}`", f"is {not before}"
        raise AssertionError("a flag had changed")

    def _read_layout(self) -> list[list[tuple[str, int]]]:
        """List each module's children and tensors, by name and id, in the order that code iterates over them."""
        return [
            [(key, id(value)) for d in (m._modules, m._parameters, m._buffers) for key, value in d.items()]
            for m in self._plain
        ]

    def _changed_layout(self) -> tuple[str, str] | None:
        """Compare the modules, if there was an event."""
        is_same = all(map(operator.is_, map(_children, self._parents), self._children))
        is_same = is_same and all(len(d) == len(copy) for d, copy in self._contents)
        if is_same and self._events.count == self._events_seen and self._count_children() == self._num_children:
            return None
        for module, before, after in zip(self._plain, self._layout, self._read_layout(), strict=True):
            for key, _ in sorted(set(before) ^ set(after)):
                return f"`{self._name(module)}.{key}`", "was added, replaced or removed"
            for (one, _), (two, _) in zip(before, after, strict=True):
                if one != two:
                    return f"`{self._name(module)}`", f"has a new order of its parts: `{two}` before `{one}`"
        self._events_seen = self._events.count
        return None
