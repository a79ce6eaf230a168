"""The base of all reports: the verdict comes first, and nothing that is zero is printed."""

import re
from typing import Any

import pytest

from stepgraph import CallablesReport, ModuleReport
from stepgraph.engine.call.report import GraphReport
from stepgraph.engine.parts.modules.report import ModuleRow
from stepgraph.engine.parts.stages.report import StageReport, StageRow

FAILED = "capture failed: [host-read]"


def modules(forwards: int = 0, reasons: dict[str, int] | None = None) -> ModuleReport:
    counts: dict[str, Any] = {"backwards": forwards, "eager_calls": sum((reasons or {}).values())}
    row = ModuleRow(
        "layers.0",
        0,
        0,
        0,
        forwards,
        **counts,
        eager_reasons=reasons or {},
        recapture_reasons={},
        refused={},
        static_bytes=0,
    )
    return ModuleReport(rows=(row,), backend="tape")


def stages(steps: dict[str, int]) -> StageReport:
    return StageReport(
        rows=(StageRow(1, 0, 0, 0, 0, 0),), steps=steps, recaptures={}, refused={}, order=0, num_buffers=0
    )


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (modules(), "no calls yet"),
        (modules(5), "5 of 5 calls replayed"),
        (modules(97, {"warm-up": 3}), "97 of 100 calls replayed; 3 ran eagerly: warm-up"),
        (modules(0, {"warm-up": 3, FAILED: 2}), f"0 of 5 calls replayed; 5 ran eagerly, 2 of them: {FAILED}"),
        (stages({}), "no steps yet"),
        (stages({"replay": 8, "warm-up": 3}), "8 of 11 steps replayed; 3 ran eagerly: warm-up"),
        (CallablesReport(), "no calls yet"),
        (
            CallablesReport(forwards=4, eager_calls=1),
            "4 of 5 calls replayed; 1 ran eagerly: an earlier result was still held",
        ),
        (
            CallablesReport(eager_reason="cuda_graph_impl is none"),
            "no graphs, all calls run eagerly: cuda_graph_impl is none",
        ),
    ],
)
def test_report_verdict_comes_first_and_no_zeros(report: GraphReport, verdict: str) -> None:
    assert report.verdict == report.to_dict()["verdict"] == verdict
    first, *rest = str(report).splitlines()
    assert first == verdict
    assert not [line for line in rest if re.search(r"(?<![\d.\w])0(?![\d.])", line)]


def test_report_dicts_keep_what_machines_read() -> None:
    assert modules(2).to_dict()["modules"][0]["forwards"] == 2
    assert {"graphs", "replays", "eager_calls", "recaptures", "fixed_order"} <= set(modules().to_dict())
    assert stages({"replay": 1}).to_dict()["rows"][0]["stage"] == 1
    assert CallablesReport().to_dict()["num_graphs"] == 0
