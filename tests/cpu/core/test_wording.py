"""English around values: the number of a noun, and the article of a name."""

from __future__ import annotations

from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch

import stepgraph
from stepgraph.core.wording import counted, quantities, singular, with_article


@pytest.mark.parametrize(
    ("count", "names", "expected"),
    [
        (0, "calls", "0 calls"),
        (1, "calls", "1 call"),
        (2, "calls", "2 calls"),
        (1, "entries", "1 entry"),
        (1, "losses", "1 loss"),
        (1, "processes", "1 process"),
        (1, "microbatches", "1 microbatch"),
        (1, "graphed modules", "1 graphed module"),
        (1, "nodes", "1 node"),
    ],
)
def test_counted_takes_the_plural_off_one(count: int, names: str, expected: str) -> None:
    assert counted(count, names) == expected


def test_counted_takes_a_singular_with_its_verb() -> None:
    assert [counted(n, "modules get", "module gets") for n in (1, 3)] == ["1 module gets", "3 modules get"]


def test_singular_leaves_what_is_singular() -> None:
    assert [singular(word) for word in ("loss", "call", "boxes", "sums")] == ["loss", "call", "box", "sum"]


def test_quantities_leaves_out_what_is_zero_or_unknown() -> None:
    assert quantities(graphs=1, nodes=None, captures=0, argument_sets=2) == "1 graph, 2 argument sets"


def test_with_article_goes_by_the_sound() -> None:
    class LSTMCell:
        pass

    kinds = (int, float, list, object, OrderedDict, UserDict, np.ndarray, LSTMCell)
    found = [with_article(kind) for kind in kinds]
    assert found == [
        *("an int", "a float", "a list", "an object"),
        *("an OrderedDict", "a UserDict", "an ndarray", "an LSTMCell"),
    ]
    words = ("8x8 tensor", "80x1 tensor", "4x4 tensor", "18x2 tensor", "180x2 tensor", "H200", "B200", "GPT", "MLP")
    assert [with_article(word).split()[0] for word in words] == ["an", "an", "a", "an", "a", "an", "a", "a", "an"]
    assert with_article("union") == "a union"


def test_messages_name_types_with_their_articles() -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="capture got 3, an int, which cannot be called"):
        stepgraph.capture(3)
    with pytest.raises(stepgraph.InvalidArgument, match=r"the scope has 0, which is an int"):
        stepgraph.graph_modules(torch.nn.Linear(1, 1), 0)
