"""The life of graphed modules: captured, dropped, captured again, copied, saved, closed, forgotten.

Traps of other ways to graph modules, each impossible here, or loud. This table says which test holds which.

| trap | held by |
|---|---|
| 1 accumulation from `.grad is None` | `test_module_gradients.py::test_gradients_accumulate_as_in_eager` |
| 2 two forwards before their backwards | `test_module_gradients.py`: two forwards; `test_module_orders.py` |
| 3 outputs overwritten by the next call | `test_module_results.py::test_results_kept_over_steps_never_change` |
| 4 keyword arguments, None, numbers | `test_module_arguments.py`, `test_module_results.py`: of every kind |
| 5 `create_graph=True` a constant | `test_module_backward.py::test_backward_with_create_graph_is_refused` |
| 6 hooks of submodules never run | `test_module_hooks.py` |
| 7 a wrong shape broadcast, a wrong dtype cast | `test_module_arguments.py`: never broadcast or cast |
| 8 a stale address | `test_module_state.py::test_state_that_moves_is_noticed_and_captured_again` |
| 9 warm-up moves statistics and random state | `test_module_state.py`: statistics; every comparison with eager |
| 10 the backward under the ambient autocast | `test_module_surroundings.py`: autocast |
| 12, 21 a failed capture leaves things behind | `test_module_surroundings.py`: a capture that fails |
| 17 later chunks overwrite earlier chunks' inputs | here: several chunks |
| 19 one wrapper in a process | here: two handles |
| 20 delete, then capture again | here: reset, delete_cuda_graphs |
| 22 a typo in a scope is a KeyError | `test_scopes.py` |
| 23 warm-up means three things | here: warm-up counts rounds |
| 24 a router's capture touches the whole layer | `test_module_parameters.py`: a router alone |
| 25 a mask of s*s for causal attention | `test_module_buffers.py`: no mask |
| 26 validation replays the training graph | `test_module_state.py`: evaluation |
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.modules.manager import CudaGraphManager
from tests.module_harness import (
    Layer,
    Net,
    Note,
    Training,
    assert_graphed_equals_eager,
    quiet,
    same_bits,
    train,
    training_of,
)

# -- capturing


@pytest.mark.parametrize("warmup", [1, 2, 5])
def test_warmup_counts_rounds(warmup: int, device: torch.device) -> None:
    """One meaning: so many rounds run eagerly, then all is captured; a microbatch is a round."""
    report = assert_graphed_equals_eager(
        lambda device: training_of(lambda: Net(Layer(), Layer()), device, microbatches=2), device, warmup=warmup
    )
    assert [row.eager_reasons for row in report.rows] == [{"warm-up": warmup}] * 2
    assert [row.forwards for row in report.rows] == [16 - warmup] * 2


def test_create_cudagraphs_captures_what_was_recorded(device: torch.device) -> None:
    """For loops that say when: at the end of any step, without waiting for the warm-up."""
    model = Net(Layer(), Layer()).to(device)
    with stepgraph.graph_modules(model, "layers.*", warmup=100) as handle:
        train(model, device, steps=2)
        assert handle.report().graphs == 0
        stepgraph.create_cudagraphs()
        assert handle.report().graphs == 2
        train(model, device, steps=2)
        assert handle.report().replays == 4


def test_manager_in_the_place_of_a_forward(device: torch.device) -> None:
    """Without `graph_modules`: a manager for one layer, with its own session and a configuration of the field."""

    class Config:
        cuda_graph_warmup_steps = 1

    model = Net(Layer(dropout=0.0)).to(device)
    eager = copy.deepcopy(model)
    manager = CudaGraphManager(Config(), base_module=model.layers[0])
    model.layers[0].forward = manager
    assert all(map(same_bits, train(eager, device, 12), train(model, device, 12)))
    assert manager.report().replays == 11
    manager.session.close()
    assert all(map(same_bits, train(eager, device), train(model, device)))
    with pytest.raises(stepgraph.InvalidArgument, match="base_module"):
        CudaGraphManager(Config())


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_manager_captures_nothing_where_the_config_says_so(impl: str, device: torch.device) -> None:
    model = Net(Layer(dropout=0.0)).to(device)
    eager = copy.deepcopy(model)
    config = SimpleNamespace(cuda_graph_impl=impl, use_te_rng_tracker=True)
    manager = CudaGraphManager(config, base_module=model.layers[0])
    model.layers[0].forward = manager
    assert all(map(same_bits, train(eager, device, 6), train(model, device, 6)))
    stepgraph.create_cudagraphs()
    report = manager.report()
    assert (report.graphs, report.replays, report.eager_calls) == (0, 0, 6)
    assert [reason.startswith(f"cuda_graph_impl is '{impl}'") for reason in report.rows[0].eager_reasons] == [True]
    manager.session.close()


def test_manager_reads_the_older_name_of_the_warm_up(device: torch.device) -> None:
    layer = Layer(dropout=0.0).to(device)
    with pytest.warns(stepgraph.StepgraphWarning, match="cuda_graph_warmup_steps=7"):
        manager = CudaGraphManager(SimpleNamespace(cuda_graph_num_warmup_steps=7), base_module=layer)
    layer.forward = manager
    train(layer, device, 9)
    assert manager.report().rows[0].eager_reasons == {"warm-up": 7}
    manager.session.close()


def test_manager_without_backward_keeps_no_activations(device: torch.device) -> None:
    layer = Layer(dropout=0.0).to(device)
    manager = CudaGraphManager(None, layer, need_backward=False)
    layer.forward = manager
    results = [layer(torch.ones(4, 8, device=device)) for _ in range(6)]
    assert all(same_bits(results[0], result) for result in results)
    assert not layer(torch.ones(4, 8, device=device)).requires_grad
    assert manager.report().rows[0].backwards == 0
    assert manager.report().replays >= 3
    manager.session.close()


@pytest.mark.parametrize(
    "options", [{"warmup": 0}, {"max_runners": 0}, {"max_graphs": -1}, {"outputs": "copies"}], ids=str
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], device: torch.device) -> None:
    with pytest.raises(stepgraph.InvalidArgument, match=next(iter(options))) as raised:
        stepgraph.graph_modules(Net(Layer()).to(device), "layers.*", **options)
    assert raised.value.rule == "option"


class Reads(nn.Module):
    """Reads a value on the host, which no capture can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    ("options", "raises"),
    [({}, False), ({"on_error": "eager"}, False), ({"on_error": "raise"}, True), ({"strict": True}, True)],
    ids=str,
)
def test_failed_capture_raises_or_stays_eager(options: dict[str, Any], raises: bool, device: torch.device) -> None:
    x = torch.ones(2, 8, device=device)
    model = Net(Reads()).to(device)
    warned = contextlib.nullcontext() if raises else pytest.warns(stepgraph.StepgraphWarning, match="host-read")
    refused = pytest.raises(stepgraph.CaptureError, match="host-read") if raises else contextlib.nullcontext()
    with stepgraph.graph_modules(model, "layers.*", warmup=1, **options) as handle:
        with warned as seen, refused:
            for _ in range(4):
                model(x).sum().backward()
        report = handle.report()
        assert report.replays == 0
        assert report.rows[0].refused == ({"host-read": 1} if raises else {})
        assert ("refused: host-read: 1" in str(report)) is raises
        if seen is not None:
            assert {Path(warning.filename).name for warning in seen} == {"module_harness.py"}, "where it is called"


class AsksWhetherCaptured(nn.Module):
    """Notes in its forward and its backward, in whichever thread that runs, what the library says."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.inner, self._seen = nn.Linear(8, 8), [seen]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._note("forward")
        return Asks.apply(self.inner(x), self._note)

    def _note(self, where: str) -> None:
        self._seen[0].append((where, stepgraph.is_graph_capturing(), stepgraph.is_graph_warmup()))


class Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Any) -> torch.Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note("backward")
        return grad, None


def test_graph_state_is_known_in_backward_threads_too(device: torch.device) -> None:
    seen: list[Any] = []
    model = Net(AsksWhetherCaptured(seen)).to(device)
    assert not stepgraph.is_graph_capturing()
    assert not stepgraph.is_graph_warmup()
    ignore = ["_seen", "self._seen", "len(self._seen)"]
    with stepgraph.graph_modules(model, "layers.*", warmup=2, ignore=ignore, audit=False):
        for _ in range(4):
            model(torch.ones(4, 8, device=device)).sum().backward()
            assert not stepgraph.is_graph_capturing()
            assert not stepgraph.is_graph_warmup()
    assert seen == [
        *[("forward", False, True), ("backward", False, True)] * 2,
        *[("forward", True, False), ("backward", True, False)],
    ]


def test_backward_in_a_thread_of_the_callers(device: torch.device) -> None:
    """A pipeline's backward may come from another thread than its forward."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer()), device)
        optimizer = training.optimizers[0]

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            loss = training.model(batch[0]).pow(2).mean()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            note(loss)
            optimizer.step()
            return loss.detach()

        training.step = step
        return training

    assert_graphed_equals_eager(build, device)


# -- dropping and capturing again


@pytest.mark.parametrize("how", ["handle.reset()", "delete_cuda_graphs()"])
def test_reset_and_recapture(how: str, device: torch.device) -> None:
    """Trap: delete, then capture again. In between calls are under way, whose backward still runs."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Layer()), device, steps=18)
        training.extra["drop"] = lambda: None
        inner, count = training.step, [0]

        def step(batch: torch.Tensor, note: Note) -> Any:
            count[0] += 1
            if count[0] not in (7, 8, 13):
                return inner(batch, note)
            training.optimizers[0].zero_grad()
            loss = training.model(batch[0]).pow(2).mean()
            training.extra["drop"]()
            loss.backward()
            note(loss)
            training.optimizers[0].step()
            return loss.detach()

        training.step = step
        return training

    torch.manual_seed(7)
    eager = build(device)
    torch.manual_seed(11)
    expected = eager.run(device)
    torch.manual_seed(7)
    training = build(device)
    with stepgraph.graph_modules(training.model, "layers.*", warmup=2) as handle:
        training.extra["drop"] = handle.reset if how == "handle.reset()" else stepgraph.delete_cuda_graphs
        torch.manual_seed(11)
        received = training.run(device)
        for (one, state), (two, other) in zip(expected, received, strict=True):
            assert all(map(same_bits, one, two))
            assert all(same_bits(state[key], other[key]) for key in state)
        assert handle.report().graphs == 2
        assert all(row.forwards > 8 for row in handle.report().rows)


def test_reset_tries_again_what_could_not_be_captured(device: torch.device) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.reads = nn.Linear(8, 8), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.inner(x)
            return hidden * hidden.sum().item() if self.reads else hidden

    model = Net(Sometimes()).to(device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1) as handle, quiet():
        train(model, device)
        assert handle.report().replays == 0
        model.layers[0].reads = False
        train(model, device)
        assert handle.report().replays == 0
        handle.reset()
        train(model, device)
        assert handle.report().replays == 2


def test_graphs_are_dropped_with_those_of_their_session(device: torch.device) -> None:
    """What a session holds may go all at once, as before a process group ends; calls then begin anew."""
    model = Net(Layer(dropout=0.0)).to(device)
    with (
        stepgraph.Session() as session,
        stepgraph.graph_modules(model, "layers.*", warmup=1, session=session) as handle,
    ):
        train(model, device)
        under_way = model(torch.ones(4, 8, device=device)).sum()
        session.drop_graphs()
        with pytest.raises(stepgraph.StaleMemoryError, match="graphs were freed"):
            under_way.backward()
        assert handle.report().graphs == 0
        del under_way
        before = handle.report().replays
        train(model, device)
        assert handle.report().replays == before + 2


def test_two_handles_live_side_by_side(device: torch.device) -> None:
    """Trap: one wrapper a process, and deleting an old one destroys the live graphs."""
    models = [Net(Layer(dropout=0.0)).to(device) for _ in range(2)]
    eager = [copy.deepcopy(model) for model in models]
    handles = [stepgraph.graph_modules(model, "layers.*", warmup=1) for model in models]
    for _ in range(4):
        for model, plain in zip(models, eager, strict=True):
            assert all(map(same_bits, train(plain, device), train(model, device)))
    assert all(handle.report().replays == 11 for handle in handles)
    handles[0].close()
    gc.collect()
    for model, plain in zip(models, eager, strict=True):
        assert all(map(same_bits, train(plain, device), train(model, device)))
    assert handles[1].report().replays == 14
    handles[1].close()


def test_several_chunks_of_one_model_keep_their_inputs_apart(device: torch.device) -> None:
    """Trap: later chunks overwrite earlier chunks' static inputs. Chunks of one class, in flight together."""

    def build(device: torch.device) -> Training:
        model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3))}).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: torch.Tensor, note: Note) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [layer(x).pow(2).mean() for layer, x in zip(model["layers"], batch.unbind(0), strict=True)]
            for loss in losses:
                loss.backward()
                note(loss)
            optimizer.step()
            return torch.stack([loss.detach() for loss in losses])

        return Training(model, step, [torch.randn(3, 4, 8, device=device) for _ in range(12)], [optimizer])

    assert_graphed_equals_eager(build, device)
