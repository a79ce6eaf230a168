"""What all commands share: exit codes, common options, the form of results, and how a command ends.

A command is a function that returns a `Result`. It prints nothing itself, except a progress bar on stderr. The class
`Command` around it reads the options, runs the function, and prints the result: for people, with the next command to
type as the last line, or with `--json` as one JSON object alone on stdout. An error of stepgraph becomes its message on
stderr and exit code 2, without a traceback. So does a stdout that cannot be written (`printing`). Ctrl-C, SIGTERM and
`--timeout` arrive as one exception, which captures hold back until their state is consistent; they differ in the exit
code only.

Example:
    >>> def rules(as_json: AsJson = False) -> Result:
    ...     return Result({"rules": []}, "no rules", next="stepgraph demo")
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
import typer.core

import stepgraph
from stepgraph.core import catalogue
from stepgraph.core.errors import InvalidArgument, NoStepError, ScriptError, StepgraphError, nearest, refusal_in
from stepgraph.core.strict_json import as_json
from stepgraph.core.torch_import import importing_torch
from stepgraph.tools.script.ranks import is_first_rank, rank

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType


class ExitCode(enum.IntEnum):
    """What the exit status of every command means."""

    OK = 0
    FINDINGS = 1
    """There are findings or differences, or no judgement is possible."""
    USAGE = 2
    """Wrong usage, a bad configuration, a broken rule, hardware that is not there, or a stdout that is full."""
    SCRIPT = 3
    """The user's script failed, or ran past the time limit."""
    INTERRUPTED = 130
    TERMINATED = 143


Device = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N; auto takes a GPU if there is one."),
]
Steps = Annotated[
    int, typer.Option("--steps", min=1, help="Steady steps: those after warm-up and capture, which are timed.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the weights, the data and the dropout.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Stop after this time, with exit code 3."),
]
"""The options that mean the same in every command that has them. The parameters are named `device`, `steps`, `seed`,
`as_json` and `timeout`."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a command."""

    values: Mapping[str, Any]
    """Plain values, for JSON. Numbers that are not finite become null."""
    text: RenderableType
    """The same for people."""
    next: str
    """The command to type next."""
    exit_code: ExitCode = ExitCode.OK
    schema: int = 1
    """Counts changes of the meaning of this command's values."""


CONTEXT_SETTINGS = {
    "help_option_names": ["--help", "-h"],
    "token_normalize_func": lambda name: name.replace("_", "-"),  # `--some_option` is `--some-option`
}
_UsageError: Any = typer.BadParameter.__base__  # typer has no public name for it
_OTHER_OPTIONS = MappingProxyType(
    {
        "-m": "--recipe NAME",
        "-mr": "--recipe NAME",
        "-g": "--device NAME",
        "-c": "mixed_precision=NAME",
        "-ng": "torchrun --nproc-per-node N -m stepgraph train",
    }
)
"""Options of Megatron Bridge's benchmark scripts, and what stands for them here."""
_SHORT_WORD = re.compile(r"-[a-zA-Z][\w-]+")


class _StrictOptions:
    """Refuses an unknown option of one dash and several letters, which would be read as an option and its value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        as_json, unknown = "--json" in args, _unknown_short_word(self, args)
        try:
            if unknown is not None:
                ctx.fail(_no_such_option(self, unknown))
            with printing():  # --help and --version
                return list(super().parse_args(ctx, list(args)))  # type: ignore[misc]
        except _UsageError as error:
            hint = _hint(self, getattr(error, "option_name", ""), args)
            if hint:
                error.message = f"No such option: {error.option_name}. {hint}"
                error.possibilities = error.possibilities if _takes_script(self) else None
            _report_usage(ctx, error, as_json)
            raise


class Group(_StrictOptions, typer.core.TyperGroup):
    """`stepgraph` itself."""


class Command(_StrictOptions, typer.core.TyperCommand):
    """One command: runs its function, prints the result, and exits with its code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Every way out of it ends here."""
        as_json = bool(ctx.params.get("as_json"))
        stops = Stops(ctx.params.get("timeout"))
        try:
            stdout = sys.stderr if as_json else sys.stdout
            with stops.watched(), contextlib.redirect_stdout(stdout), importing_torch():
                result = super().invoke(ctx)
        except KeyboardInterrupt:
            _fail(ctx, as_json, stops.exit_code, {"what": stops.reason}, stops.reason)
        except SystemExit as ended:  # a training run that a signal ended in order
            code, reason = stops.ending(ended)
            if not isinstance(ended, StoppedWith):
                _fail(ctx, as_json, code, {"what": reason}, reason)
            else:
                values = {**ended.result.values, "error": {"what": reason}}
                result = replace(ended.result, values=values, exit_code=code)
                _say(reason)
        except _UsageError as error:
            _report_usage(ctx, error, as_json)
            raise
        except Exception as raised:
            refused = refusal_in(raised)
            if not isinstance(refused, StepgraphError):
                raise
            if isinstance(refused, ScriptError) and not is_first_rank():  # all ranks raise it, and the first prints it
                raise typer.Exit(_code_of(refused)) from None
            parts = {name: getattr(refused, name) for name in ("rule", "what", "details", "why", "fix")}
            _fail(ctx, as_json, _code_of(refused), parts, f"{type(refused).__name__}: {refused}")
        if not isinstance(result, Result):
            return result
        values = {**result.values, "next": result.next}
        with printing(result.exit_code):
            text = envelope(ctx.info_name, result.exit_code, values, result.schema) if as_json else _for_people(result)
            typer.echo(text, color=True)  # rich has left colours out where they do not belong
        raise typer.Exit(result.exit_code)


class Stopped(KeyboardInterrupt):
    """Ctrl-C, SIGTERM, or the end of a time limit.

    A class of its own: after a plain KeyboardInterrupt inside `exec` Python ends with SIGINT's status, even if the
    exception was caught.
    """


class StoppedWith(SystemExit):
    """A run was ended by a signal, in order, with its exit code, and has a result of what it did until then."""

    def __init__(self, code: Any, result: Result) -> None:
        super().__init__(code)
        self.result = result


class Stops:
    """Turns SIGINT, SIGTERM and the end of a time limit into `Stopped`, and remembers which it was."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self.exit_code, self.reason = ExitCode.INTERRUPTED, "interrupted"

    def ending(self, ended: SystemExit) -> tuple[ExitCode, str]:
        """The exit code and the reason of a run that took the signals itself, and ended with their code.

        Raises `ended` again if no signal ended it.
        """
        if ended.code == ExitCode.TERMINATED:
            return ExitCode.TERMINATED, "terminated"
        if ended.code == ExitCode.INTERRUPTED:  # Ctrl-C, or the time limit
            return self.exit_code, self.reason
        raise ended

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch during the block. Python handles signals in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGTERM]
        numbers += [signal.SIGINT] if callable(signal.getsignal(signal.SIGINT)) else []  # `nohup` ignores it
        numbers += [signal.SIGALRM] if self._timeout is not None else []
        before = {number: signal.signal(number, self._stop) for number in numbers}
        if self._timeout is not None:
            signal.setitimer(signal.ITIMER_REAL, self._timeout)
        try:
            yield
        finally:
            if self._timeout is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise Stopped
        if number == signal.SIGTERM:
            self.exit_code, self.reason = ExitCode.TERMINATED, "terminated"
        else:
            self.exit_code, self.reason = ExitCode.SCRIPT, f"stopped after {self._timeout:g} s, as --timeout says"
        if not callable(signal.getsignal(signal.SIGINT)):
            raise Stopped
        signal.raise_signal(signal.SIGINT)  # which a capture holds back until its state is consistent


def envelope(command: str, exit_code: int, values: Mapping[str, Any], schema: int = 1) -> str:
    """Return the JSON text of a command's values, with what every command adds to them."""
    head = {"schema": schema, "command": command, "version": stepgraph.__version__, "exit_code": int(exit_code)}
    return as_json({**head, **values}, indent=2)


def torch_device(name: str) -> torch.device:
    """Return the device of `--device`; "auto" is the GPU if there is one."""
    import torch

    num_gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if num_gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"`{name}` has no backend; use auto, cpu, cuda or cuda:N", param_hint="--device")
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        what = catalogue.entry("gpu-missing").what
        raise InvalidArgument(f"--device {name}: {what} (torch sees {num_gpus})", rule="gpu-missing")
    return device


@contextlib.contextmanager
def printing(exit_code: ExitCode = ExitCode.OK) -> Iterator[None]:
    """Print on stdout in this block. If stdout cannot be written, the command ends.

    A reader that is gone (`| head`) has had enough, and the exit code stays. A full device is an error, reported on
    stderr. Its exit code is 2, unless the command ends with an error's code anyway.
    """
    try:
        yield
    except OSError as error:
        _discard(sys.stdout)
        if error.errno == errno.EPIPE:
            raise typer.Exit(exit_code) from None
        _say(
            f"Error: stdout cannot be written: {error.strerror or error}. Why: the file or device behind it takes no "
            "more. Fix: free space there, or redirect stdout to another file."
        )
        raise typer.Exit(max(exit_code, ExitCode.USAGE)) from None


def _say(message: str) -> None:
    """Print on stderr. If that fails too, the exit code alone tells."""
    try:
        typer.echo(message, err=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drop what a stream could not write: Python would write it again at its end, and fail with a code of its own."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:  # in tests there may be no file behind it
        os.dup2(null.fileno(), stream.fileno())


def _for_people(result: Result) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    with console.capture() as text:  # if rich printed, it would exit with 1 where the reader is gone
        console.print(result.text, crop=False)  # lines of code are longer than the screen rather than cut
        console.print(Text.assemble("Next: ", (result.next, "bold")), soft_wrap=True)
    return text.get().removesuffix("\n")


def code_line(line: str) -> RenderableType:
    """Return a line of code, or a command, for people: it is never wrapped, so that it can be pasted."""
    from rich.text import Text

    return Text(line, no_wrap=True, overflow="ignore")


def _code_of(error: StepgraphError) -> ExitCode:
    if isinstance(error, NoStepError):
        return ExitCode.FINDINGS
    return ExitCode.SCRIPT if isinstance(error, ScriptError) else ExitCode.USAGE


def _fail(ctx: Any, as_json: bool, exit_code: ExitCode, error: Mapping[str, Any], message: str) -> None:
    """Say on stderr what went wrong, and exit; of several ranks, the first alone prints JSON."""
    _say(message if is_first_rank() else f"rank {rank()}: {message}")
    if as_json and is_first_rank():
        with printing(exit_code):
            typer.echo(envelope(ctx.info_name, exit_code, {"error": error}))
    raise typer.Exit(exit_code) from None


def _report_usage(ctx: Any, error: Any, as_json: bool) -> None:
    """With `--json`, wrong usage is reported as JSON too; typer prints it on stderr."""
    if as_json and is_first_rank():
        with contextlib.suppress(typer.Exit), printing(ExitCode.USAGE):  # the error itself is yet to be printed
            typer.echo(envelope(ctx.info_name, ExitCode.USAGE, {"error": {"what": error.format_message()}}))


def _options(command: Any) -> dict[str, Any]:
    """The options of a command by their names, those of `--no-x` included."""
    return {
        name: option for option in command.params for name in (*option.opts, *option.secondary_opts) if name[0] == "-"
    }


def _unknown_short_word(command: Any, args: Sequence[str]) -> str | None:
    """The first argument such as `-gq` that is no declared option, and not the value of the option before it."""
    options = _options(command)
    words = iter(args)
    for word in words:
        name, has_value = word.partition("=")[:2]
        if word == "--" or not (word.startswith("-") or command.allow_interspersed_args):
            return None
        dashes = re.match("-*", name).group()  # type: ignore[union-attr]
        option = options.get(dashes + name[len(dashes) :].replace("_", "-"))
        if option is None and _SHORT_WORD.fullmatch(name):
            return name
        if option is not None and not option.is_flag and not has_value:
            next(words, None)
    return None


def _no_such_option(command: Any, name: str) -> str:
    options = _options(command)
    near = f"-{name}" if f"-{name}" in options else nearest(name, [*options, "--help"])
    known = ", ".join(option for option in (*options, "--help") if not option.startswith("--no-"))
    guess = f"Did you mean {near}?" if near else f"Options of several letters have two dashes: {known}."
    hint = _hint(command, name, ())
    if hint and near and _takes_script(command):  # its own option, or one of the script's
        hint = f"{guess} {hint}"
    return f"No such option: {name}. {hint or guess}"


def _hint(command: Any, option: str, args: Sequence[str]) -> str:
    """What to type for an unknown option of a command that takes settings, or a script with arguments of its own."""
    if option and _takes_script(command):
        value = _value_of(option, args)
        words = option if value == "VALUE" else f"{option} {value}"
        return f"The script's own arguments go after --: stepgraph {command.name} SCRIPT -- {words}."
    if not option or all(parameter.name != "overrides" for parameter in command.params):
        return ""
    if option in _OTHER_OPTIONS:
        return f"Did you mean {_OTHER_OPTIONS[option]}?"
    from stepgraph.config.base import ConfigSections
    from stepgraph.config.values import types_of

    section, dot, field = option.lstrip("-").replace("-", "_").rpartition(".")
    homes = [name for name, kind in types_of(ConfigSections).items() if field in types_of(kind)]
    if not homes or (dot and section not in homes):
        return ""
    return f"Did you mean {section or homes[0]}.{field}={_value_of(option, args)}?"


def _takes_script(command: Any) -> bool:
    return any(parameter.name == "script" for parameter in command.params)


def _value_of(option: str, args: Sequence[str]) -> str:
    """The value that was typed for an unknown option."""
    spelled = option.replace("_", "-")
    for place, word in enumerate(args):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") == spelled:
            following = args[place + 1] if place + 1 < len(args) else "-"
            return value if has_value else "VALUE" if following.startswith("-") or "=" in following else following
    return "VALUE"
