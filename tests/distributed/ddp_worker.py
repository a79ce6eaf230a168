"""One rank of a real gloo group: DDP steps, eager and captured, compared bit for bit after every call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import stepgraph
from stepgraph.engine.step.fallback import ranks
from tests.distributed.ranks import end_together
from tests.harness import Program, assert_captured_equals_eager, assert_same_history, run

CPU = torch.device("cpu")
SYNCED = [(index * 7 % 5) % 2 == 1 for index in range(1, 40)]
"""An irregular pattern of steps with and without synchronization."""


def make_model(buffers: bool = False, **options: Any) -> DistributedDataParallel:
    norm = [nn.BatchNorm1d(16)] if buffers else []
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), *norm, nn.Dropout(0.2), nn.Linear(16, 4)), **options)


def batches(count: int = 16) -> list[tuple[torch.Tensor]]:
    """Other data on each rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [(torch.randn(4, 8, generator=generator),) for _ in range(count)]


def plain(set_to_none: bool = True, optimizer: str = "AdamW", hook: Any = None, **options: Any) -> Program:
    model = make_model(**options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad(set_to_none=set_to_none)
        loss = model(x).pow(2).mean()
        loss.backward()
        chosen.step()
        return loss

    return Program(step, batches(), [model], [chosen])


def accumulating(set_to_none: bool = True, around: bool = False, **options: Any) -> Program:
    """Steps without synchronization between those with it, told by an argument or entered around the call."""
    model = make_model(buffers=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(x: torch.Tensor, synced: bool) -> torch.Tensor:
        with contextlib.nullcontext() if synced or around else model.no_sync():
            loss = model(x).pow(2).mean()
            loss.backward()
        if synced:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    outside = contextlib.ExitStack()

    def before_call(index: int) -> None:
        outside.close()
        if around and not pattern[index]:
            outside.enter_context(model.no_sync())

    pattern = [True, *SYNCED]  # with static_graph=True the first step must be synchronized
    calls = [(x, synced) for (x,), synced in zip(batches(len(pattern)), pattern, strict=True)]
    return Program(step, calls, [model], [optimizer], before_call=before_call)


def unused_parameters() -> Program:
    """A parameter that no rank uses: static_graph finds out once and leaves it alone from then on."""
    model = DistributedDataParallel(Half(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(), [model], [optimizer])


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "plain": plain,
    "many buckets": lambda: plain(bucket_cap_mb=1e-4, buffers=True),
    "optimizer inside": lambda: plain(optimizer="SGD"),
    "gradients kept": lambda: plain(set_to_none=False),
    "bucket views": lambda: plain(gradient_as_bucket_view=True),
    "bucket views kept": lambda: plain(gradient_as_bucket_view=True, set_to_none=False),
    "static graph": lambda: plain(static_graph=True, buffers=True),
    "unused parameters": unused_parameters,
    "compressed": lambda: plain(hook=default_hooks.fp16_compress_hook),
    "no_sync": accumulating,
    "no_sync, bucket views": lambda: accumulating(gradient_as_bucket_view=True),
    "no_sync, bucket views kept": lambda: accumulating(gradient_as_bucket_view=True, set_to_none=False),
    "no_sync, static graph": lambda: accumulating(static_graph=True),
    "no_sync around": lambda: accumulating(around=True),
}


OTHERS = ("optimizer inside", "gradients kept", "bucket views", "no_sync, bucket views", "no_sync, static graph")
"""Programs of which others have each setting, too, if not together with the same ones."""


def equality(*names: str) -> None:
    for name in names:
        build = PROGRAMS[name]
        built: list[Program] = []

        def remembered(_: torch.device, build: Callable[[], Program] = build, built: list[Program] = built) -> Program:
            built.append(build())
            return built[-1]

        try:
            report = assert_captured_equals_eager(remembered, CPU)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        assert report.eager_reasons["warm-up"] >= 11, name
        for parameter in built[-1].modules[0].parameters():
            everywhere = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, parameter.detach())
            assert all(torch.equal(parameter, other) for other in everywhere), f"{name}: ranks differ"


def workflow(*names: str, num_warmup_iters: int = 11) -> None:
    """As guides on CUDA graphs write it: DDP, warm-up iterations, make_graphed_callables, the loop."""
    programs = PROGRAMS | GRAPHED_ONLY
    for name in names or programs:
        build = programs[name]
        eager = seeded(build)
        expected = run(eager, eager.step, CPU)
        program = seeded(build)
        model = program.modules[0]
        sample = torch.zeros(4, 8)
        graphed = stepgraph.make_graphed_callables(
            model, (sample,), num_warmup_iters=num_warmup_iters, allow_unused_input="unused" in name
        )
        assert graphed is model
        torch.manual_seed(11)
        received = run(program, program.step, CPU)
        assert_same_history(expected, received, f"{name}: graphed DDP differs from eager DDP")
        report = stepgraph.engine.parts.callables.report(graphed)
        assert (report.forwards, report.eager_calls) == (len(program.batches), 0), name
        graphed.reset()
        assert "forward" not in vars(model.module)
        program.step(*program.batches[1])


def seeded(build: Callable[[], Program]) -> Program:
    torch.manual_seed(7)
    program = build()
    torch.manual_seed(11)
    return program


def unused_found() -> Program:
    """A parameter that no rank uses, found by a search at each step: its gradient stays None."""
    model = DistributedDataParallel(Half(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(), [model], [optimizer])


def deep() -> Program:
    """Layers of several sizes in small buckets: the order in which gradients arrive decides their places in them."""
    sizes = [8, 24, 5, 40, 3, 16, 4]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(), [model], [optimizer])


GRAPHED_ONLY: dict[str, Callable[[], Program]] = {
    "unused, searched": unused_found,
    "deep": deep,
    "hook": lambda: plain(hook=halving_hook),
}
"""What whole steps refuse, and graphed callables do not: DDP itself stays eager."""


def halving_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and no strings
    """A communication hook that is Python code: it halves gradients before their mean."""
    bucket.buffer().div_(2)
    return default_hooks.allreduce_hook(None, bucket)


def layers_inside() -> None:
    """Layers of a DDP graphed one by one, and with an order over two microbatches, by the helper's way."""
    for name, order in (("without an order", None), ("with an order", [1, -1, 1, -1])):
        histories = []
        for is_graphed in (False, True):
            program = seeded(lambda: accumulating())
            model = program.modules[0]
            if is_graphed:
                inner = model.module
                samples = ((torch.zeros(4, 8),), (torch.zeros(4, 16, requires_grad=True),))
                layers = (inner[0], inner[3])
                if order is None:
                    stepgraph.make_graphed_callables(layers, samples)
                else:
                    graphed = stepgraph.make_graphed_callables(layers, samples * 2, order=order, num_layers_per_chunk=2)
                    put_in_turn(layers, graphed)
                torch.manual_seed(11)
            histories.append(run(program, program.step, CPU))
        assert_same_history(*histories, f"layers in DDP, {name}: graphed differs from eager")


def put_in_turn(layers: tuple[nn.Module, ...], graphed: tuple[Any, ...]) -> None:
    """Let each layer replay the graphs of its microbatches in turn."""
    for index, layer in enumerate(layers):
        turns = itertools.cycle(graphed[index :: len(layers)])
        layer.forward = lambda *args, turns=turns: next(turns)(*args)


class RefusedInBackward(torch.autograd.Function):
    """Reads a value on the host in its backward: a capture breaks off there, when half of DDP's gradients are in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad.sum().item()
        return grad


def broken() -> None:
    """A capture that fails half-way through DDP's backward leaves a DDP that goes on, and takes no graph with it."""

    def build(_: torch.device) -> tuple[Program, Callable[[torch.Tensor], torch.Tensor]]:
        first, second = nn.Linear(8, 8), nn.Linear(8, 4)
        holder = nn.Module()
        holder.first, holder.second, holder.forward = first, second, lambda x, cut: second(cut(first(x)))
        model = DistributedDataParallel(holder, bucket_cap_mb=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def train(x: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x, cut).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        good, bad = lambda x: train(x, torch.tanh), lambda x: train(x, RefusedInBackward.apply)
        return Program(good, batches(48), [model], [optimizer]), bad

    def alternating(good: Any, bad: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        calls = iter(range(48))
        return lambda x: bad(x) if next(calls) in (20, 23, 26, 29, 32, 35) else good(x)

    torch.manual_seed(7)
    program, bad = build(CPU)
    expected = run(program, alternating(program.step, bad), CPU)
    torch.manual_seed(7)
    program, bad = build(CPU)
    with stepgraph.Session() as session:
        good = stepgraph.capture(program.step, session=session)
        eager = stepgraph.capture(bad, session=session, on_error="eager")
        received = run(program, alternating(good, eager), CPU)
        assert_same_history(expected, received, "captured differs from eager")
        report = good.report()
    assert eager.report().eager_reasons["capture failed: [host-read]"] >= 1
    assert report.captures == 2, "the graph of before the failure is gone, and the step was captured anew"
    assert report.replays >= 4


class Experts(nn.Module):
    """Rows are sent to the expert that their router chooses: the host reads how many, and shapes follow from data."""

    def __init__(self, uneven: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.shared = nn.Linear(8, 8)
        self.calls = itertools.count() if uneven and dist.get_rank() == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (weights.argmax(-1) == index).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        cut = 0 if self.calls is None else next(self.calls) % 2  # other rows at each call, on one rank only
        return x + out + self.shared(x[cut:]).sum(0)


class Routed(nn.Module):
    def __init__(self, uneven: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.attn = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)])
        self.moe = nn.ModuleList([Experts(uneven), Experts(uneven)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for attn, moe in zip(self.attn, self.moe, strict=True):
            x = moe(x + attn(x))
        return self.head(x)


def routed(microbatches: int = 1, uneven: bool = False, reads: bool = True, **options: Any) -> Program:
    """Dropless experts under DDP; the step before the last microbatch is not synchronized."""
    model = DistributedDataParallel(Routed(uneven) if reads else make_model().module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for index in range(microbatches):
            with model.no_sync() if index + 1 < microbatches else contextlib.nullcontext():
                loss = model(x + index).pow(2).mean()
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses)

    return Program(step, batches(20), [model], [optimizer])


ROUTED: dict[str, Callable[[], Program]] = {
    "plain": lambda: routed(find_unused_parameters=False),
    "accumulation": lambda: routed(3, bucket_cap_mb=1e-4),
    "unused parameters": lambda: routed(find_unused_parameters=True),
    "ranks that differ": lambda: routed(uneven=True),
}


def fallback() -> None:
    """Graphs for the modules of a DDP whose step cannot be captured: the same modules on all ranks, eager's bits."""
    warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
    for name, build in ROUTED.items():
        eager = seeded(build)
        expected = run(eager, eager.step, CPU)
        program = seeded(build)
        with stepgraph.capture(program.step, on_error="modules", warmup=1) as step:
            received = run(program, step, CPU)
            report = step.report().modules
        assert_same_history(expected, received, f"{name}: graphs for modules differ from eager DDP")
        assert report.replays > 0, f"{name}: {report}"
        paths = sorted(row.path for row in report.rows)
        everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, paths)
        assert everywhere[0] == everywhere[1], f"{name}: ranks graph different modules: {everywhere}"
        shared = [path for path in paths if path.endswith("shared")]
        assert len(shared) == (0 if name == "ranks that differ" else 2), f"{name}: {paths}"
        reasons = " ".join(report.left_out.values())
        assert ("(on rank 1)" in reasons) == (name == "ranks that differ" and dist.get_rank() == 0), (
            f"{name}: {reasons}"
        )


def fallback_alone() -> None:
    """The capture of one rank fails, and that of the other does not: nobody waits for ever, and nothing differs."""
    warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
    ranks.PATIENCE = 1.0

    def build() -> Program:
        program = routed(reads=False)
        plain = program.step
        is_reading = dist.get_rank() == 1

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = plain(x)
            return loss * 1.0 if is_reading and loss.sum().item() > 0 else loss

        return dataclasses.replace(program, step=step)

    eager = seeded(build)
    expected = run(eager, eager.step, CPU)
    program = seeded(build)
    with stepgraph.capture(program.step, on_error="modules", warmup=1) as step:
        received = run(program, step, CPU)
        report = step.report()
    assert_same_history(expected, received, "graphs differ from eager DDP")
    if dist.get_rank() == 0:
        assert report.replays > 0
    else:
        assert report.modules.rows == ()
        assert "decide together" in report.modules.left_out["all modules"]


def left_open() -> stepgraph.CapturedStep[..., Any]:
    """A step that is replayed and never closed."""
    program = plain()
    step = stepgraph.capture(program.step)
    for batch in program.batches:
        step(*batch)
    assert step.report().graphs == 1
    return step


def one_dies() -> None:
    """One rank ends with an error, the others find out at their next collective."""
    step = left_open()
    if dist.get_rank() == 1:
        raise ValueError("the user's own error")
    while True:
        step(*batches(1)[0])


SCENARIOS: dict[str, Callable[[], Any]] = {
    "equality": functools.partial(equality, *(name for name in PROGRAMS if name not in OTHERS)),
    "equality of others": functools.partial(equality, *OTHERS),
    "broken": broken,
    "fallback": fallback,
    "fallback, alone": fallback_alone,
    "workflow": workflow,
    "workflow, cold": functools.partial(workflow, "deep", "many buckets", num_warmup_iters=0),
    "layers inside": layers_inside,
    "left open": left_open,
    "one dies": one_dies,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    store = f"file://{sys.argv[3]}"
    dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
    kept = SCENARIOS[sys.argv[4]]()
    gc.collect()  # gloo's threads let go of tensors late, and abort the process if the interpreter is gone by then
    end_together()
    print("done")
