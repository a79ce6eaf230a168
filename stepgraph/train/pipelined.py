"""Pipeline parallelism: each rank trains a stage of the model, with the schedules of `torch.distributed.pipelining`.

Every rank builds the whole model from one seed and keeps its own part: the first stage the embedding, the last one the
norm and the head, each a share of the layers. The 1F1B schedule runs the microbatches. With `cuda_graph_impl=local` and
an empty scope each stage is graphed as a whole (`stepgraph.graph_stage`). Parts of a stage are not: torch's schedules
ask for the gradients of inputs and of weights apart, which graphs of parts do not give.

Losses are known to the last stage only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from stepgraph.errors import InvalidArgument
from stepgraph.models import GPT
from stepgraph.pipeline.stage import GraphedStages, graph_stage
from stepgraph.session.report import GraphReport
from stepgraph.train.data import Sample
from stepgraph.train.implementations import Implementation, Work
from stepgraph.train.iteration import Result
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
        self._autocast = autocast

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
    elif model.head.weight is model.embedding.weight:
        reason = "the first and the last stage would share a matrix (model.share_embeddings_and_output_weights)"
        fix = "model.share_embeddings_and_output_weights=false"
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


class Pipelined(Implementation):
    """Runs iterations by a pipeline schedule, with or without graphs."""

    name = "pipeline"

    def __init__(self, work: Work, cfg: Any, ranks: Ranks) -> None:
        super().__init__(work)
        is_graphed = cfg.model.cuda_graph_impl != "none"
        if is_graphed and (cfg.model.cuda_graph_impl != "local" or cfg.model.cuda_graph_scope):
            reason = "stages are graphed as a whole, with model.cuda_graph_impl=local and an empty scope"
            raise _refused(reason, "model.cuda_graph_impl=local model.cuda_graph_scope=[]")
        if work.num_microbatches < ranks.pipeline_size:
            reason = f"{work.num_microbatches} microbatches are fewer than {ranks.pipeline_size} stages"
            raise _refused(reason, "a larger train.global_batch_size")
        stage_module = work.core
        assert isinstance(stage_module, StageModule)
        self._is_first, self._is_last = stage_module.is_first, stage_module.is_last
        self._device = next(stage_module.parameters()).device
        self._stage = PipelineStage(
            stage_module, ranks.stage, ranks.pipeline_size, self._device, group=ranks.stage_group
        )
        self._schedule = Schedule1F1B(self._stage, work.num_microbatches, loss_fn=token_loss)
        warmup = self.warmup_steps(cfg.model.cuda_graph_warmup_steps)
        self._handle: GraphedStages | None = (
            graph_stage(self._stage, self._schedule, warmup=warmup, session=work.session) if is_graphed else None
        )
        self._closed_report: GraphReport | None = None

    def warmup_steps(self, wanted: int) -> int:
        return max(1, wanted)

    def train(self, microbatches: Sequence[Sample]) -> Result:
        work = self.work
        work.optimizer.zero_grad()
        loss = self._run(self._schedule.step, microbatches)
        norm = work.finish(None)
        work.optimizer.step()
        if self._handle is not None:
            report = self._handle.report()
            self.is_captured, self.capture_seconds = report.tally()[0] > 0, report.capture_seconds
        return Result(loss, norm)

    def evaluate(self, microbatches: Sequence[Sample]) -> Tensor:
        return self._run(self._schedule.eval, microbatches)

    def _run(self, step: Any, microbatches: Sequence[Sample]) -> Tensor:
        """Run a schedule over all microbatches; return the mean loss, 0 on all but the last stage."""
        given = [torch.cat([batch["tokens"] for batch in microbatches])] if self._is_first else []
        if not self._is_last:
            step(*given)
            return torch.zeros((), device=self._device)
        losses: list[Tensor] = []
        step(*given, target=torch.cat([batch["targets"] for batch in microbatches]), losses=losses)
        return torch.stack([loss.detach() for loss in losses]).mean()

    def capture(self) -> None:
        return  # the next call of `train` captures

    @property
    def num_graphed(self) -> int:
        return len(self._handle.report().rows) if self._handle is not None else 0

    def report(self) -> GraphReport | None:
        if self._closed_report is not None or self._handle is None:
            return self._closed_report
        return self._handle.report()

    def close(self) -> None:
        if self._handle is not None and self._closed_report is None:
            self._closed_report = self._handle.report()
            self._handle.close()

    def eager(self) -> Implementation:
        """Go on without graphs: the stages are as before after `close`."""
        self._handle = None
        return self


def _refused(reason: str, fix: str) -> InvalidArgument:
    return InvalidArgument(
        f"model.pipeline_model_parallel_size: {reason}",
        rule="not-trained",
        why="the loop runs stages of a dense GPT by the 1F1B schedule.",
        fix=f"{fix}, or model.pipeline_model_parallel_size=1.",
    )
