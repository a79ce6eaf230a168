"""What `cuda_graph_impl` and `cuda_graph_scope` choose: how an iteration runs, and when graphs come into being.

| `cuda_graph_impl` | scope | class | captured |
|---|---|---|---|
| `none` | | `Eager` | nothing |
| `local` | words, or empty for whole layers | `LocalScopes` | each part, from the calls of the warm-up |
| `local` | `full_iteration` | `FullIteration` | one graph: forward, backward, clipping and optimizer |
| `transformer_engine` | words, or empty for whole layers | `AheadOfTime` | each part, from sample arguments |

All of them run the same iteration (`iteration`), and each gives the losses of `Eager` bit for bit.
"""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from stepgraph.engine.call.report import GraphReport
from stepgraph.engine.call.session import Session
from stepgraph.engine.observe.ddp import warmup_calls
from stepgraph.engine.parts.modules.graph_modules import graph_modules
from stepgraph.engine.parts.modules.scopes import ScopeRegistry, read_scope
from stepgraph.engine.step.full_iteration import FullCudaGraphWrapper
from stepgraph.lab.train.data import Sample
from stepgraph.lab.train.gathered import GatheredModel
from stepgraph.lab.train.iteration import Finish, ForwardStep, Result, autocasting, forward_backward
from stepgraph.megatron.layers_helper import TECudaGraphHelper
from stepgraph.megatron.part_graphs import set_current_microbatch
from stepgraph.megatron.samples import parts_of


@dataclass(frozen=True)
class Work:
    """What an iteration works with; `model` may be `core` wrapped in DDP."""

    model: nn.Module
    core: nn.Module
    optimizer: torch.optim.Optimizer
    forward_step: ForwardStep
    finish: Finish
    num_microbatches: int
    session: Session
    gathered: GatheredModel | None = None
    """The model around `core` whose parameters are gathered before each forward, if they are."""
    device_flags: bool = False
    """Whether NaN checks are flags inside the graph of an iteration."""
    forward_backward: Callable[..., Result] = forward_backward
    """Runs the microbatches of an iteration; a pipeline has its own."""
    chunks: Sequence[nn.Module] = ()
    """The stages that this rank of a pipeline runs one by one; none where `core` is run as a whole."""
    order: Sequence[float] | None = None
    """The order in which this rank of a pipeline runs its chunks."""


class Implementation(ABC):
    """Runs iterations; `Eager` runs them as they are, and the others capture and replay."""

    name: ClassVar[str]
    evaluates_eagerly: ClassVar[bool] = True

    def __init__(self, work: Work) -> None:
        self.work = work
        self.is_captured = False
        self.capture_seconds = 0.0

    def train(self, microbatches: Sequence[Sample]) -> Result:
        """Run a training iteration with its optimizer step."""
        work = self.work
        work.optimizer.zero_grad()
        result = work.forward_backward(
            forward_step_func=work.forward_step,
            data_iterator=iter(microbatches),
            model=work.model,
            num_microbatches=work.num_microbatches,
            finish=work.finish,
            before_microbatch=self._before_microbatch(),
        )
        work.optimizer.step()
        return result

    def evaluate(self, microbatches: Sequence[Sample]) -> torch.Tensor:
        """Return the loss of an iteration's data; the caller has switched the model to evaluation."""
        return self.work.forward_backward(
            forward_step_func=self.work.forward_step,
            data_iterator=iter(microbatches),
            model=self.work.core,
            num_microbatches=self.work.num_microbatches,
            forward_only=True,
        ).loss

    def _before_microbatch(self) -> Any:
        return None

    def warmup_steps(self, wanted: int) -> int:
        """Return the number of eager iterations before the capture."""
        return wanted

    def capture(self) -> None:
        """Capture now, between two iterations. An implementation that captures while it runs does nothing."""
        self.is_captured = True

    @property
    def num_graphed(self) -> int:
        """The number of layers or parts with graphs."""
        return 0

    def report(self) -> GraphReport | None:
        return None

    @property
    def replays(self) -> int:
        """Replays so far; the loop asks after each iteration."""
        report = self.report() if self.is_captured else None
        return report.tally()[0] if report is not None else 0

    @property
    def audits(self) -> int:
        """Calls so far that were recorded again and compared with their graph."""
        report = self.report() if self.is_captured else None
        return report.audits if report is not None else 0

    def close(self) -> None:
        """Free all graphs. A second call does nothing."""
        return

    def eager(self) -> Implementation:
        """After `close`: return what runs the same iterations without graphs."""
        return Eager(self.work)


class Eager(Implementation):
    """No graphs."""

    name = "none"


class LocalScopes(Implementation):
    """Graphs of the parts that a scope names, captured from the calls of the warm-up."""

    name = "local"

    def __init__(self, work: Work, model_config: Any) -> None:
        super().__init__(work)
        # more than can come before `capture`, which the loop calls after it has asked all ranks for memory
        rounds = (self.warmup_steps(model_config.cuda_graph_warmup_steps) + 1) * work.num_microbatches
        scope = present(work.core, read_scope(model_config.cuda_graph_scope))
        if work.gathered is not None:
            work.gathered.gather_before(part.module for part in ScopeRegistry().resolve(work.core, scope))
        self._handle = graph_modules(
            work.core,
            scope,
            warmup=rounds,
            max_graphs=1,  # training only: evaluation stays eager
            max_runners=model_config.cuda_graph_max_runners,
            single_mempool=model_config.cuda_graph_use_single_mempool,
            session=work.session,
        )
        self._closed_report: GraphReport | None = None

    def warmup_steps(self, wanted: int) -> int:
        return max(1, wanted)  # the graphs are recorded from a call

    def capture(self) -> None:
        self._handle.create_cudagraphs()
        self.is_captured = True
        self.capture_seconds = self._handle.report().capture_seconds

    @property
    def replays(self) -> int:
        return self._handle.replays

    @property
    def audits(self) -> int:
        return self._handle.audits

    @property
    def num_graphed(self) -> int:
        return sum(row.runners > 0 for row in self._handle.report().rows)

    def report(self) -> GraphReport | None:
        return self._closed_report if self._closed_report is not None else self._handle.report()

    def close(self) -> None:
        if self._closed_report is None:
            self._closed_report = self._handle.report()
            self._handle.close()


def present(model: nn.Module, scope: list[str]) -> list[str]:
    """Leave out words for layers that a cut model, or a stage of a pipeline, does not have, unless that is all."""
    registry = ScopeRegistry()
    return [word for word in scope if parts_of(model, [word], registry)] or scope


class FullIteration(Implementation):
    """One graph for the training iteration, optimizer included, and one for evaluation."""

    name = "local, full_iteration"
    evaluates_eagerly = False

    def __init__(self, work: Work, warmup_steps: int) -> None:
        super().__init__(work)
        self._wrapper = FullCudaGraphWrapper(
            forward_backward,
            self.warmup_steps(warmup_steps),
            optimizers=[work.optimizer],
            nan_check="device" if work.device_flags else "off",
            session=work.session,
        )
        self._closed_report: GraphReport | None = None

    def warmup_steps(self, wanted: int) -> int:
        return warmup_calls(max(1, wanted), self.work.model.modules())

    def train(self, microbatches: Sequence[Sample]) -> Result:
        result: Result = self._wrapper(
            forward_step_func=self.work.forward_step,
            data_iterator=iter(microbatches),
            model=self.work.model,
            num_microbatches=self.work.num_microbatches,
            finish=self.work.finish,
        )
        if not self.is_captured:
            report = self._wrapper.report()
            self.is_captured, self.capture_seconds = report.replays > 0, report.capture_seconds
        return result

    def evaluate(self, microbatches: Sequence[Sample]) -> torch.Tensor:
        result: Result = self._wrapper(
            forward_step_func=self.work.forward_step,
            data_iterator=iter(microbatches),
            model=self.work.core,
            num_microbatches=self.work.num_microbatches,
            forward_only=True,
        )
        return result.loss

    def capture(self) -> None:
        return  # the next call of `train` captures

    @property
    def replays(self) -> int:
        return self._wrapper.replays

    @property
    def audits(self) -> int:
        return self._wrapper.audits

    @property
    def num_graphed(self) -> int:
        return self._wrapper.report().graphs

    def report(self) -> GraphReport | None:
        return self._closed_report if self._closed_report is not None else self._wrapper.report()

    def close(self) -> None:
        if self._closed_report is None:
            self._closed_report = self._wrapper.report()
            self._wrapper.close()


@dataclass(frozen=True)
class PackedSamples:
    """Sample arguments of layers whose sequences are packed: hidden states, rotary positions and segments."""

    core: nn.Module
    cfg: Any

    def __call__(self, layer: nn.Module) -> tuple[list[Any], dict[str, Any]]:
        weight = next(layer.parameters())
        sizes = (self.cfg.train.micro_batch_size, self.cfg.model.seq_length)
        hidden = torch.zeros(*sizes, self.cfg.model.hidden_size, dtype=weight.dtype, device=weight.device)
        segments = torch.ones(sizes, dtype=torch.int64, device=weight.device)
        return [hidden.requires_grad_(), self.core.rotary, segments], {}


class AheadOfTime(Implementation):
    """Graphs of the parts that a scope names, captured ahead of time from sample arguments."""

    name = "transformer_engine"

    def __init__(self, work: Work, cfg: Any) -> None:
        super().__init__(work)
        ScopeRegistry().resolve(work.core, present(work.core, read_scope(cfg.model.cuda_graph_scope)))  # or refuse
        self._chunks = list(work.chunks) or [work.core if work.gathered is None else work.gathered]
        self._helper = TECudaGraphHelper(
            self._chunks,
            cfg,
            cfg.model.seq_length,
            cfg.train.micro_batch_size,
            [work.optimizer],
            num_microbatches=work.num_microbatches,
            order=[1, -1, -1.5] if work.forward_step.delays_weight_gradients else work.order,
            sample_arguments=PackedSamples(work.core, cfg) if cfg.dataset.packed_sequence else None,
        )
        self._closed_report: GraphReport | None = None

    def warmup_steps(self, wanted: int) -> int:
        return wanted if self.work.order is None else max(1, wanted)  # in its first step a schedule tries out shapes

    def _before_microbatch(self) -> Any:
        if not self.is_captured:
            return None
        return lambda index: set_current_microbatch(self._chunks, index)

    def capture(self) -> None:
        begun = time.perf_counter()
        gathered = self.work.gathered
        has_hooks = gathered is not None and gathered.has_hooks  # not before the first iteration
        if gathered is not None and has_hooks:
            gathered.disable_forward_pre_hook(param_sync=False)
        with autocasting(next(self.work.core.parameters()).device, self.work.forward_step.autocast):
            self._helper.create_cudagraphs()
        if gathered is not None and has_hooks:
            gathered.enable_forward_pre_hook()
        self._helper.cuda_graph_set_manual_hooks()
        self.is_captured = True
        self.capture_seconds = time.perf_counter() - begun

    @property
    def replays(self) -> int:
        return self._helper.replays

    @property
    def audits(self) -> int:
        return self._helper.audits

    @property
    def num_graphed(self) -> int:
        return len(self._helper.paths)

    def report(self) -> GraphReport | None:
        if self._closed_report is not None or not self._helper.graphs_created():
            return self._closed_report
        return self._helper.report()

    def close(self) -> None:
        self._closed_report = self.report()
        self._helper.delete_cuda_graphs()


def choose(work: Work, cfg: Any) -> Implementation:
    """Return the implementation that a validated configuration names."""
    if cfg.model.cuda_graph_impl == "none":
        return Eager(work)
    if cfg.model.cuda_graph_impl == "transformer_engine":
        return AheadOfTime(work, cfg)
    if cfg.model.captures_iteration:
        return FullIteration(work, cfg.model.cuda_graph_warmup_steps)
    return LocalScopes(work, cfg.model)
