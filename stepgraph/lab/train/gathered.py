"""`ddp.overlap_param_gather`: each rank updates a share of the parameters; layers gather the rest before they run.

The parameters of a module lie one behind the other in a flat buffer. Each data-parallel rank has an optimizer for its
share of every buffer, so its state is a share too. After a step a rank knows its own shares only. A hook before each
module's forward gathers the module's buffer, once in an iteration, in the order of the forward. Addresses do not
change, so graphs read what was gathered.

Hooks inside a graph do not run. For graphs captured ahead of time they are off during the capture
(`disable_forward_pre_hook`, without a gather: a capture has no effect), and afterwards the helper runs them by hand
before each replay. Graphs of `local` leave the hooks of a graphed part itself alone, so there its hook gathers all that
is inside (`gather_before`). As in Megatron hooks are switched on after the first step: before it all parameters are in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgraph.engine.backends import is_capturing
from stepgraph.engine.oplog import is_logged
from stepgraph.lab.train.ranks import Ranks


@dataclass
class Buffer:
    """Parameters of one module in one flat tensor, of which this rank updates a share."""

    parameters: tuple[nn.Parameter, ...]
    flat: Tensor
    share: nn.Parameter
    """This rank's part of `flat`."""
    start: int
    decays: bool
    is_stale: bool = False

    def load_gradient(self) -> None:
        """Give the share the gradients of its elements."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
        whole = nn.functional.pad(whole, (0, self.flat.numel() - whole.numel()))
        self.share.grad = whole[self.start : self.start + self.share.numel()].clone()


class GatheredModel(nn.Module):
    """A model whose parameters are gathered before each module's forward, with the method that the helper looks for."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.module = module
        self._size, self._rank, self._group = ranks.data_size, ranks.data_rank, ranks.data_group
        self._buffers_of: dict[int, list[Buffer]] = {}
        self._handles: list[Any] = []
        seen: set[int] = set()
        for owner in module.modules():
            own = [p for p in owner._parameters.values() if p is not None and p.requires_grad and id(p) not in seen]
            seen |= {id(p) for p in own}
            parts = [[p for p in own if (p.dim() >= 2) == decays] for decays in (True, False)]
            found = [self._flattened(part) for part in parts if part]
            if found:
                self._buffers_of[id(owner)] = found
        self.buffers_of_ranks = [buffer for found in self._buffers_of.values() for buffer in found]

    def _flattened(self, parameters: Sequence[nn.Parameter]) -> Buffer:
        count = sum(parameter.numel() for parameter in parameters)
        per_rank = -(-count // self._size)
        flat = torch.zeros(per_rank * self._size, dtype=parameters[0].dtype, device=parameters[0].device)
        place = 0
        for parameter in parameters:
            view = flat[place : place + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            place += parameter.numel()
        start = self._rank * per_rank
        share = nn.Parameter(flat[start : start + per_rank])
        return Buffer(tuple(parameters), flat, share, start, decays=parameters[0].dim() >= 2)

    def gather_before(self, parts: Iterable[nn.Module]) -> None:
        """Let the hook of each of these modules gather for all modules inside, whose own hooks a replay leaves out."""
        for part in parts:
            inside = [self._buffers_of.pop(id(module), []) for module in part.modules()]
            self._buffers_of[id(part)] = [buffer for found in inside for buffer in found]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # -- gathering

    def _make_forward_pre_hook(self) -> Callable[[nn.Module, Any], None]:
        def gather_parameters(module: nn.Module, args: Any) -> None:
            if not is_capturing() and not is_logged():  # an audit records again, which has no effect
                self._gather(self._buffers_of.get(id(module), ()))

        return gather_parameters

    def _gather(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer.is_stale:
                dist.all_gather(list(buffer.flat.chunk(self._size)), buffer.share.detach().clone(), group=self._group)
                buffer.is_stale = False

    def gather_all(self) -> None:
        """Gather all parameters now, as a checkpoint needs them; every rank must call it."""
        self._gather(self.buffers_of_ranks)

    @property
    def has_hooks(self) -> bool:
        return bool(self._handles)

    def enable_forward_pre_hook(self) -> None:
        """Gather before each module's forward from now on."""
        hook = self._make_forward_pre_hook()
        owners = [module for module in self.module.modules() if id(module) in self._buffers_of]
        self._handles = [module.register_forward_pre_hook(hook) for module in owners]

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Do not gather any more; with `param_sync`, gather all once."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if param_sync:
            self.gather_all()


class ShardedAdamW(torch.optim.AdamW):
    """AdamW over this rank's shares of a gathered model."""

    def __init__(self, model: GatheredModel, weight_decay: float, **settings: Any) -> None:
        self._model = model
        buffers = model.buffers_of_ranks
        groups = [
            {"params": [b.share for b in buffers if b.decays == decays], "weight_decay": decay}
            for decays, decay in ((True, weight_decay), (False, 0.0))
        ]
        super().__init__([group for group in groups if group["params"]], **settings)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._model.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Update the shares; the parameters of other ranks' shares are stale until they are gathered."""
        for buffer in self._model.buffers_of_ranks:
            buffer.load_gradient()
        result = super().step(closure)
        for buffer in self._model.buffers_of_ranks:
            buffer.is_stale = True
        if not self._model.has_hooks:
            self._model.enable_forward_pre_hook()
        return result
