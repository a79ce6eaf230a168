"""The documentation is code: snippets run, links lead somewhere, every rule has its heading."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stepgraph.errors import ERROR_TABLE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING_PAGES = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _python_blocks(page: Path) -> list[tuple[int, str]]:
    """Each python block of a page, with the number of lines before it."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start(2)), m.group(2)) for m in FENCE.finditer(text) if m.group(1) == "python"]


def _prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", lambda m: m.group() if "](" not in m.group() else "", FENCE.sub("", page.read_text()))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule: lower case, punctuation gone, dashes for spaces."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE):
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for lines_before, code in _python_blocks(page):
                exec(compile("\n" * lines_before + code, str(page), "exec"), namespace)
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():  # a snippet that failed before its last line
            dist.destroy_process_group()


def test_readme_and_guides_have_snippets() -> None:
    without = {_name(page) for page in PAGES if not _python_blocks(page)}
    assert without == {"docs/index.md"}


def test_readme_example_is_short() -> None:
    """One screen: fifteen lines, not counting empty ones."""
    ((_, code),) = _python_blocks(ROOT / "README.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


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


def test_errors_page_gives_cuda_codes_of_the_table() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^#|\Z)", FENCE.sub("", text), re.MULTILINE | re.DOTALL))
    for row in ERROR_TABLE:
        if row.code is not None:
            assert f"CUDA {row.code}, `{row.name}`" in sections[row.rule], row.rule
