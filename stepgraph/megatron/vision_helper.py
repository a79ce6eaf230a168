"""`VisionTECudaGraphHelper` captures the layers of a vision encoder beside those of the language model.

The encoder differs from the decoder in a few ways. All images of a microbatch are concatenated into one sequence, so
the batch dimension is 1. It is on the first stage of a pipeline only, so its ranks wait for nobody. Its layers may
return (hidden states, None); the graph leaves None out. The language helper clears gradients and trackers: call it
after this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from stepgraph.engine.parts.modules.scopes import Part, ScopeRegistry
from stepgraph.megatron.layers_helper import VISION, TECudaGraphHelper
from stepgraph.megatron.rank_order import RankOrder, setting
from stepgraph.megatron.samples import SampleArguments


def get_vision_cuda_graph_seq_length(vision_config: Any, default_seq_length: int = 4096) -> int:
    """The length at which a vision encoder's layers are captured.

    That is `max_vision_cuda_graph_seq_length` where it is set; else one token for each `spatial_merge_size` squared of
    the `num_position_embeddings` places; else the default.

    Example:
        >>> get_vision_cuda_graph_seq_length(SimpleNamespace(num_position_embeddings=1024, spatial_merge_size=2))
        256
    """
    longest = setting(vision_config, "max_vision_cuda_graph_seq_length", 0)
    if longest:
        return int(longest)
    places = setting(vision_config, "num_position_embeddings")
    if places is None:
        return default_seq_length
    return int(places) // int(setting(vision_config, "spatial_merge_size", 1)) ** 2


def without_none(outputs: Any) -> Any:
    """A tuple of outputs without those that are None; anything else, and a tuple of None alone, as it is.

    Example:
        >>> without_none((1, None)), without_none(1), without_none((None, None))
        ((1,), 1, (None, None))
    """
    if type(outputs) is not tuple or all(output is None for output in outputs):
        return outputs
    return tuple(output for output in outputs if output is not None)


class VisionGraph:
    """A graphed layer whose outputs of None are left out."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.reset, self.report = graph.reset, graph.report
        self.need_backward_dw, self.backward_dw = graph.need_backward_dw, graph.backward_dw

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return without_none(self._graph(*args, **kwargs))


class VisionTECudaGraphHelper(TECudaGraphHelper):
    """Captures the layers of the `vision_model` in model chunks ahead of time.

    Example:
        >>> length = get_vision_cuda_graph_seq_length(config.vision)
        >>> vision = VisionTECudaGraphHelper([model], config.vision, length, micro_batch_size=2)
        >>> vision.create_cudagraphs()
        >>> language.create_cudagraphs()        # a TECudaGraphHelper: it clears the gradients
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        vision_config: Any,
        vision_seq_length: int,
        micro_batch_size: int,
        num_microbatches: int = 1,
        *,
        order: Sequence[float] | None = None,
        registry: ScopeRegistry | None = None,
        sample_arguments: SampleArguments | None = None,
        reuse_buffers: bool = True,
    ) -> None:
        super().__init__(
            model,
            vision_config,
            vision_seq_length,
            micro_batch_size,
            num_microbatches=num_microbatches,
            pipeline_parallel_rank=0,  # the stage that sees the images
            order=order,
            registry=registry,
            sample_arguments=sample_arguments,
            reuse_buffers=reuse_buffers,
        )
        self._has_order = order is not None
        self._sizes = replace(self._sizes, micro_batch_size=1)  # images are concatenated along the sequence

    def cuda_graph_set_manual_hooks(self) -> None:
        """Nothing: the encoder's parameters are not gathered by hooks."""

    def _hidden_size(self) -> int | None:
        size: int | None = setting(self.config, "hidden_size")
        return size

    def _belongs(self, part: Part) -> bool:
        return VISION in part.path.split(".")

    def _has_layers(self) -> bool:
        return any(VISION in path.split(".") for chunk in self.model for path, _ in chunk.named_modules())

    def _plan(self, layers_of_chunk: Sequence[int]) -> RankOrder:
        """The encoder works when the first chunk of its rank does, whatever chunks there are beside it."""
        layers = sum(layers_of_chunk)
        chunks = 1 if self._has_order else int(setting(self.config, "virtual_pipeline_model_parallel_size", 1))
        plan = self._order_of_rank([layers, *[0] * (chunks - 1)], may_overlap=False)
        if chunks == 1:
            return plan
        order = [number for number in plan.order if abs(number) == 1]
        return RankOrder(order, (layers,), (layers,), plan.num_microbatches, plan.one_for_all)

    def _wrap(self, graph: Any) -> Any:
        return VisionGraph(graph)

    def _wait_for_ranks(self) -> None:
        """Nobody: ranks without a vision encoder may not come here."""

    def _clean_up(self) -> None:
        """Nothing: the language helper does."""
