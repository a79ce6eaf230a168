"""A `GraphedCallable` replays the graphs of one sample; all of one `make_graphed_callables` are a `GraphedSet`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from stepgraph.core.ambient import autocast_now
from stepgraph.core.errors import CaptureError, ClosedError, InvalidArgument, StateChanged, StepgraphError
from stepgraph.core.frames import untraced
from stepgraph.core.tracebacks import trim
from stepgraph.core.tree import CallFlattener
from stepgraph.core.wording import counted, quantities
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.call.messages import refuse_second_thread
from stepgraph.engine.call.report import GraphReport, outline, with_counts
from stepgraph.engine.guards.hooks import global_hook, has_global_hooks
from stepgraph.engine.guards.signature import reason_for_eager, saved_tensor_hooks
from stepgraph.engine.memory.borrowed import BorrowedTensor, any_held
from stepgraph.engine.memory.inputs import ArgMetadata
from stepgraph.engine.observe.ddp import decides_buckets, in_ddp
from stepgraph.engine.oplog import is_logged
from stepgraph.engine.order import Kind
from stepgraph.engine.order.cursor import Cursor
from stepgraph.engine.parts.callables.handover import held_result, take_back, warn_held_result
from stepgraph.engine.parts.callables.sample_graphs import SampleGraphs
from stepgraph.engine.parts.callables.warm_up import CaptureTimeHooks
from stepgraph.engine.record.pair.in_flight import held_gradient, run_forward
from stepgraph.engine.record.pair.module_method import put_in_place
from stepgraph.engine.record.pair.runner import Grads, Runner, RunnerState
from stepgraph.engine.record.pair.shared import PairSession

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallablesReport(GraphReport):
    """The graphs of one `make_graphed_callables`."""

    num_samples: int = 0
    """Layers times microbatches; without an order, the number of callables."""
    num_graphs: int = 0
    """Forwards, backwards and split weight gradients."""
    num_buffers: int = 0
    """Sets of static arguments: `plan_buffers` decides which samples share one."""
    forwards: int = 0
    backwards: int = 0
    weight_grads: int = 0
    """Replays so far."""
    eager_calls: int = 0
    """Forwards, with their backwards, that ran eagerly: the program held a tensor that a replay would overwrite."""
    refused: dict[str, int] = field(default_factory=dict)
    """Calls that raised an error of stepgraph, by rule."""
    eager_reason: str | None = None
    """Why there are no graphs, if a configuration asks for none."""

    @property
    def graphs(self) -> int:
        """The same as `num_graphs`, under the name of other reports."""
        return self.num_graphs

    def tally(self) -> tuple[int, dict[str, int]]:
        if self.eager_reason is not None:
            return 0, {self.eager_reason: 0}
        return self.forwards, {"an earlier result was still held": self.eager_calls} if self.eager_calls else {}

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        kinds = {"samples": self.num_samples, "graphs": self.num_graphs, "argument_sets": self.num_buffers}
        replays = {"forwards": self.forwards, "backwards": self.backwards, "weight_gradients": self.weight_grads}
        return "graphed callables", [
            ("graphs", quantities(**kinds)),
            ("replays", quantities(**replays)),
            ("refused", with_counts(self.refused)),
        ]


class SampleTurn:
    """How the backward of a sample takes its turn: a `ReplayOrder`. It knows no sample, so that none is kept alive.

    `lent` are gradients that nobody may hold then. Without a cursor backwards come in any order.
    """

    def __init__(
        self, sample: SampleGraphs, cursor: Cursor | None, lent: list[BorrowedTensor], device: torch.device
    ) -> None:
        self._name, self._cursor, self._lent, self._device = sample.target.name, cursor, lent, device
        self._key = (Kind.INPUT_GRAD if sample.has_split_weights else Kind.BACKWARD, sample.number)
        self._handovers = sample.handovers
        incoming = next(iter(sample.runner.backwards.values())).grads_in.tensors
        self._metas = [
            ArgMetadata(incoming[index]) if index in incoming else None
            for index in range(len(sample.runner.result.differentiable))
        ]

    def fit_grads(self, grads: Grads) -> Grads:
        """Bring gradients to the geometry that a backward was recorded for: other strides are copied, None is zeros."""
        if self._cursor is None:
            return grads  # a backward for other gradients is recorded
        found: list[torch.Tensor | None] = []
        for meta, grad in zip(self._metas, grads, strict=True):
            if meta is None:
                found.append(None)
            elif grad is None:
                found.append(meta.empty(self._device).zero_())
            elif grad.stride() != meta.stride and grad.shape == meta.shape and grad.dtype == meta.dtype:
                found.append(meta.empty(self._device).copy_(grad))
            else:
                found.append(grad)
        return found

    def take_turn(self, grads: Grads) -> None:
        """Raise if it is another one's turn, or if the replay would overwrite what somebody holds."""
        if self._lent and any_held(self._lent):
            raise held_gradient(self._name)
        if self._cursor is not None:
            self._cursor.take(self._key)
            self._handovers.before_backward(self._name, grads)


class GraphedSet:
    """All graphs of one `make_graphed_callables`, and what they share."""

    def __init__(
        self,
        shared: PairSession,
        samples: Sequence[SampleGraphs],
        cursor: Cursor | None,
        static_bytes: int,
        num_buffers: int,
        hooks: CaptureTimeHooks,
        *,
        owns_session: bool,
    ) -> None:
        self.shared, self.samples, self.cursor = shared, tuple(samples), cursor
        self._static_bytes, self._num_buffers = static_bytes, num_buffers
        self._hooks, self._owns_session = hooks, owns_session
        self.callables: list[GraphedCallable[..., Any]] = []
        self._lent: list[BorrowedTensor] = []
        self._eager_calls = 0
        self.refused: Counter[str] = Counter()
        self.is_closed = False
        self._num_graphs = sum(sample.num_graphs for sample in samples)
        shared.session.when_dropped(self.close)
        if cursor is not None:
            self._take_turns()

    def _take_turns(self) -> None:
        device = self.shared.session.backend.device
        for sample in self.samples:
            if sample.runner.backwards:
                sample.runner.order = SampleTurn(sample, self.cursor, self._lent, device)

    def lend_gradients(self) -> None:
        """Lend gradients that pass through autograd without a copy, and check before each replay that none is held."""
        for sample in self.samples:
            self._lent += sample.lend_outside_grads()
        self._take_turns()

    def check_lent(self, name: str) -> None:
        """Raise if the program holds a lent gradient, which the next replay may overwrite."""
        if self._lent and any_held(self._lent):
            raise held_gradient(name)

    def count_eager(self, name: str) -> None:
        """Count a call that runs eagerly; warn at the first."""
        if not self._eager_calls:
            warn_held_result(name)
        self._eager_calls += 1

    # -- checking

    def begin_round(self) -> None:
        """Begin a round. Raise `StateChanged` if it is audited and the operations of a callable have changed."""
        if self.shared.begins_audit():
            with interrupts_held():  # all are compared, or none
                for sample in {id(s.kind): s for s in reversed(self.samples) if not s.runner.is_freed}.values():
                    self.check(sample, audited=True)
                self.shared.turns.end()

    def check(self, sample: SampleGraphs, *, audited: bool = False) -> None:
        """Raise `StateChanged` if something that the graphs of a sample have baked in has changed.

        For values that the code reads, and if `audited`, record the sample again and compare the operations.
        """
        guard, name = sample.kind.guard, sample.target.name
        if guard is None or (not audited and guard.holds()):
            return
        with interrupts_held():
            found = sample.target.look(guard, lambda: sample.differs(self._hooks), audited=audited)
        if found is None:
            return
        if found.difference is not None and not found.changes:
            raise StateChanged(
                f"{name}: the operations of the callable have changed since capture",
                rule="changed-operations",
                details=[
                    str(found.difference),
                    f"{counted(self.shared.turns.since, 'rounds have', 'round has')} run since the last comparison",
                ],
                why="the graphs replay the old operations. A value that the callable's code reads has changed, and "
                "the watch cannot see it (docs/equality.md).",
                fix="undo the change, pass the value as a tensor argument, or call .reset() and capture again.",
            )
        raise StateChanged(
            f"{name}: {found.why}",
            rule="state-changed",
            details=[f"at {found.difference}"] if found.difference is not None else (),
            why="the graphs keep the state of their capture.",
            fix="undo the change, or call .reset() and capture again after it.",
        )

    # -- reporting and ending

    @property
    def replays(self) -> int:
        """Replayed forwards so far; cheaper than a report."""
        return sum(sample.runner.forwards for sample in self.samples)

    @property
    def audits(self) -> int:
        """Audits so far; cheaper than a report."""
        return self.shared.turns.audits

    def report(self) -> CallablesReport:
        """Return what was captured and replayed."""
        kinds = {id(sample.kind): sample.kind for sample in self.samples}
        facts = self.shared.facts(kinds.values(), self._static_bytes)
        if self.is_closed:
            facts |= {"static_bytes": 0, "pool_bytes": 0}
        return CallablesReport(
            num_samples=len(self.samples),
            num_graphs=0 if self.is_closed else self._num_graphs,
            num_buffers=0 if self.is_closed else self._num_buffers,
            forwards=self.replays,
            backwards=sum(sample.runner.backward_runs for sample in self.samples),
            weight_grads=sum(sample.weight_runs for sample in self.samples),
            eager_calls=self._eager_calls,
            refused=dict(self.refused),
            **facts,
        )

    def close(self) -> None:
        """Free all graphs and buffers, and restore the forwards of modules."""
        if self.is_closed:
            return
        self.is_closed = True
        for graphed in self.callables:
            graphed.put_back()
        for sample in self.samples:
            sample.free()
        for target in {id(s.target): s.target for s in self.samples}.values():
            target.drop_pair()
        if self._owns_session:
            self.shared.close()
            self.shared.session.close()

    def close_one(self, sample: SampleGraphs) -> None:
        """Without an order: free the graphs of one callable; with the last one, everything."""
        sample.free()
        if all(graphed.is_closed for graphed in self.callables):
            self.close()


class GraphedCallable(Generic[P, R]):
    """Replays the graphs of one sample. Made by `make_graphed_callables`."""

    def __init__(self, owner: GraphedSet, sample: SampleGraphs) -> None:
        self._owner, self._sample = owner, sample
        self._target, self._shape, self._runner = sample.target, sample.shape, sample.runner
        self._flatten = CallFlattener()
        self._is_capturing = owner.shared.session.backend.capture_probe
        self._adds_itself = bool(sample.target.pair().inside())
        """True if its graphs add to gradients of parameters, which no DDP then sees."""
        self._calling = owner.shared.session.calling
        self._replayed_under: tuple[Hashable, ...] | None = None
        """The flags of the last call that did not stay eager because of them."""
        self._restore = contextlib.ExitStack()
        self.is_closed = False
        owner.callables.append(self)

    @property
    def name(self) -> str:
        """The callable's name in messages."""
        return self._target.name

    @property
    def original(self) -> Callable[..., Any]:
        """The function that the graphs replace."""
        return self._target.original

    def __repr__(self) -> str:
        forwards, what = self._runner.forwards, f"graphed {self.name}, sample {self._sample.number}"
        return outline(
            what, forwards, forwards, 0 if self.is_closed else self._sample.num_graphs, is_closed=self.is_closed
        )

    def __reduce__(self) -> Any:
        """Let a copy of the module, by copy.deepcopy or pickle, be a plain module."""
        return getattr, (self._target.module, self._target.method)

    # -- replacing a forward

    def put_in_place(self, given: torch.nn.Module) -> None:
        """Replace the forward of the module; give `.reset()` to it, and to the DDP around it that was passed."""
        module = self._target.module
        self._restore.callback(put_in_place(module, self._target.method, self))
        for owner in {id(module): module, id(given): given}.values():
            if not hasattr(owner, "reset"):
                self._restore.callback(put_in_place(owner, "reset", _Reset(self)))

    def _stays_eager(self, ambient: tuple[Hashable, ...]) -> bool:
        """Check whether flags require an eager call."""
        if reason_for_eager(ambient) is not None or saved_tensor_hooks(ambient) is not None:
            return True
        if torch.is_inference_mode_enabled() and self._shape.takes_gradients:
            return True
        self._replayed_under = ambient
        return False

    def put_back(self) -> None:
        """Restore the forward of the module."""
        self.is_closed = True
        self._restore.close()

    # -- calling

    @untraced
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replay the forward; autograd replays the backward."""
        calling = self._calling
        is_alone = calling.acquire(False)
        try:
            if not is_alone:
                refuse_second_thread(self.name)
            cursor = self._owner.cursor
            if self.is_closed or torch.compiler.is_compiling() or self._is_capturing() or is_logged():
                return self._otherwise(args, kwargs)
            if self._target.modes() != self._sample.call.training:
                return self._eagerly(args, kwargs)  # as both contracts require
            leaves, structure = self._flatten(args, kwargs)
            ambient = self._owner.shared.ambient.read()
            # the flags are one object as long as none changes, inference mode included
            if cursor is None and ambient is not self._replayed_under and self._stays_eager(ambient):
                return self._eagerly(args, kwargs)
            self._shape.check(leaves, structure, ambient)
            if cursor.is_at_start if cursor is not None else not self._runner.lane.is_busy:
                self._owner.begin_round()
            self._owner.check(self._sample)
            reports_to_ddp = in_ddp()
            if reports_to_ddp and self._adds_itself:
                raise self._inside_ddp()
            if self._target.fork != self._sample.call.fork:
                raise self._in_another_fork()
            if has_global_hooks() and (hook := global_hook(())) is not None:
                if cursor is None:
                    return self._eagerly(args, kwargs)
                raise self._hook_on_all(hook)
            self._owner.check_lent(self.name)
            sample = self._sample
            held = sample.handovers.forward_held_up_by(leaves)
            if held:
                take_back(held)
                if sample.has_split_weights:
                    raise held_result(self.name)
            if cursor is not None:
                cursor.take((Kind.FORWARD, sample.number))
            elif not self._runner.can_take(leaves):
                raise self._in_flight()
            if held and cursor is not None:  # neither forward nor backward of this call is replayed
                self._owner.count_eager(self.name)
                cursor.pass_over((Kind.BACKWARD, sample.number))
                return self._eagerly(args, kwargs)
            sample.handovers.before_forward(leaves)
            result: R = run_forward(self._runner, leaves, one_by_one=reports_to_ddp and decides_buckets())
            return result
        except StepgraphError as error:
            self._owner.refused[error.rule] += 1
            trim(error)
            raise
        finally:
            if is_alone:
                calling.release()

    def _otherwise(self, args: Any, kwargs: Any) -> R:
        """Call after the graphs were freed, or inside a larger function that is being captured or compiled."""
        if self.is_closed and self._owner.cursor is not None:
            raise ClosedError(
                f"{self.name}, sample {self._sample.number}, was reset",
                rule="closed",
                why="reset() freed its graphs and buffers.",
                fix="call the layer itself, or capture again with make_graphed_callables.",
            )
        return self._eagerly(args, kwargs)

    def _eagerly(self, args: Any, kwargs: Any) -> R:
        result: R = self._target.original(*args, **kwargs)
        return result

    def _in_flight(self) -> CaptureError:
        if self._runner.state is RunnerState.BWD_READY:
            return CaptureError(
                f"{self.name} is called a second time before the backward of the first call",
                rule="call-in-flight",
                why="without an order there is one set of activations, and the second call would overwrite it.",
                fix="run the backward first, drop the results of a call that has none (or call it under "
                "torch.no_grad()), or capture for several calls: order=[1, 1, -1, -1].",
            )
        waiting = [s.target.name for s in self._owner.samples if s.runner.state is RunnerState.BWD_READY]
        return CaptureError(
            f"{self.name} is called while {', '.join(waiting)} waits for its backward",
            rule="call-in-flight",
            details=[f"captured  {', '.join(s.target.name for s in self._owner.samples)}, in this order"],
            why="the callables share memory by the order in which they were passed: a call could overwrite the results "
            "of a later one.",
            fix="pass the callables in the order in which they run, or graph them by separate calls of "
            "make_graphed_callables.",
        )

    def _hook_on_all(self, hook: str) -> CaptureError:
        return CaptureError(
            f"{self.name}: a hook on all modules, `{hook}`, would not run",
            rule="module-hook",
            why="a replay runs no Python inside the callable.",
            fix="remove the hook, or call the layers themselves while it is there.",
        )

    def _in_another_fork(self) -> CaptureError:
        return CaptureError(
            f"{self.name} is called under another named random state than at capture",
            rule="sample-mismatch",
            details=[f"captured  {self._sample.call.fork!r}", f"received  {self._target.fork!r}"],
            why="the graph draws from the generator that was active at the capture.",
            fix="call make_graphed_callables inside tracker.fork() if the callable is called inside it.",
        )

    def _inside_ddp(self) -> CaptureError:
        return CaptureError(
            f"{self.name} is called inside DistributedDataParallel, and was captured before there was one",
            rule="ddp-callable",
            why="DDP must see each gradient when it is ready, and these graphs add to the gradients themselves.",
            fix="wrap the model first: DistributedDataParallel(model), then make_graphed_callables for the DDP or for "
            "layers in it.",
        )

    # -- the split weight gradient

    def need_backward_dw(self) -> bool:
        """Whether a call was replayed whose weight gradient is split off and was not replayed yet."""
        return self._sample.has_split_weights and self._runner.forwards > self._sample.weight_runs

    def backward_dw(self) -> None:
        """Replay the weight gradient that was split off from the backward (`-c.5` in the order)."""
        calling = self._calling
        is_alone = calling.acquire(False)
        try:
            if not is_alone:
                refuse_second_thread(self.name)
            sample, cursor = self._sample, self._owner.cursor
            if self.is_closed:
                self._otherwise((), {})
            if cursor is None or not sample.has_split_weights:
                raise InvalidArgument(
                    f"{self.name}, sample {sample.number}, has no separate weight gradient",
                    rule="replay-order",
                    why="its backward computes all gradients at once.",
                    fix="split it off in the order: an entry -c.5 after -c for each backward of chunk c.",
                )
            self._owner.check_lent(self.name)
            cursor.take((Kind.WEIGHT_GRAD, sample.number))
            if sample.weights is not None and not sample.weights.run():
                raise held_gradient(self.name)
            sample.weight_runs += 1
        except StepgraphError as error:
            self._owner.refused[error.rule] += 1
            trim(error)
            raise
        finally:
            if is_alone:
                calling.release()

    def admit_hooks(self, names: Sequence[str]) -> None:
        """Ignore hooks of functions with these names on modules inside: the caller runs them."""
        if self._sample.kind.guard is not None:
            self._sample.kind.guard.admit_hooks(names)

    # -- ending

    @property
    def replays(self) -> int:
        """Replayed forwards of the whole set so far; cheaper than a report."""
        return self._owner.replays

    @property
    def audits(self) -> int:
        """Audits of the whole set so far; cheaper than a report."""
        return self._owner.audits

    def report(self) -> CallablesReport:
        """Return what was captured and replayed, for the whole set of this callable."""
        return self._owner.report()

    def reset(self) -> None:
        """Free graphs and buffers, and restore the module's forward. With an order, free those of all callables."""
        if self._owner.cursor is not None:
            self._owner.close()
        elif not self.is_closed:
            self.put_back()
            self._owner.close_one(self._sample)


class _Reset:
    """`.reset()` of a module whose forward was replaced; a copy of the module has nothing to reset."""

    def __init__(self, graphed: GraphedCallable[..., Any] | None = None) -> None:
        self._graphed = graphed

    def __call__(self) -> None:
        if self._graphed is not None:
            self._graphed.reset()

    def __reduce__(self) -> Any:
        return _Reset, ()


def refuse_another_backward(name: str, runner: Runner, metas: Sequence[Any]) -> Any:
    """Raise, since no backward can be added: name the missing one, or the reason why the captured one cannot run."""
    known = {key[: len(metas)] for key in runner.backwards}
    if tuple(None if meta is None else meta.layout for meta in metas) in known and not _is_autocast():
        raise held_gradient(name)
    raise CaptureError(
        f"{name}: this backward differs from the captured one",
        rule="sample-mismatch",
        details=[
            f"received  gradients {[None if m is None else list(m.shape) for m in metas]}, "
            f"autocast {'on' if _is_autocast() else 'off'}"
        ],
        why="the graphs share memory by their order, so no graph can be added.",
        fix="call backward() outside autocast, with gradients of the results' own dtypes.",
    )


def _is_autocast() -> bool:
    return any(autocast_now())
