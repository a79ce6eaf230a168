"""Published settings of the recipes for each kind of GPU, which `stepgraph bench -g` lays over a recipe.

A recipe describes a model. How the model is divided, its batch sizes, its graphs and what is recomputed depend on the
GPU. The figures here are NVIDIA's for bfloat16, from the project Megatron Bridge
(https://github.com/NVIDIA-NeMo/Megatron-Bridge), commit 067f987d of 22 August 2026, folder `src/megatron/bridge`:

| recipe | files |
|---|---|
| `llama3_8b`, `llama3_70b` | `perf_recipes/llama/GPU/llama3.py` |
| `qwen3_30b_a3b` | `perf_recipes/qwen/GPU/qwen3_moe.py` |
| `qwen3_vl` | `perf_recipes/qwen_vl/GPU/qwen3_vl.py` and `perf_recipes/qwen_vl/common.py`, the 30B-A3B model |
| `gpt_oss_120b` | `perf_recipes/gpt_oss/GPU/gpt_oss.py` |
| `deepseek_v3` | `perf_recipes/deepseek/GPU/deepseek_v3.py` and `perf_recipes/deepseek/common.py` |

Settings that these files leave open are those of the recipes that they start from, `recipes/MODEL/h100/*.py`. The same
folder has the models and tasks without a performance recipe in bfloat16: `gpt_oss_20b`, `nemotron_h` (the 8B model in
`nemotronh.py`), LoRA of `llama3_8b`, and both kinds of fine-tuning of `qwen3_30b_a3b` and `gpt_oss_120b`. If several
numbers of GPUs are published, the table has the one from which the others are derived.

Three rules apply them. What was typed stays as it was typed. Another number of GPUs scales the global batch, as in
NVIDIA's scripts. In a run, and for a model that is cut to one GPU, every GPU holds the whole model, so parallel sizes
and the global batch stay the recipe's own. This file imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stepgraph.config.rules import NCCL_DDP_WARMUP
from stepgraph.core.errors import InvalidArgument
from stepgraph.lab.recipes.published import RECIPES, recipe


@dataclass(frozen=True, slots=True)
class Published:
    """The settings of one recipe and task on one kind of GPU."""

    num_gpus: int
    global_batch: int
    micro_batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    scope: tuple[str, ...] = ()
    """The scope of the graphs; nothing is captured without one."""
    recompute: tuple[str, ...] = ()
    """Parts of layers that are recomputed."""
    recompute_layers: int | None = None
    """Whole layers that are recomputed on each stage."""
    seq_length: int | None = None
    """Where it is not the recipe's own."""


_ROUTER = ("moe_router", "moe_preprocess")
_ATTN_ROUTER = ("attn", *_ROUTER)
_WHOLE = ("full_iteration",)
_MLP = ("mlp",)
_NORM_ACT = ("layernorm", "moe_act")
PUBLISHED: Mapping[tuple[str, str], Mapping[str, Published]] = MappingProxyType(
    {
        ("llama3_8b", "pretrain"): {
            "h100": Published(8, 128, context=2),
            "b200": Published(8, 128, 2, scope=_WHOLE),
            "gb200": Published(8, 128, 2, scope=_WHOLE),
            "b300": Published(8, 128, 4, scope=_WHOLE),
            "gb300": Published(8, 128, 4, scope=_WHOLE),
        },
        ("llama3_8b", "sft"): {
            "h100": Published(8, 32, seq_length=4096),
            "gb200": Published(8, 8, seq_length=16384),
        },
        ("llama3_8b", "lora"): {"h100": Published(1, 8, seq_length=4096)},
        ("llama3_70b", "pretrain"): {
            "h100": Published(64, 256, tensor=4, pipeline=4, virtual=5, context=2),
            "b200": Published(64, 256, tensor=2, pipeline=4, virtual=5, context=2, scope=_WHOLE),
        },
        ("llama3_70b", "sft"): {
            "h100": Published(32, 32, tensor=4, pipeline=4, virtual=5, seq_length=4096),
            "gb200": Published(32, 32, pipeline=8, virtual=10, scope=_MLP, seq_length=4096),
            "gb300": Published(32, 32, pipeline=2, virtual=20, scope=_MLP, seq_length=4096),
        },
        ("llama3_70b", "lora"): {
            "h100": Published(8, 32, pipeline=4, virtual=20, recompute_layers=1, seq_length=4096),
            "b200": Published(8, 32, pipeline=2, scope=_MLP, seq_length=4096),
            "gb200": Published(8, 64, pipeline=2, virtual=20, scope=_MLP, seq_length=2048),
            "b300": Published(8, 32, scope=_MLP, seq_length=4096),
            "gb300": Published(8, 32, scope=_MLP, seq_length=4096),
        },
        ("qwen3_30b_a3b", "pretrain"): {
            "h100": Published(16, 1024, expert=16, scope=_ROUTER),
            "b200": Published(8, 512, 4, expert=8, scope=_ATTN_ROUTER),
            "gb200": Published(8, 512, 4, expert=8, scope=_ATTN_ROUTER),
            "b300": Published(8, 512, 8, expert=8, scope=_ROUTER),
            "gb300": Published(8, 512, 8, expert=8, scope=_ROUTER),
        },
        ("qwen3_30b_a3b", "sft"): {"h100": Published(16, 32, expert=16, seq_length=2048)},
        ("qwen3_30b_a3b", "lora"): {"h100": Published(4, 32, tensor=4, expert=4, seq_length=2048)},
        ("qwen3_vl", "pretrain"): {
            "h100": Published(16, 512, pipeline=2, virtual=12, expert=8, scope=_ROUTER),
            "b200": Published(8, 512, expert=8, scope=_ROUTER),
            "gb200": Published(8, 512, 4, expert=8, scope=_ROUTER),
            "gb300": Published(8, 512, 8, expert=8, scope=_ROUTER),
        },
        ("gpt_oss_20b", "pretrain"): {"h100": Published(16, 512, tensor=2, pipeline=4, expert=4)},
        ("gpt_oss_20b", "sft"): {"h100": Published(8, 128, expert=8, seq_length=2048)},
        ("gpt_oss_20b", "lora"): {"h100": Published(1, 128, seq_length=2048)},
        ("gpt_oss_120b", "pretrain"): {
            "h100": Published(64, 1280, pipeline=4, expert=8, recompute=_NORM_ACT),
            "b200": Published(64, 1280, 4, expert=8, recompute=_NORM_ACT),
            "gb200": Published(64, 1280, 4, expert=64, recompute=_NORM_ACT),
            "b300": Published(64, 1280, 4, expert=8, scope=_ATTN_ROUTER),
            "gb300": Published(64, 1280, 4, expert=64, scope=_ATTN_ROUTER),
        },
        ("gpt_oss_120b", "sft"): {"h100": Published(32, 128, pipeline=4, expert=8, seq_length=2048)},
        ("gpt_oss_120b", "lora"): {"h100": Published(8, 128, expert=8, seq_length=2048)},
        ("deepseek_v3", "pretrain"): {
            "h100": Published(
                1024, 16384, tensor=2, pipeline=8, virtual=4, expert=64, recompute=("mla_up_proj", "mlp")
            ),
            "b200": Published(256, 4096, pipeline=16, expert=8, recompute=("mla_up_proj",)),
            "gb200": Published(
                256, 4096, pipeline=4, virtual=4, expert=64, scope=_ATTN_ROUTER, recompute=("mla_up_proj",)
            ),
            "b300": Published(
                256, 4096, pipeline=8, virtual=2, expert=8, scope=_ATTN_ROUTER, recompute=("mla_up_proj",)
            ),
            "gb300": Published(256, 4096, pipeline=4, virtual=4, expert=64, scope=_ATTN_ROUTER, recompute=("moe_act",)),
        },
        ("nemotron_h", "pretrain"): {"h100": Published(2, 768, tensor=2)},
        ("nemotron_h", "sft"): {"h100": Published(2, 128, tensor=2)},
        ("nemotron_h", "lora"): {"h100": Published(1, 128)},
    }
)
"""The settings by recipe and task, then by GPU."""
FSDP: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {("llama3_70b", "pretrain"): ("gb200", "b300", "gb300")}
)
"""GPUs on which the published settings shard the model with Megatron's FSDP, which no setting here stands for."""

_COPY = {
    "model.tensor_model_parallel_size": "tensor",
    "model.pipeline_model_parallel_size": "pipeline",
    "model.context_parallel_size": "context",
}
"""The sizes whose product is the number of GPUs that hold one copy of the model."""
_PIPELINE, _VIRTUAL = "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"
_EXPERT = "model.expert_model_parallel_size"
_GLOBAL, _MICRO = "train.global_batch_size", "train.micro_batch_size"
_LENGTH = "model.seq_length"
_GRAPHS = ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules", "enable_cuda_graph", "external_cuda_graph")
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """What the published settings of a GPU add to a recipe."""

    gpu: str | None
    num_gpus: int
    settings: Mapping[str, Any] | None = None
    """Values by `section.field`, without those that were typed; None without `-g`."""
    note: str | None = None
    """Why there are none, in a line."""

    @property
    def words(self) -> list[str]:
        """The settings as they are typed."""
        return [f"{name}={_text(value)}" for name, value in (self.settings or {}).items()]

    @property
    def line(self) -> str | None:
        """The line that names them in the output; None where there is nothing to say."""
        if not self.settings:
            return self.note
        return f"settings of {self.gpu}: " + ", ".join(word.partition(".")[2] for word in self.words)


def machine_settings(
    name: str, task: str, gpu: str | None, num_gpus: int | None, typed: Iterable[str] = (), *, divides: bool = True
) -> MachineSettings:
    """Return what `-g GPU` adds to a recipe, but for what was typed as `section.field=value`.

    Where `num_gpus` was not typed it is the published number, else 1. Without `divides` each GPU holds the whole model:
    parallel sizes and the global batch are left out.

    Example:
        >>> machine_settings("qwen3_30b_a3b", "pretrain", "b200", None).num_gpus
        8
    """
    if gpu is None or gpu == "cpu":
        return MachineSettings(None, num_gpus or 1)
    gpu, key = gpu.lower(), _key(name, task)
    found = PUBLISHED.get(key, {}).get(gpu)
    if found is None:
        return MachineSettings(gpu, num_gpus or 1, {}, _no_settings(key, gpu))
    if num_gpus is None:
        num_gpus = found.num_gpus if divides else 1
    given = {text.partition("=")[0].strip().removeprefix("--"): text.partition("=")[2] for text in typed}
    settings: dict[str, Any] = {}
    if divides and num_gpus > 1:
        settings |= _parallel(found, given)
        _refuse_uneven(gpu, found, num_gpus, settings | given)
    if divides:
        settings[_GLOBAL] = found.global_batch * num_gpus // found.num_gpus
    copies = max(1, num_gpus // _gpus_of_a_copy(settings | given))
    batch = (settings | given).get(_GLOBAL, recipe(name, task).train.global_batch_size)
    if _number(batch) % (found.micro_batch * copies) == 0:
        settings[_MICRO] = found.micro_batch
    settings |= _graphs(found, given, copies) | _recomputed(found, given)
    if found.seq_length is not None and "dataset.seq_length" not in given:
        settings[_LENGTH] = found.seq_length
    return MachineSettings(gpu, num_gpus, {name: value for name, value in settings.items() if name not in given})


def _key(name: str, task: str) -> tuple[str, str]:
    """Recipe and task as the table has them: `llama3_70b_sft` is the task sft of llama3_70b."""
    own = RECIPES[name].task
    return name.removesuffix(f"_{own}"), own if task == "pretrain" else task


def _no_settings(key: tuple[str, str], gpu: str) -> str:
    name, task = key
    what = name if task == "pretrain" else f"{task} of {name}"
    if gpu in FSDP.get(key, ()):
        return f"the settings published for {what} on {gpu} need Megatron's FSDP; the recipe's own are used"
    return f"no settings are published for {what} on {gpu}; the recipe's own are used"


def _parallel(found: Published, given: Mapping[str, str]) -> dict[str, int]:
    """The sizes that divide the model; the chunks of a stage are counted for the published number of stages."""
    sizes = {name: getattr(found, size) for name, size in _COPY.items()} | {_EXPERT: found.expert}
    if found.virtual is not None and _PIPELINE not in given:
        sizes[_VIRTUAL] = found.virtual
    return {name: size for name, size in sizes.items() if size > 1}


def _gpus_of_a_copy(sizes: Mapping[str, Any]) -> int:
    return math.prod(_number(sizes.get(name, 1)) for name in _COPY)


def _refuse_uneven(gpu: str, found: Published, num_gpus: int, sizes: Mapping[str, Any]) -> None:
    """Refuse a number of GPUs that is no multiple of what one copy of the model takes, or of all its experts."""
    experts = _number(sizes.get(_PIPELINE, 1)) * _number(sizes.get(_EXPERT, 1))
    needed = math.lcm(_gpus_of_a_copy(sizes), experts)
    if num_gpus % needed:
        listed = [f"{name}={sizes[name]}" for name in (*_COPY, _EXPERT) if name in sizes]
        raise InvalidArgument(
            f"-ng {num_gpus} is not a multiple of {needed}, the GPUs that these parallel sizes need",
            rule="world-size",
            details=[", ".join(listed)],
            why=f"the settings of {gpu} are published for {found.num_gpus} GPUs; sizes that are typed replace theirs.",
            fix=f"-ng {found.num_gpus}, or type the sizes: -tp, -pp, -cp, -ep.",
        )


def _graphs(found: Published, given: Mapping[str, str], copies: int) -> dict[str, Any]:
    """The implementation and its scope, unless one of them was typed."""
    if any(f"model.{name}" in given for name in _GRAPHS):
        return {}
    if not found.scope:
        return {"model.cuda_graph_impl": "none"}
    is_whole = found.scope == _WHOLE
    settings: dict[str, Any] = {
        "model.cuda_graph_impl": "local" if is_whole else "transformer_engine",
        "model.cuda_graph_scope": list(found.scope),
    }
    if is_whole and copies > 1:  # Megatron's own DDP does not need them, torch's does: rule nccl-ddp-warmup
        settings["model.cuda_graph_warmup_steps"] = NCCL_DDP_WARMUP
    return settings


def _recomputed(found: Published, given: Mapping[str, str]) -> dict[str, Any]:
    """The parts or layers to recompute, unless any were typed; whole layers only where no graphs were typed."""
    if any(f"model.{name}" in given for name in _RECOMPUTE):
        return {}
    if found.recompute:
        return {"model.recompute_granularity": "selective", "model.recompute_modules": list(found.recompute)}
    if found.recompute_layers is None or any(f"model.{name}" in given for name in _GRAPHS):
        return {}
    return {
        "model.recompute_granularity": "full",
        "model.recompute_method": "block",
        "model.recompute_num_layers": found.recompute_layers,
    }


def _number(value: object) -> int:
    """A size, typed or published; 1 for a text that is no number, which reading the settings refuses."""
    text = str(value).strip()
    return max(1, int(text)) if text.isdecimal() else 1


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)
