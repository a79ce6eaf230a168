"""The part in C++: built by torch on this machine, it answers as the Python that it stands for."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from stepgraph.commands.cli import app
from stepgraph.core.errors import BuildError, StepgraphWarning
from stepgraph.engine.backends.native import library
from stepgraph.engine.backends.native.row import GuardRow
from stepgraph.engine.guards.layout import layout_of
from tests.forked import NONE

ROOT = Path(__file__).parents[2]
SUITES = [
    "tests/cpu/engine/step",
    "tests/cpu/engine/parts/modules",
    "tests/cpu/engine/record/pair",
    "tests/cpu/engine/call",
    "tests/cpu/engine/guards",
    "tests/cpu/engine/backends/native",
    "tests/contract/test_guards.py",
    "tests/contract/test_model_changes.py",
]
SUITES += ["tests/contract/test_watched_values.py", "tests/contract/test_module_state.py"]
pytestmark = pytest.mark.xdist_group("library")  # one worker: the library is built once
runner = CliRunner()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the library lies: built once, and in use."""
    path = tmp_path_factory.mktemp("extensions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(path))
        result = runner.invoke(app, ["native", "--json"])
        assert json.loads(result.stdout)["built"] is False
        result = runner.invoke(app, ["native", "--build", "--json"])
        assert result.exit_code == 0, result.output
        values = json.loads(result.stdout)
        assert (values["built"], values["path"]) == (True, str(library.location()))
        library.native_row.cache_clear()
        yield path
    library.native_row.cache_clear()


# -- the row by itself


class Thing:
    """Something with an attribute."""

    value: Any = None


def filled_row(keep: dict[str, Any]) -> GuardRow:
    """A row with every kind of expectation; what it is about goes to `keep`."""
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.zeros(4, 4)
    keep.update(
        thing=Thing(),
        slots={"one": object(), "two": object()},
        held={"one": object(), "none": None, "other": 0},
        whole={"a": nn.Linear(1, 1), "b": None},
        modes=[{"training": True}, {"training": False}],
        values=[object()],
        parameter=parameter,
        frozen=nn.Parameter(torch.ones(2), requires_grad=False),
        answers=[True],
        hook=nn.Linear(1, 1),
    )
    keep["thing"].value = object()
    row = GuardRow()
    row.attribute(keep["thing"], "value", keep["thing"].value)
    row.item(keep["slots"], "one", keep["slots"]["one"])
    row.item(keep["values"], 0, keep["values"][0])
    row.items(keep["slots"], dict(keep["slots"]))
    row.held(vars(keep["thing"]), dict(vars(keep["thing"])))
    row.held(keep["held"], {"one": keep["held"]["one"], "none": None})
    row.contents(keep["whole"], dict(keep["whole"]))
    row.column(keep["modes"], "training", [True, False])
    row.length(keep["values"], 1)
    row.class_of(keep["hook"], nn.Linear)
    row.layouts([layout_of(parameter)], [lambda: parameter.data_ptr() == address and parameter.shape == (4, 4)])
    address = parameter.data_ptr()
    grad, frozen = parameter.grad, keep["frozen"]
    row.gradients(
        [(parameter, grad, True), (frozen, None, False)],
        lambda: parameter.grad is grad and parameter.requires_grad and frozen.grad is None and not frozen.requires_grad,
    )
    row.ask(lambda: keep["answers"][-1])
    return row


def _subclass(thing: Any) -> None:
    thing.__class__ = type("Other", (nn.Linear,), {})


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "attribute": lambda k: setattr(k["thing"], "value", object()),
    "attribute gone": lambda k: delattr(k["thing"], "value"),
    "item": lambda k: k["slots"].update(one=object()),
    "item gone": lambda k: k["slots"].pop("one"),
    "item of several": lambda k: k["slots"].update(two=object()),
    "item of a list": lambda k: k["values"].__setitem__(0, object()),
    "a list's length": lambda k: k["values"].append(1),
    "a list emptied": lambda k: k["values"].clear(),
    "held: another": lambda k: k["held"].update(one=object()),
    "held: None gone": lambda k: k["held"].pop("none"),
    "whole: another": lambda k: k["whole"].update(a=nn.Linear(1, 1)),
    "whole: one more": lambda k: k["whole"].update(c=None),
    "whole: one less": lambda k: k["whole"].pop("b"),
    "column": lambda k: k["modes"][1].update(training=True),
    "column gone": lambda k: k["modes"][0].clear(),
    "class": lambda k: _subclass(k["hook"]),
    "data moved": lambda k: setattr(k["parameter"], "data", torch.ones(4, 4)),
    "data cut": lambda k: setattr(k["parameter"], "data", k["parameter"].data[:2]),
    "gradient gone": lambda k: setattr(k["parameter"], "grad", None),
    "gradient replaced": lambda k: setattr(k["parameter"], "grad", torch.zeros(4, 4)),
    "gradient where none was": lambda k: setattr(k["frozen"], "grad", torch.zeros(2)),
    "flag": lambda k: k["parameter"].requires_grad_(False),
    "flag of a frozen one": lambda k: k["frozen"].requires_grad_(True),
    "an answer": lambda k: k["answers"].append(False),
    "an answer that raises": lambda k: k["answers"].clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_row_denies_what_python_denies(name: str) -> None:
    keep: dict[str, Any] = {}
    row = filled_row(keep)
    asked = row.question()
    assert type(asked).__name__ == "Row"
    assert asked() is row.holds() is True
    CHANGES[name](keep)
    assert asked() is row.holds() is False


@pytest.mark.parametrize(
    "change", ["strides", "dtype", "storage gone"], ids=["other strides", "another dtype", "no memory any more"]
)
def test_row_knows_the_form_of_tensors(change: str) -> None:
    tensor = torch.ones(4, 4)
    row = GuardRow()
    row.layouts([layout_of(tensor)], [])
    asked = row.question()
    assert asked()
    if change == "strides":
        tensor.data = tensor.data.t()
    elif change == "dtype":
        tensor.data = tensor.data.view(torch.int32)
    else:
        tensor.untyped_storage().resize_(0)
    assert not asked()


def test_row_stands_for_changes_in_place() -> None:
    keep: dict[str, Any] = {}
    asked = filled_row(keep).question()
    keep["parameter"].data.add_(1)
    keep["parameter"].grad.add_(1)
    assert asked()


def test_row_of_other_classes_of_tensors_is_asked_in_python() -> None:
    class Marked(nn.Parameter):
        pass

    answers = [True]
    row = GuardRow()
    row.layouts([layout_of(Marked(torch.ones(2)))], [lambda: answers[0]])
    asked = row.question()
    assert asked()
    answers[0] = False
    assert not asked()


def test_row_lets_an_interrupt_through() -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    row = GuardRow()
    row.ask(interrupted)
    with pytest.raises(KeyboardInterrupt):
        row.question()()


def test_row_in_a_cycle_is_collected() -> None:
    thing = Thing()
    row = GuardRow()
    row.attribute(thing, "value", None)
    row.layouts([layout_of(tensor := torch.ones(2))], [])
    thing.__dict__["row"] = row.question()
    seen, data = weakref.ref(thing), weakref.ref(tensor)
    del thing, row, tensor
    gc.collect()
    assert seen() is None
    assert data() is None


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ([], (), (), (), (), (), ()),
        (((1, "a"),), (), (), (), (), (), ()),
        ((), (), (([], "long"),), (), (), (), ()),
        ((), (), (), (), ((1, 2, torch.float32, (), ()),), (), ()),
        ((), (), (), (), ((torch.ones(1), 2, "float", (1,), (1,)),), (), ()),
        ((), (), (), (), ((torch.ones(1), "here", torch.float32, (1,), (1,)),), (), ()),
        ((), (), (), (), ((torch.ones(1), 2, torch.float32, ("one",), (1,)),), (), ()),
        ((), (), (), (), (), ((torch.ones(1), 3, True),), ()),
    ],
)
def test_row_refuses_what_it_cannot_be_made_of(arguments: tuple[Any, ...]) -> None:
    make = library.native_row()
    assert make is not None
    with pytest.raises((TypeError, IndexError)):
        make(*arguments)


# -- the whole of it


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", ["not slow and not long", pytest.param("slow", marks=pytest.mark.long)])
def test_suites_pass_with_the_library(folder: Path, which: str) -> None:
    """The tests that are about what is noticed, in processes that find the library."""
    environment = os.environ | NONE | {"TORCH_EXTENSIONS_DIR": str(folder)}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", which, *SUITES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    program = "from stepgraph.engine.backends.native.library import native_row; assert native_row() is not None"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=60)


def test_library_that_cannot_be_loaded_is_reported_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library.location().parent.mkdir(parents=True)
    library.location().write_bytes(b"half a library")
    library.native_row.cache_clear()
    with pytest.warns(StepgraphWarning, match=r"stepgraph native --build"):
        assert library.native_row() is None
    library.native_row.cache_clear()
    assert runner.invoke(app, ["native", "--remove"]).stdout.startswith("not built")
    assert not library.location().exists()
    library.native_row.cache_clear()


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_truncated_library_ends_no_process(share: float, folder: Path, tmp_path: Path) -> None:
    """The loader of the system would read pages that the file has no more, and the process would get SIGBUS."""
    built = library.location()
    part = tmp_path / built.relative_to(folder)
    part.parent.mkdir(parents=True)
    part.write_bytes(built.read_bytes()[: int(share * built.stat().st_size)])
    program = "from stepgraph.engine.backends.native.library import native_row; print(native_row())"
    environment = os.environ | NONE | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert "[native-load]" in done.stderr


def test_build_without_a_compiler_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(BuildError) as caught:
        library.build()
    assert caught.value.rule == "native-build"
    assert not list(library.location().parent.iterdir()), "nothing half-built is left behind"
    result = runner.invoke(app, ["native", "--build", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["rule"] == "native-build"
    assert "native-build" in result.stderr
