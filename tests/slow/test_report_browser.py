"""The report of a comparison in a real browser: what a reader sees, on a wide screen and on a phone, light and dark.

The page stands in a frame, and a script around it reads the frame's layout after it was drawn. Chromium draws it
headless; without one the tests are left out by name (`.ci/run` installs it).
"""

import html
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepgraph.lab.bench import report_html
from stepgraph.lab.bench.compare import compare
from stepgraph.lab.bench.mechanisms import Mechanism

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
    pytest.mark.xdist_group("browser"),
]

EAGER = Mechanism("eager", "eager", "eager")
OURS = Mechanism("ours-whole", "local: full_iteration", "stepgraph")
COMPILED = Mechanism("compile", "torch.compile", "torch", changes_kernels=True)
FAILED = "RuntimeError: <b>accessing</b> tensor output & more"

READ = """
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const width = (part) => part.getBoundingClientRect().width;
  const box = (part) => { const b = part.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const colour = (name) => view.getComputedStyle(page.body)[name];
  const section = (title) => {
    const bars = [];
    let part = [...page.querySelectorAll("h2")].find((head) => head.textContent === title).nextElementSibling;
    for (; part && part.className === "row"; part = part.nextElementSibling)
      bars.push([part.children[0].innerText, width(part.querySelector(".fill")), part.children[2].innerText]);
    return bars;
  };
  const found = {
    text: page.body.innerText, bars: section("Step time"), memory: section("Peak memory"),
    overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    outside: [...page.querySelectorAll("h1, h2, p, .row > *")].filter((part) => box(part)[2] > view.innerWidth + 1)
      .map((part) => part.innerText),
    background: colour("backgroundColor"), ink: colour("color"),
    curves: [...page.querySelectorAll("polyline")].map(box),
    kernels: [...page.querySelectorAll("rect")].map(box),
    hidden: [...page.querySelectorAll(".scroll")].map((part) => part.scrollWidth - part.clientWidth),
    font: parseFloat(view.getComputedStyle(page.querySelector("p")).fontSize), scripts: page.scripts.length,
  };
  document.body.textContent = "RESULT " + JSON.stringify(found) + " END";
});
frame.srcdoc = document.getElementById("page").textContent;
"""


def record(mechanism: Mechanism, step_ms: float, timeline: list[list[float]]) -> dict[str, Any]:
    return {
        "mechanism": mechanism.name,
        "pass": 0,
        "step_ms": step_ms,
        "losses": {str(step): 3.0 - 0.1 * step for step in range(1, 11)},
        "tflops_per_gpu": 150.0,
        "busy_fraction": 0.5,
        "kernels": len(timeline),
        "memory": {"reserved": int(step_ms) * 2**25},
        "timeline_us": timeline,
    }


def report() -> str:
    eager = record(EAGER, 100.0, [[1000.0 * n, 250.0] for n in range(100)])
    ours = record(OURS, 25.0, [[250.0 * n, 250.0] for n in range(100)])
    failed = {"mechanism": "compile", "pass": 0, "error": FAILED}
    found = compare([EAGER, OURS, COMPILED], [eager, ours, failed])
    return report_html.render("gpt2_small, <4> microbatches", {"GPU": "NVIDIA H200", "torch": "2.11"}, found)


def seen(folder: Path, *, width: int, scheme: str) -> dict[str, Any]:
    """Return what a reader sees of the report in a window of this width."""
    page = folder / f"look-{width}-{scheme}.html"
    text = html.escape(report())
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><body><textarea id="page" hidden>{text}</textarea>'
        f'<iframe style="width:{width}px;height:1500px;border:0;color-scheme:{scheme}"></iframe>'
        f"<script>{READ}</script></body>",
        encoding="utf-8",
    )
    assert CHROMIUM is not None
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [CHROMIUM, *flags.split(), "--disable-component-update", "--disable-sync", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1600", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    match = re.search(r"RESULT (.*) END", done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    return dict(json.loads(html.unescape(match[1])))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return seen(tmp_path_factory.mktemp("wide"), width=1200, scheme="light")


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return seen(tmp_path_factory.mktemp("phone"), width=360, scheme="dark")


def test_report_shows_its_verdict_and_every_row(wide: dict[str, Any]) -> None:
    text = wide["text"]
    assert text.startswith("gpt2_small, <4> microbatches")
    assert "local: full_iteration: 4.00 times as fast as eager" in text.splitlines()[2]
    assert "GPU: NVIDIA H200" in text
    assert FAILED in text
    assert wide["scripts"] == 0
    assert wide["hidden"] == [0], "the whole table is seen without scrolling"


def test_report_draws_bars_as_long_as_their_figures(wide: dict[str, Any]) -> None:
    ours, eager = wide["bars"]
    assert (ours[0], ours[2]) == ("local: full_iteration", "25.00 ms")
    assert (eager[0], eager[2]) == ("eager", "100.00 ms")
    assert eager[1] == pytest.approx(4 * ours[1], rel=0.01)
    assert [bar[2] for bar in wide["memory"]] == ["0.78 GiB", "3.12 GiB"]


def test_report_draws_the_gaps_between_kernels(wide: dict[str, Any]) -> None:
    above, below = wide["kernels"][:100], wide["kernels"][100:]
    assert len(below) == 100
    assert above[0][3] < below[0][1]  # eager stands above the winner
    gaps = [after[0] - before[2] for before, after in pairwise(above)]
    assert min(gaps) > 3  # eager waits three quarters of the time
    assert max(after[0] - before[2] for before, after in pairwise(below)) < 0.1
    assert below[-1][2] - below[0][0] < 0.3 * (above[-1][2] - above[0][0])
    assert all(curve[3] - curve[1] > 100 for curve in wide["curves"])  # the loss falls over the height of the picture


def test_report_fits_a_phone(phone: dict[str, Any]) -> None:
    assert phone["overflow"] == 0
    assert phone["outside"] == []
    assert phone["font"] >= 14
    assert phone["bars"][1][1] > 250  # bars use the width of the screen


def test_report_has_a_light_and_a_dark_scheme(wide: dict[str, Any], phone: dict[str, Any]) -> None:
    assert _contrast(wide) > 7
    assert _contrast(phone) > 7
    assert _lightness(wide["background"]) > 0.9
    assert _lightness(phone["background"]) < 0.1


def _lightness(colour: str) -> float:
    """The relative luminance of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(page: dict[str, Any]) -> float:
    light, dark = sorted((_lightness(page["background"]), _lightness(page["ink"])), reverse=True)
    return (light + 0.05) / (dark + 0.05)
