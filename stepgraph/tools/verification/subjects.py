"""What `verify` can be given, and which two callables each kind stands for.

| given | graphed | eager |
|---|---|---|
| a captured step | the step, with the graphs that it has | the function that was captured |
| a function that calls something graphed | the function | the same, with everything graphed run plainly |
| any other function | the function, captured for the comparison | the function |
| a model or handle with graphed modules, a graphed callable | a training step around it | the same, plainly |

A training step that `verify` makes itself runs two microbatches, so that gradients are accumulated, and weighs the
results with random numbers, so that the gradients that come in change.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tree import flatten
from stepgraph.core.wording import counted, with_article
from stepgraph.engine.observe.finder import reachable
from stepgraph.engine.parts.callables.graphed import GraphedCallable
from stepgraph.engine.parts.modules.graph_modules import GraphedModules
from stepgraph.engine.parts.modules.manager import ModuleGraphs
from stepgraph.engine.parts.stages.manager import StageManager
from stepgraph.engine.parts.stages.stage import GraphedStages
from stepgraph.engine.step.capture import capture
from stepgraph.engine.step.full_iteration import FullCudaGraphWrapper
from stepgraph.engine.step.step import CapturedStep
from stepgraph.tools.program import Program, program_of
from stepgraph.tools.verification.plainly import running_plainly

__all__ = ["Part", "Subject", "eager_reasons", "subject_of", "subject_of_call"]

Part = ModuleGraphs | GraphedCallable[..., Any] | StageManager
"""What stands in the place of a module or function that is graphed by itself."""
_GRAPHED = (ModuleGraphs, GraphedCallable, StageManager)
_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Subject:
    """Two callables that should do the same, and what they share."""

    name: str
    kind: str
    """captured step, graphed modules, graphed callable or function."""
    eager: Callable[..., Any]
    graphed: Callable[..., Any]
    program: Program
    capture: Callable[[Callable[..., Any]], CapturedStep[..., Any]] | None = None
    """Captures another function as this one was captured, for probes."""
    during: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    """Entered for the comparison: ends what was made for it, and what it has taught the step."""
    holds: tuple[str, ...] = ("outputs",)
    """What stays as it is while the caller holds it: outputs, unless the user asked for others, and gradients."""


def subject_of(step: Any, batch: tuple[Any, ...]) -> Subject:
    """Return the two callables that something stands for; `batch` are the arguments of a call."""
    if isinstance(step, CapturedStep):
        return _captured(step, batch)
    if isinstance(step, (GraphedStages, FullCudaGraphWrapper)):
        raise _part_of_a_schedule(step)
    model = step.model if isinstance(step, GraphedModules) else step
    if isinstance(model, torch.nn.Module):
        if not _is_graphed(model):
            raise _nothing_graphed(type(model).__name__)
        kind = "graphed modules" if step is not model else "graphed module"
        return _trained(model, model, type(model).__name__, kind, batch)
    if isinstance(step, GraphedCallable):
        return _trained(step, step.original, step.name, "graphed callable", batch)
    if not callable(step):
        raise InvalidArgument(
            f"verify was given {step!r}, {with_article(type(step))}, which is not a step",
            rule="option",
            why="a step is called on batches.",
            fix="pass a captured step, a function, a graphed model or callable.",
        )
    if any(_is_graphed(value) for value in reachable(functools.partial(_nothing, step))):
        name = str(getattr(step, "__name__", type(step).__name__))
        return Subject(name, "function", functools.partial(_plainly, step), step, program_of(step, batch))
    return _captured(capture(step), batch, is_ours=True)


def subject_of_call(graphed: CapturedStep[..., Any] | Part, args: Any, kwargs: Any) -> tuple[Subject, tuple[Any, ...]]:
    """Return the two callables that a call of a running program stands for, and the batch to call them on.

    The keywords of the call are a part of the batch.
    """
    batch = (tuple(args), dict(kwargs))
    if isinstance(graphed, CapturedStep):
        found = _captured(graphed, batch)
    elif isinstance(graphed, ModuleGraphs):
        call = graphed.module if graphed.function_name == "forward" else graphed
        found = _trained(call, graphed.module, graphed.name, "graphed module", batch)
    elif isinstance(graphed, GraphedCallable):
        found = _trained(graphed, graphed.original, graphed.name, "graphed callable", batch)
    else:
        raise _part_of_a_schedule(graphed)
    eager, with_graphs = functools.partial(_spread, found.eager), functools.partial(_spread, found.graphed)
    return replace(found, eager=eager, graphed=with_graphs), batch


def eager_reasons(graphed: Iterable[Any]) -> list[str]:
    """Say why calls of captured steps ran eagerly; of graphed parts their own reports say so."""
    steps = [one for one in graphed if isinstance(one, CapturedStep)]
    found = {reason: count for step in steps for reason, count in step.report().eager_reasons.items()}
    return [f"{counted(count, 'calls')} ran eagerly: {reason}" for reason, count in found.items()]


def _spread(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _nothing(*_: Any) -> None:
    """Stands for a function that holds a step."""


def _plainly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with running_plainly():
        return call(*args, **kwargs)


def _is_graphed(value: Any) -> bool:
    if issubclass(type(value), torch.nn.Module):
        return any(issubclass(type(own), _GRAPHED) for module in value.modules() for own in vars(module).values())
    return issubclass(type(value), (CapturedStep, GraphedCallable, GraphedModules, GraphedStages))


def _part_of_a_schedule(step: Any) -> InvalidArgument:
    return InvalidArgument(
        f"verify was given {with_article(type(step))}, which is a part of a training step",
        rule="option",
        why="its schedule, and not the part alone, decides what a step is.",
        fix="pass the function that runs one step: verify(lambda x, y: schedule.step(x, target=y), batches).",
    )


def _nothing_graphed(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"no part of this {name} is graphed",
        rule="option",
        why="eager would be compared with eager.",
        fix="graph it first: stepgraph.graph_modules(model), or pass a training step to be captured.",
    )


def _captured(step: CapturedStep[..., Any], batch: tuple[Any, ...], *, is_ours: bool = False) -> Subject:
    options = step.options
    function = functools.partial(_plainly, step.run_plainly)
    program = program_of(step.function, batch, options.generators)
    return Subject(
        str(getattr(step, "__name__", "step")),
        "function" if is_ours else "captured step",
        function,
        step,
        program,
        capture=step.capture_like,
        during=contextlib.closing(step) if is_ours else step.undisturbed(),
        holds=("outputs",) if options.outputs != "static" else (),
    )


def _trained(call: Callable[..., Any], holder: Any, name: str, kind: str, batch: tuple[Any, ...]) -> Subject:
    """A training step around a graphed model or callable; `holder` is what the state is found from."""
    found = program_of(functools.partial(_nothing, holder), batch)
    named = getattr(holder, "__self__", holder)
    modules = {name if module is named else key: module for key, module in found.modules.items()}
    parameters = [p for p in found.parameters().values() if p.requires_grad]
    parameters += [t for t in found.own_tensors().values() if t.requires_grad and t.is_leaf]
    optimizers = {"SGD": torch.optim.SGD(parameters, lr=_RATE)} if parameters else {}
    program = replace(found, modules=modules, optimizers={**found.optimizers, **optimizers})
    step = _TrainingStep(call, optimizers.get("SGD"))
    return Subject(name, kind, functools.partial(_plainly, step), step, program, holds=("outputs", "gradients"))


class _TrainingStep:
    """Two forwards and backwards, and SGD, of something that is no training step by itself."""

    def __init__(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer | None) -> None:
        self._call, self._optimizer = call, optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = []
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        for _ in range(2):
            leaves = [leaf for leaf in flatten(self._call(*args, **kwargs))[0] if issubclass(type(leaf), torch.Tensor)]
            weighed = [(leaf * torch.randn_like(leaf)).sum().float() for leaf in leaves if leaf.requires_grad]
            outputs += [leaf.detach().clone() for leaf in leaves]
            del leaves
            if weighed:
                torch.stack(weighed).sum().backward()
        if self._optimizer is not None:
            self._optimizer.step()
        return outputs
