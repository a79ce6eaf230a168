"""`TECudaGraphHelper`: layers found, sampled, captured in the rank's order, replayed as eager, and given back."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.engine.order import convert_schedule_table_to_order, get_schedule_table
from stepgraph.lab.models import GPT, GPTConfig, MoEConfig, MoEGPT
from stepgraph.lab.models.attention import RotaryPositions
from stepgraph.lab.models.moe import MoEBlock
from tests.harness import Program, assert_same_history, different, snapshot
from tests.module_harness import Note, Training
from tests.pipeline_rank import BATCH, SEQUENCE, STEPS, WARM, Chunk, Rank, assert_rank_equals_eager

TINY = replace(GPTConfig.tiny(), dropout=0.1)
MOE = replace(MoEConfig.tiny(), dropout=0.1, experts="loop")


def pipeline(size: int, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(hidden_size=TINY.hidden_size, pipeline_model_parallel_size=size, **fields)


def order_of(size: int, rank: int, microbatches: int, chunks: int, group: int | None = None) -> list[int]:
    group = group or size
    warmup = stepgraph.order.num_warmup_microbatches(microbatches, chunks, group, size, rank)
    return convert_schedule_table_to_order(warmup, chunks, get_schedule_table(microbatches, chunks, group))


def make_rank(order: Any, *layers: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Rank]:
    def make(device: torch.device) -> Rank:
        chunks = [Chunk(TINY, count).to(device, dtype) for count in layers]
        return Rank(chunks, order, TINY.hidden_size, before_forward=stepgraph.set_current_microbatch)

    return make


def capture(rank: Rank, config: Any, **options: Any) -> stepgraph.TECudaGraphHelper:
    helper = stepgraph.TECudaGraphHelper(rank.chunks, config, SEQUENCE, BATCH, [rank.optimizer], **options)
    assert not helper.graphs_created()
    assert not helper.capture_finished()
    helper.create_cudagraphs()
    assert helper.graphs_created()
    assert helper.capture_finished()
    return helper


# -- what the config says

IMPLS: dict[str, dict[str, Any]] = {
    "none": {"cuda_graph_impl": "none", "cuda_graph_modules": ["attn"]},
    "full_iteration": {"cuda_graph_impl": "full_iteration", "use_te_rng_tracker": True},
    "older switches": {"enable_cuda_graph": False, "external_cuda_graph": False},
}


@pytest.mark.parametrize("name", IMPLS)
def test_helper_captures_nothing_where_the_config_says_so(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    training = gpt_training(TINY, device, steps=1)
    config = SimpleNamespace(hidden_size=TINY.hidden_size, **IMPLS[name])
    helper = stepgraph.TECudaGraphHelper([training.model], config, SEQUENCE, BATCH, training.optimizers)
    helper.create_cudagraphs()
    helper.cuda_graph_set_manual_hooks()
    assert "no layer is captured: cuda_graph_impl is" in caplog.text
    assert not helper.graphs_created()
    assert helper.capture_finished()
    assert helper.paths == []
    assert not any("forward" in vars(module) for module in training.model.modules())
    training.run(device)
    report = helper.report()
    assert report.graphs == report.forwards == 0
    assert report.to_dict()["eager_reason"] == report.eager_reason
    assert str(report).startswith("no graphs, all calls run eagerly: cuda_graph_impl is")
    helper.delete_cuda_graphs()
    assert helper.capture_finished()


TRACKED = {"use_te_rng_tracker": True}


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"cuda_graph_modules": "full"}, ["blocks.0", "blocks.1"]),
        ({"cuda_graph_modules": ["attn"]}, ["blocks.0.attn", "blocks.1.attn"]),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": "blocks.1.mlp", **TRACKED}, ["blocks.1.mlp"]),
    ],
)
def test_helper_reads_the_newer_name_of_the_scope(
    fields: dict[str, Any], paths: list[str], device: torch.device
) -> None:
    model = GPT(TINY).to(device)
    helper = stepgraph.TECudaGraphHelper(model, pipeline(1, **fields), SEQUENCE, BATCH)
    helper.create_cudagraphs()
    assert helper.paths == paths
    helper.delete_cuda_graphs()


def test_helper_refuses_settings_before_anything_is_captured(device: torch.device) -> None:
    for fields, message in (
        ({"cuda_graph_scope": ["attn"], "cuda_graph_modules": ["mlp"]}, "contradicts itself"),
        ({"cuda_graph_impl": "transformer_engin"}, "did you mean 'transformer_engine'"),
    ):
        with pytest.raises(stepgraph.InvalidArgument, match=message):
            stepgraph.TECudaGraphHelper(GPT(TINY).to(device), pipeline(1, **fields), SEQUENCE, BATCH)
    helper = stepgraph.TECudaGraphHelper(GPT(TINY).to(device), pipeline(1, cuda_graph_modules="atn"), SEQUENCE, BATCH)
    with pytest.raises(stepgraph.InvalidArgument, match="did you mean 'attn'"):
        helper.create_cudagraphs()


# -- without a pipeline


def gpt_training(config: GPTConfig, device: torch.device, *, microbatches: int = 3, steps: int = 8) -> Training:
    """The plain loop of a language model, with several microbatches a step."""
    model = MoEGPT(config) if isinstance(config, MoEConfig) else GPT(config)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for index, tokens in enumerate(batch):
            stepgraph.set_current_microbatch(model, index)
            out = model(tokens[:, :-1], tokens[:, 1:])
            loss = out if isinstance(out, torch.Tensor) else out.out + 0.01 * out.aux_loss
            loss.backward()
            note(loss)
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses)

    batches = [torch.randint(256, (microbatches, BATCH, SEQUENCE + 1), device=device) for _ in range(steps)]
    return Training(model, step, batches, [optimizer])


def assert_model_equals_eager(
    config: GPTConfig, device: torch.device, *, scope: Any = (), warm: int = 2, **options: Any
) -> tuple[stepgraph.TECudaGraphHelper, Training]:
    histories = []
    for graphed in (False, True):
        torch.manual_seed(7)
        training = gpt_training(config, device)
        torch.manual_seed(11)
        settings = SimpleNamespace(cuda_graph_scope=scope)
        helper = stepgraph.TECudaGraphHelper(
            [training.model], settings, SEQUENCE, BATCH, training.optimizers, **options
        )

        def before(index: int, helper: Any = helper, graphed: bool = graphed) -> None:
            if graphed and index == warm:
                helper.create_cudagraphs()

        training.before_step = before
        histories.append(training.run(device))
        assert helper.graphs_created() is graphed
    assert_same_history(*histories, "graphed differs from eager")
    replayed_steps = len(training.batches) - warm
    assert helper.report().forwards == replayed_steps * len(training.batches[0]) * len(helper.paths)
    return helper, training


@pytest.mark.parametrize("warm", [0, 2])
def test_helper_layers_equal_eager(warm: int, device: torch.device) -> None:
    helper, _ = assert_model_equals_eager(TINY, device, warm=warm)
    assert helper.paths == ["blocks.0", "blocks.1"]
    helper.delete_cuda_graphs()


@pytest.mark.parametrize(
    ("scope", "tails"),
    [
        pytest.param("attn", ["attn"], marks=pytest.mark.slow),
        pytest.param(["attn", "mlp"], ["attn", "mlp"], marks=pytest.mark.slow),
        ("mlp, attn", ["attn", "mlp"]),
        ("blocks.*.mlp", ["mlp"]),
    ],
)
def test_helper_parts_of_layers_equal_eager(scope: Any, tails: list[str], device: torch.device) -> None:
    helper, _ = assert_model_equals_eager(TINY, device, scope=scope)
    assert helper.paths == [f"blocks.{layer}.{tail}" for layer in range(2) for tail in tails]
    helper.delete_cuda_graphs()


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["attn,moe_router,moe_preprocess", "moe_preprocess moe_router"])
def test_helper_captures_around_experts_that_read_on_the_host(scope: str, device: torch.device) -> None:
    helper, _ = assert_model_equals_eager(MOE, device, scope=scope)
    inside = [path.removeprefix("blocks.0.") for path in helper.paths if path.startswith("blocks.0.")]
    expected = ["moe.route", "moe.preprocess", "moe.combine"]  # as they are called, however the scope lists them
    assert inside == (["attn", *expected] if "attn" in scope else expected)
    helper.delete_cuda_graphs()


@pytest.mark.slow
@pytest.mark.parametrize("scope", [(), "attn"])
def test_helper_compiled_layers_are_replayed(scope: Any, device: torch.device) -> None:
    """After module.compile() it is not the forward that is called."""
    model = GPT(replace(TINY, dropout=0.0)).to(device)
    for block in model.blocks:
        (block.attn if scope else block).compile(backend="aot_eager")
    tokens = torch.randint(256, (BATCH, SEQUENCE), device=device)
    expected = model(tokens)
    before = [vars(module).get("_compiled_call_impl") for module in model.modules()]
    helper = stepgraph.TECudaGraphHelper(model, pipeline(1, cuda_graph_scope=scope), SEQUENCE, BATCH)
    helper.create_cudagraphs()
    assert torch.equal(model(tokens), expected)
    assert helper.report().forwards == 2
    helper.delete_cuda_graphs()
    assert [vars(module).get("_compiled_call_impl") for module in model.modules()] == before


def test_helper_one_microbatch_serves_all_without_a_pipeline(device: torch.device) -> None:
    training = gpt_training(TINY, device, microbatches=5, steps=2)
    helper = stepgraph.TECudaGraphHelper([training.model], SimpleNamespace(), SEQUENCE, BATCH, num_microbatches=5)
    helper.create_cudagraphs()
    training.run(device)
    assert [len(graphs.graphs) for graphs in helper._graphs] == [1, 1]
    helper.delete_cuda_graphs()


# -- pipelines


@pytest.mark.parametrize(
    ("size", "rank", "microbatches", "layers"),
    [
        pytest.param(2, 0, 4, (2,), marks=pytest.mark.slow),
        pytest.param(2, 1, 4, (2,), marks=pytest.mark.slow),
        (4, 0, 3, (1,)),
        (2, 0, 4, (1, 1)),
        pytest.param(2, 1, 4, (1, 2), marks=pytest.mark.slow),
        pytest.param(2, 0, 4, (0, 2), marks=pytest.mark.slow),
    ],
)
def test_helper_rank_equals_eager(
    size: int, rank: int, microbatches: int, layers: tuple[int, ...], device: torch.device
) -> None:
    order = order_of(size, rank, microbatches, len(layers))
    config = pipeline(size, num_microbatches=microbatches)
    helper = assert_rank_equals_eager(
        make_rank(order, *layers), lambda made: capture(made, config, pipeline_parallel_rank=rank), device
    )
    assert len(helper.paths) == sum(layers)
    assert all(len(graphs.graphs) == microbatches for graphs in helper._graphs)
    report = helper.report()
    assert report.forwards == report.backwards == (STEPS - WARM) * microbatches * sum(layers)
    helper.delete_cuda_graphs()


class MoEChunk(nn.Module):
    """Layers with experts between two ranks; what balances the experts is added to the result."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoEBlock(MOE) for _ in range(num_layers))
        self.rotary = RotaryPositions(MOE.head_size, MOE.max_seq_len, MOE.rope_base)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, aux_loss, _ = block(x, self.rotary)
            x = x + 0.01 * aux_loss
        return x


@pytest.mark.slow
def test_helper_rank_with_experts_equals_eager(device: torch.device) -> None:
    """Parts of layers, with experts between them that read on the host, for microbatches in flight."""
    order = order_of(2, 0, 4, 2)

    def make(device: torch.device) -> Rank:
        chunks = [MoEChunk(1).to(device) for _ in range(2)]
        return Rank(chunks, order, MOE.hidden_size, before_forward=stepgraph.set_current_microbatch)

    config = pipeline(2, num_microbatches=4, cuda_graph_scope="attn,moe_router,moe_preprocess")
    helper = assert_rank_equals_eager(make, lambda rank: capture(rank, config, pipeline_parallel_rank=0), device)
    assert helper.paths == [f"blocks.0.{tail}" for tail in ("attn", "moe.route", "moe.preprocess", "moe.combine")] * 2
    assert helper.report().forwards == (STEPS - WARM) * 4 * 8
    helper.delete_cuda_graphs()


def test_helper_step_that_is_given_up_does_not_spoil_the_next(device: torch.device) -> None:
    order = order_of(2, 0, 4, 1)

    def graph(rank: Rank) -> stepgraph.TECudaGraphHelper:
        helper = capture(rank, pipeline(2), num_microbatches=4, pipeline_parallel_rank=0)
        states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        for microbatch in range(2):  # its forwards alone, and then an exception, say
            stepgraph.set_current_microbatch(rank.chunks, microbatch)
            rank.chunks[0](torch.randn(BATCH, SEQUENCE, TINY.hidden_size, device=device, requires_grad=True))
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], device)
        return helper

    assert_rank_equals_eager(make_rank(order, 2), graph, device).delete_cuda_graphs()


@pytest.mark.slow
def test_helper_rank_in_bfloat16_has_samples_of_that_type(device: torch.device) -> None:
    """Sample arguments are of the model's own type: of another one they would be refused at the first replay."""
    order = order_of(2, 0, 4, 1)
    helper = assert_rank_equals_eager(
        make_rank(order, 2, dtype=torch.bfloat16),
        lambda made: capture(made, pipeline(2), num_microbatches=4, pipeline_parallel_rank=0),
        device,
    )
    helper.delete_cuda_graphs()


@pytest.mark.slow
@pytest.mark.parametrize("splits", [False, True])
def test_helper_overlapped_layers_equal_eager(splits: bool, device: torch.device) -> None:
    """The layers of a forward and of a backward take turns; weight gradients may be entries of their own."""
    layers, microbatches = [2, 1], 4
    warmup = stepgraph.order.num_warmup_microbatches(microbatches, 2, 2, 2, 0, overlap_moe_expert_parallel_comm=True)
    of_chunks = convert_schedule_table_to_order(warmup, 2, get_schedule_table(microbatches, 2, 2))
    order, _ = stepgraph.order.get_overlap_moe_expert_parallel_comm_order(of_chunks, layers, splits)
    helpers: list[stepgraph.TECudaGraphHelper] = []

    def weight_gradients(layer: nn.Module, microbatch: int) -> None:
        for helper in helpers:
            helper.backward_dw(layer, microbatch)

    def make(device: torch.device) -> Rank:
        each = [Chunk(TINY, 1).to(device) for _ in range(sum(layers))]
        set_current = stepgraph.set_current_microbatch
        return Rank(each, order, TINY.hidden_size, before_forward=set_current, weight_gradients=weight_gradients)

    def graph(rank: Rank) -> None:
        chunks = [nn.ModuleList(rank.chunks[:2]), nn.ModuleList(rank.chunks[2:])]
        config = pipeline(2, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=splits)
        options = {"num_microbatches": microbatches, "pipeline_parallel_rank": 0}
        helpers.append(stepgraph.TECudaGraphHelper(chunks, config, SEQUENCE, BATCH, **options))
        helpers[0].create_cudagraphs()

    assert_rank_equals_eager(make, graph, device)
    report = helpers[0].report()
    assert report.forwards == report.backwards == (STEPS - WARM) * microbatches * 3
    assert report.weight_grads == (report.backwards if splits else 0)
    helpers[0].delete_cuda_graphs()


@pytest.mark.slow
def test_helper_rank_under_autocast_equals_eager(device: torch.device) -> None:
    """Graphs are of the autocast that they were captured under; backwards are called outside it, as torch wants it."""
    order = order_of(2, 0, 4, 1)

    class Cast(Chunk):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return super().forward(x)

    def make(device: torch.device) -> Rank:
        chunk = Cast(TINY, 2).to(device)
        return Rank([chunk], order, TINY.hidden_size, before_forward=stepgraph.set_current_microbatch)

    def graph(rank: Rank) -> stepgraph.TECudaGraphHelper:
        with torch.autocast(device.type, torch.bfloat16):
            return capture(rank, pipeline(2), num_microbatches=4, pipeline_parallel_rank=0)

    helper = assert_rank_equals_eager(make, graph, device)
    assert helper.report().forwards > 0
    helper.delete_cuda_graphs()


def test_helper_takes_an_order_as_it_is(device: torch.device) -> None:
    order = [1, 1, -1, -1, 1, -1]
    helper = assert_rank_equals_eager(make_rank(order, 2), lambda made: capture(made, pipeline(2), order=order), device)
    helper.delete_cuda_graphs()


@pytest.mark.slow
def test_helper_without_buffer_reuse_equals_eager(device: torch.device) -> None:
    order = order_of(2, 0, 4, 1)
    config = pipeline(2, num_microbatches=4, pipeline_model_parallel_rank=0)
    helper = assert_rank_equals_eager(
        make_rank(order, 2), lambda made: capture(made, config, reuse_buffers=False), device
    )
    helper.delete_cuda_graphs()


def test_helper_replay_out_of_order_names_the_expected_entry(device: torch.device) -> None:
    rank = make_rank(order_of(2, 0, 4, 1), 1)(device)
    helper = capture(rank, pipeline(2), num_microbatches=4, pipeline_parallel_rank=0)
    x = torch.randn(BATCH, SEQUENCE, TINY.hidden_size, device=device, requires_grad=True)
    stepgraph.set_current_microbatch(rank.chunks, 0)
    rank.chunks[0](x)
    stepgraph.set_current_microbatch(rank.chunks, 2)
    with pytest.raises(stepgraph.StepgraphError, match="microbatch 1") as caught:
        rank.chunks[0](x)
    assert caught.value.rule == "replay-order"
    helper.delete_cuda_graphs()


def test_helper_more_microbatches_than_captured_is_an_error(device: torch.device) -> None:
    rank = make_rank(order_of(2, 0, 4, 1), 1)(device)
    helper = capture(rank, pipeline(2), num_microbatches=4, pipeline_parallel_rank=0)
    rank.step(0)
    stepgraph.set_current_microbatch(rank.chunks[0], 4)
    x = torch.randn(BATCH, SEQUENCE, TINY.hidden_size, device=device, requires_grad=True)
    with pytest.raises(stepgraph.InvalidArgument, match="microbatch 4, and 4 were captured") as caught:
        rank.chunks[0](x)
    assert caught.value.rule == "current-microbatch"
    rank.step(1)  # nothing was spoilt
    helper.delete_cuda_graphs()


def test_helper_call_without_a_current_microbatch_is_an_error(device: torch.device) -> None:
    rank = make_rank(order_of(2, 0, 2, 1), 1)(device)
    helper = capture(rank, pipeline(2), num_microbatches=2, pipeline_parallel_rank=0)
    x = torch.randn(BATCH, SEQUENCE, TINY.hidden_size, device=device, requires_grad=True)
    with pytest.raises(stepgraph.InvalidArgument, match="set_current_microbatch"):
        rank.chunks[0](x)
    helper.delete_cuda_graphs()


@pytest.mark.parametrize("wrong", [-1, 0.5, None, True])
def test_set_current_microbatch_refuses_what_is_no_count(wrong: Any) -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="microbatch_id"):
        stepgraph.set_current_microbatch(nn.Linear(1, 1), wrong)


def test_helper_names_what_a_pipeline_needs_to_know() -> None:
    chunks = [Chunk(TINY, 1)]
    with pytest.raises(stepgraph.InvalidArgument, match="num_microbatches"):
        stepgraph.TECudaGraphHelper(chunks, pipeline(2), SEQUENCE, BATCH).create_cudagraphs()
    with pytest.raises(stepgraph.InvalidArgument, match="pipeline_parallel_rank"):
        stepgraph.TECudaGraphHelper(chunks, pipeline(2, num_microbatches=2), SEQUENCE, BATCH).create_cudagraphs()


# -- what capturing leaves behind


class Remembering(nn.Module):
    """A layer with statistics, and a tracker of auxiliary losses beside it."""

    def __init__(self, width: int, tracker: dict[str, int]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.tracker = tracker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x.flatten(0, 1)).view_as(x)
        return x + nn.functional.dropout(self.linear(hidden), 0.1)

    def clear_aux_losses_tracker(self) -> None:
        self.tracker["cleared"] = self.tracker.get("cleared", 0) + 1


def test_helper_keeps_statistics_and_rng_and_zeroes_gradients(device: torch.device) -> None:
    tracker: dict[str, int] = {}
    losses = {"load": 1.0}
    model = nn.Sequential(Remembering(TINY.hidden_size, tracker)).to(device)
    registry = stepgraph.ScopeRegistry().register(Remembering, mlp="linear")
    x = torch.randn(BATCH, SEQUENCE, TINY.hidden_size, device=device, requires_grad=True)
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = Program(model, (), [model], [optimizer])
    before = snapshot(program, device)
    helper = stepgraph.TECudaGraphHelper(
        model, pipeline(1), SEQUENCE, BATCH, [optimizer], registry=registry, aux_loss_trackers=[losses]
    )
    helper.create_cudagraphs()
    after = snapshot(program, device)
    assert set(different(before, after)) <= {name for name in before if name.endswith(".grad")}
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert tracker == {"cleared": 1}
    assert losses == {}
    helper.delete_cuda_graphs()


def test_helper_parts_of_layers_keep_statistics_and_random_state(device: torch.device) -> None:
    """A layer is run once to see what its parts are called with."""
    model = nn.Sequential(Remembering(TINY.hidden_size, {})).to(device)
    registry = stepgraph.ScopeRegistry().register(Remembering, mlp="linear")
    program = Program(model, (), [model])
    before = snapshot(program, device)
    helper = stepgraph.TECudaGraphHelper(model, pipeline(1, cuda_graph_scope="mlp"), SEQUENCE, BATCH, registry=registry)
    helper.create_cudagraphs()
    assert helper.paths == ["0.linear"]
    assert not different(before, snapshot(program, device))
    helper.delete_cuda_graphs()


class Buffered(nn.Module):
    """A chunk that keeps its gradients in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chunk(TINY, 1)
        self.zeroed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def zero_grad_buffer(self) -> None:
        self.zeroed += 1


def test_helper_zeroes_gradient_buffers(device: torch.device) -> None:
    chunk = Buffered().to(device)
    helper = stepgraph.TECudaGraphHelper(chunk, pipeline(1), SEQUENCE, BATCH)
    helper.create_cudagraphs()
    assert chunk.zeroed == 1
    assert helper.paths == ["inner.blocks.0"]
    helper.delete_cuda_graphs()


# -- manual hooks


class Gathering(Chunk):
    """A chunk whose parameters are gathered by a hook of each module, as a distributed optimizer has it."""

    def __init__(self) -> None:
        super().__init__(TINY, 1)
        self.gathered: list[str] = []
        self.handles: list[Any] = []
        self.enable()

    def _make_forward_pre_hook(self) -> Callable[..., None]:
        names = {id(module): name for name, module in self.named_modules()}

        def gather(module: nn.Module, *unused: Any) -> None:
            self.gathered.append(names[id(module)])

        return gather

    def enable(self) -> None:
        self.handles = [m.register_forward_pre_hook(self._make_forward_pre_hook()) for m in self._owners()]

    def disable(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _owners(self) -> list[nn.Module]:
        return [m for m in self.modules() if m._parameters and m is not self]


def test_helper_manual_hooks_run_before_replays(device: torch.device) -> None:
    chunk = Gathering().to(device)
    x = torch.randn(BATCH, SEQUENCE, TINY.hidden_size, device=device, requires_grad=True)
    chunk(x).sum().backward()
    eager = sorted(set(chunk.gathered))
    chunk.disable()
    helper = stepgraph.TECudaGraphHelper(chunk, pipeline(1), SEQUENCE, BATCH)
    helper.create_cudagraphs()
    chunk.gathered.clear()
    chunk(x).sum().backward()
    assert chunk.gathered == []
    helper.cuda_graph_set_manual_hooks()
    for _ in range(2):
        chunk.gathered.clear()
        chunk(x).sum().backward()
        assert sorted(chunk.gathered) == eager
    helper.delete_cuda_graphs()
    chunk.gathered.clear()
    chunk(x)
    assert chunk.gathered == []


def test_helper_hooks_that_are_enabled_again_do_not_stop_replays(device: torch.device) -> None:
    """As a training loop does it: hooks off, capture, hooks on, manual hooks set."""
    chunk = Gathering().to(device)
    x = torch.randn(BATCH, SEQUENCE, TINY.hidden_size, device=device, requires_grad=True)
    chunk.disable()
    helper = stepgraph.TECudaGraphHelper(chunk, pipeline(1), SEQUENCE, BATCH)
    helper.create_cudagraphs()
    chunk.enable()
    helper.cuda_graph_set_manual_hooks()
    for _ in range(3):
        chunk.gathered.clear()
        chunk(x).sum().backward()
        assert "blocks.0.attn.q_proj" in chunk.gathered
        chunk.disable()  # for an evaluation, say
        chunk.enable()
    chunk.blocks[0].attn.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(stepgraph.StateChanged, match="hook"):  # one that nobody would run
        chunk(x)
    helper.delete_cuda_graphs()


# -- finding layers


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        ((), "Linear has no layer of a known class, and none at decoder.layers"),
        ("attn", "the scope attn matches nothing in Linear"),
        ("layers.*.mlp", "the scope layers.*.mlp matches nothing in Linear"),
    ],
)
def test_helper_with_nothing_to_capture_warns_and_goes_on(scope: Any, reason: str, device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    helper = stepgraph.TECudaGraphHelper([model], pipeline(2, cuda_graph_scope=scope), SEQUENCE, BATCH)
    with pytest.warns(stepgraph.StepgraphWarning, match=re.escape(reason)) as warned:
        helper.create_cudagraphs()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    helper.cuda_graph_set_manual_hooks()
    assert not helper.graphs_created()
    assert helper.report().eager_reason == reason
    stepgraph.set_current_microbatch(model, 3)
    model(torch.randn(2, 4, device=device)).sum().backward()
    helper.delete_cuda_graphs()


def test_helper_report_without_graphs_has_the_reason(device: torch.device) -> None:
    helper = stepgraph.TECudaGraphHelper(GPT(TINY).to(device), pipeline(1), SEQUENCE, BATCH)
    assert helper.report().eager_reason == "create_cudagraphs() was not called"
    helper.create_cudagraphs()
    assert helper.report().eager_reason is None
    helper.delete_cuda_graphs()
    assert str(helper.report()).startswith("no graphs, all calls run eagerly: the graphs were deleted")


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).softmax(-1)


class OwnLayer(nn.Module):
    """A layer of a class that no registry knows, with Megatron's names of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.mlp = OwnAttention(), nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden_states + self.self_attention(hidden_states))


class OwnModel(nn.Module):
    """A model as Megatron's: its layers stand at `decoder.layers`, behind a wrapper or not."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module.decoder = nn.Module()
        self.module.decoder.layers = nn.ModuleList([OwnLayer(), OwnLayer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.module.decoder.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("scope", "tails"), [((), [""]), ("attn", [".self_attention"]), ("attn,mlp", [".self_attention", ".mlp"])]
)
def test_helper_finds_unknown_layers_at_decoder_layers(scope: Any, tails: list[str], device: torch.device) -> None:
    torch.manual_seed(0)
    eager, model = OwnModel().to(device), OwnModel().to(device)
    model.load_state_dict(eager.state_dict())
    registry = stepgraph.ScopeRegistry()
    config = SimpleNamespace(hidden_size=8, cuda_graph_scope=scope)
    helper = stepgraph.TECudaGraphHelper(model, config, 3, 2, registry=registry)
    helper.create_cudagraphs()
    assert helper.paths == [f"module.decoder.layers.{index}{tail}" for index in (0, 1) for tail in tails]
    for _ in range(3):
        x = torch.randn(2, 3, 8, device=device)
        for each in (eager, model):
            each(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    assert helper.replays == 3 * 2 * len(tails)
    assert registry.words_of(OwnLayer()) is None, "the registry that was passed is as it was"
    helper.delete_cuda_graphs()


@pytest.mark.parametrize("scope", ["atn", "full_iteraton", ["attn", "mpl"]])
def test_helper_word_that_there_is_not_is_an_error(scope: Any) -> None:
    for chunk in (Chunk(TINY, 1), nn.Linear(2, 2)):
        config = pipeline(1, cuda_graph_scope=scope)
        with pytest.raises(stepgraph.InvalidArgument) as caught:
            stepgraph.TECudaGraphHelper(chunk, config, SEQUENCE, BATCH).create_cudagraphs()
        assert caught.value.rule == "scope"


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return self.linear(x) * factor + bias


def test_helper_layer_whose_arguments_are_not_known_is_named() -> None:
    registry = stepgraph.ScopeRegistry().register(Strange)
    helper = stepgraph.TECudaGraphHelper(
        nn.Sequential(Strange()), SimpleNamespace(hidden_size=4), 3, 2, registry=registry
    )
    with pytest.raises(stepgraph.InvalidArgument, match="argument `bias` of `0`") as caught:
        helper.create_cudagraphs()
    assert caught.value.rule == "layer-sample"
    without = stepgraph.TECudaGraphHelper(nn.Sequential(Strange()), None, 3, 2, registry=registry)
    with pytest.raises(stepgraph.InvalidArgument, match="hidden_size"):
        without.create_cudagraphs()


def test_helper_takes_samples_from_a_function(device: torch.device) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Strange()

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return self.layer(bias=bias, x=x)  # the same call, written in another way than the sample

    model = Net().to(device)
    registry = stepgraph.ScopeRegistry().register(Strange)

    def samples(layer: nn.Module) -> Any:
        weight = layer.linear.weight
        return (torch.zeros(2, 4, device=weight.device, requires_grad=True), torch.zeros(4, device=weight.device)), {}

    helper = stepgraph.TECudaGraphHelper(model, None, 3, 2, registry=registry, sample_arguments=samples)
    x, bias = torch.randn(2, 4, device=device, requires_grad=True), torch.randn(4, device=device)
    expected = model(x, bias)
    helper.create_cudagraphs()
    assert torch.equal(model(x, bias), expected)
    helper.delete_cuda_graphs()


def test_helper_keeps_no_sample(device: torch.device) -> None:
    """Static memory is planned by the order; samples would come on top of it."""
    made: list[weakref.ref[torch.Tensor]] = []

    def samples(layer: nn.Module) -> Any:
        weight = layer.linear.weight
        x, bias = torch.zeros(2, 4, device=weight.device, requires_grad=True), torch.zeros(4, device=weight.device)
        made.extend(map(weakref.ref, (x, bias)))
        return (x, bias), {}

    model = nn.Sequential(Strange()).to(device)
    registry = stepgraph.ScopeRegistry().register(Strange)
    helper = stepgraph.TECudaGraphHelper(
        model,
        pipeline(2),
        3,
        2,
        num_microbatches=3,
        pipeline_parallel_rank=0,
        registry=registry,
        sample_arguments=samples,
    )
    helper.create_cudagraphs()
    gc.collect()
    assert [ref() for ref in made] == [None, None]
    helper.delete_cuda_graphs()


# -- other calls, and the end


def test_helper_evaluation_and_no_grad_run_as_before(device: torch.device) -> None:
    model = GPT(TINY).to(device)
    tokens = torch.randint(256, (3, 5), device=device)  # not the captured geometry
    expected = model.eval()(tokens)
    helper = stepgraph.TECudaGraphHelper(model.train(), TINY, SEQUENCE, BATCH)
    helper.create_cudagraphs()
    assert torch.equal(model.eval()(tokens), expected)
    model.train()
    with torch.no_grad():
        torch.manual_seed(3)
        replayed = model(tokens)
        helper.delete_cuda_graphs()
        torch.manual_seed(3)
        assert torch.equal(model(tokens), replayed)


def test_helper_wrong_geometry_is_an_error_that_names_it(device: torch.device) -> None:
    model = GPT(TINY).to(device)
    helper = stepgraph.TECudaGraphHelper(model, TINY, SEQUENCE, BATCH)
    helper.create_cudagraphs()
    with pytest.raises(stepgraph.StepgraphError, match=re.escape(f"[{BATCH}, {SEQUENCE}, {TINY.hidden_size}]")):
        model(torch.randint(256, (BATCH, SEQUENCE + 1), device=device))
    helper.delete_cuda_graphs()


def test_helper_delete_restores_the_layers_for_another_capture(device: torch.device) -> None:
    training = gpt_training(TINY, device, steps=1)
    model = training.model
    before = [dict(vars(module)) for module in model.modules()]
    helper = stepgraph.TECudaGraphHelper(model, TINY, SEQUENCE, BATCH, training.optimizers)
    for _ in range(2):
        helper.create_cudagraphs()
        assert helper.paths == ["blocks.0", "blocks.1"]
        training.run(device)
        helper.delete_cuda_graphs()
        assert not helper.graphs_created()
        assert [vars(m).keys() for m in model.modules()] == [names.keys() for names in before]
        training.run(device)
    helper.delete_cuda_graphs()


def test_helper_second_capture_without_delete_replaces_graphs(device: torch.device) -> None:
    training = gpt_training(TINY, device, steps=1)
    helper = stepgraph.TECudaGraphHelper(training.model, TINY, SEQUENCE, BATCH)
    helper.create_cudagraphs()
    helper.create_cudagraphs()
    training.run(device)
    helper.delete_cuda_graphs()
    assert "forward" not in vars(training.model.blocks[0])


def test_helper_copy_of_a_graphed_model_is_a_plain_model(device: torch.device) -> None:
    model = GPT(TINY).to(device)
    helper = stepgraph.TECudaGraphHelper(model, TINY, SEQUENCE, BATCH)
    helper.create_cudagraphs()
    copied = copy.deepcopy(model)
    tokens = torch.randint(256, (1, 3), device=device)
    copied(tokens).sum().backward()  # another geometry: no graph would take it
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    helper.delete_cuda_graphs()


def test_helper_failed_capture_leaves_the_model_as_it_was(device: torch.device) -> None:
    model = MoEGPT(MOE).to(device)  # whole layers read on the host
    helper = stepgraph.TECudaGraphHelper(model, MOE, SEQUENCE, BATCH)
    with pytest.raises(stepgraph.CaptureError) as caught:
        helper.create_cudagraphs()
    assert caught.value.rule == "host-read"
    assert not helper.graphs_created()
    assert not any("forward" in vars(block) for block in model.blocks)
    model(torch.randint(256, (BATCH, SEQUENCE), device=device)).out.sum().backward()


def test_one_optimizer_is_taken_as_a_list_of_one(device: torch.device) -> None:
    model = GPT(TINY).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    helper = stepgraph.TECudaGraphHelper([model], pipeline(1), SEQUENCE, BATCH, optimizer)
    assert helper.optimizers == (optimizer,)


@pytest.mark.parametrize(("given", "named"), [(None, "NoneType"), ([3], "an int"), ("adam", "a str")])
def test_what_is_no_optimizer_is_refused(device: torch.device, given: Any, named: str) -> None:
    model = GPT(TINY).to(device)
    with pytest.raises(stepgraph.InvalidArgument, match=named) as raised:
        stepgraph.TECudaGraphHelper([model], pipeline(1), SEQUENCE, BATCH, given)
    assert raised.value.rule == "option"
