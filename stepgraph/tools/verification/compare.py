"""`compare` judges any two callables that should do the same: one that runs eagerly and one that replays graphs.

It knows nothing of stepgraph's own engines, so that graphs made by hand or by another library are judged alike. Three
runs begin at one state: eager, eager again, graphed. The first two give the program's own spread; where it is not zero,
no graph can be equal to both. After each step of each run all values are compared. If the graphed run differs, the
cause is looked for by experiments (`causes`), and the first module by probes (`probes`). However it ends, the state is
then what it was before.

Example:
    >>> state = Program(modules={"model": model}, optimizers={"optimizer": optimizer})
    >>> compare(train_step, replay_by_hand, batches, state).equal
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from stepgraph.core.errors import InvalidArgument, Location, StepgraphWarning
from stepgraph.engine.backends import backend_for
from stepgraph.tools.program import Program
from stepgraph.tools.verification.causes import (
    Cause,
    Pair,
    aliased_gradient,
    aliased_gradients,
    find_cause,
    first_module,
    overwritten_outputs,
    reused_output,
)
from stepgraph.tools.verification.costs import Cost, cost_of
from stepgraph.tools.verification.probes import first_differing_module
from stepgraph.tools.verification.trace import Batches, Difference, Row, Trace, differences, run, table, vary

__all__ = ["Comparison", "Program", "compare", "compare_pair", "eager_differs"]

Capture = Callable[[Callable[..., Any]], AbstractContextManager[Callable[..., Any]]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a comparison."""

    steps: int
    rows: tuple[Row, ...]
    """Graphed against eager, kind by kind."""
    spread: tuple[Row, ...]
    """Eager against eager."""
    first: Difference | None = None
    """The first difference of the graphed run."""
    module: str | None = None
    """The first module that differs, with what is known of it."""
    cause: Cause | None = None
    costs: tuple[Cost, ...] = ()
    """What a step costs: eager, then graphed."""
    notes: tuple[str, ...] = ()
    bounds: tuple[float, float] = (0.0, 0.0)
    """The bounds that the user gave: rtol, atol."""
    unsaved: tuple[Location | None, ...] = ()
    """The lines that write to memory which is neither compared nor known to be restored; None in a backward."""

    @property
    def equal(self) -> bool:
        """True if nothing differs, or nothing by more than the user allows, and all that was written was compared."""
        return self.cause is None and self.first is None and not self.unsaved

    @property
    def spread_is_zero(self) -> bool:
        """True if eager equals eager."""
        return not any(row.num_differing for row in self.spread)

    @property
    def within_spread(self) -> bool:
        """True if eager differs from eager, and no kind differs more in the graphed run than eager from itself."""
        own = {row.kind: row for row in self.spread}
        return not self.spread_is_zero and all(
            _size(row) <= _size(own[row.kind]) for row in self.rows if row.num_differing
        )


def _size(row: Row) -> float:
    if row.largest is None:
        return 0.0
    return float("inf") if row.largest.gap.max_abs is None else row.largest.gap.max_abs


def compare(
    eager: Callable[..., Any],
    graphed: Callable[..., Any],
    batches: Iterable[Any],
    state: Program,
    *,
    steps: int = 8,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Comparison:
    """Compare two callables on the same batches, from the same state, which they share and which is then restored."""
    taken = Batches.read(batches, steps)
    pair = Pair(eager, graphed, state, taken.calls, backend_for(state.device))
    found = compare_pair(pair, rtol=rtol, atol=atol)
    return replace(found, notes=(*taken.notes, *found.notes))


def compare_pair(
    pair: Pair,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    capture: Capture | None = None,
    holds: Collection[str] = ("outputs",),
    has_costs: bool = True,
    on_step: Callable[[], None] = lambda: None,
) -> Comparison:
    """Compare the two callables of a pair.

    `capture` captures another function as the graphed one was captured, for probes. `holds` are "outputs" and
    "gradients" that must stay as they are while the caller holds them. `has_costs`: further steps are timed.
    """
    if not pair.batches:
        raise InvalidArgument("there is no batch to compare on", rule="option", why="", fix="pass one batch or more.")
    program, backend = pair.program, pair.backend
    before = lambda index: vary(program, index)  # noqa: E731 (the same for three runs)
    with program.untouched() as start:
        logged = functools.partial(run, pair.eager, program, pair.batches, backend, writes=start.writes)
        eager = logged(before=before, on_step=on_step)
        costs = [cost_of("eager", pair.eager, pair.batches[-1], backend, eager.peak_bytes)] if has_costs else []
        start.restore()
        again = logged(before=before, on_step=on_step)
        own = list(differences(eager, again))
        del again
        start.restore()
        unsaved = start.writes.unsaved()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", StepgraphWarning)
            graphed = run(pair.graphed, program, pair.batches, backend, before=before, on_step=on_step)
            if has_costs:
                costs.append(cost_of("graphed", pair.graphed, pair.batches[-1], backend, graphed.peak_bytes))
        told = tuple(str(one.message) for one in seen if issubclass(one.category, StepgraphWarning))
        pair = replace(pair, warnings=told)
        found = list(differences(eager, graphed, rtol, atol))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StepgraphWarning)
            cause, module = _explain(pair, start, own, found, graphed, capture, holds)
    return Comparison(
        steps=len(pair.batches),
        rows=tuple(table(eager, found)),
        spread=tuple(table(eager, own)),
        first=found[0] if found else None,
        module=module,
        cause=cause,
        costs=tuple(costs),
        notes=tuple(text.partition("\n")[0] for text in told),
        bounds=(rtol, atol),
        unsaved=tuple(unsaved),
    )


def _explain(
    pair: Pair,
    start: Any,
    own: Sequence[Difference],
    found: Sequence[Difference],
    graphed: Trace,
    capture: Capture | None,
    holds: Collection[str],
) -> tuple[Cause | None, str | None]:
    agreement = pair.agreement
    if not agreement.any(bool(found)):
        cause = reused_output(overwritten_outputs(pair, start)) if "outputs" in holds else None
        if agreement.all(cause is None) and "gradients" in holds:
            cause = aliased_gradient(aliased_gradients(pair, start))
        return cause, None
    if agreement.any(bool(own)):
        return eager_differs(own), None
    step = agreement.least(found[0].step if found else len(pair.batches))
    cause = find_cause(pair, start, found, graphed, step)
    probed = first_differing_module(pair, start, step, capture)  # last: its hooks may make modules record again
    if probed is not None:
        return cause, f"{probed.name} ({probed.gap})"
    return cause, first_module(found, pair.program) if found else None


def eager_differs(own: Sequence[Difference]) -> Cause:
    """Say that no graph can be equal to two eager runs that differ."""
    what = f"two eager runs differ from step {own[0].step} on, first in {own[0]}" if own else "on another rank"
    return Cause("eager-differs", what)
