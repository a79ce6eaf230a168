"""Scripts run in processes of their own: how they are started, watched, stopped and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.core.errors import InvalidArgument, NoStepError, ScriptError
from stepgraph.tools.script.run import Outcome, Script, Status, refuse_unjudged, run_script
from tests.forked import NESTED, NONE

ROOT = Path(__file__).parents[2]
PROBE = "tests.probes:Recorder"
LOOP = """
import torch
from torch import nn
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train_step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child finds this copy of stepgraph, and works in a folder of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def written(name: str, program: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(program)
    return name


def ran(program: str, *args: str, steps: int | None = None, **options: Any) -> Outcome:
    """The outcome of a program."""
    script = Script(written("train.py", program), args, **options)
    return run_script(script, PROBE, {} if steps is None else {"steps": steps})


WHO = """
import json, sys
names = ["__name__", "__file__", "__package__", "__doc__", "__cached__"]
spec = None if __spec__ is None else __spec__.name
facts = {name: globals()[name] for name in names} | {"argv": sys.argv, "path": sys.path[0], "spec": spec}
facts["loader"], facts["main"] = type(__loader__).__name__, sys.modules["__main__"].__dict__ is globals()
facts["path_end"] = [p for p in sys.path[1:] if "stepgraph" not in p and "trees" not in p]
open(sys.argv[-1], "w").write(json.dumps(facts))
"""


@pytest.mark.parametrize(
    ("target", "is_module"),
    [("folder/deep/train.py", False), ("link.py", False), ("pkg.train", True), ("pkg", True)],
)
def test_main_is_as_python_sets_it(target: str, is_module: bool) -> None:
    for name in ("train.py", "folder/deep/train.py", "pkg/train.py", "pkg/__main__.py"):
        written(name, WHO)
    written("pkg/__init__.py", "")
    Path("link.py").symlink_to("folder/deep/train.py")
    args = ("--lr", "3", "-m", "--", "a_b")
    run_script(Script(target, (*args, "ours"), is_module), PROBE)
    command = [sys.executable, *(["-m"] if is_module else []), target, *args, "pythons"]
    subprocess.run(command, check=True, env=os.environ | NONE)
    ours, pythons = (json.loads(Path(name).read_text()) for name in ("ours", "pythons"))
    assert ours["argv"].pop() == "ours"
    assert pythons["argv"].pop() == "pythons"
    assert ours == pythons


SEES = """
import json, sys
open(sys.argv[1], "w").write(json.dumps(sys.path))
"""


@pytest.mark.parametrize(
    ("target", "is_module", "variables"),
    [
        ("../elsewhere/train.py", False, {}),
        ("../elsewhere/train.py", False, {"PYTHONSAFEPATH": "1"}),
        ("pkg.train", True, {}),
    ],
    ids=["script", "safe path", "module"],
)
def test_path_is_as_python_sets_it(
    target: str, is_module: bool, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in the current folder hides none that torch and stepgraph import."""
    written("here/numpy.py", "raise RuntimeError('the current folder is on the path')")
    for name in ("elsewhere/train.py", "here/pkg/train.py"):
        written(name, SEES)
    monkeypatch.chdir("here")
    for name, value in (NONE | variables).items():
        monkeypatch.setenv(name, value)
    outcome = run_script(Script(target, ("ours",), is_module), PROBE)
    assert outcome.status is Status.COMPLETED, outcome.exception
    subprocess.run([sys.executable, *(["-m"] if is_module else []), target, "pythons"], check=True)
    assert json.loads(Path("ours").read_text()) == json.loads(Path("pythons").read_text())


def test_offline_variables_and_own_group() -> None:
    outcome = ran(
        "import os\nassert os.environ['WANDB_MODE'] == 'disabled'\nassert os.environ['HF_HUB_OFFLINE'] == '1'\n"
        "assert os.getpgid(0) == os.getpid()\n"
    )
    assert outcome.status is Status.COMPLETED, outcome.exception


def test_steps_are_reported_and_stopped() -> None:
    outcome = ran(LOOP + "for _ in range(100): train_step()\nprint('never')", steps=2)
    assert outcome.status is Status.STOPPED
    assert outcome.result["events"] == ["begins 0", "reaches 0", "ends 0", "begins 1", "reaches 1", "ends 1"]
    assert outcome.steps == 2
    refuse_unjudged(Script("train.py"), outcome)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("train_step", "train_step(); train_step()"),
        (
            "Trainer.make",
            "class Trainer:\n    @staticmethod\n    def make(): train_step()\nTrainer.make(); Trainer.make()",
        ),
        ("loop:Loop.step", "from loop import Loop\nLoop().step(); Loop().step()"),
    ],
)
def test_step_name_overrides(name: str, more: str) -> None:
    written("loop.py", "class Loop:\n    def step(self): pass\n")
    outcome = ran(LOOP + more, step=name)
    assert outcome.result["events"] == ["begins 0", "reaches 0", "ends 0", "begins 1", "reaches 1", "ends 1"]


@pytest.mark.parametrize("name", ["Trainer.step", "loop:no_such", "no_such_module:step"])
def test_step_name_that_is_not_there_is_refused(name: str) -> None:
    written("loop.py", "")
    with pytest.raises(InvalidArgument, match="step-name") as caught:
        ran(LOOP + "import loop\ntrain_step()", step=name)
    assert name in str(caught.value)


def test_stop_that_is_caught_comes_again() -> None:
    program = LOOP + (
        "caught = 0\n"
        "for _ in range(50):\n    try:\n        train_step()\n    except BaseException:\n        caught += 1\n"
        "    if caught == 3: raise SystemExit(0)\n"
    )
    outcome = ran(program, steps=1)
    assert outcome.status is Status.STOPPED
    assert outcome.steps == 1


def test_script_that_swallows_the_stop_is_ended() -> None:
    swallowing = "    try:\n        train_step()\n    except BaseException:\n        time.sleep(0.1)\n"
    outcome = ran(LOOP + "import time\nwhile True:\n" + swallowing, steps=1, timeout=15.0)
    assert outcome.status is Status.TIMED_OUT
    with pytest.raises(ScriptError, match="caught the exception"):
        refuse_unjudged(Script("train.py"), outcome)


def test_files_are_listed_those_after_the_stop_apart(tmp_path: Path) -> None:
    program = LOOP + (
        "import os, tempfile\n"
        "os.makedirs('out', exist_ok=True)\nopen('out/log.txt', 'w').close()\nopen('train.py').close()\n"
        "open(os.devnull, 'w').close()\ntempfile.TemporaryFile().close()\ntempfile.mkdtemp()\n"
        "try:\n    for _ in range(100): train_step()\n"
        "finally:\n    torch.save(model.state_dict(), 'out/last.pt')\n"
    )
    outcome = ran(program, steps=1)
    assert outcome.status is Status.STOPPED
    assert [(os.path.relpath(file.path), file.after_stop, file.refused) for file in outcome.files] == [
        ("out", False, False),
        ("out/log.txt", False, False),
        ("out/last.pt", True, False),
    ]


def test_no_write_refuses() -> None:
    lines = ["open('a', 'a')", "torch.save(model, 'b')", "os.mkdir('c')", "os.remove('train.py')", "Path('d').touch()"]
    program = LOOP + "import os\nfrom pathlib import Path\ntrain_step()\n"
    program += "".join(f"try:\n    {line}\nexcept PermissionError: pass\n" for line in lines)
    outcome = ran(program + "open('e', 'w')", writes=False)
    assert outcome.status is Status.FAILED
    assert "[no-write]" in outcome.exception
    assert "Fix: leave --no-write out" in outcome.exception
    assert [os.path.basename(file.path) for file in outcome.files] == ["a", "b", "c", "train.py", "d", "e"]
    assert all(file.refused for file in outcome.files)
    assert os.listdir() == ["train.py"]


def test_failure_is_the_scripts_own_traceback() -> None:
    program = LOOP + "def f(module, args): raise ValueError('mine')\nmodel.register_forward_pre_hook(f)\ntrain_step()\n"
    outcome = ran(program)
    assert outcome.status is Status.FAILED
    assert outcome.exception.endswith("ValueError: mine")
    assert "train.py" in outcome.exception
    assert "stepgraph" not in outcome.exception
    with pytest.raises(ScriptError, match="script-failed") as caught:
        refuse_unjudged(Script("train.py"), outcome)
    assert "ValueError: mine" in str(caught.value)


@pytest.mark.parametrize(
    ("program", "status", "text"),
    [
        ("import sys; sys.exit('usage: ...')", Status.FAILED, "SystemExit: usage: ..."),
        ("import sys; sys.exit(0)", Status.COMPLETED, ""),
        ("import os; os._exit(4)", Status.FAILED, "exited with 4"),
        ("import os, signal; os.kill(0, signal.SIGKILL)", Status.FAILED, "ended by SIGKILL"),
        ("import argparse; argparse.ArgumentParser().parse_args()", Status.FAILED, "SystemExit: 2"),
    ],
)
def test_ways_to_end(program: str, status: Status, text: str) -> None:
    outcome = ran(program, *(["--no-such"] if "argparse" in program else []))
    assert outcome.status is status
    assert text in outcome.exception
    error = NoStepError if status is Status.COMPLETED else ScriptError
    with pytest.raises(error):
        refuse_unjudged(Script("train.py"), outcome)


@pytest.mark.parametrize(
    ("target", "text"), [("no.py", "no file no.py"), ("folder", "is a folder"), ("data.bin", "not a Python file")]
)
def test_scripts_that_are_none_are_refused(target: str, text: str) -> None:
    os.mkdir("folder")
    Path("data.bin").write_bytes(b"\x00\x01")
    with pytest.raises(InvalidArgument, match=text):
        run_script(Script(target), PROBE)


def test_module_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"-m no_such\.module"):
        run_script(Script("no_such.module", is_module=True), PROBE)


def test_syntax_error_is_the_scripts_failure() -> None:
    with pytest.raises(ScriptError, match=r"train.py:2[\s\S]*SyntaxError"):
        ran("x = 1\nx = = 2\n")


def test_prints_do_not_corrupt_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    program = LOOP + (
        "import os, sys\nprint('{\"end\": 1}')\nos.write(1, b'[raw]')\nsys.stderr.write('on stderr')\ntrain_step()\n"
        "os.closerange(3, 100)\n"
    )
    script = Script(written("train.py", program))
    outcome = run_script(script, PROBE, stdout_to_stderr=True)
    assert outcome.result["events"] == ["begins 0", "reaches 0", "ends 0"]
    out, err = capfd.readouterr()
    assert out == ""
    assert '{"end": 1}' in err
    assert "[raw]" in err


def test_cuda_runs_without_a_gpu_and_waits_are_reported() -> None:
    if has_gpu():
        pytest.skip("with a GPU nothing is mapped")
    program = LOOP.replace("nn.Linear(2, 1)", "nn.Linear(2, 1).cuda()").replace("(1, 2)", "(1, 2, device='cuda')")
    outcome = ran(program + "for _ in range(2):\n    train_step()\n    torch.cuda.synchronize()\n")
    assert outcome.status is Status.COMPLETED, outcome.exception
    wait = "torch.cuda.synchronize"
    first = ["Tensor.cuda", "Tensor.cuda", "begins 0", "reaches 0", wait, "ends 0"]
    assert outcome.result["events"] == [*first, "begins 1", "reaches 1", wait, "ends 1"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph"),
        ("import transformer_engine", "transformer_engine"),
        ("torch._C._cuda_getDevice()", "CUDA driver" if torch.backends.cuda.is_built() else "_cuda_getDevice"),
    ],
)
def test_what_needs_a_gpu_cannot_be_judged(line: str, name: str) -> None:
    if has_gpu():
        pytest.skip("with a GPU nothing is mapped")
    outcome = ran(LOOP + f"train_step()\n{line}\n")
    assert outcome.status is Status.STOPPED
    assert len(outcome.cannot_judge) == 1
    assert name in outcome.cannot_judge[0]
    refuse_unjudged(Script("train.py"), outcome)


WAYS = {
    "rename": "os.rename('train.py', 'other.py')",
    "replace by a temporary file": "os.replace(tempfile.mkstemp()[1], 'train.py')",
    "move away into a temporary folder": "os.rename('train.py', tempfile.mkdtemp() + '/train.py')",
    "chmod": "os.chmod('train.py', 0)",
    "chmod of an open file": "os.chmod(os.open('train.py', os.O_RDONLY), 0)",
    "times": "os.utime('train.py')",
    "link": "os.link('train.py', 'link.py')",
    "symlink": "os.symlink('train.py', 'link.py')",
    "mkfifo": "os.mkfifo('fifo')",
    "mknod": "os.mknod('node')",
    "open beside a dir_fd": "os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=here)",
    "remove beside a dir_fd": "os.unlink('train.py', dir_fd=here)",
    "rename beside dir_fds": "os.rename('train.py', 'other.py', src_dir_fd=here, dst_dir_fd=here)",
    "mkfifo beside a dir_fd": "os.mkfifo('fifo', dir_fd=here)",
    "through a link in a temporary folder": "open(linked() + '/train.py', 'w')",
}
"""Changes of the script's folder, from another one."""


def test_no_write_refuses_every_way_to_change_files() -> None:
    program = LOOP + (
        "import os, tempfile\ntrain_step()\n"
        "user = os.getcwd()\nhere = os.open(user, os.O_RDONLY)\n"
        "def linked():\n"
        "    made = tempfile.mkdtemp()\n    os.symlink(user, made + '/link')\n    return made + '/link'\n"
        "refused = []\n"
    )
    for name, line in WAYS.items():
        away = "os.chdir(tempfile.mkdtemp())" if "dir_fd" in name else "os.chdir(user)"
        program += f"{away}\ntry:\n    {line}\nexcept PermissionError: refused.append({name!r})\n"
    outcome = ran(program + f"assert refused == {list(WAYS)}, refused", writes=False)
    assert outcome.status is Status.COMPLETED, outcome.exception
    assert {os.path.dirname(os.path.realpath(file.path)) for file in outcome.files} == {os.getcwd()}
    assert {os.path.basename(file.path) for file in outcome.files} == {
        *("train.py", "other.py", "link.py", "fifo", "node", "new"),
    }
    assert os.listdir() == ["train.py"]


@pytest.mark.usefixtures("new_processes")
def test_no_write_lets_temporary_files_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a folder for compiled code among temporary files, unless it finds one there."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "link").symlink_to("temporary")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when it has made the folder
    for folder in ("temporary", "link"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / folder))
        program = LOOP + (
            "import os, shutil, tempfile\n"
            "with tempfile.TemporaryDirectory() as folder:\n"
            "    os.mkdir(folder + '/deep')\n    open(folder + '/deep/a', 'w').close()\n"
            "    os.rename(folder + '/deep/a', folder + '/b')\n    os.chmod(folder + '/b', 0o600)\n"
            "    os.mkfifo(folder + '/fifo')\n"
            "train_step()\n"
        )
        outcome = ran(program, writes=False)
        assert (outcome.status, outcome.files) == (Status.COMPLETED, ()), outcome.exception
        assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.usefixtures("new_processes")
def test_cache_of_torch_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when it has made the folder
    outcome = ran(LOOP + "train_step()\n")
    assert (outcome.status, outcome.files) == (Status.COMPLETED, ()), outcome.exception
    assert [path.name.partition("_")[0] for path in (tmp_path / "temporary").iterdir()] == ["torchinductor"]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# -- processes

WORKERS = (
    LOOP
    + """
import os, subprocess, sys, time
from torch.utils.data import DataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index): return torch.ones(2)
if __name__ == "__main__":
    away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    loader = iter(DataLoader(Data(), num_workers=2, persistent_workers=True))
    next(loader)
    pids = [os.getpid(), away.pid, *(worker.pid for worker in loader._workers)]
    open("pids.part", "w").write(" ".join(map(str, pids)))
    os.rename("pids.part", "pids")
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    train_step()
    while True: time.sleep(1)
"""
)


def are_gone(pids: list[int]) -> bool:
    """Whether all processes have ended; a zombie has."""
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
        except OSError:
            continue
    return True


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 30
    while not are_gone(pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert are_gone(pids)


def test_timeout_ends_workers_and_sessions_of_others() -> None:
    outcome = ran(WORKERS, timeout=15.0)
    assert outcome.status is Status.TIMED_OUT
    assert outcome.steps == 1
    pids = [int(word) for word in Path("pids").read_text().split()]
    assert len(pids) == 4
    wait_until_gone(pids)


PARENT = """
import sys
from stepgraph.commands.base import Stopped, Stops
from stepgraph.tools.script.run import Script, run_script
stops = Stops(None)
with stops.watched():
    try:
        run_script(Script("train.py"), "tests.probes:Recorder")
    except Stopped:
        print(stops.reason)
        sys.exit(stops.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signals_end_the_whole_group(number: int, code: int) -> None:
    written("train.py", WORKERS)
    with subprocess.Popen([sys.executable, "-c", PARENT], env=os.environ | NESTED) as parent:
        until = time.monotonic() + 120
        while not Path("pids").exists() and time.monotonic() < until:
            time.sleep(0.1)
        pids = [int(word) for word in Path("pids").read_text().split()]
        parent.send_signal(number)
        assert parent.wait(60) == code
    wait_until_gone(pids)


DAEMONS = """
import os, subprocess, sys, time
if len(sys.argv) == 1:
    own = [sys.executable, "train.py", "daemon"]
    for keeps in ("stubborn", "plain"):
        subprocess.Popen([*own, keeps], start_new_session=True)
    if os.fork() == 0:  # as daemons do: nobody waits for this one, and its parent is gone
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [*own, "orphan"])
        os._exit(0)
    os.wait()
    while len([name for name in os.listdir() if name.endswith(".pid")]) < 3: time.sleep(0.02)
    if os.path.exists("crash"): os.kill(os.getpid(), 11)
    if os.path.exists("hang"): time.sleep(1000)
    sys.exit(7)
import signal
if sys.argv[2] == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[2] + ".part", "w").write(str(os.getpid()))
os.rename(sys.argv[2] + ".part", sys.argv[2] + ".pid")
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to another process than the first")
@pytest.mark.parametrize("end", ["exit", "crash", "hang"])
def test_daemons_of_a_script_end_with_it(end: str) -> None:
    Path(end).touch()
    outcome = ran(DAEMONS, timeout=10.0)
    pids = [int(path.read_text()) for path in Path().glob("*.pid")]
    assert len(pids) == 3
    assert are_gone(pids), "at once, when the command has its result"
    assert outcome.status is (Status.TIMED_OUT if end == "hang" else Status.FAILED)
    told = {"exit": "SystemExit: 7", "crash": "its process was ended by SIGSEGV", "hang": ""}
    assert outcome.exception == told[end]


def test_script_has_a_session_and_no_orphans_of_others() -> None:
    program = (
        "import os, subprocess, sys\n"
        "assert os.getsid(0) == os.getpgid(0) == os.getpid()\n"
        "subprocess.run([sys.executable, '-c', 'import os, time; os.fork() or time.sleep(1)'])\n"
        "try:\n    os.wait()\n    assert False\nexcept ChildProcessError: pass\n"
    )
    outcome = ran(program)
    assert outcome.status is Status.COMPLETED, outcome.exception


RANK = """
import os, sys
from stepgraph.commands.base import ExitCode, Result
from stepgraph.commands.script_options import agreed
from stepgraph.tools.script.run import Script, refuse_unjudged, run_script
import typer
script = Script("train.py", tuple(sys.argv[1:]))
outcome = run_script(script, "tests.probes:Recorder", {"steps": 3}, stdout_to_stderr=True)
code = ExitCode.FINDINGS if os.environ["RANK"] == "1" and "find" in sys.argv else ExitCode.OK
try:
    refuse_unjudged(script, outcome)
    result = agreed(Result({}, "", "", code))
    print("printed by", outcome.rank, outcome.status, int(result.exit_code), flush=True)
    code = int(result.exit_code)
except typer.Exit as error:
    code = error.exit_code
except Exception as error:
    print("error", error, flush=True)
    code = 3
open(f"code{outcome.rank}", "w").write(str(int(code)))
"""
DDP = """
import os, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = DistributedDataParallel(nn.Linear(2, 1).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index in range(100):
    if index == 1 and rank == 1 and "fail" in sys.argv: raise ValueError("only here")
    optimizer.zero_grad()
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("word", "code"), [("plain", "0"), ("find", "1"), ("fail", "3")])
def test_ranks_of_torchrun_exit_alike(word: str, code: str) -> None:
    if has_gpu():
        pytest.skip("needs a GPU for each rank")
    written("train.py", DDP)
    written("rank.py", RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "rank.py", word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | NESTED)
    assert Path("code0").read_text() == Path("code1").read_text() == code, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("printed")]
    assert printed == ([] if word == "fail" else [f"printed by 0 stopped {code}"])
    if word == "fail":
        assert "only here" in done.stdout


@pytest.mark.parametrize("words", [["nosuch.py"], ["-m", "nosuch"]])
@pytest.mark.parametrize("command", ["check", "verify", "frozen", "advise"])
@pytest.mark.usefixtures("new_processes")
def test_missing_script_is_refused_before_torch_is_imported(command: str, words: list[str]) -> None:
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "import runpy\n"
        f"sys.argv = ['stepgraph', {command!r}, *{words!r}]\n"
        "runpy.run_module('stepgraph')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "[script-missing]" in done.stderr
