"""The house rules as tests: who may import whom, what importing the package does, and what no module may hold.

Each rule is one loop over all files, which names every offender at once.
"""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import stepgraph

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "stepgraph"
ROOMS = (
    *("core", "config"),
    *("engine.backends", "engine.memory", "engine.oplog", "engine.grads", "engine.guards", "engine.optim"),
    *("engine.order", "engine.observe", "engine.call", "engine.record"),
    *("engine.parts.modules", "engine.parts.callables", "engine.parts.stages", "engine.step", "engine.step.fallback"),
    "megatron",
    *("tools.timeline", "tools.measure", "tools.program", "tools.script", "tools.explain", "tools.doctor"),
    *("tools.checks", "tools.frozen_values", "tools.verification", "tools.advice"),
    *("lab.models", "lab.recipes", "lab.train", "lab.bench"),
    *("commands", "__main__"),
)
"""From first to last; a module imports from its own room and from rooms before it."""
FLOORS = {"core", "config", "engine", "megatron", "tools", "lab", "commands"}
"""The folders at the top."""
ENGINES = {"engine.parts.modules", "engine.parts.callables", "engine.parts.stages", "engine.step"}
"""Rooms that do not import each other: what they share stands before them, what joins them after them."""
ALLOWED_UP = {"stepgraph/engine/step/capture.py": {"engine.step.fallback"}}
"""Imports of a later room: the fallback is loaded in a function, when a capture has failed."""
PUBLIC_USERS = ("tools", "lab.bench", "commands")
"""Rooms that may import the public names from the package itself."""
OPTIONAL = (
    "matplotlib",
    "transformers",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "transformer_engine",
    "megatron",
    "torchao",
    "cuda",
    "pynvml",
)
PROCESS_STATE = {
    "stepgraph/core/collector.py": "_RESTS",
    "stepgraph/engine/backends/cuda/order.py": "_DRAWN",
    "stepgraph/engine/backends/random/tracker.py": "_TRACKERS",
    "stepgraph/engine/record/pair/shared.py": "_LIVE",
    "stepgraph/engine/step/definitions.py": "_CAPTURED",
}
"""The exceptions to the rule that no module holds state. Python has one garbage collector with one switch; torch has
one tensor a generator that tells the kernels of all graphs where it is; torch has one default random generator a device
and process, and model code asks for the tracker that swaps its state by a function without arguments; training loops
call `create_cudagraphs()` without arguments too, so that the graphed models that are alive are known, weakly; a step
that is defined anew in each epoch knows nothing of the one before, which is gone."""
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS = {}
"""Longer functions, with their lines: a list that only shrinks."""
MAX_ATTRIBUTES = 15
LARGE_CLASSES = {
    "stepgraph/engine/guards/model.py:ModelGuard": 19,
    "stepgraph/engine/backends/native/row.py:GuardRow": 17,
}
"""Classes with more attributes, with their number: a list that only shrinks."""
MAX_TEST_NAME = 60
CONTAINERS = (
    *("list", "dict", "set", "defaultdict", "Counter", "OrderedDict", "deque"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet"),
)
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in FILES if path != PACKAGE / "__init__.py"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted_name(path: Path) -> str:
    """`stepgraph.order` for `stepgraph/engine/order/__init__.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_in(name: str) -> str:
    """The room of a module by its dotted name within the package; a folder of rooms is a room of its own."""
    return max((room for room in ROOMS if f"{name}.".startswith(f"{room}.")), key=len, default="")


def room_of(path: Path) -> str:
    return room_in(dotted_name(path).removeprefix("stepgraph."))


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """The dotted names that a module imports, at its top, in its functions or for its types, absolute or relative."""
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    """The rooms of the package that a module imports; the package itself is the room `stepgraph`."""
    names = [name.split(".", 1) for name in imports_of(path)]
    return {room_in(parts[-1]) or "stepgraph" for parts in names if parts[0] == "stepgraph"}


def rooms_allowed(path: Path) -> set[str]:
    room = room_of(path)
    if room == "lab.models":
        return {room}
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) if room in ROOMS else set()
    if room in ENGINES:
        allowed -= ENGINES - {room}
    allowed |= ALLOWED_UP.get(name_of(path), set())
    return allowed | ({"stepgraph"} if room.startswith(PUBLIC_USERS) else set())


def dotted(node: ast.AST) -> str:
    """`torch.cuda.graph` for the attribute chain that spells it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def a_cycle(graph: Mapping[str, set[str]]) -> list[str] | None:
    """Names that lead back to the first of them, or None."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for other in sorted(graph[name]):
            found = walk(other, [*path, name])
            if found is not None:
                return found
        done.add(name)
        return None

    return next((found for name in sorted(graph) if (found := walk(name, [])) is not None), None)


def own_attributes(node: ast.ClassDef) -> set[str]:
    """What a class's methods set on `self`, and its annotated fields."""
    found = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and dotted(inner.value) == "self"
    }
    fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
    return found | {field.id for field in fields if isinstance(field, ast.Name)}


def test_rooms_are_all_known() -> None:
    doors = {PACKAGE / place / "__init__.py" for place in ("engine", "engine/parts", "tools", "lab")}
    assert {path for path in MODULES if not room_of(path)} == doors
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == FLOORS
    assert len(MODULES) > 300


def test_doors_of_floors_hold_words_only() -> None:
    for path in (PACKAGE / place / "__init__.py" for place in ("engine", "engine/parts", "tools", "lab")):
        assert [type(node) for node in tree_of(path).body] == [ast.Expr], name_of(path)


def test_imports_point_to_earlier_rooms() -> None:
    wrong = {name_of(path): rooms_imported(path) - rooms_allowed(path) for path in MODULES if room_of(path)}
    assert not {name: rooms for name, rooms in wrong.items() if rooms}


def test_page_of_the_house_lists_floors_and_rooms_in_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [room.split(".")[1] for room in ROOMS if room.startswith("engine.")]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(dict.fromkeys(rooms))
    assert set(re.findall(r"^\| \[(\w+)\]\(\.\./stepgraph/", page, re.MULTILINE)) == FLOORS


def test_modules_import_each_other_one_way() -> None:
    names = {dotted_name(path): path for path in MODULES}
    graph = {
        name: {
            target
            for imported in imports_of(path)
            for target in (imported, imported.rpartition(".")[0])
            if target in names and target != name
        }
        for name, path in names.items()
    }
    assert a_cycle(graph) is None


def test_cycle_finder_finds_a_cycle() -> None:
    assert a_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert a_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_import_reader_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stepgraph" / "engine" / "guards"
    folder.mkdir(parents=True)
    source = folder / "module.py"
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "stepgraph")
    for text, expected in (
        ("import stepgraph", {"stepgraph"}),
        ("from stepgraph import config", {"config"}),
        ("from stepgraph import Session, core", {"stepgraph", "core"}),
        ("from stepgraph.engine import call", {"engine.call"}),
        ("from stepgraph import engine", {"stepgraph"}),
        ("def f():\n    from stepgraph.engine.call.session import Session", {"engine.call"}),
        ("if TYPE_CHECKING:\n    from stepgraph.engine.call.session import Session", {"engine.call"}),
        ("from ..call import options", {"engine.call"}),
        ("from . import model", {"engine.guards"}),
        ("import torch", set()),
    ):
        source.write_text(text)
        assert rooms_imported(source) == expected, text


def test_packages_are_not_named_like_public_names() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    shared = packages & set(stepgraph.__all__)
    assert {name for name in shared if callable(getattr(stepgraph, name))} == set()


def test_orders_know_nothing_of_torch() -> None:
    """Pure Python: no import of torch, at the top or in a function, and none through another room."""
    paths = list((PACKAGE / "engine" / "order").rglob("*.py"))
    assert len(paths) > 5
    for path in paths:
        assert "torch" not in {name.partition(".")[0] for name in imports_of(path)}, name_of(path)
        assert rooms_imported(path) <= {"core", "engine.order"}, name_of(path)
        core = {name.split(".")[2] for name in imports_of(path) if name.startswith("stepgraph.core.")}
        assert core <= {"wording", "errors", "tracebacks"}, name_of(path)


def test_catalogue_and_wording_stand_alone() -> None:
    """What names the rules imports none of the code that applies them, and no torch."""
    for path in (PACKAGE / "core" / "wording.py", *(PACKAGE / "core" / "catalogue").rglob("*.py")):
        names = {name.partition(".")[0] for name in imports_of(path)}
        assert names <= {"__future__", *sys.stdlib_module_names}, name_of(path)


@pytest.mark.usefixtures("new_processes")
def test_import_starts_no_cuda_and_no_optional_framework() -> None:
    program = (
        "import sys, torch\n"
        "def loaded(): return {name.partition('.')[0] for name in sys.modules}\n"
        "by_torch = loaded()\n"  # torch may load cuda-bindings by itself
        "from stepgraph import *\n"
        "print(torch.cuda.is_initialized(), 'torch._dynamo' in sys.modules)\n"
        "print(sorted(loaded() - by_torch))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    initialized, loaded = done.stdout.splitlines()
    assert initialized == "False False", "CUDA, and the compiler, which takes seconds to import"
    assert not set(ast.literal_eval(loaded)) & set(OPTIONAL)
    assert done.stderr == ""


def test_optional_frameworks_are_imported_on_use() -> None:
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & set(OPTIONAL), name_of(path)


def test_cuda_graphs_are_named_in_one_backend_only() -> None:
    for path in FILES:
        names = {dotted(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        names |= set(imports_of(path))
        graphs = {name for name in names if re.fullmatch(r"torch\.cuda\.(graphs\.)?(CUDAGraph|graph|graphs\..*)", name)}
        if path == PACKAGE / "engine" / "backends" / "cuda" / "graph.py":
            assert "torch.cuda.CUDAGraph" in graphs
        else:
            assert not graphs, name_of(path)


def test_tracked_objects_are_listed_in_one_file_only() -> None:
    """A list of all objects breaks tuples that other threads are filling: see collector.py."""
    for path in FILES:
        names = {dotted(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        names |= set(imports_of(path))
        assert ("gc.get_objects" in names) == (path == PACKAGE / "core" / "collector.py"), name_of(path)


def test_modules_hold_no_mutable_state() -> None:
    for path in FILES:
        module = tree_of(path)
        assert not [n for n in ast.walk(module) if isinstance(n, ast.Global)], f"{name_of(path)}: a global statement"
        for node in module.body:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            empty = isinstance(value, (ast.List, ast.Set)) and not value.elts
            empty = empty or (isinstance(value, ast.Dict) and not value.keys)
            grown = isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in CONTAINERS
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == PROCESS_STATE.get(name_of(path)):
                continue
            assert not empty, f"{name_of(path)}:{node.lineno} starts an empty container"
            assert not grown, f"{name_of(path)}:{node.lineno} starts a mutable container"


def test_public_names_are_what_the_package_imports() -> None:
    """What type checkers read and what is loaded on first use are the same names from the same modules."""
    block = next(node for node in tree_of(PACKAGE / "__init__.py").body if isinstance(node, ast.If))
    typed = {
        alias.name: (node.module or "").removeprefix("stepgraph").removeprefix(".")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {"order": "engine", **stepgraph._HOMES}
    assert sorted(stepgraph.__all__) == sorted(typed)
    assert set(typed) <= set(dir(stepgraph))
    assert all(hasattr(stepgraph, name) for name in typed)


@pytest.mark.parametrize(
    "program",
    [
        "import stepgraph; dir(stepgraph); stepgraph.InvalidArgument; stepgraph.order",
        "import runpy; sys.argv = ['stepgraph', '--help']; runpy.run_module('stepgraph')",
        "import runpy; sys.argv = ['stepgraph', 'demo', '--help']; runpy.run_module('stepgraph')",
        "import stepgraph.tools.checks.check, stepgraph.tools.advice.advise",  # torch is the script's process's
    ],
)
@pytest.mark.usefixtures("new_processes")
def test_import_and_help_load_no_torch(program: str) -> None:
    check = "import atexit, sys\natexit.register(lambda: print('torch loaded:', 'torch' in sys.modules))\n"
    done = subprocess.run([sys.executable, "-c", check + program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "torch loaded: False" in done.stdout


@pytest.mark.usefixtures("new_processes")
def test_capture_loads_no_fallback_and_reads_no_catalogue() -> None:
    program = (
        "import stepgraph, sys; stepgraph.capture\n"
        "import stepgraph.engine.backends.tape.refusals, stepgraph.core.catalogue as catalogue\n"
        "later = ('stepgraph.engine.parts', 'stepgraph.engine.step.fallback', 'stepgraph.engine.record.pair')\n"
        "print([name for name in sys.modules if name.startswith(later)], catalogue._by_id.cache_info().currsize)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[] 0\n"


def test_modules_load_by_attribute_and_by_import() -> None:
    program = (
        "import stepgraph\n"
        "assert stepgraph.core.errors.StepgraphError is stepgraph.StepgraphError\n"
        "import stepgraph.engine.step.record, stepgraph.engine.parts.modules.graph_modules\n"
        "import stepgraph.engine.step.capture\n"
        "plain = {'order', 'VALID_CUDA_GRAPH_IMPLS', 'VALID_CUDA_GRAPH_SCOPES'}\n"
        "assert all(callable(getattr(stepgraph, name)) for name in stepgraph.__all__ if name not in plain)\n"
        "stepgraph.captur\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "no attribute 'captur'. Did you mean: 'capture'?" in done.stderr


def test_messages_find_articles_and_numbers_of_words() -> None:
    """`a {type(x).__name__}` says "a int", and `{len(x)} calls` says "1 calls": see `wording`."""
    for path in FILES:
        if room_of(path) == "lab.models":  # imports no other room
            continue
        for node in ast.walk(tree_of(path)):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for before, value, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
                if isinstance(value, ast.FormattedValue):
                    name = dotted(value.value) if isinstance(value.value, ast.Attribute) else ""
                    has_article = re.search(r"\ban? $", str(getattr(before, "value", "")), re.IGNORECASE)
                    assert not (has_article and name.endswith("__name__")), f"{name_of(path)}:{node.lineno}"
                    counts = isinstance(value.value, ast.Call) and dotted(value.value.func) == "len"
                    has_plural = re.match(r" [a-z]+s\b", str(getattr(after, "value", "")))
                    assert not (counts and has_plural), f"{name_of(path)}:{node.lineno}"


def test_public_names_have_docstrings() -> None:
    assert not [name for name in stepgraph.__all__ if not (getattr(stepgraph, name).__doc__ or "").strip()]


def test_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert stepgraph.__version__ == project["version"]


def test_functions_stay_short() -> None:
    found = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found[f"{name_of(path)}:{node.name}"] = lines
    assert_only_shrinks(found, LONG_FUNCTIONS)


def test_classes_hold_few_attributes() -> None:
    found = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and len(own_attributes(node)) > MAX_ATTRIBUTES:
                found[f"{name_of(path)}:{node.name}"] = len(own_attributes(node))
    assert_only_shrinks(found, LARGE_CLASSES)


def assert_only_shrinks(found: Mapping[str, int], known: Mapping[str, int]) -> None:
    """Every offender is listed with its size: a larger one is refused, and a smaller one is to be noted."""
    assert {name: size for name, size in found.items() if size > known.get(name, 0)} == {}
    assert {name: size for name, size in known.items() if size > found.get(name, 0)} == {}, "lower the list"


def test_names_of_tests_are_short() -> None:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(paths) > 100
    long = re.compile(rf"def test\w{{{MAX_TEST_NAME + 1 - len('test')},}}")
    found = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in paths
        if long.search(path.read_text())  # parsing every file takes 30 times as long
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test")
        if len(node.name) > MAX_TEST_NAME
    ]
    assert not found


def test_files_catch_no_bare_except() -> None:
    for path in FILES:
        bare = [n.lineno for n in ast.walk(tree_of(path)) if isinstance(n, ast.ExceptHandler) and n.type is None]
        assert not bare, name_of(path)
