"""The errors of CUDA are provoked, each in a process of its own, and `explain` recognizes the text that really came."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepgraph.tools.explain import explain

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
FRAME = """
import os, sys, threading, traceback
import torch

x = torch.ones(8, device="cuda")
side, graph, event = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.Event()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x + 1
    event.record()
torch.cuda.synchronize()


def told(do):
    try:
        do()
    except Exception:
        print(traceback.format_exc(), flush=True)


def capture(body, mode="global"):
    with torch.cuda.graph(graph, capture_error_mode=mode):
        x * 2
        body()
        x * 2


{program}
sys.stdout.flush()
os._exit(0)  # the context may be of no use any more
"""
SYNC = "told(lambda: capture(torch.cuda.synchronize))"
CAUGHT = "told(lambda: capture(lambda: told(lambda: x.sum().item()) or print('===', flush=True)))"
THREAD = """
def in_a_thread():
    thread = threading.Thread(target=told, args=(torch.cuda.synchronize,))
    thread.start()
    thread.join()
    print("===", flush=True)


told(lambda: capture(in_a_thread))
"""
UNJOINED = """
def body():
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1


told(lambda: capture(body))
"""
ISOLATION = "told(lambda: capture(lambda: torch.cuda.current_stream().wait_event(event)))"
LEGACY = "told(lambda: capture(lambda: torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())))"
ACCUMULATE = """
layer = torch.nn.Linear(8, 8, device="cuda")
kept = layer(x).sum()  # its graph keeps the accumulators, which were made on the default stream
kept.backward(retain_graph=True)
told(lambda: capture(lambda: layer(x).sum().backward()))
"""
EVENT = """
def body():
    mine = torch.cuda.Event()
    mine.record()
    mine.query()


told(lambda: capture(body, "relaxed"))
"""
MEMORY = "told(lambda: capture(lambda: torch.empty(2**46, device='cuda')))"
OPTIMIZER = """
weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
weight.grad = torch.ones_like(weight)
optimizer = torch.optim.AdamW([weight])
told(lambda: capture(optimizer.step))
"""
COPY = "told(lambda: capture(lambda: torch.ones(8).to('cuda')))"


def printed(program: str) -> str:
    command = [sys.executable, "-c", FRAME.replace("{program}", program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("program", "rule", "code"),
    [
        (SYNC, "host-read", 900),
        (UNJOINED, "unjoined-stream", 904),
        (ISOLATION, "capture-isolation", 905),
        (LEGACY, "legacy-stream", 906),
        (EVENT, "captured-event", 907),
        (OPTIMIZER, "optimizer-capturable", None),
        (COPY, "host-data", None),
    ],
    ids=["900", "904", "905", "906", "907", "optimizer", "copy"],
)
def test_explain_recognizes_what_cuda_says(program: str, rule: str, code: int | None) -> None:
    text = printed(program)
    first = explain(text).candidates[0].entry
    assert (first.id, first.code) == (rule, code), text


@pytest.mark.parametrize("program", [CAUGHT, THREAD], ids=["try-except", "thread"])
def test_explain_recognizes_a_capture_that_was_broken_before(program: str) -> None:
    """The host read that was caught, or the other thread, is reported first; the capture reports 901 afterwards."""
    earlier, _, later = printed(program).partition("===")
    assert explain(earlier).candidates[0].entry.id == "host-read", earlier
    found = explain(later)
    assert found.candidates[0].entry.code == 901, later
    assert found.rules[:2] == ("capture-invalidated", "background-thread")


def test_explain_recognizes_accumulators_of_the_default_stream() -> None:
    text = printed(ACCUMULATE)
    assert "legacy-stream" in explain(text).rules, text


def test_explain_recognizes_memory_that_ran_out() -> None:
    """torch adds how much of it graphs hold, which leads to `graph-memory` as well."""
    text = printed(MEMORY)
    assert "out-of-memory" in explain(text).rules, text
