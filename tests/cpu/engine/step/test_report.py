"""The report: what it counts, as a dict and as a table."""

import io
import json
import sys
import types
from dataclasses import fields

import pytest
import torch

import stepgraph
from stepgraph.engine.guards.host_values import walk
from stepgraph.engine.step.report import Counts, Report

KEYS = {
    "step",
    "backend",
    "graphs",
    "nodes",
    "captures",
    "recaptures",
    "recapture_reasons",
    "replays",
    "eager_calls",
    "eager_reasons",
    "capture_seconds",
    "pool_bytes",
    "static_bytes",
    "segments",
    "signatures",
    "outlines",
}


def example(**changes: object) -> Report:
    values: dict[str, object] = {
        "step": "train_step",
        "backend": "tape",
        "graphs": 1,
        "segments": 2,
        "nodes": 120,
        "captures": 1,
        "audits": 2,
        "recapture_reasons": {},
        "replays": 7,
        "eager_calls": 3,
        "eager_reasons": {"warm-up": 3},
        "capture_seconds": 0.25,
        "pool_bytes": 3 * 2**20,
        "static_bytes": 2**19,
        "signatures": ("batch=f32[4, 2] cpu",),
        "outlines": ("batch=f32[4, 2] cpu",),
        "chains": ("graph (120 nodes) > AdamW.step",),
        "optimizers": {"AdamW": "eager, between graphs (its step count is on the host)"},
        "equality": "not checked here",
        "guards": "Python",
    }
    return Report(**{**values, **changes})  # type: ignore[arg-type]


def test_report_dict_is_json_and_has_every_field() -> None:
    report = example()
    values = report.to_dict()
    assert {*(f.name for f in fields(Report)), "recaptures", "verdict"} == set(values)
    assert set(values) >= KEYS
    again = json.loads(json.dumps(values))
    assert again == values
    assert again["eager_reasons"] == {"warm-up": 3}


def test_report_dict_is_not_the_reports_own_memory() -> None:
    report = example()
    report.to_dict()["eager_reasons"]["more"] = 1
    assert report.eager_reasons == {"warm-up": 3}


def test_report_says_how_guards_are_asked() -> None:
    assert "stepgraph native --build" in str(example())
    assert "in C++" in str(example(guards="C++"))


def test_report_prints_the_verdict_and_a_table() -> None:
    text = str(example())
    assert text.startswith("7 of 10 calls replayed; 3 ran eagerly: warm-up\n")
    for piece in (
        "train_step on tape",
        "1 graph, 2 segments, 120 nodes, 1 capture",
        "0.250 s",
        "pool 3.0 MiB, static 0.5 MiB",
        "batch=f32[4, 2] cpu",
        "graph (120 nodes) > AdamW.step",
        "its step count is on the host",
        "not checked here",
    ):
        assert piece in text
    assert not text.endswith("\n")


@pytest.mark.parametrize("optimizer", ["auto", "capturable"])
def test_report_claims_the_equality_that_was_checked(optimizer: str) -> None:
    """Operations are compared with those of an eager call; without a graph there is nothing to compare."""
    with stepgraph.capture(lambda x: x * 2, warmup=2, optimizer=optimizer) as step:
        for replays in (0, 0, 1):
            step(torch.ones(2))
            report = step.report()
            text = " ".join(str(report).split())
            assert report.replays == replays
            assert report.to_dict()["equality"] == report.equality
            assert ("equal to eager" in text) is (report.equality is not None) is bool(replays)
            assert "bit for bit" not in text
    assert report.equality is not None
    assert report.equality.startswith("1 graph with the operations of an eager call")
    assert ("capturable=True" in report.equality) is (optimizer == "capturable")


def test_report_names_what_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [types.SimpleNamespace(w=1.0) for _ in range(50)]
    for limit, is_told in ((20_000, False), (20, True)):
        monkeypatch.setattr(walk, "MAX_OBJECTS", limit)
        with stepgraph.capture(lambda x: x * sum(one.w for one in many), warmup=2) as step:
            for _ in range(4):
                step(torch.ones(2))
            assert ("are not watched" in str(step.report().equality)) is is_told


def test_report_prints_brackets_as_they_are() -> None:
    """rich reads `[...]` as markup; dict paths and failure rules have brackets."""
    text = str(
        example(
            outlines=("batch['ids']=int64[2] cpu, batch[0]='[red]'",),
            eager_reasons={"warm-up": 3, "capture failed: [host-read]": 2},
        )
    )
    assert "batch['ids']=int64[2] cpu, batch[0]='[red]'" in text
    assert "capture failed: [host-read]: 2" in text


def test_report_says_when_nodes_are_not_counted() -> None:
    assert "not counted" in str(example(nodes=None))


def test_counts_start_at_nothing() -> None:
    one, two = Counts(), Counts()
    one.eager_reasons["warm-up"] += 1
    assert (two.captures, two.replays, two.eager_reasons.total()) == (0, 0, 0)


def test_report_before_the_first_call() -> None:
    report = stepgraph.capture(lambda x: x).report()
    assert report.backend == "not chosen yet"
    assert (report.graphs, report.replays, report.eager_calls, report.pool_bytes) == (0, 0, 0, 0)


def test_report_counts_what_happened() -> None:
    layer = torch.nn.Linear(4, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return layer(x).relu()

    with stepgraph.capture(forward, warmup=2, max_graphs=2) as step:
        for rows in (2, 2, 2, 2, 3, 3, 3):
            step(torch.ones(rows, 4))
        with pytest.warns(stepgraph.StepgraphWarning, match="max_graphs"):
            step(torch.ones(5, 4))
        report = step.report()
    assert report.step == "forward"
    assert report.backend == "tape"
    assert (report.graphs, report.captures, report.recaptures, report.segments) == (2, 2, 0, 2)
    assert report.replays == 3
    assert report.eager_calls == 5
    assert report.eager_reasons == {"warm-up": 4, "past max_graphs=2": 1}
    assert report.replays + report.eager_calls == 8
    assert [text.partition(", no")[0] for text in report.signatures] == ["x=f32[2, 4] cpu", "x=f32[3, 4] cpu"]
    assert report.static_bytes == (2 + 3) * 4 * 4
    assert report.pool_bytes > 0
    assert report.capture_seconds > 0
    assert report.nodes
    assert report.chains == tuple(f"graph ({report.nodes // 2} nodes)" for _ in range(2))


def test_report_of_a_closed_step_still_counts() -> None:
    step = stepgraph.capture(lambda x: x + 1, warmup=1)
    for _ in range(3):
        step(torch.ones(1))
    step.close()
    report = step.report()
    assert (report.graphs, report.replays, report.pool_bytes) == (0, 2, 0)


def test_report_distinguishes_optimizers_of_one_class() -> None:
    one, two = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(one.parameters(), fused=True), torch.optim.Adam(two.parameters())]

    def train(x: torch.Tensor) -> None:
        (one(x) + two(x)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    with stepgraph.capture(train) as step:
        for rows in (2, 2, 2, 2, 3, 3):
            step(torch.ones(rows, 4))
        report = step.report()
    assert report.optimizers == {
        "Adam": "inside the graph (fused: its step count is on the device)",
        "Adam#2": "eager, between graphs (its step count is on the host)",
    }


def test_report_counts_refused_calls() -> None:
    with stepgraph.capture(lambda x: x + 1, warmup=1, max_graphs=1, strict=True) as step:
        for _ in range(3):
            step(torch.ones(1))
        for size in (2, 3):
            with pytest.raises(stepgraph.SignatureMismatch):
                step(torch.ones(size))
        report = step.report()
    assert report.refused == report.to_dict()["refused"] == {"max-graphs": 2}
    assert report.verdict == "2 of 5 calls replayed; 2 refused with an error [max-graphs]; 1 ran eagerly: warm-up"


def test_report_places_no_optimizer_in_a_graph_that_is_not_there() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train(x: torch.Tensor) -> None:
        (weight * x).sum().backward()
        optimizer.step()

    with stepgraph.capture(train) as step:
        step(torch.ones(2))
        expected = "eager, without a graph; in a capture: inside the graph (SGD uses no step count)"
        assert step.report().optimizers == {"SGD": expected}
        for _ in range(3):
            step(torch.ones(2))
        assert step.report().optimizers == {"SGD": "inside the graph (SGD uses no step count)"}


@pytest.mark.parametrize(
    ("columns", "widths"), [("60", range(50, 61)), ("140", range(101, 141)), (None, range(90, 101))]
)
def test_report_prints_in_any_encoding_and_width(
    columns: str | None, widths: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)

    def größe(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with stepgraph.capture(größe, warmup=1) as step:
        for _ in range(3):
            step(torch.ones(1))
        report = step.report()
    for encoding in ("ascii", "latin-1", "utf-8"):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", out)
            print(report)
        out.seek(0)
        first, *rest = map(str.rstrip, out.read().splitlines())
        assert first == "2 of 3 calls replayed; 1 ran eagerly: warm-up"
        assert max(map(len, rest)) in widths
