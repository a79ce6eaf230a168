"""`VisionTECudaGraphHelper`: the encoder's layers beside the decoder's, at one length, without touching gradients."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.lab.models import VisionConfig, VisionEncoder, VisionLanguageConfig, VisionLanguageModel
from stepgraph.megatron.vision_helper import without_none
from tests.harness import Program, assert_captured_equals_eager, assert_same_history, different, snapshot
from tests.module_harness import Note, Training
from tests.pipeline_rank import STEPS, WARM, Rank, assert_rank_equals_eager

TINY = replace(VisionLanguageConfig.tiny(), dropout=0.1, vision=replace(VisionConfig.tiny(), dropout=0.1))
LENGTH = 12
BATCH = 2
SIZES = (((16, 16), (8, 8)), ((8, 24),), ((32, 32),), (), ((8, 8), (8, 8), (16, 24)))
"""The images of microbatches: how many there are and how large differs from one to the next."""


def make_batch(index: int, device: torch.device) -> Any:
    """Tokens, images and targets of a microbatch."""
    images = [torch.randn(3, height, width, device=device) for height, width in SIZES[index % len(SIZES)]]
    tokens = torch.randint(250, (BATCH, LENGTH), device=device)
    count = sum((image.shape[1] // 8) * (image.shape[2] // 8) for image in images)
    tokens.view(-1)[:count] = TINY.image_token
    return tokens, images, torch.randint(250, (BATCH, LENGTH), device=device)


def make_training(device: torch.device, *, microbatches: int = 2, steps: int = 8, frozen: bool = False) -> Training:
    model = VisionLanguageModel(TINY).to(device)
    model.vision_model.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(batch: Any, note: Note) -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for index, (tokens, images, targets) in enumerate(batch):
            stepgraph.set_current_microbatch(model, index)
            loss = model(tokens, images, targets)
            loss.backward()
            note(loss)
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses)

    batches = [[make_batch(n * microbatches + i, device) for i in range(microbatches)] for n in range(steps)]
    return Training(model, step, batches, [optimizer])


def vision_helper(model: nn.Module, **options: Any) -> stepgraph.VisionTECudaGraphHelper:
    length = stepgraph.get_vision_cuda_graph_seq_length(TINY.vision)
    return stepgraph.VisionTECudaGraphHelper([model], TINY.vision, length, BATCH, **options)


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_vision_cuda_graph_seq_length": 2048}, 2048),
        ({"max_vision_cuda_graph_seq_length": 2048, "num_position_embeddings": 900, "spatial_merge_size": 3}, 2048),
        ({"num_position_embeddings": 1024, "spatial_merge_size": 2}, 256),
        ({"num_position_embeddings": 900, "spatial_merge_size": 3}, 100),
        ({"max_vision_cuda_graph_seq_length": None, "num_position_embeddings": 900, "spatial_merge_size": 3}, 100),
        ({"max_vision_cuda_graph_seq_length": 0, "num_position_embeddings": 64}, 64),
        ({}, 4096),
    ],
)
def test_vision_length_follows_from_the_config(fields: dict[str, int], length: int) -> None:
    assert stepgraph.get_vision_cuda_graph_seq_length(SimpleNamespace(**fields)) == length


def test_vision_length_takes_another_default() -> None:
    assert stepgraph.get_vision_cuda_graph_seq_length(SimpleNamespace(), default_seq_length=7) == 7
    assert stepgraph.get_vision_cuda_graph_seq_length(SimpleNamespace(), 9) == 9


def test_vision_length_is_the_encoders_own() -> None:
    for config in (TINY.vision, replace(TINY.vision, max_vision_cuda_graph_seq_length=40)):
        assert stepgraph.get_vision_cuda_graph_seq_length(config) == config.seq_length


@pytest.mark.parametrize(
    ("outputs", "filtered"), [((1, None), (1,)), (1, 1), ((1, 2), (1, 2)), ((None, None), (None, None)), (None, None)]
)
def test_vision_outputs_of_none_are_left_out(outputs: Any, filtered: Any) -> None:
    assert without_none(outputs) == filtered


@pytest.mark.slow
def test_vision_model_step_captured_equals_eager(device: torch.device) -> None:
    """The model as a whole, without any helper: images of several sizes are several signatures."""

    def build(device: torch.device) -> Program:
        training = make_training(device, microbatches=1)
        batches = [(batch,) for batch in training.batches] * 2
        return Program(lambda b: training.step(b, lambda *_: None), batches, [training.model], training.optimizers)

    report = assert_captured_equals_eager(build, device, warmup=1)
    assert set(report.eager_reasons) == {"warm-up"}


@pytest.mark.parametrize(
    ("language", "frozen"), [(False, False), pytest.param(True, False, marks=pytest.mark.slow), (True, True)]
)
def test_vision_helper_equals_eager(language: bool, frozen: bool, device: torch.device) -> None:
    histories = []
    for graphed in (False, True):
        torch.manual_seed(7)
        training = make_training(device, frozen=frozen)
        torch.manual_seed(11)
        model = training.model
        helpers = [vision_helper(model)]
        if language:
            helpers.append(stepgraph.TECudaGraphHelper(model, TINY, LENGTH, BATCH, training.optimizers))

        def before(index: int, helpers: Any = helpers, graphed: bool = graphed) -> None:
            for helper in helpers if graphed and index == 2 else ():
                helper.create_cudagraphs()

        training.before_step = before
        histories.append(training.run(device))
        assert [helper.graphs_created() for helper in helpers] == [graphed] * len(helpers)
    assert_same_history(*histories, "graphed differs from eager")
    assert helpers[0].paths == ["vision_model.blocks.0", "vision_model.blocks.1"]
    assert all(helper.report().forwards == 2 * 2 * (8 - 2) for helper in helpers)
    if language:
        assert helpers[1].paths == ["blocks.0", "blocks.1"]
    helpers[-1].delete_cuda_graphs()
    helpers[0].delete_cuda_graphs()


class Stage(nn.Module):
    """What the first stage does with images, as a chunk of hidden states in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_model = VisionEncoder(TINY.vision)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(1, -1) // x.shape[1]
        hidden = x.reshape(1, -1, x.shape[2])
        for block in self.vision_model.blocks:
            hidden = block(hidden, ids)
        return hidden.view_as(x)


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({"pipeline_model_parallel_size": 2}, [1, 1, -1, 1, -1, 1, -1, -1]),
        # chunk 1 of 1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1
        pytest.param(
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            [1, 1, 1, 1, -1, -1, -1, -1],
            marks=pytest.mark.slow,
        ),
        pytest.param({"order": [1, -1, 1, 1, -1, 1, -1, -1]}, [1, -1, 1, 1, -1, 1, -1, -1], marks=pytest.mark.slow),
    ],
)
def test_vision_helper_several_microbatches_equal_eager(
    fields: dict[str, Any], order: list[int], device: torch.device
) -> None:
    order_given = {"order": fields.pop("order")} if "order" in fields else {}
    config = SimpleNamespace(hidden_size=TINY.vision.hidden_size, **fields)

    def make(device: torch.device) -> Rank:
        width = TINY.vision.hidden_size
        return Rank([Stage().to(device)], order, width, before_forward=stepgraph.set_current_microbatch)

    def graph(rank: Rank) -> Any:
        helper = stepgraph.VisionTECudaGraphHelper(rank.chunks, config, 16, BATCH, num_microbatches=4, **order_given)
        helper.create_cudagraphs()
        assert [len(graphs.graphs) for graphs in helper._graphs] == [4, 4]
        return helper

    helper = assert_rank_equals_eager(make, graph, device)
    assert helper.report().backwards == (STEPS - WARM) * 4 * 2
    helper.delete_cuda_graphs()


class WithContext(nn.Module):
    """A layer that returns (hidden states, None)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.linear(x), None


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_model = nn.ModuleDict({"layers": nn.ModuleList([WithContext(), WithContext()])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.vision_model["layers"]:
            x = layer(x)[0]
        return x


def test_vision_helper_graph_returns_no_none(device: torch.device) -> None:
    model = Encoder().to(device)
    registry = stepgraph.ScopeRegistry().register(WithContext)
    helper = stepgraph.VisionTECudaGraphHelper(model, SimpleNamespace(hidden_size=4), 3, BATCH, registry=registry)
    x = torch.randn(1, 3, 4, device=device, requires_grad=True)
    layer = model.vision_model["layers"][0]
    expected = model(x)
    assert len(layer(x)) == 2
    helper.create_cudagraphs()
    assert torch.equal(model(x), expected)
    layers = model.vision_model["layers"]
    first = layers[0](x)
    assert len(first) == 1
    layers[1](first[0])[0].sum().backward()
    helper.delete_cuda_graphs()
    assert len(layer(x)) == 2


def test_vision_helper_batch_dimension_is_one(device: torch.device) -> None:
    """The micro-batch size is that of the text; images stand one after the other."""
    model = Encoder().to(device)
    registry = stepgraph.ScopeRegistry().register(WithContext)
    helper = stepgraph.VisionTECudaGraphHelper(model, SimpleNamespace(hidden_size=4), 3, 8, registry=registry)
    helper.create_cudagraphs()
    with pytest.raises(stepgraph.StepgraphError):
        model(torch.randn(8, 3, 4, device=device, requires_grad=True))
    helper.delete_cuda_graphs()


def test_vision_helper_touches_no_gradient_and_no_hook(device: torch.device) -> None:
    training = make_training(device, steps=1)
    model = training.model
    cleared: list[str] = []
    model.clear_aux_losses_tracker = lambda: cleared.append("tracker")
    model.zero_grad_buffer = lambda: cleared.append("buffer")
    model._make_forward_pre_hook = lambda: cleared.append("hook")
    training.run(device)
    program = Program(training.step, (), [model], training.optimizers)
    before = snapshot(program, device)
    assert any(name.endswith(".grad") and value is not None and value.any() for name, value in before.items())
    helper = vision_helper(model)
    helper.create_cudagraphs()
    helper.cuda_graph_set_manual_hooks()
    assert not different(before, snapshot(program, device))
    assert cleared == []
    helper.delete_cuda_graphs()


def test_vision_graphs_are_deleted_with_the_language_models(device: torch.device) -> None:
    training = make_training(device, steps=1)
    vision = vision_helper(training.model)
    language = stepgraph.TECudaGraphHelper(training.model, TINY, LENGTH, BATCH, training.optimizers)
    vision.create_cudagraphs()
    language.create_cudagraphs()
    training.run(device)
    language.delete_cuda_graphs()
    assert not vision.graphs_created()
    assert not language.graphs_created()
    assert not any("forward" in vars(module) for module in training.model.modules())
    training.run(device)


def test_vision_helper_on_a_rank_without_encoder_goes_on_quietly(
    device: torch.device, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.Linear(2, 2).to(device)
    helper = vision_helper(model)
    helper.create_cudagraphs()
    assert not helper.graphs_created()
    helper.delete_cuda_graphs()
    assert not recwarn.list


def test_vision_helper_that_finds_nothing_in_an_encoder_warns(device: torch.device) -> None:
    model = nn.ModuleDict({"vision_model": nn.Linear(2, 2)}).to(device)
    with pytest.warns(stepgraph.StepgraphWarning, match="captures nothing: ModuleDict has no layer of a known class"):
        vision_helper(model).create_cudagraphs()


def test_vision_input_longer_than_captured_is_an_error(device: torch.device) -> None:
    training = make_training(device, steps=1)
    helper = vision_helper(training.model)
    helper.create_cudagraphs()
    tokens, _, targets = make_batch(0, device)
    images = [torch.randn(3, 32, 32, device=device), torch.randn(3, 8, 8, device=device)]
    with pytest.raises(ValueError, match="17 tokens, more than the 16"):
        training.model(tokens, images, targets)
    training.run(device)
    helper.delete_cuda_graphs()
