"""Which numbers get a stand-in: those whose every use, as the source shows it, is heard."""

from __future__ import annotations

import linecache
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepgraph.engine.guards.host_values.naming import Label
from stepgraph.engine.guards.host_values.parts import Place, attribute_of
from stepgraph.engine.guards.host_values.uses import Uses


def step_of(folder: Path, text: str) -> tuple[list[types.CodeType], dict[str, Any]]:
    """The code of all functions in a file, and what it defines."""
    file = folder / "program.py"
    file.write_text(text)
    linecache.checkcache(str(file))
    scope: dict[str, Any] = {"math": math}
    module = compile(text, str(file), "exec")
    exec(module, scope)
    found: list[types.CodeType] = []
    waiting = [module]
    while waiting:
        inner = [constant for constant in waiting.pop().co_consts if type(constant) is types.CodeType]
        found += inner
        waiting += inner
    return found, scope


def only_asks(folder: Path, text: str) -> bool:
    """Whether code only asks what `trainer.n` is."""
    codes, _ = step_of(folder, text)
    trainer = types.SimpleNamespace(n=3)
    return Uses(codes).only_ask(Place(Label("trainer.n"), vars(trainer), "n", 3, True))


HEARD = {
    "comparison": "if trainer.n % 3 == 2: work()",
    "chain": "if 3 <= trainer.n < 30 or trainer.n in (40, 41): work()",
    "is none": "if trainer.n is None: work()",
    "truth": "work() if not trainer.n & 1 else None",
    "local": "k = trainer.n // 3\n    if k % 3 == 2 and k > 4: work()",
    "walrus": "if (k := trainer.n) > 2 and k < 5: work()",
    "index": "work([1, 2, 3][trainer.n], {}, [1][: trainer.n])",
    "format": "work(f'{trainer.n:3d}')",
    "conversion": "for _ in range(trainer.n): work()",
    "maths": "work(math.log(trainer.n))",
    "smallest": "if min(10, trainer.n) == 10: work()",
    "values": "match trainer.n:\n        case 1 | 2: work()\n        case _: pass",
    "tuples": "if (trainer.n % 3, 1) == (2, 1): work()",
    "count": "trainer.n += 1",
    "another count": "trainer.n = getattr(trainer, 'n', 0) + 1",
    "helper": "if last(trainer.n): work()",
    "helper by name": "if last(count=trainer.n): work()",
    "helper that returns": "if half(trainer.n) == 2: work()",
    "method of that name": "other.n()",
    "attribute": "work(trainer.n.bit_length())",
    "comprehension": "work([i for i in (1, 2) if i < trainer.n])",
}
UNHEARD = {
    "identity": "if trainer.n is not True: work()",
    "identity in any": "if any(trainer.n is c for c in (1, 2)): work()",
    "type": "if type(trainer.n) is int: work()",
    "pattern of a class": "match trainer:\n        case object(n=True): work()",
    "pattern of a dict": "match vars(trainer):\n        case {'n': True}: work()",
    "pattern that names": "match trainer.n:\n        case k: work(k)",
    "unknown function": "if decide(trainer.n): work()",
    "container": "work({'big': trainer.n})",
    "stored": "if True: state['phase'] = trainer.n // 20",
    "stored attribute": "other.phase = trainer.n",
    "set elsewhere": "trainer.n = 5",
    "global": "global KEPT\n    KEPT = trainer.n",
    "helper that asks the type": "if typed(trainer.n): work()",
    "helper that returns what is asked": "if half(trainer.n) is 2: work()",
    "all attributes": "work(vars(trainer))",
    "attribute by a name": "work(getattr(trainer, 'n' + ''))",
    "result": "return trainer.n",
    "yielded": "yield trainer.n",
    "by a string": "work('n')",
    "argument after a star": "if third(*state, trainer.n): work()",
    "argument of a star": "if last(*[trainer.n]): work()",
    "local that is global": "global KEPT\n    KEPT = k = trainer.n // 3",
}
PROGRAM = """
def last(count):
    return count % 3 == 2

def half(count):
    return count // 2

def typed(count):
    return type(count) is int

def third(one, two, three):
    return two == 1 or type(three) is int

class Odd:
    def __eq__(self, other):
        return OPERATOR

def step(trainer, other, state, work):
    BODY
"""


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("body", HEARD.values(), ids=HEARD)
def test_number_that_is_only_asked_gets_a_stand_in(body: str, tmp_path: Path) -> None:
    assert only_asks(tmp_path, PROGRAM.replace("BODY", body).replace("OPERATOR", "other % 2 == 1"))


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("body", UNHEARD.values(), ids=UNHEARD)
def test_number_with_another_use_gets_none(body: str, tmp_path: Path) -> None:
    assert not only_asks(tmp_path, PROGRAM.replace("BODY", body).replace("OPERATOR", "other % 2 == 1"))


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_number_in_an_own_operator_that_asks_more_gets_none(tmp_path: Path) -> None:
    body = "if Odd() == trainer.n: work()"
    assert only_asks(tmp_path, PROGRAM.replace("BODY", body).replace("OPERATOR", "other % 2 == 1"))
    assert not only_asks(tmp_path, PROGRAM.replace("BODY", body).replace("OPERATOR", "other is True"))


@pytest.mark.parametrize("name", ["<nowhere>", "/nowhere/program.py"])
def test_code_without_source_is_no_proof(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(compile("def step(trainer):\n    return trainer.n > 3", name, "exec"), scope)
    place = Place(Label("trainer.n"), {"n": 3}, "n", 3, True)
    assert not Uses([scope["step"].__code__]).only_ask(place)


def closed_over(make: Callable[[], Any]) -> tuple[Any, types.CellType]:
    step = make()
    return step, step.__closure__[0]


def test_variable_of_a_closure_is_followed_by_its_name() -> None:
    def asks() -> Any:
        count = 3
        return lambda: count % 2 == 1

    def keeps() -> Any:
        count = 3
        return lambda: [count]

    for make, expected in ((asks, True), (keeps, False)):
        step, cell = closed_over(make)
        place = Place(Label("count"), cell, "cell_contents", 3, True, attribute_of)
        assert Uses([step.__code__]).only_ask(place) is expected


def test_item_of_a_list_gets_no_stand_in() -> None:
    place = Place(Label("flags[0]"), [True], 0, True, True)
    assert not Uses([]).only_ask(place)
