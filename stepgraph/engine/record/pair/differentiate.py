"""A recorded backward computes gradients for proxies of the parameters, and adds them to the gradients' own memory.

In the common case all gradients are computed first and added with one fused operation. Reentrant checkpointing cannot
return gradients: its backward runs another backward inside, which accumulates itself. Then the proxies' own
accumulators add to the memory, in eager's order, and hooks on them report which parameters got a gradient.

The backward of compiled code may overwrite its activations. torch.compile reuses the memory of activations that only
this backward reads, and refuses to run the backward again. A recorded backward is replayed once for each replayed
forward, which fills those activations again. So it may be recorded, although the recording keeps autograd's graph. A
second backward of one forward is refused, as in eager.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.storage import memory_of
from stepgraph.engine.grads.step_grads import refuse_sparse
from stepgraph.engine.oplog import left_out
from stepgraph.engine.record.pair.uses import NotedUses, nodes_behind


class AccumulatesByItself(Exception):
    """A backward inside the backward has accumulated gradients; record with `accumulate` instead."""


@dataclass(frozen=True, slots=True)
class Inside:
    """A parameter whose gradient the graph accumulates, its proxy, and the memory of the gradient."""

    parameter: torch.Tensor
    leaf: torch.Tensor
    memory: torch.Tensor


Found = tuple[list[torch.Tensor | None], list[torch.Tensor]]
"""The gradients of the edges, and the parameters that were given one."""


def differentiate(
    results: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
    edges: NotedUses,
    inside: Sequence[Inside],
) -> Found:
    """Compute all gradients, then add those of the parameters inside to their memory."""
    sources = [*edges.tensors, *(entry.leaf for entry in inside)]
    before = [leaf.grad for leaf in sources]  # a parameter that is not the module's own may have one
    grads: Sequence[torch.Tensor | None] = ()
    with edges.noting(results):
        if sources:
            grads = torch.autograd.grad(results, sources, incoming, retain_graph=True, allow_unused=True)
    if any(leaf.grad is not grad for leaf, grad in zip(sources, before, strict=True)):
        for leaf, grad in zip(sources, before, strict=True):
            leaf.grad = grad
        raise AccumulatesByItself
    own, passed = grads[len(edges.tensors) :], edges.all(grads[: len(edges.tensors)])
    found = [(entry, grad) for entry, grad in zip(inside, own, strict=True) if grad is not None]
    for grad in (*passed, *own):
        refuse_sparse(grad)
    with torch.no_grad(), left_out():
        if found:
            torch._foreach_add_([entry.memory for entry, _ in found], [grad for _, grad in found])
        out = without_aliases(passed, incoming)
    return out, [entry.parameter for entry, _ in found]


def accumulate(
    results: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
    edges: NotedUses,
    inside: Sequence[Inside],
) -> Found:
    """Let autograd's accumulators, and those of backwards inside the backward, do the additions."""
    reached: set[int] = set()
    handles = []
    try:
        for entry in inside:
            entry.leaf.grad = entry.memory
            handles.append(entry.leaf.register_post_accumulate_grad_hook(lambda leaf: reached.add(id(leaf))))
        with edges.noting(results):
            torch.autograd.backward(results, incoming, retain_graph=True)
        if any(leaf.grad is not None for leaf in edges.apart):
            raise _adds_in_the_middle()
        grads = edges.all([leaf.grad for leaf in edges.tensors])
    finally:
        for leaf in (*edges.tensors, *(entry.leaf for entry in inside)):
            leaf.grad = None
        for handle in handles:
            handle.remove()
    for grad in grads:
        refuse_sparse(grad)
    with torch.no_grad(), left_out():
        out = without_aliases(grads, incoming)
    return out, [entry.parameter for entry in inside if id(entry.leaf) in reached]


def _adds_in_the_middle() -> CaptureError:
    return CaptureError(
        "a backward inside the module's backward accumulates the gradient of a parameter with other uses",
        rule="gradient-order",
        why="eager adds the shares of the inner backward to .grad before autograd has added up the other uses.",
        fix="use checkpoint(..., use_reentrant=False), or leave the module out of the scope.",
    )


def saved_memory(results: Sequence[torch.Tensor]) -> frozenset[int]:
    """The storages, by identity, of the tensors that autograd's graph behind these tensors has saved."""
    found: set[int | None] = set()
    for node in nodes_behind(results):
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                for entry in saved if isinstance(saved, (list, tuple)) else [saved]:
                    tensor = getattr(entry, "data", None)
                    # what went through somebody's hooks is elsewhere; to ask for it might compute it anew
                    if isinstance(tensor, torch.Tensor) and getattr(entry, "unpack_hook", None) is None:
                        found.add(memory_of(tensor))
    return frozenset(memory for memory in found if memory is not None)


def uses_up_saved(results: Sequence[torch.Tensor]) -> bool:
    """True if compiled code behind these tensors can run its backward only once."""
    if not getattr(_config(), "donated_buffer", False):
        return False
    for node in nodes_behind(results):
        if type(node).__name__ == "CompiledFunctionBackward":
            metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
            if getattr(metadata, "bw_donated_idxs", None) != []:  # None: it is not known yet
                return True
    return False


@contextlib.contextmanager
def recording_compiled_backwards() -> Iterator[None]:
    """Let compiled code run a backward that keeps autograd's graph."""
    config = _config()
    if not getattr(config, "donated_buffer", False):
        yield
        return
    with config.patch(donated_buffer=False):
        yield


def without_aliases(
    grads: Sequence[torch.Tensor | None], incoming: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients, with copies of those that passed unchanged: they are stored in memory of the graph they came from."""
    own = {memory_of(tensor) for tensor in incoming} - {None}
    return [grad.clone() if grad is not None and memory_of(grad) in own else grad for grad in grads]


def _config() -> Any:
    return sys.modules.get("torch._functorch.config")
