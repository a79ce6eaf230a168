"""The combinations that are run of a product have each pair of values."""

from itertools import combinations, product

from tests.pairwise import covering


def pairs_of(rows: list[dict[str, str]]) -> set[tuple[tuple[str, str], ...]]:
    return {pair for row in rows for pair in combinations(sorted(row.items()), 2)}


def test_covering_has_each_pair_in_few_rows() -> None:
    rows = [dict(zip("abc", values, strict=True)) for values in product("1234", repeat=3)]
    chosen = [rows[place] for place in covering(rows)]
    assert pairs_of(chosen) == pairs_of(rows)
    assert 16 <= len(chosen) <= 20


def test_covering_of_two_parameters_is_all_of_them() -> None:
    rows = [dict(zip("ab", values, strict=True)) for values in product("12", "123")]
    assert covering(rows) == list(range(6))
    assert covering(rows[:1]) == [0]
