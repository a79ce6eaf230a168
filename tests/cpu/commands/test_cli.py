"""The command line: what every command has in common, and what each prints and exits with."""

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from stepgraph.commands.base import CONTEXT_SETTINGS, AsJson, Command, ExitCode, Result, Stopped, Stops, envelope
from stepgraph.commands.cli import COMMANDS, app
from stepgraph.core import catalogue
from stepgraph.core.errors import InvalidArgument
from stepgraph.lab.bench.demo import SETTLING_STEPS, DemoResult, DemoRun, run_demo
from tests.forked import NONE

ROOT = Path(__file__).parents[3]
PLAIN = {"NO_COLOR": "1", "COLUMNS": "80"}
runner = CliRunner()

RUNS: dict[str, list[str]] = {
    "advise": [str(ROOT / "tests" / "scripts" / "plain_loop.py")],
    "bench": ["--dry-run"],
    "check": [str(ROOT / "tests" / "scripts" / "plain_loop.py")],
    "demo": ["--device", "cpu", "--steps", "2", "--plot", "none"],
    "doctor": [],
    "explain": ["CUDA error: capturing stream has unjoined work"],
    "frozen": [str(ROOT / "examples" / "plain_loop.py")],
    "native": [],
    "recipes": [],
    "rules": [],
    "verify": [str(ROOT / "tests" / "scripts" / "captured.py"), "--steps", "5"],
    "train": [
        *(
            "--device",
            "cpu",
            "train.train_iters=2",
            "model.num_layers=1",
            "model.hidden_size=32",
            "model.seq_length=16",
        ),
        *("model.ffn_hidden_size=64", "model.num_attention_heads=2", "model.vocab_size=256", "logger.log_dir=/tmp"),
    ],
}
"""For each command, arguments of a short run."""
NAMES = [function.__name__ for functions in COMMANDS.values() for function in functions]
SLOW = {"advise", "check", "frozen", "verify"}
"""Commands whose short run starts several processes."""
RUN = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]
EXIT_CODES = {"advise": int(not torch.cuda.is_available())}
"""Short runs that do not exit with 0: `advise` cannot judge without a GPU."""


@functools.cache
def short_run(name: str, *, as_json: bool = False) -> Any:
    """The result of a command's short run, which several tests look at."""
    return runner.invoke(app, [name, *RUNS[name], *(["--json"] if as_json else [])], env=PLAIN)


def assert_plain(text: str) -> None:
    """No colours, nothing wider than 80 columns but code, which is indented and never wrapped, and no traceback."""
    assert "\x1b[" not in text
    wide = [line for line in text.splitlines() if len(line.rstrip()) > 80]
    assert [line for line in wide if not re.match(r" +(stepgraph|nsys|python|torchrun) ", line)] == []
    assert "Traceback" not in text


def parsed(text: str) -> dict[str, Any]:
    """What a command printed with `--json`; a NaN or an infinity in it fails."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    values = json.loads(text, parse_constant=refuse)
    assert isinstance(values, dict)
    return values


# -- all commands


def test_commands_stand_in_the_panels_in_order() -> None:
    assert list(COMMANDS) == ["Decide", "Check", "Understand", "Train", "Set-up"]
    assert set(NAMES) == set(RUNS), "each command has a short run here"
    shown = runner.invoke(app, ["--help"], env=PLAIN)
    panels = re.findall(r"─ ([\w-]+) ─", shown.stdout)
    assert panels == ["Options", *(panel for panel, functions in COMMANDS.items() if functions)]
    assert_plain(shown.output)
    assert runner.invoke(app, []).exit_code == 2


@pytest.mark.usefixtures("new_processes")
def test_help_rules_and_typos_load_no_torch() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom stepgraph.commands.cli import app\n"
        "for line in sys.stdin:\n"
        "    code, *words = line.split()\n"
        "    assert CliRunner().invoke(app, words).exit_code == int(code), line\n"
        "print('torch' in sys.modules)\n"
    )
    lines = [
        "--help",
        "--version",
        "rules",
        "rules --json",
        "rules host-read",
        "explain 901",
        "recipes --json",
        "recipes qwen3_vl",
    ]
    lines = [f"0 {line}" for line in (*lines, *(f"{name} --help" for name in NAMES))]
    typos = ["model.num_layer=2", "--recipe gpt2_smal", "--task sfd", "--cuda-graph-scope atn", "--config /no/file"]
    lines += [f"2 train {typo}" for typo in typos]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input="\n".join(lines), cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", NAMES)
def test_command_refuses_bad_usage_without_traceback(name: str) -> None:
    shown = runner.invoke(app, [name, "--help"], env=PLAIN)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert_plain(shown.stdout)
    for wrong in ("--no-such-option", "-gq", "-json"):
        result = runner.invoke(app, [name, wrong], env=PLAIN)
        assert result.exit_code == 2, wrong
        assert wrong in result.stderr
        assert result.stdout == ""
        assert_plain(result.output)
    as_json = runner.invoke(app, [name, "--json", "-jsn"])
    assert parsed(as_json.stdout)["exit_code"] == as_json.exit_code == 2
    assert "Did you mean --json?" in parsed(as_json.stdout)["error"]["what"]


def test_usage_of_settings_is_written_once() -> None:
    usage = runner.invoke(app, ["train", "--help"], env=PLAIN).stdout
    assert "train [OPTIONS] [SECTION.FIELD=VALUE]..." in " ".join(usage.split())


@pytest.mark.parametrize("name", RUN)
def test_command_json_is_alone_and_has_the_envelope(name: str) -> None:
    result = short_run(name, as_json=True)
    values = parsed(result.stdout)
    assert (values["schema"], values["command"], values["exit_code"]) == (1, name, result.exit_code)
    assert result.exit_code == EXIT_CODES.get(name, 0), result.output
    assert values["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert values["next"].split()[:1] == ["stepgraph"]
    assert values["next"].split()[1] in NAMES


@pytest.mark.parametrize("name", RUN)
def test_command_ends_with_the_next_one_to_type(name: str) -> None:
    result = short_run(name)
    assert result.exit_code == EXIT_CODES.get(name, 0), result.output
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"Next: stepgraph (\w+)( .+)?", last)
    assert last.split()[2] in NAMES
    if name != "native":  # a path may be longer
        assert_plain(result.stdout)


def test_version_is_the_project_version() -> None:
    result = runner.invoke(app, ["--version"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert result.exit_code == 0
    assert result.stdout == f"stepgraph {project['version']}\n"


def test_unknown_command_names_the_nearest() -> None:
    result = runner.invoke(app, ["rulse"], env=PLAIN)
    assert result.exit_code == 2
    assert "'rules'" in result.stderr


# -- what a command is made of

small = typer.Typer(context_settings=CONTEXT_SETTINGS, pretty_exceptions_enable=False)


@small.command(cls=Command)
def outcome(
    which: Annotated[str, typer.Argument()] = "fine",
    graph_scope: Annotated[str, typer.Option("--graph-scope", "-gs")] = "attn",
    group: Annotated[str, typer.Option("-g")] = "none",
    flag: Annotated[bool, typer.Option("-f")] = False,
    as_json: AsJson = False,
) -> Result:
    """End in one of several ways."""
    print("a library prints this")
    if which == "error":
        raise InvalidArgument("it broke", rule="option", details=["one", "two"], why="so.", fix="do.")
    if which == "usage":
        raise typer.BadParameter("not this one")
    if which == "stop":
        raise KeyboardInterrupt
    if which == "ended":
        raise SystemExit(143)  # as a training run after SIGTERM
    code = ExitCode.FINDINGS if which == "findings" else ExitCode.OK
    values = {"scope": graph_scope, "group": group, "flag": flag, "numbers": [1.0, math.nan, (math.inf,)]}
    return Result(values, f"scope {graph_scope}", next="stepgraph demo", exit_code=code)


@pytest.mark.parametrize(
    ("arguments", "scope", "group"),
    [
        (["--graph-scope", "mlp"], "mlp", "none"),
        (["--graph_scope", "mlp"], "mlp", "none"),
        (["--graph_scope=a_b"], "a_b", "none"),
        (["-gs", "mlp", "-g", "q"], "mlp", "q"),
        (["-gs=mlp"], "mlp", "none"),
        (["--graph-scope", "-abc"], "-abc", "none"),  # a value, not an option
        (["-f", "-g", "-xy", "fine"], "attn", "-xy"),
        (["--", "-xy"], "attn", "none"),
    ],
)
def test_options_are_read_as_they_are_typed(arguments: list[str], scope: str, group: str) -> None:
    result = runner.invoke(small, ["--json", *arguments])
    assert result.exit_code == 0, result.output
    values = parsed(result.stdout)
    assert (values["scope"], values["group"]) == (scope, group)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("-gq", "Did you mean -g?"),
        ("-graph-scope", "Did you mean --graph-scope?"),
        ("-jsn", "Did you mean --json?"),
        ("-hlp", "Did you mean --help?"),
        ("-zzzz", "Options of several letters have two dashes:"),
    ],
)
def test_unknown_short_words_are_refused_with_the_nearest(word: str, hint: str) -> None:
    result = runner.invoke(small, [word], env=PLAIN)
    assert result.exit_code == 2
    assert f"No such option: {word}" in result.stderr
    assert hint in result.stderr


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("-mr qwen3_30b_a3b --task pretrain", "Did you mean --recipe NAME?"),
        ("-m qwen", "Did you mean --recipe NAME?"),
        ("-ng 16", "Did you mean torchrun --nproc-per-node N -m stepgraph train?"),
        ("-gq", "two dashes: --recipe, --task"),
        ("--num-layers 2", "Did you mean model.num_layers=2?"),
        ("--num_layers=2", "Did you mean model.num_layers=2?"),
        ("--train-iters", "Did you mean train.train_iters=VALUE?"),
        ("--model.num_layers=2", "Did you mean model.num_layers=2?"),
        ("--recip gpt2_small", "--recipe)"),
    ],
)
def test_train_answers_other_options_with_its_own(line: str, hint: str) -> None:
    result = runner.invoke(app, ["train", *line.split()], env=PLAIN)
    assert (result.exit_code, result.stdout) == (2, "")
    assert hint in " ".join(result.stderr.replace("│", " ").split())
    assert_plain(result.stderr)


@pytest.mark.parametrize(
    ("which", "code", "what"),
    [
        ("error", 2, "it broke"),
        ("usage", 2, "Invalid value: not this one"),
        ("stop", 130, "interrupted"),
        ("ended", 143, "terminated"),
    ],
)
def test_failures_have_their_code_and_no_traceback(which: str, code: int, what: str) -> None:
    result = runner.invoke(small, [which, "--json"])
    values = parsed(result.stdout)
    assert (result.exit_code, values["exit_code"], values["error"]["what"]) == (code, code, what)
    assert "Traceback" not in result.output
    text = runner.invoke(small, [which], env=PLAIN)
    assert (text.exit_code, text.stdout) == (code, "a library prints this\n")
    assert what.removeprefix("Invalid value: ") in text.stderr
    if which == "error":
        assert values["error"] == {
            "rule": "option",
            "what": "it broke",
            "details": ["one", "two"],
            "why": "so.",
            "fix": "do.",
        }
        assert text.stderr.splitlines()[0] == "InvalidArgument: it broke   [option]"


def test_result_is_printed_for_people_or_programs() -> None:
    result = runner.invoke(small, ["findings", "--json"])
    assert result.exit_code == parsed(result.stdout)["exit_code"] == 1
    assert parsed(result.stdout)["numbers"] == [1.0, None, [None]]
    assert result.stderr == "a library prints this\n"
    text = runner.invoke(small, ["findings"], env=PLAIN)
    assert text.exit_code == 1
    assert text.stdout == "a library prints this\nscope attn\nNext: stepgraph demo\n"


PRINTING = [["rules"], ["rules", "--json"], ["rules", "--help"], ["--version"], ["check", "no.py", "--json"]]


def ran_into(stdout: int, args: list[str]) -> "subprocess.CompletedProcess[str]":
    """A command whose stdout is this file."""
    command = [sys.executable, "-m", "stepgraph", *args]
    environment = os.environ | PLAIN | NONE
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")


@needs_full_device
@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("args", PRINTING, ids=" ".join)
def test_stdout_that_is_full_is_an_error_of_the_machine(
    args: list[str], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "wb") as full:
        done = ran_into(full.fileno(), args)
    assert done.returncode == ExitCode.USAGE
    line = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"Error: stdout cannot be written: No space .*\. Why: .*\. Fix: .*\.", line)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("args", PRINTING, ids=" ".join)
def test_stdout_whose_reader_is_gone_is_no_error(args: list[str]) -> None:
    """As with `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = ran_into(writer, args)
    os.close(writer)
    if "check" in args:
        assert done.returncode == ExitCode.USAGE
        assert "[script-missing]" in done.stderr.splitlines()[0]
        assert "stdout" not in done.stderr
    else:
        assert done.stderr == ""
        assert done.returncode == (1 if "--help" in args else 0), "typer prints the help, and rich exits with 1"


@needs_full_device
def test_stdout_and_stderr_that_are_full_are_an_error() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "stepgraph", "rules"]
        done = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, env=os.environ | NONE)
    assert done.returncode == ExitCode.USAGE


def test_envelope_comes_first() -> None:
    values = json.loads(envelope("demo", ExitCode.FINDINGS, {"x": 1}, schema=2))
    assert list(values) == ["schema", "command", "version", "exit_code", "x"]
    assert (values["schema"], values["exit_code"]) == (2, 1)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_signals_stop_a_command(number: signal.Signals, code: ExitCode) -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        stops = Stops(None)
        with pytest.raises(Stopped), stops.watched():
            os.kill(os.getpid(), number)
            time.sleep(10)
        assert stops.exit_code == code
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.signal(signal.SIGINT, inherited)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_timeout_stops_a_command(is_ignored: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    stops = Stops(0.01)
    try:
        if is_ignored:  # as under nohup
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with pytest.raises(Stopped), stops.watched():
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stops.exit_code == ExitCode.SCRIPT
    assert stops.reason == "stopped after 0.01 s, as --timeout says"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("timeout", "ended", "code", "reason"),
    [
        (None, 130, ExitCode.INTERRUPTED, "interrupted"),
        (None, 143, ExitCode.TERMINATED, "terminated"),
        (0.01, 130, ExitCode.SCRIPT, "stopped after 0.01 s, as --timeout says"),
    ],
)
def test_run_that_takes_signals_itself_ends_with_their_code(
    timeout: float | None, ended: int, code: ExitCode, reason: str
) -> None:
    """A training run notes signals, and leaves with `SystemExit` at the end of its step."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stops = Stops(timeout)
        if timeout is not None:
            with pytest.raises(Stopped), stops.watched():
                time.sleep(10)
        assert stops.ending(SystemExit(ended)) == (code, reason)
        with pytest.raises(SystemExit):
            stops.ending(SystemExit(5))
    finally:
        signal.signal(signal.SIGINT, inherited)


# -- rules


@pytest.mark.parametrize("kind", [None, *catalogue.KINDS])
def test_rules_lists_the_catalogue(kind: str | None) -> None:
    arguments = ["rules"] if kind is None else ["rules", "--kind", kind]
    ids = [entry.id for entry in catalogue.entries(kind)]
    found = parsed(runner.invoke(app, [*arguments, "--json"]).stdout)["rules"]
    assert [entry["id"] for entry in found] == ids
    assert all({"id", "kind", "what", "why", "fix", "example"} <= set(entry) for entry in found)
    text = runner.invoke(app, arguments, env=PLAIN)
    assert set(ids) <= set(text.stdout.split())
    assert_plain(text.stdout)


@pytest.mark.parametrize("entry", catalogue.entries(), ids=lambda entry: entry.id)
def test_rules_explains_each_entry(entry: catalogue.Entry) -> None:
    text = runner.invoke(app, ["rules", entry.id], env=PLAIN)
    assert text.exit_code == 0
    examples = {f"  {line}".rstrip() for line in entry.example.strip().splitlines()}  # code is never wrapped
    assert_plain("\n".join(line for line in text.stdout.splitlines() if line.rstrip() not in examples))
    words = " ".join(text.stdout.split())
    assert f"What: {' '.join(entry.what.split())}." in words
    assert ("Why: " in words, "Fix: " in words) == (True, True)
    assert "](" not in words
    assert "{whose}" not in words
    assert re.search(r"Example( \(rule_of [^)]+\))?:", words) is not None or not entry.example


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["host-rea"], "did you mean host-read?"),
        (["zzzzzzzz"], "`stepgraph rules` lists them."),
        (["host-read", "--kind", "config"], "`host-read` is a rule of the kind capture, not config; leave --kind out."),
        (["--kind", "confg"], "did you mean config?"),
        (["--kind", "zzzz"], "use config, run, capture, check, symptom."),
    ],
)
def test_rules_refuses_unknown_names(arguments: list[str], expected: str) -> None:
    result = runner.invoke(app, ["rules", *arguments], env=PLAIN)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.replace("│", " ").split())


def test_rules_of_an_empty_kind_are_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "entries", lambda kind=None: ())
    text = runner.invoke(app, ["rules", "--kind", "check"], env=PLAIN)
    assert text.stdout == "there are no rules of the kind check yet\nNext: stepgraph rules\n"


@pytest.mark.parametrize("spelling", ["host-read", "host_read", "[host-read]"])
def test_rules_takes_an_id_as_an_error_prints_it(spelling: str) -> None:
    (found,) = parsed(runner.invoke(app, ["rules", spelling, "--json"]).stdout)["rules"]
    assert (found["id"], found["code"]) == ("host-read", 900)


# -- demo


def test_demo_json_says_that_the_runs_are_equal() -> None:
    result = short_run("demo", as_json=True)
    assert result.exit_code == 0, result.output
    values = parsed(result.stdout)
    assert values["equal"] is True
    assert values["parameters_equal"] is True
    assert values["equality"].endswith("losses and all parameters equal eager's, the parameters bit for bit")
    assert values["loss_difference"] == 0.0
    assert values["backend"] == "tape"
    assert values["speedup"] is None
    assert (values["steps"], values["total_steps"]) == (2, 2 + SETTLING_STEPS)
    assert values["replays"] >= 2
    assert values["graphs"] >= 1
    # The plain AdamW stays eager, so it cuts the step.
    assert values["segments"] >= 2
    assert values["eager_losses"] == values["graphed_losses"]
    assert len(values["graphed_times_ms"]) == 2 + SETTLING_STEPS
    assert values["picture"] is None


def test_demo_shows_a_table_a_chart_and_what_tape_times_mean() -> None:
    result = short_run("demo")
    assert result.exit_code == 0, result.output
    for text in ("parameters equal", "segments", "capture time", "its step times say nothing about a GPU's"):
        assert text in " ".join(result.stdout.split())
    lines = [line.split() for line in result.stdout.splitlines()]
    (loss,) = (line for line in lines if line[:2] == ["loss", "eager"])
    assert len(loss[2]) == 2 + SETTLING_STEPS, "a letter for each step"
    (step_time,) = (line for line in lines if line[:3] == ["step", "time", "eager"])
    assert step_time[3].startswith("█")
    assert step_time[-1] == "ms"
    assert "peak memory" not in result.stdout, "the tape has no figure"


@pytest.mark.parametrize("name", ["runs.svg", "runs.png"])
def test_demo_draws_a_picture_where_asked(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    from stepgraph.lab.bench.demo_view import draw_demo

    run = DemoRun(losses=(3.0, 2.0, 1.5, 1.2, 1.0, 0.9), times_ms=(9.0, 3.0, 3.0, 40.0, 2.0, 1.0), peak_bytes=None)
    result = DemoResult("cpu", "tape", "2.13", 0, run, run, (), {"replays": 3, "audits": 1})
    draw_demo(result, tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.slow
def test_demo_leaves_torch_settings_as_they_were() -> None:
    torch.manual_seed(7)
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state())
    phases: list[str] = []
    run_demo(1, 0, torch.device("cpu"), phases.append)
    total = 1 + SETTLING_STEPS
    assert phases == ["eager"] * total + ["graphed"] * total
    assert torch.get_num_threads() == before[0]
    assert torch.are_deterministic_algorithms_enabled() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--device", "abacus"], None),
        (["--device", "meta"], None),
        (["--device", "cuda:99"], "gpu-missing"),
        (["--steps", "0"], None),
        (["--timeout", "0"], None),
        (["--plot", "runs.txt"], None),
        (["--plot", "no/such/folder/runs.png"], None),
    ],
)
def test_demo_refuses_what_it_cannot_run(arguments: list[str], rule: str | None) -> None:
    result = runner.invoke(app, ["demo", *arguments, "--json"])
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert parsed(result.stdout)["error"].get("rule") == rule


# -- native


def test_native_refuses_to_build_and_remove_at_once() -> None:
    result = runner.invoke(app, ["native", "--build", "--remove"])
    assert result.exit_code == 2
    assert "pass only one of the two" in result.stderr


# -- recipes


def test_recipes_lists_size_scope_and_reason() -> None:
    listed = parsed(short_run("recipes", as_json=True).stdout)["recipes"]
    found = {row["name"]: row for row in listed}
    assert len(found) == 10
    assert (found["gpt2_small"]["size"], found["gpt2_small"]["scope"]) == ("124 M", ["attn"])
    assert (found["llama3_8b"]["size"], found["deepseek_v3"]["size"]) == ("8.03 B", "671 B")
    assert all(row["reason"] and row["source"].startswith("https://") for row in listed)
    text = short_run("recipes").stdout
    assert all(name in text for name in found)


def test_recipes_of_one_name_shows_its_settings() -> None:
    shown = parsed(runner.invoke(app, ["recipes", "nemotron-h", "--json"]).stdout)["recipes"][0]
    assert shown["settings"]["model.hybrid_override_pattern"].count("*") == 4
    assert "model.seq_length = 8192" in runner.invoke(app, ["recipes", "nemotron_h"], env=PLAIN).stdout
    wrong = runner.invoke(app, ["recipes", "nemotron"], env=PLAIN)
    assert wrong.exit_code == 2
    assert "did you mean 'nemotron_h'?" in wrong.stderr
