"""Memory between graphed modules: a result is the next one's argument, and what several are given is copied once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import stepgraph
from stepgraph.lab.models import GPT, GPTConfig
from tests.module_harness import Layer, Net, Training, assert_graphed_equals_eager, only_row, training_of


class Chain(nn.Module):
    """Notes where its layers' arguments and results lie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout=0.0) for _ in range(3))
        self.places: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.places = []
        for layer in self.layers:
            x = layer(x)
            self.places.append(x.data_ptr())
        return x


def runners(handle: stepgraph.GraphedModules) -> list[Any]:
    return [runner for m in handle._shared.managers for site in m.sites.values() for runner in site.runners]


def test_buffers_chain_from_result_to_argument_without_a_copy(device: torch.device) -> None:
    """A graph reads its argument where the graph before wrote it, and gradients go back the same way."""
    model = Chain().to(device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1) as handle:
        for _ in range(6):
            model(torch.randn(4, 8, device=device)).sum().backward()
        first, second, third = runners(handle)
        assert [r.boundary.tensors[0].data_ptr() for r in (second, third)] == model.places[:2]
        assert [r.result.tensors[0].data_ptr() for r in (first, second, third)] == model.places
        (last,) = third.backwards.values()
        (before,) = second.backwards.values()
        assert before.grads_in.tensors[0].data_ptr() == last.grads_out[0].data_ptr()
        copies = count_copies(lambda: model(torch.randn(4, 8, device=device)).sum().backward(), device)
        assert copies == 2, "the batch, and the gradient of the sum"


def count_copies(run: Callable[[], Any], device: torch.device) -> int:
    """How many copies between tensors a call makes; those inside graphs are not seen on a GPU, nor is there any."""
    found = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name in ("aten::copy_", "aten::clone", "aten::_foreach_copy_") and not in_replay():
                found.append(name)
            return func(*args, **(kwargs or {}))

    def in_replay() -> bool:
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "replay" and frame.f_code.co_filename.endswith("tape/graph.py"):
                return True
            frame = frame.f_back
        return False

    with Copies():
        run()
    return len(found)


def test_buffers_of_a_shared_argument_are_filled_once(device: torch.device) -> None:
    """A mask that all layers are given is copied for the first of them."""
    model = nn.ModuleList(Layer(dropout=0.0) for _ in range(4)).to(device)
    with stepgraph.graph_modules(model, ["*"], warmup=1) as handle:

        def step() -> None:
            x, mask = torch.randn(4, 8, device=device), torch.ones(4, 1, device=device)
            for layer in model:
                x = layer(x, mask=mask)
            x.sum().backward()

        for _ in range(6):
            step()
        places = {runner.boundary.tensors[1].data_ptr() for runner in runners(handle)}
        assert len(places) == 1
        assert count_copies(step, device) == 2, "the batch and the mask in one, and the gradient"


def test_buffers_shared_by_layers_follow_writes_to_data(device: torch.device) -> None:
    """A caller who writes to `.data`, of which autograd's version counter knows nothing."""
    mask = torch.ones(4, 1, device=device)

    def build(device: torch.device) -> Training:
        local = mask.clone()
        training = training_of(
            lambda: Net(Layer(), Layer()), device, call=lambda model, x: model(x, mask=local), steps=14
        )
        training.before_step = lambda index: local.data.fill_(float(index))  # type: ignore[assignment]
        return training

    assert_graphed_equals_eager(build, device)


def test_buffers_hold_no_mask_for_causal_attention(device: torch.device) -> None:
    """Trap: s*s bytes a sample for a mask that causal attention does not need."""
    config = replace(GPTConfig.tiny(), max_seq_len=96)
    model = GPT(config).to(device)
    tokens = torch.randint(config.vocab_size, (2, config.max_seq_len), device=device)
    with stepgraph.graph_modules(model, warmup=1) as handle:
        for _ in range(3):
            model(tokens, tokens).backward()
        square = config.max_seq_len**2
        for runner in runners(handle):
            assert runner.forwards == 2
            for tensor in runner.boundary.tensors.values():
                assert tensor.shape[-2:] != (config.max_seq_len, config.max_seq_len)
                assert tensor.numel() < tokens.shape[0] * square
        row = only_row(handle.report(), handle.paths[0])
        width = model.config.hidden_size
        assert row.static_bytes <= 3 * 4 * tokens.numel() * width, "argument, gradient, and no more"
