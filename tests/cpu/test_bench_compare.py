"""The comparison of mechanisms: what is run, how rows are judged, and the report. Nothing is measured here."""

import dataclasses
import html.parser
from pathlib import Path
from typing import Any

import pytest

from stepgraph import recipes
from stepgraph.bench import report_html
from stepgraph.bench.compare import compare, largest_gap, left_at, plan
from stepgraph.bench.mechanisms import Mechanism, mechanisms_for, named
from stepgraph.bench.results import ResultFile, write_whole
from stepgraph.config.environment import Environment
from stepgraph.errors import InvalidArgument

H200 = Environment(compute_capability=(9, 0), device="cuda")
EAGER = Mechanism("eager", "eager", "eager")
AGAIN = Mechanism("eager-again", "eager, once more", "eager")
OURS = Mechanism("ours-whole", "local: full_iteration", "stepgraph")
COMPILED = Mechanism("compile", "torch.compile", "torch", changes_kernels=True)


def record(mechanism: Mechanism, number: int, step_ms: float, *losses: float) -> dict[str, Any]:
    return {
        "mechanism": mechanism.name,
        "pass": number,
        "step_ms": step_ms,
        "losses": {str(step): loss for step, loss in enumerate(losses or (3.0, 2.0), 1)},
        "tflops_per_gpu": 1.0,
        "busy_fraction": 0.5,
        "memory": {"reserved": 2**30},
        "timeline_us": [[0.0, 5.0], [10.0, 5.0]],
    }


def test_plan_runs_the_second_pass_backwards() -> None:
    jobs = plan([EAGER, AGAIN, OURS])
    assert [(number, mechanism.name) for number, mechanism in jobs] == [
        *[(0, "eager"), (0, "eager-again"), (0, "ours-whole")],
        *[(1, "ours-whole"), (1, "eager-again"), (1, "eager")],
    ]


def test_plan_leaves_out_what_is_done() -> None:
    jobs = plan([EAGER, OURS], [record(EAGER, 0, 1.0), record(OURS, 1, 1.0)])
    assert [(number, mechanism.name) for number, mechanism in jobs] == [(0, "ours-whole"), (1, "eager")]


def test_winner_is_the_fastest_with_eagers_losses() -> None:
    records = [record(EAGER, 0, 100.0), record(AGAIN, 0, 101.0), record(OURS, 0, 25.0)]
    wrong = dataclasses.replace(OURS, name="wrong")
    records.append(record(wrong, 0, 20.0, 3.0, 2.1))
    found = compare([EAGER, AGAIN, OURS, wrong], records)
    assert found.winner == "ours-whole"
    assert "4.00 times" in found.reason
    row = found.row("wrong")
    assert row is not None
    assert (row.left_eager_at, row.largest_gap) == (2, pytest.approx(0.1))


def test_winner_may_compile_if_losses_stay_close() -> None:
    records = [record(EAGER, 0, 100.0), record(AGAIN, 0, 100.0), record(COMPILED, 0, 50.0, 3.001, 2.001)]
    assert compare([EAGER, AGAIN, COMPILED], records).winner == "compile"
    records[-1]["losses"]["2"] = 9.0
    assert compare([EAGER, AGAIN, COMPILED], records).winner == "eager"


def test_winner_is_eager_within_its_own_spread() -> None:
    records = [record(EAGER, 0, 100.0), record(AGAIN, 0, 103.0), record(OURS, 0, 98.0)]
    found = compare([EAGER, AGAIN, OURS], records)
    assert found.winner == "eager"
    assert "3.0 %" in found.reason


def test_failed_mechanism_is_a_row_that_says_so() -> None:
    failed = {"mechanism": "ours-whole", "pass": 0, "error": "CaptureError: no"}
    found = compare([EAGER, OURS], [record(EAGER, 0, 100.0), failed])
    row = found.rows[-1]
    assert (row.step_ms, row.error) == (None, "CaptureError: no")


def test_comparison_without_eager_has_no_winner() -> None:
    found = compare([EAGER, OURS], [record(OURS, 0, 10.0)])
    assert found.winner is None


def test_losses_are_compared_where_both_have_them() -> None:
    assert left_at({"1": 1.0, "2": 2.0}, {"1": 1.0}) is None
    assert left_at({"1": 1.0, "10": 2.0, "9": 3.0}, {"9": 3.5, "10": 2.5, "1": 1.0}) == 9
    assert largest_gap({"1": 1.0}, {"2": 5.0}) == 0.0


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_mechanisms_of_every_recipe_are_legal(name: str) -> None:
    found = mechanisms_for(recipes.recipe(name), H200)
    names = [mechanism.name for mechanism in found]
    assert names[:2] == ["eager", "eager-again"]
    assert len(set(names)) == len(names)
    assert any(mechanism.whose == "stepgraph" for mechanism in found)


def test_mechanisms_leave_out_scopes_that_rules_forbid() -> None:
    cfg = recipes.llama3_8b()
    cfg.model.recompute_granularity, cfg.model.recompute_num_layers = "full", 1
    ours = [mechanism.name for mechanism in mechanisms_for(cfg, H200) if mechanism.whose == "stepgraph"]
    assert ours == ["ours-whole", "ours-whole-compile"]


def test_unknown_mechanism_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="did you mean eager"):
        named("eagr", mechanisms_for(recipes.gpt2_small(), H200))


class Checker(html.parser.HTMLParser):
    """Collects the tags, the addresses and the text of a page, and checks that tags are closed in order."""

    VOID = frozenset(("meta", "rect", "polyline", "p"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_report_is_whole_escaped_and_alone() -> None:
    evil = dataclasses.replace(OURS, title="<script>alert(1)</script>")
    failed = {"mechanism": "compile", "pass": 0, "error": "Error: <b>&"}
    found = compare([EAGER, evil, COMPILED], [record(EAGER, 0, 100.0), record(evil, 0, 25.0), failed])
    text = report_html.render("a <title>", {"GPU": "x & y"}, found)
    assert "<script" not in text
    assert "http" not in text
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.addresses == []
    words = " ".join(checker.words)
    assert "a <title>" in words
    assert "Error: <b>&" in words
    assert "100.00 ms" in words
    assert "4.00 times as fast as eager" in words
    assert "prefers-color-scheme: dark" in text


def test_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report_html.check_place(path)
    write_whole(path, "one")
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(InvalidArgument, match="cannot be written"):
        report_html.check_place(tmp_path / "missing" / "report.html")
    with pytest.raises(InvalidArgument, match="no HTML"):
        report_html.check_place(tmp_path / "report.txt")


def test_results_are_resumed_for_the_same_comparison_only(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    file = ResultFile(path, {"steps": 3}, {"GPU": "none"})
    assert file.load() == []
    failed = {"mechanism": "compile", "pass": 0, "error": "no"}
    file.save([record(EAGER, 0, 1.0), failed])
    assert [found["mechanism"] for found in file.load()] == ["eager"], "what failed runs again"
    with pytest.raises(InvalidArgument, match="of another comparison"):
        ResultFile(path, {"steps": 4}, {}).load()
    path.write_text("[]")
    with pytest.raises(InvalidArgument, match="no result of a comparison"):
        file.load()
