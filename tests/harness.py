"""Two programs from one seed, one eager and one captured, compared bit for bit after every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stepgraph
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


def snapshot(program: Program, device: torch.device) -> dict[str, Any]:
    """Everything that must be equal: parameters, buffers, gradients, optimizer state, random state."""
    found: dict[str, Any] = {}
    for i, module in enumerate(program.modules):
        for name, value in module.state_dict().items():
            found[f"module{i}.{name}"] = value.detach().clone()
        for name, parameter in module.named_parameters():
            grad = parameter.grad
            found[f"module{i}.{name}.grad"] = None if grad is None else grad.detach().clone()
    for i, optimizer in enumerate(program.optimizers):
        for key, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                found[f"optimizer{i}.{key}.{name}"] = value.clone() if isinstance(value, torch.Tensor) else value
        for j, group in enumerate(optimizer.param_groups):
            found[f"optimizer{i}.group{j}"] = {k: v for k, v in group.items() if k != "params"}
    for i, tensor in enumerate(program.tensors):
        found[f"tensor{i}"] = tensor.detach().clone()
        found[f"tensor{i}.grad"] = None if tensor.grad is None else tensor.grad.detach().clone()
    found["rng cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        found["rng cuda"] = torch.cuda.get_rng_state(device)
    for i, generator in enumerate(program.generators):
        found[f"rng {i}"] = generator.get_state()
    for name, state in program.named_states().items():
        found[f"rng {name}"] = state
    return found


def same_bits(one: Any, two: Any) -> bool:
    """Bitwise equality: NaN equals itself, -0.0 differs from 0.0."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return type(one) is type(two) and bool(one == two)
    if one.shape != two.shape or one.dtype != two.dtype or one.device != two.device:
        return False
    return torch.equal(_bytes(one), _bytes(two))


def different(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """The names under which two snapshots differ."""
    return [name for name in sorted({*one, *two}) if not same_bits(one.get(name, "absent"), two.get(name, "absent"))]


def run(program: Program, step: Step, device: torch.device) -> list[tuple[list[Any], dict[str, Any]]]:
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
    """Build the program twice from one seed, run it eager and captured, and compare after every call."""
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
    leaves, spec = torch.utils._pytree.tree_flatten(one)
    others, other_spec = torch.utils._pytree.tree_flatten(two)
    if spec != other_spec:
        return False
    pairs = [(a, b) for a, b in zip(leaves, others, strict=True) if _is_cuda(a) and _is_cuda(b)]
    rest = [(a, b) for a, b in zip(leaves, others, strict=True) if not (_is_cuda(a) and _is_cuda(b))]
    if any(a.shape != b.shape or a.dtype != b.dtype or a.device != b.device for a, b in pairs):
        return False
    return all(same_bits(a, b) for a, b in rest) and (
        not pairs or torch.equal(torch.cat([_bytes(a) for a, _ in pairs]), torch.cat([_bytes(b) for _, b in pairs]))
    )


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


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
