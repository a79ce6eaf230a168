"""A comparison as one HTML file to show to a colleague: no script, no address, light and dark, readable on a phone.

Everything that comes from a run (names, errors, losses) is escaped. Bars are HTML, curves and the timeline of kernels
are SVG; their colours come from the style sheet, so that both schemes work. `results.write_whole` writes the file.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.wording import counted
from stepgraph.lab.bench.compare import EARLY, Comparison, Row
from stepgraph.lab.bench.results import check_writable

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --dim: #667; --page: #fff; --line: #d8dce4; --bar: #9aa4b5;
  --ours: #2f6fdb; --bad: #b3261e; --c0: #667; --c1: #2f6fdb; --c2: #c2620e; --c3: #1b8a5a; --c4: #8b3fc1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --dim: #9aa4b5; --page: #14171d; --line: #333a47;
  --bar: #5b6577; --ours: #6ea0ff; --bad: #ff8a80; --c0: #9aa4b5; --c1: #6ea0ff; --c2: #f0a35e; --c3: #5fd0a0;
  --c4: #c79bff; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 60rem; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.dim { color: var(--dim); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .4rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, td.bad, th:last-child, td:last-child { text-align: left; white-space: normal; }
.row { display: grid; grid-template-columns: minmax(8rem, 16rem) 1fr 6rem; gap: .6rem; align-items: center;
  margin: .2rem 0; font-size: .9rem; }
.track { background: var(--line); height: .9rem; border-radius: .2rem; }
.fill { background: var(--bar); height: 100%; border-radius: .2rem; } .fill.ours { background: var(--ours); }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--dim); font-size: 12px; }
@media (max-width: 32rem) { .row { grid-template-columns: 1fr 5rem; } .row .track { grid-column: 1 / -1; } }
"""
_COLOURS = 5
_MAX_CURVES = 5


def check_place(path: Path) -> None:
    """Refuse a report that could not be written, before anything is run."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidArgument(
            f"--report {path} is no HTML file",
            rule="report-file",
            why="the report is one HTML file, written beside its place and renamed.",
            fix=f"--report {path.with_suffix('.html').name}",
        )
    check_writable(path)


def render(title: str, facts: Mapping[str, Any], found: Comparison) -> str:
    """Return the report's HTML."""
    good = [row for row in found.rows if row.step_ms is not None]
    winner = found.row(found.winner) if found.winner else None
    verdict = f"{winner.mechanism.title}: {found.reason}" if winner is not None else found.reason
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p><strong>{_text(verdict)}</strong></p>",
        _facts(facts),
        "<h2>Step time</h2>",
        _bars(good, lambda row: row.step_ms, "{:.2f} ms"),
        "<h2>GPU busy</h2>",
        _bars(good, lambda row: _percent(row.figures.get("busy_fraction")), "{:.0f} %", 100.0),
        "<h2>Peak memory</h2>",
        _bars(good, lambda row: _gib(row.figures.get("memory", {}).get("reserved")), "{:.2f} GiB"),
        "<h2>Loss</h2>",
        _curves(good),
        "<h2>Kernels of one step</h2>",
        _timelines(found),
        "<h2>All figures</h2>",
        _table(found),
    ]
    noise = f"Eager's own runs differ by {100 * found.noise:.1f} % in time"
    parts.append(
        f'<p class="dim">{noise}, and their losses are {"equal" if found.eager_equals_eager else "not equal"}.'
    )
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def _facts(facts: Mapping[str, Any]) -> str:
    shown = " &middot; ".join(f"{_text(name)}: {_text(value)}" for name, value in facts.items() if value is not None)
    return f'<p class="dim">{shown}</p>'


def _bars(rows: Sequence[Row], figure: Any, form: str, most: float | None = None) -> str:
    values = [(row, figure(row)) for row in rows]
    values = [(row, value) for row, value in values if value is not None]
    if not values:
        return '<p class="dim">Not measured on this device.</p>'
    longest = most or max(value for _, value in values) or 1.0
    lines = []
    for row, value in values:
        ours = " ours" if row.mechanism.whose == "stepgraph" else ""
        width = f"{100 * min(1.0, value / longest):.1f}%"
        lines.append(
            f'<div class="row"><span>{_text(row.mechanism.title)}</span>'
            f'<span class="track"><span class="fill{ours}" style="display:block;width:{width}"></span></span>'
            f"<span>{_text(form.format(value))}</span></div>"
        )
    return "\n".join(lines)


def _curves(rows: Sequence[Row]) -> str:
    """Losses of eager and the fastest mechanisms, over the steps; each is thinner, so that equal ones show as rims."""
    eager = [row for row in rows if row.mechanism.name == "eager"]
    chosen = (eager + [row for row in rows if row.mechanism.whose != "eager"])[:_MAX_CURVES]
    losses = [{int(step): loss for step, loss in row.figures["losses"].items() if loss is not None} for row in chosen]
    losses = [found for found in losses if found]
    if not losses:
        return '<p class="dim">No losses.</p>'
    values = [loss for found in losses for loss in found.values()]
    steps = [step for found in losses for step in found]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    lines = []
    for number, found in enumerate(losses):
        points = " ".join(
            f"{50 + 640 * (step - first) / max(1, last - first):.1f},"
            f"{190 - 170 * (loss - low) / ((high - low) or 1.0):.1f}"
            for step, loss in sorted(found.items())
        )
        style = f'fill="none" stroke="var(--c{number % _COLOURS})" stroke-width="{2 * (_MAX_CURVES - number)}"'
        lines.append(f'<polyline {style} points="{points}"/>')
    axes = (
        f'<text x="0" y="24">{high:.3f}</text><text x="0" y="194">{low:.3f}</text>'
        f'<text x="50" y="212">step {first}</text><text x="690" y="212" text-anchor="end">step {last}</text>'
    )
    names = " &middot; ".join(
        f'<span style="color:var(--c{number % _COLOURS})">{_text(row.mechanism.title)}</span>'
        for number, row in enumerate(chosen)
    )
    return f'<svg viewBox="0 0 700 220" role="img" aria-label="Loss curves">{axes}{"".join(lines)}</svg><p>{names}</p>'


def _timelines(found: Comparison) -> str:
    """The kernels of one step, eager above the winner, on one scale."""
    rows = [row for row in (found.row("eager"), found.row(found.winner or "")) if row is not None]
    rows = [row for row in rows if row.figures.get("timeline_us")]
    if not rows:
        return '<p class="dim">No kernels were seen: there is no GPU here.</p>'
    longest = max(start + length for row in rows for start, length in row.figures["timeline_us"])
    parts = []
    for number, row in enumerate({row.mechanism.name: row for row in rows}.values()):
        marks = "".join(
            f'<rect x="{700 * start / longest:.2f}" y="{26 + 60 * number}" height="26" fill="var(--ours)" '
            f'width="{max(0.15, 700 * length / longest):.2f}"/>'
            for start, length in row.figures["timeline_us"]
        )
        parts.append(f'<text x="0" y="{20 + 60 * number}">{_text(row.mechanism.title)}</text>{marks}')
    height = 30 + 60 * len(parts)
    label = f"Kernels of one step; the whole width is {longest / 1e3:.1f} ms"
    return (
        f'<svg viewBox="0 0 700 {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f'<p class="dim">{label}. Gaps are times in which the GPU waits.{"".join(map(_cut, rows))}</p>'
    )


def _cut(row: Row) -> str:
    """Say that a picture is not whole."""
    shown, kernels = len(row.figures["timeline_us"]), row.figures.get("kernels") or 0
    return (
        f" {_text(row.mechanism.title)}: the first {shown} of {counted(kernels, 'kernels')}." if shown < kernels else ""
    )


def _table(found: Comparison) -> str:
    head = (
        *("mechanism", "step ms", "between passes", "p90", "audits", "TFLOP/s/GPU", "busy", "kernels", "reserved GiB"),
        *("capture s", "losses against eager", "remarks"),
    )
    cells = {row.mechanism.name: cells_of(row) for row in found.rows if row.step_ms is not None}
    shown = [place for place in range(len(head)) if not cells or any(row[place] for row in cells.values())]
    lines = ["<tr>" + "".join(f"<th>{_text(head[place])}</th>" for place in shown) + "</tr>"]
    for row in found.rows:
        if row.step_ms is None:
            error = f'<td colspan="{len(shown) - 1}" class="bad">{_text(row.error)}</td>'
            lines.append(f"<tr><td>{_text(row.mechanism.title)}</td>{error}</tr>")
            continue
        known = cells[row.mechanism.name]
        lines.append("<tr>" + "".join(f"<td>{_text(known[place])}</td>" for place in shown) + "</tr>")
    remark = f'<p class="dim">{_text(AUDITS)}</p>' if any(map(audits_in_words, found.rows)) else ""
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>{remark}'


def cells_of(row: Row) -> list[str]:
    """The cells of a row that ran, for the table of the report and of the terminal."""
    figures = row.figures
    return [
        row.mechanism.title,
        f"{row.step_ms:.2f}",
        "" if row.spread is None else f"{100 * row.spread:.1f} %",
        _or_nothing(row.p90_ms, "{:.2f}"),
        audits_in_words(row),
        f"{figures['tflops_per_gpu']:.1f}",
        _or_nothing(_percent(figures.get("busy_fraction")), "{:.0f} %"),
        _or_nothing(figures.get("kernels"), "{}"),
        _or_nothing(_gib(figures.get("memory", {}).get("reserved")), "{:.2f}"),
        _or_nothing(figures.get("capture_seconds") or None, "{:.2f}"),
        losses_in_words(row),
        remarks(row),
    ]


def _or_nothing(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


AUDITS = (
    "An audit records a call again and compares it with its graph, at replays 1, 2, 4, ... `audits` counts the timed "
    "steps with one, and what they added in all; p90 is that of the other steps."
)
"""The remark below a table with audits."""


def audits_in_words(row: Row) -> str:
    """How many timed steps had an audit, and the time that they added; empty if none had."""
    steps, seconds = row.audits
    return f"{steps}: {seconds:.2f} s" if steps else ""


def losses_in_words(row: Row) -> str:
    """How the losses of a row compare with eager's, or with those of the model of its own that it trains."""
    reference = row.mechanism.reference
    if row.mechanism.name == reference:
        return "the reference" if reference == "eager" else "other weights: loss not comparable"
    if not row.is_compared:
        return f"not compared: {reference} did not run"
    whose = "" if reference == "eager" else f" {reference}:"
    if row.left_eager_at is None:
        return f"{whose} equal".strip()
    if row.reference_varies and not row.diverges and not row.mechanism.changes_kernels:
        return f"differ from step {row.left_eager_at}{_by(row.largest_gap)}, as eager's do from its own"
    if row.diverges or not row.mechanism.changes_kernels:
        return f"{whose} diverge from step {row.left_eager_at}{_by(row.largest_gap)}".strip()
    if row.is_as_compiled:
        return "those of torch.compile, bit for bit"
    rounding = f"other rounding: {_percents(row.early_gap)} off by step {EARLY}, {_percents(row.last_gap)} at the last"
    return f"{whose} {rounding}".strip()


def remarks(row: Row) -> str:
    """What else is to be said of a row: a pass that failed, losses without numbers, what torch compiled."""
    parts = [row.error] if row.error else []
    lost = [int(step) for step, loss in row.figures.get("losses", {}).items() if loss is None]
    if lost:
        parts.append(f"the loss is not finite from step {min(lost)}")
    compiler = row.figures.get("compiler")
    if compiler:
        skipped = compiler.get("cuda_graphs_skipped")
        words = [f"compiled as {counted(compiler['graphs'], 'graphs')}", counted(compiler["breaks"], "breaks")]
        parts.append(", ".join(words + ([f"{counted(skipped, 'CUDA graphs')} skipped"] if skipped else [])))
    return "; ".join(parts)


def _by(gap: float) -> str:
    return f", by {gap:.2g} at most" if math.isfinite(gap) else ""


def _percents(part: float) -> str:
    return f"{100 * part:.2g} %"
