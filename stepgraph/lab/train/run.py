"""`pretrain` and `finetune` run a configuration from start to end, and leave nothing behind on any exit.

The order of the end is the same after the last iteration, a signal, and an error: graphs are freed, then the session,
then the process group, because a graph with a collective holds its communicator and NCCL waits for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.config.container import ConfigContainer
from stepgraph.config.environment import Environment
from stepgraph.core.errors import InvalidArgument, NonFinite
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import with_article
from stepgraph.engine.backends.random.tracker import get_cuda_rng_tracker
from stepgraph.engine.call.session import Session
from stepgraph.lab.train.checkpoint import (
    CheckpointError,
    Saved,
    Weights,
    applied,
    held,
    load,
    load_weights,
    refuse_later_checkpoints,
)
from stepgraph.lab.train.data import Batches
from stepgraph.lab.train.implementations import Implementation, Work, choose
from stepgraph.lab.train.journal import Journal, refuse_unwritable_log
from stepgraph.lab.train.loop import Loop, OnEvent, Run
from stepgraph.lab.train.memory import DeviceMemory
from stepgraph.lab.train.pipelined import choose_for_stages, num_chunks_of, refuse_schedule, stages_of
from stepgraph.lab.train.random_state import set_random_states
from stepgraph.lab.train.ranks import Ranks, start_processes
from stepgraph.lab.train.run_report import RunReport
from stepgraph.lab.train.settings import refuse_untrained
from stepgraph.lab.train.setup import (
    ModelProvider,
    adapt,
    checks_of,
    gathered_model,
    make_batches,
    make_core,
    make_finish,
    make_forward_step,
    make_optimizer,
    make_schedule,
    num_microbatches,
    refuse_unpacked,
    seed_dropout,
    seed_everything,
    wrap,
)
from stepgraph.lab.train.signals import SignalFlag


class TrainingStopped(SystemExit):
    """A signal ended the run, in order: `code` is 130 or 143, `report` what was done until then."""

    def __init__(self, code: int, report: RunReport) -> None:
        super().__init__(code)
        self.report = report


@entry_point
def pretrain(
    cfg: ConfigContainer,
    *,
    model_provider: ModelProvider | None = None,
    device: torch.device | str | None = None,
    on_event: OnEvent | None = None,
    quiet: bool = False,
    prints_report: bool = True,
    implementation: Callable[[Work, ConfigContainer], Implementation] = choose,
) -> RunReport:
    """Train a model as a configuration says; return the report of the run.

    Example:
        >>> cfg = stepgraph.ConfigContainer()
        >>> cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = "local", ["full_iteration"]
        >>> print(stepgraph.lab.train.pretrain(cfg))

    `model_provider(cfg)` builds another model than the configuration describes: called with `tokens` and `targets`, it
    returns the loss. `on_event(name, step)` is called before what happens. Progress and the report go to stderr. On
    SIGINT and SIGTERM the run saves, frees its graphs and raises SystemExit with 130 or 143. Under torchrun, each
    process is a rank. `implementation(work, cfg)` makes what runs the iterations; the default is what
    `cfg.model.cuda_graph_impl` names.
    """
    return _train(cfg, model_provider, device, on_event, quiet, prints_report and not quiet, implementation)


@entry_point
def finetune(
    cfg: ConfigContainer,
    *,
    model_provider: ModelProvider | None = None,
    device: torch.device | str | None = None,
    on_event: OnEvent | None = None,
    quiet: bool = False,
    prints_report: bool = True,
) -> RunReport:
    """Fine-tune a model on prompts and answers: all parameters, or with `cfg.peft.scheme = "lora"` small additions.

    Example:
        >>> cfg.dataset.data_path = "answers.jsonl"
        >>> cfg.checkpoint.pretrained_checkpoint = "runs/pretrained"
        >>> print(stepgraph.lab.train.finetune(cfg))

    As `pretrain`, with `dataset.kind = "sft"` unless the configuration names tokens. Without a file the examples are
    small sums.
    """
    if _container(cfg).dataset.kind == "text":
        cfg = cfg.copy()
        cfg.dataset.kind = "sft"
    return _train(cfg, model_provider, device, on_event, quiet, prints_report and not quiet)


def _train(
    cfg: ConfigContainer,
    provider: ModelProvider | None,
    device: torch.device | str | None,
    on_event: OnEvent | None,
    quiet: bool,
    prints_report: bool,
    implementation: Callable[[Work, ConfigContainer], Implementation] = choose,
) -> RunReport:
    where = _device(device, _container(cfg).dist.local_rank)
    checked = cfg.copy().validate(Environment.read(where.type), run=True)
    refuse_untrained(checked)
    with SignalFlag(wanted=checked.train.exit_signal_handler) as flag, _processes(checked, where):
        loop, signal = _run(
            checked, where, provider, on_event or (lambda name, step: None), flag, quiet, implementation
        )
    if prints_report and int(os.environ.get("RANK", "0")) == 0:
        print(loop.report(), file=sys.stderr)
    if signal:
        raise TrainingStopped(128 + signal, loop.report())
    return loop.report()


def _container(cfg: Any) -> ConfigContainer:
    if not isinstance(cfg, ConfigContainer):
        raise InvalidArgument(
            f"the configuration is {with_article(type(cfg))}, and not a ConfigContainer",
            rule="option",
            why="a ConfigContainer checks the names and the types of its settings.",
            fix="stepgraph.ConfigContainer.from_dict({'model': {...}}), or set fields of a ConfigContainer().",
        )
    return cfg


def _device(device: torch.device | str | None, local_rank: int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgument(
                f"device {found}, and torch sees no GPU",
                rule="gpu-missing",
                why="the run was asked to train there.",
                fix="leave device out, or pass device='cpu'.",
            )
        here = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        found = torch.device("cuda", here if found.index is None else found.index)
        torch.cuda.set_device(found)
    return found


@contextlib.contextmanager
def _processes(cfg: ConfigContainer, device: torch.device) -> Iterator[None]:
    """Join torchrun's process group, and leave it at the end if it was created here."""
    is_ours = start_processes(device, cfg.dist.distributed_backend, cfg.dist.distributed_timeout_minutes)
    try:
        yield
    finally:
        if is_ours and dist.is_initialized():
            dist.destroy_process_group()


def _run(
    cfg: ConfigContainer,
    device: torch.device,
    provider: ModelProvider | None,
    on_event: OnEvent,
    flag: SignalFlag,
    quiet: bool,
    implementation: Callable[[Work, ConfigContainer], Implementation],
) -> tuple[Loop, int]:
    ranks = Ranks(cfg.model.pipeline_model_parallel_size)
    count = num_microbatches(cfg, ranks)
    refuse_schedule(cfg, count)
    seed_everything(cfg, device, ranks)
    with Session("cuda" if device.type == "cuda" else "tape") as session, contextlib.ExitStack() as stack:
        stack.callback(get_cuda_rng_tracker(device).reset)
        if cfg.checkpoint.save is not None:
            stack.enter_context(held(Path(cfg.checkpoint.save), ranks))
        work = _make_work(cfg, device, provider, session, ranks, count)
        batches = make_batches(cfg, ranks, count)
        seed_dropout(cfg, ranks)
        start = _resume(cfg, work, batches, device, ranks)
        last = cfg.train.train_iters
        refuse_unwritable_log(cfg.logger, ranks)
        journal = Journal(cfg.logger, rank=ranks.rank, size=ranks.size, start=start, last=last, quiet=quiet)
        stack.callback(journal.close)
        run = Run(
            cfg=cfg,
            device=device,
            ranks=ranks,
            batches=batches,
            eval_batches=make_batches(cfg, ranks, count, is_eval=True),
            schedule=make_schedule(cfg),
            checks=checks_of(cfg),
            memory=DeviceMemory(device),
            journal=journal,
            on_event=on_event,
        )
        journal.write("start", start, implementation=cfg.model.cuda_graph_impl, ranks=ranks.size, config=cfg.to_dict())
        chosen = implementation(work, cfg) if ranks.pipeline_size == 1 else choose_for_stages(work, cfg, ranks)
        loop = Loop(run, chosen, flag, start)
        signal = _run_loop(loop)
        report = loop.report()
        journal.write("end", report.step, signal=signal, **_summary(report))
        return loop, signal


def _run_loop(loop: Loop) -> int:
    """Run a loop and free its graphs, whatever happens; an error of the run comes before one of the clean-up."""
    try:
        signal = loop.run()
    except BaseException:
        with contextlib.suppress(NonFinite):
            loop.implementation.close()
        raise
    loop.implementation.close()
    return signal


def _summary(report: RunReport) -> dict[str, Any]:
    names = ("implementation", "replays", "graphed", "capture_seconds", "tokens_per_s", "final_loss", "verdict")
    return {name: getattr(report, name) for name in names} | {"eager_reasons": dict(report.eager_reasons)}


def _make_work(
    cfg: ConfigContainer,
    device: torch.device,
    provider: ModelProvider | None,
    session: Session,
    ranks: Ranks,
    num_microbatches: int,
) -> Work:
    core = _make_core(cfg, device, provider, ranks)
    refuse_unpacked(cfg, core)
    model = wrap(cfg, core, session, device, ranks)
    checks = checks_of(cfg)
    gathered = gathered_model(cfg, core, ranks)
    return Work(
        model=model,
        core=core,
        gathered=gathered,
        optimizer=make_optimizer(cfg, core, gathered),
        forward_step=make_forward_step(cfg, checks),
        finish=make_finish(cfg, core, checks, ranks),
        num_microbatches=num_microbatches,
        session=session,
        device_flags=checks.on_device,
    )


def _make_core(
    cfg: ConfigContainer, device: torch.device, provider: ModelProvider | None, ranks: Ranks
) -> torch.nn.Module:
    """Build the model with the weights that it starts from, and with LoRA; of a pipeline, return this rank's stages.

    LoRA is added before the model is divided, so that its matrices are those of a run in one process.
    """
    whole = make_core(cfg, device, provider)
    start = cfg.checkpoint.pretrained_checkpoint if cfg.checkpoint.load is None else None
    weights = load_weights(Path(start)) if start is not None else None
    if weights is not None and ranks.pipeline_size == 1:
        _load_state(whole, weights.tensors, weights.path)
    named = whole.state_dict(keep_vars=True)
    adapt(cfg, whole)
    if ranks.pipeline_size == 1:
        return whole
    stages = stages_of(whole, ranks, make_forward_step(cfg, checks_of(cfg)).autocast, num_chunks_of(cfg))
    if weights is not None:
        _load_own(stages, named, weights)
    return stages


def _load_own(stages: torch.nn.Module, named: Mapping[str, torch.Tensor], weights: Weights) -> None:
    """Load what these stages have of a whole model, whose tensors were `named` so before LoRA was added to it."""
    if named.keys() != weights.tensors.keys():
        only = [f"only in the checkpoint: {name}" for name in weights.tensors.keys() - named.keys()]
        only += [f"only in the model: {name}" for name in named.keys() - weights.tensors.keys()]
        raise _unfit(weights.path, sorted(only))
    names = {id(tensor): name for name, tensor in named.items()}
    own = {name: names[id(t)] for name, t in stages.state_dict(keep_vars=True).items() if id(t) in names}
    _load_state(stages, {name: weights.tensors[whole] for name, whole in own.items()}, weights.path, strict=False)


def _resume(cfg: ConfigContainer, work: Work, batches: Batches, device: torch.device, ranks: Ranks) -> int:
    """Load the checkpoint that the configuration names; return the number of iterations done before."""
    settings = cfg.checkpoint
    start = 0
    if settings.load is not None:
        saved = load(Path(settings.load), ranks)
        with applied(saved.path, "the model"):
            _load_state(work.core, saved.shard["model"], saved.path)
        if settings.load_optim:
            state = saved.rank.get("optimizer") or saved.shard.get("optimizer") or _missing(saved, "optim")
            with applied(saved.path, "the state of the optimizer"):
                _load_optimizer(work.optimizer, state, saved.path)
        with applied(saved.path, "the position in the data"):
            batches.load_state_dict(saved.rank["data"])
        if settings.load_rng:
            with applied(saved.path, "the random states"):
                set_random_states(saved.rank.get("random") or _missing(saved, "rng"), device)
        start = saved.step
    if settings.save is not None:
        refuse_later_checkpoints(Path(settings.save), start)
    return start


_WORDS = {"optim": "state of the optimizer", "rng": "random states"}


def _missing(saved: Saved, name: str) -> Any:
    raise CheckpointError(
        f"{saved.path} has no {_WORDS[name]}",
        rule="checkpoint",
        why=f"it was saved with checkpoint.save_{name}=false. A run that went on without would be another one.",
        fix=f"load another checkpoint, or checkpoint.load_{name}=false to go on with new ones.",
    )


_OF_THE_RUN = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")
"""Numbers of an optimizer that a resumed run takes from its own configuration."""


def _load_optimizer(optimizer: Any, state: Mapping[str, Any], path: Path) -> None:
    """Load the state of an optimizer; the settings stay those of this run, also if the checkpoint had others."""
    own, saved = optimizer.state_dict()["param_groups"], state["param_groups"]
    if [_kind(group) for group in own] != [_kind(group) for group in saved]:
        raise CheckpointError(
            f"the optimizer of {path} is not the one of this run",
            rule="checkpoint",
            why="the state of one optimizer means nothing to another one, or to other parameters.",
            fix="use the optimizer section in the checkpoint's config.json, or checkpoint.load_optim=false.",
        )
    _check_shapes(optimizer, state)
    optimizer.load_state_dict(state)
    for group, before in zip(optimizer.param_groups, own, strict=True):
        group.update({name: before[name] for name in _OF_THE_RUN if name in before})


def _check_shapes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise ValueError for a state that torch would take, and fail on at the first step."""
    names = {"step", "exp_avg", "exp_avg_sq"} if isinstance(optimizer, torch.optim.AdamW) else {"momentum_buffer"}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = {number: parameter.shape for number, parameter in zip(numbers, parameters, strict=True)}
    for number, values in state["state"].items():
        if {*values} != names:
            raise ValueError(
                f"parameter {number} has {', '.join(map(str, values))}, and not {', '.join(sorted(names))}"
            )
        for name, value in values.items():
            shape = torch.Size() if name == "step" else shapes[number]
            if value is not None and value.shape != shape:
                raise ValueError(f"{name} of parameter {number} is {list(value.shape)}, and not {list(shape)}")


def _kind(group: Mapping[str, Any]) -> tuple[frozenset[str], int]:
    return frozenset(group) & {*_OF_THE_RUN}, len(group["params"])


def _load_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor], path: Path, *, strict: bool = True) -> None:
    try:
        model.load_state_dict(state, strict=strict)
    except RuntimeError as error:  # other names or shapes
        raise _unfit(path, [line.strip() for line in str(error).splitlines()[1:]]) from error


def _unfit(path: Path, details: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the weights of {path} do not fit the model",
        rule="checkpoint",
        details=[line[:110] for line in details[:5]],
        why="the checkpoint is of a model with other layers or sizes, or divided into other stages.",
        fix="use the model's configuration in the checkpoint's config.json.",
    )
