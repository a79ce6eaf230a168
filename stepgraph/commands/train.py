"""`stepgraph train`: train a recipe, or a small GPT, and say what was replayed."""

from __future__ import annotations

import contextlib
import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepgraph.commands.base import AsJson, Device, Result, StoppedWith, Timeout, torch_device
from stepgraph.core.wording import counted

if TYPE_CHECKING:
    import torch

    from stepgraph.config.container import ConfigContainer

_GRAPHS = "Graphs, as Megatron spells them"


def _flag(name: str, help_text: str) -> Any:
    return typer.Option(f"--{name}", help=help_text, rich_help_panel=_GRAPHS)


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.FIELD=VALUE", help="Settings, such as train.train_iters=100."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", metavar="NAME", help="A recipe; without one, and without --config, gpt2_small."),
    ] = None,
    task: Annotated[str, typer.Option("--task", metavar="TASK", help="pretrain, sft or lora.")] = "pretrain",
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config", metavar="FILE", help="A TOML file over the recipe, or over the defaults; may be repeated."
        ),
    ] = None,
    fit: Annotated[
        bool | None,
        typer.Option(
            "--fit/--no-fit",
            help="Cut the model to this machine, but for typed settings; on without --recipe and --config.",
        ),
    ] = None,
    device: Device = "auto",
    cuda_graph_impl: Annotated[str | None, _flag("cuda-graph-impl", "none, local or transformer_engine.")] = None,
    cuda_graph_scope: Annotated[str | None, _flag("cuda-graph-scope", "Words such as attn,mlp.")] = None,
    cuda_graph_modules: Annotated[str | None, _flag("cuda-graph-modules", "A newer name of the scope.")] = None,
    cuda_graph_warmup_steps: Annotated[int | None, _flag("cuda-graph-warmup-steps", "Eager steps first.")] = None,
    cuda_graph_num_warmup_steps: Annotated[int | None, _flag("cuda-graph-num-warmup-steps", "An older name.")] = None,
    enable_cuda_graph: Annotated[bool, _flag("enable-cuda-graph", "An older name of impl local.")] = False,
    external_cuda_graph: Annotated[bool, _flag("external-cuda-graph", "Older: transformer_engine.")] = False,
    te_rng_tracker: Annotated[bool, _flag("te-rng-tracker", "Random states that graphs replay.")] = False,
    no_check_for_nan_in_loss_and_grad: Annotated[
        bool, _flag("no-check-for-nan-in-loss-and-grad", "Do not look for NaN.")
    ] = False,
    as_json: AsJson = False,
    timeout: Timeout = None,
) -> Result:
    """Train a model with CUDA graphs, from a recipe and settings; under torchrun, each process is a rank."""
    flags = {
        "cuda-graph-impl": cuda_graph_impl,
        "cuda-graph-modules": cuda_graph_modules,
        "cuda-graph-warmup-steps": cuda_graph_warmup_steps,
        "cuda-graph-num-warmup-steps": cuda_graph_num_warmup_steps,
        "enable-cuda-graph": enable_cuda_graph or None,
        "external-cuda-graph": external_cuda_graph or None,
        "te-rng-tracker": te_rng_tracker or None,
        "no-check-for-nan-in-loss-and-grad": no_check_for_nan_in_loss_and_grad or None,
        "cuda-graph-scope": cuda_graph_scope,
    }
    words = [f"--config={file}" for file in config or ()]
    words += [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items() if value is not None
    ]
    words = _joined(words, overrides or [])
    with _warnings_of_options(words):
        wanted = read(recipe, task, words, fit)  # before torch, which takes seconds to import
    where = torch_device(device)
    typed = _typed(recipe, task, device, fit) + words
    return _train(*configured(wanted, where), task, where, as_json, typed, _following(recipe, bool(config)))


def _following(recipe: str | None, has_files: bool) -> str:
    """The command to type next: what graphs win on this recipe; the recipes, if there was none."""
    return (
        "stepgraph recipes" if has_files and recipe is None else f"stepgraph bench -mr {recipe or 'gpt2_small'} --fit"
    )


def _typed(recipe: str | None, task: str, device: str, fit: bool | None) -> list[str]:
    """The options that were typed, for the command that goes on with a run."""
    chosen = {"--recipe": recipe, "--task": None if task == "pretrain" else task}
    chosen["--device"] = None if device == "auto" else device
    words = [word for name, value in chosen.items() if value is not None for word in (name, value)]
    return words + ([] if fit is None else ["--fit" if fit else "--no-fit"])


@contextlib.contextmanager
def _warnings_of_options(words: Sequence[str]) -> Iterator[None]:
    """Print warnings about options by the name that was typed; their lines of code are not the user's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    for each in caught:
        text = str(each.message)
        for flag in flags:
            text = text.replace(f"model.{flag[2:].replace('-', '_')} is", f"{flag} is")
        typer.echo(f"warning: {text}", err=True)


def resume_command(words: Sequence[str], folder: str, ranks: int) -> str:
    """Return the command that goes on with a run that these words started, from its latest checkpoint.

    Example:
        >>> resume_command(["--recipe", "gpt2_small", "checkpoint.save=runs"], "runs", ranks=1)
        'stepgraph train --recipe gpt2_small checkpoint.save=runs checkpoint.load=runs'
    """
    start = ["torchrun", "--nproc-per-node", str(ranks), "-m", "stepgraph"] if ranks > 1 else ["stepgraph"]
    kept = [word for word in words if not word.startswith("checkpoint.load=")]
    return shlex.join([*start, "train", *kept, f"checkpoint.load={folder}"])


def _joined(words: list[str], overrides: list[str]) -> list[str]:
    """Put words without `=` to the scope before them: `--cuda-graph-scope attn mlp` has two values."""
    scope = [word for word in overrides if "=" not in word]
    if scope and words and words[-1].startswith("--cuda-graph-scope="):
        words[-1] += "".join(f",{word}" for word in scope)
        overrides = [word for word in overrides if "=" in word]
    return words + overrides


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command line asks for, before the machine is looked at."""

    config: ConfigContainer
    fits: bool
    """Whether the model is cut to the machine."""
    kept: frozenset[str]
    """Settings that were typed, which no cut changes: those of the model, `mixed_precision`, `global_batch_size`."""


def read(recipe: str | None, task: str, words: list[str], fit: bool | None) -> Wanted:
    """Return what a command line describes. Imports no torch.

    Settings are laid over the recipe; without a recipe over the defaults if there is a file, else over gpt2_small.
    """
    from stepgraph.config.container import ConfigContainer
    from stepgraph.config.overrides import CommandLine, apply_overrides, no_override
    from stepgraph.config.toml_file import read_toml
    from stepgraph.lab.recipes import for_task
    from stepgraph.lab.recipes import recipe as make_recipe

    line = CommandLine.read(words)
    if line.rest:
        raise no_override(line.rest[0])
    is_plain = recipe is None and not line.files
    if recipe is None and line.files:
        cfg = for_task(ConfigContainer(), task)
    else:
        cfg = make_recipe(recipe or "gpt2_small", task)
    if is_plain:
        cfg.train.train_iters = 20
    for file in line.files:
        cfg.update(read_toml(file))
    before = cfg.to_dict()["model"]
    apply_overrides(cfg, line.overrides)
    if task != "pretrain" and cfg.dataset.kind == "text":
        cfg.dataset.kind = "sft"  # as `finetune` does
    names_precision = any(text.removeprefix("--").startswith("mixed_precision") for text in line.overrides)
    names = {text.partition("=")[0].strip().removeprefix("--").removeprefix("model.") for text in line.overrides}
    kept = frozenset(name for name, value in cfg.to_dict()["model"].items() if name in names or value != before[name])
    others = {"mixed_precision": names_precision, "global_batch_size": "train.global_batch_size" in names}
    return Wanted(cfg, is_plain if fit is None else fit, kept | {name for name, typed in others.items() if typed})


def configured(wanted: Wanted, device: torch.device) -> tuple[ConfigContainer, list[str], int]:
    """Return the configuration that is trained, what was cut to fit the machine, and the number of parameters.

    A broken rule, or a model that is too large and not to be cut, is refused before anything is built.
    """
    import torch

    from stepgraph.config.environment import Environment
    from stepgraph.lab.recipes.fit import fit, refuse_too_large
    from stepgraph.lab.recipes.memory import available_host_memory
    from stepgraph.lab.train.memory import DeviceMemory
    from stepgraph.lab.train.settings import refuse_untrained

    if device.type == "cuda":
        own = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
        torch.cuda.set_device(own)  # else each rank would start a context on the first GPU
        free = DeviceMemory(torch.device("cuda", own)).free()
    else:
        free = available_host_memory()
    cfg, environment = wanted.config, Environment.read(device.type)
    if not wanted.fits:
        refuse_untrained(cfg.validate(environment, run=True))
        return cfg, [], refuse_too_large(cfg, 2**63 if free is None else free).parameters
    checked = cfg.copy()
    if "num_attention_heads" not in wanted.kept:
        checked.model.kv_channels = checked.model.kv_channels or 1  # the cut chooses heads that fit the width
    refuse_untrained(checked.validate(environment, run=True))
    found = fit(cfg, free or 2**33, device.type, kept=wanted.kept, num_ranks=environment.world_size)
    found.config.validate(environment, run=True)
    return found.config, [str(change) for change in found.cuts], found.estimate.parameters


def _train(
    cfg: ConfigContainer,
    cuts: list[str],
    parameters: int,
    task: str,
    device: torch.device,
    as_json: bool,
    words: Sequence[str],
    following: str,
) -> Result:
    """Run, and report also of a run that a signal or a time limit has ended."""
    from stepgraph.lab.train import TrainingStopped, finetune, pretrain

    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first and not as_json:
        if cuts:
            typer.echo("\n  ".join(["cut to fit this machine:", *cuts]), err=True)
        layers = cfg.model.num_layers
        shape = f"{counted(layers, 'layers')}, width {cfg.model.hidden_size}"
        typer.echo(f"model: {cfg.model.kind}, {shape}, {parameters:,} parameters", err=True)
    run = pretrain if task == "pretrain" else finetune
    ended: TrainingStopped | None = None
    try:
        report = run(cfg, device=device, quiet=as_json, prints_report=False)
    except TrainingStopped as stopped:
        if cfg.checkpoint.save is not None:
            following = resume_command(words, cfg.checkpoint.save, int(os.environ.get("WORLD_SIZE", "1")))
            told = f"saved at step {stopped.report.step}; go on with: {following}"
        else:
            steps = counted(stopped.report.step, "steps")
            told = f"nothing was saved of {steps}; checkpoint.save=FOLDER saves at a signal"
        if is_first:
            typer.echo(told, err=True)
        report, ended = stopped.report, stopped
    if not is_first:
        raise ended or typer.Exit()
    values = report.to_dict() | {"task": task, "cuts": cuts, "parameters": parameters}
    result = Result(values, report, next=following)
    if ended is not None:
        raise StoppedWith(ended.code, result)
    return result
