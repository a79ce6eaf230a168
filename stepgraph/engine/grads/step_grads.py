"""A captured step leaves `.grad` as eager would, in memory that all graphs of a session agree on.

A graph writes gradients to fixed addresses, and `.grad` is attached to them after each replay. The session keeps one
address for each parameter (`GradBuffers`): the first graph that makes a gradient gives it its address, later graphs
copy theirs there as their last node. So any number of graphs share one set of gradients.

A gradient that is a view of the user's own memory (a piece of a flat buffer) and that the step adds to stays where it
is. The graph adds to it there, if it is the first such graph, or the result is copied there after each replay. A call
that finds another gradient in its place gets the result in that one, and the memory of the first is as it was.

The content of `.grad` before the call is harder. Most steps drop it (`zero_grad()` comes first), some add to it, a few
read it first. CUDA does not say which. But if the old gradient's memory died before anything was recorded, the graph
cannot use its address: then nothing is copied in, and the capture may use its memory. So the first try drops the old
gradients and notes when they die, with a copy in host memory in case the capture fails. If one outlives the first node,
the recording is dropped (nothing has run). It is made again with the old gradients at the session's addresses, to which
each later call's `.grad` is copied.

A gradient at the session's address, or in the user's memory, survives the recording in any case. A placeholder takes
its place (`_stand_in`), so that its release can be detected. On CUDA it is at the same address, since
nothing runs while a graph is recorded. It takes no memory, and a step that begins to use its old gradients after the
capture (`zero_grad()` is no longer called) is recorded with good addresses, noticed, and recorded again as above.

Memory that Python can reach between calls must not be where another graph writes. Graphs that are captured later cannot
get it while it is held. But a graph that was captured earlier may have used it for its intermediates, and freed it. So
the first graph of a session leaves gradients where autograd makes them. If a later one makes a gradient that has no
address yet, it gets one outside the pool (`move_out`), and the recording is made again.

Two parameters may be given one gradient (`shared.grad = local.grad`). It has the place of the first one, and replays
give it to both, as one tensor or as views of it. The next call that finds that runs eagerly (`are_exchanged`).

Within a step a gradient may be kept, dropped from its parameter, and made again (two backwards in one step). The second
one is copied to the address only if the step no longer uses the first (`_Seen`). Otherwise that waits for the end.

An audit records a call whose gradients have their addresses already. A second set of them would be a large part of all
memory, so each new gradient moves to its address as soon as it is made (`moving_at_once`), and its own memory is free.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from stepgraph.core.errors import CaptureError
from stepgraph.core.storage import shape_of, special_kind
from stepgraph.engine.oplog import current_log, left_out

Attachment = list[tuple[torch.Tensor, torch.Tensor | None]]
"""Parameters and the tensors that become their `.grad`."""
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Addresses and the gradients to copy there."""
Note = Callable[[torch.Tensor], None]
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_ALIGNED = 64
"""Bytes; no dtype needs more."""


def attach(attachment: Attachment) -> None:
    """Set each `.grad` to its tensor."""
    for parameter, grad in attachment:
        if parameter.grad is not grad:
            parameter.grad = grad


class GradBuffers:
    """The address at which a session keeps each parameter's gradient."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        found = self._kept.get(id(parameter))
        return found[1] if found is not None else None

    def are_exchanged(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Check whether a parameter has the gradient of another one."""
        return are_exchanged([(parameter.grad, self.get(parameter)) for parameter in parameters])

    def keep(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self._kept[id(parameter)] = (parameter, grad)

    def clear(self) -> None:
        self._kept.clear()


@dataclass(slots=True)
class _Entry:
    """A gradient that was there when the capture began, and how to bring it back."""

    parameter: torch.Tensor
    kept: torch.Tensor | None
    """The tensor that `.grad` was, if it must stay: the session's buffer, or a view of the user's memory."""
    on_host: torch.Tensor | None
    alive: weakref.ref[torch.Tensor] | None

    def restore(self) -> None:
        grad = self.kept
        if grad is None and self.alive is not None:
            grad = self.alive()
        if grad is None:
            assert self.on_host is not None
            shape, stride, dtype = self.on_host.shape, self.on_host.stride(), self.on_host.dtype
            grad = torch.empty_strided(shape, stride, dtype=dtype, device=self.parameter.device).copy_(self.on_host)
        self.parameter.grad = grad


class _Seen:
    """The gradients that the step sees while it is recorded.

    The step may keep a gradient, drop it from its parameter, and make another one. Then the new one must not be copied
    to the address of the first. So the step and the recording have different tensors over the same memory. What the
    step uses, it or its views, shows in the number of tensors.
    """

    def __init__(self) -> None:
        self._own: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        """The step's tensor, and the recording's own over the same memory, by parameter id."""
        self._unused: dict[int, int] = {}
        """The number of tensors over a parameter's address while the step uses none of them."""
        self._alone = _num_tensors_over(torch.empty(1, device="cpu"))

    def is_new(self, parameter: torch.Tensor) -> bool:
        """True if the step has made the present gradient since the last look."""
        known = self._own.get(id(parameter))
        return known is None or known[0]() is not parameter.grad

    def own(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the recording's tensor for a gradient that is not new."""
        return self._own[id(parameter)][1]

    def note(self, parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Note the recording's tensor for the present gradient."""
        assert parameter.grad is not None
        self._own[id(parameter)] = (weakref.ref(parameter.grad), own)
        return own

    def take(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Leave a gradient where it was made. Return the recording's tensor."""
        return self.note(parameter, _over_same_memory(grad))

    def follow(self, parameter: torch.Tensor, owner: torch.Tensor) -> None:
        """The step has given a parameter the gradient of another one, or a view of it: it goes where that one is."""
        grad, own = parameter.grad, self.own(owner)
        assert grad is not None
        if not _same_layout(grad, own):
            with left_out(), torch.no_grad():
                own = own.as_strided(grad.shape, grad.stride())
        parameter.grad = owner.grad if own is self.own(owner) else own
        self.note(parameter, own)

    def count(self, parameter: torch.Tensor) -> None:
        """From now on the place of the present gradient is the parameter's address."""
        is_separate = self.own(parameter) is not parameter.grad
        self._unused[id(parameter)] = self._alone if is_separate else sys.maxsize

    def show(self, parameter: torch.Tensor, kept: torch.Tensor) -> None:
        """Set `.grad` to a tensor over the address `kept`."""
        self._unused.setdefault(id(parameter), _num_tensors_over(kept))
        parameter.grad = _over_same_memory(kept)
        self.note(parameter, kept)

    def uses(self, parameter: torch.Tensor, kept: torch.Tensor) -> bool:
        """Check whether the step uses an earlier gradient at the address `kept`."""
        return _num_tensors_over(kept) > self._unused.get(id(parameter), sys.maxsize)


class GradCapture:
    """Gradients during one recording. `hold` keeps the old gradients, as the module's docstring explains."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: GradBuffers,
        recorded_anything: Callable[[], bool],
        *,
        hold: bool,
        has_addresses: bool = False,
    ) -> None:
        """`has_addresses`: the call has a graph already, which does not use the old gradients."""
        self._parameters = list(parameters)
        self._buffers = buffers
        self._recorded_anything = recorded_anything
        self._hold = hold
        self._has_addresses = has_addresses
        self._entries: list[_Entry] = []
        self._empty = [p for p in parameters if p.grad is None]
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._died_in_time = 0
        self._seen = _Seen()
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Parameters and the addresses of their gradients, by parameter id."""
        self._views: Attachment = []
        """Gradients in the user's own memory, which are restored before the first replay."""
        self.loaded: list[torch.Tensor] = []
        """Buffers that were written to for the recording's first replay."""
        self.added_to: set[int] = set()
        """Parameters, by id, that had a gradient before, to which the step adds."""
        self.carried_in: Attachment = []
        """Parameters whose `.grad` must be at its buffer before a replay, with that buffer."""

    def begin(self) -> None:
        """Prepare `.grad` for the recording."""
        found = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for _, grad in found:
            refuse_sparse(grad)
        if self._hold:
            for parameter, grad in found:
                self._hold_entry(parameter, grad)
        else:
            self._release(found)
        for parameter, _ in found if self._hold else ():
            assert parameter.grad is not None
            self._seen.show(parameter, parameter.grad)

    def _hold_entry(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        kept = self._buffers.get(parameter)
        if kept is None or not _same_layout(kept, grad):
            kept = grad
        elif kept is not grad:
            kept.copy_(grad)
            self.loaded.append(kept)
            parameter.grad = kept
            if _is_part(grad):
                self._views.append((parameter, grad))
        if kept is not grad or not _is_part(grad):  # memory of the user's is this graph's at most, never the session's
            self._made[id(parameter)] = (parameter, kept)
        self.added_to.add(id(parameter))
        self.carried_in.append((parameter, kept))
        self._entries.append(_Entry(parameter, grad, None, None))

    def _release(self, found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Leave the gradients to the recording, and note when they die."""
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter, grad in found:
            if self._buffers.get(parameter) is grad or _is_part(grad):  # memory that others know outlives the recording
                self._entries.append(_Entry(parameter, grad, None, None))
                parameter.grad = _stand_in(grad)
            else:
                own.append((parameter, grad))
        for (parameter, grad), copy in zip(own, copies_on_host([grad for _, grad in own]), strict=True):
            self._entries.append(_Entry(parameter, None, copy, weakref.ref(grad)))
        for parameter, _ in found:
            assert parameter.grad is not None
            self._watches.append(weakref.ref(parameter.grad.untyped_storage(), self._died))

    def _died(self, _: object) -> None:
        self._died_in_time += not self._recorded_anything()

    @property
    def entries_unused(self) -> bool:
        """True if the recording provably does not use the old gradients."""
        return self._hold or self._died_in_time == len(self._watches)

    def end_segment(self, *, last: bool = False) -> Attachment:
        """While recording, bring new gradients to their addresses. Return each `.grad` from here on."""
        pairs: Pairs = []
        owners: dict[tuple[int, int], torch.Tensor] = {}
        followers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in self._parameters:
            grad, made = parameter.grad, self._made.get(id(parameter))
            if grad is None:
                continue
            if (owner := owners.setdefault((_place(grad), grad.numel()), parameter)) is not parameter:
                followers.append((parameter, owner))
            elif self._seen.is_new(parameter):
                pairs += self._bring(parameter, grad)
            elif last and made is not None and (own := self._seen.own(parameter)) is not made[1]:
                pairs += self._bring(parameter, own)  # it had to stay where it was made
        _copy(pairs)
        for parameter, owner in followers:
            self.added_to.discard(id(parameter))
            self._seen.follow(parameter, owner)
        found, following = self.left(), {id(p) for p, _ in followers}
        ended = [(p, grad) for p, grad in found if last and grad is not None and id(p) not in following]
        self._made.update({id(p): (p, grad) for p, grad in ended if id(p) in self._made})
        return found

    def left(self) -> Attachment:
        """Return each `.grad` that the step has now, as replays set it."""
        is_known = [p.grad is not None and not self._seen.is_new(p) for p in self._parameters]
        return [
            (p, self._seen.own(p) if known else p.grad) for p, known in zip(self._parameters, is_known, strict=True)
        ]

    def _bring(self, parameter: torch.Tensor, grad: torch.Tensor) -> Pairs:
        """Choose the place of a gradient. Return its address and the gradient if it is to be copied there."""
        key, seen = id(parameter), self._seen
        self.added_to.discard(key)  # what the step adds to from here on is its own
        refuse_sparse(grad)
        made = self._made.get(key)
        kept = made[1] if made is not None else self._buffers.get(parameter)
        if kept is None or not _same_layout(kept, grad):
            self._made[key] = (parameter, seen.take(parameter, grad))
            seen.count(parameter)
        elif kept is grad:
            self._made[key] = (parameter, kept)
            seen.note(parameter, kept)
        elif seen.uses(parameter, kept):
            seen.take(parameter, grad)
        else:
            log = current_log()
            if log is not None:
                log.is_same(kept, grad)
            self._made[key] = (parameter, kept)
            seen.show(parameter, kept)
            return [(kept, grad)]
        return []

    @contextlib.contextmanager
    def moving_at_once(self) -> Iterator[None]:
        """While a call that has addresses is recorded again, bring each new gradient there when it is made."""
        known = self._parameters if self._has_addresses else ()
        parameters = [p for p in known if p.requires_grad and self._buffers.get(p) is not None]
        untouched = [p for p in parameters if p._post_accumulate_grad_hooks is None]
        handles = [parameter.register_post_accumulate_grad_hook(self._move) for parameter in untouched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in untouched:
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def _move(self, parameter: torch.Tensor) -> None:
        grad, kept = parameter.grad, self._buffers.get(parameter)
        if grad is not None and kept is not None and self._seen.is_new(parameter) and _same_layout(kept, grad):
            _copy(self._bring(parameter, grad))

    def move_out(self, held: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> bool:
        """Give new gradients that are in the pool, as `held` tells, addresses outside of it, for another recording.

        Return False if there are none. Call it if graphs were captured before: they may write where gradients are now.
        """
        made = [(p, grad) for p, grad in self._made.values() if self._buffers.get(p) is not grad]
        inside = set(map(id, held([grad for _, grad in made])))
        with torch.inference_mode(False):
            for parameter, grad in made:
                if id(grad) in inside and not self._has_addresses:  # else it may be that gradients moved too early
                    self._buffers.keep(parameter, _in_new_memory(grad))
        return bool(inside)

    def commit(self) -> None:
        """Accept the recording: the session keeps its addresses, and `.grad` is ready for a replay."""
        self._watches.clear()
        attach(self.carried_in)
        attach([(parameter, None) for parameter in self._empty])
        attach(self._views)
        for parameter, grad in self._made.values():
            self._buffers.keep(parameter, grad)

    def commit_ahead(self) -> None:
        """Accept a recording that is not replayed now: the session keeps its addresses, `.grad` is as before."""
        made = list(self._made.values())
        self.rollback()
        for parameter, grad in made:
            self._buffers.keep(parameter, grad)

    def rollback(self) -> None:
        """Restore `.grad` as before the recording."""
        self._watches.clear()
        for entry in self._entries:
            entry.restore()
        for parameter in self._empty:
            parameter.grad = None
        self._made.clear()
        self._seen = _Seen()


def _copy(pairs: Pairs) -> None:
    if pairs:
        with torch.no_grad(), left_out():
            torch._foreach_copy_([kept for kept, _ in pairs], [grad for _, grad in pairs])


def _num_tensors_over(tensor: torch.Tensor) -> int:
    """Count the tensors over the memory of one, Python's handle of the memory included."""
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata)


def _in_new_memory(grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)


def _stand_in(grad: torch.Tensor) -> torch.Tensor:
    """A gradient of the same form, in place of one that others know, and that ends when the step drops it.

    On CUDA it needs no memory of its own: while a graph is recorded, nothing is written. It must not be without memory
    either: a step may have begun to use its old gradients, and a copy from address 0 is an error of the driver. Then
    the recording would fail, in place of showing the use. The tape runs what it records, so it gets other memory.
    """
    return at_same_address(grad) if grad.is_cuda and grad.numel() else torch.empty_like(grad)


def at_same_address(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form at the same address, in a storage of its own, which ends with its last tensor.

    The new storage keeps the memory alive, not the other way round. DLPack makes one without a copy; it is given plain
    bytes, since it does not know all dtypes and changes the strides of dimensions of size one.
    """
    num_bytes = tensor.element_size()
    begin, last = tensor.storage_offset() * num_bytes, map(_last_element, tensor.shape, tensor.stride())
    form = ((sum(last) + 1) * num_bytes,), (1,)
    with torch.no_grad():
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(tensor.untyped_storage(), begin, *form)
        storage = from_dlpack(to_dlpack(raw)).untyped_storage()
        found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return found.set_(storage, 0, tensor.shape, tensor.stride())


def _last_element(size: int, stride: int) -> int:
    return (size - 1) * stride


def copies_on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors that fill their memory to the host, with the same strides.

    The first write to new memory of a process is slow: one thread enters it into the page table more slowly than a GPU
    sends the data. So all copies are in one piece of memory, to which many threads write zeros first. That takes at
    most half the time.
    """
    begins = list(accumulate((-(-t.nbytes // _ALIGNED) * _ALIGNED for t in tensors), initial=0))
    with torch.no_grad():
        memory = torch.zeros(begins[-1], dtype=torch.uint8, device="cpu")
        return [
            _strided_view(memory[begin : begin + t.nbytes], t).copy_(t)
            for begin, t in zip(begins[:-1], tensors, strict=True)
        ]


def _strided_view(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class Carried:
    """Gradients that a replay was given in other memory, and must return there."""

    views: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Parameters, gradients that the user holds or in the user's memory, and the graph's own gradients."""
    borrowed: list[tuple[torch.Tensor, torch.Tensor]]
    """The user's memory that the graph uses in place of another gradient, and its former contents."""


def can_carry_in(carried: Attachment) -> bool:
    """True if gradients have the strides of the recorded ones, and none is another parameter's.

    Other strides change the order of a sum.
    """
    found = [(parameter.grad, kept) for parameter, kept in carried if kept is not None]
    if all(grad is kept for grad, kept in found):
        return True
    fits = all(grad is kept or (grad is not None and grad.stride() == kept.stride()) for grad, kept in found)
    return fits and not are_exchanged(found)


def are_exchanged(gradients: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> bool:
    """Check whether two parameters have one gradient, or one has the other's. Each comes with the address kept for it.

    In eager the next backward adds to the gradient that is there, whoever's it was. A graph adds to each parameter's
    own address.
    """
    dense = ((grad, kept) for grad, kept in gradients if grad is not None and grad.layout is torch.strided)
    now = [(grad.data_ptr(), kept) for grad, kept in dense if grad.numel()]
    places = Counter(place for place, _ in now)
    places.update({kept.data_ptr() for _, kept in gradients if kept is not None and kept.numel()})
    return any(places[place] > (1 + (kept is not None and kept.data_ptr() == place)) for place, kept in now)


def carry_in(carried: Attachment, note_loaded: Note | None = None) -> Carried | None:
    """Before a replay, bring `.grad` to the address that the graph reads. Return None if it is there already.

    `note_loaded` is called with memory that is written to.
    """
    found, note = Carried([], []), note_loaded if note_loaded is not None else _nobody
    for parameter, kept in carried:
        grad = parameter.grad
        if grad is not kept:
            assert grad is not None, "a call without gradients has another signature"
            assert kept is not None
            is_lent = _is_part(kept) and not is_same_memory(grad, kept)
            if is_lent:
                found.borrowed.append((kept, kept.clone()))
            kept.copy_(grad)
            note(kept)
            is_theirs, alive = is_lent or _is_part(grad), weakref.ref(grad)
            held = grad if is_theirs else None
            parameter.grad, grad = kept, None
            held = held if held is not None else alive()  # whoever holds it would see what eager adds to it
            if held is not None:
                found.views.append((parameter, held, kept))
    return found if found.views else None


def carry_out(carried: Carried, added_to: Container[int], note_loaded: Note | None = None) -> None:
    """After a replay, copy the result to the user's own gradients if the step has added to them, as eager does."""
    note = note_loaded if note_loaded is not None else _nobody
    for parameter, view, kept in carried.views:
        if id(parameter) in added_to:
            view.copy_(kept)
            note(view)
            if parameter.grad is kept:
                parameter.grad = view
    for memory, before in carried.borrowed:
        memory.copy_(before)
        note(memory)


def _nobody(_: torch.Tensor) -> None:
    """Ignore the call."""


def is_same_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    """True if two tensors start at the same address and have the same strides."""
    return one.data_ptr() == two.data_ptr() and one.stride() == two.stride()


def _place(grad: torch.Tensor) -> int:
    """The address of a gradient, or of the tensor that has none."""
    return grad.data_ptr() if grad.layout is torch.strided and grad.numel() else id(grad)


def _is_part(grad: torch.Tensor) -> bool:
    """True if a gradient is in memory that another tensor may use: a view, a piece of a flat buffer."""
    return grad._is_view() or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size()


def _over_same_memory(grad: torch.Tensor) -> torch.Tensor:
    """Return another tensor over a gradient's memory, or the gradient itself if others are there anyway."""
    if grad.requires_grad or _is_part(grad):
        return grad
    with left_out():
        return grad.data


def refuse_sparse(grad: torch.Tensor | None) -> None:
    """Refuse a gradient that is no strided memory: a sparse one, mostly."""
    special = special_kind(grad) if grad is not None else ""
    if grad is not None and special:
        raise CaptureError(
            f"a parameter of shape {list(shape_of(grad))} has a gradient that is a {special}",
            rule="sparse-grad",
            why="a sparse gradient has as many entries as the batch has rows, so its memory changes from call to call.",
            fix="use dense gradients (nn.Embedding(..., sparse=False)).",
        )


def still_in_use(step: str) -> CaptureError:
    """Make the error for a gradient that no recording could bring to its address."""
    return CaptureError(
        f"{step}: the step makes a gradient of a parameter while an earlier one is in use until its end",
        rule="held-gradient",
        why="graphs of this session share one address for each parameter's gradient. The earlier gradient is there.",
        fix="clone the earlier gradient (`p.grad.clone()`), or give the step a session of its own.",
    )


def _same_layout(one: torch.Tensor, two: torch.Tensor) -> bool:
    same_place = one.device == two.device and one.dtype == two.dtype
    return same_place and one.shape == two.shape and one.stride() == two.stride()
