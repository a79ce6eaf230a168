"""`stepgraph.graph_stage` replays the stages of a `torch.distributed.pipelining` schedule from graphs.

The schedule is unchanged: it receives, computes, sends and waits. Its computations on this rank (the forward of a
microbatch, its backward, or the two parts of a split one) are captured once and then replayed. The graphs are captured
from the first real steps, not from sample arguments. The input of a stage is known only when the stages before it have
run, and torch finds it in the first step. Gradients have the layout that the loss gives them. And warm-up steps are
part of the training.

Each rank captures independently, and a replayed stage sends the same data as an eager one. So a rank without graphs
runs eagerly while its neighbours replay.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stepgraph.core.errors import CaptureError, StepgraphError
from stepgraph.core.tracebacks import trim
from stepgraph.core.wording import counted
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.call.limits import weigh_changes
from stepgraph.engine.call.messages import refuse_second_thread, warn_misspelt, warn_operations_changed
from stepgraph.engine.call.options import Audit, Hook, PairOnError, PairOptions, reads_options
from stepgraph.engine.call.proof import NeedsEagerCall
from stepgraph.engine.call.report import outline
from stepgraph.engine.call.session import Session
from stepgraph.engine.guards.hooks import global_hook, has_global_hooks, is_hooked
from stepgraph.engine.guards.signature import reason_for_eager, saved_tensor_hooks
from stepgraph.engine.order import order_from_pipelining, read_order
from stepgraph.engine.order.cursor import Cursor, Turn
from stepgraph.engine.order.entries import Entry
from stepgraph.engine.parts.stages.capture import CaptureFailed, StageCapture
from stepgraph.engine.parts.stages.manager import CurrentStep, Mode, StageManager
from stepgraph.engine.parts.stages.report import StageReport, StageRow
from stepgraph.engine.parts.stages.torch_stage import check, chunks_of, has_forward_context, own_methods
from stepgraph.engine.record.pair.eager_proof import AuditTurns
from stepgraph.engine.record.pair.module_method import called_method, put_in_place
from stepgraph.engine.record.pair.shared import PairSession
from stepgraph.engine.record.pair.target import PairTarget


@reads_options(PairOptions)
def graph_stage(
    stage: Any,
    schedule: Any,
    *,
    warmup: int = 3,
    strict: bool = False,
    on_error: PairOnError = "eager",
    generators: Sequence[torch.Generator] = (),
    ignore: Sequence[str] = (),
    safe_hooks: Sequence[Hook] = (),
    audit: Audit = "auto",
    session: Session | None = None,
) -> GraphedStages:
    """Graph a stage of this rank, or several, of a `torch.distributed.pipelining` schedule.

    Example:
        >>> schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        >>> handle = stepgraph.graph_stage(stage, schedule)
        >>> for batch, target in loader:             # as before: warm-up, capture and replay are automatic
        ...     schedule.step(batch, target=target)

    `warmup` steps run eagerly, then `step()` replays. Pass all stages of one rank in one call, as a list, so that they
    share memory by the order of the schedule; other stages stay eager. Results and gradients are bit for bit those of
    the eager pipeline. `eval()` stays eager. Before the steps that `audit` names, the stages of this rank are recorded
    again, without effect, and compared. If their operations have changed, they are captured again, with a warning.
    """
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    check(stages, schedule)
    options = PairOptions(
        warmup=warmup,
        strict=strict,
        on_error=on_error,
        generators=generators,
        ignore=ignore,
        safe_hooks=safe_hooks,
        audit=audit,
    )
    return GraphedStages(stages, schedule, options, session)


class GraphedStages:
    """The graphed stages of one rank, with a report, `reset()` and `close()`."""

    def __init__(self, stages: Sequence[Any], schedule: Any, options: PairOptions, session: Session | None) -> None:
        self._schedule, self._options = schedule, options
        self._shared = PairSession(session, self._drop_graphs)
        self._shared.turns = AuditTurns(options.audit)
        self._shared.grads.other_uses.is_strict = options.strict
        self._shared.session.when_dropped(self._dropped)
        self._order = order_from_pipelining(schedule)
        chunks = chunks_of(schedule)
        of_stage = {index: chunk for chunk, index in chunks.items()}
        graphed = {of_stage[stage.stage_index] for stage in stages}
        entries = [entry for entry in read_order(self._order) if entry.chunk in graphed]
        self.step = CurrentStep(_cursor_of(entries, chunks))
        self.captured: StageCapture | None = None
        self.steps: Counter[str] = Counter()
        """The number of steps, by mode or reason."""
        self.recaptures: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._warm = 0
        self._obstacle: str | None = None
        self._changes: Counter[str] = Counter()
        """Values that changed soon after a capture, so that the capture did not pay."""
        self._in_other_modes = 0
        """Steps in a row for which the graphs were not right, since the modules are in other modes."""
        self._restore = contextlib.ExitStack()
        self.managers: list[StageManager] = []
        for stage in stages:
            method, name = called_method(stage.submod), f"stage {stage.stage_index}"
            target = PairTarget(stage.submod, method, name, options, self._shared, _hooked_parameters)
            manager = StageManager(stage, of_stage[stage.stage_index], target, self.step)
            self.managers.append(manager)
            self._restore.callback(put_in_place(stage.submod, method, manager))
            for name, replacement in own_methods(stage, manager):
                self._restore.callback(put_in_place(stage, name, replacement))
        self._restore.callback(put_in_place(schedule, "step", self._wrapped(schedule.step)))

    # -- steps

    def _wrapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def graphed_step(*args: Any, **kwargs: Any) -> Any:
            if self._shared.is_closed:  # another handle of the same schedule was put around this one
                return step(*args, **kwargs)
            calling = self._shared.session.calling
            is_alone = calling.acquire(False)
            try:
                if not is_alone:
                    refuse_second_thread("the schedule's step")
                with self._step():
                    return step(*args, **kwargs)
            except StepgraphError as error:
                self.refused[error.rule] += 1
                trim(error)
                raise
            finally:
                if is_alone:
                    calling.release()

        return graphed_step

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Run one step of the schedule, in the mode that is due."""
        step = self.step
        try:
            step.mode, reason = self._decide()
            step.cursor.begin()
            yield
            if step.mode is Mode.REPLAY:
                step.cursor.take(_END)
            self._warm += step.mode is Mode.RECORD
            self.steps[reason] += 1
        finally:
            step.mode = Mode.EAGER
            self._shared.waiting.clear()

    def _decide(self) -> tuple[Mode, str]:
        """Return the mode of the step that begins, and the reason."""
        if not self._schedule._has_backward:
            return Mode.EAGER, "evaluation"
        if self._shared.session.has_backend and self._shared.session.backend.is_capturing():
            return Mode.EAGER, "a part of a larger capture"
        ambient = self._shared.ambient.read()
        if (reason := reason_for_eager(ambient) or saved_tensor_hooks(ambient)) is not None:
            return Mode.EAGER, reason
        if has_global_hooks() and (hook := global_hook(self._options.safe_hooks)) is not None:
            return Mode.EAGER, f"a hook on all modules, `{hook}`, would not run   [module-hook]"
        if any(has_forward_context(manager.stage) for manager in self.managers):
            return Mode.EAGER, "a stage has a forward context, which capture would not enter"
        if self._obstacle is not None:
            return Mode.EAGER, self._obstacle
        if self.captured is not None:
            with interrupts_held():  # until what was found has its effect, too
                self._look()
        elif rebuilt := next((why for m in self.managers if (why := m.target.rebuilt()) is not None), None):
            self._drop_graphs()
            return Mode.RECORD, f"changed: {rebuilt}"
        elif self._warm >= self._options.warmup:
            self._capture()
        if self.captured is not None and (reason := self._reason_against_replay()) is not None:
            return Mode.EAGER, reason
        if self.captured is not None:
            return Mode.REPLAY, "replay"
        return (Mode.RECORD, "warm-up") if self._obstacle is None else (Mode.EAGER, self._obstacle)

    def _look(self) -> None:
        """Before a replay, free the graphs of a stage that has changed. In an audited step all are recorded again."""
        turns = self._shared.turns
        audited = self._shared.begins_audit()
        found = {m: changed for m in self.managers if (changed := m.changed(audited=audited)) is not None}
        if audited:
            turns.end()
        if found:
            manager, changed = next(iter(found.items()))
            stays_eager = self._start_over(changed.why)
            if changed.difference is not None:
                warn_operations_changed(
                    *(manager.target.name, changed.difference, changed.changes, turns.since),
                    stays_eager=stays_eager,
                    whose="stage",
                    names="steps",
                )

    def _reason_against_replay(self) -> str | None:
        """Return the reason why a step runs eagerly although there are graphs, or make sure that they can be replayed.

        A mode that stays is captured after as many eager steps as there are in a warm-up.
        """
        elsewhere = next((manager.target for manager in self.managers if not manager.fits_modes()), None)
        if elsewhere is not None:
            why = f"`{elsewhere.name}`: train() or eval() was called"
            elsewhere.raise_if_strict(why)
            self._in_other_modes += 1
            if self._in_other_modes <= self._options.warmup:
                return why
            self._start_over(why)
            return None
        self._in_other_modes = 0
        try:
            is_held = bool([manager for manager in self.managers if not manager.has_its_gradients()])
        except CaptureError as error:
            if self._options.strict:
                raise
            return f"{error.what}   [{error.rule}]"
        if is_held:
            self.recaptures["gradients of an earlier step are still held"] += 1
            self._forget_graphs()
            self._capture()
        return None

    def _start_over(self, why: str) -> bool:
        """Free the graphs after a change. Return True if such changes come too often to capture again."""
        self.recaptures[why] += 1
        replays = max(runner.forwards for m in self.managers for runner in m.runners.values())
        self._changes, often = weigh_changes(self._changes, [why], replays)
        if often:
            self._obstacle = f"it keeps changing: {why}"
        self._drop_graphs()
        return bool(often)

    # -- capturing

    def _capture(self) -> None:
        with interrupts_held():
            self._capture_all()

    def _capture_all(self) -> None:
        begun = time.perf_counter()
        self.captured = None
        for manager in self.managers:
            manager.target.renew_pair()
        captured = StageCapture(self.managers, self._order)
        try:
            with self._shared.session.workspace.capturing():
                captured.run(self._shared.lanes.exclusive())
        except NeedsEagerCall:
            self._forget_graphs()
            return
        except (KeyboardInterrupt, SystemExit):  # a second Ctrl-C does not wait
            self._forget_graphs()
            raise
        except CaptureFailed as failed:
            self._forget_graphs()
            try:
                failed.target.failed(failed.kind, failed.error)
            finally:
                self._obstacle = failed.kind.obstacle
            return
        self._shared.session.backend.synchronize()
        self.captured = captured
        self._shared.turns.restart()
        self._shared.turns.begin()
        if not self._shared.capture_seconds:
            guards = [
                call.kind.guard for m in self.managers for call in m.calls.values() if call.kind.guard is not None
            ]
            warn_misspelt(self._options.ignore, set().union(*(guard.labels for guard in guards)))
        self._shared.capture_seconds += time.perf_counter() - begun

    def _forget_graphs(self) -> None:
        """Free the graphs, and keep the notes on the calls."""
        for manager in self.managers:
            manager.forget_graphs()

    def _drop_graphs(self) -> None:
        """Free the graphs; the stages warm up again."""
        self.captured, self._warm, self._in_other_modes = None, 0, 0
        for manager in self.managers:
            manager.drop()

    def _dropped(self) -> None:
        """Free all runners after the session has freed its graphs."""
        for runner in [runner for manager in self.managers for runner in manager.runners.values()]:
            runner.free()
        self._drop_graphs()

    # -- for the user

    def __repr__(self) -> str:
        graphs = sum(row.graphs for row in self.report().rows)
        what, replays = counted(len(self.managers), "graphed stages"), self.steps["replay"]
        return outline(what, self.steps.total(), replays, graphs, is_closed=self._shared.is_closed)

    def report(self) -> StageReport:
        """Return the counts of captures, replays and eager steps, stage by stage."""
        return _report_on(self, self._shared)

    def reset(self) -> None:
        """Free all graphs; the next steps warm up and are captured again."""
        self._shared.delete_cuda_graphs()
        self._obstacle = None
        self.recaptures.clear()
        self._changes.clear()

    def close(self) -> None:
        """Free the graphs and restore stages, modules and schedule. It may be called twice."""
        self._restore.close()
        self._shared.close()

    def __enter__(self) -> GraphedStages:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_END = "end of the step"
"""The last turn of a step. A step that leaves out a part of the order does not reach it."""


def _hooked_parameters(module: torch.nn.Module) -> set[int]:
    """Return the parameters with hooks. Nothing else adds to a parameter in the backward of a stage."""
    return {id(parameter) for parameter in module.parameters() if is_hooked(parameter)}


def _cursor_of(entries: Sequence[Entry], stages: Mapping[int, int]) -> Cursor:
    """Make the check of a step against the order; `stages` has the index of each chunk's stage."""
    turns = [
        Turn(entry, f"{entry.kind.value} of stage {stages[entry.chunk]}, microbatch {entry.microbatch}", index)
        for index, entry in enumerate(entries)
    ]
    fix = "call graph_stage after all changes to the schedule; after a change, close() the handle and call it again."
    return Cursor([*turns, Turn(_END, _END, None)], fix)


def _report_on(stages: GraphedStages, shared: PairSession) -> StageReport:
    """Make the report on a rank's stages."""
    rows = []
    for manager in stages.managers:
        runners, weights = manager.runners.values(), manager.weights.values()
        rows.append(
            StageRow(
                stage=manager.stage.stage_index,
                graphs=sum(1 + len(runner.backwards) for runner in runners) + len(weights),
                forwards=manager.forwards + sum(runner.forwards for runner in runners),
                backwards=manager.backwards + sum(runner.backward_runs for runner in runners),
                weight_grads=manager.weight_grads,
                eager_calls=manager.eager_reasons.total(),
            )
        )
    captured = stages.captured
    kinds = [c.kind for manager in stages.managers for c in manager.calls.values() if captured is not None]
    return StageReport(
        rows=tuple(rows),
        steps=dict(stages.steps),
        recaptures=dict(stages.recaptures),
        refused=dict(stages.refused),
        order=stages.step.cursor.num_entries,
        num_buffers=0 if captured is None else captured.memory.num_buffers,
        **shared.facts(kinds, 0 if captured is None else captured.memory.num_bytes),
    )
