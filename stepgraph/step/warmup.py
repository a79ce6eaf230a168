"""Warm-up runs the step eagerly, as the user wrote it, and observes what it does.

It runs on the capture stream and in the capture's memory, so that libraries load, kernels are chosen, optimizer state
comes into being and autograd's accumulators belong to the right stream. What it touches is noted. So is what no replay
could repeat: a host random draw, an optimizer's number that the step itself changes, a plain value in the result that
is another each time. These are obstacles; the capture that follows is refused with their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from stepgraph.backends import Backend, Workspace
from stepgraph.buffers.static import detached, is_copied_in, on_device, static_part
from stepgraph.errors import CaptureError, entry
from stepgraph.observe.ddp import finding_default_stream, renew_reducer
from stepgraph.observe.discovery import discovering, scalers_of
from stepgraph.observe.finder import tensors_in
from stepgraph.observe.nonfinite import FlagCollector, Flags
from stepgraph.observe.own_changes import ModelState, OwnNumbers
from stepgraph.optim.effects import OptimizerEffects
from stepgraph.optim.optimizer import capturable_on_cpu, make_capturable, place, place_made
from stepgraph.optim.steps import at_optimizer_steps
from stepgraph.rng.host_random import GeneratorWatch, HostRandomWatch
from stepgraph.session.failure import CHANGED_CONTAINER, refuse_changed_container
from stepgraph.session.messages import to_ignore, warn_detached_results
from stepgraph.session.proof import StepLogs, num_states
from stepgraph.session.session import Session
from stepgraph.signature import is_plain
from stepgraph.signature.attributes import changed_attributes
from stepgraph.signature.memory import Contents
from stepgraph.step.call import CallArgs
from stepgraph.step.options import StepOptions
from stepgraph.step.site import Obstacle, Site
from stepgraph.tree import changed_containers, flatten, paths
from stepgraph.values.watch import Watch

_MAX_TOLD = 4
"""Changed values that an error spells out."""


@contextlib.contextmanager
def surroundings(optimizer_mode: str, backend: Backend) -> Iterator[None]:
    """What an eager call, a capture and the replay after it have in common."""
    with contextlib.ExitStack() as stack:
        if optimizer_mode == "capturable" and backend.device.type == "cpu":
            stack.enter_context(capturable_on_cpu())
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            # casts cached around the step would be baked in, or leak out of the capture
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
        yield


def warm_up(
    step: Callable[..., Any],
    given: CallArgs,
    site: Site,
    others: Sequence[Site],
    session: Session,
    options: StepOptions,
    logs: StepLogs,
) -> tuple[Any, Flags | None]:
    """Call the step once on these inputs and note what it touches; what ends with the call is let go of.

    `others` are the sites of the step's other signatures. Returns the result without its autograd graph, and the flags
    of `nan_check`. The last call before a capture is the one that counts: its operations are noted, and its values.
    """
    is_last = site.is_last_warm_call(options.warmup)
    backend = session.backend
    leaves = given.leaves
    moved = on_device(leaves, backend)
    site.obstacles.clear()  # what only a first call does (lazy initialization) is in nobody's way
    host_random = HostRandomWatch(backend.device)
    generators = GeneratorWatch((backend.default_generator, *options.generators))
    numbers = OwnNumbers(site.touched.optimizers, lambda o: place(o, options.optimizer).inside)
    effects = site.effects = OptimizerEffects()
    whole = site.with_objects(step)
    flags = flags_of(site, options, step)
    eager = [o for o in site.touched.optimizers if not place(o, options.optimizer).inside]
    values = None
    if is_last:
        values = Watch(whole, options.ignore, site.touched.named_modules, eager=eager, ran=site.touched.ran)
    model = ModelState(site.touched.all_modules, site.touched.all_parameters)
    kind, optimizers = site.kind(), site.touched.optimizers
    states = num_states(optimizers)
    contents = Contents([(i, leaf) for i, leaf in enumerate(moved) if is_copied_in(leaf)])

    def see(optimizer: Optimizer) -> None:
        if options.optimizer == "capturable" and not all(g.get("capturable") for g in optimizer.param_groups):
            make_capturable(optimizer, backend.device)
        if effects.begin(optimizer):
            numbers.begin(optimizer)

    def seen(optimizer: Optimizer, result: Any) -> None:
        if effects.end(optimizer, result):
            numbers.end(optimizer)

    with (
        discovering(site.touched, whole, {id(leaf) for leaf in (*leaves, *moved)}, see) as known,
        contextlib.nullcontext() if site.touched.ran.is_known else site.touched.ran.noting(backwards_on=backend.device),
        session.workspace.warming_up(),
        _state_outside_the_pool(session.workspace),
        surroundings(options.optimizer, backend),
        finding_default_stream(site.touched, backend) as unrecordable,
        flags.at_optimizers(),
        at_optimizer_steps(after=seen),
    ):
        args, kwargs = call = given.with_leaves(moved, own=options.goes_on_eagerly)
        if is_last:
            with logs.noting(moved, site.touched, backend.device, tensors_in(whole, options.ignore)) as log:
                result = step(*args, **kwargs)
                log.note_result(flatten(result)[0])
        else:
            result = step(*args, **kwargs)
        found_flags = flags.finish(result, site.touched.parameters, zip(site.sign().names(), moved, strict=True))
    if site.seen <= 1 and not site.touched.differentiates:
        warn_detached_results(flatten(result)[0])
    result = detached(result)
    if is_last and num_states(optimizers) == states:
        site.eager.logs.add(kind, log.finish())
    changed_numbers = numbers.finish()
    ended = _let_go(site, known, options.optimizer)
    _note_arguments(site, given, moved, call, contents)
    site.note_unmoved(generators.unmoved())
    if generators.was_set():
        site.obstacles["reseed"] = Obstacle("the step seeds a random generator, or sets its state")
    for source in host_random.advanced():
        site.obstacles["host-random"] = Obstacle(f"the step draws from {source}")
    for key, changed in changed_numbers.items():
        if key not in ended and options.optimizer != "capturable":
            site.obstacles["host-value"] = Obstacle(f"the step itself changes {changed}")
    if values is not None:
        _note_values(site, values)
    changed_model = model.changed(site.touched.name)
    if changed_model is not None:
        site.obstacles["own-change"] = Obstacle(f"the step itself {changed_model}")
    for ddp, name in unrecordable.values():
        if not _renewed(site, others, ddp, session):
            site.obstacles["ddp-stream"] = Obstacle(f"DDP accumulates the gradient of `{name}` on the default stream")
    note_result(site, kind, result)
    return result, found_flags


def _note_arguments(site: Site, given: CallArgs, moved: Sequence[Any], call: Any, contents: Contents) -> None:
    """After a call: what it has done to its arguments."""
    leaves = given.leaves
    is_own = call is given.own
    container = changed_containers(given.structure, moved, call, site.sign().arguments)
    container = container or changed_attributes(site.with_keys(moved))
    if container is not None and is_own:
        site.obstacles["argument-changed"] = Obstacle(f"the step changes a container that it was given: {container}")
    else:
        refuse_changed_container(container)  # the caller's own has not seen it
    for index in contents.changed():  # not every write is counted by torch
        site.written.add(index)
        if moved[index] is not leaves[index] and moved[index].shape == leaves[index].shape:
            with torch.no_grad():  # a copy on the device of a tensor on the host
                leaves[index].copy_(moved[index])


def _note_values(site: Site, values: Watch) -> None:
    """After a call: which values it has changed itself; the others are what the recording has to find."""
    found = values.changed()
    site.eager.own_changes = {change.name for change in found if not change.is_users}
    changes = [change for change in found if change.is_users]
    if changes:
        told = "; ".join(map(str, changes[:_MAX_TOLD])) + (" ..." if len(changes) > _MAX_TOLD else "")
        names = tuple(change.name for change in changes)
        site.obstacles["host-value"] = Obstacle(f"the step itself changes {told}", names)
    if sources := (*values.drawn(), *values.unseen()):
        told, names = ", ".join(map(str, sources)), tuple(source.name for source in sources)
        site.obstacles["iterator"] = Obstacle(f"the step draws from {told}", names)
    values.drop({change.name for change in found})
    site.eager.values = values


def _renewed(site: Site, others: Sequence[Site], ddp: DistributedDataParallel, session: Session) -> bool:
    """Let DDP accumulate on the capture stream, and begin to warm up again, in all signatures: once."""
    if id(ddp) in site.renewed:
        return False
    site.renewed.add(id(ddp))
    with session.stream():
        if not renew_reducer(ddp):
            return False
    if session.num_graphs:  # they may use the buckets that are gone
        session.drop_graphs()
    for each in (site, *others):
        each.warm_up_again()
    return True


def _let_go(site: Site, known: frozenset[int], mode: str) -> set[int]:
    """Forget what came into being in the call and ended with it, by id; note what of it cannot be recorded."""
    new = {id(o): (type(o).__name__, place_made(o, mode)) for o in site.touched.optimizers if id(o) not in known}
    ended = site.touched.let_go(known)
    for name, placement in (new[key] for key in new.keys() & ended):
        if not placement.inside:
            what = f"the step makes an optimizer that cannot be recorded: {name}, {placement.reason}"
            site.obstacles["inner-optimizer"] = Obstacle(what)
    return ended


def flags_of(site: Site, options: StepOptions, step: Callable[..., Any]) -> FlagCollector:
    """What looks for NaN and inf in one call of the step."""
    wanted = options.nan_check == "device"
    scaled = wanted and bool(scalers_of(site.with_objects(step)))
    buckets = options.buckets
    left_out = buckets.may_have_padded if buckets is not None else None  # `Bucketing.flags` looks at those, once cut
    return FlagCollector(site.touched.name, wanted=wanted, gradients=not scaled, left_out=left_out)


@contextlib.contextmanager
def _state_outside_the_pool(workspace: Workspace) -> Iterator[None]:
    """Let an optimizer make its state, at its first step, elsewhere: in the pool it would only be in the way."""
    stepping: set[int] = set()
    with contextlib.ExitStack() as kept:

        def before(optimizer: Optimizer) -> None:
            if not optimizer.state and not stepping:  # a subclass's step calls its parent's: both are told of
                stepping.add(id(optimizer))
                kept.enter_context(workspace.keeping())

        def after(_: Optimizer, __: Any) -> None:
            stepping.clear()
            kept.close()

        with at_optimizer_steps(before, after):
            yield


def note_result(site: Site, kind: Hashable, result: Any) -> None:
    """Compare the static part of a result with that of the call before."""
    other = other_result(site, kind, result)
    if other is not None:
        site.obstacles["varying-output"] = Obstacle(other)
    site.eager.results[kind] = static_part(result)


def other_result(site: Site, kind: Hashable, result: Any) -> str | None:
    """What is another in the static part of a result than in that of the last eager call of its kind, in words."""
    if kind not in site.eager.results:
        return None
    (before, earlier), (structure, values) = site.eager.results[kind], static_part(result)
    if structure != before:
        return "the result's structure is another at each call"
    for path, one, two in zip(paths(structure, "result"), earlier, values, strict=True):
        if one is not two and (not is_plain(one) or one != two):
            return f"{path} was {one!r}, then {two!r}"
    return None


_WHY = {
    "argument-changed": CHANGED_CONTAINER,
    "host-random": (
        "it would be drawn once, at capture, and frozen.",
        "draw on the step's device (torch.rand(..., device=x.device)), or draw outside and pass it as a "
        "tensor argument (a plain number gets a graph for each value).",
    ),
    "host-value": (
        "Python code runs only at capture, not at replay: the value would stand still.",
        "change it outside the step (call scheduler.step() after it, count and append in the loop), make it a tensor "
        "that is changed in place (of tensors: old.copy_(new), or pass it in and return the new one), or, if nothing "
        "depends on it, name it in ignore=[...].",
    ),
    "inner-optimizer": (
        "it is made anew at each call, so it has to run inside the graph.",
        "use SGD, RMSprop or a fused optimizer there (torch.optim.Adam(..., fused=True)), or make it once, outside the "
        "step.",
    ),
    "iterator": (
        "a replay runs no Python and draws nothing: every step would train on what the capture drew.",
        "draw outside the step and pass what was drawn as an argument, or, if nothing depends on it, name it in "
        "ignore=[...].",
    ),
    "own-change": (
        "a replay runs no Python: the model would stay as the capture left it.",
        "change tensors in place (buffer.copy_(new), p.data.sub_(update)), and flags outside the step.",
    ),
    "ddp-stream": (
        "its accumulators remember the stream that DDP was built on, and CUDA records nothing on the default one. New "
        "ones could not be made: a loss of before is kept with its graph, or DDP has more than a reducer (mixed "
        "precision, an optimizer in backward, a hook in C++).",
        "drop or .detach() losses kept from before, or build DDP on the session's stream: `with session.stream(): "
        "model = DistributedDataParallel(model)`, and stepgraph.capture(step, session=session).",
    ),
    "reseed": (entry("reseed").why, entry("reseed").fix),
    "varying-output": (
        "a replay computes tensors; a plain value in the result would be that of the capture for ever.",
        "return a tensor (loss.detach(), not loss.item()), or compute the value outside the step.",
    ),
}


def own_change(step: str, what: str) -> CaptureError:
    """The error for a step that changes its own model behind the graph's back."""
    return obstacle_error(step, "own-change", f"the step itself {what}")


def obstacle_error(step: str, rule: str, what: str) -> CaptureError:
    """The error for what stands in the way of a replay."""
    why, fix = _WHY[rule]
    return CaptureError(f"{step}: {what}", rule=rule, why=why, fix=fix)


def refuse_obstacles(step: str, site: Site) -> None:
    """Raise for the first thing that warm-up found in the way of a replay."""
    for rule, obstacle in site.obstacles.items():
        why, fix = _WHY[rule]
        ignoring = to_ignore(obstacle.names) if obstacle.names else None
        if ignoring is None:
            fix = fix.replace(", or, if nothing depends on it, name it in ignore=[...]", "")
        else:
            fix = fix.replace("name it in ignore=[...]", ignoring)
        raise CaptureError(f"{step}: {obstacle.what}", rule=rule, why=why, fix=fix)
