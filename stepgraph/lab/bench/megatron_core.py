"""megatron-core's own GPTModel under its own schedule and its own graphs, as mechanisms of a comparison.

One process, no parallelism, Megatron's plain-torch layers (the "local" spec, without Transformer Engine). The model has
the sizes of the recipe and weights of its own, drawn here from a seed, so that they are the same whichever graphs it
has. The loop, the data, the clipping and the optimizer are those of all mechanisms.

Megatron's graphs of layers add weight gradients to `main_grad`, where its distributed optimizer reads them; here
`.grad` is pointed at it before the optimizer runs. Its graph of an iteration holds forward and backward: it is captured
while there are no gradients, so that each replay writes them anew. Megatron's graphs are globals of the process, so
that one model can have them. Imports `megatron` on use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.core.errors import InvalidArgument
from stepgraph.lab.train.data import Sample
from stepgraph.lab.train.implementations import Implementation, Work
from stepgraph.lab.train.iteration import Result

Graphs = Literal["none", "layers", "iteration"]
_ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {"silu": F.silu, "gelu": F.gelu}
_POSITIONS = ("rope", "learned_absolute")
_INIT_STD = 0.02


_SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization"),
    *("layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
)
"""Settings of a recipe's model that Megatron's configuration has under the same name."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense GPT."""

    settings: Mapping[str, Any]
    """Those of Megatron's TransformerConfig, by its names."""
    vocab_size: int
    seq_length: int
    position_embedding_type: str = "rope"
    rotary_base: float = 10000.0
    share_embeddings_and_output_weights: bool = False

    @classmethod
    def of(cls, model: Any) -> Shape:
        """The sizes of a recipe's model; raises for parts that are not built here."""
        if (part := unbuilt_part(model)) is not None:
            raise InvalidArgument(
                f"megatron-core's GPTModel is not built here for {part}",
                rule="option",
                why="only dense GPTs with plain attention are.",
                fix="leave this mechanism out: --only.",
            )
        return cls(
            {name: getattr(model, name) for name in _SAME}
            | {
                "ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size,
                "activation_func": _ACTIVATIONS[model.activation_func],
            },
            vocab_size=model.vocab_size,
            seq_length=model.seq_length,
            position_embedding_type=model.position_embedding_type,
            rotary_base=model.rotary_base,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        )


def unbuilt_part(model: Any) -> str | None:
    """Name a part of a recipe's model that is not built with megatron-core here; None if there is none."""
    if model.kind != "gpt" or model.num_moe_experts:
        return f"a model of kind {'moe' if model.num_moe_experts else model.kind}"
    parts = {
        "multi-latent attention": model.multi_latent_attention,
        f"softmax_type {model.softmax_type}": model.softmax_type != "vanilla",
        "a window of attention": model.window_size is not None,
        f"positions of type {model.position_embedding_type}": model.position_embedding_type not in _POSITIONS,
        f"activation_func {model.activation_func}": model.activation_func not in _ACTIVATIONS,
        "recomputation": model.recompute_granularity is not None,
        "dropout": bool(model.hidden_dropout or model.attention_dropout),
    }
    return next((name for name, is_there in parts.items() if is_there), None)


def join_group_of_one(device: torch.device) -> None:
    """Start torch.distributed and Megatron's groups, with this process alone in each; they last as long as it."""
    if not torch.distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=address, rank=0, world_size=1)
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(1, 1)


def make_config(shape: Shape, graphs: Graphs, warmup_steps: int, device: torch.device) -> Any:
    """Return Megatron's configuration. Releases differ in how they name the graph of an iteration."""
    kind = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    if "cuda_graph_modules" in known:
        impl = {"none": "none", "layers": "local", "iteration": "full_iteration"}[graphs]
        settings: dict[str, Any] = {"cuda_graph_impl": impl, "cuda_graph_modules": []}
    else:
        scope = ["full_iteration"] if graphs == "iteration" else []
        settings = {"cuda_graph_impl": "none" if graphs == "none" else "local", "cuda_graph_scope": scope}
    return kind(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=device.type == "cpu",
        cuda_graph_warmup_steps=warmup_steps,
        **shape.settings,
        **settings,
    )


def build_gpt(shape: Shape, graphs: Graphs, *, device: torch.device, warmup_steps: int = 3, seed: int = 0) -> nn.Module:
    """Return Megatron's GPTModel in bf16, always with the same weights."""
    join_group_of_one(device)
    if device.type == "cuda":
        random = importlib.import_module("megatron.core.tensor_parallel.random")
        # Also for eager: the plain tracker reads random states on the host, which no graph can hold.
        random.model_parallel_cuda_manual_seed(seed + 1, use_cudagraphable_rng=True, force_reset_rng=True)
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    kind = importlib.import_module("megatron.core.models.gpt.gpt_model").GPTModel
    model: nn.Module = kind(
        config=make_config(shape, graphs, warmup_steps, device),
        transformer_layer_spec=specs.get_gpt_layer_local_spec(
            qk_layernorm=shape.settings.get("qk_layernorm", False), normalization=shape.settings["normalization"]
        ),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        position_embedding_type=shape.position_embedding_type,
        rotary_base=shape.rotary_base,
        share_embeddings_and_output_weights=shape.share_embeddings_and_output_weights,
    )
    model = model.to(device, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=_INIT_STD, generator=generator)
    return model


class ScheduledSteps:
    """Forward and backward of all microbatches by Megatron's schedule; then `.grad` has the gradients."""

    def __init__(
        self, model: nn.Module, graphs: Graphs, *, num_microbatches: int, micro_batch_size: int, seq_length: int
    ) -> None:
        self._schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        self._model, self._graphs = model, graphs
        self._sizes = {
            "num_microbatches": num_microbatches,
            "micro_batch_size": micro_batch_size,
            "seq_length": seq_length,
        }
        weight = next(model.parameters())
        self._positions = torch.arange(seq_length, device=weight.device).expand(micro_batch_size, -1)
        self._mask = torch.ones(1, 1, seq_length, seq_length, device=weight.device, dtype=torch.bool).triu(1)
        layers: nn.Module = model.decoder.layers  # type: ignore[union-attr, assignment]
        self._in_graphs: list[Any] = list(layers.parameters()) if graphs == "layers" else []
        for parameter in self._in_graphs:
            parameter.main_grad = torch.zeros_like(parameter)
        self._run: Callable[..., Any] = self._schedules.forward_backward_no_pipelining
        self._wrapper: Any = None
        if graphs == "iteration":
            full = importlib.import_module("megatron.core.full_cuda_graph")
            warmup_steps = model.config.cuda_graph_warmup_steps  # type: ignore[union-attr]
            self._wrapper = self._run = full.FullCudaGraphWrapper(self._run, warmup_steps)
        self.capture_times: list[float] = []

    @property
    def is_captured(self) -> bool:
        """Whether graphs are replayed from now on."""
        if self._wrapper is not None:
            return self._wrapper.cuda_graph["training"] is not None
        return bool(self.capture_times)

    def __call__(self, microbatches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Train on these microbatches of `tokens` and `targets`; return the mean loss."""
        was_captured, begun = self.is_captured, time.perf_counter()
        if not (self._wrapper is not None and was_captured):  # its replays write gradients at their place
            for parameter in self._model.parameters():
                parameter.grad = None
        if self._in_graphs:
            torch._foreach_zero_([parameter.main_grad for parameter in self._in_graphs])
        with self._timed_captures() if self._graphs == "layers" else contextlib.nullcontext():
            found = self._run(
                forward_step_func=self._forward,
                data_iterator=iter([dict(microbatch) for microbatch in microbatches]),
                model=[self._model],
                forward_only=False,
                **self._sizes,
            )
        for parameter in self._in_graphs:
            if parameter.grad is None:  # replayed; the first step is eager
                parameter.grad = parameter.main_grad
        if self._wrapper is not None and self.is_captured and not was_captured:
            self.capture_times.append(time.perf_counter() - begun)
        return torch.stack([each["loss"] for each in found]).mean()

    def _forward(self, microbatches: Iterator[Mapping[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        given = next(microbatches)
        return model(given["tokens"], self._positions, self._mask, labels=given["targets"]), mean_loss

    @contextlib.contextmanager
    def _timed_captures(self) -> Iterator[None]:
        """Note how long captures take: the schedule makes them at its end, and drops what they return."""
        create = self._schedules.create_cudagraphs

        def timed() -> Any:
            begun = time.perf_counter()
            returned = create()
            if not self.capture_times:  # later calls find all graphs there
                self.capture_times.append(time.perf_counter() - begun)
            return returned

        self._schedules.create_cudagraphs = timed
        try:
            yield
        finally:
            self._schedules.create_cudagraphs = create


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss for the schedule, which divides it in place, and a copy to report."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


class LossOfGPT(nn.Module):
    """Megatron's model as the loop wants one: from tokens and targets to the loss."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run the model; the schedule does not come here."""
        length = tokens.shape[-1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        mask = torch.ones(1, 1, length, length, device=tokens.device, dtype=torch.bool).triu(1)
        loss: Tensor = self.gpt(tokens, positions, mask, labels=targets).float().mean()
        return loss


@dataclass(frozen=True, slots=True)
class Provider:
    """Builds the model for the loop."""

    graphs: Graphs

    def __call__(self, cfg: Any) -> nn.Module:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        steps, seed = cfg.model.cuda_graph_warmup_steps, cfg.rng.seed
        return LossOfGPT(build_gpt(Shape.of(cfg.model), self.graphs, device=device, warmup_steps=steps, seed=seed))


class MegatronIteration(Implementation):
    """Iterations by Megatron's schedule, with the loop's own clipping and optimizer."""

    name = "megatron-core"

    def __init__(self, work: Work, cfg: Any, graphs: Graphs) -> None:
        super().__init__(work)
        assert isinstance(work.core, LossOfGPT)
        self._steps = ScheduledSteps(
            work.core.gpt,
            graphs,
            num_microbatches=work.num_microbatches,
            micro_batch_size=cfg.train.micro_batch_size,
            seq_length=cfg.model.seq_length,
        )
        self._num_graphs = {"none": 0, "iteration": 1, "layers": cfg.model.num_layers}[graphs]

    def train(self, microbatches: Sequence[Sample]) -> Result:
        loss = self._steps(microbatches)
        norm = self.work.finish(None)
        self.work.optimizer.step()
        if not self.is_captured and self._steps.is_captured:
            self.is_captured, self.capture_seconds = True, sum(self._steps.capture_times)
        return Result(loss, norm)

    @property
    def num_graphed(self) -> int:
        return self._num_graphs if self.is_captured else 0
