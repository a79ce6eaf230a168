"""Warm-up runs the step eagerly, as the user wrote it, and observes what it does.

It runs on the capture stream and in the memory of the capture, so that libraries are loaded, kernels are chosen,
optimizer state is created, and autograd's accumulators belong to the right stream. It notes the objects that the step
touches. It also notes obstacles, which no replay can repeat: a host random draw, an optimizer's number that the step
itself changes, a plain value in the result that changes at each call. The capture that follows is refused and names
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import CaptureError
from stepgraph.core.plain_values import is_compared_by_value
from stepgraph.core.tensor_attributes import changed_attributes
from stepgraph.core.tensor_memory import Contents, has_memory
from stepgraph.core.tree import Structure, changed_containers, flatten, paths
from stepgraph.engine.backends import Backend, Workspace
from stepgraph.engine.call.failure import refuse_changed_container
from stepgraph.engine.call.messages import warn_detached_results, warn_ignored_counter
from stepgraph.engine.call.proof import StepLogs, num_states
from stepgraph.engine.call.session import Session
from stepgraph.engine.guards.host_values.decisions import HostValues
from stepgraph.engine.guards.host_values.watch import Watch
from stepgraph.engine.memory.inputs import is_copied_in
from stepgraph.engine.memory.outputs import StaticOutputs, detached
from stepgraph.engine.observe.ddp import finding_default_stream, renew_reducer
from stepgraph.engine.observe.discovery import Reached, discovering, scalers_of
from stepgraph.engine.observe.eager_call import CallObserver, Obstacle
from stepgraph.engine.observe.finder import tensors_in
from stepgraph.engine.observe.lines import line_of_return
from stepgraph.engine.observe.own_changes import ModelState, OwnNumbers
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.engine.optim.effects import OptimizerEffects
from stepgraph.engine.optim.optimizer import capturable_on_cpu, make_capturable, place, place_made
from stepgraph.engine.step.arguments import on_device
from stepgraph.engine.step.call import CallArgs
from stepgraph.engine.step.nonfinite import FlagCollector, Flags
from stepgraph.engine.step.options import StepOptions
from stepgraph.engine.step.site import Site


@contextlib.contextmanager
def surroundings(optimizer_mode: str, backend: Backend) -> Iterator[None]:
    """The context of an eager call and of a capture."""
    with contextlib.ExitStack() as stack:
        if optimizer_mode == "capturable" and backend.device.type == "cpu":
            stack.enter_context(capturable_on_cpu())
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            # casts cached outside the step would be baked in, and casts of the capture would leak out
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
        yield


class WarmUp:
    """One observed eager call of a step. The capture uses the observations of the last one."""

    def __init__(
        self, step: Callable[..., Any], given: CallArgs, site: Site, session: Session, options: StepOptions
    ) -> None:
        self._step, self._given, self._site, self._session, self._options = step, given, site, session, options
        backend, touched = session.backend, site.touched
        self._moved = on_device(given.leaves, backend)
        self._kind = site.kind()
        self._whole = site.with_objects(step)
        self._values: Watch | None = None
        self._ignored = HostValues(())
        if site.is_last_warm_call(options.warmup):
            eager = [o for o in touched.optimizers if not self._is_inside(o)]
            self._values = Watch(self._whole, options.ignore, touched.named_modules, eager=eager, ran=touched.ran)
            self._ignored = HostValues(self._values.ignored)
        generators = (backend.default_generator, *options.generators)
        self._watched = CallObserver(backend.device, self._values, generators, ran=touched.ran)
        self._numbers = OwnNumbers(touched.optimizers, self._is_inside)
        self._model = ModelState(touched.all_modules, touched.all_parameters)
        self._contents = Contents([(i, leaf) for i, leaf in enumerate(self._moved) if is_copied_in(leaf)])
        site.obstacles.clear()  # obstacles of a first call alone (lazy initialization) do not matter
        site.effects = OptimizerEffects()

    def _is_inside(self, optimizer: Optimizer) -> bool:
        return place(optimizer, self._options.optimizer).inside

    def run(self, logs: StepLogs, others: Sequence[Site], found: Reached | None) -> tuple[Any, Flags | None]:
        """Call the step once and note the objects that it touches, except those that end with the call.

        `others` are the sites of the step's other signatures, `found` are the objects already found to be in reach.
        Return the result without its autograd graph, and the flags of `nan_check`.
        """
        site, session, options = self._site, self._session, self._options
        backend, ran, inputs = session.backend, site.touched.ran, (*self._given.leaves, *self._moved)
        flags = flags_of(site, options, self._step)
        with (
            discovering(site.touched, self._whole, set(map(id, inputs)), self._before_step, found) as known,
            contextlib.nullcontext() if ran.is_known else ran.noting(backwards_on=backend.device),
            session.workspace.warming_up(),
            _state_outside_the_pool(session.workspace),
            surroundings(options.optimizer, backend),
            finding_default_stream(site.touched, backend) as unrecordable,
            flags.at_optimizers(),
            at_optimizer_steps(after=self._after_step),
            self._watched.watching(),
        ):
            call = self._given.with_leaves(self._moved, own=options.goes_on_eagerly)
            result = self._logged(logs, call) if self._values is not None else self._step(*call[0], **call[1])
            names = site.sign().names()
            found_flags = flags.finish(result, site.touched.parameters, zip(names, self._moved, strict=True))
        if site.seen <= 1 and not site.touched.differentiates:
            warn_detached_results(flatten(result)[0])
        result = detached(result)
        self._note(known, call)
        for ddp, name in unrecordable.values():
            if not _renewed(site, others, ddp, session):
                site.note_obstacle("ddp-stream", f"DDP accumulates the gradient of `{name}` on the default stream")
        note_result(site, self._kind, result, self._step)
        return result, found_flags

    def _before_step(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        if self._options.optimizer == "capturable" and not all(group.get("capturable") for group in groups):
            make_capturable(optimizer, self._session.backend.device)
        self._site.effects.begin(optimizer)
        self._numbers.begin(optimizer)

    def _after_step(self, optimizer: Optimizer, result: Any) -> None:
        self._site.effects.end(optimizer, result)
        self._numbers.end(optimizer)

    def _logged(self, logs: StepLogs, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Call the step and log its operations. A call that creates optimizer state is not compared with others."""
        site, optimizers = self._site, self._site.touched.optimizers
        num_before, device = num_states(optimizers), self._session.backend.device
        ignored = tensors_in(self._whole, self._options.ignore)
        arguments = site.arguments_with_grad(self._moved)
        with logs.noting(self._moved, site.touched, device, ignored, arguments) as log:
            result = self._step(*call[0], **call[1])
            log.note_result(result)
        if num_states(optimizers) == num_before:
            site.eager.logs.add(self._kind, log.finish())
        return result

    def _note(self, known: frozenset[int], call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Note what the call changed or drew from. The recording must find the other values unchanged."""
        site, watched = self._site, self._watched
        numbers = self._numbers.finish()
        ended = _let_go(site, known, self._options.optimizer)
        _note_arguments(site, self._given, self._moved, call, self._contents)
        for key, changed in numbers.items():
            if key not in ended and self._options.optimizer != "capturable":
                site.note_obstacle("host-value", f"the step itself changes {changed}")
        site.note_unmoved(watched.generators.unmoved(), self._kind)
        site.obstacles |= {obstacle.rule: obstacle for obstacle in watched.obstacles()}
        if written := self._ignored.changed():
            warn_ignored_counter(getattr(self._step, "__name__", "step"), written)
        if self._values is not None:
            libraries = watched.changed_values(users=False)
            by_name = {str(place.label): place for place in self._values.traceable(libraries)}
            site.eager.own_changes = [(by_name.get(change.name), change) for change in libraries]
            self._values.drop({change.name for change in (*libraries, *watched.changed_values())})
            site.eager.values = self._values
        changed_model = self._model.changed(site.touched.name)
        if changed_model is not None:
            site.note_obstacle("own-change", f"the step itself {changed_model}")


def _note_arguments(site: Site, given: CallArgs, moved: Sequence[Any], call: Any, contents: Contents) -> None:
    """Note what a call did to its arguments."""
    leaves = given.leaves
    is_own = call is given.own
    container = changed_containers(given.structure, moved, call, site.sign().arguments)
    container = container or changed_attributes(site.with_keys(moved))
    if container is not None and is_own:
        site.note_obstacle("argument-changed", f"the step changes a container that it was given: {container}")
    else:
        refuse_changed_container(container)  # the caller's container did not get the change
    for index in contents.changed():  # torch does not count every write
        site.learnt.written.add(index)
        if moved[index] is not leaves[index] and moved[index].shape == leaves[index].shape and has_memory(moved[index]):
            with torch.no_grad():  # a copy on the device of a tensor on the host
                leaves[index].copy_(moved[index])


def _renewed(site: Site, others: Sequence[Site], ddp: DistributedDataParallel, session: Session) -> bool:
    """Let DDP accumulate on the capture stream, and warm up again in all signatures. Return False at a second try."""
    if id(ddp) in site.learnt.renewed:
        return False
    site.learnt.renewed.add(id(ddp))
    with session.stream():
        if not renew_reducer(ddp):
            return False
    if session.num_graphs:  # they may use the old buckets
        session.drop_graphs()
    for each in (site, *others):
        each.warm_up_again()
    return True


def _let_go(site: Site, known: frozenset[int], mode: str) -> set[int]:
    """Forget objects that were made in the call and ended with it, and return their ids.

    Optimizers among them that cannot be recorded become obstacles.
    """
    new = {id(o): (type(o).__name__, place_made(o, mode)) for o in site.touched.optimizers if id(o) not in known}
    ended = site.touched.let_go(known)
    for name, placement in (new[key] for key in new.keys() & ended):
        if not placement.inside:
            what = f"the step makes an optimizer that cannot be recorded: {name}, {placement.reason}"
            site.note_obstacle("inner-optimizer", what)
    return ended


def flags_of(site: Site, options: StepOptions, step: Callable[..., Any]) -> FlagCollector:
    """Make the collector of flags for NaN and inf in one call of the step."""
    wanted = options.nan_check == "device"
    scaled = wanted and bool(scalers_of(site.with_objects(step)))
    buckets = options.buckets
    left_out = buckets.may_have_padded if buckets is not None else None  # `Bucketing.flags` checks those, once cut
    return FlagCollector(site.touched.name, wanted=wanted, gradients=not scaled, left_out=left_out)


@contextlib.contextmanager
def _state_outside_the_pool(workspace: Workspace) -> Iterator[None]:
    """Let an optimizer create its state, at its first step, outside the pool, where it would block memory."""
    with contextlib.ExitStack() as kept:

        def before(optimizer: Optimizer) -> None:
            if not optimizer.state:
                kept.enter_context(workspace.keeping())

        def after(_: Optimizer, __: Any) -> None:
            kept.close()

        with at_optimizer_steps(before, after):
            yield


def _static_part(result: Any) -> tuple[Structure, list[Any]]:
    """Return the part of a result that a replay does not compute: structure and plain values."""
    made = StaticOutputs(result)
    return made.structure, made.plain_values


def note_result(site: Site, kind: Hashable, result: Any, step: Callable[..., Any]) -> None:
    """Compare the static part of a result with that of the call before."""
    other = other_result(site, kind, result)
    if other is not None:
        site.note_obstacle("varying-output", other, line_of_return(step))
    site.eager.results[kind] = _static_part(result)


def other_result(site: Site, kind: Hashable, result: Any) -> str | None:
    """Describe what changed in the static part of a result since the last eager call of its kind, or return None."""
    if kind not in site.eager.results:
        return None
    (before, earlier), (structure, values) = site.eager.results[kind], _static_part(result)
    if structure != before:
        return "the structure of the result changes from call to call"
    for path, one, two in zip(paths(structure, "result"), earlier, values, strict=True):
        if one is not two and (not is_compared_by_value(one) or one != two):
            return f"{path} was {one!r}, then {two!r}"
    return None


def own_change(step: str, what: str) -> CaptureError:
    """Make the error for a step that changes its own model, which a replay cannot do."""
    return Obstacle("own-change", f"the step itself {what}").error(step)
