"""Graphed stages of pipelines with one rank, which hands tensors from stage to stage: the same on both devices."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

import stepgraph
from tests.pipeline import SCHEDULES
from tests.stage_harness import (
    WIDTH,
    Block,
    Pipeline,
    assert_equal_histories,
    assert_graphed_equals_eager,
    run,
)

SPLIT = "ScheduleInterleavedZeroBubble"
"""Whose backwards are split in two."""
INTERLEAVED = "ScheduleInterleaved1F1B"


@pytest.fixture(autouse=True)
def group(device: torch.device) -> Iterator[None]:
    """A process group of one rank; where torch greets neighbouring stages, it must be able to send to itself."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def graphed(name: str, device: torch.device, microbatches: int = 4, **options: Any) -> tuple[Pipeline, Any]:
    """A pipeline whose stages are graphed after one step."""
    pipeline = Pipeline(name, microbatches, device, **options)
    return pipeline, stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1, strict=True)


# -- equality


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_of_each_schedule_equal_the_eager_pipeline(name: str, device: torch.device) -> None:
    handle = assert_graphed_equals_eager(name, 4, device=device)
    replayed = handle.report().rows[-1]
    whole = replayed.weight_grads == 0
    assert whole == (name not in (SPLIT, "ScheduleZBVZeroBubble"))
    assert replayed.backwards == 16


@pytest.mark.parametrize("name", ["Schedule1F1B", SPLIT])
def test_gradients_add_up_over_steps(name: str, device: torch.device) -> None:
    assert_graphed_equals_eager(name, 4, device=device, keep_grads=True)


@pytest.mark.parametrize("name", ["Schedule1F1B", SPLIT])
def test_checkpointed_stage_draws_the_same_numbers_again(name: str, device: torch.device) -> None:
    class Checkpointed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return checkpoint(super().forward, x, use_reentrant=False)

    assert_graphed_equals_eager(name, 3, device=device, block=lambda index: Checkpointed())


class Pair(nn.Module):
    """A stage that gives two tensors to the next one."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.block = index, Block()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        z = self.block(x)
        if y is None:
            return z, torch.tanh(z)
        return z * y


@pytest.mark.parametrize("name", [INTERLEAVED, SPLIT])
def test_several_tensors_go_from_stage_to_stage(name: str, device: torch.device) -> None:
    assert_graphed_equals_eager(name, 3, device=device, block=Pair)


@pytest.mark.parametrize("name", [INTERLEAVED, SPLIT])
def test_loss_with_an_expanded_gradient(name: str, device: torch.device) -> None:
    """The gradient of a sum is one number, repeated by strides of zero."""
    assert_graphed_equals_eager(name, 3, device=device, loss_fn=lambda y, target: (y + 0 * target).sum())


@pytest.mark.parametrize("name", [INTERLEAVED, SPLIT])
def test_stages_under_autocast(name: str, device: torch.device) -> None:
    assert_graphed_equals_eager(name, 3, device=device, autocast=True)


def test_parameter_of_two_stages_gets_the_gradients_of_both(device: torch.device) -> None:
    made: list[Block] = []

    def tied(index: int) -> Block:
        made.append(Block())
        if index:
            made[-1].up.weight = made[-2].up.weight
        return made[-1]

    for name in (INTERLEAVED, SPLIT):
        assert_graphed_equals_eager(name, 4, device=device, block=tied)


def test_keyword_tensors_are_read_at_each_step(device: torch.device) -> None:
    histories = []
    for graphs in (False, True):
        pipeline = Pipeline("Schedule1F1B", 4, device)
        if graphs:
            stepgraph.graph_stage(pipeline.stages[0], pipeline.schedule, warmup=1, strict=True)
        history = []
        for step in range(4):
            scale = torch.full((8, WIDTH), 1.0 + step, device=device)
            history += run(pipeline, 1, scale=scale)
        histories.append(history)
    assert_equal_histories(*histories)


def test_stage_that_is_left_out_stays_eager(device: torch.device) -> None:
    histories = []
    for graphs in (False, True):
        pipeline = Pipeline(INTERLEAVED, 4, device)
        if graphs:
            handle = stepgraph.graph_stage(pipeline.stages[1], pipeline.schedule, warmup=1, strict=True)
        histories.append(run(pipeline, 4))
    assert_equal_histories(*histories)
    assert [row.stage for row in handle.report().rows] == [1]
    assert handle.report().rows[0].forwards == 12


@pytest.mark.parametrize("first", [0, 1])
def test_stages_of_one_schedule_may_have_handles_of_their_own(first: int, device: torch.device) -> None:
    histories = []
    for graphs in (False, True):
        pipeline = Pipeline(SPLIT, 4, device)
        handles = [stepgraph.graph_stage(s, pipeline.schedule, warmup=1) for s in pipeline.stages] if graphs else []
        history = run(pipeline, 3)
        for handle in handles[first : first + 1]:
            handle.close()
        history += run(pipeline, 2)
        assert [handle.report().steps["replay"] for handle in handles] == ([2, 4] if first == 0 else [4, 2])[
            : len(handles)
        ]
        for handle in handles:
            handle.close()
        histories.append(history + run(pipeline, 1))
    assert_equal_histories(*histories)


def test_hook_on_all_modules_runs_as_in_eager(device: torch.device) -> None:
    pipeline, handle = graphed("Schedule1F1B", device)
    run(pipeline, 2)
    seen: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append(module))
    run(pipeline, 1)
    hook.remove()
    run(pipeline, 1)
    assert len(seen) == 4 * sum(1 for _ in pipeline.blocks[0].modules())
    assert handle.report().steps["replay"] == 2


# -- memory


@pytest.mark.parametrize("name", ["Schedule1F1B", INTERLEAVED, SPLIT])
def test_static_memory_does_not_grow_with_the_microbatches(name: str, device: torch.device) -> None:
    reports = []
    for microbatches in (4, 12):
        pipeline, handle = graphed(name, device, microbatches)
        run(pipeline, 2)
        reports.append(handle.report())
        handle.close()
    few, many = reports
    assert many.rows[0].forwards == 12
    assert (many.num_buffers, many.static_bytes) == (few.num_buffers, few.static_bytes)
    if device.type == "cpu":  # a GPU's pool grows by segments of 2 MiB, and by cuBLAS's workspace
        assert many.pool_bytes == few.pool_bytes > 0


def test_schedule_keeping_all_microbatches_has_a_buffer_for_each(device: torch.device) -> None:
    pipeline, handle = graphed("ScheduleGPipe", device, 5)
    run(pipeline, 2)
    assert handle.report().num_buffers == 5


@pytest.mark.parametrize("name", ["Schedule1F1B", SPLIT])
def test_gradients_that_are_kept_over_zero_grad_stay(name: str, device: torch.device) -> None:
    histories, kept = [], []
    for graphs in (False, True):
        pipeline, handle = graphed(name, device) if graphs else (Pipeline(name, 4, device), None)
        history = []
        for _ in range(5):
            history += run(pipeline, 1)
            kept.append([p.grad for block in pipeline.blocks for p in block.parameters() if p.grad is not None])
        histories.append(history)
    assert_equal_histories(*histories)
    for eager, replayed in zip(kept[:5], kept[5:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    assert handle is not None
    assert handle.report().recaptures == {"gradients of an earlier step are still held": 1}


def test_outputs_and_losses_that_are_kept_stay(device: torch.device) -> None:
    pipeline, _ = graphed(INTERLEAVED, device)
    kept, copies = [], []
    for _ in range(4):
        kept.append(pipeline.step())
        copies.append([tensor.detach().clone() for tensor in kept[-1]])
    for one, two in zip(kept, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# -- what changes between steps


def test_evaluation_is_eager_and_leaves_the_graphs(device: torch.device) -> None:
    histories = []
    for graphs in (False, True):
        pipeline, handle = graphed("Schedule1F1B", device) if graphs else (Pipeline("Schedule1F1B", 4, device), None)
        history = run(pipeline, 3) + run(pipeline, 2, training=False) + run(pipeline, 3)
        histories.append(history)
    assert_equal_histories(*histories)
    assert handle is not None
    assert handle.report().steps == {"warm-up": 1, "replay": 5, "evaluation": 2}


def test_anomaly_mode_is_eager_and_leaves_the_graphs(device: torch.device) -> None:
    pipeline, handle = graphed("Schedule1F1B", device)
    for steps, enabled in ((3, False), (2, True), (3, False)):
        with torch.autograd.set_detect_anomaly(enabled):
            run(pipeline, steps)
    assert handle.report().steps == {"warm-up": 1, "replay": 5, "anomaly mode": 2}


def test_loaded_checkpoint_replays_and_new_parameter_recaptures(device: torch.device) -> None:
    histories = []
    for graphs in (False, True):
        pipeline, handle = graphed(SPLIT, device) if graphs else (Pipeline(SPLIT, 4, device), None)
        block = pipeline.blocks[1]
        history = run(pipeline, 3)
        block.load_state_dict({name: value * 0.5 for name, value in block.state_dict().items()})
        history += run(pipeline, 2)
        if handle is not None:
            assert handle.report().recaptures == {}
        block.up.weight = nn.Parameter(block.up.weight.detach() * 2)
        history += run(pipeline, 3)
        histories.append(history)
    assert_equal_histories(*histories)
    assert handle is not None
    assert list(handle.report().recaptures.values()) == [1]
    assert handle.report().steps == {"warm-up": 2, "replay": 6}


def test_module_added_while_a_stage_warms_up_is_named(device: torch.device) -> None:
    """Trap: the noted calls had the flags of fewer modules, and the stages stayed eager."""

    def add(pipeline: Pipeline) -> None:
        part = nn.Linear(WIDTH, WIDTH, device=device)
        nn.init.eye_(part.weight)
        pipeline.blocks[0].up = nn.Sequential(part, pipeline.blocks[0].up)

    def history(pipeline: Pipeline) -> list[Any]:
        before = run(pipeline, 2)
        add(pipeline)
        return [*before, *run(pipeline, 5)]

    expected = history(Pipeline("Schedule1F1B", 4, device))
    pipeline = Pipeline("Schedule1F1B", 4, device)
    handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=2, strict=True)
    received = history(pipeline)
    assert_equal_histories(expected, received)
    assert handle.report().steps == {
        "warm-up": 3,
        "changed: `stage 0.up` was replaced": 1,
        "replay": 3,
    }


def test_stage_that_keeps_changing_stays_eager_until_it_is_reset(device: torch.device) -> None:
    pipeline, handle = graphed("Schedule1F1B", device)
    block = pipeline.blocks[0]
    for _ in range(4):
        run(pipeline, 2)
        block.up.weight = nn.Parameter(block.up.weight.detach().clone())
    run(pipeline, 2)
    why = "`stage 0.up.weight` was replaced"
    assert handle.report().recaptures == {why: 3}
    assert handle.report().steps == {"warm-up": 3, "replay": 3, f"it keeps changing: {why}": 4}
    handle.reset()
    run(pipeline, 2)
    assert handle.report().steps["replay"] == 4


def test_stage_that_changes_now_and_then_is_captured_again(device: torch.device) -> None:
    """Nine steps are one of warm-up and eight replays, after which a change does not count."""
    pipeline, handle = graphed("Schedule1F1B", device)
    block = pipeline.blocks[0]
    for _ in range(4):
        run(pipeline, 9)
        block.up.weight = nn.Parameter(block.up.weight.detach().clone())
    run(pipeline, 2)
    assert handle.report().recaptures == {"`stage 0.up.weight` was replaced": 4}
    assert handle.report().steps == {"warm-up": 5, "replay": 33}


def test_step_that_raises_leaves_stages_that_go_on(device: torch.device) -> None:
    calls = [0]

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 11:
            raise ValueError("the user's own error")
        return nn.functional.mse_loss(y, target)

    histories = []
    for graphs in (False, True):
        calls[0] = 0
        pipeline, handle = graphed("Schedule1F1B", device, loss_fn=loss_fn) if graphs else (None, None)
        pipeline = pipeline or Pipeline("Schedule1F1B", 4, device, loss_fn=loss_fn)
        history = run(pipeline, 2)
        with pytest.raises(ValueError, match="own error"):
            run(pipeline, 1)
        pipeline.schedule._internal_losses.clear()  # torch leaves those of the step that broke off
        histories.append(history + run(pipeline, 3))
    assert_equal_histories(*histories)
    assert handle is not None
    assert handle.report().steps == {"warm-up": 1, "replay": 4}


def test_reset_and_close(device: torch.device) -> None:
    histories = []
    for graphs in (False, True):
        pipeline, handle = graphed(SPLIT, device) if graphs else (Pipeline(SPLIT, 4, device), None)
        history = run(pipeline, 3)
        if handle is not None:
            handle.reset()
        history += run(pipeline, 3)
        if handle is not None:
            assert handle.report().steps == {"warm-up": 2, "replay": 4}
            handle.close()
            handle.close()
            assert handle.report().pool_bytes == 0
        histories.append(history + run(pipeline, 2))
    assert_equal_histories(*histories)
    for stage in pipeline.stages:
        assert not {name for name in vars(stage) if name.endswith(("_chunk", "_nosync"))}
        assert "forward" not in vars(stage.submod)
    assert "step" not in vars(pipeline.schedule)


# -- what is refused


def test_functions_without_arguments_reach_stages(device: torch.device) -> None:
    """`is_graph_warmup()` up to the backward of a warm-up step, `delete_cuda_graphs()` after it."""
    seen: list[bool] = []

    def asking(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(stepgraph.is_graph_warmup())  # between the forward of the last stage and its backward
        return nn.functional.mse_loss(y, target)

    pipeline = Pipeline(INTERLEAVED, 2, device, loss_fn=asking)
    handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1)
    run(pipeline, 3)
    assert seen[-6:] == [True] * 2 + [False] * 4, "torch may have asked before, for shapes"
    assert not stepgraph.is_graph_warmup()
    assert inspect.ismethod(copy.deepcopy(pipeline.stages[0].submod).forward), "a copy of a stage is a plain module"
    stepgraph.delete_cuda_graphs()
    assert sum(row.graphs for row in handle.report().rows) == 0
    run(pipeline, 2)
    assert handle.report().steps == {"warm-up": 2, "replay": 3}
    handle.close()


def test_schedule_running_another_order_is_refused_by_entry(device: torch.device) -> None:
    pipeline, _ = graphed(SPLIT, device)
    run(pipeline, 2)
    actions = pipeline.schedule.pipeline_order_with_comms[0]
    weights = [i for i, action in enumerate(actions) if str(action).startswith("1W")]
    actions[weights[1]], actions[weights[0]] = actions[weights[0]], actions[weights[1]]
    with pytest.raises(stepgraph.CaptureError, match="out of order") as caught:
        pipeline.step()
    assert caught.value.rule == "replay-order"
    text = str(caught.value)
    assert "of 24: weight gradient of stage 1, microbatch 0" in text
    assert "received  weight gradient of stage 1, microbatch 1" in text


def test_step_that_ends_early_is_refused(device: torch.device) -> None:
    pipeline, _ = graphed(INTERLEAVED, device)
    run(pipeline, 2)
    actions = pipeline.schedule.pipeline_order_with_comms[0]
    last = max(i for i, action in enumerate(actions) if str(action).startswith("0B"))
    del actions[last]
    with pytest.raises(stepgraph.CaptureError, match="end of the step is out of order") as caught:
        pipeline.step()
    assert "expected  entry 15 of 16: backward of stage 0, microbatch 3" in str(caught.value)


def test_call_unlike_the_captured_one_is_refused_by_name(device: torch.device) -> None:
    pipeline, handle = graphed("Schedule1F1B", device)
    run(pipeline, 2, scale=torch.ones(8, WIDTH, device=device))
    with pytest.raises(stepgraph.SignatureMismatch, match="stage 0, microbatch 0") as caught:
        run(pipeline, 1, scale=torch.ones(8, 1, device=device))
    assert "scale: shape changed (captured f32[2, 8]" in str(caught.value)
    assert handle.report().refused == {"pipeline-stage": 1}
    assert "pipeline-stage: 1" in str(handle.report())


class Reading(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 0.5)


def test_stage_that_cannot_be_captured_goes_on_eagerly(device: torch.device) -> None:
    expected = run(Pipeline(INTERLEAVED, 4, device, block=lambda index: Reading()), 4)
    pipeline = Pipeline(INTERLEAVED, 4, device, block=lambda index: Reading())
    handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=2)
    with pytest.warns(stepgraph.StepgraphWarning, match=r"host-read"):
        received = run(pipeline, 4)
    assert_equal_histories(expected, received)
    assert handle.report().steps == {"warm-up": 2, "capture failed: [host-read]": 2}
    pipeline, handle = graphed(INTERLEAVED, device, block=lambda index: Reading())
    with pytest.raises(stepgraph.CaptureError, match=r"host-read"):
        run(pipeline, 2)


FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)


class Scaled(Block):
    """A stage that reads a number from the context it is called in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * FACTOR.get()


def test_stage_with_a_forward_context_stays_eager(device: torch.device) -> None:
    if not hasattr(PipelineStage, "register_forward_context"):
        pytest.skip("this torch has no forward contexts of stages")

    @contextlib.contextmanager
    def scaled(info: Any) -> Iterator[None]:
        token = FACTOR.set(2.0 + info.microbatch_index)
        yield
        FACTOR.reset(token)

    histories, handle = [], None
    for graphs in (False, True):
        pipeline = Pipeline(INTERLEAVED, 2, device, block=lambda index: Scaled())
        if graphs:
            handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1)
        context = pipeline.stages[0].register_forward_context(scaled)
        before = run(pipeline, 3)
        context.remove()
        histories.append(before + run(pipeline, 3))
    assert_equal_histories(*histories)
    assert handle is not None
    steps = handle.report().steps
    assert steps["a stage has a forward context, which capture would not enter"] == 3
    assert steps["replay"] == 2


def test_hooked_parameters_pass_through_autograd_or_stay_eager(device: torch.device) -> None:
    for name, replays in ((INTERLEAVED, True), (SPLIT, False)):
        histories, counts = [], []
        for graphs in (False, True):
            pipeline = Pipeline(name, 4, device)
            seen: list[torch.Tensor] = []
            pipeline.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
                handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1) if graphs else None
                histories.append(run(pipeline, 3))
            counts.append(len(seen))
        assert_equal_histories(*histories)
        assert counts[0] == counts[1]
        assert handle is not None
        assert ("replay" in handle.report().steps) == replays


def test_what_cannot_be_graphed_is_refused_by_name(device: torch.device) -> None:
    pipeline, other = Pipeline("Schedule1F1B", 4, device), Pipeline(INTERLEAVED, 4, device)
    silent = ScheduleGPipe(pipeline.stages[0], 4)
    custom = PipelineStage(Block().to(device), 0, 1, device, dw_builder=lambda: lambda: None)
    for stage, schedule, what in (
        (other.stages[1], pipeline.schedule, "stage 1 is not a stage of this schedule"),
        ([other.stages[0]] * 2, other.schedule, "a stage was given twice"),
        ([], other.schedule, "no stage was given"),
        (pipeline.stages[0], silent, "ScheduleGPipe has no loss_fn"),
        (pipeline.stages[0], object(), "object is not a schedule"),
        (custom, ScheduleGPipe(custom, 4, loss_fn=nn.functional.mse_loss), "stage 0 has a dw_builder"),
    ):
        with pytest.raises(stepgraph.InvalidArgument, match=what) as caught:
            stepgraph.graph_stage(stage, schedule)
        assert caught.value.rule == "pipeline-stage"
    pipeline.stages[0].submod = nn.parallel.DistributedDataParallel(pipeline.blocks[0])
    with pytest.raises(stepgraph.InvalidArgument, match="stage 0 is wrapped in DistributedDataParallel"):
        stepgraph.graph_stage(pipeline.stages[0], pipeline.schedule)
    pipeline, _ = graphed("Schedule1F1B", device)
    with pytest.raises(stepgraph.InvalidArgument, match="has graphs already"):
        stepgraph.graph_stage(pipeline.stages[0], pipeline.schedule)


def test_stage_that_fsdp_shards_is_refused(device: torch.device) -> None:
    pipeline = Pipeline("Schedule1F1B", 4, device)
    fully_shard(pipeline.blocks[0].up)
    with pytest.raises(stepgraph.CaptureError, match="stage 0: the stage uses a model that FSDP shards") as caught:
        stepgraph.graph_stage(pipeline.stages[0], pipeline.schedule)
    assert caught.value.rule == "fsdp"


class ResizingBlock(Block):
    """A block whose memory comes and goes, as FSDP's does."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        storage = self.seen.untyped_storage()
        storage.resize_(4)
        self.seen.zero_()
        result = super().forward(x, scale)
        storage.resize_(8)
        return result


def test_stage_that_resizes_a_storage_runs_eagerly(device: torch.device) -> None:
    def make() -> Pipeline:
        return Pipeline("Schedule1F1B", 4, device, block=lambda index: ResizingBlock())

    expected, pipeline = run(make(), 5), make()
    handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=2)
    with pytest.warns(stepgraph.StepgraphWarning, match="storage-resize"):
        received = run(pipeline, 5)
    assert_equal_histories(expected, received)
    assert handle.report().steps == {"warm-up": 2, "capture failed: [storage-resize]": 3}


def test_step_of_a_schedule_in_two_threads_is_refused(device: torch.device) -> None:
    pipeline = Pipeline("Schedule1F1B", 4, device)
    session = stepgraph.Session()
    handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=2, session=session)
    with ThreadPoolExecutor(max_workers=1) as other:
        other.submit(session.calling.acquire).result(60)
        with pytest.raises(stepgraph.CaptureError) as caught:
            pipeline.step()
        other.submit(session.calling.release).result(60)
    assert caught.value.rule == "concurrent-call"
    run(pipeline, 4)
    assert handle.report().steps == {"warm-up": 2, "replay": 2}
