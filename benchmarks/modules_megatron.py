"""megatron-core's own GPTModel for `modules.py`: trained by its own schedule, with its own graphs or with stepgraph's.

One process, no parallelism, its plain-torch layers ("local" spec, without Transformer Engine). Weights are drawn here,
so that they are the same whatever the random tracker does. Megatron's graphs add weight gradients to `main_grad` by
themselves, where its distributed optimizer reads them; here `.grad` is pointed at it before the optimizer runs. Its
graphs are a global of the process, so that only one model can have them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import get_all_rng_states, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from modules_variants import Setting, Training, model_config, reset_peaks
from torch import Tensor, nn
from whole_step_report import MICROBATCHES
from whole_step_variants import WARMUP, fused_adamw

import stepgraph
from stepgraph.models import GPTConfig


def join_group_of_one() -> None:
    """Start torch.distributed and Megatron's groups, with this process alone in each."""
    if not torch.distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(1, 1)


def megatron_config(shape: GPTConfig, implementation: str) -> TransformerConfig:
    """Return Megatron's spelling of the reference GPT's shape."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        kv_channels=shape.head_size,
        ffn_hidden_size=shape.ffn_size,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        cuda_graph_impl=implementation,
        cuda_graph_modules=[],  # whole layers
        cuda_graph_warmup_steps=WARMUP,
    )


def build_model(shape: GPTConfig, implementation: str) -> nn.Module:
    """Return the model on the GPU, always with the same weights."""
    join_group_of_one()
    # Also for eager: the plain tracker reads random states on the host, which no graph can hold.
    model_parallel_cuda_manual_seed(123, use_cudagraphable_rng=True, force_reset_rng=True)
    model = GPTModel(
        config=megatron_config(shape, implementation),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_seq_len,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = model.cuda().bfloat16()
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=generator)
    return model


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss for the schedule, which divides it in place, and a copy to report."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


class ScheduledStep:
    """A training step run by Megatron's schedule; with `main_grad`, gradients of layers are read there."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, sequence: int, *, main_grad: bool) -> None:
        self._model, self._optimizer, self._sequence = model, optimizer, sequence
        self._positions = torch.arange(sequence, device="cuda")[None]
        self._mask = torch.ones(1, 1, sequence, sequence, device="cuda", dtype=torch.bool).triu(1)
        self._in_graphs = list(model.decoder.layers.parameters()) if main_grad else []
        for parameter in self._in_graphs:
            parameter.main_grad = torch.zeros_like(parameter)
        self.capture_times: list[float] = []

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        if self._in_graphs:
            torch._foreach_zero_([p.main_grad for p in self._in_graphs])
        with timed_captures(self.capture_times) if self._in_graphs else contextlib.nullcontext():
            found = schedules.forward_backward_no_pipelining(
                forward_step_func=self._forward,
                data_iterator=iter(zip(tokens, targets, strict=True)),
                model=[self._model],
                num_microbatches=MICROBATCHES,
                seq_length=self._sequence,
                micro_batch_size=1,
                forward_only=False,
            )
        for parameter in self._in_graphs:
            if parameter.grad is None:  # replayed; the first step is eager
                parameter.grad = parameter.main_grad
        self._optimizer.step()
        return torch.stack([each["loss"] for each in found]).mean()

    def _forward(self, batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        tokens, targets = next(batches)
        return model(tokens, self._positions, self._mask, labels=targets), mean_loss


@contextlib.contextmanager
def timed_captures(seconds: list[float]) -> Iterator[None]:
    """Note how long captures take: the schedule calls them at its end, and drops what they say of it."""
    create = schedules.create_cudagraphs

    def timed() -> Any:
        said = create()
        if said:
            seconds.append(said["time"])
        return said

    schedules.create_cudagraphs = timed
    try:
        yield
    finally:
        schedules.create_cudagraphs = create


def build_megatron(setting: Setting, variant: str) -> Training:
    """Return a variant of Megatron's model, ready to train."""
    is_graphed = variant == "megatron-layers"
    model = build_model(model_config(setting, variant), "local" if is_graphed else "none")
    reset_peaks(setting)
    optimizer = fused_adamw(model)
    step = ScheduledStep(model, optimizer, setting.sequence, main_grad=is_graphed)
    if variant != "ours-layers":
        return Training(model, optimizer, step, capture_times=step.capture_times)
    handle = stepgraph.graph_modules(
        model,
        scope=["decoder.layers.*"],
        ignore=["self.current_microbatch"],  # the schedule numbers microbatches on each layer, which does not read it
        generators=list(get_all_rng_states().values()),
    )
    return Training(model, optimizer, step, engine=handle)
