"""Modules, callables and stages run the operations of their eager calls: compared at capture, and audited by round."""

from __future__ import annotations

import array
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from tests.callables_harness import Rank, assert_rank_equals_eager
from tests.module_harness import (
    Layer,
    Net,
    Training,
    assert_graphed_equals_eager,
    quiet,
    same_bits,
    training_of,
)
from tests.stage_harness import Pipeline, assert_equal_histories, run
from tests.stage_harness import assert_graphed_equals_eager as assert_stages_equal_eager


class Holder:
    """A number in a configuration: `plain` where the watch finds it, else in memory that is too large for it."""

    def __init__(self, *, plain: bool = False) -> None:
        self.model = types.SimpleNamespace(parts=[{"scale": 1.0 if plain else array.array("d", [1.0]) * 5000}])

    @property
    def scale(self) -> float:
        found = self.model.parts[0]["scale"]
        return found if isinstance(found, float) else float(found[0])

    def set(self, scale: float) -> None:
        part = self.model.parts[0]
        if isinstance(part["scale"], float):
            part["scale"] = scale
        else:
            part["scale"][0] = scale


RULES = {False: "changed-operations", True: "host-value"}
"""How a changed number is told, by whether it is in the watch."""


class Scaled(Layer):
    """Reads a number deep in a configuration, in the forward or in the backward."""

    def __init__(self, config: Holder, where: str = "forward") -> None:
        super().__init__(dropout=0.0)
        self.config, self._where = config, where
        self.note = 0
        """Which it reads, too, and makes nothing of."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        _ = self.note > 1000
        if self._where == "backward":
            return ScaleGrad.apply(super().forward(x, mask), self.config)
        return super().forward(x, mask) * self.config.scale


class ScaleGrad(torch.autograd.Function):
    """Changes nothing but the gradient, by a number that is read when it comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, config: Any) -> torch.Tensor:
        ctx.config = config
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * ctx.config.scale, None


def told(warned: list[Any], rule: str) -> list[str]:
    return [str(w.message) for w in warned if f"[{rule}]" in str(w.message)]


# -- graph_modules


def scaled(device: torch.device, where: str, *, plain: bool) -> Training:
    config = Holder(plain=plain)
    training = training_of(lambda: Net(Scaled(config, where), Layer()), device, steps=12)
    training.before_step = lambda index: config.set(1.0 if index < 6 else 2.0)
    return training


@pytest.mark.pairwise
@pytest.mark.parametrize("plain", RULES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("single", [False, True])
def test_module_audit_finds_a_nested_value(where: str, single: bool, plain: bool, device: torch.device) -> None:
    """With an audit before each round all is as in eager; in the watch without any."""
    build = functools.partial(scaled, where=where, plain=plain)
    with quiet() as warned:
        report = assert_graphed_equals_eager(build, device, audit=False if plain else 1, single_mempool=single)
    (warning,) = told(warned, RULES[plain])
    assert "layers.0" in warning
    assert "test_pair_audits.py" in warning
    assert "1.0 -> 2.0" in warning
    assert plain or "1 round may have replayed" in warning
    assert sum(report.rows[0].recapture_reasons.values()) == 1
    assert (report.audits > 4) != plain
    assert "2 of 2 kinds of calls run the operations of their eager calls" in report.equality
    assert "2 of 2" in str(report)


@pytest.mark.parametrize(("audit", "right"), [(False, False), ("auto", True), (3, True)])
def test_module_audit_comes_by_round_count(audit: Any, right: bool, device: torch.device) -> None:
    config = Holder()
    model = Net(Scaled(config)).to(device)
    x = torch.ones(4, 8, device=device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1, audit=audit) as handle, quiet() as warned:
        for _ in range(3):
            model(x).sum().backward()
        config.set(3.0)
        for _ in range(4):
            result = model(x)
            result.sum().backward()
        handle.close()
        assert same_bits(result, model(x)) == right
    assert bool(told(warned, "changed-operations")) == right


def test_module_audit_comes_although_results_are_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation with gradients on, whose last result lives until the next: a call is under way at each call."""
    monkeypatch.setattr("stepgraph.engine.parts.modules.manager._LONGEST_ROUND", 3)
    config = Holder()
    model = Net(Scaled(config)).to(device)
    x = torch.ones(4, 8, device=device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1, audit=1) as handle, quiet() as warned:
        for _ in range(3):
            result = model(x)
            result.sum().backward()
        for index in range(12):
            config.set(1.0 if index < 3 else 3.0)
            result = model(x)
        handle.close()
        assert same_bits(result, model(x))
    assert told(warned, "changed-operations")


def test_module_audit_is_an_error_under_strict(device: torch.device) -> None:
    config = Holder()
    model = Net(Scaled(config)).to(device)
    x = torch.ones(4, 8, device=device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1, audit=1, strict=True):
        for _ in range(3):
            model(x).sum().backward()
        config.set(3.0)
        before = [p.grad.clone() for p in model.layers.parameters()]
        for _ in range(2):
            with pytest.raises(stepgraph.StateChanged, match=r"(?s)aten\.mul.*1\.0 -> 3\.0"):
                model(x)
        assert all(same_bits(p.grad, grad) for p, grad in zip(model.layers.parameters(), before, strict=True))
        config.set(1.0)
        model(x).sum().backward()


@pytest.mark.parametrize("single", [False, True])
def test_module_unused_value_makes_no_warning(single: bool, device: torch.device) -> None:
    """It is seen at the second layer, while a call of the first is under way."""

    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(), Scaled(Holder())), device, steps=8)
        training.before_step = lambda index: setattr(training.model.layers[1], "note", index)  # type: ignore[index]
        return training

    with quiet() as warned:
        report = assert_graphed_equals_eager(build, device, warmup=2, audit=False, single_mempool=single)
    assert not [w for w in warned if issubclass(w.category, stepgraph.StepgraphWarning)]
    assert report.recaptures == 0
    assert [row.eager_calls for row in report.rows] == [2, 2]


def test_module_value_in_the_watch_is_named(device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        training = training_of(lambda: Net(Layer(dropout=0.25)), device, steps=9)
        dropout = training.model.layers[0].dropout  # type: ignore[index,union-attr]
        training.before_step = lambda index: setattr(dropout, "p", 0.25 if index < 6 else 0.5)
        return training

    with quiet() as warned:
        assert_graphed_equals_eager(build, device, warmup=2, audit=False)
    (warning,) = told(warned, "host-value")
    assert "dropout.p: 0.25 -> 0.5" in warning


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_module_audit_comes_in_evaluations(around: Callable[[], Any], device: torch.device) -> None:
    config = Holder()
    model = Net(Scaled(config), Layer(dropout=0.0)).to(device)
    x = torch.ones(4, 8, device=device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1, audit=1) as handle, quiet() as warned:
        for index in range(9):
            config.set(1.0 if index < 6 else 2.0)
            with around():
                result = model(x)
            if index % 2:
                model(x).sum().backward()
        handle.close()
        with around():
            assert same_bits(result, model(x))
    assert len(told(warned, "changed-operations")) == 1
    assert "it can no longer" not in str(handle.report())


class AsksWhetherCaptured(Layer):
    """Multiplies by one while it is captured, as libraries do that go round a host read then."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        found = super().forward(x, mask)
        return found * 1.0 if stepgraph.is_graph_capturing() else found


class Alternates(Layer):
    """Does something else at each second call, by a number that is out of reach of the watch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.config = Holder()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.config.set(3.0 - self.config.scale)
        return super().forward(x, mask) * self.config.scale


def test_module_that_asks_whether_it_is_captured_is_reported(device: torch.device) -> None:
    build = functools.partial(training_of, lambda: Net(AsksWhetherCaptured(), Layer()))
    with quiet() as warned:
        report = assert_graphed_equals_eager(build, device, audit=1)
    (warning,) = told(warned, "other-path")
    assert "layers.0: the module runs other operations during capture" in warning
    assert "aten.mul" in warning
    assert "1 take another path" in report.equality
    model = Net(AsksWhetherCaptured()).to(device)
    with stepgraph.graph_modules(model, "layers.*", warmup=1, strict=True):
        x = torch.ones(4, 8, device=device)
        for _ in range(2):
            model(x).sum().backward()
        with pytest.raises(stepgraph.CaptureError, match="other-path"):
            model(x)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_module_with_varying_operations_stays_eager(microbatches: int, device: torch.device) -> None:
    def build(device: torch.device) -> Training:
        config = Holder()

        def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            config.set(3.0 - config.scale)
            return model(x)  # type: ignore[no-any-return]

        make = functools.partial(Net, Scaled(config), Layer())
        return training_of(make, device, microbatches=microbatches, steps=10, call=call)

    with quiet() as warned:
        report = assert_graphed_equals_eager(build, device, replays=False)
    assert told(warned, "varying-operations")
    assert "capture failed: [varying-operations]" in report.rows[0].eager_reasons
    assert report.rows[0].forwards == 0
    assert report.rows[1].forwards > 0


class Checkpointed(Layer):
    """Computes its forward again in the backward."""

    reentrant = False

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        found = checkpoint(super().forward, x, mask, use_reentrant=self.reentrant)
        assert isinstance(found, torch.Tensor)
        return found


class Reentrant(Checkpointed):
    """The same, by a backward in the backward."""

    reentrant = True


def autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return model(x).float()


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "layers": (lambda: Net(Layer(), Layer(), Layer()), {}),
    "microbatches": (lambda: Net(Layer(), Layer()), {"microbatches": 2, "zero": "never", "steps": 7}),
    "one called twice": (lambda: Net(*[Layer()] * 2), {"zero": "zero"}),
    "batch norm": (lambda: Net(nn.BatchNorm1d(8), Layer(), nn.BatchNorm1d(8)), {}),
    "autocast": (lambda: Net(Layer(), Layer()), {"call": autocast}),
    "checkpoint": (lambda: Net(Checkpointed(), Checkpointed()), {}),
    "reentrant checkpoint": (lambda: Net(Reentrant(), Reentrant()), {}),
    "frozen": (lambda: Net(Layer().requires_grad_(False), Layer()), {}),
}


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_modules_audited_at_each_round_equal_eager(name: str, single: bool, device: torch.device) -> None:
    make, options = MODELS[name]
    with quiet() as warned:
        report = assert_graphed_equals_eager(
            lambda device: training_of(make, device, **options), device, audit=1, single_mempool=single
        )
    assert not [w for w in warned if issubclass(w.category, stepgraph.StepgraphWarning)]
    assert report.recaptures == 0
    assert report.audits >= 4
    assert report.to_dict()["audits"] == report.audits


# -- make_graphed_callables


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("plain", RULES)
@pytest.mark.parametrize("ordered", [False, True])
def test_callable_audit_finds_a_nested_value(where: str, ordered: bool, plain: bool, device: torch.device) -> None:
    config = Holder(plain=plain)
    layer = Scaled(config, where).to(device)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    order: dict[str, Any] = {"order": [1, -1]} if ordered else {}
    made = stepgraph.make_graphed_callables((layer,), ((x,),), audit=not plain and 1, **order)
    for _ in range(3):
        made[0](x).sum().backward()
    config.set(2.0)
    expected = r"(?s)scale'\]: 1\.0 -> 2\.0.*at operation" if plain else r"(?s)-operations.*1\.0 -> 2\.0.*1 round"
    for _ in range(2):
        with pytest.raises(stepgraph.StateChanged, match=expected):
            made[0](x)
    config.set(1.0)
    made[0](x).sum().backward()
    report = stepgraph.engine.parts.callables.report(made)
    assert report.audits == (0 if plain else 3)
    assert "1 of 1 kind" in report.equality
    assert report.equality in str(report)


def test_callable_unused_value_is_no_error(device: torch.device) -> None:
    layer = Scaled(Holder()).to(device)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    stepgraph.make_graphed_callables(layer, (x,), audit=False)
    for index in range(3):
        layer.note = index
        layer(x).sum().backward()
    assert stepgraph.engine.parts.callables.report(layer).forwards == 3
    layer.dropout.p = 0.5
    with pytest.raises(stepgraph.StateChanged, match=r"(?s)dropout\.p: 0\.0 -> 0\.5.*at operation"):
        layer(x)


def test_callable_paths_are_reported_or_refused(device: torch.device) -> None:
    x = torch.ones(4, 8, device=device, requires_grad=True)
    with quiet() as warned:
        stepgraph.make_graphed_callables(AsksWhetherCaptured().to(device), (x,))
    assert len(told(warned, "other-path")) == 1
    layer = Alternates().to(device)
    with pytest.raises(stepgraph.CaptureError, match="varying-operations"):
        stepgraph.make_graphed_callables(layer, (x,))


ORDERS: dict[str, tuple[list[float], dict[str, Any]]] = {
    "one chunk": ([1, 1, -1, 1, -1, -1], {}),
    "two chunks": ([1, 2, -2, -1], {}),
    "weights split off": ([1, 1, -1, -1.5, -1, -1.5], {}),
    "no reuse": ([1, 1, -1, -1], {"reuse_buffers": False}),
}


@pytest.mark.parametrize("name", ORDERS)
def test_callables_audited_at_each_round_equal_eager(name: str, device: torch.device) -> None:
    order, options = ORDERS[name]
    layers = [2] if max(order) == 1 else [1, 1]
    rank = assert_rank_equals_eager(lambda: Rank(device, order, layers), audit=1, **options)
    assert rank.graphed is not None
    report = stepgraph.engine.parts.callables.report(rank.graphed)
    assert report.audits >= 4
    assert report.to_dict()["audits"] == report.audits


# -- graph_stage


@pytest.fixture
def group(device: torch.device) -> Iterator[None]:
    """A process group of one rank."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SPLIT = "ScheduleInterleavedZeroBubble"


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("plain", RULES)
@pytest.mark.parametrize("name", ["Schedule1F1B", SPLIT])
def test_stage_audit_finds_a_nested_value(name: str, plain: bool, device: torch.device) -> None:
    def train(*, graphed: bool) -> tuple[list[Any], Any]:
        config = Holder(plain=plain)
        pipeline = Pipeline(name, 2, device, block=lambda index: Scaled(config))
        handle = None
        if graphed:
            handle = stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1, audit=not plain and 1)
        history = run(pipeline, 4)
        config.set(2.0)
        return history + run(pipeline, 4), handle

    expected, _ = train(graphed=False)
    with quiet() as warned:
        received, handle = train(graphed=True)
    assert_equal_histories(expected, received)
    report = handle.report()
    (warning,) = told(warned, RULES[plain])
    assert "1.0 -> 2.0" in warning
    assert sum(report.recaptures.values()) == 1
    assert report.steps["warm-up"] == 2
    assert (report.audits >= 3) != plain
    assert report.equality in str(report)
    handle.close()


@pytest.mark.usefixtures("group")
def test_stage_unused_value_makes_no_warning(device: torch.device) -> None:
    pipeline = Pipeline("Schedule1F1B", 2, device, block=lambda index: Scaled(Holder()))
    with stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=1, strict=True, audit=False) as handle:
        with quiet() as warned:
            for index in range(4):
                pipeline.blocks[0].note = index
                pipeline.step()
        assert not [w for w in warned if issubclass(w.category, stepgraph.StepgraphWarning)]
        assert handle.report().steps == {"warm-up": 1, "replay": 3}


@pytest.mark.usefixtures("group")
def test_stage_that_asks_whether_it_is_captured_is_reported(device: torch.device) -> None:
    pipeline = Pipeline("Schedule1F1B", 2, device, block=lambda index: AsksWhetherCaptured())
    with stepgraph.graph_stage(pipeline.stages, pipeline.schedule, warmup=2) as handle, quiet() as warned:
        run(pipeline, 5)
        assert told(warned, "other-path")
        assert handle.report().steps == {"warm-up": 3, "replay": 2}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B", SPLIT])
def test_stages_audited_at_each_step_equal_eager(name: str, device: torch.device) -> None:
    with quiet() as warned:
        handle = assert_stages_equal_eager(name, 4, device=device, audit=1)
    assert not [w for w in warned if issubclass(w.category, stepgraph.StepgraphWarning)]
    assert handle.report().audits == 3


@pytest.mark.parametrize("audit", [0, True, -1, "often", 1.5])
def test_audit_that_is_no_count_is_refused(audit: Any) -> None:
    for graph in (
        lambda: stepgraph.graph_modules(Net(Layer()), "layers.*", audit=audit),
        lambda: stepgraph.make_graphed_callables(Layer(), (torch.ones(4, 8),), audit=audit),
    ):
        with pytest.raises(stepgraph.InvalidArgument, match="audit="):
            graph()


def test_module_value_that_matters_late_is_right_at_once(device: torch.device) -> None:
    """The first changes have no effect, and the third one has."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.epoch = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 2 if self.epoch >= 3 else self.linear(x)

    torch.manual_seed(0)
    model = nn.ModuleDict({"part": Late()}).to(device)
    part, x = model["part"], torch.ones(2, 4, device=device)
    with stepgraph.graph_modules(model, "part") as handle, quiet(), torch.no_grad():
        for call in range(100):
            part.epoch = call // 20
            assert torch.equal(model["part"](x), Late.forward(part, x))
        assert handle.report().replays > 80
