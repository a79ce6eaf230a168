"""`UsesWatch` shows, in the backwards of eager calls, whether a part is the only source of a gradient.

Only tensors with several uses inside a part are watched. Of a tensor with one use, autograd gets the same share from a
graph as from eager code. But a reentrant checkpoint adds the shares of its inside to `.grad` at once, and autograd adds
those of its outside later. So with such a checkpoint a parameter with one use beside it is watched, too.

The bits of a sum do not show its sources: a penalty gives nothing to a bias that is still zero. So the gradients of a
parameter's uses go to autograd as tensors that note each addition (`_Marked`). They end where the parameter's gradient
arrives, so that no other code sees them. A parameter with hooks is not watched. Its gradient passes through autograd in
any case.

The gradient of an argument may pass hooks before it arrives. So the part's own sum is made beside autograd's, in the
same order, and their bits are compared.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stepgraph.engine.grads.other_uses import OtherUses, same_bits
from stepgraph.engine.record.pair.cached_casts import CastWatch
from stepgraph.engine.record.pair.call import EagerCall
from stepgraph.engine.record.pair.uses import Edge, edge_of, is_reentrant, uses_behind

Grads = Sequence[torch.Tensor | None]


class _Marked(torch.Tensor):
    """The gradient of a use, or a sum of such gradients of one call."""

    plain: torch.Tensor
    source: _OfParameter

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(plain: torch.Tensor, source: _OfParameter) -> _Marked:
        """Mark a gradient."""
        made: _Marked = torch.Tensor._make_subclass(_Marked, plain)  # with its memory, which autograd looks after
        made.plain, made.source = plain, source
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves out what is empty
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        marked = [arg for arg in args if isinstance(arg, _Marked)]
        value = func(*map(_plain, args), **{key: _plain(arg) for key, arg in (kwargs or {}).items()})
        source, num_tensors = marked[0].source, sum(isinstance(arg, torch.Tensor) for arg in args)
        if len(marked) == num_tensors and all(each.source is source for each in marked):
            return _Marked.of(value, source) if isinstance(value, torch.Tensor) else value
        for each in marked:
            each.source.has_others = True
        return value


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, _Marked) else value


class _OfParameter:
    """The uses of one parameter in one call."""

    def __init__(self, parameter: torch.Tensor, edge: Edge, uses: Sequence[Edge]) -> None:
        self.parameter, self._node = parameter, edge[0]
        self.has_others = False
        """True if a gradient of something else was added to those of the uses."""
        self.is_shown = False
        """True if a backward has accumulated them."""
        arrival = weakref.WeakMethod(self._arrive)  # the node may live on without the call's graph

        def arrive(grads: Grads) -> Grads | None:
            method = arrival()
            return None if method is None else method(grads)

        self._handle = self._node.register_prehook(arrive)
        for use, index in uses:
            use.register_hook(functools.partial(self._mark, index))

    def _mark(self, index: int, grads: Grads, _: Any) -> Grads | None:
        """The hook of a use; `index` is that of its gradient."""
        grad = grads[index]
        if type(grad) is not torch.Tensor or grad.layout is not torch.strided or not self._will_arrive():
            return None
        self.is_shown = True
        return tuple([_Marked.of(grad, self) if i == index else other for i, other in enumerate(grads)])

    def _will_arrive(self) -> bool:
        """True if the running backward accumulates the gradient, and no hook sees it before."""
        if torch.is_grad_enabled() or self.parameter._backward_hooks:
            return False
        try:
            return torch._C._will_engine_execute_node(self._node)
        except RuntimeError:  # torch.autograd.grad returns it
            return False

    def _arrive(self, grads: Grads) -> Grads:
        """The hook of the node that accumulates."""
        return tuple(map(_plain, grads))

    def tell(self, watch: UsesWatch) -> None:
        """Tell what backwards have shown."""
        if self.is_shown:
            watch.others.tell(self.parameter, others=self.has_others)

    def __del__(self) -> None:
        self._handle.remove()


class _OfArgument:
    """The uses of one argument in one call, and their sum."""

    def __init__(self, index: int, edge: Edge, uses: Sequence[Edge]) -> None:
        self._index, self._place = index, edge[1]
        self._own: torch.Tensor | None = None
        self._is_all: torch.Tensor | None = None
        """A flag on the device: autograd has had the same sum."""
        self._handle = edge[0].register_prehook(self._compare)
        for use, number in uses:
            use.register_hook(functools.partial(self._add, number))

    def _add(self, number: int, grads: Grads, _: Any) -> None:
        """The hook of a use; `number` is that of its gradient."""
        grad = grads[number]
        if grad is not None:
            with torch.no_grad():
                self._own = grad.detach() if self._own is None else self._own + grad.detach()

    def _compare(self, grads: Grads) -> None:
        """The hook of the node that the gradient comes to."""
        own, self._own, received = self._own, None, grads[self._place]
        if own is not None and received is not None:
            self._is_all = same_bits(received, own)

    def tell(self, watch: UsesWatch) -> None:
        """Tell what backwards have shown. Waits for the device."""
        self._handle.remove()
        if self._is_all is not None and not bool(self._is_all):
            watch.elsewhere.add(self._index)


class UsesWatch:
    """Watches the eager calls of one kind."""

    def __init__(self, others: OtherUses) -> None:
        self.others = others
        """Is told of the parameters."""
        self.elsewhere: set[int] = set()
        """Arguments, by leaf index, that have other uses beside several in a call."""
        self.casts = CastWatch()
        """Watches the casts of weights that calls share."""
        self._found: list[_OfParameter | _OfArgument] = []

    def follow(self, results: Sequence[torch.Tensor], arguments: Mapping[int, torch.Tensor]) -> None:
        """Watch a call that has just been made, with these arguments by leaf index."""
        results = [tensor for tensor in results if tensor.requires_grad]
        given = {edge_of(tensor): index for index, tensor in arguments.items() if tensor.requires_grad}
        least = 1 if is_reentrant(results) else 2
        for edge, uses in uses_behind(results, [node for node, _ in given]).items():
            leaf = getattr(edge[0], "variable", None)
            if edge in given and len(uses) > 1:
                self._found.append(_OfArgument(given[edge], edge, uses))
            elif edge not in given and leaf is not None and len(uses) >= least:
                self._found.append(_OfParameter(leaf, edge, uses))

    def describe(self, call: EagerCall) -> None:
        """Before a call is recorded, note its arguments with other uses."""
        call.elsewhere = frozenset(self.elsewhere)

    def settle(self) -> None:
        """Take up what backwards have shown."""
        found, self._found = self._found, []
        for each in found:
            each.tell(self)
