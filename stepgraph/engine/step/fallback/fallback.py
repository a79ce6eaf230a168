"""`ModuleFallback` runs a step whose capture failed: eagerly, with graphs for the modules that can be captured.

It joins the engines. The step's engine makes an eager call of the step; the graphs of modules stand in the place of
their forwards during that call, and only then. Between calls the model is untouched: it can be copied, saved and called
as if there were no graphs, and graphs of other signatures of the step find it as they left it.

The calls after the failure go through four stages:

| stage | the call |
|---|---|
| `FIRST` | is observed for the signatures of the modules' calls |
| `SECOND` | a call with the same arguments is observed in full; then the search finds the modules to graph, once |
| `GRAPHED` | runs with the graphs in place: one round of warm-up, the captures, then replays |
| `EAGER` | runs eagerly, since no module can be captured |
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch

from stepgraph.core.frames import warn_user
from stepgraph.core.wording import counted, quantities
from stepgraph.engine.call.report import with_counts
from stepgraph.engine.call.session import Session
from stepgraph.engine.observe.step_objects import StepObjects
from stepgraph.engine.parts.modules.manager import ModuleGraphs
from stepgraph.engine.parts.modules.options import ModuleOptions
from stepgraph.engine.parts.modules.report import ModuleReport, ModuleRow, report_on
from stepgraph.engine.parts.modules.session import ModuleSession
from stepgraph.engine.record.pair.module_method import called_method, put_in_place
from stepgraph.engine.step.fallback import ranks
from stepgraph.engine.step.fallback.observed import ObservedStep
from stepgraph.engine.step.fallback.ranks import Group
from stepgraph.engine.step.fallback.search import Partition, Refusal, matches, patterns, search
from stepgraph.engine.step.fallback.trial import Trials
from stepgraph.engine.step.options import StepOptions
from stepgraph.engine.step.site import Site

BUDGET = 60.0
"""Seconds for the trials of one search."""
_MAX_TOLD = 4


class Stage(enum.Enum):
    """The next call of a step whose capture failed."""

    FIRST = "is observed for signatures"
    SECOND = "is observed in full"
    GRAPHED = "runs with the graphs of modules"
    EAGER = "runs eagerly"


@dataclass(frozen=True, slots=True)
class _Observation:
    """The kind of calls that are observed, and the modules."""

    kind: Hashable
    step: ObservedStep


class ModuleFallback:
    """The graphs of modules that a step goes on with: a `stepgraph.engine.step.step.Fallback`."""

    def __init__(self, name: str, session: Session, options: StepOptions) -> None:
        self._name, self._session = name, session
        self._options = ModuleOptions(
            warmup=1,  # the step has warmed up, and was called for the search
            max_graphs=options.max_graphs,
            on_error="eager",
            generators=options.generators,
            ignore=options.ignore,
            safe_hooks=options.safe_hooks,
            audit=options.audit,
        )
        self._stage = Stage.FIRST
        self._observation: _Observation | None = None
        self._partition = Partition()
        self._paths: frozenset[str] = frozenset()
        self._shared: ModuleSession | None = None
        self._graphs: list[ModuleGraphs] = []

    def begin(self) -> str:
        """Begin, after a failed capture. Return how the step goes on."""
        if self._stage is Stage.EAGER:
            return "in eager, since none of its modules can be captured"
        return "with graphs for those of its modules that can be captured"

    def run(self, site: Site, call: Callable[[], Any]) -> Any:
        """Make an eager call of the step."""
        if self._stage is Stage.GRAPHED:
            with self._in_place():
                return call()
        if self._stage is Stage.FIRST:
            return self._observe_first(site, call)
        observation = self._observation
        if self._stage is Stage.SECOND and observation is not None and observation.kind == _kind(site):
            return self._observe_second(observation.step, call)
        return call()

    def _observe_first(self, site: Site, call: Callable[[], Any]) -> Any:
        roots = roots_of(site.touched)
        if not roots:
            self._stage = Stage.EAGER
            return call()
        step = ObservedStep(roots, self._session, self._options)
        with step.observing(second=False):
            result = call()
        self._observation, self._stage = _Observation(_kind(site), step), Stage.SECOND
        return result

    def _observe_second(self, step: ObservedStep, call: Callable[[], Any]) -> Any:
        with step.observing(second=True):
            result = call()
        begun = time.perf_counter()
        trials = Trials(step, self._options.max_runners)
        group = Group.of((module.target.module for module in step.modules.values()), step.logs())
        # ranks that run out of time at different modules would choose different ones
        self._partition = search(step.tree(), trials.can_capture, BUDGET if group is None else None)
        if group is not None:
            self._decide_together(group, step, trials, time.perf_counter() - begun)
        self._paths = frozenset(step.modules)
        self._graph(step, time.perf_counter() - begun)
        self._observation = None
        step.close()
        self._tell()
        return result

    def _decide_together(self, group: Group, step: ObservedStep, trials: Trials, seconds: float) -> None:
        """Choose the modules that no rank refuses."""
        refused = {path: refusal for path, refusal in trials.found.items() if refusal is not None}
        refused |= {path: Refusal("it is not called", spreads=False) for path in step.uncalled()}
        seconds += ranks.PATIENCE
        together = group.exchange(self._name, refused, seconds)
        if together is None:
            why = MappingProxyType({"all modules": ranks.ended(group, seconds)})
            self._partition = Partition(refused=why, trials=self._partition.trials)
        else:
            found = search(step.tree(), together.get, None)
            self._partition = dataclasses.replace(found, trials=self._partition.trials)

    def _graph(self, step: ObservedStep, seconds: float) -> None:
        """Make the graphs of the chosen modules; they warm up from the next call on."""
        self._shared = ModuleSession(self._session, step.model)
        self._shared.capture_seconds = seconds  # not zero: names in `ignore` are the step's, and were looked up
        for path in self._partition.chosen:
            module = step.modules[path].target.module
            method = called_method(module)
            self._graphs.append(ModuleGraphs(self._options, module, method, session=self._shared, name=path))
        self._stage = Stage.GRAPHED if self._graphs else Stage.EAGER

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for graphs in self._graphs:
                stack.callback(put_in_place(graphs.module, graphs.function_name, graphs))
            yield

    def _tell(self) -> None:
        """Warn, once, of what the search found."""
        found, causes = self._partition, self._partition.causes()
        eager = _listed(patterns(tuple(causes), self._paths))
        if found.chosen:
            graphed = f"{counted(len(found.chosen), 'modules get', 'module gets')} graphs: {_listed(found.scope())}"
            rest = f"\n  eager: {eager}" if causes else ""
            warn_user(f"{self._name}: {graphed}   [eager-module]{rest}\nprint(step.report()) says why.")
        else:
            why = next(iter(causes.values()), "it calls none")
            warn_user(f"{self._name}: none of its modules can be captured   [eager-module]\n  {why}\nIt runs eagerly.")

    def report(self) -> FallbackReport:
        """Report the graphs of modules, and what stayed eager."""
        base = ModuleReport(rows=()) if self._shared is None else report_on(self._shared)
        values = {each.name: getattr(base, each.name) for each in fields(base)}
        causes = self._partition.causes()
        told = {pattern: _reason_of(pattern, causes) for pattern in patterns(tuple(causes), self._paths)}
        return FallbackReport(
            **values,
            left_out=told,
            trials=self._partition.trials,
            stage=self._stage.value,
        )

    def close(self) -> None:
        """Free the graphs of modules."""
        if self._observation is not None:
            self._observation.step.close()
        if self._shared is not None:
            self._shared.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackReport(ModuleReport):
    """The graphs of a step's modules, and the modules that stay eager. A part of `stepgraph.Report`."""

    left_out: dict[str, str] = field(default_factory=dict)
    """The modules that stay eager, as paths or patterns, with the reason."""
    trials: int = 0
    stage: str = Stage.FIRST.value

    counted = "calls of modules"

    @property
    def verdict(self) -> str:
        """The share of replayed calls of modules, or why there is none yet."""
        if not self.rows:
            return f"no module has a graph yet; the next call {self.stage}"
        calls = self.replays + self.eager_calls
        return f"{quantities(modules=len(self.rows))} graphed, {self.replays} of {counted(calls, 'calls')} replayed"

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """Return one row for the modules of each pattern, and the reasons of those that stay eager."""
        paths = {row.path: row for row in self.rows}
        known = {*paths, *self.left_out}
        rows = [
            (name, _sum_of([paths[p] for p in paths if matches(p, name)])) for name in patterns(tuple(paths), known)
        ]
        eager = [(f"eager: {name}", why) for name, why in self.left_out.items()]
        return "graphed modules", [*rows, *eager, ("modules equal", self.equality or "")]


def _kind(site: Site) -> Hashable:
    """The arguments and flags of a site's calls."""
    signature = site.sign()
    return signature.structure, signature.leaves, signature.ambient


def roots_of(touched: StepObjects) -> dict[str, torch.nn.Module]:
    """The outermost modules in reach of a step, by name."""
    modules = touched.all_modules
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    return {touched.name(module): module for module in modules if id(module) not in inside}


def _sum_of(rows: Sequence[ModuleRow]) -> str:
    """The counts of some modules in two lines."""
    counts = quantities(
        modules=len(rows),
        runners=sum(row.runners for row in rows),
        forwards=sum(row.forwards for row in rows),
        backwards=sum(row.backwards for row in rows),
    )
    reasons = sum((Counter(row.eager_reasons) for row in rows), Counter[str]())
    return counts + (f"\neager: {with_counts(reasons)}" if reasons else "")


def _reason_of(pattern: str, causes: Mapping[str, str]) -> str:
    """The reason of the first module that a pattern stands for."""
    return next(why for path, why in causes.items() if matches(path, pattern))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_TOLD]) + (f" and {len(names) - _MAX_TOLD} more" if len(names) > _MAX_TOLD else "")
