"""The search for the largest set of modules that can be captured, and the trials that it is made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph import Session
from stepgraph.engine.parts.modules.options import ModuleOptions
from stepgraph.engine.step.fallback.alike import look_of
from stepgraph.engine.step.fallback.observed import ObservedStep
from stepgraph.engine.step.fallback.search import NOT_CALLED, Node, Partition, Refusal, patterns, search
from stepgraph.engine.step.fallback.trial import Trials
from stepgraph.tools.checks.partition import partition
from tests.harness import Program, different, snapshot
from tests.module_harness import Layer, Net
from tests.seeding import seed

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# -- the search


@st.composite
def trees(draw: st.DrawFn) -> Node:
    """A tree of up to twenty modules, some of which are never called."""
    parents = [draw(st.integers(0, index)) for index in range(draw(st.integers(0, 19)))]
    called = [draw(st.integers(0, 5)) > 0 for _ in range(len(parents) + 1)]

    def node(index: int) -> Node:
        children = [child for child, parent in enumerate(parents, 1) if parent == index]
        return Node(str(index), tuple(map(node, children)), is_called=called[index])

    return node(0)


def nodes(tree: Node) -> list[Node]:
    return [tree, *itertools.chain.from_iterable(map(nodes, tree.parts))]


def judge(bad: set[str], tree: Node) -> Callable[[str], Refusal | None]:
    """A monotone predicate: a module that contains a bad one cannot be captured."""
    inside = {node.path: set(node.paths()) for node in nodes(tree)}
    return lambda path: Refusal("bad") if inside[path] & bad else None


@UNTIMED
@given(trees(), st.data())
def test_search_finds_the_outermost_capturable_modules(tree: Node, data: st.DataObject) -> None:
    every = nodes(tree)
    bad = set(data.draw(st.lists(st.sampled_from([node.path for node in every]), max_size=6)))
    bad &= {node.path for node in every if node.is_called}
    can_capture = judge(bad, tree)
    found = search([tree], can_capture, budget=None)
    good = {node.path for node in every if node.is_called and can_capture(node.path) is None}
    inside = {path for node in every if node.path in good for part in node.parts for path in part.paths()}
    assert set(found.chosen) == good - inside
    assert len(found.chosen) == len(set(found.chosen))
    leaves = {node.path for node in every if not node.parts and node.path in good}
    covered = {path for node in every if node.path in found.chosen for path in node.paths()}
    assert leaves <= covered
    assert set(found.refused) == {node.path for node in every} - covered


@UNTIMED
@given(trees(), st.data())
def test_search_tries_each_module_at_most_once(tree: Node, data: st.DataObject) -> None:
    verdicts = st.sampled_from([None, Refusal("edge", spreads=False), Refusal("inside")])
    answers = {node.path: data.draw(verdicts) for node in nodes(tree)}
    tried: list[str] = []

    def can_capture(path: str) -> Refusal | None:
        tried.append(path)
        return answers[path]

    found = search([tree], can_capture, budget=None)
    assert len(tried) == len(set(tried)) == found.trials <= len(answers)
    for outer in nodes(tree):
        if outer.path in found.chosen:
            assert not set(found.chosen) & (set(outer.paths()) - {outer.path})


@UNTIMED
@given(trees(), st.integers(0, 25))
def test_search_begins_no_trial_after_its_budget(tree: Node, budget: int) -> None:
    seconds = itertools.count()
    found = search([tree], lambda path: None, budget=float(budget), clock=lambda: float(next(seconds)))
    assert found.trials <= budget
    late = [why for why in found.refused.values() if why != NOT_CALLED]
    assert all(f"ended after {budget:g} s" in why for why in late)


def test_search_goes_past_an_obstacle_at_an_edge() -> None:
    tree = Node("model", (Node("model.part"),))
    found = search([tree], {"model.part": Refusal("an argument", spreads=False)}.get, budget=None)
    assert found == Partition(("model",), {}, 2)


def test_search_names_the_module_that_stands_in_the_way() -> None:
    tree = Node("", (Node("layers", (Node("layers.0"), Node("layers.1")), is_called=False),))
    found = search([tree], {"layers.1": Refusal("it reads")}.get, budget=None)
    assert found.chosen == ("layers.0",)
    assert found.refused == {"layers.1": "it reads", "layers": NOT_CALLED, "": "it contains `layers.1`"}
    assert found.causes() == {"layers.1": "it reads"}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (["layers.0.a", "layers.1.a"], ["layers.*.a"]),
        (["layers.0.a"], ["layers.0.a"]),
        (["layers.0.a", "layers.0.b", "layers.1.a"], ["layers.*.a", "layers.0.b"]),
        (["head"], ["head"]),
    ],
)
def test_patterns_match_the_chosen_modules_only(chosen: list[str], expected: list[str]) -> None:
    paths = ["layers", "layers.0", "layers.1", "layers.0.a", "layers.1.a", "layers.0.b", "layers.1.b", "head"]
    assert patterns(chosen, paths) == expected


# -- modules that look alike


def test_look_is_equal_for_layers_of_other_numbers() -> None:
    layers = nn.ModuleList([Layer(), Layer()])
    for index, layer in enumerate(layers):
        layer.layer_idx = index
    assert look_of(layers[0], "layers.0") == look_of(layers[1], "layers.1")


@pytest.mark.parametrize("change", ["attribute", "width", "hook", "frozen", "class"])
def test_look_differs_by(change: str) -> None:
    one, two = Layer(), Layer(16) if change == "width" else Layer()
    if change == "attribute":
        two.dropout.p = 0.5
    elif change == "hook":
        two.norm.register_forward_hook(lambda *_: None)
    elif change == "frozen":
        two.up.weight.requires_grad_(False)
    elif change == "class":
        two.dropout = nn.Identity()
    assert look_of(one, "layers.0") != look_of(two, "layers.1")


# -- trials


class Reader(nn.Module):
    """Reads a value on the host, between two parts that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        return self.after(hidden * (2.0 if hidden.sum().item() > 0 else 1.0))


class Drawing(nn.Module):
    """Draws from the host's random numbers at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import random

        return self.inner(x) * random.random()


def stepper(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("make", "scope", "causes"),
    [
        (lambda: Net(Layer(), Layer()), ["forward"], {}),
        (
            lambda: Net(Layer(), Reader(), Layer()),
            ["embed", "layers.0", "layers.1.before", "layers.1.after", "layers.2", "head"],
            {"layers.1": "host-read"},
        ),
        (lambda: Net(Drawing()), ["embed", "layers.0.inner", "head"], {"layers.0": "host-random"}),
    ],
    ids=["all", "host read", "host random"],
)
def test_partition_is_the_scope_of_graph_modules(make: Any, scope: list[str], causes: dict[str, str]) -> None:
    seed(0)
    model = make()
    found = partition(model, stepper(model))
    assert found.scope() == scope
    assert {path: why.partition("[")[2].partition("]")[0] for path, why in found.causes().items()} == causes
    assert found.trials <= 2 * len(list(model.modules()))
    with stepgraph.graph_modules(model, found.scope()) as handle:
        assert handle.paths == [path or type(model).__name__ for path in found.chosen]


def test_partition_names_the_line_that_reads() -> None:
    model = Net(Reader())
    (why,) = partition(model, stepper(model)).causes().values()
    assert "test_partition.py" in why
    assert "hidden.sum().item()" in why


def test_partition_leaves_out_modules_that_are_never_called() -> None:
    model = Net(Layer())
    model.spare = nn.Linear(2, 2)
    model.layers.append(Reader())
    found = partition(model, stepper(model))
    assert found.refused["spare"] == found.refused["layers"] == NOT_CALLED
    assert "spare" not in found.causes()


def test_partition_leaves_out_modules_of_changing_shapes() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.rows = nn.Linear(8, 8), 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows += 1
            return x + self.inner(x[: self.rows]).sum()

    model = Net(Growing())
    found = partition(model, stepper(model))
    assert found.scope() == ["embed", "head"]
    assert "[static-shapes]" in found.refused["layers.0.inner"]


def test_trials_leave_all_state_as_it_was() -> None:
    seed(0)
    model = Net(Layer(), nn.BatchNorm1d(8), Layer(dropout=0.5), Reader())
    step = stepper(model)
    program = Program(step, (), [model])
    with Session() as session:
        observed = ObservedStep({"": model}, session, ModuleOptions())
        for second in (False, True):
            with observed.observing(second=second):
                step()
        before, grads = snapshot(program, torch.device("cpu")), [p.grad for p in model.parameters()]
        attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
        search(observed.tree(), Trials(observed, 16).can_capture, None)
        assert not different(before, snapshot(program, torch.device("cpu")))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert all(vars(module) == attributes[name] for name, module in model.named_modules())
        assert session.num_graphs == 0
        observed.close()


def test_trials_judge_modules_that_look_alike_once() -> None:
    model = Net(*(Layer() for _ in range(5)), Reader())
    step = stepper(model)
    with Session() as session:
        observed = ObservedStep({"": model}, session, ModuleOptions())
        for second in (False, True):
            with observed.observing(second=second):
                step()
        trials = Trials(observed, 16)
        found = search(observed.tree(), trials.can_capture, None)
        observed.close()
    assert "layers.4" in found.chosen
    assert trials.recordings < 15 < found.trials


def test_partition_restores_the_model_if_a_step_raises() -> None:
    model = Net(Layer())

    def step() -> None:
        model(torch.randn(4, 8))
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        partition(model, step)
    assert all("forward" not in vars(module) for module in model.modules())


def test_partition_refuses_too_many_calls_in_flight() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.read = nn.Linear(8, 8), Reader()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = self.cell(x)
            return self.read(x)

    model = Net(Loop())
    found = partition(model, stepper(model))
    assert "[max-runners]" in found.refused["layers.0.cell"]
    assert "layers.0.read.after" in found.chosen
