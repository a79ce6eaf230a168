"""Which parameters of graphed code are also used by other code in the same backward.

Autograd adds up the gradients of all uses of a parameter, one after the other, and adds the sum to an old gradient. A
graph that adds its own share to `.grad` by itself has eager's bits only if it is the only use. No look at the module
shows that: `F.linear(x, embedding.weight)`, a penalty on weights and a module outside the model use a parameter without
a trace in the module that is graphed.

So a parameter is in question at first. While it is, the graph's share is handed to autograd, which is right in any
case, and autograd shows whether there are others: it gives a single share to the parameter as that very tensor, and
several as another tensor with the sum. A parameter whose only shares are those of graphs is accumulated inside the
graphs from then on, without a node of autograd. The others go on through autograd. Each audit asks again, so that a use
that begins later is found and told. Only a backward shows it. So under strict the error comes out of `backward()`, when
other parameters may have their gradients already, and not before anything has run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.core.errors import StateChanged
from stepgraph.core.frames import warn_user


@dataclass(slots=True)
class _Shares:
    """The shares of graphs in one backward, as far as they were handed over."""

    name: str
    task: int
    total: torch.Tensor
    """The share, or the sum of several, in their order."""
    storage: torch.UntypedStorage
    """Of the share. As it is held, autograd makes a sum in other memory."""
    handle: Any = None
    num: int = 1

    def is_all(self, received: torch.Tensor) -> bool:
        """True if a parameter has received nothing else."""
        if self.num == 1:
            return received.untyped_storage().data_ptr() == self.storage.data_ptr()
        return bool(same_bits(received, self.total))


class OtherUses:
    """The parameters of one model that have uses beside those in graphs."""

    def __init__(self) -> None:
        self._shown: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Whether a parameter has other uses, as backwards have shown."""
        self._settled: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Those that are not in question."""
        self._open: dict[int, _Shares] = {}
        """By the id of the parameter."""
        self._under_way = 0
        self.is_strict = False
        """True if a use that begins later is an error, in each backward until the answers are forgotten."""
        self.when_found: weakref.WeakMethod[Callable[[torch.Tensor], None]] | None = None
        """Called with a parameter that had no other uses until now."""
        self.version = 0
        """Counts the changes of the answers of `through_autograd`."""

    def through_autograd(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of some parameters whose gradients autograd must add up."""
        return {name: p for name, p in parameters.items() if self._shown.get(p, True) or p not in self._settled}

    def are_none(self, parameter: torch.Tensor) -> bool:
        """True if a backward has shown that a parameter has no other uses, and none since has shown one."""
        return not self._shown.get(parameter, True)

    def tell(self, parameter: torch.Tensor, *, others: bool) -> None:
        """Take up what an eager backward has shown. It does not settle a parameter without other uses."""
        known = self._shown.get(parameter)
        self._shown[parameter] = others or bool(known)
        if others and known is False:
            self._began(parameter)

    def _began(self, parameter: torch.Tensor) -> None:
        self.version += 1
        if self.when_found is not None and (tell := self.when_found()) is not None:
            tell(parameter)

    def found(self, parameters: Collection[torch.Tensor]) -> set[int]:
        """Those of some parameters that have other uses, by id."""
        return {id(parameter) for parameter in parameters if self._shown.get(parameter, False)}

    def ask_again(self) -> None:
        """Put all parameters without other uses in question, for the calls that begin from now on."""
        self._settled = WeakTensorKeyDictionary()
        self.version += 1

    def forget(self) -> None:
        """Forget all answers."""
        self._shown = WeakTensorKeyDictionary()
        self.ask_again()

    def begin(self) -> None:
        """A call begins whose gradients go through autograd."""
        self._under_way += 1

    def end(self) -> None:
        """Such a call ends. Answers count when none is under way: in one backward all calls go the same way."""
        self._under_way -= 1
        self._settle()

    def _settle(self) -> None:
        if not self._under_way:
            fresh = [p for p in self._shown if p not in self._settled]
            for parameter in fresh:
                self._settled[parameter] = None
            self.version += bool(fresh)

    def hand_over(self, name: str, parameter: torch.Tensor, share: torch.Tensor | None) -> None:
        """Note the share of a graph that autograd is about to be given, in a running backward."""
        if parameter in self._settled or self._shown.get(parameter, False) or not parameter.requires_grad:
            return  # known, or frozen since the forward: autograd drops what it is given
        if share is None:
            self._shown.setdefault(parameter, False)
            return
        known, task = self._open.get(id(parameter)), torch._C._current_graph_task_id()
        if known is not None and known.task == task:
            known.num += 1
            known.total = known.total + share
            return
        if known is not None and known.handle is not None:  # of a backward that was aborted
            known.handle.remove()
        shares = self._open[id(parameter)] = _Shares(name, task, share.detach(), share.untyped_storage())
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        shares.handle = node.register_prehook(functools.partial(self._arrived, parameter))

    def _arrived(self, parameter: torch.Tensor, received: tuple[torch.Tensor | None, ...]) -> None:
        """Before a parameter's gradient is accumulated, look whether others than graphs have a share in it."""
        shares = self._open.pop(id(parameter), None)
        if shares is None:
            return
        shares.handle.remove()
        others = received[0] is not None and not shares.is_all(received[0])
        began = others and self._shown.get(parameter) is False
        if began:
            error = _began_later(shares.name, is_strict=self.is_strict)
            if self.is_strict:
                self._settled.pop(parameter, None)  # it stays in question
                self.version += 1
                raise error
            warn_user(str(error))
        self._shown[parameter] = others
        self._settle()
        if began:
            self._began(parameter)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """A flag on the device: two tensors of one shape have the same bits."""
    with torch.no_grad():
        one, two = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two))
        return (one == two).all()


def _began_later(name: str, *, is_strict: bool) -> StateChanged:
    goes_on = (
        "the gradients of this backward are incomplete: call zero_grad(), and reset() when the step changes."
        if is_strict
        else "call reset() when the step changes. From now on autograd adds up."
    )
    return StateChanged(
        f"`{name}` of a graphed module is now used by other code too, in one backward",
        rule="gradient-order",
        why="autograd adds up all uses before it adds them to an old gradient. Between the last two audits the graph "
        "has added its own share by itself, so the last bits of this gradient may differ from eager's.",
        fix=goes_on,
    )
