"""`TECudaGraphHelper` captures a model's layers ahead of time: one graph for each layer and microbatch.

A training loop has model chunks, a config, and sizes. From these the helper finds the layers (by the scope registry),
makes sample arguments, derives the order in which this rank of the pipeline works, and captures everything with
`make_graphed_callables`. Then each layer's forward looks up the current microbatch and replays.

    helper = TECudaGraphHelper(model_chunks, config, seq_length, micro_batch_size, optimizers)
    for step, microbatches in enumerate(data):
        if step == config.cuda_graph_warmup_steps:
            helper.create_cudagraphs()
            helper.cuda_graph_set_manual_hooks()
        train_step(microbatches)        # calls set_current_microbatch(chunk, i) before each forward
    helper.delete_cuda_graphs()

Ranks of one pipeline capture at the same time, and none goes on before all are done: a rank that waits in a collective
for one that captures would run into its timeout.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.config.objects import checked_settings
from stepgraph.config.spellings import model_of
from stepgraph.core.errors import InvalidArgument
from stepgraph.core.frames import warn_user
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import with_article
from stepgraph.engine.call.options import checked
from stepgraph.engine.guards.hooks import spelled
from stepgraph.engine.parts.callables.graphed import CallablesReport
from stepgraph.engine.parts.callables.make_graphed import make_graphed_callables
from stepgraph.engine.parts.modules.scopes import Part, ScopeRegistry
from stepgraph.megatron.part_graphs import PartGraphs, graphs_in
from stepgraph.megatron.rank_order import RankOrder, order_of_rank, setting
from stepgraph.megatron.samples import (
    Found,
    SampleArguments,
    Sizes,
    parts_of,
    why_nothing,
    with_decoder_layers,
    with_samples,
)

_log = logging.getLogger(__name__)

VISION = "vision_model"
"""The module of a chunk that has the vision encoder; another helper captures its layers."""
_DELETED = "the graphs were deleted"
_NOTHING = """this rank captures nothing: {}   [scope]
Why: all of its calls run eagerly. In a pipeline that may be as it should be: other ranks have the layers.
Fix: name the parts, cuda_graph_modules=["layers.*"] for example; or registry=ScopeRegistry().register(YourLayer)."""


class TECudaGraphHelper:
    """Captures the layers of model chunks ahead of time, one graph for each layer and microbatch.

    `config` is read for `cuda_graph_impl`, `cuda_graph_modules` or `cuda_graph_scope` (see docs/config.md: with
    "none" nothing is captured), `hidden_size` and the pipeline (`pipeline_model_parallel_size`, `num_microbatches`,
    `microbatch_group_size_per_vp_stage`, `overlap_moe_expert_parallel_comm`, `delay_wgrad_compute`); what it lacks
    is as in a training without a pipeline.

    Example:
        >>> helper = TECudaGraphHelper([model], config, seq_length=1024, micro_batch_size=1, optimizers=[optimizer])
        >>> helper.create_cudagraphs()
        >>> for index, (tokens, targets) in enumerate(microbatches):
        ...     stepgraph.set_current_microbatch(model, index)
        ...     model(tokens, targets).backward()
    """

    @entry_point
    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        config: Any,
        seq_length: int,
        micro_batch_size: int,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        num_microbatches: int | None = None,
        pipeline_parallel_rank: int | None = None,
        order: Sequence[float] | None = None,
        registry: ScopeRegistry | None = None,
        sample_arguments: SampleArguments | None = None,
        aux_loss_trackers: Iterable[Any] = (),
        reuse_buffers: bool = True,
    ) -> None:
        for name, value in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size)):
            checked(name, value, int)
        self.model = [model] if isinstance(model, torch.nn.Module) else list(model)
        self.config, self.optimizers = config, _read_optimizers(optimizers)
        self._settings = checked_settings(config)
        self._sizes = Sizes(seq_length, micro_batch_size, self._hidden_size())
        self._order_of_rank = functools.partial(
            order_of_rank,
            model_of(config),
            num_microbatches=num_microbatches,
            pipeline_parallel_rank=pipeline_parallel_rank,
            order=order,
        )
        self._registry, self._sample_arguments = registry or ScopeRegistry(), sample_arguments
        self._aux_loss_trackers = tuple(aux_loss_trackers)
        self._reuse_buffers = reuse_buffers
        self._graphs: list[PartGraphs] = []
        self._is_finished = False
        self._why_none = "create_cudagraphs() was not called"
        """Why there are no graphs, where there are none."""
        self.capture_seconds = 0.0
        """Seconds that the last capture took, with its warm-up."""

    def _hidden_size(self) -> int | None:
        configs = [model_of(self.config), *(getattr(chunk, "config", None) for chunk in self.model)]
        return next((size for config in configs if (size := setting(config, "hidden_size")) is not None), None)

    # -- capturing

    @entry_point
    def create_cudagraphs(self) -> None:
        """Capture the layers of this rank, for all microbatches; those captured before are captured again.

        Afterwards gradients are zero, and trackers of auxiliary losses empty, as at the start of a step.
        """
        for graphs in self._graphs:
            graphs.remove()
        self._graphs, self._is_finished, self._why_none = [], False, _DELETED
        self._settings = checked_settings(self.config)  # as it is now
        self._wait_for_ranks()
        begun = time.perf_counter()
        eager_reason = self._settings.reason_for_eager
        found = [self._found_in(chunk) for chunk in self.model] if eager_reason is None else []
        if eager_reason is not None:
            _log.warning("no layer is captured: %s", eager_reason)
        elif any(found):
            self._graphs = self._capture(found)
            self.capture_seconds = time.perf_counter() - begun
            self._clean_up()
            _log.info("captured %d layers in %.2f s", len(self._graphs), self.capture_seconds)
        else:
            self._why_none = why_nothing(self.model, self._settings.scope)
            if self._has_layers():
                warn_user(_NOTHING.format(self._why_none))
        self._wait_for_ranks()
        self._is_finished = True

    def capture_finished(self) -> bool:
        """Whether create_cudagraphs() was called, also on a rank that had nothing to capture, or after a deletion."""
        return self._is_finished

    def graphs_created(self) -> bool:
        """Whether this rank replays graphs."""
        return any(graphs.is_in_place for graphs in self._graphs)

    def report(self) -> CallablesReport:
        """What was captured and replayed on this rank; without graphs the reason."""
        if not self.graphs_created():
            return CallablesReport(eager_reason=self._settings.reason_for_eager or self._why_none)
        found: CallablesReport = self._graphs[0].graphs[0].report()
        return found

    @property
    def replays(self) -> int:
        """Replayed forwards so far; cheaper than a report."""
        return int(self._graphs[0].graphs[0].replays) if self.graphs_created() else 0

    @property
    def audits(self) -> int:
        """Audits so far; cheaper than a report."""
        return int(self._graphs[0].graphs[0].audits) if self.graphs_created() else 0

    @property
    def paths(self) -> list[str]:
        """The parts that have graphs, chunk after chunk."""
        return [graphs.part.path for graphs in self._graphs if graphs.is_in_place]

    def _found_in(self, chunk: torch.nn.Module) -> list[Found]:
        registry = with_decoder_layers(chunk, self._registry)
        parts = [part for part in parts_of(chunk, self._settings.scope, registry) if self._belongs(part)]
        return with_samples(chunk, parts, registry, self._sizes, self._sample_arguments)

    def _belongs(self, part: Part) -> bool:
        return VISION not in part.path.split(".")

    def _has_layers(self) -> bool:
        """Whether this rank should have something to capture."""
        return True

    def _plan(self, layers_of_chunk: Sequence[int]) -> RankOrder:
        return self._order_of_rank(layers_of_chunk)

    def _capture(self, found: Sequence[Sequence[Found]]) -> list[PartGraphs]:
        plan = self._plan([len(chunk) for chunk in found])
        places = [(c, i, each) for c, chunk in enumerate(found) for i, each in enumerate(chunk)]
        samples = {
            plan.sample(c, i, microbatch): each.sample
            for c, i, each in places
            for microbatch in range(plan.num_microbatches)
        }
        in_order, parts = [samples[index] for index in range(len(samples))], [each.part for _, _, each in places]
        graphs = make_graphed_callables(
            tuple(p.module if p.method == "forward" else getattr(p.module, p.method) for p in parts),
            tuple(sample.args for sample in in_order),
            sample_kwargs=tuple(sample.kwargs for sample in in_order),
            order=plan.order,
            num_layers_per_chunk=plan.num_layers_per_chunk,
            allow_unused_input=True,
            reuse_buffers=self._reuse_buffers,
        )
        return [
            PartGraphs(
                self.model[c],
                each.part,
                each.sample,
                [self._wrap(graphs[plan.sample(c, i, microbatch)]) for microbatch in range(plan.num_microbatches)],
                one_for_all=plan.one_for_all,
            )
            for c, i, each in places
        ]

    def _wrap(self, graph: Any) -> Any:
        return graph

    def _wait_for_ranks(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.barrier()

    def _clean_up(self) -> None:
        for chunk in self.model:
            zero: Callable[[], Any] = getattr(chunk, "zero_grad_buffer", chunk.zero_grad)
            zero()
            for module in chunk.modules():
                clear = getattr(module, "clear_aux_losses_tracker", None)
                if clear is not None:
                    clear()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for tracker in self._aux_loss_trackers:
            tracker.clear()

    # -- around the graphs

    def cuda_graph_set_manual_hooks(self) -> None:
        """Have the hooks that gather parameters run before each replay: hooks inside a graph do not run.

        A chunk that gathers its parameters before they are used has `_make_forward_pre_hook()`, which makes such a
        hook. One is made for each module inside a graphed part that has parameters of its own.
        """
        owners = [(chunk, {id(module) for module in chunk.modules()}) for chunk in self.model]
        for graphs in self._graphs:
            graphs.manual_hooks.clear()
            for chunk, inside in owners:
                make = getattr(chunk, "_make_forward_pre_hook", None)
                if make is None or id(graphs.part.module) not in inside:
                    continue
                owning = [m for m in graphs.part.module.modules() if any(p is not None for p in m._parameters.values())]
                hooks = [make() for _ in owning]
                graphs.manual_hooks += [functools.partial(h, m, ()) for h, m in zip(hooks, owning, strict=True)]
                for graph in graphs.graphs:  # the chunk may switch its own on and off
                    graph.admit_hooks([spelled(hook) for hook in hooks])

    def backward_dw(self, layer: torch.nn.Module, microbatch_id: int) -> None:
        """Replay the weight gradients of a layer's microbatch, after its backward.

        With `overlap_moe_expert_parallel_comm` and `delay_wgrad_compute` they are entries of their own in the order.
        """
        for graphs in reversed(graphs_in(layer)):
            graphs.backward_dw(microbatch_id)

    def delete_cuda_graphs(self) -> None:
        """Free all graphs captured ahead of time in this model, also a vision encoder's; its layers are as before."""
        for graphs in [*graphs_in(self.model), *self._graphs]:
            graphs.remove()
        self._graphs = []


def _read_optimizers(given: Any) -> tuple[Any, ...]:
    """One optimizer, or several, whatever wraps them: gradients are cleared by their `zero_grad()`."""
    found = (given,) if hasattr(given, "zero_grad") else tuple(given) if isinstance(given, Iterable) else (given,)
    for optimizer in found:
        if not hasattr(optimizer, "zero_grad"):
            raise InvalidArgument(
                f"optimizers: {with_article(type(optimizer))} is no optimizer",
                rule="option",
                why="after the capture their gradients are cleared, by zero_grad().",
                fix="pass a list of optimizers, or leave it out if you clear the gradients yourself.",
            )
    return found
