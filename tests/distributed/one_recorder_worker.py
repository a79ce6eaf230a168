"""One rank of a real gloo group in which rank 0 records each step once more than the others, who go on replaying."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import stepgraph
from tests.distributed.ranks import end_together
from tests.harness import Program, assert_same_history, run

CPU = torch.device("cpu")
Collective = Callable[[torch.Tensor], Any]


def empty(count: int = 4) -> torch.Tensor:
    return torch.empty(count)


def changed(collective: Callable[..., Any], *args: Any, **options: Any) -> Collective:
    """A collective that changes its tensor."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        collective(y, *args, **options)
        return y

    return call


def into(collective: Callable[..., Any], count: int, **options: Any) -> Collective:
    """A collective that fills a tensor with what it makes of another."""

    def call(x: torch.Tensor) -> torch.Tensor:
        out = empty(count)
        collective(out, x, **options)
        return out

    return call


def all_gather(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [empty(), empty()]
    dist.all_gather(parts, x)
    return parts


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    out = empty(2)
    dist.reduce_scatter(out, list(x.chunk(2)))
    return out


def reduce(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.reduce(y, dst=0)
    return y if dist.get_rank() == 0 else x * 2  # the others' is not defined


def gather(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [empty(), empty()] if dist.get_rank() == 0 else None
    dist.gather(x, parts, dst=0)
    return parts or [x]


def scatter(x: torch.Tensor) -> torch.Tensor:
    out = empty(2)
    dist.scatter(out, list(x.chunk(2)) if dist.get_rank() == 1 else None, src=1)
    return out


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    out = empty()
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(out, 1)
    else:
        dist.recv(out, 0)
        dist.send(out + x, 0)
    return out


def relay(x: torch.Tensor) -> torch.Tensor:
    """Rank 1 sends back the very memory that it has received into, with nothing between."""
    out = empty()
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(out, 1)
    else:
        dist.recv(out, 0)
        dist.send(out, 0)
    return out


def exchange(x: torch.Tensor) -> torch.Tensor:
    out, other = empty(), 1 - dist.get_rank()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, out, other)])
    for work in works:
        work.wait()
    return out


def by_future(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    future = dist.all_reduce(y, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    return future.wait()


def received_index(x: torch.Tensor) -> torch.Tensor:
    index = torch.empty(2, dtype=torch.int64) if dist.get_rank() else (x[:2] > 0).long()
    dist.broadcast(index, src=0)
    return x[index]


def coalesced(x: torch.Tensor) -> list[torch.Tensor]:
    tensors = [x.clone(), x[:2] * 3]
    dist.all_reduce_coalesced(tensors)
    return tensors


def coalescing(x: torch.Tensor) -> list[torch.Tensor]:
    tensors = [x.clone(), x * 3]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def resharding() -> Collective:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")

    def call(x: torch.Tensor) -> torch.Tensor:
        rows = DTensor.from_local(x.view(2, 2), mesh, [Shard(0)])
        columns = (rows.redistribute(mesh, [Replicate()]) * 2).redistribute(mesh, [Shard(1)])
        return columns.redistribute(mesh, [Shard(0)]).to_local()

    return call


def barrier(x: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return x * 2


@torch.library.custom_op("stepgraph_tests::summed", mutates_args=())
def summed(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def through_autograd(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    gathered = functional.all_gather_tensor_autograd(leaf, 0, dist.group.WORLD)
    (grad,) = torch.autograd.grad(gathered.pow(2).sum(), leaf)
    return grad


def operator(name: str, *args: Any) -> Collective:
    """One of the functional operators, by name; `args` come after the tensor and before the group."""

    def call(x: torch.Tensor) -> Any:
        out = getattr(torch.ops._c10d_functional, name)(x.clone(), *args, dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(out)

    return call


def operator_of_list(name: str, *args: Any) -> Collective:
    def call(x: torch.Tensor) -> Any:
        out = getattr(torch.ops._c10d_functional, name)([x.clone(), x * 3], *args, dist.group.WORLD.group_name)
        return [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in out]

    return call


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": changed(dist.all_reduce),
    "all_reduce, asynchronous": by_future,
    "broadcast": changed(dist.broadcast, src=1),
    "all_gather": all_gather,
    "all_gather_into_tensor": into(dist.all_gather_into_tensor, 8),
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": into(dist.reduce_scatter_tensor, 2),
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_to_all_single": into(dist.all_to_all_single, 4),
    "send, recv": there_and_back,
    "relay": relay,
    "exchange": exchange,
    "barrier": barrier,
    "received index": received_index,
    "all_reduce_coalesced": coalesced,
    "coalescing manager": coalescing,
    "custom operator": summed,
    "autograd": through_autograd,
    "functional all_reduce": operator("all_reduce", "sum"),
    "functional all_reduce_": operator("all_reduce_", "sum"),
    "functional broadcast": operator("broadcast", 1),
    "functional all_gather": operator("all_gather_into_tensor", 2),
    "functional reduce_scatter": operator("reduce_scatter_tensor", "sum", 2),
    "functional all_to_all": operator("all_to_all_single", [2, 2], [2, 2]),
    "functional all_reduce, list": operator_of_list("all_reduce_coalesced", "sum"),
    "functional all_gather, list": operator_of_list("all_gather_into_tensor_coalesced", 2),
    "functional reduce_scatter, list": operator_of_list("reduce_scatter_tensor_coalesced", "sum", 2),
}


def flat(result: Any) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in ([result] if isinstance(result, torch.Tensor) else result)])


def collectives() -> None:
    """Each collective: captured by both ranks, recorded by rank 0 alone, and replayed by both again."""
    for name, collective in (COLLECTIVES | {"DTensor": resharding()}).items():
        rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        batches = [row.clone() for row in rows]  # of one alignment
        expected = [flat(collective(x)) for x in batches]
        with stepgraph.capture(collective, warmup=1) as step:
            for index, (x, wanted) in enumerate(zip(batches, expected, strict=True)):
                if index == 3 and dist.get_rank() == 0:
                    step.reset()
                assert torch.equal(flat(step(x)), wanted), (name, index)
            assert step.report().captures == 2 - dist.get_rank(), name


def with_reduced_loss() -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.all_reduce(model(x).pow(2).mean(), "sum", dist.group.WORLD)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss

    return Program(step, batches(12), [model], [optimizer])


def with_ddp() -> Program:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(40), [model], [optimizer])


def batches(count: int) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [(torch.randn(4, 8, generator=generator),) for _ in range(count)]


def training(build: Callable[[], Program], reset_at: int) -> None:
    """Rank 0 drops its graphs in the middle and captures again; both train as in eager."""
    torch.manual_seed(7)
    program = build()
    expected = run(program, program.step, CPU)
    torch.manual_seed(7)
    program = build()
    calls = iter(range(len(program.batches)))
    with stepgraph.capture(program.step) as step:

        def call(x: torch.Tensor) -> torch.Tensor:
            if next(calls) == reset_at and dist.get_rank() == 0:
                step.reset()
            return step(x)

        assert_same_history(expected, run(program, call, CPU), "captured differs from eager")
        assert step.report().captures == 2 - dist.get_rank()


class AllReduce(torch.autograd.Function):
    """A sum over the ranks, and of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class Reduced(nn.Module):
    """A layer with a collective in its forward, and a setting that it reads to no effect."""

    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(8, 4), settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if self.settings["threshold"] < 100 else 3.0
        return AllReduce.apply(self.layer(x) * scale)


def audits() -> None:
    """A value that rank 0 alone reads anew makes an audit there, of a step and of a module; nobody waits for it."""
    for way in ("eager", "step", "module"):
        torch.manual_seed(7)
        settings = {"threshold": 1.0}
        model = nn.Sequential(Reduced(settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def train(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        handle: Any = None
        if way == "step":
            handle = train = stepgraph.capture(train, audit=False)
        elif way == "module":
            handle = stepgraph.graph_modules(model, ["0"], audit=False)
        losses = []
        for index, (x,) in enumerate(batches(12)):
            if index == 8 and dist.get_rank() == 0:
                settings["threshold"] = 2.0
            losses.append(train(x))
        if handle is None:
            expected = losses
        else:
            assert all(map(torch.equal, expected, losses)), way
            assert handle.report().audits == 1 - dist.get_rank(), way
            assert handle.report().replays > 6, way


SCENARIOS: dict[str, Callable[[], None]] = {
    "collectives": collectives,
    "reduced loss": lambda: training(with_reduced_loss, 6),
    "ddp": lambda: training(with_ddp, 16),
    "audits": audits,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    store = f"file://{sys.argv[3]}"
    dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
    for scenario in sys.argv[4:]:
        SCENARIOS[scenario]()
    end_together()
    print("done")
