"""Experts of a mixture: where each token's choice is placed, and three ways to run what is placed there.

A token that chooses k experts has k choices; choice j of token t is row t * k + j. Experts want rows that chose alike
side by side, so each row gets a slot: either rows sorted by expert, end to end, or for each expert a fixed number of
slots, some of them empty. A `Placement` is that map in both directions. With it, sending rows to slots and bringing
results back are reads through an index, and so are their gradients: nothing is added up by atomics, and every run gives
the same bits.

The number of rows of an expert is known on the device only. `grouped` leaves it there: its kernel takes the ends of
the experts' rows as a tensor. `padded` needs none: it computes all slots, full or empty. `loop` reads the counts on
the host, which is the usual way to write it and what no graph can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.lab.models.activations import of_stacked
from stepgraph.lab.models.language_model import autocast_dtype


class Placement(NamedTuple):
    """Which slot each row is in, and which row each slot holds."""

    rows: Tensor
    """[slots] the row that a slot holds; any row where it is empty."""
    slots: Tensor
    """[rows] the slot that a row is in; any slot where it was dropped."""
    ends: Tensor
    """[experts] int32: where each expert's rows end, all rows sorted by expert."""
    filled: Tensor | None = None
    """[slots] False where a slot is empty; None where none is."""
    kept: Tensor | None = None
    """[rows] False where a row was dropped; None where none is."""


def place_sorted(choices: Tensor, expert_ids: Tensor) -> Placement:
    """Place the rows of `choices` [tokens, k], each the number of an expert, sorted by expert and else in order."""
    experts, rows = choices.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, expert_ids, right=True, out_int32=True)
    return Placement(rows, rows.argsort(), ends)


def place_padded(choices: Tensor, expert_ids: Tensor, capacity: int) -> Placement:
    """Place the rows of `choices` [tokens, k] in `capacity` slots for each expert; rows that come too late are dropped.

    Earlier tokens come first.
    """
    by_expert = place_sorted(choices, expert_ids)
    experts, starts = choices.flatten(), F.pad(by_expert.ends[:-1], (1, 0))
    position = starts[:, None] + torch.arange(capacity, device=choices.device)
    filled = position < by_expert.ends[:, None]
    rows = by_expert.rows[position.clamp(max=experts.numel() - 1)]
    rank = by_expert.slots - starts[experts]
    slots = experts * capacity + rank.clamp(max=capacity - 1)
    return Placement(rows.flatten(), slots, by_expert.ends, filled.flatten(), rank < capacity)


def place_dropped(choices: Tensor, expert_ids: Tensor, capacity: int) -> Placement:
    """Place the rows of `choices` [tokens, k] sorted by expert; of each expert, rows past `capacity` are dropped.

    A dropped row keeps its slot, so that the number of slots does not depend on the choices, and the slot is empty.
    """
    by_expert = place_sorted(choices, expert_ids)
    starts = F.pad(by_expert.ends[:-1], (1, 0))
    rank = by_expert.slots - starts[choices.flatten()]
    kept = rank < capacity
    return by_expert._replace(filled=kept[by_expert.rows], kept=kept)


def dispatch(hidden: Tensor, placement: Placement) -> Tensor:
    """Copy `hidden` [tokens, width] into slots [slots, width], once for each choice; empty slots are zero."""
    rows, slots, _, filled, kept = placement
    out: Tensor = _Dispatch.apply(hidden, rows, slots, filled, kept)  # type: ignore[no-untyped-call]
    return out


def collect(source: Tensor, placement: Placement) -> Tensor:
    """Bring `source` [slots, width] back into the order of rows [rows, width]; dropped rows are zero."""
    rows, slots, _, filled, kept = placement
    out: Tensor = _Collect.apply(source, rows, slots, filled, kept)  # type: ignore[no-untyped-call]
    return out


def _read(source: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
    found = source.index_select(0, index)
    return found if mask is None else found.masked_fill(~mask[:, None], 0.0)


class _Dispatch(torch.autograd.Function):
    """A read through `rows`, whose gradient is a read through `slots` and a sum over each token's choices."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: Tensor, slots: Tensor, filled: Tensor | None, kept: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(slots, kept)
        ctx.num_tokens = hidden.shape[0]
        return _read(hidden, rows // (slots.numel() // hidden.shape[0]), filled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slots, kept = ctx.saved_tensors
        by_row = _read(grads[0], slots, kept)
        return by_row.view(ctx.num_tokens, -1, by_row.shape[-1]).sum(1), None, None, None, None


class _Collect(torch.autograd.Function):
    """A read through `slots`, whose gradient is a read through `rows`."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, rows: Tensor, slots: Tensor, filled: Tensor | None, kept: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows, filled)
        return _read(source, slots, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, filled = ctx.saved_tensors
        return _read(grads[0], rows, filled), None, None, None, None


class Experts(nn.Module):
    """Experts side by side, their weights stacked; with `bias`, each matrix of each expert has one."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        activation: Callable[[Tensor], Tensor] | None = None,
        *,
        inner_size: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        inner_size = 2 * ffn_size if inner_size is None else inner_size
        self.activation = of_stacked("swiglu") if activation is None else activation
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        self.gate_up_bias = nn.Parameter(torch.zeros(num_experts, inner_size)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, hidden_size)) if bias else None

    def can_group(self) -> bool:
        """Whether `grouped` runs here without a read on the host, given the weights' device, type and widths."""
        device, dtype = self.down_proj.device, self._compute_dtype()
        # Other types than bfloat16 have no kernel: torch loops and reads the ends, and compile refuses them.
        is_fit = dtype is torch.bfloat16 and all(size % 8 == 0 for size in self.down_proj.shape[1:])
        if not hasattr(F, "grouped_mm") or not is_fit:
            return False
        return device.type == "cpu" or (device.type == "cuda" and _has_grouped_kernel(device))

    def grouped(self, slots: Tensor, ends: Tensor) -> Tensor:
        """Run rows sorted by expert [rows, width] in one grouped matrix product a projection."""
        slots, gate_up, down = self._operands(slots)
        inner = F.grouped_mm(slots, gate_up.transpose(-2, -1), offs=ends)
        inner = self.activation(self._biased(inner, self.gate_up_bias, ends))
        return self._biased(F.grouped_mm(inner, down.transpose(-2, -1), offs=ends), self.down_bias, ends)

    def padded(self, slots: Tensor) -> Tensor:
        """Run equally many slots of each expert [experts * capacity, width] in one batched product a projection."""
        slots, gate_up, down = self._operands(slots)
        batch = slots.view(gate_up.shape[0], -1, slots.shape[-1])
        inner = self.activation(_added(torch.bmm(batch, gate_up.mT), self.gate_up_bias))
        return _added(torch.bmm(inner, down.mT), self.down_bias).flatten(0, 1)

    def loop(self, slots: Tensor, ends: Tensor) -> Tensor:
        """Run rows sorted by expert [rows, width] one expert after the other; the host waits for the counts."""
        slots, gate_up, down = self._operands(slots)
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        none = [None] * len(counts)
        biases = [none if b is None else b.to(slots.dtype).unbind() for b in (self.gate_up_bias, self.down_bias)]
        # unbind: the gradient of all experts is one stack; that of gate_up[i] would be a tensor of zeros for each i
        parts = zip(slots.split(counts), gate_up.unbind(), down.unbind(), *biases, strict=True)
        return torch.cat(
            [
                F.linear(self.activation(F.linear(x, w_in, b_in)), w_out, b_out)
                for x, w_in, w_out, b_in, b_out in parts
                if x.shape[0]
            ]
        )

    def _biased(self, x: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        """Add to rows sorted by expert the bias of their expert."""
        if bias is None:
            return x
        rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
        # A product with one column an expert: the gradient of an indexed read would add rows up with atomics.
        owner = torch.searchsorted(ends, rows, right=True).unsqueeze(-1) == torch.arange(len(bias), device=x.device)
        return x + owner.to(x.dtype) @ bias.to(x.dtype)

    def _operands(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self._compute_dtype()
        return slots.to(dtype), self.gate_up_proj.to(dtype), self.down_proj.to(dtype)

    def _compute_dtype(self) -> torch.dtype:
        # autocast does not know grouped products, so what it does with others is done here
        return autocast_dtype(self.down_proj.device.type) or self.down_proj.dtype


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_grouped_kernel(device: torch.device) -> bool:
    """Whether torch's grouped product is one kernel on this GPU that is right for experts without rows.

    Below Hopper it is a loop that reads the ends on the host. On Blackwell an expert without rows gets a gradient that
    is not zero (pytorch#172439).
    """
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


def _added(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype).unsqueeze(1)
