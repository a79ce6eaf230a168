"""A `StageManager` records the calls of one pipeline stage on this rank, and replays the graphs captured from them.

The manager takes the place of the `forward` of the stage's module, and stands beside the stage's own methods, to know
which microbatch is computed and to ask for its turn. What torch's stage does around the computation (buffers,
communication, losses, scaling) stays as it is, and so does autograd: a replayed forward is a node in its graph, and a
full backward comes to it there. Only where torch splits the backward, it would take that graph apart; there the I part
is run as a full backward, which replays a graph without the weights, and the W part replays a graph of its own.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepgraph.errors import InvalidArgument, SignatureMismatch, StepgraphError
from stepgraph.frames import untraced
from stepgraph.grads.param_grads import GradPart
from stepgraph.guards.hooks import is_hooked
from stepgraph.modules.manager import CudaGraphManager
from stepgraph.modules.options import ModuleOptions
from stepgraph.modules.session import ModuleSession
from stepgraph.modules.site import ModuleCall, ModuleSite
from stepgraph.observe.warm_call import WarmCall
from stepgraph.oplog import Difference
from stepgraph.order.cursor import Cursor
from stepgraph.order.entries import Entry, Kind
from stepgraph.pair.audit import differs
from stepgraph.pair.guard import Finding
from stepgraph.pair.in_flight import run_forward
from stepgraph.pair.ordered import WeightGraph
from stepgraph.pair.record import PairCapture
from stepgraph.pair.runner import Runner
from stepgraph.rng.tracker import tracker_for
from stepgraph.session.backend_choice import refuse_elsewhere
from stepgraph.signature import (
    Signature,
    ambient_key,
    argument_names,
    find_differences,
    leaf_keys,
    refuse_arguments,
)
from stepgraph.tree import CallFlattener, Structure, unflatten


class Mode(enum.Enum):
    """What a step does with the stages of a rank."""

    EAGER = "eager"
    RECORD = "record"
    """Eagerly, and what goes in and out of each call is noted."""
    REPLAY = "replay"


class StageOwner(Protocol):
    """What a stage asks of those of its rank."""

    mode: Mode
    cursor: Cursor

    def forget(self) -> None:
        """The graphs are gone: warm up anew."""


@dataclass(slots=True)
class StageCall:
    """What was noted of a stage's call for one microbatch."""

    site: ModuleSite
    key: tuple[Hashable, ...]
    recorded: ModuleCall
    refusal: StepgraphError | None
    """What no replay could repeat."""


class StageManager(CudaGraphManager):
    """The graphs of one stage, one runner a microbatch."""

    def __init__(
        self,
        stage: Any,
        chunk: int,
        options: ModuleOptions,
        shared: ModuleSession,
        stages: StageOwner,
        method: str,
    ) -> None:
        super().__init__(options, stage.submod, method, session=shared, name=f"stage {stage.stage_index}")
        self.stage, self.chunk = stage, chunk
        self.calls: dict[int, StageCall] = {}
        """What was noted in the last recorded step, by microbatch."""
        self.runners: dict[int, Runner] = {}
        self.weights: dict[int, WeightGraph] = {}
        self.weight_grads = 0
        """Replays of W parts."""
        self._origins: dict[int, Any] = {}
        """Where the random generators were before a forward that its W part repeats."""
        self._parts: list[GradPart] = []
        """The backwards' shares in the parameters' gradients, as many as know all of the memory."""
        self._stages = stages
        self._microbatch: int | None = None
        self._flatten_call = CallFlattener()
        self._names = argument_names(self.original)

    # -- what the schedule calls

    @contextlib.contextmanager
    def computing(self, kind: Kind, microbatch: int) -> Iterator[None]:
        """The schedule computes something of a microbatch."""
        if self._stages.mode is Mode.REPLAY:
            self._stages.cursor.take(Entry(kind, self.chunk, microbatch))
        self._microbatch = microbatch
        try:
            yield
        except RuntimeError as error:
            if isinstance(error.__cause__, StepgraphError):
                raise error.__cause__ from None  # torch has put a message of its own before ours
            raise
        finally:
            self._microbatch = None

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stage's module: by replay, or eagerly, noted or not."""
        mode, microbatch = self._stages.mode, self._microbatch
        if microbatch is None or mode is Mode.EAGER or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        leaves, structure = self._flatten_call(args, kwargs)
        if mode is Mode.RECORD:
            return self._record(microbatch, leaves, structure)
        key = (structure, leaf_keys(leaves), self.session.ambient.read())
        known = self.calls[microbatch]
        if key != known.key:
            received = Signature(structure, key[1], key[2], arguments=self._names)
            raise self._unlike(known.site.call, received, microbatch)
        runner, weights = self.runners[microbatch], self.weights.get(microbatch)
        if weights is not None and weights.recorded.rewinds:
            self._origins[microbatch] = runner.forward.recording.graph.random_origin()
        return run_forward(runner, leaves)

    def backward(self, plain: Any, kind: str, values: dict[str, Any], last: bool) -> Any:
        """What torch's stage calls for a backward; `plain` is its own method."""
        if self._stages.mode is not Mode.REPLAY or kind == "full":
            return plain(kind, values, last_backward=last)
        assert self._microbatch is not None
        if kind == "weight":
            ran = self.weights[self._microbatch].run(self._origins.pop(self._microbatch, None))
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
            f"{self.name}, microbatch {microbatch}: a call unlike the one that was captured",
            rule="pipeline-stage",
            details=[str(difference) for difference in find_differences(captured, received)[:8]],
            why="a graph replays fixed shapes and plain values, and other ranks wait for what it computes.",
            fix="pad the batch, or call handle.reset() on all ranks before a step with other arguments.",
        )

    # -- noting

    def _record(self, microbatch: int, leaves: Sequence[Any], structure: Structure) -> Any:
        """Call the module eagerly and note the call."""
        shared, refusal = self.session, None
        if self.random is None:
            self.random = tracker_for(shared.backend_for(self.module, leaves))
        try:
            keys = leaf_keys(leaves)
            refuse_arguments(leaves, [f"argument {index}" for index in range(len(leaves))])
            refuse_elsewhere(self.module, leaves, shared.session.backend)
        except InvalidArgument as error:
            keys, refusal = (), error
        site = self._site(microbatch, Signature(structure, keys, ambient_key(), self.modes(), (), self._names))
        site.keep_alive = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        device = shared.session.backend.device
        watched = WarmCall(self.original, self._named(), self.options.ignore, device, site.ran)

        def run() -> Any:
            args, kwargs = unflatten(structure, leaves)
            return self.original(*args, **kwargs)

        call = watched.noting(run)
        result = shared.warming(lambda: shared.recorder.run(site, leaves, structure, call))
        recorded = shared.recorder.events[-1].call
        self.calls[microbatch] = StageCall(
            site,
            (site.call.structure, keys, site.call.ambient),
            recorded,
            refusal or watched.finding() or site.results.varies,
        )
        self.eager_reasons["warm-up"] += 1
        return result

    def _site(self, microbatch: int, call: Signature) -> ModuleSite:
        """What is known of a microbatch's calls, as long as they look alike."""
        site = self.sites.get(microbatch)
        if site is None or site.call.key != call.key:
            site = self.sites[microbatch] = ModuleSite(self, call)
        return site

    # -- graphs

    def pair(self) -> PairCapture:
        """What records the stage's graphs."""
        if self._pair is None:
            # each backward of a stage is one of its own, so that nothing else adds to a parameter in it
            hooked = [id(p) for p in self.module.parameters() if is_hooked(p)]
            self._pair = PairCapture(self._method, self.module, self.session, hooked, self.options.generators)
        return self._pair

    def changed(self, *, audited: bool) -> Finding | None:
        """A reason not to replay the stage's graphs; `audited`: they are recorded again and compared in any case."""
        guard = next(call.site.guard for call in self.calls.values() if call.site.guard is not None)
        if not audited and guard.holds():
            return None
        found = self.look(guard, self._differs_anywhere, audited=audited)
        if found is not None and found.difference is not None:
            self.raise_if_strict(found.why)
        return found

    def _differs_anywhere(self) -> Difference | None:
        """Where a recording would differ by now: of microbatches alike, one is looked at."""
        kinds = {call.key: microbatch for microbatch, call in reversed(self.calls.items())}
        for microbatch in kinds.values():
            found = differs(self.pair(), self.calls[microbatch].recorded, self.runners[microbatch])
            if found is not None:
                return found
        return None

    def has_its_gradients(self) -> bool:
        """Whether the graphs can add to the parameters' gradients; if not, they must be captured for other memory."""
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
        """Free the graphs; what was noted of the calls stays."""
        for runner in self.runners.values():
            self.forwards += runner.forwards
            self.backwards += runner.backward_runs
            runner.retire()
        for weight in self.weights.values():
            self.session.session.release(weight.recorded.graph)
        self.runners, self.weights, self._parts = {}, {}, []
        for site in self.sites.values():
            site.runners = []

    def drop(self) -> None:
        """Free the graphs and what was noted; the stage warms up again."""
        self.forget_graphs()
        super().drop()
        self.calls.clear()
        self.sites.clear()
        self._stages.forget()
