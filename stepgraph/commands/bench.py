"""`stepgraph bench`: what a recipe's step takes on this machine, with the flags of Megatron Bridge's harness."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepgraph.commands.base import AsJson, ExitCode, Result, Seed, Steps, Timeout, torch_device
from stepgraph.commands.train import Wanted, configured, read
from stepgraph.core.errors import InvalidArgument, nearest
from stepgraph.core.wording import counted, with_article

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from stepgraph.lab.bench.compare import Comparison, Row
    from stepgraph.lab.bench.hardware import Gpu
    from stepgraph.lab.bench.jobs import Record
    from stepgraph.lab.bench.mechanisms import Mechanism
    from stepgraph.lab.bench.predict import MachinePrediction
    from stepgraph.lab.bench.results import ResultFile
    from stepgraph.lab.bench.run import BenchResult
    from stepgraph.lab.recipes.machines import MachineSettings

_FAMILIES = {
    "gpt": ("gpt2_small",),
    "llama": ("llama3_8b", "llama3_70b", "llama3_70b_sft"),
    "qwen": ("qwen3_30b_a3b", "qwen3_vl"),
    "gpt_oss": ("gpt_oss_20b", "gpt_oss_120b"),
    "deepseek": ("deepseek_v3",),
    "nemotron": ("nemotron_h",),
}
_SIZES = "Sizes"
_GRAPHS = "Graphs"
_COMPARE = "Comparison"
_JOB_S = 300.0
"""Time for one mechanism in one pass."""
_LONG_S = 60.0
"""The time left is shown if it is longer."""
_STEPS, _SEED = 20, 1234
_ON_CPU = "A CPU's times say nothing about a GPU's: this run shows that everything works."
_NEEDS_MORE = (
    ". It does not fit with stepgraph's models and the optimizer's whole state on each rank; NVIDIA's settings are for "
    "fused kernels and a sharded optimizer."
)
_FP8 = ("fp8_cs", "fp8_ds", "fp8_mx", "fp8_sc")


_SETTINGS = MappingProxyType(
    {
        "tensor": "model.tensor_model_parallel_size",
        "pipeline": "model.pipeline_model_parallel_size",
        "expert": "model.expert_model_parallel_size",
        "context": "model.context_parallel_size",
        "virtual": "model.virtual_pipeline_model_parallel_size",
        "global_batch": "train.global_batch_size",
        "micro_batch": "train.micro_batch_size",
        "seq_length": "model.seq_length",
        "cuda_graph_impl": "model.cuda_graph_impl",
        "cuda_graph_scope": "model.cuda_graph_scope",
        "seed": "rng.seed",
    }
)
"""The settings that options of the command stand for, by parameter."""
_PARALLEL = MappingProxyType({"tensor": "-tp", "pipeline": "-pp", "expert": "-ep", "context": "-cp", "virtual": "-vp"})
_ON_ONE = MappingProxyType(
    {
        "global_batch": "-gb",
        "micro_batch": "-mb",
        "seq_length": "-sl",
        "cuda_graph_impl": "--cuda_graph_impl",
        "cuda_graph_scope": "--cuda_graph_scope",
    }
)


def _size(*names: str, help: str) -> Any:
    return typer.Option(*names, min=1, help=help, rich_help_panel=_SIZES, show_default=False)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.FIELD=VALUE", help="Settings, such as optimizer.lr=1e-4."),
]
Family = Annotated[
    str | None, typer.Option("-m", "--model-family-name", metavar="NAME", help="gpt, llama, qwen, gpt_oss, ...")
]
Recipe = Annotated[
    str | None, typer.Option("-mr", "--model-recipe-name", metavar="NAME", help="A recipe: stepgraph recipes.")
]
Task = Annotated[str, typer.Option("--task", metavar="TASK", help="pretrain, sft or lora.")]
GpuName = Annotated[
    str | None, typer.Option("-g", "--gpu", metavar="NAME", help="h100, h200, b200, ... or cpu; default: this one.")
]
ComputeDtype = Annotated[str, typer.Option("-c", "--compute-dtype", metavar="NAME", help="bf16.")]
NumGpus = Annotated[
    int | None,
    typer.Option(
        "-ng",
        "--num-gpus",
        min=1,
        help="Number of GPUs; default: torchrun's processes, or those published for -g.",
        show_default=False,
    ),
]
Tensor = Annotated[int | None, _size("-tp", "--tensor-model-parallel-size", help="Tensor parallelism.")]
Pipeline = Annotated[int | None, _size("-pp", "--pipeline-model-parallel-size", help="Pipeline stages.")]
Expert = Annotated[int | None, _size("-ep", "--expert-model-parallel-size", help="Expert parallelism.")]
Context = Annotated[int | None, _size("-cp", "--context-parallel-size", help="Context parallelism.")]
Virtual = Annotated[int | None, _size("-vp", "--virtual-pipeline-model-parallel-size", help="Chunks of a stage.")]
GlobalBatch = Annotated[int | None, _size("-gb", "--global-batch-size", help="Sequences of an iteration.")]
MicroBatch = Annotated[int | None, _size("-mb", "--micro-batch-size", help="Sequences of a microbatch.")]
SeqLength = Annotated[int | None, _size("-sl", "--seq-length", help="Tokens of a sequence.")]
GraphImpl = Annotated[
    str | None,
    typer.Option("--cuda-graph-impl", help="none, local or transformer_engine.", rich_help_panel=_GRAPHS),
]
GraphScope = Annotated[
    str | None, typer.Option("--cuda-graph-scope", help="Words such as attn,mlp.", rich_help_panel=_GRAPHS)
]
Dispatcher = Annotated[
    str,
    typer.Option("--moe-token-dispatcher-type", help="alltoall; recorded only.", rich_help_panel=_GRAPHS),
]
FitHere = Annotated[
    bool | None, typer.Option("--fit/--no-fit", help="Cut the model to this machine; on for a CPU.", show_default=False)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Validate and predict; run nothing.")]
Compares = Annotated[
    bool, typer.Option("--compare", help="Run every mechanism, in two passes.", rich_help_panel=_COMPARE)
]
Only = Annotated[
    str | None,
    typer.Option("--only", metavar="NAMES", help="Of these alone: eager*,ours-whole.", rich_help_panel=_COMPARE),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the rows in the JSON file.", rich_help_panel=_COMPARE)
]
JobTimeout = Annotated[
    float,
    typer.Option("--job-timeout", min=1, metavar="SECONDS", help="For one mechanism.", rich_help_panel=_COMPARE),
]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", help="Write a report.", rich_help_panel=_COMPARE)
]


def bench(
    overrides: Overrides = None,
    family: Family = None,
    recipe: Recipe = None,
    task: Task = "pretrain",
    gpu: GpuName = None,
    compute_dtype: ComputeDtype = "bf16",
    num_gpus: NumGpus = None,
    tensor: Tensor = None,
    pipeline: Pipeline = None,
    expert: Expert = None,
    context: Context = None,
    virtual: Virtual = None,
    global_batch: GlobalBatch = None,
    micro_batch: MicroBatch = None,
    seq_length: SeqLength = None,
    cuda_graph_impl: GraphImpl = None,
    cuda_graph_scope: GraphScope = None,
    dispatcher: Dispatcher = "alltoall",
    fit: FitHere = None,
    dry_run: DryRun = False,
    compares: Compares = False,
    only: Only = None,
    resume: Resume = False,
    report: ReportFile = None,
    job_timeout: JobTimeout = _JOB_S,
    steps: Steps = _STEPS,
    seed: Seed = _SEED,
    as_json: AsJson = False,
    timeout: Timeout = None,
) -> Result:
    """Measure a recipe's training step: time, TFLOP/s, how busy the GPU is, memory, replays, and the loss."""
    given = dict(locals())
    from stepgraph.lab.recipes.machines import machine_settings

    name = _recipe(family, recipe)
    _refuse_dtype(compute_dtype)
    _refuse_dispatcher(dispatcher)
    words = [f"{setting}={given[key]}" for key, setting in _SETTINGS.items() if given[key] is not None]
    words += overrides or []
    world = int(os.environ.get("WORLD_SIZE", "1"))
    named = gpu.lower() if gpu is not None else None
    count = num_gpus or (None if dry_run else world)
    machine = machine_settings(name, task, named, count, words, divides=dry_run and not fit)
    wanted = read(name, task, [*machine.words, *words], bool(fit))
    sizes = (*_typed(given, _ON_ONE), *_run_options(steps, seed), *map(shlex.quote, overrides or ()))
    asked = Asked(name, task, named, machine.num_gpus, dispatcher, _typed(given, _PARALLEL), sizes, fit, machine)
    if dry_run:
        _refuse_with_dry_run({"--compare": compares, "--only": only, "--resume": resume, "--report": report})
        return _predicted(asked, wanted)
    if not compares and (only is not None or resume or report is not None):
        raise typer.BadParameter("are for --compare", param_hint="--only, --resume and --report")
    if compares and world > 1:
        raise _one_at_a_time(asked, world)
    device = _device_of(asked, world)
    if fit is None and device.type == "cpu":  # whole models take minutes a step there
        asked, wanted = replace(asked, fits=True), replace(wanted, fits=True)
    if compares:
        return _compared(asked, wanted, device, steps, Reporting(only, resume, report, job_timeout, as_json))
    return _measured(asked, wanted, device, steps, as_json)


@dataclass(frozen=True, slots=True)
class Asked:
    """The parts of a command line that are no settings."""

    recipe: str
    task: str
    gpu: str | None
    num_gpus: int
    dispatcher: str
    parallel: tuple[str, ...] = ()
    """The parallel sizes, as they were typed."""
    sizes: tuple[str, ...] = ()
    """The other sizes, the scope and settings, which hold on one GPU too."""
    fits: bool | None = None
    """As typed; None if it was not."""
    published: MachineSettings | None = None
    """The settings that `-g` has laid over the recipe."""

    @property
    def machine_settings(self) -> dict[str, Any] | None:
        """What `-g` has laid over the recipe, for JSON; None without `-g`."""
        settings = self.published.settings if self.published is not None else None
        return None if settings is None else dict(settings)

    @property
    def machine(self) -> tuple[str, ...]:
        """The GPUs, and how the model is divided among them, as typed."""
        gpu = (f"-g {self.gpu}",) if self.gpu else ()
        return (*gpu, f"-ng {self.num_gpus}", *self.parallel)

    def same(self, *words: str) -> str:
        """The command for the same model on the same device, with these words."""
        device = (f"-g {self.gpu}",) if self.gpu else ()
        return self.line(*device, *self.cut, *self.sizes, *words)

    @property
    def cut(self) -> tuple[str, ...]:
        """Whether the model is cut, as typed."""
        return () if self.fits is None else ("--fit",) if self.fits else ("--no-fit",)

    def line(self, *words: str) -> str:
        """The command for the same recipe with these words."""
        parts = ["stepgraph bench", f"-mr {self.recipe}"]
        parts += [f"--task {self.task}"] if self.task != "pretrain" else []
        return " ".join([*parts, *words])


def _typed(given: Mapping[str, object], options: Mapping[str, str]) -> tuple[str, ...]:
    """The options that were given, as they are typed."""
    return tuple(f"{option} {given[name]}" for name, option in options.items() if given[name] is not None)


def _run_options(steps: int, seed: int) -> tuple[str, ...]:
    """The number of steps and the seed, as they are typed, where they are not the defaults."""
    asked = {"--steps": (steps, _STEPS), "--seed": (seed, _SEED)}
    return tuple(f"{option} {value}" for option, (value, default) in asked.items() if value != default)


def _recipe(family: str | None, recipe: str | None) -> str:
    """The recipe that both names mean, or the refusal of names that do not fit together."""
    from stepgraph.lab.recipes import RECIPES, find_recipe

    if family is not None and family not in _FAMILIES:
        if family in RECIPES:
            raise InvalidArgument(
                f"`{family}` is a recipe, and -m names a family of models",
                rule="recipe",
                why="-m is the family, such as qwen; -mr is the recipe, and is enough alone.",
                fix=f"-mr {family}",
            )
        near = nearest(family, _FAMILIES)
        listed = ", ".join(_FAMILIES)
        raise InvalidArgument(
            f"`{family}` is no family of models",
            rule="recipe",
            why=f"the families are {listed}.",
            fix=f"did you mean -m {near}?" if near else f"use one of {listed}, or -mr alone.",
        )
    if recipe is None:
        if family is None:
            return "gpt2_small"
        raise InvalidArgument(
            f"-m {family} names a family, and no recipe is given",
            rule="recipe",
            why=f"its recipes are {', '.join(_FAMILIES[family])}.",
            fix=f"add -mr {_FAMILIES[family][0]}.",
        )
    found = find_recipe(recipe).name
    if family is not None and found not in _FAMILIES[family]:
        home = next((name for name, recipes in _FAMILIES.items() if found in recipes), None)
        raise InvalidArgument(
            f"-mr {found} is not of the family {family}",
            rule="recipe",
            why=f"the recipes of {family} are {', '.join(_FAMILIES[family])}.",
            fix=f"use -m {home}, or leave -m out.",
        )
    assert found in RECIPES
    return found


def _refuse_dtype(name: str) -> None:
    if name == "bf16":
        return
    is_fp8 = name in _FP8
    raise InvalidArgument(
        f"-c {name} is not measured",
        rule="not-trained" if is_fp8 else "option",
        why="FP8 recipes are not trained here yet." if is_fp8 else f"the types are bf16, and later {', '.join(_FP8)}.",
        fix="use -c bf16.",
    )


def _refuse_dispatcher(name: str) -> None:
    if name != "alltoall":
        raise InvalidArgument(
            f"--moe_token_dispatcher_type {name} is not run here",
            rule="option",
            why="without expert parallelism no tokens are sent between GPUs, so dispatchers do not differ.",
            fix="use alltoall, which is recorded in the result.",
        )


def _refuse_with_dry_run(given: Mapping[str, object]) -> None:
    """Refuse options of a run beside `--dry-run`, which would do nothing."""
    names = [name for name, value in given.items() if value]
    if names:
        raise typer.BadParameter("runs nothing: leave it out, or leave out " + ", ".join(names), param_hint="--dry-run")


def _one_at_a_time(asked: Asked, world: int) -> InvalidArgument:
    return InvalidArgument(
        f"--compare, and {world} processes were started",
        rule="world-size",
        why="mechanisms are compared in one process at a time.",
        fix=f"without torchrun: {asked.same('--compare')}",
    )


def _device_of(asked: Asked, world: int) -> torch.device:
    """The device of a run, or the refusal of a machine that is not here."""
    import torch

    from stepgraph.lab.bench.hardware import CPU, find_gpu, gpu_of

    if asked.gpu not in (None, CPU):
        wants = find_gpu(asked.gpu)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        if name is None or gpu_of(name) is not wants:
            raise _not_here(
                asked, f"-g {asked.gpu}, and this machine has {'no GPU' if name is None else with_article(name)}"
            )
    here = torch.cuda.device_count()
    if asked.gpu != CPU and asked.num_gpus > (here or world):  # a CPU may have any number of processes
        raise _not_here(asked, f"-ng {asked.num_gpus}, and this machine has {here}")
    if asked.num_gpus != world:
        started = counted(world, "processes were started", "process was started")
        raise InvalidArgument(
            f"-ng {asked.num_gpus}, and {started}",
            rule="world-size",
            why="each GPU is trained on by a process of its own.",
            fix=f"torchrun --nproc-per-node {asked.num_gpus} -m "
            + asked.line(*asked.machine, *asked.cut, *asked.sizes),
        )
    return torch_device("cpu" if asked.gpu == CPU else "auto")


def _not_here(asked: Asked, what: str) -> InvalidArgument:
    there = [*asked.machine, *asked.sizes]
    here = asked.line("--fit -ng 1", *asked.sizes)
    return InvalidArgument(
        what,
        rule="gpu-missing",
        why="a step is measured where it runs; for other machines there is only a prediction.",
        fix=f"`{asked.line(*there, '--dry-run')}` validates and predicts; `{here}` measures a part of the model here.",
    )


# -- a run


def _measured(asked: Asked, wanted: Wanted, device: torch.device, steps: int, as_json: bool) -> Result:
    import torch

    from stepgraph.lab.bench.hardware import gpu_of
    from stepgraph.lab.bench.run import benchmark

    cfg, cuts, parameters = configured(wanted, device)
    gpu = gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    found = benchmark(cfg, device=device, steps=steps, gpu=gpu, quiet=as_json)
    if int(os.environ.get("RANK", "0")) != 0:
        raise typer.Exit(ExitCode.OK)
    scope = [str(word) for word in cfg.model.cuda_graph_scope]
    values = found.to_dict() | {
        "recipe": asked.recipe,
        "task": asked.task,
        "gpu": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "num_gpus": asked.num_gpus,
        "parameters": parameters,
        "cuts": cuts,
        "cuda_graph_impl": cfg.model.cuda_graph_impl,
        "cuda_graph_scope": scope,
        "moe_token_dispatcher_type": asked.dispatcher,
        "machine_settings": asked.machine_settings,
    }
    text = render(found, f"{asked.recipe}, {cfg.model.cuda_graph_impl}: {', '.join(scope) or 'no scope'}", cuts)
    return Result(values, _below_settings(asked, text), next=asked.same("--compare"))


def _below_settings(asked: Asked, text: RenderableType) -> RenderableType:
    """A text below the line that names the settings of the GPU, if there is one."""
    from rich.console import Group
    from rich.text import Text

    line = asked.published.line if asked.published is not None else None
    return text if line is None else Group(Text(line), text)


def render(found: BenchResult, title: str, cuts: list[str]) -> RenderableType:
    """The figures of a run as a table."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    values, report = found.to_dict(), found.report
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False, show_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    spread = f"(p10 {found.times.p10:.2f}, p90 {found.times.p90:.2f}, {counted(len(found.times.each), 'steps')})"
    rows = [("step time", f"{found.times.median:.2f} ms {spread}")]
    if found.times.audited:
        told = f"{len(found.times.audited)} of these steps, {found.times.audit_ms / 1e3:.2f} s in all"
        rows.append(("audits", f"{told}; p90 without them {values['step_ms_p90_steady']:.2f}"))
    mfu = "" if found.mfu is None else f", MFU {100 * found.mfu:.1f} %"
    rows.append(("throughput", f"{found.tflops:.2f} TFLOP/s/GPU{mfu}, {found.tokens_per_s:,.0f} tokens/s"))
    if found.busy_fraction is not None:
        under = f"{found.timeline.small} under 50 us"
        rows.append(("GPU busy", f"{100 * found.busy_fraction:.1f} %"))
        rows.append(("kernels", f"{len(found.timeline.kernels)}, {under}; {values['graph_launches']} graph launches"))
    if report.replays:
        rows.append(("captured", f"{counted(report.graphed, 'graphable layers')} in {report.capture_seconds:.2f} s"))
    rows.append(("memory", _memory(found)))
    reasons = ", ".join(f"{reason}: {count}" for reason, count in report.eager_reasons.items())
    rows.append(("replays", f"{report.replays}" + (f"; eager: {reasons}" if reasons else "")))
    rows.append(("loss", "none" if report.final_loss is None else f"{report.final_loss:.6f}"))
    for name, text in rows:
        table.add_row(name, Text(text))
    parts: list[RenderableType] = [table]
    if cuts:
        parts.insert(0, Text("cut to fit this machine: " + "; ".join(cuts)))
    if not found.timeline.kernels:
        parts.append(Text(_ON_CPU))
    return Group(*parts)


def _memory(found: BenchResult) -> str:
    memory = found.memory
    parts = [
        (memory.allocated, "allocated at the peak"),
        (memory.reserved, "reserved"),
        (memory.before_capture, "in use before the capture"),
        (memory.after_capture, "after it"),
    ]
    shown = [f"{_bytes(size)} {what}" for size, what in parts if size is not None]
    if memory.over_eager is not None:
        shown.append(f"{memory.over_eager:.2f} of what the eager warm-up reserved")
    return ", ".join(shown) or "not counted on a CPU"


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


# -- a comparison


@dataclass(frozen=True, slots=True)
class Reporting:
    """What is compared, and where the results go."""

    only: str | None
    resumes: bool
    html: Path | None
    job_timeout: float
    as_json: bool

    def json_file(self, recipe: str) -> Path:
        """The file that has a row for each mechanism that has run."""
        return self.html.with_suffix(".json") if self.html is not None else Path(f"stepgraph-bench-{recipe}.json")


def _compared(asked: Asked, wanted: Wanted, device: torch.device, steps: int, how: Reporting) -> Result:
    from stepgraph.config.environment import Environment
    from stepgraph.lab.bench import report_html
    from stepgraph.lab.bench.compare import compare
    from stepgraph.lab.bench.mechanisms import mechanisms_for, select
    from stepgraph.lab.bench.results import ResultFile, check_writable, machine_facts, write_whole

    if how.html is not None:
        report_html.check_place(how.html)
    check_writable(how.json_file(asked.recipe))
    cfg, cuts, parameters = configured(wanted, device)
    known = mechanisms_for(cfg, Environment.read(device.type))
    chosen = select(how.only, known) if how.only is not None else known
    missing = {m.title: why for m in chosen if (why := m.missing(device, cfg)) is not None}
    chosen = [m for m in chosen if m.title not in missing]
    request = {"config": cfg.to_dict(), "device": str(device), "steps": steps}
    file = ResultFile(how.json_file(asked.recipe), request, machine_facts(device))
    records = _run(chosen, file, how)
    found = compare(chosen, records)
    title = f"{asked.recipe}, {asked.task}, {parameters:,} parameters"
    facts = file.facts | {"command": asked.same(*_options(how))} | ({"cut": "; ".join(cuts)} if cuts else {})
    facts |= {"not run": "; ".join(f"{name}: {why}" for name, why in missing.items())} if missing else {}
    facts |= {"note": _ON_CPU} if device.type == "cpu" else {}
    if how.html is not None:
        write_whole(how.html, report_html.render(title, facts, found))
    values = {
        "recipe": asked.recipe,
        "facts": facts,
        "winner": found.winner,
        "reason": found.reason,
        "noise": found.noise,
        "eager_equals_eager": found.eager_equals_eager,
        "not_run": missing,
        "rows": records,
        "machine_settings": asked.machine_settings,
        "file": str(file.path),
        "report": None if how.html is None else str(how.html),
    }
    failed = any("error" in record for record in records)
    following = f"python -m webbrowser {how.html}" if how.html is not None else asked.same(*_reported(how, file.path))
    code = ExitCode.FINDINGS if failed else ExitCode.OK
    text = _comparison_table(title, found, missing, file.path, facts.get("note"), facts.get("cut"))
    return Result(values, _below_settings(asked, text), next=following, exit_code=code)


def _run(mechanisms: Sequence[Mechanism], file: ResultFile, how: Reporting) -> list[Record]:
    """Run what the file does not have yet, writing each row to it; return all rows."""
    from stepgraph.lab.bench.compare import plan, run_all, seconds_left
    from stepgraph.lab.bench.jobs import JobServer

    records: list[Record] = file.load() if how.resumes else []
    file.refuse_foreign()
    jobs = plan(mechanisms, records)
    with _progress(len(jobs), how.as_json) as on_job, JobServer() as server:

        def keep(record: Record) -> None:
            records.append(record)
            file.save(records)
            on_job(record, seconds_left(jobs, records))

        try:
            run_all(server, jobs, file.request, how.job_timeout, keep)
        except BaseException:
            if records:
                kept = counted(len(records), "rows")
                typer.echo(f"{kept} kept in {file.path}: --resume goes on from there", err=True)
            raise
    return records


def _options(how: Reporting) -> list[str]:
    return ["--compare", *(["--only", shlex.quote(how.only)] if how.only is not None else [])]


def _reported(how: Reporting, file: Path) -> list[str]:
    """The words that make the report of a comparison which is done: its rows are taken from its file."""
    return [*_options(how), "--resume", "--report", str(file.with_suffix(".html"))]


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Any, float | None], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("mechanism"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True, quiet=quiet)) as progress:
        task = progress.add_task("", total=total)

        def on_job(record: Any, seconds_left: float | None) -> None:
            told = "failed" if "error" in record else f"{record['step_ms']:.2f} ms"
            is_long = seconds_left is not None and seconds_left > _LONG_S
            left = f", about {seconds_left / 60:.0f} min left" if seconds_left is not None and is_long else ""
            progress.update(task, advance=1, description=f"{record['mechanism']}: {told}{left}")

        yield on_job


def _comparison_table(
    title: str,
    found: Comparison,
    missing: dict[str, str],
    file: Path,
    note: str | None = None,
    cut: str | None = None,
) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from stepgraph.lab.bench.report_html import AUDITS, audits_in_words, remarks

    rows = [_cells(row) for row in found.rows]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("mechanism", overflow="fold")
    shown = [place for place in range(1, len(_COLUMNS)) if any(row[place] for row in rows)]
    for place in shown:
        table.add_column(_COLUMNS[place], justify="right", overflow="fold")
    for row in rows:
        table.add_row(Text(row[0]), *(Text(row[place]) for place in shown))
    winner = found.row(found.winner) if found.winner else None
    verdict = f"{winner.mechanism.title}: {found.reason}" if winner is not None else found.reason
    lines = [Text(f"cut to fit this machine: {cut}")] if cut else []
    lines += [Text(verdict, "bold"), *(Text(f"not run: {name} ({why})") for name, why in missing.items())]
    below = [
        f"{row.mechanism.title}: {said}" for row in found.rows if row.step_ms is not None and (said := remarks(row))
    ]
    below += [AUDITS] if any(map(audits_in_words, found.rows)) else []
    below += [note] if note is not None else []
    return Group(*lines, table, *map(Text, below), Text(f"All figures: {file}"))


_COLUMNS = ("mechanism", "step ms", "passes", "p90", "audits", "busy", "GiB", "losses against eager")


def _cells(row: Row) -> list[str]:
    """The cells of a row for the terminal."""
    from stepgraph.lab.bench.report_html import audits_in_words, losses_in_words

    if row.step_ms is None:
        return [row.mechanism.title, "failed", *[""] * 5, row.error or ""]
    busy, reserved = row.figures.get("busy_fraction"), row.figures["memory"]["reserved"]
    return [
        row.mechanism.title,
        f"{row.step_ms:.2f}",
        "" if row.spread is None else f"{100 * row.spread:.1f} %",
        "" if row.p90_ms is None else f"{row.p90_ms:.2f}",
        audits_in_words(row),
        "" if busy is None else f"{100 * busy:.0f} %",
        "" if reserved is None else f"{reserved / 2**30:.2f}",
        losses_in_words(row),
    ]


# -- a prediction


def _predicted(asked: Asked, wanted: Wanted) -> Result:
    import torch

    from stepgraph.lab.bench.hardware import CPU, find_gpu, gpu_of
    from stepgraph.lab.bench.predict import predict
    from stepgraph.lab.recipes.fit import fit

    if asked.gpu == CPU:
        raise InvalidArgument(
            "-g cpu has no prediction",
            rule="option",
            why="--dry-run predicts memory and time from the figures of a GPU.",
            fix=f"`{asked.line('-g h100', *asked.sizes, '--dry-run')}`, or leave --dry-run out.",
        )
    if wanted.fits and (asked.num_gpus > 1 or asked.parallel):
        raise typer.BadParameter("cuts a model to one GPU: add -ng 1 without parallel sizes", param_hint="--fit")
    present = gpu_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    gpu = find_gpu(asked.gpu) if asked.gpu is not None else present or find_gpu("h100")
    cfg, cuts = wanted.config, []
    if wanted.fits:
        fitted = fit(cfg, gpu.memory_bytes, kept=wanted.kept)
        cfg, cuts = fitted.config, [str(change) for change in fitted.cuts]
    found = predict(cfg, gpu, asked.num_gpus)
    values = found.to_dict() | {"recipe": asked.recipe, "task": asked.task, "cuts": cuts, "dry_run": True}
    values["machine_settings"] = asked.machine_settings
    text = _below_settings(asked, _shown(asked, gpu, found, cuts))
    return Result(values, text, next=asked.line("--fit -ng 1", *asked.sizes))


def _tera(flops: int) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 1e13 else f"{flops / 1e12:.2g}"


def _shown(asked: Asked, gpu: Gpu, found: MachinePrediction, cuts: list[str]) -> RenderableType:
    import torch
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    share = f"{100 * found.memory_fraction:.0f} % of {gpu.memory_bytes / 1e9:.0f} GB"
    does_not_fit = ". It does not fit: divide it further, make the microbatch smaller, or recompute more."
    if asked.machine_settings and not asked.parallel:
        does_not_fit = _NEEDS_MORE
    rows = [
        (
            "memory",
            f"about {found.bytes_per_gpu / 1e9:,.1f} GB on each GPU, {share}"
            + (does_not_fit if found.memory_fraction > 1 else ""),
        ),
        (
            "operations",
            f"{_tera(found.flops)} TFLOP an iteration: {found.fastest_ms:,.1f} ms at the GPUs' peak, the "
            "shortest time that is possible",
        ),
    ]
    for violation in found.not_run_here:
        details = f" ({'; '.join(violation.details)})" if violation.details else ""
        rows.append(("not run here", f"{violation.what}{details}   [{violation.rule}]"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, text in rows:
        table.add_row(name, Text(text))
    assumed = "" if asked.gpu or torch.cuda.is_available() else ", since no -g names another"
    title = f"{asked.recipe} on {found.num_gpus} {gpu.name}{assumed}: a valid configuration; nothing was run"
    cut = [Text(f"cut to fit one {gpu.name}: " + "; ".join(cuts))] if cuts else []
    return Group(*cut, Text(title), table)
