"""Two programs from one seed, one eager and one captured, compared bit for bit after every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stepgraph
from stepgraph.tools.verification import bits
from tests.seeding import seed

Step = Callable[..., Any]


@dataclass
class Program:
    """A training program: its step, its batches, and everything that training may change."""

    step: Step
    batches: Sequence[tuple[Any, ...]]
    modules: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    tensors: Sequence[torch.Tensor] = ()
    before_call: Callable[[int], None] = lambda index: None
    generators: Sequence[torch.Generator] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    named_states: Callable[[], dict[str, torch.Tensor]] = dict
    """The tracker's random states, where the program uses any."""


def operators_of(function: Callable[..., Any], *args: Any) -> set[str]:
    """The operators that a call runs in this version of torch: `aten::add`."""

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    found: set[str] = set()
    with Noting():
        function(*args)
    return found


class State(Mapping[str, Any]):
    """Values by name, as they were when this was made.

    Tensors of one kind are kept end to end, so that a state is copied and compared in a few calls, however many
    tensors it has.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._where: dict[str, tuple[Any, int, torch.Size]] = {}
        """The flat tensor, the place in it and the shape of each tensor."""
        self._others: dict[str, Any] = {}
        parts: dict[Any, list[torch.Tensor]] = {}
        ends: dict[Any, int] = {}
        for name, value in values.items():
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                self._others[name] = _copied(value)
                continue
            kind = (value.dtype, value.device)
            start = ends.get(kind, 0)
            self._where[name] = (kind, start, value.shape)
            ends[kind] = start + value.numel()
            parts.setdefault(kind, []).append(value)
        with torch.no_grad():
            self._flat = {kind: _end_to_end(found) for kind, found in parts.items()}

    def __getitem__(self, name: str) -> Any:
        if name not in self._where:
            return self._others[name]
        kind, start, shape = self._where[name]
        return self._flat[kind][start : start + shape.numel()].view(shape)

    def __iter__(self) -> Iterator[str]:
        yield from self._where
        yield from self._others

    def __len__(self) -> int:
        return len(self._where) + len(self._others)

    def pairs_with(self, other: State) -> list[tuple[Any, Any]] | None:
        """What must be equal, pair by pair, for two states to be the same; None where their tensors have other kinds,
        shapes or names, or come in another order."""
        if self._where != other._where or self._others.keys() != other._others.keys():
            return None
        flat = [(self._flat[kind], other._flat[kind]) for kind in self._flat]
        return [*flat, *((value, other._others[name]) for name, value in self._others.items())]


def _end_to_end(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:  # which the other way would return itself, not a copy
        return tensors[0].detach().reshape(-1).clone()
    flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return flat


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [_copied(part) for part in value]
    return value


def snapshot(program: Program, device: torch.device, **more: Any) -> State:
    """Everything that must be equal: parameters, buffers, gradients, optimizer state, random state."""
    found: dict[str, Any] = {}
    for i, module in enumerate(program.modules):
        for path, part in module.named_modules():  # one walk: `state_dict` and `named_parameters` take several
            where = f"module{i}.{path}." if path else f"module{i}."
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    found[f"{where}{name}"] = parameter
                    found[f"{where}{name}.grad"] = parameter.grad
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    found[f"{where}{name}"] = buffer
    for i, optimizer in enumerate(program.optimizers):
        for key, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                found[f"optimizer{i}.{key}.{name}"] = value
        for j, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    found[f"optimizer{i}.group{j}.{name}"] = value
    for i, tensor in enumerate(program.tensors):
        found[f"tensor{i}"] = tensor
        found[f"tensor{i}.grad"] = tensor.grad
    found["rng cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        found["rng cuda"] = torch.cuda.get_rng_state(device)
    for i, generator in enumerate(program.generators):
        found[f"rng {i}"] = generator.get_state()
    for name, state in program.named_states().items():
        found[f"rng {name}"] = state
    return State(found | more)


def same_bits(one: Any, two: Any) -> bool:
    """Bitwise equality; of two states in a few calls."""
    pairs = one.pairs_with(two) if isinstance(one, State) and isinstance(two, State) else None
    return bits.same_bits(one, two) if pairs is None else all(same_bits(a, b) for a, b in pairs)


def different(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """The names under which two snapshots differ."""
    found = []
    for name in sorted({*one, *two}):
        a, b = (state.get(name, "absent") for state in (one, two))
        if isinstance(a, State) and isinstance(b, State):
            found += [f"{name}: {part}" for part in different(a, b)]
        elif not same_bits(a, b):
            found.append(name)
    return found


def run(program: Program, step: Step, device: torch.device) -> list[tuple[list[Any], State]]:
    """Call the step on each batch; results and a snapshot after each call."""
    history = []
    for index, batch in enumerate(program.batches):
        program.before_call(index)
        result = step(*batch)
        leaves = torch.utils._pytree.tree_leaves(result)
        kept = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        history.append((kept, snapshot(program, device)))
    return history


def assert_captured_equals_eager(
    build: Callable[[torch.device], Program], device: torch.device, **options: Any
) -> stepgraph.Report:
    """Build the program twice from one seed, run it eager and captured, and compare after every call.

    An audit records the call again, which is half of the time of a short run. So one comes at each fourth replay;
    `test_audit` audits every call.
    """
    options = {"audit": 4, **options}
    seed(7)
    eager = build(device)
    seed(11)
    expected = run(eager, eager.step, device)
    if device.type == "cuda":  # equality with eager means nothing where eager differs from itself
        seed(7)
        again = build(device)
        seed(11)
        assert_same_history(expected, run(again, again.step, device), "eager differs from eager")
    seed(7)
    captured = build(device)
    seed(11)
    with stepgraph.capture(captured.step, generators=captured.generators, **options) as step:
        assert_same_history(expected, run(captured, step, device), "captured differs from eager")
        report = step.report()
    assert report.replays > 0, "nothing was replayed"
    return report


def assert_same_history(expected: Any, received: Any, what: str) -> None:
    if _same_at_once(expected, received):
        return
    for call, ((results, state), (new_results, new_state)) in enumerate(zip(expected, received, strict=True)):
        assert len(results) == len(new_results)
        for one, two in zip(results, new_results, strict=True):
            assert same_bits(one, two), f"{what}: result of call {call}: {one} and {two}"
        names = different(state, new_state)
        assert not names, f"{what}: after call {call}: {', '.join(names)}"
    raise AssertionError(f"{what}: the whole differs and no part does")


def _same_at_once(one: Any, two: Any) -> bool:
    """Whether two histories are bitwise the same, with one question to the device instead of one a tensor."""
    todo, on_device = [(one, two)], []
    while todo:
        a, b = todo.pop()
        if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
            todo += zip(a, b, strict=True)
        elif isinstance(a, State) and isinstance(b, State) and (pairs := a.pairs_with(b)) is not None:
            todo += pairs
        elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_cuda and bits.same_form(a, b):
            on_device.append((a, b))
        elif not same_bits(a, b):
            return False
    return not on_device or torch.equal(
        *(torch.cat([_bytes(t) for t in side]) for side in zip(*on_device, strict=True))
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_change_is_noticed(
    step: Callable[[torch.Tensor], torch.Tensor], change: Callable[[], object], told: str, device: torch.device
) -> str:
    """Change something that a captured step reads: it is told, captured again once, and right. Returns the warning."""
    x = torch.ones(2, device=device)
    with stepgraph.capture(step) as captured:
        for _ in range(5):
            assert torch.equal(captured(x), step(x))
        before = captured(x)
        change()
        with pytest.warns(stepgraph.StepgraphWarning) as seen:
            assert torch.equal(captured(x), step(x))
        assert not torch.equal(captured(x), before)
        assert captured.report().recaptures == 1
    message = str(seen[0].message)
    assert told in message
    return message
