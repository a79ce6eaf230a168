"""Guards over a model: what a graph has baked in, and whether it is still so.

A graph knows its parameters and buffers by address, and its modules' code by what ran at capture. Nothing in torch
tells when an address moves, so addresses are read at each call, in bulk; what can be told by an event is: modules,
parameters and buffers that are registered anew (torch's registration hooks) and hooks that are added (torch numbers
every hook it hands out, so an unchanged number means that there is no new one). Only after an event is the model
looked through. In-place changes, such as `load_state_dict`, keep every address and are right without a word.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from stepgraph.errors import CaptureError
from stepgraph.state.registration import RegistrationEvents
from stepgraph.state.untouched import Untouched

_data_ptr = torch.Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")
_children = operator.attrgetter("_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _compare_addresses(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
    return list(map(_data_ptr, tensors)) == addresses


# torch's builds for CUDA have this in C++
_same_addresses: Callable[[list[torch.Tensor], list[int], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _compare_addresses
)


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
        places: bool = False,
    ) -> None:
        """`hooked`: the modules whose hooks are in the graph, not all. `places`: look at parameters' places, too.

        A parameter that takes another's place by way of its module is told by an event. `places` is for those that
        take it without a word, as torch.func.functional_call does.
        """
        self._modules, self._parameters, self._name, self._events = tuple(modules), list(parameters), name, events
        self._with_hooks = tuple(modules if hooked is None else hooked)
        owned: list[tuple[torch.nn.Module, Mapping[str, torch.Tensor | None], str]]
        owned = [(m, m._buffers, key) for m in modules for key in m._buffers]  # `.to()` replaces them without a word
        if places:
            known = set(map(id, parameters))
            owned += [(m, m._parameters, key) for m in modules for key, p in m._parameters.items() if id(p) in known]
        self._owners = [m for m, _, _ in owned]
        self._slots = [(d, key) for _, d, key in owned]
        self._slot_values = [d[key] for d, key in self._slots]
        self._tensors = list({id(t): t for t in (*parameters, *self._slot_values) if t is not None}.values())
        self._addresses = list(map(_data_ptr, self._tensors))
        self._indices = list(range(len(self._tensors)))
        self._flags = list(map(_requires_grad, self._parameters))
        self._parents = [m for m in modules if m._modules]
        self._num_children = self._count_children()
        self._layout = self._read_layout()
        self._admitted: frozenset[str] = frozenset()
        self._hooks = self._read_hooks()
        self._hooked = [hooks for hooks in self._hook_dicts() if hooks]
        self._events_seen, self._handles_seen = events.count, RemovableHandle.next_id
        events.listen_to(modules)

    def changed(self, *, flags_seen: bool = False) -> str | None:
        """What is not as it was, by name; None in a few microseconds where all is.

        `flags_seen`: the caller has just seen that each `requires_grad` is as it was.
        """
        if self._slots and not all(map(operator.is_, [d.get(key) for d, key in self._slots], self._slot_values)):
            return self._replaced()
        if not _same_addresses(self._tensors, self._addresses, self._indices):
            return self._moved()
        if not flags_seen and list(map(_requires_grad, self._parameters)) != self._flags:
            return self._changed_flag()
        return None if self._is_quiet() else self._look_through()

    def expect(self, row: Untouched) -> None:
        """What `changed` comes down to, but for the flags."""
        for (where, key), value in zip(self._slots, self._slot_values, strict=True):
            row.item(where, key, value)
        row.ask(functools.partial(_same_addresses, self._tensors, self._addresses, self._indices))
        row.ask(self._is_quiet)

    def _is_quiet(self) -> bool:
        """Whether no event tells of a change since the last look."""
        return (
            self._events.count == self._events_seen
            and RemovableHandle.next_id == self._handles_seen
            and self._count_children() == self._num_children
            and all(self._hooked)
        )

    def _count_children(self) -> list[int]:
        return list(map(len, map(_children, self._parents)))

    def _look_through(self) -> str | None:
        """Look at modules and hooks, after an event."""
        if self._events.count != self._events_seen or self._count_children() != self._num_children:
            layout = self._read_layout()
            if layout != self._layout:
                return self._changed_layout(layout)
            self._events_seen = self._events.count
        if RemovableHandle.next_id != self._handles_seen or not all(self._hooked):
            hooks = self._read_hooks()
            if hooks != self._hooks:
                return self._changed_hooks(hooks)
            self._handles_seen = RemovableHandle.next_id
        return None

    def _replaced(self) -> str:
        for owner, (where, key), value in zip(self._owners, self._slots, self._slot_values, strict=True):
            if where.get(key) is not value:
                return f"`{self._name(owner)}.{key}` was {'replaced' if key in where else 'removed'}"
        raise AssertionError("a tensor had been replaced")

    def _moved(self) -> str:
        for tensor, before in zip(self._tensors, self._addresses, strict=True):
            if tensor.data_ptr() != before:
                return f"`{self._tensor_name(tensor)}` moved to another address"
        raise AssertionError("a tensor had moved")

    def _tensor_name(self, tensor: torch.Tensor) -> str:
        for owner, (_, key), value in zip(self._owners, self._slots, self._slot_values, strict=True):
            if value is tensor:
                return f"{self._name(owner)}.{key}"
        return self._name(tensor)

    def _changed_flag(self) -> str:
        for parameter, before in zip(self._parameters, self._flags, strict=True):
            if parameter.requires_grad != before:
                return f"requires_grad of `{self._tensor_name(parameter)}` is {not before}"
        raise AssertionError("a flag had changed")

    def _read_layout(self) -> list[set[tuple[str, int]]]:
        """Each module's children and tensors, by name and identity."""
        return [
            {(key, id(value)) for d in (m._modules, m._parameters, m._buffers) for key, value in d.items()}
            for m in self._modules
        ]

    def _changed_layout(self, now: list[set[tuple[str, int]]]) -> str:
        for module, before, after in zip(self._modules, self._layout, now, strict=True):
            for key, _ in sorted(before ^ after):
                return f"`{self._name(module)}.{key}` was added, replaced or removed"
        raise AssertionError("the layout had changed")

    def _hook_dicts(self) -> Iterator[dict[int, Any]]:
        return (getattr(m, kind) for m in self._with_hooks for kind in _HOOKS)

    def admit_hooks(self, names: Collection[str]) -> None:
        """Let hooks of functions of these names come and go: whoever replays the graph runs them."""
        self._admitted = frozenset(names)

    def _read_hooks(self) -> list[tuple[int, ...]]:
        if not self._admitted:
            return [tuple(hooks) for hooks in self._hook_dicts()]
        return [tuple(k for k, h in hooks.items() if spelled(h) not in self._admitted) for hooks in self._hook_dicts()]

    def _changed_hooks(self, now: list[tuple[int, ...]]) -> str:
        index = next(i for i, (a, b) in enumerate(zip(self._hooks, now, strict=True)) if a != b)
        module, kind = self._with_hooks[index // len(_HOOKS)], _HOOKS[index % len(_HOOKS)]
        return f"a hook of `{self._name(module)}` was added or removed ({kind.strip('_')})"


def refuse_hooks(
    step: str, modules: Sequence[torch.nn.Module], safe: Collection[Any], name: Callable[[Any], str]
) -> None:
    """Refuse hooks on captured modules, which would not run at replay, but for those listed as safe and torch's own."""
    for module in modules:
        for kind in _HOOKS:
            for hook in getattr(module, kind).values():
                if hook in safe or spelled(hook) in safe or _is_torchs(hook):
                    continue
                raise CaptureError(
                    f"{step}: module `{name(module)}` has a hook, `{spelled(hook)}` ({kind.strip('_')})",
                    rule="module-hook",
                    why="a hook is Python code: it would run when the step is captured, and not at replays.",
                    fix="remove it, or, if all it does is tensor work that may be recorded, admit it: "
                    f"stepgraph.capture(step, safe_hooks=[{spelled(hook)!r}]).",
                )


def spelled(hook: Any) -> str:
    """The name of a hook's function, or of its class."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _is_torchs(hook: Any) -> bool:
    """Hooks of torch.nn.utils (weight_norm, spectral_norm, prune): tensor work that replays as recorded."""
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return str(origin).startswith("torch.")
