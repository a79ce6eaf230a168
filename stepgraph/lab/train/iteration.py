"""One training iteration, written once for all implementations: microbatches forward and backward, then clipping.

`forward_backward` has the form of Megatron's function of that name, so that `FullCudaGraphWrapper` captures it as it
is; the other implementations call it. It reads nothing on the host unless a check on the host was asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepgraph.core.errors import InvalidArgument, NonFinite
from stepgraph.core.wording import with_article
from stepgraph.lab.models.linear import backward_dw
from stepgraph.lab.train.data import Sample
from stepgraph.lab.train.optimizer import clip_gradients
from stepgraph.lab.train.reduction import average_gradients


class Result(NamedTuple):
    """What an iteration computed, on the device."""

    loss: Tensor
    """The mean loss of the microbatches, without auxiliary losses."""
    grad_norm: Tensor | None
    """The norm of the gradients before clipping; None where they are not clipped."""


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute in a type by autocast, or without autocast if there is none."""
    return torch.autocast(device.type, dtype) if dtype is not None else contextlib.nullcontext()


@dataclass(frozen=True)
class ForwardStep:
    """Computes the loss of a microbatch, and the load of the experts where there are any."""

    aux_loss_coeff: float = 0.0
    autocast: torch.dtype | None = None
    checks_host: bool = False
    """Whether each loss is read on the host and refused if it is not finite."""
    delays_weight_gradients: bool = False
    """Whether the backward leaves weight gradients to `backward_dw`, which runs after it."""

    def __call__(self, microbatch: Sample, model: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the loss to differentiate, the loss to report, and the load."""
        with autocasting(microbatch["tokens"].device, self.autocast):
            out = model(**microbatch)
        given = out if isinstance(out, Tensor) else getattr(out, "out", None)
        if not isinstance(given, Tensor) or given.numel() != 1:
            raise _no_loss(out, model)
        if isinstance(out, Tensor):
            loss, total, load = out, out, None
        else:
            loss, load = out.out, out.load
            total = loss + self.aux_loss_coeff * out.aux_loss if self.aux_loss_coeff else loss
        if self.checks_host and not bool(total.isfinite()):
            raise non_finite("loss", float(loss.detach()))
        return total, loss.detach(), load

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        """Run the backward of a microbatch."""
        loss.backward()
        if self.delays_weight_gradients:
            backward_dw(model)


@dataclass(frozen=True)
class TiedEmbedding:
    """The matrix of embedding and head, of which the first and the last stage of a pipeline have a copy each.

    Both start from the same weights and get the sum of both gradients, so the copies stay equal, as in Megatron.
    """

    weight: nn.Parameter
    group: Any
    """The two ranks."""
    is_first: bool

    def add_up(self) -> None:
        """Replace the gradient by the sum of both."""
        if self.weight.grad is not None:
            dist.all_reduce(self.weight.grad, group=self.group)

    def counted(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Leave the copy of the last stage out of the norm."""
        return parameters if self.is_first else [p for p in parameters if p is not self.weight]


@dataclass(frozen=True)
class Finish:
    """The end of an iteration, after all backwards: average and clip gradients, check them, move the experts' bias."""

    parameters: Sequence[nn.Parameter]
    max_norm: float = 0.0
    checks_host: bool = False
    update_bias: Callable[[Tensor], None] | None = None
    data_size: int = 1
    """Ranks to average gradients over here; 1 where DDP has done so."""
    data_group: Any = None
    stage_group: Any = None
    """The ranks that hold the other stages of the model, whose gradients count in the norm."""
    tied: TiedEmbedding | None = None

    def __call__(self, load: Tensor | None) -> Tensor | None:
        if self.data_size > 1:
            average_gradients(self.parameters, self.data_size, self.data_group)
        counted = self.parameters
        if self.tied is not None:
            self.tied.add_up()
            counted = self.tied.counted(self.parameters)
        norm = clip_gradients(self.parameters, self.max_norm, self.stage_group, counted)
        if self.checks_host:
            found = norm if norm is not None else total_norm(self.parameters)
            if not bool(found.isfinite()):
                raise non_finite("gradient norm", float(found))
        if self.update_bias is not None and load is not None:
            self.update_bias(load)
        return norm


def _no_loss(out: Any, model: nn.Module) -> InvalidArgument:
    found = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else with_article(type(out))
    return InvalidArgument(
        f"{type(model).__name__}(tokens, targets) returned {found}, and the loop needs the loss",
        rule="option",
        why="the loop calls backward() on what the model returns: one number, as a tensor without dimensions.",
        fix="return the loss alone, such as F.cross_entropy(logits.flatten(0, 1), targets.flatten()).",
    )


def total_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def non_finite(what: str, value: float) -> NonFinite:
    """The error for a loss or gradient that was read on the host."""
    return NonFinite(
        f"the {what} is {value}",
        rule="non-finite",
        why="training on would spread it to all parameters; the parameters are as before this iteration.",
        fix="lower optimizer.lr, or resume from a checkpoint and put the iteration into train.iterations_to_skip.",
    )


def in_iteration(error: NonFinite, iteration: int) -> NonFinite:
    """The same error with the number of the iteration, counted from 1, and a fix that can be typed."""
    return NonFinite(
        f"iteration {iteration}: {error.what}",
        rule=error.rule,
        details=error.details,
        why=error.why,
        fix=f"lower optimizer.lr, or resume from a checkpoint with train.iterations_to_skip={iteration}.",
    )


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: nn.Module,
    num_microbatches: int,
    forward_only: bool = False,
    finish: Finish | None = None,
    before_microbatch: Callable[[int], None] | None = None,
) -> Result:
    """Run all microbatches of an iteration; gradients are averaged over them."""
    losses: list[Tensor] = []
    loads: list[Tensor] = []
    for index in range(num_microbatches):
        if before_microbatch is not None:
            before_microbatch(index)
        with _synchronized(model, is_last=index == num_microbatches - 1):
            total, loss, load = forward_step_func(next(data_iterator), model)
            if not forward_only:
                forward_step_func.backward(total / num_microbatches if num_microbatches > 1 else total, model)
        losses.append(loss)
        loads += [load] if load is not None else []
    mean = torch.stack(losses).mean() if len(losses) > 1 else losses[0]
    norm = finish(sum(loads[1:], loads[0]) if loads else None) if finish is not None and not forward_only else None
    return Result(mean, norm)


def _synchronized(model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """Reduce gradients over ranks in the last microbatch only."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()
