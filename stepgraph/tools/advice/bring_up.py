"""What to type: the lines to paste for a decision, and the six steps in which graphs are brought up.

Pure text from a decision of `decide` and the user's own names. The interface that was decided on is the one that is
pasted, and the one at which the steps arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stepgraph.tools.advice.decide import Api

_LINES: Mapping[str, str] = MappingProxyType(
    {
        Api.FULL_ITERATION: "forward_backward_func = stepgraph.FullCudaGraphWrapper(forward_backward_func)",
        Api.STAGE: "graphs = stepgraph.graph_stage(stage, schedule)",
        Api.MANAGER: "self.cudagraph_manager = stepgraph.CudaGraphManager(config)  # in each layer",
        Api.CALLABLES: "layers = stepgraph.make_graphed_callables(layers, samples, order=order)",
    }
)
"""The lines of the interfaces that need no name of the user's; they have those of the libraries."""


@dataclass(frozen=True, slots=True)
class Names:
    """The user's own names, for commands and code to paste."""

    script: str
    """The script and its arguments, as a command of stepgraph takes them: `train.py -- --epochs 1`."""
    run: str
    """The command that runs it: `python train.py --epochs 1`."""
    model: str = "model"
    step: str = ""
    """The function that is one step, if there is one."""

    def command(self, name: str, option: str = "") -> str:
        """Return the line that runs a command of stepgraph on the script, with an option before the script's own.

        Example:
            >>> Names("train.py -- --lr 1", "python train.py --lr 1").command("advise", "--try")
            'stepgraph advise train.py --try -- --lr 1'
        """
        target, dashes, args = self.script.partition(" -- ")
        return f"stepgraph {name} {target}{f' {option}' if option else ''}{dashes}{args}"


@dataclass(frozen=True, slots=True)
class Target:
    """Something to capture: the interface, and the words of the scope if it is `graph_modules`."""

    api: str
    words: tuple[str, ...] = ()

    @property
    def is_scope(self) -> bool:
        """Whether only parts of the step are captured."""
        return self.api == Api.GRAPH_MODULES


def ladder(names: Names, first: Target, last: Target) -> tuple[tuple[str, str], ...]:
    """Return the six steps, each with its command: from the narrowest useful scope to what was decided on.

    A step that is not captured in the script yet is named to `verify`.

    Example:
        >>> attention = Target(Api.GRAPH_MODULES, ("attn",))
        >>> ladder(Names("train.py", "python train.py"), attention, Target(Api.CAPTURE))[2][1]
        'graphs = stepgraph.graph_modules(model, scope=["attn"])'
    """
    line = line_for(first, names)
    is_named = names.step and first.api == Api.CAPTURE
    return (
        ("Make the eager run stable.", names.run),
        ("Fix the sequence length and the microbatch size.", names.command("check")),
        ("Capture the narrowest useful scope." if first.is_scope else f"Capture {_spoken(first)}.", line),
        ("Confirm that replays happen and that memory suffices.", f"print({line.partition(' = ')[0]}.report())"),
        (
            "Compare eager with replays, without warm-up and capture.",
            names.command("verify", f"--step {names.step}" if is_named else ""),
        ),
        _last_rung(names, first, last),
    )


def _last_rung(names: Names, first: Target, last: Target) -> tuple[str, str]:
    """Widen to what was decided on; from there, go on with what the run did not measure."""
    if first != last:
        return f"Only then widen it to {_spoken(last)}; torch.compile and overlap come last.", line_for(last, names)
    if last.is_scope:
        return "Only then widen it, as far as the findings of check allow.", names.command("check")
    return "Only then add torch.compile inside, or overlapped communication.", names.command("advise", "--try")


def _spoken(target: Target) -> str:
    if target.is_scope:
        return f"the scope {', '.join(target.words) or 'of whole layers'}"
    return "the stages of the schedule" if target.api == Api.STAGE else "the whole step"


def snippet(target: Target, names: Names) -> tuple[str, ...]:
    """Return the lines to paste for a target."""
    if target.api == Api.CAPTURE and not names.step:
        return (
            "import stepgraph",
            "",
            "@stepgraph.capture",
            "def train_step(batch):  # the body of your loop, from the forward to optimizer.step()",
            "    ...",
            "    return loss",
        )
    return ("import stepgraph", "", "# before the loop", line_for(target, names))


def line_for(target: Target, names: Names) -> str:
    """Return the line that captures a target; what it assigns to has a `report()`."""
    if target.api == Api.GRAPH_MODULES:
        scope = ", ".join(f'"{word}"' for word in target.words)
        return f"graphs = stepgraph.graph_modules({names.model}{f', scope=[{scope}]' if scope else ''})"
    if target.api != Api.CAPTURE:
        return _LINES[target.api]
    owner, dot, name = names.step.rpartition(":")[2].rpartition(".")
    if not name:
        return "step = stepgraph.capture(train_step)  # your loop's body, as a function"
    path = f"{owner[:1].lower()}{owner[1:]}{dot}{name}"
    return f"{path} = stepgraph.capture({path})"
