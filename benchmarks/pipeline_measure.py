"""How the variants of `pipeline.py` are measured, inside a worker process: a rank's chunks, its step, its graphs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from modules_measure import deterministic
from pipeline_report import CHUNKS, EQUALITY, LAYERS, RANK, STAGES, WORKLOADS, order_of
from torch import Tensor, nn
from whole_step_report import Record, State, compare
from whole_step_variants import copied, fused_adamw, peak_bytes, time_steps, trained_state

import stepgraph
from stepgraph.engine.order import Kind, read_order
from stepgraph.lab.models import GPTConfig
from stepgraph.lab.models.attention import RotaryPositions
from stepgraph.lab.models.gpt import Block
from stepgraph.tools.measure import reset_peaks

WARM_STEPS = 6
HOST_CALLS = 5
DRAWN = 4
"""Tensors that stand for what neighbours send, taken in turn."""


@dataclass(frozen=True)
class Setting:
    """One workload on one device."""

    workload: str
    device: torch.device
    layers: int = LAYERS

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def config(self) -> GPTConfig:
        """The shape of a layer."""
        if not self.is_on_gpu:
            return replace(GPTConfig.tiny(), max_seq_len=8)
        return replace(GPTConfig.gpt_162m(), max_seq_len=WORKLOADS[self.workload].tokens)

    @property
    def microbatches(self) -> int:
        return WORKLOADS[self.workload].microbatches

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one layer's static input."""
        return 2 * self.config.max_seq_len * self.config.hidden_size


class Chunk(nn.Module):
    """Layers of the GPT between two stages: hidden states in, hidden states out."""

    def __init__(self, config: GPTConfig, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        self.rotary = RotaryPositions(config.head_size, config.max_seq_len, config.rope_base)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for block in self.blocks:
            x = block(x, self.rotary)
        return x


class Rank:
    """The chunks of a stage with their optimizer, and a step that runs them in the order, as the stage would."""

    def __init__(self, setting: Setting, variant: str) -> None:
        self.setting, config = setting, setting.config
        torch.manual_seed(0)
        with torch.device(setting.device):
            self.chunks = nn.ModuleList(Chunk(config, setting.layers) for _ in range(CHUNKS)).to(torch.bfloat16)
            generator = torch.Generator(setting.device).manual_seed(7)
            shape = (1, config.max_seq_len, config.hidden_size)
            self._drawn = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(DRAWN)]
        reset_peaks(setting.device)
        self.optimizer = fused_adamw(self.chunks)
        self._entries = read_order(order_of(setting.microbatches))
        self._steps = itertools.count()
        self.helper: stepgraph.TECudaGraphHelper | None = None
        self.captured = stepgraph.capture(self._run) if variant == "whole-step" else None
        if variant.startswith("ours"):
            self.helper = stepgraph.TECudaGraphHelper(
                list(self.chunks),
                SimpleNamespace(hidden_size=config.hidden_size, pipeline_model_parallel_size=STAGES),
                config.max_seq_len,
                1,
                [self.optimizer],
                num_microbatches=setting.microbatches,
                pipeline_parallel_rank=RANK,
                reuse_buffers=variant == "ours",
            )
            self.helper.create_cudagraphs()

    def step(self) -> Tensor:
        """Run the order once on other tensors than the step before; return a mean over the last result."""
        first = next(self._steps) % DRAWN
        run = self._run if self.captured is None else self.captured
        return run(*self._drawn[first:], *self._drawn[:first])

    def _run(self, *drawn: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        received = itertools.cycle(drawn)
        under_way: dict[tuple[int, int], Tensor] = {}
        last = drawn[0]
        for entry in self._entries:
            key = (entry.chunk, entry.microbatch)
            if entry.kind is Kind.FORWARD:
                chunk = self.chunks[entry.chunk - 1]
                if self.helper is not None:
                    stepgraph.set_current_microbatch(chunk, entry.microbatch)
                under_way[key] = chunk(next(received).detach().requires_grad_())
            else:
                last = under_way.pop(key)
                last.backward(next(received))
        self.optimizer.step()
        return last.detach()[..., 0].float().mean()

    def engine(self) -> Record:
        """What stepgraph says of its graphs; nothing for eager."""
        return {} if self.helper is None else self.helper.report().to_dict()

    def close(self) -> None:
        """End the graphs."""
        if self.helper is not None:
            self.helper.delete_cuda_graphs()
        if self.captured is not None:
            self.captured.close()


def measure(setting: Setting, variant: str, steps: int) -> Record:
    """Run one timed variant from the chunks' construction to its report."""
    rank = Rank(setting, variant)
    warm_steps, host_calls = (WARM_STEPS, HOST_CALLS) if setting.is_on_gpu else (1, 1)
    figures = time_steps(rank.step, steps, warm_steps, host_calls, setting.device)
    seconds = None if rank.helper is None else rank.helper.capture_seconds
    pairs = CHUNKS * setting.layers * setting.microbatches
    found = figures | {
        "capture_s": seconds,
        "capture_s_per_graph": None if seconds is None else seconds / pairs,
        **peak_bytes(setting.device),
        "engine": rank.engine(),
    }
    rank.close()
    return found


def train(setting: Setting, variant: str, steps: int) -> tuple[State, int]:
    """Train from the seed; return copies of all that can be compared, and how often graphs were replayed."""
    reset_peaks(setting.device)  # what the run before has left is freed
    rank = Rank(setting, variant)
    results = {f"step {i}": rank.step().clone() for i in range(steps)}
    state = copied(trained_state(rank.chunks, rank.optimizer, results))
    replays = int(rank.engine().get("forwards", 0))
    rank.close()
    return state, replays


def measure_equality(setting: Setting, steps: int) -> Record:
    """Train eagerly and with graphs from one seed; compare bit by bit."""
    pairs: dict[str, dict[str, Record]] = {}
    replays: dict[str, int] = {}
    with deterministic(warn_only=False):
        reference, _ = train(setting, "eager", steps)
        for variant in ("ours", "ours-no-reuse"):
            state, count = train(setting, variant, steps)
            pairs[f"eager vs {variant}"] = compare(reference, state)
            replays[f"eager vs {variant}"] = count
    finite = all(math.isfinite(value.item()) for value in reference["losses"].values())
    return {"steps": steps, "pairs": pairs, "replays": replays, "finite": finite}


def measure_job(setting: Setting, variant: str, steps: int, equality_steps: int) -> Record:
    """Measure one variant of one workload."""
    found = measure_equality(setting, equality_steps) if variant == EQUALITY else measure(setting, variant, steps)
    sizes = {"sequence": setting.config.max_seq_len, "entries": len(order_of(setting.microbatches))}
    return found | sizes | {"buffer_bytes": setting.buffer_bytes}
