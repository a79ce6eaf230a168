"""Compare all mechanisms on one workload: `stepgraph bench --compare`.

Each mechanism runs alone, in a process of its own, from one seed; in a second pass they run in reverse order, so that a
machine that warms up or slows down shows as a spread and not as a winner. Each row is written to the result as soon as
it is there, and `--resume` goes on from it. Eager runs twice: how far its two runs differ, in time and in the loss, is
the noise that every other row is held against.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.lab.bench.jobs import JobServer, Record
from stepgraph.lab.bench.mechanisms import Mechanism
from stepgraph.tools.timeline import WORTHWHILE, StepTimes, quantile

PASSES = 2
Losses = Mapping[str, float | None]
"""The loss of each step; None where it was not finite."""


@dataclass(frozen=True, slots=True)
class Row:
    """A mechanism in the table: its figures over all passes, and how its losses compare with eager's."""

    mechanism: Mechanism
    step_ms: float | None
    spread: float | None
    """Largest over smallest median of the passes, less 1; None after a single pass."""
    error: str | None
    """The error of a pass that failed."""
    left_eager_at: int | None
    """The step whose loss is the first that differs from eager's; None if all are equal."""
    largest_gap: float
    """The largest difference of a loss from eager's."""
    early_gap: float
    """The largest difference of one of the first losses from eager's, as a part of eager's."""
    last_gap: float
    """The difference of the last loss from eager's, as a part of eager's."""
    diverges: bool
    """Whether its losses are further from eager's than the rounding of other kernels explains."""
    is_as_compiled: bool
    """Whether its losses are those of torch.compile alone, bit for bit: the same kernels, and nothing else changed."""
    is_compared: bool
    """Whether there are losses to compare with: those of eager, or of the model of its own that it trains."""
    reference_varies: bool
    """Whether those losses differ from run to run, so that no mechanism can have them."""
    figures: Mapping[str, Any]
    """The record of the faster pass."""
    p90_ms: float | None = None
    """Of the steps without an audit, in all passes; None in files without single steps."""
    audits: tuple[int, float] = (0, 0.0)
    """Timed steps with an audit in all passes, and the seconds that they added."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, the fastest first, and the winner with its reason."""

    rows: tuple[Row, ...]
    winner: str | None
    reason: str
    noise: float
    """Relative difference of eager's own step times."""
    eager_equals_eager: bool
    compiled_equals_compiled: bool
    """Whether torch.compile has the same losses in both passes: graphs of its kernels must have them then."""

    def row(self, name: str) -> Row | None:
        """The row of a mechanism."""
        return next((row for row in self.rows if row.mechanism.name == name), None)


def plan(mechanisms: Sequence[Mechanism], done: Sequence[Record] = ()) -> list[tuple[int, Mechanism]]:
    """Return what is left to run, in order: one pass forwards, the next one backwards."""
    finished = {(record["pass"], record["mechanism"]) for record in done}
    order = [
        (number, mechanism)
        for number in range(PASSES)
        for mechanism in (mechanisms if number % 2 == 0 else list(reversed(mechanisms)))
    ]
    return [(number, mechanism) for number, mechanism in order if (number, mechanism.name) not in finished]


def seconds_left(jobs: Sequence[tuple[int, Mechanism]], done: Sequence[Record]) -> float | None:
    """Estimate the time of the jobs that are left: what the same mechanism took, or else the mean of all.

    Example:
        >>> seconds_left([(1, eager)], [{"mechanism": "eager", "pass": 0, "job_s": 7.0}])
        7.0
    """
    finished = {(record["pass"], record["mechanism"]) for record in done}
    took = {record["mechanism"]: record["job_s"] for record in done if "job_s" in record}
    if not took:
        return None
    mean = statistics.fmean(took.values())
    left = [mechanism.name for number, mechanism in jobs if (number, mechanism.name) not in finished]
    return float(sum(took.get(name, mean) for name in left))


def run_all(
    server: JobServer,
    jobs: Sequence[tuple[int, Mechanism]],
    request: Mapping[str, Any],
    timeout_s: float,
    on_record: Callable[[Record], None],
) -> None:
    """Run all jobs one after the other; `on_record` gets each record when it is there."""
    for number, mechanism in jobs:
        begun, which = time.perf_counter(), {"mechanism": mechanism.name, "pass": number}
        record = server.run({**request, **which}, timeout_s)
        on_record(which | record | {"job_s": time.perf_counter() - begun})


def compare(mechanisms: Sequence[Mechanism], records: Sequence[Record]) -> Comparison:
    """Put the records of all passes together."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record["mechanism"], []).append(record)
    eager = [record for record in by_name.get("eager", []) if "error" not in record]
    again = [record for record in by_name.get("eager-again", []) if "error" not in record]
    reference = eager[0]["losses"] if eager else {}
    compiled = _losses(by_name.get("compile", ()))
    equal = all(left_at(reference, record["losses"]) is None for record in (*eager, *again))
    rows = [
        _row(mechanism, by_name[mechanism.name], _losses(by_name.get(mechanism.reference, ())), compiled, equal)
        for mechanism in mechanisms
        if mechanism.name in by_name
    ]
    rows.sort(key=lambda row: (row.step_ms is None, row.step_ms))
    times = [record["step_ms"] for record in (*eager, *again)]
    noise = max(times) / min(times) - 1 if times else 0.0
    passes = [record for record in by_name.get("compile", []) if "error" not in record]
    same = len(passes) > 1 and all(left_at(compiled, record["losses"]) is None for record in passes)
    winner, reason = choose_winner(rows, noise, equal, same)
    return Comparison(tuple(rows), winner, reason, noise, equal, same)


def _losses(records: Sequence[Record]) -> Losses:
    """The losses of the first of these runs that has some."""
    return next((record["losses"] for record in records if "error" not in record), {})


def _row(
    mechanism: Mechanism,
    records: Sequence[Record],
    reference: Losses,
    compiled: Losses,
    eager_equals_eager: bool,
) -> Row:
    good = [record for record in records if "error" not in record]
    failed = next((record for record in records if "error" in record), None)
    if not good:
        assert failed is not None
        return Row(mechanism, None, None, failed["error"], None, 0.0, 0.0, 0.0, False, False, False, False, {})
    times = [record["step_ms"] for record in good]
    best = min(good, key=lambda record: record["step_ms"])
    left = [at for record in good if (at := left_at(reference, record["losses"])) is not None]
    return Row(
        mechanism=mechanism,
        step_ms=statistics.fmean(times),
        spread=max(times) / min(times) - 1 if len(times) > 1 else None,
        error=None if failed is None else f"pass {failed['pass'] + 1} failed: {failed['error']}",
        left_eager_at=min(left) if left else None,
        largest_gap=max(largest_gap(reference, record["losses"]) for record in good),
        early_gap=max(early_gap(reference, record["losses"]) for record in good),
        last_gap=max(last_gap(reference, record["losses"]) for record in good),
        diverges=any(diverges(reference, record["losses"]) for record in good),
        is_as_compiled=mechanism.changes_kernels
        and mechanism.name != "compile"
        and bool(compiled)
        and all(left_at(compiled, record["losses"]) is None for record in good),
        is_compared=bool(reference),
        reference_varies=mechanism.reference == "eager" and not eager_equals_eager,
        figures=best,
        p90_ms=_p90(good),
        audits=(
            sum(len(_audits(record)["steps"]) for record in good),
            sum(_audits(record)["seconds"] for record in good),
        ),
    )


def _audits(record: Record) -> Mapping[str, Any]:
    return record.get("audits") or {"steps": (), "seconds": 0.0}


def _p90(records: Sequence[Record]) -> float | None:
    times = [StepTimes(tuple(r.get("step_ms_each", ())), frozenset(_audits(r)["steps"])).steady for r in records]
    return quantile([time for each in times for time in each], 0.9) if all(times) else None


def left_at(reference: Losses, losses: Losses) -> int | None:
    """Return the first step whose loss differs from the reference, of those that both have.

    Example:
        >>> left_at({"1": 2.5, "2": 2.4}, {"1": 2.5, "2": 2.3})
        2
    """
    shared = sorted(int(step) for step in reference.keys() & losses.keys())
    return next((step for step in shared if reference[str(step)] != losses[str(step)]), None)


def largest_gap(reference: Losses, losses: Losses) -> float:
    """Return the largest difference between two runs' losses; infinite if one of them has lost its numbers."""
    return max((_distance(*pair) for pair in _pairs(reference, losses)), default=0.0)


EARLY = 3
"""The steps whose losses show what one forward, one backward and one optimizer step do to rounding."""
_CLOSE, _WORSE = 0.01, 1.1


def early_gap(reference: Losses, losses: Losses) -> float:
    """Return the largest difference of the first three losses, as a part of the reference's.

    Example:
        >>> early_gap({"1": 10.0, "2": 8.0}, {"1": 10.0, "2": 9.0})
        0.125
    """
    return max((_gap(*pair) for pair in _pairs(reference, losses)[:EARLY]), default=0.0)


def last_gap(reference: Losses, losses: Losses) -> float:
    """Return the difference of the last loss that both runs have, as a part of the reference's.

    Example:
        >>> last_gap({"1": 3.0, "2": 2.0}, {"1": 3.0, "2": 2.5})
        0.25
    """
    return max((_gap(*pair) for pair in _pairs(reference, losses)[-1:]), default=0.0)


def diverges(reference: Losses, losses: Losses) -> bool:
    """Tell training that goes wrong from other rounding.

    Training amplifies rounding, at a high learning rate within a few steps. So the first three losses are compared,
    which depend on the forward, the backward and the optimizer: 1 % is far more than rounding. After that the last loss
    must not be worse than the reference's by more than a tenth.

    Example:
        >>> diverges({"1": 10.0, "2": 8.0}, {"1": 10.0, "2": 9.0})
        True
    """
    if early_gap(reference, losses) > _CLOSE:
        return True
    last = _pairs(reference, losses)[-1:]
    return any(found is None or found > _WORSE * known for known, found in last if known is not None)


def _pairs(reference: Losses, losses: Losses) -> list[tuple[float | None, float | None]]:
    """The losses of the steps that both runs have, in order."""
    return [(reference[step], losses[step]) for step in sorted(reference.keys() & losses.keys(), key=int)]


def _distance(known: float | None, found: float | None) -> float:
    if known == found:
        return 0.0
    return math.inf if known is None or found is None else abs(found - known)


def _gap(known: float | None, found: float | None) -> float:
    """The distance as a part of the known loss."""
    distance = _distance(known, found)
    return distance / abs(known) if known and distance else distance


def choose_winner(
    rows: Sequence[Row], noise: float, eager_equals_eager: bool, compiled_equals_compiled: bool = False
) -> tuple[str | None, str]:
    """Choose the mechanism to use, of those that train what eager trains, and say why.

    That is the fastest one, unless a simpler one is nearly as fast: eager is simpler than torch.compile, and both are
    simpler than graphs. Nearly as fast is a mechanism whose step the fastest would cut by less than 5 %, the threshold
    of `advise`, or by less than the passes differ. Of equally simple ones the one with the least memory is chosen.

    A mechanism whose kernels are eager's own must have eager's losses, bit for bit, wherever eager equals itself. Our
    graphs of compiled kernels must have the losses of torch.compile, wherever it equals itself. Other compiled kernels
    round differently, and are trusted unless they diverge. A mechanism that trains a model of its own is not eager's
    rival.
    """
    eager = next((row for row in rows if row.mechanism.name == "eager"), None)
    if eager is None or eager.step_ms is None:
        return None, f"eager {'was not asked for' if eager is None else 'failed'}, so there is nothing to compare with"
    whole = [row for row in rows if row.step_ms is not None and row.error is None]
    sound = [row for row in whole if _is_sound(row, eager_equals_eager, compiled_equals_compiled)]
    fastest = min([eager, *sound], key=_ms)
    near = [row for row in (eager, *sound) if _saving(row, fastest) < _margin(row, fastest, noise)]
    best = min(near, key=lambda row: (row.mechanism.demands, _reserved(row) or 0, _ms(row)))
    saved, title = f"{100 * _saving(best, fastest):.1f} %", fastest.mechanism.title
    if best.mechanism.whose == "eager":
        margin = f"{100 * _margin(eager, fastest, noise):.0f} % of its step"
        spread = ", by which runs of one mechanism differ" if _margin(eager, fastest, noise) > WORTHWHILE else ""
        rival = "" if fastest.mechanism.whose == "eager" else f'; "{title}" saves {saved}'
        return "eager", f"nothing saves {margin}{spread}{rival}"
    losses = "the losses of eager"
    if best.mechanism.changes_kernels:
        losses = "the losses of torch.compile" if best.is_as_compiled else "other kernels, which round differently"
    reason = f"{eager.step_ms / _ms(best):.2f} times as fast as eager, with {losses}"
    if best is not fastest:
        is_simpler = best.mechanism.demands < fastest.mechanism.demands
        price = "too little for what it asks of a program" if is_simpler else "and takes more memory"
        reason += f'; "{title}" saves {saved} more, {price}'
    return best.mechanism.name, reason


def _ms(row: Row) -> float:
    assert row.step_ms is not None
    return row.step_ms


def _saving(row: Row, fastest: Row) -> float:
    """The part of a row's step that the fastest mechanism saves."""
    return 1 - _ms(fastest) / _ms(row)


def _margin(row: Row, fastest: Row, noise: float) -> float:
    """The saving up to which a row is nearly as fast as the fastest one."""
    spreads = noise if row.mechanism.whose == "eager" else row.spread or 0.0, fastest.spread or 0.0
    return max(WORTHWHILE, *(1 - 1 / (1 + spread) for spread in spreads))


def _reserved(row: Row) -> int | None:
    found: int | None = row.figures.get("memory", {}).get("reserved")
    return found


def _is_sound(row: Row, eager_equals_eager: bool, compiled_equals_compiled: bool) -> bool:
    if row.mechanism.reference != "eager":
        return False
    if row.mechanism.changes_kernels and row.mechanism.whose == "stepgraph" and compiled_equals_compiled:
        return row.is_as_compiled
    if row.mechanism.changes_kernels or not eager_equals_eager:
        return not row.diverges
    return row.left_eager_at is None
