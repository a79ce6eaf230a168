"""Random faults in the code that decides about truth: does a test notice each of them? Not a part of CI.

    PYTHONPATH=. python3 -m tests.mutants --count 100 --seed 0 --jobs 14 --out mutants.json

A mutant is one edit of one file: a comparison inverted, `and` for `or`, a constant flipped, an element left out of a
tuple, a field left out of a comparison, a call left out, a `not` dropped, an early return. It is made in a copy of the
tree, never in place. The copies are made of hard links in a folder for temporary files, and only the edited file is
written again.

Tests run in forks of this process, which has imported torch and not stepgraph. First each test file runs once, over a
tree whose functions note that they were called. A mutant is then tried by the files that call the edited function, the
cheapest first, until one test fails. A mutant that no test notices survives. Some survivors change nothing that anyone
could see: a person has to look at each.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import difflib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.generated.batch import run_all

ROOT = Path(__file__).parents[1]
TARGETS = (
    "stepgraph/engine/guards",
    "stepgraph/engine/oplog",
    "stepgraph/engine/call/proof.py",
    "stepgraph/engine/record/pair/eager_proof.py",
    "stepgraph/engine/record/pair/guard.py",
    "stepgraph/engine/record/pair/kind.py",
    "stepgraph/engine/record/pair/audit.py",
    "stepgraph/engine/step",
    "stepgraph/engine/grads/step_grads.py",
    "stepgraph/engine/optim/effects.py",
)
"""What decides whether a graph is right: folders and files."""
NOT_DECIDING = ("report.py", "options.py", "refusals.py", "full_iteration.py", "static_loader.py", "__init__.py")
"""Files of these folders that say or set something, and decide nothing."""
SUITES = ("tests/cpu", "tests/contract", "tests/generated")
SLOW_SUITES = ("tests/slow", "tests/distributed")
LEFT_OUT = ("test_architecture.py", "test_docs.py", "test_forked.py", "test_typing.py")
"""Tests about how the source is written, or about the suites themselves."""
COPIED = (
    "stepgraph",
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "README.md",
    "pyproject.toml",
    "CONTRIBUTING.md",
    "Makefile",
)
SEEN = "_seen_functions"
SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One edit: characters `start` to `end` of a file are replaced."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str
    function: str = ""
    """`file:line` of the innermost function around it."""

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def diff(self) -> str:
        old = (ROOT / self.file).read_text(encoding="utf-8")
        lines = difflib.unified_diff(old.splitlines(), self.applied(old).splitlines(), self.file, self.file, "", "", 1)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


# -- edits


class Edits(ast.NodeVisitor):
    """Finds all edits of a file. Messages of errors, annotations and decorators are left alone."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines(keepends=True)
        self.found: list[Mutant] = []
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self.visit(ast.parse(source))

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        at: Any = node
        return self._offset(at.lineno, at.col_offset), self._offset(at.end_lineno, at.end_col_offset)

    def _add(self, kind: str, node: ast.AST, text: str) -> None:
        start, end = self._span(node)
        function = f"{self.file}:{self._functions[-1].lineno}" if self._functions else ""
        self.found.append(Mutant(self.file, self._line(node), kind, start, end, text, function))

    @staticmethod
    def _line(node: ast.AST) -> int:
        at: Any = node
        return int(at.lineno)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__", "describe"):
            return
        self._functions.append(node)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self._return_early(node)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()

    def _return_early(self, node: ast.FunctionDef) -> None:
        told = "" if node.returns is None else ast.unparse(node.returns)
        value = "None" if told == "None" or told.endswith("| None") else "True" if told == "bool" else None
        is_generator = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))
        body = [one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
        if value is None or is_generator or not body or isinstance(body[0], ast.Return | ast.Raise):
            return
        start, _ = self._span(body[0])
        indent = " " * body[0].col_offset
        text = f"return {value}\n{indent}"
        where = f"{self.file}:{node.lineno}"
        self.found.append(Mutant(self.file, body[0].lineno, "early return", start, start, text, where))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        is_record = any(
            "dataclass" in (told := ast.unparse(one)) and "frozen=True" in told for one in node.decorator_list
        )
        for statement in node.body:
            if is_record and isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement):
                self._field(statement)
            self.visit(statement)

    def _field(self, node: ast.AnnAssign) -> None:
        """A field of a dataclass takes no part in comparisons."""
        made = '__import__("dataclasses").field'
        head = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
        value = node.value
        if value is None:
            self._add("field not compared", node, f"{head} = {made}(compare=False)")
        elif isinstance(value, ast.Call) and "field" in ast.unparse(value.func):
            if not any(word.arg == "compare" for word in value.keywords):
                text = f"{ast.unparse(value)[:-1]}{', ' if value.keywords else ''}compare=False)"
                self._add("field not compared", value, text)
        else:
            self._add("field not compared", node, f"{head} = {made}(default={ast.unparse(value)}, compare=False)")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        named = {ast.unparse(target) for target in node.targets}
        if named & {"__all__", "__slots__", "__match_args__"}:
            return
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):  # as many on both sides
            for part in node.value.elts:
                self.visit(part)
            return
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """What errors say is no decision."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """The same."""

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion is a check of its own."""

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("call left out", node, "pass")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, operator in enumerate(node.ops):
            operators = [*node.ops[:i], SWAPPED[type(operator)](), *node.ops[i + 1 :]]
            changed = ast.Compare(node.left, operators, node.comparators)
            self._add("comparison inverted", node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        kind = "`and` for `or`" if isinstance(node.op, ast.Or) else "`or` for `and`"
        self._add(kind, node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("`not` dropped", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool) or (type(node.value) is int and node.value in (0, 1)):
            value: object = not node.value if isinstance(node.value, bool) else 1 - node.value
            self._add("constant flipped", node, repr(value))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)  # `x[0]` for `x[1]` mostly raises
        if isinstance(node.slice, ast.Compare | ast.Call):
            self.visit(node.slice)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._elements(node, "(%s,)")

    def visit_List(self, node: ast.List) -> None:
        self._elements(node, "[%s]")

    def _elements(self, node: ast.Tuple | ast.List, form: str) -> None:
        if isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
            for i in range(len(node.elts)):
                rest = ", ".join(ast.unparse(part) for k, part in enumerate(node.elts) if k != i)
                self._add("element left out", node, form % rest)
        self.generic_visit(node)


def files(only: Sequence[str]) -> list[str]:
    """The files to edit, relative to the tree."""
    found: list[str] = []
    for target in only or TARGETS:
        path = ROOT / target
        found += (
            sorted(str(p.relative_to(ROOT)) for p in path.rglob("*.py") if p.name not in NOT_DECIDING)
            if path.is_dir()
            else []
        )
        found += [target] if path.is_file() else []
    return found


def draw(count: int, seed: int, only: Sequence[str]) -> list[Mutant]:
    """Mutants at random, of each kind as many as of any other."""
    by_kind: defaultdict[str, list[Mutant]] = defaultdict(list)
    for file in files(only):
        for mutant in Edits(file, (ROOT / file).read_text(encoding="utf-8")).found:
            by_kind[mutant.kind].append(mutant)
    chooser = random.Random(seed)
    found: list[Mutant] = []
    while by_kind and len(found) < count:
        kind = chooser.choice(sorted(by_kind))
        there = by_kind[kind]
        mutant = there.pop(chooser.randrange(len(there)))
        if not there:
            del by_kind[kind]
        try:
            ast.parse(mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8")))
        except SyntaxError:
            continue
        found.append(mutant)
    return found


# -- trees


def link_tree(source: Path, target: Path) -> None:
    """A copy of the tree by hard links."""
    for name in COPIED:
        path = source / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("*.json", "*.svg", "results") if source == ROOT else None
            shutil.copytree(path, target / name, copy_function=_link, ignore=ignored, symlinks=True)
        elif path.exists():
            target.mkdir(parents=True, exist_ok=True)
            _link(str(path), str(target / name))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def write(tree: Path, file: str, text: str) -> None:
    """Write a file of a copy anew; the one that it was linked to stays as it is."""
    path = tree / file
    path.unlink()
    path.write_text(text, encoding="utf-8")


def noting(file: str, source: str) -> str:
    """The source with a note in each function: `file:line` of those that were called."""
    lines = source.splitlines(keepends=True)
    inserts: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_doc = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            first = node.body[1] if is_doc and len(node.body) > 1 else node.body[0]
            line = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))])
            if (is_doc and first is node.body[0]) or first.lineno == node.lineno:
                continue
            note = f'__import__("builtins").__dict__["{SEEN}"].add("{file}:{node.lineno}")\n'
            inserts.append((line - 1, " " * first.col_offset + note))
    for line, text in sorted(inserts, reverse=True):
        lines.insert(line, text)
    return "".join(lines)


# -- running tests


@dataclass
class Unit:
    """Tests of one file: the fast ones, or the slow ones."""

    file: str
    marks: str
    cpu_s: float = 0.0
    seen: frozenset[str] = frozenset()
    failing: tuple[str, ...] = ()


def units(suites: Sequence[str], slow: bool) -> list[Unit]:
    """All test files, each with its marks; slow ones last."""
    found: list[Unit] = []
    marks = ["not slow and not long and not gpu"] + (["slow and not long and not gpu"] if slow else [])
    for mark in marks:
        for suite in [*suites, *(SLOW_SUITES if slow and mark != marks[0] else ())]:
            path = ROOT / suite
            there = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            found += [Unit(str(p.relative_to(ROOT)), mark) for p in there if p.name not in LEFT_OUT]
    return found


class Watch:
    """A plugin: notes which tests fail, and ends the run when its processor time is spent."""

    def __init__(self, budget_s: float) -> None:
        self.failing: list[str] = []
        self.passed = 0
        self._budget_s, self.is_spent = budget_s, False

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failing.append(report.nodeid)
        self.passed += report.passed and report.when == "call"

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failing.append(report.nodeid or "collection")

    def pytest_runtest_setup(self, item: Any) -> None:
        if used_s() > self._budget_s:
            self.is_spent = True
            item.session.shouldstop = "its processor time is spent"


def used_s() -> float:
    """Processor time of this process and of those that it waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def run_tests(tree: Path, words: Sequence[str], log: Path, budget_s: float) -> dict[str, Any]:
    """In a fork: run pytest on a tree; which tests failed, and which functions were called."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import builtins

    setattr(builtins, SEEN, set())
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "stepgraph")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", ".", str(ROOT)))]
    import pytest

    watch = Watch(budget_s)
    given = ["-p", "no:xdist", "-p", "no:cacheprovider", "-q", "--tb=line", f"--rootdir={tree}", *words]
    code = int(pytest.main(given, plugins=[watch]))
    seen = sorted(getattr(builtins, SEEN))
    return {
        "outcome": "ended",
        "code": code,
        "failing": watch.failing,
        "passed": watch.passed,
        "is_spent": watch.is_spent,
        "seen": seen,
        "tests_s": round(used_s(), 2),
    }


@dataclass
class Result:
    """What tests made of a mutant."""

    mutant: Mutant
    outcome: str = "survived"
    by: str = ""
    """The test that failed."""
    tests: int = 0
    """Tests that passed before."""
    cpu_s: float = 0.0
    files: int = 0
    unit_files: list[str] = field(default_factory=list)


def words_for(mutant: Mutant, there: Sequence[Unit]) -> tuple[list[str], list[str]]:
    """The test files that try a mutant, in order, and the tests among them that fail without it.

    First files whose name or folder is that of the edited room, then the cheapest. A mutant in no function is tried by
    all files that call a function of its file.
    """
    room = Path(mutant.file).parent.name
    calls = [
        unit
        for unit in there
        if mutant.function in unit.seen or any(name.startswith(f"{mutant.file}:") for name in unit.seen)
    ]
    exact = [unit for unit in calls if not mutant.function or mutant.function in unit.seen]
    ordered = sorted(exact, key=lambda unit: (f"/{room}/" not in unit.file, unit.cpu_s))
    return list(dict.fromkeys(unit.file for unit in ordered)), [name for unit in ordered for name in unit.failing]


class Trial:
    """All runs: of the tests alone, and of each mutant."""

    def __init__(self, folder: Path, given: argparse.Namespace, console: Console) -> None:
        self.folder, self.given, self.console = folder, given, console
        self.base = folder / "base"
        link_tree(ROOT, self.base)
        compileall.compile_dir(str(self.base / "stepgraph"), quiet=2)

    def measure(self, there: list[Unit]) -> list[Unit]:
        """Run each test file once, over functions that note their calls."""
        tree = self.folder / "noting"
        link_tree(self.base, tree)
        for file in files(()):
            write(tree, file, noting(file, (ROOT / file).read_text(encoding="utf-8")))
        compileall.compile_dir(str(tree / "stepgraph"), quiet=2)

        def jobs() -> Iterator[tuple[Unit, Callable[[], dict[str, Any]]]]:
            for number, unit in enumerate(there):
                words = ["-m", unit.marks, unit.file]
                yield unit, self._job(tree, words, self.folder / f"unit_{number}.log", 1e9)

        with self._progress() as progress:
            task = progress.add_task("test files", total=len(there))
            for unit, found in self._run(jobs()):
                progress.advance(task)
                progress.refresh()
                unit.cpu_s, unit.seen = found.get("tests_s", 999.0), frozenset(found.get("seen", ()))
                unit.failing = tuple(found.get("failing", ()))
        kept = [unit for unit in there if unit.seen]
        failing = [name for unit in there for name in unit.failing]
        total = sum(unit.cpu_s for unit in there)
        self.console.print(f"{len(kept)} of {len(there)} test files call the code; {total:.0f} s of processor time")
        if failing:
            self.console.print(f"left out, since they fail without a mutant: {', '.join(failing)}", markup=False)
        return kept

    def _job(self, tree: Path, words: Sequence[str], log: Path, budget_s: float) -> Callable[[], dict[str, Any]]:
        return lambda: run_tests(tree, words, log, budget_s)

    def _run(self, jobs: Iterator[tuple[Any, Callable[[], dict[str, Any]]]]) -> Iterator[tuple[Any, dict[str, Any]]]:
        return run_all(jobs, self.given.jobs, cpu_s=int(self.given.timeout), stall_s=self.given.timeout)

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self.console, auto_refresh=False)  # no thread: this process forks

    def try_all(self, mutants: list[Mutant], there: list[Unit]) -> list[Result]:
        """Run the tests of each mutant."""

        def jobs() -> Iterator[tuple[Result, Callable[[], dict[str, Any]]]]:
            for number, mutant in enumerate(mutants):
                result = Result(mutant)
                chosen, failing = words_for(mutant, there)
                result.files = len(chosen)
                results.append(result)
                if not chosen:
                    result.outcome = "not called by a test"
                    continue
                tree = self.folder / f"mutant_{number}"
                link_tree(self.base, tree)
                source = (ROOT / mutant.file).read_text(encoding="utf-8")
                write(tree, mutant.file, mutant.applied(source))
                marks = "not long and not gpu" if self.given.slow else "not slow and not long and not gpu"
                words = ["-x", "-m", marks, *(f"--deselect={name}" for name in failing), *chosen]
                yield result, self._job(tree, words, self.folder / f"mutant_{number}.log", self.given.budget)

        results: list[Result] = []
        with self._progress() as progress:
            task = progress.add_task("mutants", total=len(mutants))
            for result, found in self._run(jobs()):
                self._settle(result, found)
                number = mutants.index(result.mutant)
                shutil.rmtree(self.folder / f"mutant_{number}", ignore_errors=True)
                progress.advance(task)
                progress.console.print(
                    f"{result.outcome:10} {result.mutant.file}:{result.mutant.line} {result.mutant.kind} {result.by}",
                    markup=False,
                    highlight=False,
                )
                progress.refresh()
        return results

    @staticmethod
    def _settle(result: Result, found: dict[str, Any]) -> None:
        result.cpu_s, result.tests = found.get("tests_s", 0.0), found.get("passed", 0)
        if found["outcome"] != "ended":
            result.outcome, result.by = "killed", f"the process ended: {found['outcome']} {found.get('rule', '')}"
        elif found["failing"]:
            result.outcome, result.by = "killed", found["failing"][0]
        elif found["code"] not in (0, 5):
            result.outcome, result.by = "killed", f"pytest ended with {found['code']}"
        elif found["is_spent"]:
            result.outcome, result.by = "survived", "its processor time was spent"


def show(results: list[Result], console: Console) -> None:
    """A table of all mutants, and the edits of those that survived."""
    table = Table("", "file", "edit", "tests", "s", "killed by", show_edge=False)
    for result in sorted(results, key=lambda r: (r.outcome, r.mutant.file, r.mutant.line)):
        mutant = result.mutant
        where = f"{mutant.file.removeprefix('stepgraph/')}:{mutant.line}"
        table.add_row(result.outcome, where, mutant.kind, str(result.tests), f"{result.cpu_s:.0f}", result.by)
    console.print(table)
    for result in results:
        if result.outcome != "killed":
            mutant = result.mutant
            console.print(f"\n{result.outcome}: {mutant.file}:{mutant.line}, {mutant.kind} {result.by}", markup=False)
            console.print(mutant.diff(), markup=False, highlight=False)
    console.print(", ".join(f"{name} {count}" for name, count in Counter(r.outcome for r in results).most_common()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", default=[], help="a file or folder of the package to edit")
    parser.add_argument("--tests", action="append", default=[], help="test files or folders, instead of all")
    parser.add_argument("--slow", action="store_true", help="slow tests, too")
    parser.add_argument("--budget", type=float, default=240.0, help="processor time of a mutant's tests, in seconds")
    parser.add_argument("--timeout", type=float, default=400.0, help="time on the clock after which one has hung")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    return parser.parse_args()


def prepare() -> None:
    """Import what all tests need, and not stepgraph, whose mutants the forks import."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forks cannot share a GPU's context
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import torch._dynamo
        import torch.distributed
    assert not any(name.split(".")[0] == "stepgraph" for name in sys.modules), "a fork would not import its mutant"


def main() -> int:
    given = parse()
    console = Console() if sys.stdout.isatty() else Console(width=200)
    mutants = draw(given.count, given.seed, given.only)
    if given.list:
        for mutant in mutants:
            console.print(f"{mutant.file}:{mutant.line} {mutant.kind}", markup=False, highlight=False)
            console.print(mutant.diff(), markup=False, highlight=False)
        return 0
    prepare()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trial = Trial(Path(folder), given, console)
        there = trial.measure(units(given.tests or SUITES, given.slow))
        results = trial.try_all(mutants, there)
    show(results, console)
    console.print(f"{time.monotonic() - begun:.0f} s")
    if given.out is not None:
        rows = [asdict(result) | {"diff": result.mutant.diff()} for result in results]
        given.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
