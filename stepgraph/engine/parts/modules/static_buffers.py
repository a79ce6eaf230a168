"""`static_buffers` lists the memory at the edges of graphed modules: who reads it, who writes it, and its gradient.

Graphs that follow one another pass a result on in place, and a tensor that several graphs are given has one buffer. So
there are fewer buffers than arguments and results. They are found by their memory, after the capture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.engine.parts.modules.session import ModuleSession
from stepgraph.engine.record.pair.runner import Runner


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CudagraphBufferMetadata:
    """One static buffer of graphed modules, with Megatron's fields. Replays overwrite its tensors."""

    is_cudagraph_input: bool = False
    """A forward graph reads an argument from it."""
    is_cudagraph_output: bool = False
    """A forward graph writes a result to it."""
    input_use_count: int = 0
    """Arguments of forward graphs that are read from it."""
    cudagraph_reuse_ref_count: int = 0
    """Those of them that are the result of another graph, read in place without a copy."""
    capture_reuse_count: int = 0
    """Uses that a running capture still expects: 0 after the capture."""
    fwd_cudagraph_buffer: torch.Tensor | None = None
    """The buffer."""
    bwd_cudagraph_buffer: torch.Tensor | None = None
    """The static gradient of that argument or result, if a backward graph has one."""


@dataclass(slots=True)
class _Uses:
    """The graphs that use one piece of memory."""

    tensor: torch.Tensor
    readers: list[Runner] = field(default_factory=list)
    writers: list[Runner] = field(default_factory=list)
    grad: torch.Tensor | None = None

    def metadata(self) -> CudagraphBufferMetadata:
        chained = [reader for reader in self.readers if any(writer is not reader for writer in self.writers)]
        return CudagraphBufferMetadata(
            is_cudagraph_input=bool(self.readers),
            is_cudagraph_output=bool(self.writers),
            input_use_count=len(self.readers),
            cudagraph_reuse_ref_count=len(chained),
            fwd_cudagraph_buffer=self.tensor.detach(),
            bwd_cudagraph_buffer=None if self.grad is None else self.grad.detach(),
        )


def static_buffers(shared: ModuleSession) -> list[CudagraphBufferMetadata]:
    """List the static buffers of a session's forward graphs, in the order of their capture."""
    found: dict[Any, _Uses] = {}

    def uses_of(tensor: torch.Tensor, grad: torch.Tensor | None) -> _Uses:
        address = tensor.untyped_storage().data_ptr()
        uses = found.setdefault((tensor.device, address) if address else id(tensor), _Uses(tensor))
        uses.grad = grad if uses.grad is None else uses.grad
        return uses

    for manager in shared.managers:
        for runner in [runner for site in manager.sites.values() for runner in site.runners]:
            backward = next(iter(runner.backwards.values()), None)
            into = {} if backward is None else dict(backward.grads_in.tensors)
            onward = {} if backward is None else dict(zip(runner.edges.flows, backward.grads_out, strict=False))
            for index, tensor in runner.boundary.tensors.items():
                uses_of(tensor, onward.get(index)).readers.append(runner)
            for index, tensor in enumerate(runner.result.tensors):
                uses_of(tensor, into.get(index)).writers.append(runner)
    return [uses.metadata() for uses in found.values()]
