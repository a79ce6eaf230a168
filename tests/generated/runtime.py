"""What generated programs use: layers, engines, and a trace of everything that training may change.

A script of a found failure has the used parts of this file in it, so it imports nothing but torch and stepgraph.
"""

from __future__ import annotations

import contextlib
import copy  # noqa: F401  # generated programs use it
import os
import re
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import stepgraph

DEVICE = torch.device(os.environ.get("GENERATED_DEVICE", "cpu"))
WIDTH = 4
HELD = (1, 4, 11)
"""Results are looked at again so many calls later."""


def seed(number: int) -> None:
    torch.manual_seed(number)


def batch(number: int, rows: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The batch of a call; the default generator is not used."""
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
    return values.to(DEVICE, dtype)


# -- layers


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


class Conv(nn.Module):
    """A convolution and BatchNorm, which counts and averages in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x[:, None])).mean(1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.linear(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.view(-1, 2, 2)
        return self.attention(parts, parts, parts, need_weights=False)[0].reshape(x.shape)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x.view(-1, 2, 2))[0].reshape(x.shape)


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.linear(x).tanh(), self.linear.weight.t())


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.embedding((x[:, 0] > 0).long())


class Twice(nn.Module):
    """A part that one forward uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.part(x))


class Scaled(nn.Module):
    """Multiplies by a number that it reads at each call."""

    def __init__(self, read: Callable[[], Any] | None = None, value: Any = 1.0) -> None:
        super().__init__()
        self.linear, self.read, self.value = nn.Linear(WIDTH, WIDTH), read, value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(self.value if self.read is None else self.read())


class Branch(nn.Module):
    """Takes a path by a value that it reads at each call."""

    def __init__(self, read: Callable[[], Any] | None = None, value: Any = False) -> None:
        super().__init__()
        self.linear, self.read, self.value = nn.Linear(WIDTH, WIDTH), read, value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.sin() if (self.value if self.read is None else self.read()) else x.tanh()


class Tells(nn.Module):
    """Returns a plain number besides a tensor."""

    def __init__(self, read: Callable[[], Any] | None = None, value: Any = 1.0) -> None:
        super().__init__()
        self.linear, self.read, self.value = nn.Linear(WIDTH, WIDTH), read, value

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return self.linear(x), 1.0 + float(self.value if self.read is None else self.read())


class Net(nn.Module):
    """Layers, one after the other, and a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.to(DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                x, number = x
                x = x * number
        return self.head(x)


# -- events


def pick(net: nn.Module, number: int) -> nn.Parameter:
    """One of the parameters."""
    parameters = list(net.parameters())
    return parameters[number % len(parameters)]


def hooked(net: nn.Module, number: int) -> nn.Module:
    """One of the modules."""
    found = list(net.modules())
    return found[number % len(found)]


def own_gradients(net: nn.Module) -> None:
    """Put gradients of the program's own at all parameters."""
    for p in net.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 0.1)


def swap_gradients(net: nn.Module, number: int) -> None:
    """Two parameters of one shape exchange their gradients."""
    one = pick(net, number)
    two = next((p for p in reversed(list(net.parameters())) if p is not one and p.shape == one.shape), None)
    if two is not None:
        one.grad, two.grad = two.grad, one.grad


def alias_gradients(net: nn.Module, number: int) -> None:
    """Two parameters of one shape share one gradient."""
    one = pick(net, number)
    two = next((p for p in reversed(list(net.parameters())) if p is not one and p.shape == one.shape), None)
    if two is not None and one.grad is not None:
        two.grad = one.grad


def replace_parameter(net: nn.Module, number: int) -> None:
    """Put another parameter, with the same values, in the place of one."""
    name, parameter = list(net.named_parameters())[number % len(list(net.parameters()))]
    path, _, name = name.rpartition(".")
    setattr(net.get_submodule(path), name, nn.Parameter(parameter.detach().clone()))


def replace_buffer(net: nn.Module, number: int) -> None:
    """Put another tensor in the place of a buffer."""
    found = [name for name, value in net.named_buffers() if value.is_floating_point()]
    if found:
        path, _, name = found[number % len(found)].rpartition(".")
        module = net.get_submodule(path)
        setattr(module, name, torch.full_like(getattr(module, name), 0.5))


def halve(number: torch.Tensor) -> torch.Tensor:
    return number * 0.5


def halve_result(module: nn.Module, args: Any, result: Any) -> Any:
    return (result[0] * 0.5, *result[1:]) if isinstance(result, tuple) else result * 0.5


def halve_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def halve_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


# -- engines


class Engine:
    """Eager; the other engines put graphs in the place of what a program hands them."""

    def __init__(self, options: Mapping[str, Any] = types.MappingProxyType({}), shared: bool = False) -> None:
        self.options, self.shared = dict(options), shared
        self.handles: list[Any] = []
        self.last: dict[str, int] = {}
        """The counts before the engine was closed."""

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def parts(self, net: nn.Module) -> None:
        """Graph parts of a model."""

    def stages(self, stages: Any, schedule: Any) -> None:
        """Graph stages of a pipeline."""

    def close(self) -> None:
        for handle in self.handles:
            handle.close()

    def counts(self) -> dict[str, int]:
        """Replays and eager calls so far."""
        return {}


class Whole(Engine):
    """`stepgraph.capture`."""

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.shared:
            self.session = getattr(self, "session", None) or stepgraph.Session()
        options = self.options | ({"session": self.session} if self.shared else {})
        self.handles.append(stepgraph.capture(function, **options))
        return self.handles[-1]

    def counts(self) -> dict[str, int]:
        reports = [handle.report() for handle in self.handles]
        return {
            name: sum(getattr(report, name) for report in reports)
            for name in ("captures", "replays", "audits", "eager_calls")
        }


class Modules(Engine):
    """`stepgraph.graph_modules`."""

    def __init__(self, options: Mapping[str, Any] = types.MappingProxyType({}), shared: bool = False) -> None:
        super().__init__({k: v for k, v in options.items() if (k, v) != ("on_error", "modules")}, shared)

    def parts(self, net: nn.Module) -> None:
        self.handles.append(stepgraph.graph_modules(net, ["layers.*"], **self.options))

    def counts(self) -> dict[str, int]:
        reports = [handle.report() for handle in self.handles]
        return {name: sum(getattr(report, name) for report in reports) for name in ("graphs", "replays", "eager_calls")}


class Callables(Engine):
    """`stepgraph.make_graphed_callables`."""

    def parts(self, net: nn.Module) -> None:
        layers = tuple(net.layers)
        samples = tuple((batch(number).requires_grad_(),) for number in range(len(layers)))
        options = {k: v for k, v in self.options.items() if k == "audit"}
        self.handles += stepgraph.make_graphed_callables(layers, samples, **options)

    def close(self) -> None:
        for handle in self.handles:
            handle.forward.reset()

    def counts(self) -> dict[str, int]:
        reports = [stepgraph.engine.parts.callables.report(handle) for handle in self.handles]
        return {
            "replays": sum(report.forwards for report in reports),
            "eager_calls": sum(report.eager_calls for report in reports),
        }


class Stages(Engine):
    """`stepgraph.graph_stage`."""

    def stages(self, stages: Any, schedule: Any) -> None:
        options = {k: v for k, v in self.options.items() if k in ("warmup", "audit")}
        self.handles.append(stepgraph.graph_stage(stages, schedule, **options))

    def counts(self) -> dict[str, int]:
        steps = Counter[str]()
        for handle in self.handles:
            steps += handle.steps
        return {"replays": steps["replay"], "eager_calls": steps.total() - steps["replay"]}


ENGINES = {"eager": Engine, "capture": Whole, "modules": Modules, "callables": Callables, "stage": Stages}


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one rank, which the stages of a pipeline need."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def pipeline(net: Net, name: str, engine: Engine, loss_fn: Callable[..., torch.Tensor]) -> Any:
    """A schedule whose stages are the layers of a model, the last with the head."""
    from torch.distributed.pipelining import PipelineStage, schedules

    parts = [*net.layers[:-1], nn.Sequential(net.layers[-1], net.head)]
    if name in ("ScheduleGPipe", "Schedule1F1B"):
        parts = [nn.Sequential(*net.layers, net.head)]
    stages = [PipelineStage(part, index, len(parts), DEVICE) for index, part in enumerate(parts)]
    schedule = getattr(schedules, name)(stages if len(stages) > 1 else stages[0], 2, loss_fn=loss_fn)
    engine.stages(stages, schedule)
    return schedule


# -- traces


def bits(value: Any) -> Any:
    """A tensor as its shape, dtype and bytes; containers part by part."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        return tuple(value.shape), str(value.dtype), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [bits(part) for part in value]
    return value.hex() if isinstance(value, float) else repr(value)


def state_of(**objects: Any) -> dict[str, Any]:
    """Everything that training may change, by name."""
    found: dict[str, Any] = {"random numbers": hash(bits(torch.get_rng_state()))}
    if DEVICE.type == "cuda":
        found["random numbers of cuda"] = hash(bits(torch.cuda.get_rng_state()))
    for name, one in objects.items():
        if isinstance(one, nn.Module):
            found[f"{name}.training"] = [part.training for part in one.modules()]
            for path, p in one.named_parameters():
                found[f"{name}.{path}"], found[f"{name}.{path}.grad"] = bits(p), bits(p.grad)
            for path, buffer in one.named_buffers():
                found[f"{name}.{path}"] = bits(buffer)
        elif hasattr(one, "state_dict"):
            found[name] = bits(one.state_dict())
        else:
            found[name] = bits(one)
    return found


class Trace:
    """What a run shows: after each call its result and the state; results that are held, again some calls later."""

    def __init__(self, engine: Engine, state: Callable[[], dict[str, Any]]) -> None:
        self.engine, self.state = engine, state
        self.calls: list[dict[str, Any]] = []
        self.before: dict[str, Any] | None = None
        self._held: list[tuple[Any, Any]] = []

    def note(self, result: Any) -> None:
        """After a call."""
        now = {"result": bits(result)} | state_of(**self.state())
        self._held.append((result, now["result"]))
        for age in HELD:
            if age < len(self._held):
                held, was = self._held[-1 - age]
                now[f"the result {age} calls ago is as it was"] = bits(held) == was
        self.calls.append(now)
        self.before = None

    def begin(self) -> None:
        """Before a call; only a refused call is compared with it."""
        if isinstance(self.engine, Whole):
            self.before = state_of(**self.state())

    def end(self) -> None:
        """After the last call: the engine is closed."""
        self.engine.last = self.engine.counts()
        self.engine.close()
        self.calls.append(
            {f"result {i} in the end is as it was": bits(held) == was for i, (held, was) in enumerate(self._held)}
            | state_of(**self.state())
        )


def different(one: Trace, two: Trace) -> str | None:
    """The first difference of two traces, in words, as far as both go."""
    for call, (a, b) in enumerate(zip(one.calls, two.calls, strict=False)):
        names = [
            name
            for name in sorted({*a, *b})
            if a.get(name) != b.get(name) and not ("as it was" in name and not a.get(name))
        ]
        if names:
            where = f"after call {call}" if call < len(one.calls) - 1 else "in the end"
            return f"{where}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    return None


def run(program: Callable[[Engine, Callable[..., Trace]], Any], engine: Engine) -> tuple[Trace, BaseException | None]:
    """Run a program; its trace up to the error, if there was one."""
    made: list[Trace] = []

    def trace(state: Callable[[], dict[str, Any]]) -> Trace:
        made.append(Trace(engine, state))
        return made[0]

    try:
        program(engine, trace)
        error = None
    except Exception as raised:  # noqa: BLE001
        error = raised
    return made[0] if made else Trace(engine, dict), error


def settle() -> None:
    """Eager equal to itself: one thread, deterministic algorithms."""
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def judge(program: Any, engine: Engine) -> dict[str, Any]:
    """Run a program eagerly and with an engine, and say how they compare."""
    settle()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, error = run(program, Engine())
        if error is not None:
            return {"outcome": "invalid", "detail": f"{type(error).__name__}: {error}"[:200]}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        graphed, error = run(program, engine)
    rules = [
        (re.findall(r"\[([a-z-]+)\]", str(w.message)) or ["?"])[0]
        for w in seen
        if issubclass(w.category, stepgraph.StepgraphWarning)
    ]
    found = {"calls": len(eager.calls) - 1, "warnings": dict(Counter(rules))} | _counts(engine)
    if (difference := different(eager, graphed)) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again, _ = run(program, Engine())
        outcome = "different" if different(eager, again) is None else "unstable"
        return found | {"outcome": outcome, "detail": difference}
    if isinstance(error, stepgraph.StepgraphError):
        changed = _changed_by_refusal(graphed)
        if changed:
            return found | {"outcome": "changed by a refusal", "rule": error.rule, "detail": ", ".join(changed)}
        return found | {"outcome": "refused", "rule": error.rule, "detail": str(error)[:300]}
    if error is not None:
        text = f"{type(error).__name__}: {error}"[:300]
        return found | {"outcome": "foreign error", "rule": type(error).__name__, "detail": text}
    return found | {"outcome": "equal" if found.get("replays") else "equal, all eager"}


def _counts(engine: Engine) -> dict[str, int]:
    if engine.last:
        return engine.last
    try:
        return engine.counts()
    except Exception:  # noqa: BLE001
        return {}


def _changed_by_refusal(trace: Trace) -> list[str]:
    """What a refused call has changed: its state must be that before the call."""
    if trace.before is None:
        return []
    now = state_of(**trace.state())
    return [name for name in sorted({*now, *trace.before}) if now.get(name) != trace.before.get(name)]


__all__ = [name for name in globals() if not name.startswith("_") and name != "annotations"]
