"""Names the cause of a difference between an eager and a graphed run, by experiments on the two.

A difference has few known causes, and each of them can be tried: eager logs tell whether an operation changed since
the step before; a parameter that is changed must change the graphed result; a gradient that was taken away must not be
written any more; without its hooks an eager step gives what a graph gives that skips them. So a cause is named because
an experiment has shown it, not because it is likely. Every experiment begins at the saved state and runs the same
batches, learning rates and seeds as the comparison. Several ranks make the same experiments in the same order
(`agreement`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stepgraph.core.errors import Location
from stepgraph.core.tree import flatten
from stepgraph.engine.backends import Backend
from stepgraph.engine.call.proof import StepLogs, num_states
from stepgraph.engine.observe.step_objects import StepObjects
from stepgraph.engine.oplog import Difference as OperationDifference
from stepgraph.engine.oplog import Log, first_difference
from stepgraph.tools.program import Key, Program, Saved
from stepgraph.tools.verification.agreement import Agreement
from stepgraph.tools.verification.bits import same_bits
from stepgraph.tools.verification.trace import Difference, Keeper, Trace, call_values, fresh, vary

__all__ = [
    "Cause",
    "Earlier",
    "HeldOutputs",
    "Pair",
    "aliased_gradient",
    "aliased_gradients",
    "cause_by_kinds",
    "cause_by_operation",
    "changed_between",
    "find_cause",
    "first_module",
    "logged",
    "overwritten_outputs",
    "reused_output",
    "unknown_cause",
]

_MAX_TRIED = 64
"""Parameters that are changed one by one."""
_MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Earlier:
    """The operations of an eager step that was made before."""

    logs: StepLogs
    log: Log | None
    program: Program
    step: int
    """The number that the user knows it by."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two callables that should do the same, the state they share, and the batches to call them on."""

    eager: Callable[..., Any]
    graphed: Callable[..., Any]
    program: Program
    batches: Sequence[tuple[Any, ...]]
    backend: Backend
    warnings: tuple[str, ...] = ()
    """What the graphed run warned of."""
    agreement: Agreement = field(default_factory=Agreement)
    earlier: Earlier | None = None
    """The step before the first batch, where a running program has made it."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why two runs differ: an id of the catalogue, and what was seen."""

    rule: str
    what: str
    where: Location | None = None
    """The user's line."""


class _Experiments:
    """Runs parts of the comparison again, from the saved state."""

    def __init__(self, pair: Pair, start: Saved, found: Sequence[Difference], graphed: Trace, step: int) -> None:
        self._pair, self._start, self._graphed = pair, start, graphed
        self.step = step
        self.first = [difference for difference in found if difference.step == self.step]
        self.kinds = {difference.kind for difference in self.first}

    def _go_to(self, step: int) -> None:
        """Run the steps before this one eagerly, from the beginning."""
        self._start.restore()
        for index in range(step):
            vary(self._pair.program, index)
            self._pair.eager(*fresh(self._pair.batches[index]))

    # -- the operations

    def changed_operation(self) -> OperationDifference | None:
        """The first operation of the eager step that was another one at the step before."""
        earlier, programs = self._pair.earlier, [self._pair.program]
        if earlier is None:
            if self.step == 0:
                return None
            self._go_to(self.step - 1)
            logs = StepLogs()
            before = self._logged(logs, self.step - 1)
        else:
            self._go_to(self.step)
            logs, before = earlier.logs, earlier.log
            programs.append(earlier.program)
        return changed_between(before, self._logged(logs, self.step), programs, self.kinds)

    def _logged(self, logs: StepLogs, index: int) -> Log | None:
        vary(self._pair.program, index)
        given = fresh(self._pair.batches[index])
        return logged(logs, self._pair.program, self._pair.backend, self._pair.eager, given, {})[1]

    # -- parameters

    def stale_parameters(self) -> list[str]:
        """Parameters that the eager step reads, or writes, and the graphed one does not.

        A graph that writes into memory that is no longer the parameter's changes its own results from call to call, so
        that reads show nothing: then it is told by what it does not write.
        """
        agreement, plain = self._pair.agreement, {side: self._results(side, None) for side in ("eager", "graphed")}
        if not agreement.all(same_bits(plain["graphed"], self._results("graphed", None))):
            return self._unwritten_parameters()
        parameters = list(self._pair.program.parameters().items())
        found = []
        for name, parameter in parameters[: agreement.least(min(len(parameters), _MAX_TRIED))]:
            changed = parameter if parameter.is_floating_point() else None
            is_read = not same_bits(plain["eager"], self._results("eager", changed))
            if agreement.any(is_read) and same_bits(plain["graphed"], self._results("graphed", changed)) and is_read:
                found.append(name)
        return found

    def _unwritten_parameters(self) -> list[str]:
        self._start.restore()
        before = Keeper().keep(self._pair.program.values())
        after = {}
        for side in ("eager", "graphed"):
            self._start.restore()
            after[side] = _called(self._pair, side, 0)
        return [
            name
            for kind, name in before
            if kind == "parameters"
            and not same_bits(after["eager"][kind, name], before[kind, name])
            and same_bits(after["graphed"][kind, name], before[kind, name])
        ]

    def _results(self, side: str, changed: torch.Tensor | None) -> dict[Key, Any]:
        """Outputs and gradients of one step, with a parameter that was changed in place."""
        self._start.restore()
        if changed is not None:
            with torch.no_grad():
                changed.mul_(1.5).add_(0.25)
        values = _called(self._pair, side, 0)
        return {key: value for key, value in values.items() if key[0] in ("outputs", "gradients")}

    # -- hooks

    def skipped_hooks(self) -> list[str]:
        """Hooks without which the eager step gives what the graphed one gave."""
        hooks, agreement = _hooks_of(self._pair.program), self._pair.agreement
        if not agreement.all(len(hooks) == agreement.least(len(hooks)) > 0):
            return []
        if not agreement.all(self._agrees_without([place for _, place in hooks])):
            return []
        many = hooks if len(hooks) > 1 else ()
        alone = [name for name, place in many if agreement.all(self._agrees_without([place]))]
        return alone or [name for name, _ in hooks]

    def _agrees_without(self, hooks: Sequence[tuple[Any, Any]]) -> bool:
        self._go_to(self.step)
        with _taken_out(hooks):
            values = _called(self._pair, "eager", self.step)
        graphed = self._graphed.moments[self.step].values
        return all(same_bits(values.get(key), graphed.get(key)) for key in graphed if key[0] != "random state")


def _called(pair: Pair, side: str, index: int) -> dict[Key, Any]:
    """Make one step of the comparison; return copies of all values after it."""
    vary(pair.program, index)
    given = fresh(pair.batches[index])
    result = getattr(pair, side)(*given)
    return Keeper().keep({**call_values(given, result), **pair.program.values()})


def aliased_gradients(pair: Pair, start: Saved) -> list[str]:
    """Parameters whose gradient the next graphed call overwrites, although it was taken away from them."""
    parameters = pair.program.parameters()
    start.restore()
    _called(pair, "graphed", 0)
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    kept = {name: grad.clone() for name, grad in grads.items()}
    for parameter in parameters.values():
        parameter.grad = None
    _called(pair, "graphed", min(1, len(pair.batches) - 1))
    return [name for name, grad in grads.items() if not same_bits(grad, kept[name])]


def logged(
    logs: StepLogs, program: Program, backend: Backend, call: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Log | None]:
    """Make an eager call; return its result and its log, or None if an optimizer creates its state in it."""
    touched = StepObjects()
    for name, module in program.modules.items():
        touched.add_module(module, name)
    for optimizer in program.optimizers.values():
        touched.add_optimizer(optimizer)
    num_before = num_states(program.optimizers.values())
    with logs.noting(flatten((args, kwargs))[0], touched, backend.device) as log:
        result = call(*args, **kwargs)
    return result, log.finish() if num_states(program.optimizers.values()) == num_before else None


def changed_between(
    before: Log | None, now: Log | None, programs: Sequence[Program], kinds: Set[str]
) -> OperationDifference | None:
    """The first operation that differs between two steps.

    Optimizers count only where nothing before them differs (`kinds`): their numbers change at every step.
    """
    if before is None or now is None:
        return None
    if kinds & {"outputs", "gradients", "arguments", "buffers", "tensors"}:
        optimizers = [id(optimizer) for program in programs for optimizer in program.optimizers.values()]
        before, now = before.without(optimizers), now.without(optimizers)
    return first_difference(before.operations(), now.operations())


def _hooks_of(program: Program) -> list[tuple[str, tuple[Any, Any]]]:
    """The hooks on modules and parameters: their names, and the dict and key of each."""
    found = []
    for root, model in program.modules.items():
        for path, module in model.named_modules():
            for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
                for key, hook in vars(module).get(kind, {}).items():
                    found.append((f"{_named(hook)} on {root}{'.' if path else ''}{path}", (vars(module)[kind], key)))
    for name, parameter in program.parameters().items():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for key, hook in (getattr(parameter, kind, None) or {}).items():
                found.append((f"{_named(hook)} on {name}", (getattr(parameter, kind), key)))
    return found


def _named(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


@contextlib.contextmanager
def _taken_out(hooks: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Remove hooks for a while. The order of the others stays."""
    held = {id(place): (place, dict(place)) for place, _ in hooks}
    for place, key in hooks:
        del place[key]
    try:
        yield
    finally:
        for place, before in held.values():
            place.clear()
            place.update(before)


def cause_by_kinds(first: Sequence[Difference], warned: Sequence[str]) -> Cause | None:
    """Name a cause that the kinds of the first differing values show, without an experiment."""
    kinds = {difference.kind for difference in first}
    other_path = next((text for text in warned if "[other-path]" in text), None)
    if other_path is not None:
        return Cause("other-path", other_path.partition("\n")[0].partition("   [")[0])
    if "random state" in kinds:
        states = [difference.name for difference in first if difference.kind == "random state"]
        what = "after the graphed step the random state is not where the eager step leaves it"
        return Cause("rng-not-registered", f"{what}: {_listed(states)}")
    if kinds == {"buffers"}:
        return Cause("buffers-at-warm-up", f"only buffers differ: {_listed([one.name for one in first])}")
    return None


def cause_by_operation(changed: OperationDifference, step: int) -> Cause:
    """Name the cause that an operation shows which was another one at the step before."""
    what = f"{changed.operation} ran with {changed.before} at step {step - 1} and with {changed.now} at step {step}"
    return Cause("frozen-number", f"{what}; the graph has the old one", changed.where)


def find_cause(pair: Pair, start: Saved, found: Sequence[Difference], graphed: Trace, step: int) -> Cause:
    """Name the cause of the first differences, at this step; `wrong-numbers` if no experiment shows one.

    An operation that changed may come from a new hook or another parameter, so that those are tried before it. That a
    gradient is written again is tried last: a graph may do so by design, and be wrong elsewhere.
    """
    tried = _Experiments(pair, start, found, graphed, step)
    has_gradients = pair.agreement.any("gradients" in tried.kinds)
    changed = tried.changed_operation()
    number = step if pair.earlier is None else pair.earlier.step + 1

    def shown(rule: str, what: str, names: Sequence[str]) -> Cause | None:
        return Cause(rule, f"{what}: {_listed(names)}", None if changed is None else changed.where) if names else None

    experiments: tuple[Callable[[], Cause | None], ...] = (
        lambda: cause_by_kinds(tried.first, pair.warnings),
        lambda: shown("skipped-hook", "without these hooks eager gives the graphed numbers", tried.skipped_hooks()),
        lambda: shown("stale-parameter", "eager uses these parameters, the graph does not", tried.stale_parameters()),
        lambda: None if changed is None else cause_by_operation(changed, number),
        lambda: aliased_gradient(aliased_gradients(pair, start) if has_gradients else ()),
    )
    for experiment in experiments:
        seen, rank = pair.agreement.first(experiment())
        if isinstance(seen, Cause):
            return seen if rank is None else replace(seen, what=f"on rank {rank}: {seen.what}")
    return unknown_cause(tried.first)


def aliased_gradient(names: Sequence[str]) -> Cause | None:
    """Name gradients that were overwritten, if there are any."""
    what = f"a replay writes into a gradient that it has handed out: {_listed(names)}"
    return Cause("aliased-gradient", what) if names else None


def unknown_cause(first: Sequence[Difference]) -> Cause:
    """Say that nothing was found."""
    return Cause("wrong-numbers", f"no known cause was found for {_listed([one.name for one in first])}")


class HeldOutputs:
    """The outputs of a call, held as a caller may hold them, and copies to see whether they stay as they are."""

    def __init__(self, result: Any) -> None:
        outputs = call_values((), result)
        self._outputs = {key: v.detach() if issubclass(type(v), torch.Tensor) else v for key, v in outputs.items()}
        self._kept = Keeper().keep(self._outputs)

    def overwritten(self) -> list[str]:
        """The names of outputs that have changed since."""
        now = Keeper().keep(self._outputs)
        return [name for (kind, name), value in now.items() if not same_bits(value, self._kept[(kind, name)])]


def overwritten_outputs(pair: Pair, start: Saved) -> list[str]:
    """Outputs of a graphed call that the next calls overwrite while the caller holds them."""
    if len(pair.batches) < 2:
        return []
    found: dict[str, list[str]] = {}
    for side in ("eager", "graphed"):
        start.restore()
        call = getattr(pair, side)
        held = HeldOutputs(call(*fresh(pair.batches[0])))
        for batch in pair.batches[1:3]:
            call(*fresh(batch))
        found[side] = held.overwritten()
    return [name for name in found["graphed"] if name not in found["eager"]]


def reused_output(names: Sequence[str]) -> Cause | None:
    """Name outputs that were overwritten, if there are any."""
    return Cause("reused-output", f"the next calls overwrite {_listed(names)}") if names else None


def first_module(found: Sequence[Difference], program: Program) -> str | None:
    """The module that owns the first differing parameter, gradient or buffer, in the order of the model."""
    step = found[0].step
    owners = {
        difference.name.rpartition(".")[0]: difference
        for difference in reversed(found)
        if difference.step == step and difference.kind in ("buffers", "gradients", "parameters")
    }
    paths = (
        f"{root}{'.' if path else ''}{path}" for root, m in program.modules.items() for path, _ in m.named_modules()
    )
    path = next((path for path in paths if path in owners), None)
    return None if path is None else f"{path}: {owners[path].kind}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(f"`{name}`" for name in names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
