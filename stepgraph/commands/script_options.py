"""What the commands that run a user's script share: `SCRIPT [-- ARGS]` or `-m MODULE`, and how it is run.

Example:
    >>> @takes_script
    ... def frozen(wanted: Script, env: Env = None, as_json: AsJson = False) -> Result:
    ...     probe = "stepgraph.tools.frozen_values.frozen_probe:FrozenProbe"
    ...     outcome = run_script(wanted, probe, stdout_to_stderr=as_json)
    ...     refuse_unjudged(wanted, outcome)
    ...     return Result(...)
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, get_type_hints

import typer

from stepgraph.commands.base import ExitCode, Result
from stepgraph.tools.script.main_module import refuse_unknown_step
from stepgraph.tools.script.ranks import exchanged, is_first_rank
from stepgraph.tools.script.request import Script

ScriptPath = Annotated[
    str | None, typer.Argument(metavar="SCRIPT", help="The Python file to run. Its own code is run, unchanged.")
]
ScriptArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="Arguments of the script, after --.", show_default=False),
]
Module = Annotated[
    str | None, typer.Option("-m", "--module", metavar="NAME", help="Run a module, as by python -m, instead of a file.")
]
StepName = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="NAME",
        help="The function that is one step: function, Class.method or module:function. Without it, steps are found.",
    ),
]
ScriptTimeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.001, metavar="SECONDS", help="End the script, and all it started, then; exit code 3."
    ),
]
NoWrite = Annotated[bool, typer.Option("--no-write", help="Refuse all files that the script opens for writing.")]
"""The parameters are named `script`, `args`, `module`, `step`, `script_timeout` (300.0) and `no_write`: `timeout` would
limit the command itself, and lose what was seen until then."""


def script_of(
    script: str | None,
    args: Sequence[str] | None,
    module: str | None,
    step: str | None,
    timeout: float,
    no_write: bool,
) -> Script:
    """Return what a command line asks to run."""
    words = [word for word in (script, *(args or ())) if word is not None]
    if module is None and not words:
        raise typer.BadParameter("name a script, or a module with -m NAME", param_hint="SCRIPT")
    target = words.pop(0) if module is None else module
    return Script(target, tuple(words), module is not None, step, timeout, not no_write)


def command_on(command: str, script: Script, *options: str) -> str:
    """Return the line that runs a command of stepgraph on a script, with options of the command before its own.

    Example:
        >>> command_on("verify", Script("train.py", ("--epochs", "1")), "--step", "train_step")
        'stepgraph verify train.py --step train_step -- --epochs 1'
    """
    words = ["stepgraph", command, *(("-m",) if script.is_module else ()), script.target, *options]
    return shlex.join([*words, *(("--", *script.args) if script.args else ())])


def agreed(result: Result, timeout: float = 300.0) -> Result:
    """Return a result whose exit code is the worst of all ranks; the first rank prints it, the others exit.

    Without torchrun the result is returned as it is.
    """
    codes = [one["exit_code"] for one in exchanged({"exit_code": int(result.exit_code)}, timeout)]
    code = ExitCode(max([*codes, int(result.exit_code)]))
    if not is_first_rank():
        raise typer.Exit(code)
    return replace(result, exit_code=code)


def _shared(
    script: ScriptPath = None,
    args: ScriptArgs = None,
    module: Module = None,
    step: StepName = None,
    no_write: NoWrite = False,
    script_timeout: ScriptTimeout = 300.0,
) -> Script:
    """The parameters that `takes_script` adds to a command."""
    return script_of(script, args, module, step, script_timeout, no_write)


def takes_script(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command whose first parameter is the script: add the options that say which, and how to run it.

    Under torchrun all ranks exit alike, and the first one prints the result (`agreed`).
    """
    own, shared = inspect.signature(command), inspect.signature(_shared)
    first, last = list(shared.parameters.values())[:4], list(shared.parameters.values())[4:]
    hints = {**get_type_hints(command, include_extras=True), **get_type_hints(_shared, include_extras=True)}
    parameters = [p.replace(annotation=hints[p.name]) for p in (*first, *list(own.parameters.values())[1:], *last)]

    @functools.wraps(command)
    def wrapped(**given: Any) -> Result:
        wanted = _shared(**{name: given.pop(name) for name in shared.parameters})
        refuse_unknown_step(wanted)
        return agreed(command(wanted, **given), wanted.timeout)

    wrapped.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": Result}
    vars(wrapped)["__signature__"] = inspect.Signature(parameters, return_annotation=Result)
    return wrapped
