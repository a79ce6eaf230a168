"""Warnings and errors of captured steps and graphed modules when a call differs from earlier ones."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Sequence
from types import CodeType

import torch

from stepgraph.core.errors import CaptureError, InvalidArgument, SignatureMismatch, StateChanged, nearest
from stepgraph.core.frames import warn_user
from stepgraph.core.wording import counted
from stepgraph.engine.guards.protocol import Change
from stepgraph.engine.guards.signature import Difference, Signature, find_differences
from stepgraph.engine.observe.eager_call import to_ignore
from stepgraph.engine.observe.lines import line_of_use
from stepgraph.engine.oplog import Difference as OperationDifference

_NUMBERS = (int, float, complex)

PASS_IT = "pass it as a tensor argument (a plain number gets a graph for each value)"
"""The fix for a host value that changes."""


def state_changed(step: str, why: str) -> StateChanged:
    """Make the error under strict: something baked into a graph has changed."""
    return StateChanged(
        f"{step}: {why}",
        rule="state-changed",
        why="the captured graph keeps the old value, and strict=True forbids to capture again silently.",
        fix="call step.reset() after the change, or leave strict=False: then the step is captured again.",
    )


def warn_values_changed(step: str, changes: Sequence[Change], *, is_captured: bool, pause: int) -> None:
    """Warn that a host value changed that a graph has baked in, or would bake in. `pause`: eager calls that follow."""
    since = "capture" if is_captured else "the call before"
    if pause:
        outcome = _paused(pause)
    elif is_captured:
        outcome = "The step is captured again."
    else:
        outcome = "This call runs eagerly, and the next one like it is captured."
    warn_user(
        f"{step}: a value that the step reads has changed since {since}   [host-value]\n  "
        + "\n  ".join(map(str, changes))
        + f"\n{outcome}\nFix: {PASS_IT}, or, if nothing depends on it, {to_ignore([c.name for c in changes])}."
    )


def warn_operations_changed(
    step: str,
    found: OperationDifference,
    changes: Sequence[Change],
    replays: int,
    *,
    stays_eager: bool,
    pause: int = 0,
    whose: str = "step",
    names: str = "calls",
) -> None:
    """Warn that an audit found other operations: those that the step, or a module, would run now.

    `stays_eager`: for good, or for `pause` calls. `names` are what is counted.
    """
    eager = _paused(pause) if pause else "Calls like this one stay eager from now on."
    outcome = eager if stays_eager else f"The {whose} is captured again."
    if changes:
        ignored = to_ignore([change.name for change in changes])
        warn_user(
            f"{step}: a value that the {whose} reads has changed since capture   [host-value]\n  "
            + "\n  ".join(map(str, changes))
            + f"\n  at {found}\n{outcome}\nFix: {PASS_IT}, or, if nothing depends on it, {ignored}."
        )
    else:
        warn_user(
            f"{step}: the operations of the {whose} have changed since capture   [changed-operations]"
            f"\n  {found}\n{outcome} Since the last comparison {counted(replays, names)} may have replayed the old "
            "operations.\nWhy: a replay runs no Python. A value that the code reads has changed, and the watch cannot "
            f"see it (docs/equality.md).\nFix: {PASS_IT}, or keep it where the code of the {whose} can name it."
        )


def keeps_changing(step: str, names: Sequence[str], ran: Iterable[CodeType]) -> StateChanged:
    """Make the error for values that change so often that each change cannot be audited."""
    codes = list(ran)
    where = next((line for name in names if (line := line_of_use(name, codes)) is not None), None)
    return StateChanged(
        f"{step}: a value that the step can read changes at almost every call: {', '.join(names)}",
        rule="host-value",
        details=[f"at    {where}"] if where is not None else (),
        why="its changes had no effect so far, which proves nothing about the next one, and what the step does with "
        "it could not be traced. To compare at each change costs more than a graph gains.",
        fix=f"pass what the step decides by it as an argument (`last=True`), or, if nothing depends on it, "
        f"{to_ignore(names)}.",
    )


def warn_ignored_counter(step: str, changes: Sequence[Change]) -> None:
    """Warn of ignored values that the step itself changes."""
    warn_user(
        f"{step}: the step itself changes a value that `ignore=` names   [host-value]\n  "
        + "\n  ".join(map(str, changes))
        + "\nWhy: a replay runs no Python. The value stands still while calls are replayed."
        + "\nFix: change it outside the step, or leave it if nothing reads it."
    )


def warn_other_answer(step: str, changes: Sequence[Change], whose: str, calls: str) -> None:
    """Warn that a step or module has decided otherwise about a host value than when it was captured.

    `calls` says how calls with another answer go on.
    """
    warn_user(
        f"{step}: a value that the {whose} reads has changed since capture   [host-value]\n  "
        + "\n  ".join(map(str, changes))
        + f"\nThe {whose} decides by it: calls with another answer {calls}."
        + f"\nFix: {PASS_IT}, or, if nothing depends on it, {to_ignore([change.name for change in changes])}."
    )


def _paused(calls: int) -> str:
    return f"The next {calls} calls like this one stay eager, then the step is tried again."


def warn_misspelt(ignore: Iterable[str], labels: Collection[str]) -> None:
    """Warn of names in `ignore` that no watched value has, if one has a similar name.

    A value may have several names (`layers.0.scale`, `self.scale`), so only the last parts of names are compared. A
    name that is not similar to any other may belong to a value that the watch cannot reach.
    """
    known = set(map(_last_part, labels))
    for name in ignore:
        near = nearest(name, labels, likeness=0.8) if _last_part(name) not in known else None
        if near is not None:
            warn_user(
                f"ignore={[name]!r} has no effect: no watched value has this name   [option]\n"
                f"Why: ignore= takes the names that messages show.\nFix: did you mean {near!r}?"
            )


def _last_part(name: str) -> str:
    """Return `scale` for `self.scale` and for `len(self.scale)`, `'a'` for `table['a']`."""
    return re.split(r"[.\[]", name.partition(" (")[0].rstrip("])"))[-1]


def warn_detached_results(leaves: Iterable[object]) -> None:
    """Warn of results that require a gradient, for a step that runs no backward: replays return them detached."""
    if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves):
        warn_user(
            "a result of the captured step requires a gradient, but is returned detached\n"
            "Why: a replay has no autograd graph. A backward outside the step does not reach its inside: a loss that "
            "uses this result as one part would train without that part.\n"
            "Fix: call backward() inside the step. For evaluation, compute the result under torch.no_grad(). To graph "
            "a forward and its backward, use stepgraph.graph_modules."
        )


def warn_past_limit(
    step: str, reason: str, call: Signature, known: Iterable[tuple[Signature, bool]], *, strict: bool
) -> None:
    """Warn that a call gets no graph, and how it differs from the nearest signature. Raise under strict.

    `known` are the signatures that have a place, each with a flag that says whether it is captured.
    """
    compared = [(find_differences(signature, call), is_captured) for signature, is_captured in known]
    found, is_captured = min(compared, key=lambda pair: (len(pair[0]), not pair[1]), default=([], True))
    described = [d.describe("captured" if is_captured else "warming up with") for d in found[:8]]
    fix = _fewer_signatures(found)
    if strict:
        raise _mismatch(f"{step}: this call has a new signature, {reason}", described, fix)
    lines = [f"{step}: this call runs eagerly, {reason}   [max-graphs]", *(f"  {line}" for line in described)]
    warn_user("\n".join([*lines, f"Fix: {fix}"]))


def _fewer_signatures(found: Sequence[Difference]) -> str:
    """Return a fix for these differences."""
    values = [d for d in found if d.kind is not None and not issubclass(d.kind, torch.Tensor)]
    if not values:
        return "pad inputs to a few shapes (buckets=), pass changing values as tensors, or raise max_graphs."
    unused = f"leave {', '.join(f'`{d.path}`' for d in values[:8])} out of the call if the step does not use it, "
    as_tensor = "pass it as a tensor if it does, " if any(d.kind in _NUMBERS for d in values) else ""
    return f"{unused}{as_tensor}or raise max_graphs."


def unsigned(error: Exception) -> str:
    """Describe why a module's call runs eagerly: an argument has no signature."""
    what = error.what if isinstance(error, InvalidArgument) else str(error).partition("\n")[0]
    return f"an argument cannot be copied in: {what}   [host-data]"


def signature_mismatch(module: str, call: Signature, known: Iterable[Signature]) -> SignatureMismatch:
    """Make the error under strict for a module's call that differs from all calls with graphs."""
    found = min((find_differences(signature, call) for signature in known), key=len, default=[])
    fix = "pad inputs to a few shapes, or raise max_graphs."
    return _mismatch(f"{module}: this call differs from those that have graphs", list(map(str, found[:8])), fix)


def _mismatch(what: str, details: Sequence[str], fix: str) -> SignatureMismatch:
    why = "each signature needs its own graphs, and strict=True forbids to run the call eagerly."
    return SignatureMismatch(what, rule="max-graphs", details=details, why=why, fix=fix)


def refuse_second_thread(name: str) -> None:
    """Refuse a call that comes while another thread is in a call of the same session.

    A thread of autograd's that runs a backward for the call under way is let in: Python did not start it.
    """
    is_autograds = isinstance(threading.current_thread(), threading._DummyThread)
    if not is_autograds or torch._C._current_graph_task_id() == -1:
        raise CaptureError(
            f"{name}: another thread is in a call of it, or of something that shares its memory",
            rule="concurrent-call",
            details=[f"this call came from the thread `{threading.current_thread().name}`, and has done nothing"],
        )
