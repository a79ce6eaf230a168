"""What a newcomer mistypes first: each refusal says what it is, why, and what to type instead."""

import functools
import inspect
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import stepgraph

capture, graph_modules = stepgraph.capture, stepgraph.graph_modules


def step(x: torch.Tensor) -> torch.Tensor:
    return x + 1


async def awaiting(x: torch.Tensor) -> torch.Tensor:
    return x


async def streaming(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    yield x


def yielding(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x


class Awaiting:
    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def feed_forward() -> nn.Module:
    return nn.ModuleDict({"mlp": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})


def plain() -> nn.Module:
    return nn.ModuleDict({"part": nn.Linear(2, 2)})


def graphed_twice(scope: str = "part") -> None:
    model = plain()
    with graph_modules(model, "part"):
        graph_modules(model, scope)


LAYER = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(LAYER.parameters())
WRAPPER = functools.partial(stepgraph.FullCudaGraphWrapper, step)
GRAPHED = functools.partial(stepgraph.make_graphed_callables, LAYER, (torch.ones(2, 2),))
REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    # misspelt options
    "warmups": (lambda: capture(step, warmups=2), "capture has no option `warmups`", "did you mean `warmup`?"),
    "decorator": (lambda: capture(warmups=2), "capture has no option `warmups`", "did you mean `warmup`?"),
    "modules": (lambda: graph_modules(plain(), "part", audits=1), "no option `audits`", "did you mean `audit`?"),
    "scopes": (lambda: graph_modules(plain(), scopes="part"), "no option `scopes`", "did you mean `scope`?"),
    "wrapper": (lambda: WRAPPER(optimiser="auto"), "no option `optimiser`", "did you mean `optimizer`?"),
    "callables": (lambda: GRAPHED(num_warmups=1), "no option `num_warmups`", "did you mean `num_warmup_iters`?"),
    "stage": (lambda: stepgraph.graph_stage(None, None, stric=True), "no option `stric`", "did you mean `strict`?"),
    "no near name": (lambda: capture(step, xyz=2), "no option `xyz`", "its options are warmup, max_graphs"),
    # values of options
    "optimizer": (lambda: capture(step, optimizer="in"), "optimizer='in' is not one of", "did you mean 'inside'?"),
    "strict": (lambda: capture(step, strict="yes"), "strict='yes' is not True or False", "strict=True"),
    "strict modules": (lambda: graph_modules(plain(), "part", strict="no"), "strict='no'", "or leave it out"),
    "ignore": (lambda: capture(step, ignore=[3]), "ignore: 3 is not a name", "a list of names"),
    "safe_hooks": (lambda: capture(step, safe_hooks=[3]), "safe_hooks: 3 is not a function", "functions or names"),
    "session": (lambda: capture(step, session="abc"), "session='abc' is not a Session", "stepgraph.Session()"),
    "session of modules": (lambda: graph_modules(plain(), "part", session="abc"), "session='abc'", "session=session"),
    "backend": (
        lambda: capture(step, backend=3),
        "backend=3 is not a str or Backend",
        "backend='cuda' or backend='tape'",
    ),
    "registry": (lambda: graph_modules(plain(), "part", registry={}), "registry={}", "ScopeRegistry().register("),
    "device": (lambda: stepgraph.backend_for("foo"), "work on 'foo' devices", "'cuda' or 'cpu'"),
    "no device": (lambda: stepgraph.backend_for(None), "work on None devices", "'cuda' or 'cpu'"),
    # what is no step
    "number": (lambda: capture(5), "capture got 5, an int, which cannot be called", "def train_step(batch)"),
    "text": (lambda: capture("abc"), "capture got 'abc', a str", "def train_step(batch)"),
    "an optimizer": (lambda: capture(OPTIMIZER), "got an optimizer, SGD", "call optimizer.step() in a function"),
    "a model": (lambda: capture(LAYER), "got a module, Linear", "stepgraph.graph_modules(model)"),
    "class method": (lambda: capture(classmethod(step)), "which cannot be called", "below @classmethod"),
    "async": (lambda: capture(awaiting), "the step awaiting is async", "await around its calls"),
    "async decorator": (lambda: capture(warmup=1)(awaiting), "the step awaiting is async", "await around its calls"),
    "async object": (lambda: capture(Awaiting()), "the step Awaiting is async", "await around its calls"),
    "async generator": (lambda: capture(streaming), "the step streaming is async", "await around its calls"),
    "generator": (lambda: capture(yielding), "the step yielding is a generator", "instead of yielding"),
    "partial": (lambda: capture(functools.partial(yielding)), "is a generator", "instead of yielding"),
    # what is no model, and scopes
    "no model": (lambda: graph_modules(None), "graph_modules was given None", "graph_modules(model, scope)"),
    "a function": (lambda: graph_modules(step), "a function, but it graphs parts", "stepgraph.capture(function)"),
    "scope 0": (lambda: graph_modules(plain(), 0), "the scope has 0, which is an int", 'such as ["attn"'),
    "scope mlp": (lambda: graph_modules(plain(), "mlp"), "the scope 'mlp' matches nothing", "pass a path such as"),
    "scope of a list": (lambda: graph_modules(feed_forward(), "head mlp2"), "'mlp2'", "did you mean 'mlp'?"),
    "iteration": (lambda: graph_modules(plain(), "full_iteration"), "the whole iteration", "stepgraph.capture("),
    "twice": (graphed_twice, "`part` is graphed already", "call close() on the first handle"),
    "twice by another name": (
        lambda: graphed_twice("par*"),
        "`part` is graphed already",
        "call close() on the first handle",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_what_why_and_fix(name: str) -> None:
    make, what, fix = REFUSED[name]
    with pytest.raises(stepgraph.InvalidArgument) as caught:
        make()
    error = caught.value
    assert what in error.what
    assert error.why
    assert fix in error.fix
    for part in (error.what, f"Why: {error.why}", f"Fix: {error.fix}"):
        assert part in str(error)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"device", "no device"}))
def test_refusal_has_one_frame_of_ours(name: str) -> None:
    with pytest.raises(stepgraph.InvalidArgument) as caught:
        REFUSED[name][0]()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[:-1] == [__file__] * (len(files) - 1)


def test_scope_that_was_asked_for_is_not_suggested() -> None:
    for scope in ("mlp", "attn", "moe", "mamba"):
        with pytest.raises(stepgraph.InvalidArgument) as caught:
            graph_modules(plain(), scope)
        assert f"did you mean {scope!r}" not in str(caught.value)


def test_graph_modules_again_after_close() -> None:
    model = plain()
    graph_modules(model, "part").close()
    with graph_modules(model, "part") as handle:
        assert handle.paths == ["part"]


OLDER: dict[str, tuple[Callable[[], Any], str, str]] = {
    "max_signatures": (lambda: graph_modules(plain(), "part", max_signatures=2), "`max_graphs`", "max_graphs=2"),
    "guarded": (lambda: graph_modules(plain(), "part", outputs="guarded"), "outputs='copy'", "outputs='copy'"),
    "optimizer": (lambda: WRAPPER(optimizer=OPTIMIZER), "`optimizers`", "optimizers=[optimizer], optimizer='auto'"),
    "optimizer_mode": (
        lambda: WRAPPER(optimizer=OPTIMIZER, optimizer_mode="outside"),
        "`optimizers`",
        "optimizers=[optimizer], optimizer='outside'",
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_name_is_read_with_one_warning(name: str) -> None:
    make, new, fix = OLDER[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make().close()
    assert [w.category for w in seen] == [stepgraph.StepgraphWarning]
    told = str(seen[0].message)
    assert new in told
    assert fix in told.partition("Fix:")[2]
    assert seen[0].filename == __file__


def test_older_and_newer_name_together_are_refused() -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="both"):
        graph_modules(plain(), "part", max_signatures=2, max_graphs=3)


ENTRY_POINTS = {
    "capture": capture,
    "graph_modules": graph_modules,
    "make_graphed_callables": stepgraph.make_graphed_callables,
    "graph_stage": stepgraph.graph_stage,
    "FullCudaGraphWrapper": stepgraph.FullCudaGraphWrapper.__init__,
}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_help_lists_every_option_with_a_sentence(name: str) -> None:
    function: Any = ENTRY_POINTS[name]
    parameters = inspect.signature(function).parameters.values()
    assert not [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    options = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    listed = inspect.getdoc(function).partition("Options:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == [p.name for p in options]
    for line, option in zip(listed, options, strict=True):
        said = line.partition(f"({option.default!r}): ")[2]
        assert said.endswith("."), line


def test_shared_options_have_one_meaning() -> None:
    """An option of several entry points has the same type everywhere, and but for `on_error` the same default.

    `on_error` has one word more for `capture`, which stands above the engine of modules.
    """
    known: dict[str, set[Any]] = {}
    for name in ("capture", "graph_modules", "graph_stage", "FullCudaGraphWrapper"):
        types = get_type_hints(ENTRY_POINTS[name])
        for p in inspect.signature(ENTRY_POINTS[name]).parameters.values():
            if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in ("buckets", "pad_values"):
                default = None if p.name == "on_error" else p.default
                kind = str(types.get(p.name, p.annotation))
                kind = kind.replace(", 'modules'", "") if (name, p.name) == ("capture", "on_error") else kind
                known.setdefault(p.name, set()).add((kind, default))
    assert len(known) > 12
    assert {name: found for name, found in known.items() if len(found) > 1} == {}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.steps


@pytest.mark.parametrize(
    ("ignore", "near"), [("self.stepps", "self.steps"), ("steps", None), ("b.steps", None), ("a.other", None)]
)
def test_misspelt_ignored_name_of_modules(ignore: str, near: str | None) -> None:
    model = nn.Sequential()
    model.add_module("a", Scaled())
    model.add_module("b", Scaled())
    with graph_modules(model, "a b", warmup=1, ignore=[ignore]), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(1, requires_grad=True)).sum().backward()
    assert [str(w.message).partition("Fix: ")[2] for w in seen] == [f"did you mean {near!r}?"] * (near is not None)


@pytest.mark.parametrize(
    ("ignore", "near"),
    [(["stpes"], "steps"), (["table['b']"], "table['a']"), (["steps"], None), (["table"], None), (["zzz"], None)],
    ids=str,
)
def test_misspelt_ignored_name_is_answered_with_the_nearest(ignore: list[str], near: str | None) -> None:
    steps, table = 3, {"a": 2.0}
    captured = capture(lambda x: x * steps * table["a"], warmup=1, ignore=ignore, backend="tape")
    with captured, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(4):
            captured(torch.ones(1))
    told = [str(w.message) for w in seen]
    assert len(told) == (near is not None)
    if near is not None:
        assert "no watched value has this name" in told[0]
        assert f"did you mean {near!r}?" in told[0]


def test_failure_on_the_tape_does_not_advise_the_tape() -> None:
    def fails() -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            if stepgraph.is_graph_capturing():
                raise KeyError("mine")
            return x

        return step

    with capture(fails(), warmup=1, backend="tape") as captured, pytest.raises(stepgraph.CaptureError) as caught:
        for _ in range(2):
            captured(torch.ones(1))
    assert caught.value.rule == "step-raised"
    assert "tape" not in str(caught.value)


def test_past_max_graphs_names_buckets() -> None:
    with capture(step, warmup=1, max_graphs=1, strict=True, backend="tape") as captured:
        captured(torch.ones(1))
        captured(torch.ones(1))
        with pytest.raises(stepgraph.SignatureMismatch) as caught:
            captured(torch.ones(2))
    assert caught.value.rule == "max-graphs"
    assert "buckets=" in caught.value.fix
