"""Pipeline parallelism: each rank trains stages of the model, with the schedules of `torch.distributed.pipelining`.

Every rank builds the whole model from one seed and keeps its own part: the first stage the embedding, the last one the
norm and the head, each a share of the layers. A rank has one stage and runs the 1F1B schedule, or, with
`model.virtual_pipeline_model_parallel_size`, several and runs the interleaved one: of p ranks, rank r has the stages r,
p + r, 2 p + r and so on. Graphs stand in for parts of the stages, or for all of them:

| `cuda_graph_impl` | scope | captured on each rank |
|---|---|---|
| `local` | empty | each stage as a whole (`stepgraph.graph_stage`) |
| `local` | words | each part, from the calls of the warm-up; microbatches in flight have graphs of their own |
| `transformer_engine` | words, or empty for layers | each part and microbatch ahead of time, in the rank's order |

The order is read from the schedule itself (`order_from_pipelining`). Losses are known to the last stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import counted, with_article
from stepgraph.engine.call.report import GraphReport
from stepgraph.engine.order import order_from_pipelining
from stepgraph.engine.parts.stages.stage import graph_stage
from stepgraph.engine.record.pair.module_method import put_in_place
from stepgraph.lab.models import GPT
from stepgraph.lab.train.data import Sample
from stepgraph.lab.train.implementations import Implementation, Work, choose
from stepgraph.lab.train.iteration import Finish, Result, autocasting
from stepgraph.lab.train.lora import LoRALinear
from stepgraph.lab.train.ranks import Ranks


class StageModule(nn.Module):
    """One stage of a GPT: tokens or hidden states in, hidden states or logits out."""

    def __init__(self, whole: GPT, stage: int, num_stages: int, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.place = (stage, num_stages)
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
        self._is_tied = _weight(whole.head) is whole.embedding.weight
        self._autocast = autocast

    @property
    def tied(self) -> Any:
        """The matrix of which the first and the last stage have a copy each, on these two; else None."""
        owner = self.embedding if self.embedding is not None else self.head
        return _weight(owner) if self._is_tied and owner is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """Run this stage."""
        with autocasting(x.device, self._autocast):
            if self.embedding is not None:
                length = x.shape[-1]
                x = self.embedding(x)
                x = self.dropout(x if self.places is None else x + self.places[:length])
            for block in self.blocks:
                x = block(x, self.rotary)
            return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


class RankStages(nn.ModuleDict):
    """The stages of a model that one rank trains, in the order of the model; the schedule calls them one by one."""

    def __init__(self, stages: Iterable[StageModule], whole: nn.Module) -> None:
        super().__init__({f"stage_{stage.place[0]}": stage for stage in stages})
        names: dict[int, list[str]] = {}
        for name, tensor in whole.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        self.whole_names = {name: names[id(tensor)] for name, tensor in self.state_dict(keep_vars=True).items()}
        """The names that each tensor has in the whole model: two, if the embedding is the head's matrix too."""

    @property
    def chunks(self) -> list[StageModule]:
        return [stage for stage in self.values() if isinstance(stage, StageModule)]

    @property
    def tied(self) -> Any:
        """This rank's copy of a matrix that the first and the last stage share, if it has one."""
        return next((stage.tied for stage in self.chunks if stage.tied is not None), None)


def stages_of(model: nn.Module, ranks: Ranks, autocast: torch.dtype | None, num_chunks: int = 1) -> RankStages:
    """Return this rank's stages of a model, `num_chunks` of them; refuse models that this file cannot divide."""
    num_stages = ranks.pipeline_size * num_chunks
    reason = fix = ""
    if type(model) is not GPT:
        reason = f"{with_article(type(model))} is not divided into stages, only dense GPTs are"
        fix = "model.kind=gpt without experts"
    elif len(model.blocks) < num_stages:
        several = f" ({ranks.pipeline_size} ranks with {counted(num_chunks, 'chunks')} each)" if num_chunks > 1 else ""
        reason = f"{counted(len(model.blocks), 'layers are', 'layer is')} fewer than {num_stages} stages{several}"
        fix = f"model.num_layers={num_stages} or more"
    elif model.config.recompute_granularity is not None:
        reason = "layers of a stage are not recomputed (model.recompute_granularity)"
        fix = "model.recompute_granularity=none"
    if reason:
        raise _refused(reason, fix)
    assert isinstance(model, GPT)
    places = range(ranks.stage, num_stages, ranks.pipeline_size)
    return RankStages((StageModule(model, place, num_stages, autocast) for place in places), model)


def _weight(layer: nn.Module) -> Any:
    return layer.base.weight if isinstance(layer, LoRALinear) else layer.weight


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32; a target of -100 is left out."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class PipelineIteration:
    """Runs the microbatches of an iteration by a schedule. It has the form of `iteration.forward_backward`.

    Evaluation has a schedule of its own. One schedule for both would try out shapes, forward and backward, each time
    that training goes on after an evaluation, and graphs of parts are not made for that.
    """

    def __init__(self, chunks: Sequence[StageModule], num_microbatches: int, ranks: Ranks) -> None:
        self._is_first, self._is_last = (any(getattr(c, name) for c in chunks) for name in ("is_first", "is_last"))
        self._device = next(chunks[0].parameters()).device
        self.stages, evaluated = (
            [PipelineStage(chunk, *chunk.place, self._device, group=ranks.stage_group) for chunk in chunks]
            for _ in range(2)
        )
        self.schedule, self._evaluation = (_schedule(stages, num_microbatches) for stages in (self.stages, evaluated))
        self._before_microbatch: Callable[[int], None] | None = None

    def announce(self) -> None:
        """Call `before_microbatch` before each forward of a stage."""
        for stage in self.stages:
            put_in_place(stage, "forward_one_chunk", self._announcing(stage.forward_one_chunk))

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


def _schedule(stages: list[Any], num_microbatches: int) -> Any:
    """Return the schedule of a rank with one stage, or with several."""
    if len(stages) == 1:
        return Schedule1F1B(stages[0], num_microbatches, loss_fn=token_loss)
    return ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=token_loss)


class WholeStages(Implementation):
    """Graphs of a rank's stages, each as a whole, captured by the schedule's own steps."""

    name = "local"

    def __init__(self, work: Work, iteration: PipelineIteration, warmup: int) -> None:
        super().__init__(work)
        steps = self.warmup_steps(warmup)
        self._handle = graph_stage(iteration.stages, iteration.schedule, warmup=steps, session=work.session)
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


def refuse_schedule(cfg: Any, num_microbatches: int) -> None:
    """Refuse what the schedules cannot run, before anything is built."""
    size, num_chunks = cfg.model.pipeline_model_parallel_size, num_chunks_of(cfg)
    if size > 1 and cfg.model.captures_iteration:
        reason = "the graph of an iteration would hold the transfers between stages (scope full_iteration)"
        raise _refused(reason, 'model.cuda_graph_scope=[] or words such as ["attn"]')
    if num_microbatches < size:
        reason = f"{counted(num_microbatches, 'microbatches are', 'microbatch is')} fewer than {size} stages"
        raise _refused(reason, "a larger train.global_batch_size")
    if num_chunks > 1 and num_microbatches % size:
        raise InvalidArgument(
            f"model.virtual_pipeline_model_parallel_size={num_chunks}: {num_microbatches} microbatches are no multiple "
            f"of {size} pipeline ranks",
            rule="not-trained",
            why="interleaved, a rank runs as many microbatches through one chunk as there are ranks, then the next.",
            fix=f"a train.global_batch_size that gives a multiple of {size} microbatches to each pipeline, or "
            "model.virtual_pipeline_model_parallel_size=1.",
        )


def num_chunks_of(cfg: Any) -> int:
    """Return the number of stages that each rank has."""
    return int(cfg.model.virtual_pipeline_model_parallel_size or 1)


def choose_for_stages(work: Work, cfg: Any, ranks: Ranks) -> Implementation:
    """Return the implementation that a validated configuration names, for this rank's stages."""
    assert isinstance(work.core, RankStages)
    iteration = PipelineIteration(work.core.chunks, work.num_microbatches, ranks)
    order = order_from_pipelining(iteration.schedule)
    work = replace(work, forward_backward=iteration, chunks=work.core.chunks, order=order)
    if cfg.model.cuda_graph_impl == "local" and not cfg.model.cuda_graph_scope:
        return WholeStages(work, iteration, cfg.model.cuda_graph_warmup_steps)
    iteration.announce()
    return choose(work, cfg)


def _refused(reason: str, fix: str) -> InvalidArgument:
    return InvalidArgument(
        f"model.pipeline_model_parallel_size: {reason}",
        rule="not-trained",
        why="the loop runs stages of a dense GPT by the 1F1B schedule, or by the interleaved one.",
        fix=f"{fix}, or model.pipeline_model_parallel_size=1.",
    )
