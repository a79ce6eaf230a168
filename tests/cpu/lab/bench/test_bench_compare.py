"""The comparison of mechanisms: what is run, how rows are judged, and the report. Nothing is measured here."""

import contextlib
import dataclasses
import html.parser
import io
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from stepgraph.commands.bench import _comparison_table
from stepgraph.config.environment import Environment
from stepgraph.core.errors import InvalidArgument
from stepgraph.lab import recipes
from stepgraph.lab.bench import megatron_core, report_html
from stepgraph.lab.bench.compare import Comparison, compare, diverges, largest_gap, left_at, plan, seconds_left
from stepgraph.lab.bench.mechanisms import CopiedResults, Mechanism, mechanisms_for, named, select
from stepgraph.lab.bench.results import ResultFile, write_whole
from stepgraph.lab.bench.run import Clock
from stepgraph.lab.train.iteration import ForwardStep, forward_backward
from stepgraph.tools.timeline import StepTimes

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
        "step_ms_p90_steady": step_ms,
        "tflops_per_gpu": 1.0,
        "busy_fraction": 0.5,
        "memory": {"reserved": 2**30},
        "timeline_us": [[0.0, 5.0], [10.0, 5.0]],
    }


def shown_table(found: Comparison, missing: dict[str, str] | None = None) -> str:
    shown = Console(width=80, file=io.StringIO())
    shown.print(_comparison_table("title", found, missing or {}, Path("r.json")))
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


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


def test_graphs_of_compiled_kernels_are_held_against_them() -> None:
    inside = Mechanism("ours-whole-compile", "compiled inside", "stepgraph", changes_kernels=True)
    records = [record(EAGER, 0, 100.0), record(COMPILED, 0, 50.0, 3.001, 2.001), record(inside, 0, 20.0, 3.001, 2.001)]
    found = compare([EAGER, COMPILED, inside], records)
    assert (found.winner, found.reason) == (
        inside.name,
        "5.00 times as fast as eager, with the losses of torch.compile",
    )
    words = {row.mechanism.name: report_html.losses_in_words(row) for row in found.rows}
    assert words["ours-whole-compile"] == "those of torch.compile, bit for bit"
    assert words["compile"] == "other rounding: 0.05 % off by step 3, 0.05 % at the last"
    records[-1]["losses"]["2"] = 2.002
    row = compare([EAGER, COMPILED, inside], records).row(inside.name)
    assert row is not None
    assert not row.is_as_compiled
    records.append(record(COMPILED, 1, 51.0, 3.001, 2.001))  # it equals itself, so that a graph of it must equal it
    found = compare([EAGER, COMPILED, inside], records)
    assert (found.compiled_equals_compiled, found.winner) == (True, "compile")
    records[-1]["losses"]["2"] = 2.0011
    assert compare([EAGER, COMPILED, inside], records).winner == inside.name


def test_rounding_that_training_amplifies_is_no_divergence() -> None:
    eager = {str(step): loss for step, loss in enumerate((11.138, 8.054, 6.921, 6.171, 2.0), 1)}
    compiled = {str(step): loss for step, loss in enumerate((11.138, 8.055, 6.923, 6.5, 1.8), 1)}
    assert not diverges(eager, compiled)
    assert not diverges(eager, eager)
    assert not diverges({}, eager)
    for step, loss in (("1", 11.3), ("3", 6.8), ("5", 2.3), ("5", None), ("2", None)):
        assert diverges(eager, compiled | {step: loss})


def test_losses_are_not_held_against_an_eager_that_varies() -> None:
    records = [record(EAGER, 0, 100.0), record(AGAIN, 0, 100.0, 3.0, 2.01), record(OURS, 0, 50.0, 3.0, 2.015)]
    found = compare([EAGER, AGAIN, OURS], records)
    assert (found.eager_equals_eager, found.winner) == (False, "ours-whole")
    words = {row.mechanism.name: report_html.losses_in_words(row) for row in found.rows}
    assert words["ours-whole"] == "differ from step 2, by 0.015 at most, as eager's do from its own"
    records[-1]["losses"]["2"] = 9.0
    row = compare([EAGER, AGAIN, OURS], records).row("ours-whole")
    assert row is not None
    assert report_html.losses_in_words(row).startswith("diverge")


@pytest.mark.parametrize(
    ("again_ms", "ours_ms", "winner", "reason"),
    [
        (100.0, 96.0, "eager", 'nothing saves 5 % of its step; "local: full_iteration" saves 4.0 %'),
        (100.0, 95.0, "ours-whole", "1.05 times as fast as eager, with the losses of eager"),
        (109.0, 93.0, "eager", "nothing saves 8 % of its step, by which runs of one mechanism differ; "),
        (210.0, 40.0, "ours-whole", "2.50 times as fast as eager"),
        (100.0, 101.0, "eager", "nothing saves 5 % of its step"),
    ],
)
def test_winner_saves_what_advise_asks_for_or_is_eager(
    again_ms: float, ours_ms: float, winner: str, reason: str
) -> None:
    records = [record(EAGER, 0, 100.0), record(AGAIN, 0, again_ms), record(OURS, 0, ours_ms)]
    found = compare([EAGER, AGAIN, OURS], records)
    assert found.winner == winner
    assert found.reason.startswith(reason)


SCOPED = dataclasses.replace(OURS, name="ours-te-attn", title="transformer_engine: attn")


@pytest.mark.parametrize(
    ("rival", "rival_ms", "rival_bytes", "winner", "price"),
    [
        (COMPILED, (41.5, 41.5), 3 << 30, "compile", "saves 3.6 % more, too little for what it asks of a program"),
        (COMPILED, (43.0, 43.0), 1 << 29, "ours-whole", ""),
        (COMPILED, (44.0, 47.0), 1 << 29, "ours-whole", ""),  # beyond the spread of its passes
        (COMPILED, (42.0, 47.0), 1 << 29, "compile", "saves 10.1 % more"),
        (SCOPED, (41.0, 41.0), 1 << 30, "ours-te-attn", "saves 2.4 % more, and takes more memory"),
        (SCOPED, (41.0, 41.0), 3 << 30, "ours-whole", ""),
        (SCOPED, (41.0, 41.0), None, "ours-whole", ""),  # memory is not counted here
    ],
)
def test_winner_of_nearly_equal_is_simpler_or_smaller(
    rival: Mechanism, rival_ms: tuple[float, float], rival_bytes: int | None, winner: str, price: str
) -> None:
    records = [record(EAGER, 0, 100.0), record(EAGER, 1, 100.1)]
    ours_bytes = None if rival_bytes is None else 2 << 30
    records += [with_memory(record(OURS, number, 40.0), ours_bytes) for number in (0, 1)]
    records += [with_memory(record(rival, number, rival_ms[number]), rival_bytes) for number in (0, 1)]
    found = compare([EAGER, OURS, rival], records)
    assert found.winner == winner
    assert price in found.reason
    assert ("% more" in found.reason) == bool(price)


def with_memory(row: dict[str, Any], size: int | None) -> dict[str, Any]:
    return row | {"memory": {"reserved": size}}


def test_failed_mechanism_is_a_row_that_says_so() -> None:
    failed = {"mechanism": "ours-whole", "pass": 0, "error": "CaptureError: no"}
    found = compare([EAGER, OURS], [record(EAGER, 0, 100.0), failed])
    row = found.rows[-1]
    assert (row.step_ms, row.error) == (None, "CaptureError: no")


def test_mechanism_that_fails_in_one_pass_says_so() -> None:
    failed = {"mechanism": "ours-whole", "pass": 1, "error": "RuntimeError: <gone>"}
    found = compare([EAGER, OURS], [record(EAGER, 0, 100.0), record(OURS, 0, 25.0), failed])
    row = found.row("ours-whole")
    assert row is not None
    assert (row.step_ms, row.error) == (25.0, "pass 2 failed: RuntimeError: <gone>")
    assert found.winner == "eager", "nobody relies on what fails now and then"
    assert "RuntimeError: &lt;gone&gt;" in report_html.render("t", {}, found)
    assert "local: full_iteration: pass 2 failed: RuntimeError: <gone>" in shown_table(found)


def test_eager_that_fails_in_one_pass_is_still_compared_with() -> None:
    failed = {"mechanism": "eager", "pass": 1, "error": "RuntimeError: gone"}
    found = compare([EAGER, OURS], [record(EAGER, 0, 100.0), failed, record(OURS, 0, 25.0)])
    assert found.winner == "ours-whole"


def test_comparison_without_eager_has_no_winner() -> None:
    found = compare([EAGER, OURS], [record(OURS, 0, 10.0)])
    assert (found.winner, found.reason) == (None, "eager was not asked for, so there is nothing to compare with")
    failed = {"mechanism": "eager", "pass": 0, "error": "no"}
    found = compare([EAGER, OURS], [record(OURS, 0, 10.0), failed])
    assert (found.winner, found.reason) == (None, "eager failed, so there is nothing to compare with")


def test_losses_that_are_not_finite_are_shown_and_compared(tmp_path: Path) -> None:
    lost = float("nan")
    records = [record(EAGER, 0, 100.0, 3.0, lost), record(AGAIN, 0, 100.0, 3.0, lost), record(OURS, 0, 50.0, 3.0, lost)]
    file = ResultFile(tmp_path / "bench.json", {"steps": 2}, {})
    file.save(records)
    assert "NaN" not in file.path.read_text()
    found = compare([EAGER, AGAIN, OURS], file.load())
    assert (found.eager_equals_eager, found.winner) == (True, "ours-whole")
    page = report_html.render("t", {}, found)
    assert "nan" not in page
    assert "the loss is not finite from step 2" in page
    file.save([*records[:2], record(OURS, 0, 50.0, 3.0, 2.0)])
    row = compare([EAGER, AGAIN, OURS], file.load()).row("ours-whole")
    assert row is not None
    assert report_html.losses_in_words(row) == "diverge from step 2"


def test_counts_of_the_compiler_are_shown() -> None:
    compiler = {"graphs": 11, "breaks": 1, "cuda_graphs_skipped": 0}
    records = [record(EAGER, 0, 100.0), record(COMPILED, 0, 50.0) | {"compiler": compiler}]
    found = compare([EAGER, COMPILED], records)
    assert "torch.compile: compiled as 11 graphs, 1 break" in shown_table(found)
    compiler["cuda_graphs_skipped"] = 2
    assert "11 graphs, 1 break, 2 CUDA graphs skipped" in report_html.render("t", {}, found)


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


def test_only_takes_names_and_patterns() -> None:
    known = mechanisms_for(recipes.gpt2_small(), H200)
    words = "ours-whole, eager*,compile,ours-te-attn,ours-whole-compile"
    assert [mechanism.name for mechanism in select(words, known)] == [
        *("eager", "eager-again", "compile", "ours-te-attn", "ours-whole", "ours-whole-compile"),
    ]
    assert [mechanism.name for mechanism in select("ours-local-attn+mlp", known)] == ["ours-local-attn+mlp"]


@pytest.mark.parametrize("words", ["eager,nothing-*", "ours-whol", "", ","])
def test_only_refuses_what_matches_nothing(words: str) -> None:
    with pytest.raises(InvalidArgument, match="no mechanism of this comparison"):
        select(words, mechanisms_for(recipes.gpt2_small(), H200))


def test_no_mechanism_has_a_comma_in_its_name() -> None:
    for name in recipes.RECIPES:
        assert not any("," in mechanism.name for mechanism in mechanisms_for(recipes.recipe(name), H200))


def test_time_left_is_estimated_from_what_ran() -> None:
    jobs = plan([EAGER, COMPILED, OURS])
    assert seconds_left(jobs, []) is None
    done = [record(EAGER, 0, 1.0) | {"job_s": 4.0}, record(COMPILED, 0, 1.0) | {"job_s": 40.0}]
    assert seconds_left(jobs, done) == pytest.approx(22 + 22 + 40 + 4), "the mean for what has not run"
    assert seconds_left(jobs[:2], done) == 0


def test_audited_steps_are_shown_beside_the_others() -> None:
    times = StepTimes((300.0, 100.0, 101.0, 102.0, 400.0), frozenset({0, 4}))
    assert times.steady == (100.0, 101.0, 102.0)
    assert times.audit_ms == pytest.approx(199 + 299)
    assert times.median == 102.0, "no step is left out"
    audits = {"steps": [0, 4], "seconds": 0.498, "in_all": 6}
    found = compare([EAGER, OURS], [record(EAGER, 0, 100.0), record(OURS, 0, 25.0) | {"audits": audits}])
    text = report_html.render("t", {}, found)
    assert "<td>2: 0.50 s</td>" in text
    assert report_html.AUDITS.split(",")[0] in text
    assert report_html.AUDITS not in report_html.render("t", {}, compare([EAGER], [record(EAGER, 0, 100.0)]))


def test_p90_and_audits_are_those_of_all_passes() -> None:
    passes = [(10.0, 11.0, 90.0), (20.0, 21.0, 80.0)]
    records = [
        record(OURS, number, each[1])
        | {"step_ms_each": list(each), "audits": {"steps": [2], "seconds": 0.25, "in_all": 1}}
        for number, each in enumerate(passes)
    ]
    row = compare([EAGER, OURS], [record(EAGER, 0, 100.0), *records]).row("ours-whole")
    assert row is not None
    assert row.p90_ms == pytest.approx(20.7), "of 10, 11, 20 and 21"
    assert report_html.audits_in_words(row) == "2: 0.50 s"


def test_clock_tells_which_steps_had_an_audit() -> None:
    clock = Clock(torch.device("cpu"), first=2, steps=3)
    audits = iter((1, 1, 2, 2))
    clock.audits = lambda: next(audits)
    for step in range(8):
        clock("replay", step)
    times, _ = clock.result()
    assert len(times.each) == 3
    assert times.audited == {1}


class Overwrites(nn.Module):
    """A model whose result lies where the next call writes, as with torch's own graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.place.copy_(tokens)


@pytest.mark.parametrize(("copies", "mean"), [(False, 3.0), (True, 2.0)])
def test_copied_results_outlive_the_next_replay(copies: bool, mean: float) -> None:
    step = ForwardStep(checks_host=True)
    if copies:
        step = CopiedResults.of(step)
        assert step.checks_host, "all else is as it was"
    found = forward_backward(
        forward_step_func=step,
        data_iterator=iter([{"tokens": torch.tensor(1.0)}, {"tokens": torch.tensor(3.0)}]),
        model=Overwrites(),
        num_microbatches=2,
        forward_only=True,
    )
    assert float(found.loss) == mean


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


def test_report_says_where_its_picture_is_cut() -> None:
    records = [record(EAGER, 0, 10.0) | {"kernels": 2}, record(OURS, 0, 5.0) | {"kernels": 30_000}]
    page = report_html.render("t", {}, compare([EAGER, OURS], records))
    assert "local: full_iteration: the first 2 of 30000 kernels." in page
    assert "eager: the first" not in page


def test_report_leaves_out_what_is_not_known() -> None:
    records = [record(EAGER, 0, 10.0), record(OURS, 0, 5.0)]
    for each in records:
        each |= {"busy_fraction": None, "kernels": None, "memory": {"reserved": None}, "tflops_per_gpu": 1.0}
    page = report_html.render("t", {"CUDA": None, "torch": "2"}, compare([EAGER, OURS], records))
    assert "CUDA" not in page
    assert "<th>step ms</th>" in page
    assert not any(f"<th>{name}</th>" in page for name in ("busy", "kernels", "reserved GiB"))


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


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the system refuse longer files, as a full device does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_outlive_a_full_device(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "bench.json", {"steps": 3}, {})
    file.save([record(EAGER, 0, 1.0)])
    with files_of_at_most(4096), pytest.raises(InvalidArgument, match="could not be written") as raised:
        file.save([record(EAGER, 0, 1.0), record(OURS, 0, 1.0) | {"step_ms_each": [1.0] * 4096}])
    assert "add --resume" in raised.value.fix
    assert [found["mechanism"] for found in file.load()] == ["eager"]
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"], "nothing half-written is left"


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


def test_table_has_errors_and_no_empty_columns() -> None:
    failed = {"mechanism": "compile", "pass": 0, "error": "RuntimeError: [no]"}
    good = [record(EAGER, 0, 100.0) | {"busy_fraction": None, "memory": {"reserved": None}}, failed]
    text = " ".join(shown_table(compare([EAGER, COMPILED], good), {"x": "needs a GPU"}).split())
    assert "RuntimeError: [no]" in text
    assert "not run: x (needs a GPU)" in text
    assert "GiB" not in text
    assert "audits" not in text


def test_table_fits_a_terminal() -> None:
    title = "transformer_engine: attn,moe_router,moe_preprocess"
    ours = dataclasses.replace(OURS, title=title)
    audits = {"steps": [0, 4, 12], "seconds": 12.5, "in_all": 7}
    records = [record(EAGER, 0, 1234.56), record(ours, 0, 1111.1, 3.0, 2.5) | {"audits": audits}]
    text = shown_table(compare([EAGER, ours], records))
    assert max(map(len, text.splitlines())) <= 80
    whole = "".join(text.split())
    for word in ("1234.56", "1111.10", "3:12.50s", "1.00"):
        assert word in whole
    letters = sorted(title.replace(" ", ""))
    assert all(whole.count(letter) >= letters.count(letter) for letter in letters), "nothing of a name is cut off"


NONE, LAYERS = (
    Mechanism(f"megatron-{graphs}", graphs, "m", reference="megatron-none") for graphs in ("none", "layers")
)


def test_model_of_its_own_is_compared_with_its_own_eager() -> None:
    records = [record(EAGER, 0, 100.0), record(NONE, 0, 90.0, 5.0, 4.0), record(LAYERS, 0, 10.0, 5.0, 4.5)]
    found = compare([EAGER, NONE, LAYERS], records)
    words = {row.mechanism.name: report_html.losses_in_words(row) for row in found.rows}
    assert words["megatron-none"] == "other weights: loss not comparable"
    assert words["megatron-layers"] == "megatron-none: diverge from step 2, by 0.5 at most"
    assert found.winner == "eager", "another model is no rival"


def test_losses_without_a_reference_are_not_called_equal() -> None:
    found = compare([OURS], [record(OURS, 0, 10.0)])
    assert report_html.losses_in_words(found.rows[0]) == "not compared: eager did not run"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt2_small", "needs a GPU"),
        ("qwen3_30b_a3b", "not built for a model of kind moe"),
        ("nemotron_h", "not built for a model of kind hybrid"),
    ],
)
def test_megatron_rows_say_what_is_not_built(name: str, why: str) -> None:
    cfg = recipes.recipe(name)
    rows = select("megatron-*", mechanisms_for(cfg, H200))
    assert [mechanism.missing(torch.device("cpu"), cfg) for mechanism in rows] == [why] * 3


def test_package_within_a_missing_one_is_missing() -> None:
    mechanism = dataclasses.replace(EAGER, package="no_such_package.core")
    assert mechanism.missing(torch.device("cpu"), recipes.gpt2_small()) == "no_such_package.core is not installed"


def test_megatron_shape_is_that_of_the_recipe() -> None:
    shape = megatron_core.Shape.of(recipes.gpt2_small().model)
    found = [shape.settings[name] for name in ("num_layers", "ffn_hidden_size", "activation_func", "normalization")]
    assert found == [12, 3072, torch.nn.functional.gelu, "LayerNorm"]
    assert (shape.vocab_size, shape.position_embedding_type) == (50257, "learned_absolute")
    with pytest.raises(InvalidArgument, match="not built here for a model of kind moe"):
        megatron_core.Shape.of(recipes.qwen3_30b_a3b().model)
