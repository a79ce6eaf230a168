"""What DDP needs of a capture, in a process group of one rank; tests/distributed has several."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import stepgraph
from stepgraph.config.environment import blocking_wait
from stepgraph.engine.backends.tape.mode import TapeBackend
from stepgraph.engine.observe.ddp import renew_reducer


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def make(**options: Any) -> tuple[DistributedDataParallel, Callable[[torch.Tensor], torch.Tensor]]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return model, step


def calls_before_capture(step: Callable[..., Any], **options: Any) -> int:
    with stepgraph.capture(step, **options) as captured:
        for _ in range(30):
            captured(torch.randn(2, 4))
        report = captured.report()
    assert report.eager_calls + report.replays == 30
    assert report.graphs == 1
    return report.eager_reasons["warm-up"]


def refused(step: Callable[..., Any], eager_calls: int = 11, **options: Any) -> stepgraph.CaptureError:
    with (
        stepgraph.capture(step, **options) as captured,
        pytest.raises(stepgraph.CaptureError) as caught,
    ):
        for _ in range(eager_calls + 1):
            captured(torch.randn(2, 4))
    assert captured.report().eager_calls == eager_calls
    return caught.value


def test_young_ddp_is_warmed_up_for_eleven_calls() -> None:
    assert calls_before_capture(make()[1]) == 11
    assert calls_before_capture(make()[1], warmup=1) == 11
    assert calls_before_capture(make()[1], warmup=13) == 13


def test_ddp_that_has_trained_is_warmed_up_as_any_module() -> None:
    _, step = make()
    for _ in range(12):
        step(torch.randn(2, 4))
    assert calls_before_capture(step) == 3


def test_second_signature_needs_no_eleven_calls() -> None:
    _, step = make()
    with stepgraph.capture(step) as captured:
        for size in (2, 3):
            for _ in range(16):
                captured(torch.randn(size, 4))
        assert captured.report().eager_reasons == {"warm-up": 11 + 3}


def test_ddp_is_not_timed_while_it_is_recorded() -> None:
    """DDP reads its timing of iterations 1 to 10, 100, 200, ... in the next one: on a GPU that would end a capture."""
    model, step = make()
    for _ in range(97):
        step(torch.randn(2, 4))
    with stepgraph.capture(step) as captured:
        for _ in range(4):  # iterations 98 to 100, and the capture
            captured(torch.randn(2, 4))
        assert captured.report().captures == 1
    assert model._get_ddp_logging_data()["iteration"] == 10
    for _ in range(100):
        step(torch.randn(2, 4))
    assert model._get_ddp_logging_data()["iteration"] == 200


def test_ddp_that_looks_for_unused_parameters_is_refused() -> None:
    error = refused(make(find_unused_parameters=True)[1])
    assert error.rule == "ddp-unused-parameters"
    assert "`DistributedDataParallel`" in error.what
    assert "find_unused_parameters=False" in error.fix


def test_communication_hook_is_refused_unless_known_or_admitted() -> None:
    def halve(state, bucket):  # type: ignore[no-untyped-def]  # torch wants real annotations or none
        return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value() / 2)

    model, step = make()
    model.register_comm_hook(None, halve)
    error = refused(step)
    assert error.rule == "ddp-comm-hook"
    assert "halve" in error.what
    assert calls_before_capture(step, safe_hooks=[halve]) == 3
    model, step = make()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert calls_before_capture(step) == 11


class DefaultStreamTape(TapeBackend):
    """A tape on which nothing that DDP does can be recorded, as if it had been built on CUDA's default stream.

    With `until_renewed`, only until that DDP has another reducer.
    """

    def __init__(self, until_renewed: DistributedDataParallel | None = None) -> None:
        super().__init__()
        self._ddp = until_renewed
        self._first = None if until_renewed is None else weakref.ref(until_renewed.reducer)

    def can_record_here(self) -> bool:
        return self._ddp is not None and self._first is not None and self._first() is not self._ddp.reducer


def accumulator(parameter: torch.Tensor) -> Any:
    """The node of autograd that adds to a parameter's gradient."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_accumulators_end_with_the_reducer_unless_a_loss_is_kept(kept: bool) -> None:
    model, _ = make()
    weight = model.module[0].weight
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    accumulator(weight).metadata["is old"] = True
    if not kept:
        del loss
    assert renew_reducer(model)
    assert ("is old" in accumulator(weight).metadata) is kept


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"hook": default_hooks.allreduce_hook}],
    ids=["plain", "bucket views", "static graph", "hook"],
)
@pytest.mark.parametrize("trained", [0, 12])
def test_ddp_on_the_default_stream_gets_new_accumulators(options: dict[str, Any], trained: int) -> None:
    hook = options.pop("hook", None) if (options := dict(options)) else None

    def build() -> tuple[DistributedDataParallel, Callable[[torch.Tensor], torch.Tensor]]:
        torch.manual_seed(3)
        model, step = make(**options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        for _ in range(trained):
            step(torch.ones(2, 4))
        return model, step

    (eager, expected), (model, step) = build(), build()
    for parameter in model.parameters():
        accumulator(parameter).metadata["is old"] = True
    with stepgraph.capture(step, backend=DefaultStreamTape(until_renewed=model)) as captured:
        for _ in range(20):
            x = torch.randn(2, 4)
            assert torch.equal(captured(x), expected(x).detach())
            for one, two in zip(model.parameters(), eager.parameters(), strict=True):
                assert torch.equal(one.grad, two.grad)
        report = captured.report()
    assert (report.eager_reasons, report.replays) == ({"warm-up": 2 + 11}, 7)
    assert not any("is old" in accumulator(parameter).metadata for parameter in model.parameters())


def test_ddp_that_cannot_be_renewed_is_refused() -> None:
    model, step = make()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    reducer = model.reducer
    assert refused(step, backend=DefaultStreamTape()).rule == "ddp-stream"
    assert model.reducer is reducer


def test_ddp_accumulating_on_the_default_stream_is_refused() -> None:
    model, step = make()
    error = refused(step, eager_calls=2 + 11, backend=DefaultStreamTape())
    assert error.rule == "ddp-stream"
    assert "DistributedDataParallel.module." in error.what
    assert "with session.stream()" in error.fix
    assert all(p._post_accumulate_grad_hooks is None for p in model.parameters()), "the look at it left a trace"


def test_hooks_of_the_users_survive_the_look_at_streams() -> None:
    model, step = make()
    seen: list[torch.Size] = []
    model.module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(torch.randn(2, 4))
        step(torch.randn(2, 4))
    assert len(seen) == 4


class ReadsInBackward(torch.autograd.Function):
    """The user's own code, which reads what DDP's reducer may read: a number of type int32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad.sign().sum().to(torch.int32).item()
        return grad


def test_static_graph_lets_only_ddp_read_on_the_host() -> None:
    model = DistributedDataParallel(nn.Linear(4, 2), static_graph=True)

    def step(x: torch.Tensor) -> None:
        ReadsInBackward.apply(model(x)).sum().backward()

    assert refused(step).rule == "host-read"
    step(torch.randn(2, 4))  # the broken recording left nothing behind


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, None),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, None),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT"),
        ({"NCCL_BLOCKING_WAIT": "True"}, "NCCL_BLOCKING_WAIT"),
        ({"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}, None),
    ],
)
def test_blocking_wait_is_read_as_torch_reads_it(environment: dict[str, str], expected: str | None) -> None:
    assert blocking_wait(environment) == expected


def test_graphs_are_gone_before_a_process_group_is() -> None:
    shutdown = vars(dist.ProcessGroup)["shutdown"]
    one, two = (stepgraph.capture(make()[1]) for _ in range(2))
    for _ in range(14):
        one(torch.randn(2, 4))
        two(torch.randn(2, 4))
    other = dist.new_group([0])
    dist.destroy_process_group(other)
    assert (one.report().graphs, two.report().graphs) == (0, 0)
    for _ in range(4):  # the group that the steps use is still there
        one(torch.randn(2, 4))
    assert one.report().graphs == 1
    one.close()
    assert vars(dist.ProcessGroup)["shutdown"] is not shutdown
    for _ in range(4):
        two(torch.randn(2, 4))
    dist.destroy_process_group()
    assert two.report().graphs == 0
    two.close()
    assert vars(dist.ProcessGroup)["shutdown"] is shutdown


def test_session_without_graphs_leaves_process_groups_alone() -> None:
    shutdown = vars(dist.ProcessGroup)["shutdown"]
    with stepgraph.capture(make()[1]) as step:
        step(torch.randn(2, 4))
        assert vars(dist.ProcessGroup)["shutdown"] is shutdown
