"""Two trainings from one seed, one eager and one with graphed modules, compared bit for bit.

A training notes what it sees while a step runs: results as they come, and every gradient after every backward. After
each step all state is compared too: parameters, buffers, gradients, optimizer state, random state.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.core.tree import flatten
from tests.harness import Program, State, assert_same_history, different, same_bits, snapshot
from tests.seeding import seed

MIN_STEPS = 7


class Note:
    """What a training sees on its way: values now, and the gradients there are now."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.seen: list[State] = []

    def __call__(self, *values: Any) -> None:
        leaves, _ = flatten(values)
        found = {f"value {i}": leaf for i, leaf in enumerate(leaves)}
        for i, module in enumerate(self._training.modules):
            found |= {f"{i}.{name}.grad": p.grad for name, p in module.named_parameters()}
        found |= {f"tensor {i}.grad": t.grad for i, t in enumerate(self._training.tensors)}
        self.seen.append(State(found))


@dataclass
class Training:
    """A model in training: one step on a batch, and everything that it may change."""

    model: nn.Module
    step: Callable[[Any, Note], Any]
    batches: Sequence[Any]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    others: Sequence[nn.Module] = ()
    """Modules beside the model."""
    tensors: Sequence[torch.Tensor] = ()
    """Leaves beside the modules."""
    before_step: Callable[[int], None] = lambda index: None
    generators: Sequence[torch.Generator] = ()
    named_states: Callable[[], dict[str, torch.Tensor]] = dict
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model, *self.others]

    def run(self, device: torch.device) -> list[tuple[list[Any], State]]:
        """All steps: what each returned and noted, and the state after it."""
        program = Program(
            self.step,
            self.batches,
            self.modules,
            self.optimizers,
            self.tensors,
            generators=self.generators,
            named_states=self.named_states,
        )
        history = []
        for index, batch in enumerate(self.batches):
            self.before_step(index)
            note = Note(self)
            result = self.step(batch, note)
            leaves = [_copy(leaf) for leaf in flatten(result)[0]]
            state = snapshot(program, device, **{f"noted {i}": seen for i, seen in enumerate(note.seen)})
            history.append((leaves, state))
        return history


Build = Callable[[torch.device], Training]


def assert_graphed_equals_eager(
    build: Build,
    device: torch.device,
    scope: Sequence[str] | str = ("layers.*",),
    *,
    replays: bool = True,
    look: Callable[[stepgraph.GraphedModules, Training], None] | None = None,
    **options: Any,
) -> stepgraph.ModuleReport:
    """Build a training twice from one seed, run it eager and graphed, and compare after every step.

    An audit records the modules again, which is half of the time of a short run. So one comes at each third step.
    """
    options = {"audit": 3, **options}
    eager = _built(build, device)
    assert len(eager.batches) >= MIN_STEPS, "too few steps to mean anything"
    expected = eager.run(device)
    if device.type == "cuda":  # equality with eager means nothing where eager differs from itself
        again = _built(build, device)
        assert_same_history(expected, again.run(device), "eager differs from eager")
    training = _built(build, device, for_run=False)
    with stepgraph.graph_modules(training.model, scope, **options) as handle:
        seed(11)
        received = training.run(device)
        report = handle.report()
        assert_same_history(expected, received, "graphed differs from eager")
        if look is not None:
            look(handle, training)
    if replays:
        assert all(row.forwards > 0 for row in report.rows), f"a module was never replayed:\n{report}"
    return report


def _built(build: Build, device: torch.device, *, for_run: bool = True) -> Training:
    seed(7)
    training = build(device)
    if for_run:
        seed(11)
    return training


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings instead of showing them."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def only_row(report: stepgraph.ModuleReport, path: str) -> Any:
    """The row of one module."""
    return next(row for row in report.rows if row.path == path)


# -- models


class Layer(nn.Module):
    """A residual block with a norm, two matrices and dropout."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + (hidden if mask is None else hidden * mask)


class Net(nn.Module):
    """Layers between an eager projection and an eager head."""

    def __init__(self, *layers: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, *args, **kwargs)
        return self.head(hidden)


def training_of(
    make: Callable[[], nn.Module],
    device: torch.device,
    *,
    steps: int = 8,
    microbatches: int = 1,
    zero: str = "none",
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    width: int = 8,
    **fields: Any,
) -> Training:
    """The plain loop. `zero`: gradients are None ("none"), zero ("zero") or as they were ("never") at each step."""
    model = make().to(device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    chosen = torch.optim.AdamW(trainable, lr=1e-2) if optimizer is None else optimizer(trainable)
    run = call or (lambda model, x: model(x))

    def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
        if zero != "never":
            chosen.zero_grad(set_to_none=zero == "none")
        losses = []
        for x in batch.unbind(0):
            loss = run(model, x).pow(2).mean()
            loss.backward()
            note(loss)
            losses.append(loss.detach())
        chosen.step()
        return torch.stack(losses)

    batches = [torch.randn(microbatches, 4, width, device=device) for _ in range(steps)]
    return Training(model, step, batches, [chosen], **fields)


def train(model: nn.Module, device: torch.device, steps: int = 3) -> list[torch.Tensor]:
    """A few backwards; the losses."""
    found = []
    for index in range(steps):
        seed(index)
        loss = model(torch.randn(4, 8, device=device)).pow(2).mean()
        loss.backward()
        found.append(loss.detach())
    return found


__all__ = [
    "Layer",
    "Net",
    "Note",
    "Training",
    "assert_graphed_equals_eager",
    "different",
    "only_row",
    "quiet",
    "same_bits",
    "train",
    "training_of",
]
