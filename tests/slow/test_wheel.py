"""The wheel, installed with its dependencies and nothing else: each command and README's loop, without numpy.

The environment is new and holds what a user has after `pip install stepgraph` and no more. torch and the others are
links to the distributions of this environment, by the names that the wheel's own metadata requires, so that nothing is
downloaded and gigabytes are not copied. The wheel itself is built and installed by pip.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from stepgraph.commands.cli import COMMANDS
from tests import readme
from tests.forked import NONE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("wheel")
SMALL = [f"model.{name}" for name in ("num_layers=1", "hidden_size=16", "num_attention_heads=2", "seq_length=8")]
SMALL += ["model.vocab_size=32", "train.global_batch_size=1", "train.micro_batch_size=1"]
TYPED = {
    "advise": ["advise", "train.py"],
    "bench": ["bench", "-mr", "gpt2_small", "--steps", "1", *SMALL],
    "check": ["check", "train.py"],
    "verify": ["verify", "train.py"],
    "frozen": ["frozen", "train.py"],
    "explain": ["explain", "host-read"],
    "rules": ["rules", "host-read"],
    "doctor": ["doctor"],
    "train": ["train", *SMALL, "train.train_iters=4"],
    "recipes": ["recipes", "gpt2_small"],
    "demo": ["demo", "--steps", "1"],
    "native": ["native"],
}
"""One use of each command."""
ALLOWED = {"advise": (0, 1), "check": (0, 1), "verify": (0, 1), "frozen": (0, 1)}
"""Exit codes, where the command judges a script; elsewhere 0."""


def _required(wheel: Path) -> list[metadata.Distribution]:
    """The distributions that a wheel requires, and those that they require, of this environment."""
    (info,) = metadata.distributions(path=[str(wheel)])
    todo, found = [info], dict[str, metadata.Distribution]()
    while todo:
        for line in todo.pop().requires or ():
            required = Requirement(line)
            if required.name not in found and (required.marker is None or required.marker.evaluate({"extra": ""})):
                found[required.name] = metadata.distribution(required.name)
                todo.append(found[required.name])
    return list(found.values())


def _link(distribution: metadata.Distribution, site: Path) -> None:
    """Link what a distribution has at the top of site-packages."""
    names = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    for name in names:
        link = site / name
        if not link.exists():  # a folder may be of several distributions
            link.symlink_to(Path(str(distribution.locate_file(name))))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder of programs."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run(build, check=True, env=os.environ | NONE)
    (wheel,) = folder.glob("stepgraph-*.whl")
    home = folder / "environment"
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    for distribution in _required(wheel):
        _link(distribution, site)
    programs = home / "bin"
    pip += ["--python", str(programs / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, env=os.environ | NONE)
    return programs


def _run(command: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment with warnings as Python shows them by default."""
    ours = ("PYTHON", "STEPGRAPH", "TORCH")
    environment: Mapping[str, str] = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = {**environment, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_wheel_needs_neither_numpy_nor_matplotlib(installed: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, stepgraph, torch\n"
        "print([name for name in ('numpy', 'matplotlib', 'pytest') if u.find_spec(name)])\n"
        "print(stepgraph.__file__)\n"
    )
    found, where = _run([str(installed / "python"), "-c", program], tmp_path).stdout.splitlines()
    assert found == "[]"
    assert Path(where).is_relative_to(installed.parent)


def test_every_command_has_a_use() -> None:
    assert set(TYPED) == {function.__name__ for functions in COMMANDS.values() for function in functions}


@pytest.mark.parametrize("command", TYPED)
def test_installed_command_shows_no_foreign_warning(command: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(readme.loop())
    done = _run([str(installed / "stepgraph"), *TYPED[command]], tmp_path)
    assert done.returncode in ALLOWED.get(command, (0,)), done.stderr
    told = done.stdout + done.stderr
    assert "Warning" not in told
    assert "NumPy" not in told
    assert "Traceback" not in told


def test_installed_readme_loop_adds_no_warning(installed: Path, tmp_path: Path) -> None:
    """torch warns where a program imports it without numpy; beside stepgraph it warns no more, and no less."""
    python = str(installed / "python")
    (tmp_path / "train.py").write_text(readme.loop())
    (tmp_path / "plain.py").write_text(
        readme.loop().replace("@stepgraph.capture\n", "").replace("import stepgraph", "")
    )
    done, plain = (_run([python, name], tmp_path) for name in ("train.py", "plain.py"))
    assert (done.returncode, plain.returncode) == (0, 0)
    assert done.stderr == plain.stderr


def test_installed_public_name_imports_torch_quietly(installed: Path, tmp_path: Path) -> None:
    program = (
        "import warnings\n"
        "before = list(warnings.filters)\n"
        "import stepgraph\n"
        "assert warnings.filters == before\n"
        "{use}\n"
        "import sys\n"
        "ours = [entry for entry in warnings.filters if entry[1] is not None and 'NumPy' in entry[1].pattern]\n"
        "print('torch' in sys.modules, ours)\n"
    )
    for use in ("stepgraph.capture", "stepgraph.tree_map", "from stepgraph.lab.train import pretrain"):
        done = _run([str(installed / "python"), "-c", program.format(use=use)], tmp_path)
        assert (done.stdout, done.stderr) == ("True []\n", ""), use
