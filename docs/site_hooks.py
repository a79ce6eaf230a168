"""Hooks of mkdocs: the pages as a site, together with the files of the repository that they link to.

Pages are written for a repository: they link to `../README.md`, `../benchmarks/README.md`, `../examples/train.py`. A
site has no such places. So each file outside of docs/ that a page links to becomes a part of the site, under
`repository/`, and so does what these files link to. Links are changed while a page is read, never in the sources.
Headings get the anchors that GitHub gives them, which is what the links use and what the tests check.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository"
FENCES = re.compile(r"^```.*?^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)|(\b(?:src|srcset)=\")([^\"\s#]+)")


def place_of(path: Path) -> str:
    """Return where a file of the repository stands in the site."""
    inside = path.relative_to(ROOT).as_posix()
    return inside.removeprefix("docs/") if inside.startswith("docs/") else f"{OUTSIDE}/{inside}"


def source_of(place: str) -> Path:
    """Return the file of the repository that stands at a place of the site."""
    return ROOT / place.removeprefix(f"{OUTSIDE}/") if place.startswith(f"{OUTSIDE}/") else ROOT / "docs" / place


def targets(path: Path) -> set[Path]:
    """Return the files that a page links to."""
    found = set()
    for match in LINK.finditer(FENCES.sub("", path.read_text(encoding="utf-8"))):
        link = match[2] or match[4]
        target = (path.parent / link).resolve()
        if ":" not in link and target.is_relative_to(ROOT) and target.is_file():
            found.add(target)
    return found


def with_links(text: str, path: Path) -> str:
    """Return a page with its links as they must be in the site; code stays as it is."""
    here = PurePosixPath(place_of(path)).parent

    def changed(match: re.Match[str]) -> str:
        opening, link = (match[1], match[2]) if match[1] else (match[3], match[4])
        target = (path.parent / link).resolve()
        if ":" in link or not target.is_relative_to(ROOT) or not target.is_file():
            return match[0]
        return opening + os.path.relpath(place_of(target), here)

    parts, last = [], 0
    for fence in FENCES.finditer(text):
        parts += [LINK.sub(changed, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, LINK.sub(changed, text[last:])])


def slug(heading: str, separator: str) -> str:
    """Return the anchor of a heading by GitHub's rule: lower case, no punctuation, dashes for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Let headings have GitHub's anchors."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of docs/ that pages link to, and those that these link to."""
    from mkdocs.structure.files import File

    waiting = {target for page in sorted((ROOT / "docs").glob("*.md")) for target in targets(page)}
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.is_relative_to(ROOT / "docs"):
            continue
        seen.add(path)
        files.append(File.generated(config, place_of(path), abs_src_path=str(path)))
        waiting |= targets(path) if path.suffix == ".md" else set()
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change the links of a page."""
    return with_links(markdown, source_of(page.file.src_uri))
