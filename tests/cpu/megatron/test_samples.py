"""Sample arguments: from a layer's own word, from its signature, from a run of it; and one form for all calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.parts.modules.scopes import Part
from stepgraph.lab.models import GPT, GPTConfig, MoEConfig, MoEGPT, VisionConfig, VisionEncoder
from stepgraph.megatron.samples import CallForm, Sizes, sample_of_layer, samples_of_parts

SIZES = Sizes(seq_length=6, micro_batch_size=3, hidden_size=64)


def test_call_form_is_the_same_for_all_spellings() -> None:
    def function(x: Any, mask: Any = None, *, scale: float = 1.0, flag: Any = None) -> None: ...

    form = CallForm(function)
    for args, kwargs in [((1, 2), {}), ((1,), {"mask": 2}), ((), {"mask": 2, "x": 1}), ((1, 2), {"scale": 1.0})]:
        assert (form(args, kwargs).args, form(args, kwargs).kwargs) == ((1, 2), {})
    assert (form((1, None), {"flag": 3}).args, form((1, None), {"flag": 3}).kwargs) == ((1,), {"flag": 3})
    unknown = form((1,), {"other": 2})  # for the function itself to refuse
    assert (unknown.args, unknown.kwargs) == ((1,), {"other": 2})


def test_sample_of_layer_reads_the_signature() -> None:
    model = GPT(GPTConfig.tiny()).to(torch.bfloat16)
    sample = sample_of_layer(model, Part("blocks.1", model.blocks[1]), SIZES)
    hidden, rotary = sample.args
    assert sample.kwargs == {}
    assert (hidden.shape, hidden.dtype, hidden.requires_grad) == ((3, 6, 64), torch.bfloat16, True)
    assert rotary is model.rotary


def test_sample_of_layer_looks_further_out_for_a_name() -> None:
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"gpt": GPT(GPTConfig.tiny())})})
    part = Part("module.gpt.blocks.0", wrapped["module"]["gpt"].blocks[0])
    assert sample_of_layer(wrapped, part, SIZES).args[1] is wrapped["module"]["gpt"].rotary


def test_sample_of_layer_takes_the_layers_own_word() -> None:
    model = nn.ModuleDict({"vision_model": VisionEncoder(VisionConfig.tiny())})
    part = Part("vision_model.blocks.0", model["vision_model"].blocks[0])
    sample = sample_of_layer(model, part, Sizes(10, 1, None))
    assert [tuple(tensor.shape) for tensor in sample.args] == [(1, 10, 48), (1, 10)]
    assert [tensor.dtype for tensor in sample.args] == [torch.float32, torch.int64]


def test_samples_of_parts_come_in_the_order_of_the_calls() -> None:
    model = MoEGPT(MoEConfig.tiny())
    block = model.blocks[0]
    given = [
        Part("blocks.0.moe.combine", block.moe, "combine"),
        Part("blocks.0.moe.route", block.moe, "route"),
        Part("blocks.0.attn", block.attn),
        Part("blocks.0.moe.preprocess", block.moe, "preprocess"),
    ]
    before = [dict(vars(module)) for module in block.modules()]
    found = samples_of_parts(block, sample_of_layer(model, Part("blocks.0", block), SIZES), given)
    assert [part.path.rpartition(".")[2] for part, _ in found] == ["attn", "route", "preprocess", "combine"]
    samples = {part.method: sample for part, sample in found}
    assert samples["forward"].args[0].requires_grad
    assert samples["route"].args[0].shape == (3, 6, 64)
    assert samples["preprocess"].args[0].dtype is torch.int64
    assert not samples["preprocess"].args[0].requires_grad
    assert all(t.is_leaf for s in samples.values() for t in s.args if isinstance(t, torch.Tensor))
    assert [vars(m).keys() for m in block.modules()] == [names.keys() for names in before]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.never = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.again(x))


@pytest.mark.parametrize(("name", "times"), [("again", 2), ("never", 0)])
def test_samples_of_parts_refuse_a_part_that_is_not_called_once(name: str, times: int) -> None:
    layer = Twice()
    part = Part(name, getattr(layer, name))
    with pytest.raises(InvalidArgument, match=f"`{name}` is called {times} times") as caught:
        samples_of_parts(layer, sample_of_layer(layer, Part("", layer), SIZES), [part])
    assert caught.value.rule == "layer-sample"
    assert "forward" not in vars(part.module)


def test_samples_of_parts_put_random_state_back_after_an_error() -> None:
    class Failing(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(3)
            self.seen = 1
            raise ZeroDivisionError

    layer = Failing()
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        samples_of_parts(layer, sample_of_layer(layer, Part("", layer), SIZES), [Part("again", layer.again)])
    assert torch.equal(torch.get_rng_state(), before)
    assert not hasattr(layer, "seen")
    assert "forward" not in vars(layer.again)
