"""How many bytes a training step of a configuration needs, before anything of that size is allocated.

Weights, gradients and optimizer state follow from the parameters. Activations do not: what a layer stores depends on
its kernels, on recomputation, on what the loss makes of the logits. So one forward and backward is run with tensors
that have shapes and no memory (torch's fake tensors), and the bytes that are alive at each moment are added up; their
peak is the estimate. Nothing about the model is known here beyond that it can be run.

A deep stack is not run as a whole: its layers repeat, so two shallow ones show what a layer adds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepgraph.config.container import ConfigContainer
from stepgraph.lab.recipes.build import build_model
from stepgraph.lab.recipes.layers import with_layers

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STATES = {"adam": 2, "sgd": 1}
_SHALLOW = (4, 8)
"""Depths that are run to know what a layer adds; layers alternate at most in pairs."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The bytes of a training step, by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """The most that a forward and backward of one microbatch has alive at a time, beside the others."""
    parameters: int
    """The number of parameters."""

    @property
    def total(self) -> int:
        """All bytes of a step."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(cfg: ConfigContainer, runs: dict[str, int] | None = None) -> MemoryEstimate:
    """Estimate the bytes that a training step of a configuration needs on one device.

    `runs` keeps the activations of shallow stacks between estimates that differ in their depth only.

    Example:
        >>> estimate_memory(recipes.llama3_8b()).total / 2**30
    """
    state = state_memory(cfg)
    return dataclasses.replace(state, activations=_activations(cfg, {} if runs is None else runs))


def state_memory(cfg: ConfigContainer) -> MemoryEstimate:
    """What a run holds between its steps, on one device: the estimate without activations, in a fraction of a second.

    Example:
        >>> state_memory(recipes.deepseek_v3()).parameters
        671026404352
    """
    with torch.device("meta"):
        model = build_model(cfg.model).to(_DTYPES[cfg.mixed_precision.params_dtype])
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    trained = sum(parameter.nbytes for parameter in model.parameters())
    return MemoryEstimate(
        weights=weights,
        gradients=trained,
        optimizer=trained * _STATES[cfg.optimizer.optimizer],
        activations=0,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def available_host_memory() -> int | None:
    """The bytes that a program can still get on this machine, or in this container; None where nothing tells them."""
    found = []
    try:
        told = Path("/proc/meminfo").read_text(encoding="ascii").split()
        found.append(int(told[told.index("MemAvailable:") + 1]) * 1024)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is `max`
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found, default=None)


def _activations(cfg: ConfigContainer, runs: dict[str, int]) -> int:
    few, more = _SHALLOW
    depth, pattern = cfg.model.num_layers, cfg.model.hybrid_override_pattern
    if depth <= more or cfg.model.recompute_granularity == "full":
        return _run_once(cfg, runs)
    if pattern is None:
        at_few, at_more = (_run_once(with_layers(cfg, layers), runs) for layers in _SHALLOW)
        return at_more + (at_more - at_few) * (depth - more) // (more - few)
    twice = "".join(dict.fromkeys(pattern)) * 2
    base = _run_once(_with_pattern(cfg, twice), runs)
    added = {kind: _run_once(_with_pattern(cfg, kind + twice), runs) - base for kind in set(pattern)}
    return base + sum((pattern.count(kind) - 2) * size for kind, size in added.items())


def _with_pattern(cfg: ConfigContainer, pattern: str) -> ConfigContainer:
    cfg = cfg.copy()
    cfg.model.num_layers, cfg.model.hybrid_override_pattern = len(pattern), pattern
    return cfg


def _run_once(cfg: ConfigContainer, runs: dict[str, int]) -> int:
    model = cfg.model
    name = model.hybrid_override_pattern or str(model.num_layers)
    if name not in runs:
        runs[name] = _run_without_memory(cfg)
    return runs[name]


def _run_without_memory(cfg: ConfigContainer) -> int:
    """The peak of a forward and backward on one microbatch of fake tensors."""
    with FakeTensorMode():
        model = build_model(cfg.model)
        _cast(model, _DTYPES[cfg.mixed_precision.params_dtype])
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        tokens = torch.zeros(cfg.train.micro_batch_size, cfg.model.seq_length, dtype=torch.int64)
        live = LiveBytes()
        with live:
            run_microbatch(model, cfg, tokens)
        return live.peak


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """`model.to(dtype)`, which torch refuses for fake tensors."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype)))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def run_microbatch(model: nn.Module, cfg: ConfigContainer, tokens: torch.Tensor) -> None:
    """Run a forward and backward as a training step does, with the tokens as their own targets."""
    precision = cfg.mixed_precision
    with torch.autocast("cpu", _DTYPES[precision.autocast_dtype], enabled=precision.autocast_enabled):
        out = model(tokens, targets=tokens)
    loss = out if isinstance(out, torch.Tensor) else out.out + out.aux_loss
    loss.backward()
    if cfg.model.delay_wgrad_compute:
        backward: Callable[[], None] = model.backward_dw  # type: ignore[assignment]
        backward()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as long as they are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in given:
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _key(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found
