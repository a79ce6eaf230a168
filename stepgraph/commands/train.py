"""`stepgraph train`: train a recipe, or a small GPT, and say what was replayed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepgraph.commands.base import AsJson, Device, ExitCode, Result, Timeout, torch_device

if TYPE_CHECKING:
    import torch

    from stepgraph.config.container import ConfigContainer

_GRAPHS = "Graphs, as Megatron spells them"


def _flag(name: str, help_text: str) -> Any:
    return typer.Option(f"--{name}", help=help_text, rich_help_panel=_GRAPHS)


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Settings, such as train.train_iters=100."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="NAME", help="A recipe; without one gpt2_small, cut to fit.")
    ] = None,
    task: Annotated[str, typer.Option("--task", metavar="TASK", help="pretrain, sft or lora.")] = "pretrain",
    config: Annotated[
        list[str] | None, typer.Option("--config", metavar="FILE", help="A TOML file of settings; may be repeated.")
    ] = None,
    fit: Annotated[
        bool | None, typer.Option("--fit/--no-fit", help="Cut the model to this machine; on without --recipe.")
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
    cfg, cuts = configured(recipe, task, _joined(words, overrides or []), fit, where := torch_device(device))
    return _train(cfg, cuts, task, where, as_json)


def _joined(words: list[str], overrides: list[str]) -> list[str]:
    """Put words without `=` to the scope before them: `--cuda-graph-scope attn mlp` has two values."""
    scope = [word for word in overrides if "=" not in word]
    if scope and words and words[-1].startswith("--cuda-graph-scope="):
        words[-1] += "".join(f",{word}" for word in scope)
        overrides = [word for word in overrides if "=" in word]
    return words + overrides


def configured(
    recipe: str | None, task: str, words: list[str], fit: bool | None, device: torch.device
) -> tuple[ConfigContainer, list[str]]:
    """Return the configuration that a command line describes, and what was cut to fit the machine.

    The model is cut before the settings of the command line are applied: what is typed is what is run.
    """

    from stepgraph.config.overrides import CommandLine
    from stepgraph.recipes import recipe as make_recipe
    from stepgraph.recipes.fit import fit as cut
    from stepgraph.train.memory import DeviceMemory

    line = CommandLine.read(words)
    if line.rest:
        raise typer.BadParameter(f"`{line.rest[0]}` is not section.field=value", param_hint="SETTINGS")
    cfg = make_recipe(recipe or "gpt2_small", task)
    if recipe is None:
        cfg.train.train_iters = 20
    cuts: list[str] = []
    if fit or (fit is None and recipe is None):
        found = cut(cfg, DeviceMemory(device).free() or 2**33, device.type)
        cfg, cuts = found.config, [str(change) for change in found.cuts]
    line.apply_to(cfg)
    return cfg, cuts


def _train(cfg: ConfigContainer, cuts: list[str], task: str, device: torch.device, as_json: bool) -> Result:
    from stepgraph.train import TrainingStopped, finetune, pretrain

    is_first = int(os.environ.get("RANK", "0")) == 0
    if cuts and is_first:
        typer.echo("cut to fit this machine: " + "; ".join(cuts), err=True)
    run = pretrain if task == "pretrain" else finetune
    exit_code = ExitCode.OK
    try:
        report = run(cfg, device=device, quiet=as_json, prints_report=False)
    except TrainingStopped as stopped:
        if stopped.code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt from stopped  # Ctrl-C, or --timeout, which `Command` tells apart
        report, exit_code = stopped.report, ExitCode.TERMINATED
    if not is_first:
        raise typer.Exit(exit_code)
    values = report.to_dict() | {"task": task, "cuts": cuts}
    return Result(values, report, next="stepgraph rules --kind run", exit_code=exit_code)
