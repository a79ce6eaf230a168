"""The connection to `torch.distributed.pipelining`: the stages of a schedule, and the methods that it calls on them.

Stages and schedules are read by their attributes. They have no public hooks, so the methods that a schedule calls on a
stage are replaced on the object itself; torch's classes are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.observe.sharding import refuse_sharded
from stepgraph.engine.order.entries import Kind
from stepgraph.engine.parts.stages.manager import StageManager

_METHODS = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "backward_maybe_with_nosync",
)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank, by index."""
    stages = getattr(schedule, "_stages", None) or [s for s in [getattr(schedule, "_stage", None)] if s is not None]
    return sorted(stages, key=lambda stage: stage.stage_index)


def chunks_of(schedule: Any) -> dict[int, int]:
    """Return the index of the stage for each chunk of the order."""
    return {chunk: stage.stage_index for chunk, stage in enumerate(stages_of(schedule), start=1)}


def check(stages: Sequence[Any], schedule: Any) -> None:
    """Refuse stages and schedules that cannot be graphed."""
    known = stages_of(schedule)
    if not known or not hasattr(schedule, "_has_backward"):
        raise _refused(
            f"{type(schedule).__name__} is not a schedule of torch.distributed.pipelining",
            "graph_stage reads the stages and the loss from the schedule.",
            "pass the schedule that was made with the stage.",
        )
    if not schedule._has_backward:
        raise _refused(
            f"{type(schedule).__name__} has no loss_fn",
            "without a loss it runs no backward, and evaluations are not graphed.",
            "pass loss_fn=... to the schedule, or leave graph_stage out.",
        )
    if not stages:
        raise _refused("no stage was given", "there is nothing to graph.", "pass the stages of this rank.")
    for stage in stages:
        if not any(stage is other for other in known):
            raise _refused(
                f"{_name(stage)} is not a stage of this schedule",
                f"the schedule runs {', '.join(map(_name, known))} on this rank.",
                "pass the stage that the schedule was made with.",
            )
        _check_stage(stage)
    if len({id(stage) for stage in stages}) < len(stages):
        raise _refused("a stage was given twice", "a stage has one set of graphs.", "pass each stage once.")


def _check_stage(stage: Any) -> None:
    missing = [name for name in _METHODS if not callable(getattr(stage, name, None))]
    if missing:
        raise _refused(
            f"{_name(stage)} has no method {missing[0]}",
            "graph_stage replaces this method by replays.",
            "pass a PipelineStage of torch.distributed.pipelining.",
        )
    if any(name in stage.__dict__ for name in _METHODS):
        raise _refused(
            f"{_name(stage)} has graphs already",
            "a stage has one set of graphs.",
            "call close() on the first handle.",
        )
    refuse_sharded(_name(stage), stage.submod.modules(), "stage")
    kind = type(stage.submod)
    if issubclass(kind, DistributedDataParallel):
        raise _refused(
            f"{_name(stage)} is wrapped in {kind.__name__}",
            "it communicates in the middle of a stage's forward and backward, when the schedule says so.",
            "graph the layers inside with stepgraph.graph_modules, or reduce gradients after the step.",
        )
    if getattr(stage, "dw_builder", None) is not None:
        raise _refused(
            f"{_name(stage)} has a dw_builder",
            "it computes weight gradients itself, outside the recording.",
            "leave dw_builder out: the split backward is recorded.",
        )


def has_forward_context(stage: Any) -> bool:
    """True if `stage.register_forward_context(...)` of newer versions of torch was called."""
    return bool(getattr(stage, "_forward_contexts", None))


def own_methods(stage: Any, manager: StageManager) -> Iterator[tuple[str, Any]]:
    """Return the methods of a stage that call its manager."""
    forward, backward, weight, plain = (getattr(stage, name) for name in _METHODS)

    def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with manager.computing(Kind.FORWARD, fwd_chunk_id):
            return forward(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with manager.computing(Kind.BACKWARD if full_backward else Kind.INPUT_GRAD, bwd_chunk_id):
            return backward(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)

    def backward_weight_one_chunk(bwd_chunk_id: int, last_backward: bool = False) -> Any:
        with manager.computing(Kind.WEIGHT_GRAD, bwd_chunk_id):
            return weight(bwd_chunk_id, last_backward=last_backward)

    def backward_maybe_with_nosync(backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        return manager.backward(plain, backward_type, bwd_kwargs, last_backward)

    yield from zip(
        _METHODS,
        (forward_one_chunk, backward_one_chunk, backward_weight_one_chunk, backward_maybe_with_nosync),
        strict=True,
    )


def _name(stage: Any) -> str:
    return f"stage {getattr(stage, 'stage_index', '?')}"


def _refused(what: str, why: str, fix: str) -> InvalidArgument:
    return InvalidArgument(f"graph_stage: {what}", rule="pipeline-stage", why=why, fix=fix)
