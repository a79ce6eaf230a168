"""The documentation is code: snippets run, links lead somewhere, every rule has its heading."""

from __future__ import annotations

import linecache
import pkgutil
import re
import runpy
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.core import catalogue
from tests import readme

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING_PAGES = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _python_blocks(page: Path) -> list[tuple[int, str]]:
    """Each python block of a page, with the number of lines before it."""
    text = page.read_text()
    return [
        (text.count("\n", 0, m.start(2)), m.group(2)) for m in readme.FENCE.finditer(text) if m.group(1) == "python"
    ]


def _prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(
        r"`[^`\n]*`", lambda m: m.group() if "](" not in m.group() else "", readme.FENCE.sub("", page.read_text())
    )


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule: lower case, punctuation gone, dashes for spaces."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", readme.FENCE.sub("", page.read_text()), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = sum(1 for a in found if a == slug or re.fullmatch(re.escape(slug) + r"-\d+", a))
        found.add(f"{slug}-{count}" if count else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_page_snippets_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of one page share a namespace, in order. A traceback shows the page's own line."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    blocks = list(_python_blocks(page))
    source: list[str] = []
    for lines_before, code in blocks:
        source += ["\n"] * (lines_before - len(source)) + code.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, str(page), (0, None, source, str(page)))  # as of a file that is Python
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for lines_before, code in blocks:
                exec(compile("\n" * lines_before + code, str(page), "exec"), namespace)
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():  # a snippet that failed before its last line
            dist.destroy_process_group()


def test_guides_have_snippets() -> None:
    without = {_name(page) for page in PAGES if not _python_blocks(page)}
    known = ("architecture", "command_line", "comparison", "index", "limits", "scripts")
    assert without == {"README.md", *(f"docs/{name}.md" for name in known)}


def test_tables_of_benchmarks_hold_no_paragraphs() -> None:
    """A cell is a figure or a name. What needs sentences stands below, as text."""
    for line in (ROOT / "benchmarks" / "README.md").read_text().splitlines():
        cells = re.sub(r"\]\([^)]*\)", "]", line).split(" | ") if line.startswith("|") else []
        assert not [cell for cell in cells if len(cell) > 160]


def test_readme_loop_replays_with_one_line_added() -> None:
    added = [line for line in readme.block("diff").splitlines() if line.startswith("+")]
    assert added == ["+@stepgraph.capture"]
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    exec(compile(readme.loop(), "README.md", "exec"), namespace)
    report = namespace["step"].report()
    assert (report.eager_reasons, report.captures, report.replays) == ({"warm-up": 3}, 1, 7)


def test_readme_refusal_is_the_real_message(tmp_path: Path) -> None:
    script = tmp_path / "train.py"  # a real file: the message quotes its line
    read = "    if loss.item() > 100:\n        raise ValueError\n    loss.backward()\n"
    script.write_text(readme.loop().replace("    loss.backward()\n", read))
    with pytest.raises(stepgraph.CaptureError) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__docs__"})
    shown = f"{type(caught.value).__name__}: {caught.value}".replace(f"{tmp_path}/", "")
    at_line = re.compile(r"train\.py:\d+")
    assert at_line.sub("train.py", shown).strip() == at_line.sub("train.py", readme.block("text")).strip()


def test_readme_chart_and_figures_match_the_results() -> None:
    """`python benchmarks/chart.py` would change nothing."""
    chart = runpy.run_path(str(ROOT / "benchmarks" / "chart.py"), run_name="chart")
    figures = chart["read"]()
    for image, text in chart["images"](figures).items():
        assert image.read_text() == text, f"{image.name}: run python benchmarks/chart.py"
    readme = (ROOT / "README.md").read_text()
    assert chart["readme_with"](readme, figures.table) == readme


def test_chart_draws_a_comparison_too() -> None:
    """`stepgraph bench --compare` wrote the file: some rows ran, one failed, others are not there."""
    chart = runpy.run_path(str(ROOT / "benchmarks" / "chart.py"), run_name="chart")
    figures = chart["of_comparison"](ROOT / "benchmarks" / "results" / "2026-11-18-h200-d" / "compare_gpt2_small.json")
    rows = {line.split(" | ")[0].strip("| "): line for line in figures.table.splitlines() if line.startswith("| ")}
    assert "1.0x" in rows["eager"]
    assert rows["eager"].endswith("| the reference |")
    assert "stepgraph, attention" in rows
    assert "stepgraph, whole step" not in rows or "x |" in rows["stepgraph, whole step"]
    for text in chart["images"](figures).values():
        drawn = [row for row in rows.values() if "x |" in row]
        assert text.count("<rect") == 2 + 2 * len(drawn), "two bars a row, and the legend"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_citation_names_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert [_name(p) for p in PAGES[1:] if p.name != "index.md" and f"]({p.name})" not in index] == []


def test_index_lists_every_public_name() -> None:
    table = (ROOT / "docs" / "index.md").read_text().partition("## The public names")[2]
    assert [name for name in stepgraph.__all__ if f"`{name}`" not in table] == []
    dotted = re.findall(r"`(lab\.(?:train|recipes)(?:\.\w+)*)", table)
    assert {"lab.recipes", "lab.train", "lab.train.RunReport", "lab.train.checkpoint.CheckpointError"} <= set(dotted)
    for name in dotted:
        assert pkgutil.resolve_name(f"stepgraph.{name}") is not None


def test_site_lists_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"([\w]+\.md)$", nav, re.MULTILINE)) == sorted(page.name for page in PAGES[1:])


def test_site_takes_in_files_outside_of_docs() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"), run_name="site_hooks")
    index, readme = ROOT / "docs" / "index.md", ROOT / "README.md"
    text = '[a](../README.md#x), [b](errors.md#host-read), [c](#y), <img src="images/how_pool.svg">\n'
    text += "```\n[d](../README.md)\n```\n"
    assert hooks["with_links"](text, index) == text.replace("[a](../README.md", "[a](repository/README.md")
    assert hooks["with_links"]("[a](docs/errors.md)", readme) == "[a](../errors.md)"
    assert hooks["with_links"]("[a](https://x.y/z.md), [b](gone.md)", readme) == "[a](https://x.y/z.md), [b](gone.md)"
    assert hooks["source_of"](hooks["place_of"](readme)) == readme
    assert hooks["source_of"](hooks["place_of"](index)) == index
    assert ROOT / "examples" / "plain_loop.py" in hooks["targets"](index)


def test_figures_are_drawn_by_their_script() -> None:
    """`python docs/figures.py` would change nothing."""
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"), run_name="figures")
    for name, draw in figures["FIGURES"].items():
        assert (ROOT / "docs" / "images" / name).read_text() == draw(), "run python docs/figures.py"
        assert len(draw()) < 8000, name


def test_comparison_has_figures_of_the_results_only() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text().partition("## Measured")[2].partition("## When")[0]
    results = [ROOT / "benchmarks" / link for link in re.findall(r"\.\./benchmarks/(results/[^)]+)", page)]
    measured = " ".join(path.read_text() for path in results)
    figures = re.findall(r"\b\d+\.\d{2,}\b", LINK.sub("", page))
    assert len(figures) > 60
    assert [figure for figure in figures if figure not in measured] == []


@pytest.mark.parametrize("page", LINKING_PAGES, ids=_name)
def test_page_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(_prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", ["errors.md", "rules.md", "config.md"])
def test_page_is_built_from_the_catalogue(name: str) -> None:
    """`python docs/build.py` would change nothing."""
    build = runpy.run_path(str(ROOT / "docs" / "build.py"), run_name="build")
    assert (ROOT / "docs" / name).read_text() == build["page_with_entries"](name), "run python docs/build.py"


def test_catalogue_pages_show_every_entry_once() -> None:
    headings: list[str] = []
    for name in ("errors.md", "rules.md"):
        headings += re.findall(r"^## (\S+)$", readme.FENCE.sub("", (ROOT / "docs" / name).read_text()), re.MULTILINE)
    assert sorted(headings) == sorted(entry.id for entry in catalogue.entries())


def test_errors_page_gives_cuda_codes_of_the_catalogue() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^#|\Z)", readme.FENCE.sub("", text), re.MULTILINE | re.DOTALL))
    codes = [entry for entry in catalogue.entries("capture") if entry.code is not None]
    assert len(codes) == 11
    for entry in codes:
        assert f"CUDA {entry.code}, `{entry.name}`" in sections[entry.id], entry.id
