"""Builds what a run works with from a validated configuration: model, data, optimizer, checks."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.backends.random.tracker import get_cuda_rng_tracker
from stepgraph.engine.call.session import Session
from stepgraph.lab.recipes.build import build_model
from stepgraph.lab.train.data import (
    Batches,
    Source,
    SyntheticTokens,
    TokenWindows,
    made_text,
    mapped_tokens,
    text_tokens,
)
from stepgraph.lab.train.gathered import GatheredModel, ShardedAdamW
from stepgraph.lab.train.instruction_data import Instructions, made_examples, read_examples
from stepgraph.lab.train.iteration import Finish, ForwardStep, TiedEmbedding
from stepgraph.lab.train.lora import DEFAULT_TARGETS, add_lora
from stepgraph.lab.train.optimizer import Schedule, make_adamw
from stepgraph.lab.train.ranks import Ranks
from stepgraph.lab.train.reduction import broadcast_from_first

ModelProvider = Callable[[Any], nn.Module]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OUR_LINEAR = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("out_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's names of linear layers, and the names that the models here have."""
_EVAL_SEED = 7919
_DROPOUT_SEED, _TRACKER_SEED, _STAGE_SEED = 1000, 2718, 100


@dataclass(frozen=True, slots=True)
class Checks:
    """Where NaN and infinity are looked for: `off`, `host` (at once) or `device` (a flag, read later)."""

    loss: str
    grad: str

    @property
    def on_device(self) -> bool:
        return "device" in (self.loss, self.grad)


def checks_of(cfg: Any) -> Checks:
    """Read the two settings; None is a flag on the device in full iteration, else the host for losses only."""
    whole = cfg.model.captures_iteration
    words = {True: "host", False: "off", "device": "device"}
    loss, grad = cfg.rerun_state_machine.check_for_nan_in_loss, cfg.ddp.check_for_nan_in_grad
    return Checks(
        words.get(loss, "device" if whole else "host"),
        words.get(grad, "device" if whole else "off"),
    )


def refuse_unpacked(cfg: Any, model: nn.Module) -> None:
    """Refuse packed sequences for a model that would let examples attend to each other."""
    if cfg.dataset.packed_sequence and "cu_seqlens" not in inspect.signature(model.forward).parameters:
        raise InvalidArgument(
            f"{type(model).__name__}.forward has no argument `cu_seqlens`, and dataset.packed_sequence is on",
            rule="packed-sequence",
            why="examples in one sequence must not attend to each other; `cu_seqlens` says where each begins.",
            fix="dataset.packed_sequence=false pads each example, or use a model that takes cu_seqlens.",
        )


def seed_everything(cfg: Any, device: torch.device, ranks: Ranks) -> None:
    """Seed initial weights: alike on all ranks, unless `rng.data_parallel_random_init`.

    Ranks of a pipeline build the whole model and keep their stage of it.
    """
    _seed(cfg.rng.seed + (ranks.data_rank if cfg.rng.data_parallel_random_init else 0))
    tracker = get_cuda_rng_tracker(device)
    tracker.reset()
    if cfg.model.cuda_graph_impl != "none" or cfg.rng.te_rng_tracker or cfg.model.use_te_rng_tracker:
        tracker.add("model-parallel-rng", cfg.rng.seed + _TRACKER_SEED + _STAGE_SEED * ranks.stage + ranks.data_rank)


def seed_dropout(cfg: Any, ranks: Ranks) -> None:
    """Seed what training draws: differently on each rank, alike for every implementation."""
    _seed(cfg.rng.seed + _DROPOUT_SEED + ranks.rank)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def num_microbatches(cfg: Any, ranks: Ranks) -> int:
    """Return the microbatches of one rank's iteration; the rules of a configuration see to it that sizes divide."""
    return int(cfg.train.global_batch_size // (cfg.train.micro_batch_size * ranks.data_size))


def make_core(cfg: Any, device: torch.device, provider: ModelProvider | None) -> nn.Module:
    """Build the model on the device, in the type of its parameters.

    Its weights are drawn there: a CPU takes minutes for billions of random numbers. A model that is divided into stages
    may be too large for one device, so that it is built in host memory.
    """
    precision = cfg.mixed_precision
    if precision.fp16 or precision.fp8 is not None:
        raise InvalidArgument(
            f"mixed_precision: {'fp16' if precision.fp16 else 'fp8'} is not trained here yet",
            rule="precision",
            why="the loop has no loss scaling, and models here have no FP8 layers.",
            fix='cfg.mixed_precision = "bf16_mixed", "bf16_autocast" or "fp32".',
        )
    if provider is not None:
        model = _provided(cfg, provider)
    else:
        with torch.device("cpu" if cfg.model.pipeline_model_parallel_size > 1 else device):
            model = build_model(cfg.model)
    model = model.to(device, _DTYPES[precision.params_dtype])
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the weights in float32, which are larger than those that are trained
    return model


def _provided(cfg: Any, provider: Any) -> nn.Module:
    """Call a model provider; refuse what is not one, and what does not return a model of `tokens` and `targets`."""
    if isinstance(provider, nn.Module) or not callable(provider) or not _takes(provider, cfg):
        raise _no_model(f"model_provider is {provider!r:.60}, and not a function of the configuration")
    model = provider(cfg)
    if not isinstance(model, nn.Module):
        raise _no_model(f"model_provider(cfg) returned {model!r:.60}, and not a torch.nn.Module")
    if not _takes(model.forward, tokens=None, targets=None):
        raise _no_model(f"{type(model).__name__}.forward does not take `tokens` and `targets`")
    return model


def _takes(function: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind_partial(*args, **kwargs)
        if args:
            inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _no_model(what: str) -> InvalidArgument:
    return InvalidArgument(
        what,
        rule="option",
        why="the run builds the model itself, after it has seeded random numbers, and calls model(tokens=, targets=).",
        fix="model_provider=lambda cfg: MyModel(cfg.model.hidden_size), a model that returns the loss.",
    )


def adapt(cfg: Any, model: nn.Module) -> list[str]:
    """Add LoRA where the configuration asks for it; return the layers that have it."""
    if cfg.peft.scheme is None:
        return []
    names = [
        name for target in cfg.peft.target_modules or DEFAULT_TARGETS for name in _OUR_LINEAR.get(target, (target,))
    ]
    return add_lora(model, names, dim=cfg.peft.dim, alpha=cfg.peft.alpha, dropout=cfg.peft.dropout)


def uses_ddp(cfg: Any, ranks: Ranks) -> bool:
    """True if DDP reduces gradients: there is a process group, if only of one rank, and DDP sees whole backwards."""
    is_apart = ranks.pipeline_size > 1 or cfg.ddp.overlap_param_gather or cfg.model.delay_wgrad_compute
    return ranks.has_group and cfg.ddp.overlap_grad_reduce and not is_apart


def reduces_at_end(cfg: Any, ranks: Ranks) -> bool:
    """True if gradients are averaged after the backward."""
    return ranks.data_size > 1 and not uses_ddp(cfg, ranks)


def wrap(cfg: Any, core: nn.Module, session: Session, device: torch.device, ranks: Ranks) -> nn.Module:
    """Wrap a model in DDP on the session's stream, or give all ranks that train it the weights of the first."""
    if not uses_ddp(cfg, ranks):
        if ranks.data_size > 1:
            broadcast_from_first(core, ranks.stage, ranks.data_group)
        return core
    ids = [device.index or 0] if device.type == "cuda" else None
    with session.stream():
        return DistributedDataParallel(core, device_ids=ids, process_group=ranks.data_group)


def gathered_model(cfg: Any, core: nn.Module, ranks: Ranks) -> GatheredModel | None:
    """Shard the parameters if the configuration asks for it and there are ranks to share them."""
    return GatheredModel(core, ranks) if cfg.ddp.overlap_param_gather and ranks.data_size > 1 else None


def make_optimizer(cfg: Any, model: nn.Module, gathered: GatheredModel | None = None) -> torch.optim.Optimizer:
    settings = cfg.optimizer
    if gathered is not None:
        betas = (settings.adam_beta1, settings.adam_beta2)
        return ShardedAdamW(gathered, settings.weight_decay, lr=settings.lr, betas=betas, eps=settings.adam_eps)
    if settings.optimizer == "sgd":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, settings.lr, settings.sgd_momentum, weight_decay=settings.weight_decay)
    betas = (settings.adam_beta1, settings.adam_beta2)
    return make_adamw(model.parameters(), settings.lr, betas, settings.adam_eps, settings.weight_decay)


def make_schedule(cfg: Any) -> Schedule:
    scheduler = cfg.scheduler
    decay = scheduler.lr_decay_iters or cfg.train.train_iters
    warmup = scheduler.lr_warmup_iters
    if scheduler.lr_warmup_fraction is not None:
        warmup = int(scheduler.lr_warmup_fraction * decay)
    return Schedule(
        cfg.optimizer.lr, cfg.optimizer.min_lr, warmup, decay, scheduler.lr_decay_style, scheduler.lr_warmup_init
    )


def make_forward_step(cfg: Any, checks: Checks) -> ForwardStep:
    precision = cfg.mixed_precision
    autocast = _DTYPES[precision.autocast_dtype] if precision.autocast_enabled else None
    return ForwardStep(cfg.model.moe_aux_loss_coeff, autocast, checks.loss == "host", cfg.model.delay_wgrad_compute)


def make_finish(cfg: Any, core: nn.Module, checks: Checks, ranks: Ranks) -> Finish:
    trained = tuple(parameter for parameter in core.parameters() if parameter.requires_grad)
    update = getattr(core, "update_bias", None) if cfg.model.moe_router_enable_expert_bias else None
    tied = getattr(core, "tied", None) if ranks.pipeline_size > 1 else None
    return Finish(
        trained,
        cfg.optimizer.clip_grad,
        checks.grad == "host",
        update,
        data_size=ranks.data_size if reduces_at_end(cfg, ranks) else 1,
        data_group=ranks.data_group,
        stage_group=ranks.stage_group,
        tied=TiedEmbedding(tied, ranks.ends_group, is_first=ranks.stage == 0) if tied is not None else None,
    )


def make_batches(cfg: Any, ranks: Ranks, count: int, *, is_eval: bool = False) -> Batches:
    source = make_source(cfg, is_eval=is_eval)
    return Batches(source, cfg.train.micro_batch_size, count, ranks.data_rank, ranks.data_size)


def make_source(cfg: Any, *, is_eval: bool = False) -> Source:
    """Return the training data, or data for evaluation that training does not see."""
    data, vocab = cfg.dataset, cfg.model.vocab_size
    length = data.seq_length or cfg.model.seq_length
    seed = (cfg.rng.seed if data.random_seed is None else data.random_seed) + (_EVAL_SEED if is_eval else 0)
    path = data.data_path if isinstance(data.data_path, str) or data.data_path is None else next(iter(data.data_path))
    if path is not None and data.kind in ("text", "synthetic"):
        raise InvalidArgument(
            f"dataset.kind={data.kind} reads no file, and dataset.data_path={path}",
            rule="data",
            why="the run would train on data that is made on the spot, and not on the file.",
            fix="--task sft or dataset.kind=sft for JSONL, dataset.kind=tokens for token numbers, or no data_path.",
        )
    if data.kind == "synthetic":
        return SyntheticTokens(vocab, length, seed)
    if data.kind == "text":
        return TokenWindows(text_tokens(made_text(seed), vocab), length, seed, "text")
    if data.kind == "tokens":
        if path is None:
            raise _no_path("tokens", "a file of int32 or uint16 token numbers (.bin is uint16)")
        dtype = "uint16" if Path(path).suffix == ".bin" else "int32"
        tokens = _part(mapped_tokens(Path(path), dtype, vocab), data.split, is_eval)
        return TokenWindows(tokens, length, seed, Path(path).name)
    size = data.packed_sequence_size or length
    examples = made_examples(vocab, size) if path is None else read_examples(Path(path), vocab, size)
    name = "made sums" if path is None else Path(path).name
    packed = data.packed_sequence
    return Instructions(examples, size, seed, packed=packed, name=name, max_packed=data.max_packed_examples)


def _part(tokens: torch.Tensor, split: str, is_eval: bool) -> torch.Tensor:
    """Return the share of a row of tokens for training, or the one after it for evaluation."""
    shares = [float(share) for share in split.split(",")]
    first = int(tokens.numel() * shares[0] / sum(shares))
    second = int(tokens.numel() * sum(shares[:2]) / sum(shares))
    return tokens[first:second] if is_eval else tokens[:first]


def _no_path(kind: str, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"dataset.kind={kind} without dataset.data_path",
        rule="data",
        why=f"it names {what}.",
        fix="dataset.data_path=FILE.",
    )
