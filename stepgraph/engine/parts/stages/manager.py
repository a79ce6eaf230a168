"""A `StageManager` records the calls of one pipeline stage on this rank, and replays the graphs captured from them.

The manager replaces the `forward` of the stage's module. It also wraps the stage's own methods, to know the microbatch
and to take its turn. The other work of torch's stage (buffers, communication, losses, scaling) is unchanged, and so is
autograd: a replayed forward is a node in its graph, which a full backward reaches. If torch splits the backward, it
would take that graph apart. Then the I part runs as a full backward, which replays a graph without the weights, and the
W part replays a separate graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.errors import CaptureError, InvalidArgument, SignatureMismatch, StepgraphError, refusal_in
from stepgraph.core.frames import untraced
from stepgraph.core.tree import CallFlattener, Structure, unflatten
from stepgraph.engine.backends.random.tracker import tracker_for
from stepgraph.engine.call.backend_choice import refuse_elsewhere
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.grads.param_grads import GradPart
from stepgraph.engine.guards.signature import Signature, ambient_key, find_differences, leaf_keys, refuse_arguments
from stepgraph.engine.oplog import Difference
from stepgraph.engine.order.cursor import Cursor
from stepgraph.engine.order.entries import Entry, Kind
from stepgraph.engine.record.pair.audit import differs
from stepgraph.engine.record.pair.call import EagerCall, NotedArguments
from stepgraph.engine.record.pair.eager import note_call, run_call
from stepgraph.engine.record.pair.guard import Finding, SiteGuard
from stepgraph.engine.record.pair.in_flight import run_forward
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.runner import Runner, WeightGraph
from stepgraph.engine.record.pair.target import PairTarget


class Mode(enum.Enum):
    """The mode of a step, for all stages of a rank."""

    EAGER = "eager"
    RECORD = "record"
    """Run eagerly, and note the arguments and results of each call."""
    REPLAY = "replay"


@dataclass(slots=True)
class CurrentStep:
    """The step that the schedule runs now, for all stages of a rank."""

    cursor: Cursor
    mode: Mode = Mode.EAGER


@dataclass(slots=True)
class StageCall:
    """The notes on a stage's call for one microbatch."""

    kind: CallKind
    key: tuple[Hashable, ...]
    recorded: EagerCall
    refusal: StepgraphError | None
    """An effect that no replay can repeat."""
    origin: Any = None
    """The random state before a forward that its W part repeats."""


class StageManager:
    """The graphs of one stage, with one runner for each microbatch."""

    def __init__(self, stage: Any, chunk: int, target: PairTarget, step: CurrentStep) -> None:
        self.stage, self.chunk, self.target, self._step = stage, chunk, target, step
        self.calls: dict[int, StageCall] = {}
        """The calls of the last recorded step, by microbatch."""
        self.runners: dict[int, Runner] = {}
        self.weights: dict[int, WeightGraph] = {}
        self.forwards = self.backwards = 0
        """Replays of freed graphs."""
        self.weight_grads = 0
        """Replays of W parts."""
        self.eager_reasons: Counter[str] = Counter()
        self._same_in: dict[tuple[bool, ...], bool] = {}
        """Modes that differ from those of the recording; True if the operations are the same in them."""
        self._parts: list[GradPart] = []
        """The backwards' parts of the parameters' gradients, as many as cover all of the memory."""
        self._microbatch: int | None = None
        self._flatten = CallFlattener()

    @property
    def is_computing(self) -> bool:
        """True during a microbatch of the schedule; torch also calls a stage to learn the shapes of its outputs."""
        return self._microbatch is not None

    # -- what the schedule calls

    @contextlib.contextmanager
    def computing(self, kind: Kind, microbatch: int) -> Iterator[None]:
        """Take the turn of a computation of the schedule."""
        if self._step.mode is Mode.REPLAY:
            self._step.cursor.take(Entry(kind, self.chunk, microbatch))
        self._microbatch = microbatch
        try:
            yield
        except RuntimeError as error:
            refused = refusal_in(error)
            if isinstance(refused, StepgraphError):
                raise refused from None  # torch has put a message of its own before ours
            raise
        finally:
            self._microbatch = None

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stage's module: replay, or run eagerly with or without notes."""
        mode, microbatch = self._step.mode, self._microbatch
        if microbatch is None or mode is Mode.EAGER or torch.compiler.is_compiling():
            return self.target.original(*args, **kwargs)
        leaves, structure = self._flatten(args, kwargs)
        if mode is Mode.RECORD:
            return self._record(microbatch, leaves, structure)
        keys = leaf_keys(leaves, on=self.target.shared.session.backend.device.type)
        key = (structure, keys, self.target.shared.ambient.read())
        known = self.calls[microbatch]
        if key != known.key:
            raise self._unlike(known.kind.signature, Signature(*key, arguments=self.target.arguments), microbatch)
        if (modes := self.target.modes()) != known.recorded.training and not self._same_in.get(modes):
            raise self._changes_modes()
        runner, weights = self.runners[microbatch], self.weights.get(microbatch)
        if weights is not None and weights.recorded.rewinds:
            known.origin = runner.forward.recording.graph.random_origin()
        return run_forward(runner, leaves)

    def __reduce__(self) -> Any:
        """Let a copy of the module, by copy.deepcopy or pickle, be a plain module."""
        return getattr, (self.target.module, self.target.method)

    def backward(self, plain: Any, kind: str, values: dict[str, Any], last: bool) -> Any:
        """Replace the backward method of torch's stage; `plain` is that method."""
        if self._step.mode is not Mode.REPLAY or kind == "full":
            return plain(kind, values, last_backward=last)
        assert self._microbatch is not None
        if kind == "weight":
            call = self.calls[self._microbatch]
            origin, call.origin = call.origin, None
            ran = self.weights[self._microbatch].run(origin)
            assert ran, "where gradients lie was looked at before the step"
            self.weight_grads += 1
            return (), None
        outputs, inputs = values["stage_output"], values["input_values"]
        # torch looks into a tuple of outputs only where there is one of gradients
        whole = outputs if values["output_grads"] is not None else outputs[0]
        grads, _ = plain("full", {**values, "stage_output": whole}, last_backward=last)
        for tensor, grad in zip(inputs, grads, strict=True):
            if grad is not None:
                tensor.grad = grad  # as torch's own I part leaves it
        for output in outputs:
            if isinstance(output, torch.Tensor):  # torch may keep only the gradient edge of one that was sent
                output.detach_()
        return grads, []

    def _unlike(self, captured: Signature, received: Signature, microbatch: int) -> SignatureMismatch:
        return SignatureMismatch(
            f"{self.target.name}, microbatch {microbatch}: this call differs from the captured one",
            rule="pipeline-stage",
            details=[str(difference) for difference in find_differences(captured, received)[:8]],
            why="a graph replays fixed shapes and plain values, and other ranks wait for its results.",
            fix="pad the batch, or call handle.reset() on all ranks before a step with other arguments.",
        )

    def _record(self, microbatch: int, leaves: Sequence[Any], structure: Structure) -> Any:
        """Call the module eagerly and note the call."""
        target, shared = self.target, self.target.shared
        keys: tuple[Hashable, ...] = ()
        refusal: StepgraphError | None = None
        if target.random is None:
            target.random = tracker_for(shared.backend_for(target.module, *leaves))
        try:
            keys = leaf_keys(leaves, on=shared.session.backend.device.type)
            refuse_arguments(leaves, [f"argument {index}" for index in range(len(leaves))])
            refuse_elsewhere(target.module, leaves, shared.session.backend)
        except InvalidArgument as error:
            keys, refusal = (), error
        signature = Signature(structure, keys, ambient_key(), target.modes(), (), target.arguments)
        known = self.calls.get(microbatch)
        alike = known is not None and known.kind.signature.key == signature.key
        kind = known.kind if known is not None and alike else CallKind(signature, leaves)

        def run() -> Any:
            args, kwargs = unflatten(structure, leaves)
            return target.original(*args, **kwargs)

        arguments = NotedArguments.of(leaves)
        call = note_call(target, kind, arguments, structure)
        made = run_call(target, kind, call, leaves, arguments.tensors, run)
        shared.note_returned(made.returned)
        if call.is_differentiable:
            shared.waiting.add(call, made.outputs.tensors)
        self.calls[microbatch] = StageCall(kind, (structure, keys, signature.ambient), call, refusal or kind.seen)
        self.eager_reasons["warm-up"] += 1
        return made.value

    def _changes_modes(self) -> StepgraphError:
        return CaptureError(
            f"{self.target.name}: train() or eval() of its modules was called within a step",
            rule="pipeline-stage",
            why="the graphs replay another mode, and other ranks wait for the results.",
            fix="call train() and eval() between steps.",
        )

    # -- graphs

    @property
    def _guard(self) -> SiteGuard:
        return next(call.kind.guard for call in self.calls.values() if call.kind.guard is not None)

    def changed(self, *, audited: bool) -> Finding | None:
        """Return a reason not to replay the stage's graphs, or None. `audited`: always record again and compare."""
        guard = self._guard
        if not audited and guard.holds():
            return None
        self._same_in.clear()
        found = self.target.look(guard, self._differs, audited=audited)
        if found is not None and found.difference is not None:
            self.target.raise_if_strict(found.why)
        return found

    def fits_modes(self) -> bool:
        """True if the graphs have the operations of the modules' present modes; other modes are recorded once."""
        modes = self.target.modes()
        if all(call.recorded.training == modes for call in self.calls.values()):
            return True
        if modes not in self._same_in:
            with interrupts_held():
                self._same_in[modes] = self._guard.repeats(functools.partial(self._differs, modes))
        return self._same_in[modes]

    def _differs(self, modes: tuple[bool, ...] | None = None) -> Difference | None:
        """Record again, in some modes, and return the first difference; of equal microbatches one is compared."""
        kinds = {(call.key, call.recorded.training): microbatch for microbatch, call in reversed(self.calls.items())}
        for microbatch in kinds.values():
            recorded = self.calls[microbatch].recorded
            call = recorded if modes is None else dataclasses.replace(recorded, training=modes)
            found = differs(self.target.pair(), call, self.runners[microbatch])
            if found is not None:
                return found
        return None

    def has_its_gradients(self) -> bool:
        """True if the graphs can add to the parameters' gradients; else they must be captured for other memory."""
        if not self._parts:
            parts = [b.accumulated for r in self.runners.values() for b in r.backwards.values()]
            parts += [w.recorded.accumulated for w in self.weights.values()]
            known: set[int] = set()
            for part in parts:  # those of other microbatches know the same memory
                fresh = {id(memory) for memory in part.memory} - known
                known |= fresh
                self._parts += [part] if fresh else []
        held = [part for part in self._parts if not part.attach()]  # each is asked, for what it brings along
        return not held

    def forget_graphs(self) -> None:
        """Free the graphs, and keep the notes on the calls."""
        for runner in self.runners.values():
            self.forwards += runner.forwards
            self.backwards += runner.backward_runs
            runner.retire()
        for weight in self.weights.values():
            self.target.shared.session.release(weight.recorded.graph)
        self.runners, self.weights, self._parts = {}, {}, []
        self._same_in.clear()

    def drop(self) -> None:
        """Free the graphs and the notes on the calls; the stage warms up again."""
        self.forget_graphs()
        self.target.drop_pair()
        self.calls.clear()
