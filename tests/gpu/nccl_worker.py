"""One process with a GPU and an NCCL group of one rank: DDP, eager and captured.

python tests/gpu/nccl_worker.py SCENARIO FILE
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stepgraph
from tests.harness import Program, assert_same_history, run

CUDA = torch.device("cuda", 0)
CALLS = 40


def plain(optimizer: str = "AdamW", fused: bool = True, set_to_none: bool = True, **options: Any) -> Program:
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(CUDA), **options)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, fused=fused)

    def step(x: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad(set_to_none=set_to_none)
        loss = model(x).square().mean()
        loss.backward()
        chosen.step()
        return loss

    return Program(step, [(torch.randn(32, 64, device=CUDA),) for _ in range(CALLS)], [model], [chosen])


def accumulating(**options: Any) -> Program:
    layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(CUDA), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x: torch.Tensor, synced: bool) -> torch.Tensor:
        with contextlib.nullcontext() if synced else model.no_sync():
            loss = model(x).square().mean()
            loss.backward()
        if synced:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    batches = [(torch.randn(32, 64, device=CUDA), index % 3 == 0) for index in range(3 * CALLS // 2)]
    return Program(step, batches, [model], [optimizer])


PROGRAMS: dict[str, Callable[[], Program]] = {
    "plain": plain,
    "optimizer outside": lambda: plain(fused=False),
    "many buckets": lambda: plain(bucket_cap_mb=0.01),
    "gradients kept": lambda: plain(set_to_none=False),
    "bucket views": lambda: plain(gradient_as_bucket_view=True),
    "static graph": lambda: plain(static_graph=True),
    "no_sync": accumulating,
    "no_sync, bucket views": lambda: accumulating(gradient_as_bucket_view=True),
}


def compare(
    name: str, build: Callable[[], Program], under: contextlib.AbstractContextManager[Any], **options: Any
) -> None:
    """One program in eager on the default stream, one built under a stream and captured."""
    torch.manual_seed(7)
    eager = build()
    torch.manual_seed(11)
    expected = run(eager, eager.step, CUDA)
    torch.manual_seed(7)
    with under:
        captured = build()
    torch.manual_seed(11)
    with stepgraph.capture(captured.step, **options) as step:
        assert_same_history(expected, run(captured, step, CUDA), f"{name}: captured differs from eager")
        report = step.report()
    assert report.replays >= 20, (name, report.to_dict())


def equality() -> None:
    for name, build in PROGRAMS.items():
        with stepgraph.Session(backend="cuda") as session:
            compare(name, build, session.stream(), session=session)


def workflow() -> None:
    """As guides on CUDA graphs write it: DDP on a side stream, warm-up, make_graphed_callables, the loop."""
    for name, build in PROGRAMS.items():
        histories = []
        for is_graphed in (False, True):
            torch.manual_seed(7)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                program = build()
            torch.cuda.current_stream().wait_stream(side)
            if is_graphed:
                model = program.modules[0]
                sample = torch.zeros(32, 64, device=CUDA)
                assert stepgraph.make_graphed_callables(model, (sample,), num_warmup_iters=11) is model
            torch.manual_seed(11)
            histories.append(run(program, program.step, CUDA))
        assert_same_history(*histories, f"{name}: graphed DDP differs from eager DDP")
        report = stepgraph.engine.parts.callables.report(model)
        assert report.forwards == report.backwards == len(program.batches), name
        model.reset()


def side_stream() -> None:
    """As in torch's notes: any stream will do that is not the default one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    compare("side stream", plain, torch.cuda.stream(side))


def hundredth_iteration() -> None:
    """DDP times its hundredth iteration, and reads the events in the next one: here that one is captured."""
    with stepgraph.Session(backend="cuda") as session:
        with session.stream():
            program = plain()
        for batch in (program.batches * 3)[:97]:
            program.step(*batch)
        with stepgraph.capture(program.step, session=session) as step:
            for batch in program.batches:
                step(*batch)
            assert step.report().replays == CALLS - 3


def refused(rule: str, under: contextlib.AbstractContextManager[Any], **options: Any) -> None:
    """Refused at the first call after warm-up, and fit to go on in eager."""
    with under:
        program = plain()
    found = None
    with stepgraph.capture(program.step, **options) as step:
        try:
            for batch in program.batches:
                step(*batch)
        except stepgraph.CaptureError as error:
            found = error.rule
        assert (found, step.report().eager_calls) == (rule, 11)
    losses = [program.step(*batch).item() for batch in program.batches]
    assert all(loss == loss for loss in losses)


def default_stream() -> None:
    """As frameworks build it: DDP is given new accumulators on the capture stream."""
    for name, build in PROGRAMS.items():
        compare(f"default stream, {name}", build, contextlib.nullcontext())


def trained_before() -> None:
    """Built on the default stream, and trained there for a while: its last loss was dropped."""

    def build() -> Program:
        program = plain()
        for batch in program.batches[:15]:
            program.step(*batch)
        return program

    compare("trained before", build, contextlib.nullcontext())


def kept_loss() -> None:
    """A loss that is kept with its graph holds the accumulators of the default stream; once dropped, all is well."""
    program = plain()
    kept = [program.step(*program.batches[0])]
    found = None
    with stepgraph.capture(program.step) as step:
        try:
            for batch in program.batches:
                step(*batch)
        except stepgraph.CaptureError as error:
            found = error.rule
        assert (found, step.report().eager_calls) == ("ddp-stream", 13)
    kept.clear()
    with stepgraph.capture(program.step) as step:
        for batch in program.batches:
            step(*batch)
        assert step.report().replays >= 20


def blocking_wait() -> None:
    with stepgraph.Session(backend="cuda") as session:
        refused("nccl-blocking-wait", session.stream(), session=session)


SCENARIOS: dict[str, Callable[[], None]] = {
    "equality": equality,
    "side stream": side_stream,
    "workflow": workflow,
    "hundredth iteration": hundredth_iteration,
    "default stream": default_stream,
    "trained before": trained_before,
    "kept loss": kept_loss,
    "blocking wait": blocking_wait,
}


def main(scenario: str, file: str) -> None:
    if scenario == "blocking wait":
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", store=dist.FileStore(file, 1), rank=0, world_size=1, device_id=CUDA)
    SCENARIOS[scenario]()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
