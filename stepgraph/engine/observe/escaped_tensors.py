"""An escaped tensor is one that a step makes and leaves somewhere: in a dictionary, a list, an object.

In eager each call puts a new tensor there. A replay runs no Python, so the tensor of the capture stays there, in the
graph's own memory, overwritten by each replay. Where the code names the place, the watch has seen it in warm-up. For
deeper places Python's garbage collector is asked: it knows every tensor that was made while the step was recorded, and
who holds it afterwards.

`gc.get_referrers` refers to tuples, and must not keep one that another thread is filling (see `collector`). It is asked
for the holders of a tensor that the recording made, and of the few objects that lead to it. Another thread would have
to fill a tuple with one of these at that very moment.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.collector import address, addresses, collector_at_rest, objects_of
from stepgraph.core.plain_values import attributes_of
from stepgraph.core.wording import with_article
from stepgraph.engine.guards.host_values.naming import Label
from stepgraph.engine.observe.finder import Spot, spots_of

_SEARCHING = threading.RLock()
"""One search at a time: a list of one search would look to another like a place that keeps tensors."""
_DEPTH = 3
"""How many new containers (a dictionary in a list) may lead from a tensor to one that was there before."""


@contextlib.contextmanager
def tracking_new_objects() -> Iterator[None]:
    """Keep objects created in this block in the youngest generation. The collector is off."""
    gc.collect(1)
    with collector_at_rest():
        yield


def is_newborn(value: object) -> bool:
    """Whether an object was made in the block."""
    with _SEARCHING:
        return any(value is young for young in objects_of(type(value), generation=0))


@dataclass(frozen=True, slots=True)
class Place:
    """A place that keeps a tensor, in words, which are also a name for `ignore=` where it has one."""

    label: Label
    is_named: bool = True

    @property
    def name(self) -> str | None:
        """The name to ignore: the container, or for a container in another one, the item of this key."""
        if not self.is_named:
            return None
        return str(self.label if self.label.spelling.count("[") > 1 else self._outermost)

    @property
    def _outermost(self) -> Label:
        return Label(self.label.spelling.partition("[")[0], self.label.apart)

    def is_in(self, ignore: Collection[str]) -> bool:
        return self.is_named and (str(self.label) in ignore or str(self._outermost) in ignore)


def kept_tensor(
    known: Iterable[torch.Tensor],
    recorded: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    step: Any,
    ignore: Collection[str] = (),
) -> Place | None:
    """The place that keeps a tensor which was made in the block; `known` ones may be kept.

    `recorded` selects those in the graph's memory: other threads, a DataLoader's for example, make tensors too. Places
    are spelled as the step's code spells them, where it can; those in `ignore` are skipped.
    """
    with _SEARCHING:
        gc.collect(0)  # what nobody holds is gone
        young = addresses(generation=1)
        made = objects_of(torch.Tensor, generation=1)
        known_ids = {id(tensor) for tensor in known}
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # those of torch.func have no memory of their own
        tensors = recorded([o for o in made if id(o) not in known_ids and not wrapped(o)])
        if not tensors:
            return None
        look = _Look(young, spots_of(step), ignore)
        look.ours.add(id(made))
        return look.holder(tensors, _DEPTH)


class _Look:
    def __init__(self, young: set[int], spots: Mapping[int, Spot], ignore: Collection[str]) -> None:
        self._young, self._spots, self._ignore = young, spots, ignore
        self.ours: set[int] = set()
        """Lists of the search itself, by id."""

    def holder(self, held: list[Any], depth: int) -> Place | None:
        """The first place that is not ignored and holds one of these, directly or through new containers."""
        ids = {id(value) for value in held}
        new: list[Any] = []
        holders = gc.get_referrers(*held)
        self.ours |= {id(held), id(holders), id(new)}
        for holder in holders:
            if id(holder) in self.ours or isinstance(holder, (types.FrameType, torch.Tensor)):
                continue
            if address(holder) in self._young:
                if not isinstance(holder, types.CellType):  # a variable of a call that is over, or of one under way
                    new.append(holder)
                continue
            spot = self._spots.get(id(holder))
            place = _told(holder, ids) if spot is None else _spelled(spot, holder, ids)
            if place is not None and not place.is_in(self._ignore):
                return place
        return self.holder(new, depth - 1) if new and depth > 1 else None


def _spelled(spot: Spot, holder: Any, ids: set[int]) -> Place | None:
    """The place in something that the step's code can spell; attributes of modules are watched elsewhere."""
    if spot.is_models:
        return None
    entries = attributes_of(holder) if spot.is_object and not isinstance(holder, dict) else holder
    if not isinstance(entries, dict):
        return Place(spot.label)
    found = [key for key, value in dict.items(entries) if id(value) in ids]
    return Place(spot.of(found[0]) if found else spot.label)


def _told(holder: Any, ids: set[int]) -> Place | None:
    """The place in a holder, if the holder is the user's."""
    if isinstance(holder, types.CellType):
        return next((Place(Label(name, f" ({_spell(function)})")) for function, name in _functions_with(holder)), None)
    if isinstance(holder, dict):
        key = next((key for key, value in holder.items() if id(value) in ids), None)
        owner = next((o for o in gc.get_referrers(holder) if getattr(o, "__dict__", None) is holder), None)
        if owner is not None:
            return Place(Label(f"{_spell(owner)}.{key}")) if _is_users(owner) else None
        return _place(holder, f"[{_spell_key(key)}]")
    if isinstance(holder, (list, set, frozenset, tuple)) or type(holder).__module__ == "collections":
        return _place(holder)
    return Place(Label(f"an object of {type(holder).__qualname__}"), is_named=False) if _is_users(holder) else None


def _functions_with(cell: types.CellType) -> Iterator[tuple[types.FunctionType, str]]:
    """The user's functions that share a variable, and its name."""
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if isinstance(function, types.FunctionType) and _is_users(function):
                for name, held in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    if held is cell:
                        yield function, name


def _owners(container: Any) -> Iterator[tuple[Any, str]]:
    """Objects that have a container as an attribute, with its name; a weak dictionary counts for its contents."""
    for owner, name in _direct_owners(container):
        if isinstance(owner, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            yield from _owners(owner)
        else:
            yield owner, name


def _direct_owners(container: Any) -> Iterator[tuple[Any, str]]:
    for holder in gc.get_referrers(container):
        if isinstance(holder, dict):
            name = next((key for key, value in holder.items() if value is container), "")
            name = name if isinstance(name, str) else _spell_key(name)
            for owner in gc.get_referrers(holder):
                if getattr(owner, "__dict__", None) is holder:
                    yield owner, name
        elif hasattr(type(holder), "__dict__") and hasattr(holder, "__dict__"):
            for name, value in list(vars(holder).items()):
                if value is container:
                    yield holder, name


def _place(container: Any, item: str = "") -> Place | None:
    """The place of a container that somebody holds (unless that one is frozen), and nobody of ours does."""
    owners = list(_owners(container))
    holders = (h for h in gc.get_referrers(container) if not isinstance(h, types.FrameType))
    if not any(True for _ in holders) or not all(_is_users(owner) for owner, _ in owners):
        return None
    for owner, name in owners:
        return Place(Label(f"{_spell(owner)}.{name}{item}"))
    return Place(Label(f"{with_article(type(container))}{item}"), is_named=False)


def _is_users(owner: Any) -> bool:
    """Not torch's or ours; attributes of modules are watched elsewhere."""
    if isinstance(owner, (torch.nn.Module, torch.optim.Optimizer)):
        return False
    kind = owner if isinstance(owner, type) else type(owner)
    name = owner.__name__ if isinstance(owner, types.ModuleType) else kind.__module__
    name = owner.__module__ or "" if isinstance(owner, types.FunctionType) else name
    return name.partition(".")[0] not in ("torch", "stepgraph", "gc", "weakref")


def _spell_key(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__  # to write a tensor out is to read it


def _spell(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__qualname__)
