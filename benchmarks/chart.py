"""Draw README's chart and write its table of figures, both from the committed results.

`python benchmarks/chart.py` writes `docs/images/step_time-light.svg` and `-dark.svg`, and rewrites the table between
the marks in README.md. The figures are those of a comparison, `stepgraph bench --compare`, if `COMPARISON` names its
file, or else of the newest `results/*/whole_step.json` that has every variant shown. The output depends on the results
alone, so that a test can compare it with what is committed.

Each bar is the time of one training step. Its dark part is the time in which the GPU computes (`busy_ms`); the pale
part is the time in which it waits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"
COMPARISON: str | None = "2026-11-18-h200-d/compare_gpt2_small.json"
"""The comparison to draw, a file in `results` such as "2026-11-18-h200-d/compare_gpt2_small.json"."""
MECHANISMS = {
    "eager": "eager",
    "compile": "torch.compile",
    "reduce-overhead": "torch.compile, reduce-overhead",
    "torch-callables": "torch make_graphed_callables",
    "te-callables": "Transformer Engine make_graphed_callables",
    "ours-te-attn": "stepgraph, attention",
    "ours-te-layers": "stepgraph, layers",
    "ours-whole": "stepgraph, whole step",
    "ours-whole-compile": "stepgraph + torch.compile",
}
"""The mechanisms shown of a comparison, in this order, and what they are called; what was not run is left out."""
WORKLOAD = "gpt2-small"
BUSY_WORKLOAD = "gpt2-small-mb8"
VARIANTS = {
    "eager": "eager",
    "compile": "torch.compile",
    "reduce-overhead": "torch.compile, reduce-overhead",
    "hand-full+opt": "graph written by hand",
    "ours": "stepgraph",
    "ours+compile": "stepgraph + torch.compile",
}
"""The variants shown, in this order, and what they are called."""
MARKS = ("<!-- figures -->\n", "<!-- /figures -->\n")
GIB = 2**30


@dataclass(frozen=True)
class Palette:
    """The colours of one theme."""

    text: str
    faint: str
    busy: str
    waiting: str
    ours_busy: str
    ours_waiting: str


PALETTES = {
    "light": Palette("#1f2328", "#59636e", "#6e7781", "#d8dee4", "#0969da", "#a8d1ff"),
    "dark": Palette("#e6edf3", "#9198a1", "#8b949e", "#30363d", "#4493f8", "#1f4173"),
}

WIDTH, LEFT, RIGHT = 800, 250, 110
TOP, BAR, PITCH = 64, 22, 34


@dataclass(frozen=True)
class Bar:
    """One way to run a step; without times if it failed."""

    label: str
    is_ours: bool
    step_ms: float | None
    busy_ms: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What is drawn and written."""

    path: Path
    bars: tuple[Bar, ...]
    """Eager first."""
    note: str
    """What was run, and where."""
    table: str

    @property
    def drawn(self) -> list[tuple[Bar, float]]:
        """The bars that have a time, with it."""
        return [(bar, bar.step_ms) for bar in self.bars if bar.step_ms is not None]


def read() -> Figures:
    """Return the figures of the results that are shown."""
    if COMPARISON is not None:
        return of_comparison(RESULTS / COMPARISON)
    path, result = newest_result()
    return of_whole_step(path, result)


def newest_result() -> tuple[Path, dict[str, Any]]:
    """Return the newest whole-step result that has every variant of the chart, and where it is stored."""
    found = []
    for path in RESULTS.glob("*/whole_step.json"):
        result = json.loads(path.read_text())
        names = {r["variant"] for r in result["records"] if r["workload"] == WORKLOAD and "step_ms" in r}
        if names >= VARIANTS.keys():
            found.append((result["environment"]["date"], path.parent.name, path, result))
    *_, path, result = max(found, key=lambda entry: entry[:2])
    return path, result


def of_whole_step(path: Path, result: dict[str, Any]) -> Figures:
    """Return the figures of a result of `whole_step.py`."""
    rows, environment = records(result, WORKLOAD), result["environment"]
    bars = tuple(
        Bar(label, name.startswith("ours"), rows[name]["step_ms"], rows[name]["busy_ms"])
        for name, label in VARIANTS.items()
    )
    note = f"GPT-2-small's shape, 4 microbatches of one sequence, bf16, {environment['GPU']}, "
    note += f"torch {environment['torch']}, {environment['date']}"
    return Figures(path, bars, note, whole_step_table(path, result))


def records(result: dict[str, Any], workload: str) -> dict[str, dict[str, Any]]:
    """Return the records of one workload by variant."""
    return {r["variant"]: r for r in result["records"] if r["workload"] == workload and "step_ms" in r}


def of_comparison(path: Path) -> Figures:
    """Return the figures of a result of `stepgraph bench --compare`."""
    from stepgraph.config.container import ConfigContainer
    from stepgraph.config.environment import Environment
    from stepgraph.lab.bench.compare import compare
    from stepgraph.lab.bench.mechanisms import all_mechanisms
    from stepgraph.lab.bench.report_html import losses_in_words

    result = json.loads(path.read_text())
    cfg, facts = ConfigContainer.from_dict(result["request"]["config"]), result["facts"]
    found = compare(all_mechanisms(cfg, Environment(device=result["request"]["device"])), result["records"])
    shown = [(label, row) for name, label in MECHANISMS.items() if (row := found.row(name)) is not None]
    eager = found.row("eager")
    if eager is None or eager.step_ms is None:
        raise SystemExit(f"{path}: eager did not run, so there is nothing to compare with")
    lines = ["| | step | against eager | peak memory | losses against eager |", "|---|---|---|---|---|"]
    for label, row in shown:
        if row.step_ms is None:
            lines.append(f"| {label} | failed | | | |")
            continue
        reserved = row.figures["memory"]["reserved"]
        memory = "" if reserved is None else f"{reserved / GIB:.2f} GiB"
        gain = f"{eager.step_ms / row.step_ms:.1f}x"
        lines.append(f"| {label} | {row.step_ms:.1f} ms | {gain} | {memory} | {losses_in_words(row)} |")
    model, train = cfg.model, cfg.train
    count = train.global_batch_size // train.micro_batch_size
    what = (
        f"{model.num_layers} layers of width {model.hidden_size}, {count} microbatches of {train.micro_batch_size} x "
    )
    what += f"{model.seq_length} tokens, bf16, {facts['GPU']}, torch {facts['torch']}, {facts['date']}"
    where = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    lines += ["", f"`stepgraph bench --compare`: {what}: [all figures]({where})."]
    bars = tuple(
        Bar(label, row.mechanism.whose == "stepgraph", row.step_ms, row.figures.get("busy_ms") or 0.0)
        for label, row in shown
    )
    return Figures(path, bars, what, "\n".join(lines) + "\n")


def chart(figures: Figures, palette: Palette) -> str:
    """Return the chart as the text of an SVG file."""
    drawn = figures.drawn
    scale = (WIDTH - LEFT - RIGHT) / max(step_ms for _, step_ms in drawn)
    eager_ms = drawn[0][1]
    height = TOP + PITCH * len(drawn) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" role="img" '
        'aria-labelledby="title">',
        f'<title id="title">{escape(_summary(figures))}</title>',
        _text(4, 18, "Time of one training step (ms)", palette.text, "font-weight='600'"),
        *_legend(palette),
    ]
    for index, (bar, step_ms) in enumerate(drawn):
        y = TOP + PITCH * index
        busy, waiting = (palette.ours_busy, palette.ours_waiting) if bar.is_ours else (palette.busy, palette.waiting)
        weight = "font-weight='600'" if bar.is_ours else ""
        width, busy_width = step_ms * scale, min(step_ms, bar.busy_ms) * scale
        figure = f"{step_ms:.1f}" + ("" if index == 0 else f"   {eager_ms / step_ms:.1f}x")
        lines += [
            _text(LEFT - 10, y + 16, bar.label, palette.text, f"text-anchor='end' {weight}".strip()),
            _bar(LEFT, y, width, waiting),
            _bar(LEFT, y, busy_width, busy),
            _text(LEFT + width + 8, y + 16, figure, palette.text, f"xml:space='preserve' {weight}".strip()),
        ]
    lines += [_text(4, height - 8, figures.note, palette.faint, "font-size='12'"), "</svg>"]
    return "\n".join(lines) + "\n"


def _summary(figures: Figures) -> str:
    """Return the chart in words, for readers who do not see it."""
    return "Step time: " + ", ".join(f"{bar.label} {step_ms:.1f} ms" for bar, step_ms in figures.drawn)


def _legend(palette: Palette) -> list[str]:
    lines, x = [], LEFT
    for label, colour, width in (
        ("the GPU computes", palette.ours_busy, 150),
        ("the GPU waits", palette.ours_waiting, 0),
    ):
        lines += [_bar(x, 34, 12, colour, 12), _text(x + 18, 45, label, palette.faint, "font-size='12'")]
        x += width
    return lines


def _bar(x: float, y: float, width: float, colour: str, height: float = BAR) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    more = more.replace("'", '"')
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{" " if more else ""}{more}>{escape(text)}</text>'


def whole_step_table(path: Path, result: dict[str, Any]) -> str:
    """Return README's table of figures and the lines that say where they come from."""
    rows, busy = records(result, WORKLOAD), records(result, BUSY_WORKLOAD)
    environment = result["environment"]
    eager_ms = rows["eager"]["step_ms"]
    lines = ["| | step | against eager | peak memory | 8 sequences a microbatch |", "|---|---|---|---|---|"]
    for name, label in VARIANTS.items():
        row = rows[name]
        lines.append(
            f"| {label} | {row['step_ms']:.1f} ms | {eager_ms / row['step_ms']:.1f}x | "
            f"{row['reserved_bytes'] / GIB:.2f} GiB | {busy[name]['step_ms']:.1f} ms |"
        )
    folder = path.parent.relative_to(ROOT)
    lines += [
        "",
        f"`{result['command'].replace(' --out DIR', '')}`, {environment['date']}, {environment['GPU']}, "
        f"torch {environment['torch']}, CUDA {environment['CUDA']}, Python {environment['Python']}: "
        f"[all figures]({folder.as_posix()}/whole_step.md).",
    ]
    return "\n".join(lines) + "\n"


def readme_with(text: str, figures: str) -> str:
    """Return README's text with the figures between their marks."""
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return before + MARKS[0] + figures + MARKS[1] + after


def images(figures: Figures) -> dict[Path, str]:
    """Return the text of each image by its path."""
    return {IMAGES / f"step_time-{theme}.svg": chart(figures, palette) for theme, palette in PALETTES.items()}


def main() -> None:
    """Write the images and the table."""
    figures = read()
    IMAGES.mkdir(parents=True, exist_ok=True)
    for image, text in images(figures).items():
        image.write_text(text)
    README.write_text(readme_with(README.read_text(), figures.table))
    print(f"drawn from {figures.path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
