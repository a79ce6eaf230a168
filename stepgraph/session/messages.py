"""A captured step or a graphed module warns or raises when a call differs from those before."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import torch

from stepgraph.errors import InvalidArgument, SignatureMismatch, StateChanged, nearest
from stepgraph.frames import warn_user
from stepgraph.guards.protocol import Change
from stepgraph.observe.eager_call import to_ignore
from stepgraph.oplog import Difference as OperationDifference
from stepgraph.signature import Difference, Signature, find_differences

_NUMBERS = (int, float, complex)

PASS_IT = "pass it as a tensor argument (a plain number gets a graph for each value)"
"""What to do about a host value that changes."""


def state_changed(step: str, why: str) -> StateChanged:
    """Under strict: something that a graph has baked in is not as it was."""
    return StateChanged(
        f"{step}: {why}",
        rule="state-changed",
        why="the captured graph goes on with what it was recorded with, and strict=True forbids anything else.",
        fix="call step.reset() after the change, or leave strict=False: the step is then captured again.",
    )


def warn_values_changed(step: str, changes: Sequence[Change], *, is_captured: bool, stays_eager: bool) -> None:
    """A host value that a graph has baked in, or would have, changed."""
    since = "capture" if is_captured else "the call before"
    if stays_eager:
        outcome = "A call like this one stays eager from now on."
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
    whose: str = "step",
    counted: str = "calls",
) -> None:
    """An audit has found that the step, or a module, would run other operations by now."""
    outcome = "Calls like this one stay eager from now on." if stays_eager else f"The {whose} is captured again."
    if changes:
        names = [change.name for change in changes]
        warn_user(
            f"{step}: a value that the {whose} reads has changed since capture   [host-value]\n  "
            + "\n  ".join(map(str, changes))
            + f"\n  at {found}\n{outcome}\nFix: {PASS_IT}, or, if nothing depends on it, {to_ignore(names)}."
        )
    else:
        warn_user(
            f"{step}: the {whose} would run other operations by now than were captured   [changed-operations]"
            f"\n  {found}\n{outcome} {replays} {counted} have run since it was last compared, and this is the "
            "first that shows it: they may have run what was captured.\nWhy: a replay runs no Python. Something that "
            "its code reads has changed, and it is out of reach of the watch (docs/equality.md).\n"
            f"Fix: {PASS_IT}, or hold it where the {whose} can name it."
        )


def warn_misspelt(ignore: Iterable[str], labels: Collection[str]) -> None:
    """Warn of names to ignore that no value in reach has, if one has a similar name.

    A value may have several names (`layers.0.scale`, `self.scale`), so the last part of a name decides. A name that is
    like no other may be that of a value out of the watch's reach.
    """
    known = set(map(_last_part, labels))
    for name in ignore:
        near = nearest(name, labels, likeness=0.8) if _last_part(name) not in known else None
        if near is not None:
            warn_user(
                f"ignore={[name]!r} has no effect: nothing of that name is in reach   [option]\n"
                f"Why: a value is ignored by the name that messages give it.\nFix: did you mean {near!r}?"
            )


def _last_part(name: str) -> str:
    """`scale` of `self.scale` and of `len(self.scale)`, `'a'` of `table['a']`."""
    return re.split(r"[.\[]", name.partition(" (")[0].rstrip("])"))[-1]


def warn_detached_results(leaves: Iterable[object]) -> None:
    """A step's results, where it runs no backward: one that could be differentiated is not what it looks like."""
    if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves):
        warn_user(
            "a result of the captured step requires a gradient, and comes back detached\n"
            "Why: a replay has no autograd graph. A backward outside of the step does not reach what is inside: a loss "
            "that this result is only a part of would be trained without it.\n"
            "Fix: call backward() inside the step. For evaluation, compute the result under torch.no_grad(). To graph "
            "a forward and its backward, use stepgraph.graph_modules."
        )


def warn_past_limit(
    step: str, reason: str, call: Signature, known: Iterable[tuple[Signature, bool]], *, strict: bool
) -> None:
    """A call found no graph, and gets none: how it differs from the nearest one. Raises under strict.

    `known` are the signatures that have a place, and whether each is captured yet.
    """
    compared = [(find_differences(signature, call), is_captured) for signature, is_captured in known]
    found, is_captured = min(compared, key=lambda pair: (len(pair[0]), not pair[1]), default=([], True))
    described = [d.describe("captured" if is_captured else "warming up with") for d in found[:8]]
    fix = _fewer_signatures(found)
    if strict:
        raise SignatureMismatch(
            f"{step}: a call with a new signature, {reason}",
            rule="max-graphs",
            details=described,
            why="each signature is a graph of its own, and strict=True forbids running it eagerly.",
            fix=fix,
        )
    lines = [f"{step}: this call runs eagerly, {reason}   [max-graphs]", *(f"  {line}" for line in described)]
    warn_user("\n".join([*lines, f"Fix: {fix}"]))


def _fewer_signatures(found: Sequence[Difference]) -> str:
    """What the user can do about these differences."""
    values = [d for d in found if d.kind is not None and not issubclass(d.kind, torch.Tensor)]
    if not values:
        return "pad inputs to a few shapes (buckets=), pass changing values as tensors, or raise max_graphs."
    unused = f"leave {', '.join(f'`{d.path}`' for d in values[:8])} out of the call if the step does not use it, "
    as_tensor = "pass it as a tensor if it does, " if any(d.kind in _NUMBERS for d in values) else ""
    return f"{unused}{as_tensor}or raise max_graphs."


def unsigned(error: Exception) -> str:
    """Why a module's call with an argument that no signature can be made of runs eagerly."""
    what = error.what if isinstance(error, InvalidArgument) else str(error).partition("\n")[0]
    return f"an argument that cannot be copied in: {what}   [host-data]"


def signature_mismatch(module: str, call: Signature, known: Iterable[Signature]) -> SignatureMismatch:
    """Under strict: a module's call is unlike those that have graphs, and gets none."""
    found = min((find_differences(signature, call) for signature in known), key=len, default=[])
    return SignatureMismatch(
        f"{module}: a call unlike those that have graphs",
        rule="max-graphs",
        details=[str(d) for d in found[:8]],
        why="each kind of call has graphs of its own, and strict=True forbids running it eagerly.",
        fix="pad inputs to a few shapes, or raise max_graphs.",
    )
