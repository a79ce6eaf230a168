"""What graphed modules hand out: any structure, safe to keep, and not copied where nobody keeps it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import stepgraph
from stepgraph.models import GPT, GPTConfig
from stepgraph.tree import flatten
from tests.module_harness import (
    Layer,
    Net,
    Note,
    Training,
    assert_graphed_equals_eager,
    only_row,
    quiet,
    same_bits,
    training_of,
)


@dataclass
class Routed:
    hidden: torch.Tensor
    logits: torch.Tensor | None
    num_experts: int
    extra: dict[str, Any]


class Both(NamedTuple):
    first: torch.Tensor
    second: Any


class Returns(nn.Module):
    """A layer whose result has the structure that a test asks for."""

    def __init__(self, build: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self._build = nn.Linear(8, 8), build

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x).tanh()
        return self._build(x, hidden)


STRUCTURES = {
    "tuple": lambda x, h: (h, h.argmax(-1), None, 3),
    "list": lambda x, h: [h, [h.sum(0), "text"]],
    "dict": lambda x, h: {"b": h, "a": {"c": h * 2, "none": None}},
    "ordered": lambda x, h: OrderedDict(out=h, number=1.5),
    "dataclass": lambda x, h: Routed(h, None, 4, {"load": h.detach().mean()}),
    "namedtuple": lambda x, h: Both(h, (h + 1, torch.float32)),
    "its argument": lambda x, h: (h, x),
    "a view of its argument": lambda x, h: (h, x[1:]),
    "twice the same": lambda x, h: (h, h),
    "views of one tensor": lambda x, h: h.chunk(2, -1),
    "a number without tensors": lambda x, h: (h, True, ...),
}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


@pytest.mark.parametrize("kind", STRUCTURES)
def test_results_of_every_structure(kind: str, device: torch.device) -> None:
    """Trap: results that are None or numbers. Each structure comes out as it went in."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: nn.ModuleDict({"part": Returns(STRUCTURES[kind])}), device)
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> Any:
            optimizer.zero_grad()
            result = training.model["part"](batch[0])
            note(result)
            loss = sum(tensor.pow(2).mean() for tensor in tensors_in(result))
            loss.backward()
            note(loss)
            optimizer.step()
            return result

        training.step = step
        return training

    assert_graphed_equals_eager(build, device, "part")


def test_results_that_are_the_argument_are_the_callers_tensor(device: torch.device) -> None:
    model = nn.ModuleDict({"part": Returns(STRUCTURES["its argument"])}).to(device)
    with stepgraph.graph_modules(model, "part", warmup=1) as handle:
        for _ in range(4):
            x = torch.randn(4, 8, device=device)
            assert model["part"](x)[1] is x
        assert handle.report().replays == 3


def test_results_with_a_plain_value_that_changes_stay_eager(device: torch.device) -> None:
    """A count that is read on the host, or a list whose length varies, is never the one of the capture."""
    for kind in ("a number", "a length"):
        count = iter(range(100))

        def varying(x: torch.Tensor, h: torch.Tensor, kind: str = kind, count: Any = count) -> Any:
            number = next(count)
            return (h, number) if kind == "a number" else [h] * (1 + number % 2)

        model = nn.ModuleDict({"part": Returns(varying)}).to(device)
        with stepgraph.graph_modules(model, "part") as handle, quiet() as seen, torch.no_grad():
            for index in range(8):
                result = model["part"](torch.ones(4, 8, device=device))
                assert result[1] == index if kind == "a number" else len(result) == 1 + index % 2
            report = handle.report()
        assert report.replays == 0
        assert report.rows[0].eager_reasons == {"warm-up": 3, "capture failed: [varying-output]": 5}
        assert any("varying-output" in str(warning.message) for warning in seen)


# -- kept by the caller


@pytest.mark.parametrize("what", ["the result", "a view", "detached", "in a graph"])
@pytest.mark.parametrize("since", [0, 7])
@pytest.mark.parametrize("where", [0, 1])
def test_results_kept_over_steps_never_change(what: str, since: int, where: int, device: torch.device) -> None:
    """Trap: outputs overwritten by the next call. From the start, or only once the module replays."""
    keep: dict[str, Callable[[torch.Tensor], Any]] = {
        "the result": lambda hidden: hidden,
        "a view": lambda hidden: hidden.detach()[1:, ::2],
        "detached": torch.Tensor.detach,
        "in a graph": lambda hidden: hidden * 2,
    }

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer(), Layer()), device, steps=16)
        model, optimizer = training.model, training.optimizers[0]
        kept: list[Any] = []
        count = [0]

        def step(batch: torch.Tensor, note: Note) -> list[torch.Tensor]:
            optimizer.zero_grad()
            hidden = model.embed(batch[0])
            for index, layer in enumerate(model.layers):
                hidden = layer(hidden)
                if index == where and count[0] >= since:
                    kept.append(keep[what](hidden))
            count[0] += 1
            loss = model.head(hidden).pow(2).mean()
            loss.backward()
            note(loss)
            optimizer.step()
            return [value.detach().clone() for value in kept]

        training.step = step
        return training

    report = assert_graphed_equals_eager(build, device)
    if what != "the result":  # whose autograd graph is kept with it
        assert all(row.forwards >= 5 for row in report.rows), report


def test_results_kept_in_evaluation_never_change(device: torch.device) -> None:
    """Predictions collected over a whole evaluation."""
    model = Net(Layer(), Layer()).to(device).eval()
    eager = Net(Layer(), Layer()).to(device).eval()
    eager.load_state_dict(model.state_dict())
    batches = [torch.randn(4, 8, device=device) for _ in range(12)]
    with stepgraph.graph_modules(model, "layers.*") as handle, torch.no_grad():
        received = [model.layers[1](model.layers[0](x)) for x in batches]
        expected = [eager.layers[1](eager.layers[0](x)) for x in batches]
        assert all(map(same_bits, expected, received))
        assert handle.report().replays > 0


def test_results_static_are_overwritten_by_the_next_call(device: torch.device) -> None:
    """The fast mode: no look at who holds what, and never a copy."""
    model = nn.ModuleDict({"part": nn.Linear(8, 8)}).to(device)
    with stepgraph.graph_modules(model, "part", warmup=1, outputs="static") as handle, torch.no_grad():
        model["part"](torch.ones(4, 8, device=device))
        kept = model["part"](torch.ones(4, 8, device=device))
        latest = model["part"](torch.zeros(4, 8, device=device))
        assert kept.data_ptr() == latest.data_ptr()
        assert torch.equal(kept, latest)
        assert handle.report().graphs == 1
        assert handle.report().replays == 2


def test_results_changed_in_place_by_the_caller(device: torch.device) -> None:
    """As eager allows, for what a linear layer has returned. As eager forbids, for what a tanh has returned."""

    def build(device: torch.device) -> Training:
        return training_of(
            lambda: nn.ModuleDict({"part": nn.Linear(8, 8)}),
            device,
            call=lambda model, x: model["part"](x).add_(1).mul_(2),
        )

    assert_graphed_equals_eager(build, device, "part")
    model = nn.ModuleDict({"part": nn.Sequential(nn.Linear(8, 8), nn.Tanh())}).to(device)
    with stepgraph.graph_modules(model, "part", warmup=1):
        for _ in range(3):
            model["part"](torch.ones(4, 8, device=device)).sum().backward()
        with pytest.raises(stepgraph.CaptureError, match="changed in place") as raised:
            model["part"](torch.ones(4, 8, device=device)).mul_(2).sum().backward()
        assert raised.value.rule == "inplace-saved"


# -- not copied


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
        for _ in range(4):
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
            if frame.f_code.co_name == "replay" and "tape_graph" in frame.f_code.co_filename:
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

        for _ in range(4):
            step()
        places = {runner.boundary.tensors[1].data_ptr() for runner in runners(handle)}
        assert len(places) == 1
        assert count_copies(step, device) == 2, "the batch and the mask in one, and the gradient"


def test_buffers_shared_by_layers_show_a_change_that_no_version_tells(device: torch.device) -> None:
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
