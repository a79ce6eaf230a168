"""Tests of a product of parameters: continuous integration runs some of them, with each pair of values in at least one.

A fault mostly shows with one value, or with two together. Of three parameters with four values each there are 64
combinations, and 16 have all pairs. `@pytest.mark.pairwise` on a test chooses such combinations, always the same ones;
the others are marked `long`, and `make test-long` runs them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering(rows: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """The places of rows that have, together, each pair of values that any row has."""
    pairs = [frozenset(combinations(sorted(row.items(), key=lambda item: item[0]), 2)) for row in rows]
    left = set().union(*pairs)
    chosen = []
    while left:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & left))  # the first one, of several
        chosen.append(best)
        left -= pairs[best]
    return sorted(chosen)
