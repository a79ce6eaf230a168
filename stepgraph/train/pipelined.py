"""Pipeline parallelism: each rank trains a stage of the model, with the schedules of `torch.distributed.pipelining`.

Every rank builds the whole model from one seed and keeps its own part: the first stage the embedding, the last one the
norm and the head, each a share of the layers. The 1F1B schedule runs the microbatches, and graphs stand in for parts of
a stage, or for all of it:

| `cuda_graph_impl` | scope | captured on each rank |
|---|---|---|
| `local` | empty | the stage as a whole (`stepgraph.graph_stage`) |
| `local` | words | each part, from the calls of the warm-up; microbatches in flight have graphs of their own |
| `transformer_engine` | words, or empty for layers | each part and microbatch ahead of time, in the rank's order |

Losses are known to the last stage only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from stepgraph.errors import InvalidArgument
from stepgraph.models import GPT
from stepgraph.pair.module_method import put_in_place
from stepgraph.pipeline.stage import graph_stage
from stepgraph.session.report import GraphReport
from stepgraph.train.data import Sample
from stepgraph.train.implementations import Implementation, Work, choose
from stepgraph.train.iteration import Finish, Result
from stepgraph.train.ranks import Ranks


class StageModule(nn.Module):
    """The part of a GPT that one rank of a pipeline trains: tokens or hidden states in, hidden states or logits out."""

    def __init__(self, whole: GPT, stage: int, num_stages: int, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        blocks = list(whole.blocks)
        first, last = (len(blocks) * number // num_stages for number in (stage, stage + 1))
        self.config, self.rotary = whole.config, whole.rotary
        self.blocks = nn.ModuleList(blocks[first:last])
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.embedding = whole.embedding if self.is_first else None
        self.places = whole.places if self.is_first else None
        self.dropout = whole.dropout
        self.norm: nn.Module | None = whole.norm if self.is_last else None
        self.head: nn.Module | None = whole.head if self.is_last else None
        self._is_tied = whole.head.weight is whole.embedding.weight
        self._autocast = autocast

    @property
    def tied(self) -> Any:
        """The matrix of which the first and the last stage have a copy each, on these two; else None."""
        owner = self.embedding if self.embedding is not None else self.head
        return owner.weight if self._is_tied and owner is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """Run this stage."""
        kind = x.device.type
        with torch.autocast(kind, self._autocast) if self._autocast is not None else contextlib.nullcontext():
            if self.embedding is not None:
                length = x.shape[-1]
                x = self.embedding(x)
                x = self.dropout(x if self.places is None else x + self.places[:length])
            for block in self.blocks:
                x = block(x, self.rotary)
            return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def stage_of(model: nn.Module, ranks: Ranks, autocast: torch.dtype | None) -> StageModule:
    """Return this rank's part of a model; refuse models that this file cannot divide."""
    reason = fix = ""
    if type(model) is not GPT:
        reason = f"a {type(model).__name__} is not divided into stages, only dense GPTs are"
        fix = "model.kind=gpt without experts"
    elif len(model.blocks) < ranks.pipeline_size:
        reason = f"{len(model.blocks)} layers are fewer than {ranks.pipeline_size} stages"
        fix = "a larger model.num_layers"
    elif model.config.recompute_granularity is not None:
        reason = "layers of a stage are not recomputed (model.recompute_granularity)"
        fix = "model.recompute_granularity=none"
    if reason:
        raise _refused(reason, fix)
    assert isinstance(model, GPT)
    return StageModule(model, ranks.stage, ranks.pipeline_size, autocast)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32; a target of -100 is left out."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class PipelineIteration:
    """Runs the microbatches of an iteration by a schedule. It has the form of `iteration.forward_backward`.

    Evaluation has a schedule of its own. One schedule for both would try out shapes, forward and backward, each time
    that training goes on after an evaluation, and graphs of parts are not made for that.
    """

    def __init__(self, stage_module: StageModule, num_microbatches: int, ranks: Ranks) -> None:
        self._is_first, self._is_last = stage_module.is_first, stage_module.is_last
        self._device = next(stage_module.parameters()).device
        sizes = (ranks.stage, ranks.pipeline_size, self._device)
        self.stage, evaluated = (PipelineStage(stage_module, *sizes, group=ranks.stage_group) for _ in range(2))
        self.schedule = Schedule1F1B(self.stage, num_microbatches, loss_fn=token_loss)
        self._evaluation = Schedule1F1B(evaluated, num_microbatches, loss_fn=token_loss)
        self._before_microbatch: Callable[[int], None] | None = None

    def announce(self) -> None:
        """Call `before_microbatch` before each forward."""
        put_in_place(self.stage, "forward_one_chunk", self._announcing(self.stage.forward_one_chunk))

    def _announcing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Tell graphs of single microbatches which one the schedule runs next; it has no hook for that."""

        def forward_one_chunk(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if self._before_microbatch is not None:
                self._before_microbatch(chunk_id)
            return forward(chunk_id, *args, **kwargs)

        return forward_one_chunk

    def __call__(
        self,
        *,
        data_iterator: Iterator[Sample],
        forward_only: bool = False,
        finish: Finish | None = None,
        before_microbatch: Callable[[int], None] | None = None,
        **_: Any,
    ) -> Result:
        """Run all microbatches; the schedule calls the model, and averages gradients over them."""
        self._before_microbatch = before_microbatch
        loss = self._run(self._evaluation.eval if forward_only else self.schedule.step, list(data_iterator))
        return Result(loss, finish(None) if finish is not None and not forward_only else None)

    def _run(self, step: Callable[..., Any], microbatches: Sequence[Sample]) -> Tensor:
        """Return the mean loss, 0 on all but the last stage."""
        given = [torch.cat([batch["tokens"] for batch in microbatches])] if self._is_first else []
        if not self._is_last:
            step(*given)
            return torch.zeros((), device=self._device)
        losses: list[Tensor] = []
        step(*given, target=torch.cat([batch["targets"] for batch in microbatches]), losses=losses)
        return torch.stack([loss.detach() for loss in losses]).mean()


class WholeStage(Implementation):
    """Graphs of a stage as a whole, captured by the schedule's own steps."""

    name = "local"

    def __init__(self, work: Work, iteration: PipelineIteration, warmup: int) -> None:
        super().__init__(work)
        steps = self.warmup_steps(warmup)
        self._handle = graph_stage(iteration.stage, iteration.schedule, warmup=steps, session=work.session)
        self._closed_report: GraphReport | None = None

    def warmup_steps(self, wanted: int) -> int:
        return max(1, wanted)

    def train(self, microbatches: Sequence[Sample]) -> Result:
        result = super().train(microbatches)
        if not self.is_captured:
            report = self._handle.report()
            self.is_captured, self.capture_seconds = report.tally()[0] > 0, report.capture_seconds
        return result

    def capture(self) -> None:
        return  # the next call of `train` captures

    @property
    def num_graphed(self) -> int:
        return len(self._handle.report().rows)

    def report(self) -> GraphReport | None:
        return self._closed_report if self._closed_report is not None else self._handle.report()

    def close(self) -> None:
        if self._closed_report is None:
            self._closed_report = self._handle.report()
            self._handle.close()


def choose_for_stage(work: Work, cfg: Any, ranks: Ranks) -> Implementation:
    """Return the implementation that a validated configuration names, for this rank's stage."""
    if cfg.model.captures_iteration:
        reason = "the graph of an iteration would hold the transfers between stages (scope full_iteration)"
        raise _refused(reason, 'model.cuda_graph_scope=[] or words such as ["attn"]')
    if work.num_microbatches < ranks.pipeline_size:
        reason = f"{work.num_microbatches} microbatches are fewer than {ranks.pipeline_size} stages"
        raise _refused(reason, "a larger train.global_batch_size")
    assert isinstance(work.core, StageModule)
    iteration = PipelineIteration(work.core, work.num_microbatches, ranks)
    work = replace(work, forward_backward=iteration)
    if cfg.model.cuda_graph_impl == "local" and not cfg.model.cuda_graph_scope:
        return WholeStage(work, iteration, cfg.model.cuda_graph_warmup_steps)
    iteration.announce()
    return choose(work, cfg, stage=ranks.stage)


def _refused(reason: str, fix: str) -> InvalidArgument:
    return InvalidArgument(
        f"model.pipeline_model_parallel_size: {reason}",
        rule="not-trained",
        why="the loop runs stages of a dense GPT by the 1F1B schedule.",
        fix=f"{fix}, or model.pipeline_model_parallel_size=1.",
    )
