"""The house rules as tests: who may import whom, what importing the package does, and what no module may hold."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepgraph

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "stepgraph"
ROOMS = (
    "collector",
    "ran",
    "errors",
    "frames",
    "native",
    "tree",
    "signature",
    "likeness",
    "order",
    "padding",
    "backends",
    "buffers",
    "state",
    "capture",
    "callables",
    "models",
    "bench",
    "cli",
    "__main__",
)
"""From first to last; a module imports from rooms before its own."""
PUBLIC_USERS = ("bench", "cli")
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
    "stepgraph/collector.py": "_RESTS",
    "stepgraph/backends/cuda_order.py": "_DRAWN",
    "stepgraph/state/rng_tracker.py": "_TRACKERS",
    "stepgraph/capture/module_session.py": "_LIVE",
}
"""The exceptions to the rule that no module holds state. Python has one garbage collector with one switch; torch has
one tensor a generator that tells the kernels of all graphs where it is; torch has one default random generator a device
and process, and model code asks for the tracker that swaps its state by a function without arguments; training loops
call `create_cudagraphs()` without arguments too, so that the graphed models that are alive are known, weakly."""
MAX_LINES = 400
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in FILES if path != PACKAGE / "__init__.py"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[str]:
    """The dotted names that a module imports, at its top or in its functions, absolute or relative."""
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
    names = [name.split(".") for name in imports_of(path)]
    inner = [parts[1:] for parts in names if parts[0] == "stepgraph"]
    return {parts[0] if parts and parts[0] in ROOMS else "stepgraph" for parts in inner}


def dotted(node: ast.AST) -> str:
    """`torch.cuda.graph` for the attribute chain that spells it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_rooms_are_all_known() -> None:
    assert {room_of(path) for path in MODULES} <= set(ROOMS)
    assert len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_to_earlier_rooms(path: Path) -> None:
    room = room_of(path)
    allowed = {room} if room == "models" else set(ROOMS[: ROOMS.index(room) + 1])
    if room in PUBLIC_USERS:
        allowed.add("stepgraph")
    assert rooms_imported(path) <= allowed


def test_import_reader_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stepgraph" / "state"
    folder.mkdir(parents=True)
    source = folder / "module.py"
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "stepgraph")
    for text, expected in (
        ("import stepgraph", {"stepgraph"}),
        ("from stepgraph import capture", {"capture"}),
        ("from stepgraph import Session, errors", {"stepgraph", "errors"}),
        ("def f():\n    from stepgraph.capture.session import Session", {"capture"}),
        ("from ..capture import session", {"capture"}),
        ("from . import grads", {"state"}),
        ("import torch", set()),
    ):
        source.write_text(text)
        assert rooms_imported(source) == expected, text


def test_models_know_nothing_of_graphs() -> None:
    for path in (PACKAGE / "models").rglob("*.py"):
        assert rooms_imported(path) <= {"models"}, name_of(path)


def test_orders_know_nothing_of_torch() -> None:
    """Pure Python: no import of torch, at the top or in a function, and none through another room."""
    paths = list((PACKAGE / "order").rglob("*.py"))
    assert len(paths) > 5
    for path in paths:
        assert "torch" not in {name.partition(".")[0] for name in imports_of(path)}, name_of(path)
        assert rooms_imported(path) <= {"errors", "order"}, name_of(path)


def test_import_starts_no_cuda_and_no_optional_framework() -> None:
    program = (
        "import sys, torch\n"
        "def loaded(): return {name.partition('.')[0] for name in sys.modules}\n"
        "by_torch = loaded()\n"  # torch may load cuda-bindings by itself
        "import stepgraph\n"
        "print(torch.cuda.is_initialized(), 'torch._dynamo' in sys.modules)\n"
        "print(sorted(loaded() - by_torch))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    initialized, loaded = done.stdout.splitlines()
    assert initialized == "False False", "CUDA, and the compiler, which takes seconds to import"
    assert not set(ast.literal_eval(loaded)) & set(OPTIONAL)
    assert done.stderr == ""


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_optional_frameworks_are_imported_on_use(path: Path) -> None:
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.partition(".")[0] for name in names} & set(OPTIONAL)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_cuda_graphs_are_named_in_one_backend_only(path: Path) -> None:
    names = {dotted(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)} | set(
        imports_of(path)
    )
    graphs = {name for name in names if re.fullmatch(r"torch\.cuda\.(graphs\.)?(CUDAGraph|graph|graphs\..*)", name)}
    if path == PACKAGE / "backends" / "cuda.py":
        assert "torch.cuda.CUDAGraph" in graphs
    else:
        assert not graphs


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_hold_no_mutable_state(path: Path) -> None:
    module = tree_of(path)
    assert not [node.lineno for node in ast.walk(module) if isinstance(node, ast.Global)], "a global statement"
    for node in module.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        empty = isinstance(value, (ast.List, ast.Set)) and not value.elts
        empty = empty or (isinstance(value, ast.Dict) and not value.keys)
        grown = isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in (
            "list",
            "dict",
            "set",
            "defaultdict",
            "Counter",
            "OrderedDict",
            "deque",
            "WeakKeyDictionary",
            "WeakValueDictionary",
            "WeakSet",
        )
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == PROCESS_STATE.get(name_of(path)):
            continue
        assert not empty, f"line {node.lineno} starts an empty container"
        assert not grown, f"line {node.lineno} starts a mutable container"


def test_public_names_are_what_the_package_imports() -> None:
    imported = {
        alias.asname or alias.name
        for node in tree_of(PACKAGE / "__init__.py").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(stepgraph.__all__) == imported
    assert stepgraph.__all__ == sorted(stepgraph.__all__)
    assert all(hasattr(stepgraph, name) for name in stepgraph.__all__)


def test_public_names_have_docstrings() -> None:
    assert not [name for name in stepgraph.__all__ if not (getattr(stepgraph, name).__doc__ or "").strip()]


def test_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert stepgraph.__version__ == project["version"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_catches_no_bare_except(path: Path) -> None:
    assert not [n.lineno for n in ast.walk(tree_of(path)) if isinstance(n, ast.ExceptHandler) and n.type is None]
