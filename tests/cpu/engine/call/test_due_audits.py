"""The counts at which audits are due."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from stepgraph.engine.call.proof import next_audit


def due(audit: str | int, number: int) -> list[int]:
    def counts() -> Iterator[int]:
        replays = 0
        while True:
            replays = next_audit(audit, replays)
            yield replays

    return list(itertools.islice(counts(), number))


def test_due_counts_alternate_and_share_no_factor() -> None:
    found = due("auto", 40)
    assert all(one % 2 != two % 2 and math.gcd(one, two) == 1 for one, two in itertools.pairwise(found))
    assert sum(count <= 64 for count in found) == 9
    assert all(two - one <= 50_010 for one, two in itertools.pairwise(found))


@pytest.mark.parametrize("period", [2, 3, 4, 8, 16])
def test_due_counts_meet_a_condition_of_any_period(period: int) -> None:
    """A condition that no watch sees, in any phase, is met by an audit, and so is its opposite."""
    met = {count % period for count in due("auto", 40)}
    assert met == set(range(period)) if period <= 4 else len(met) > period // 2
    met = {count % period for count in due(period, 4 * period)}
    assert met == set(range(period))


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_due_counts_are_at_most_so_many_apart(every: int) -> None:
    found = [0, *due(every, 30)]
    assert {two - one for one, two in itertools.pairwise(found)} <= {every, max(every - 1, 1)}


def test_due_count_comes_after_any_number_of_replays() -> None:
    assert all(next_audit(audit, replays) > replays for audit in ("auto", 1, 2, 5) for replays in range(300))
