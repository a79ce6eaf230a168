"""The garbage collector at rest: one switch of the process, for all who want it off."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepgraph.collector import collector_at_rest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def collector_is_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_collector_rests_in_the_block_and_goes_on_after_it() -> None:
    with collector_at_rest():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), collector_at_rest():
        raise ValueError("inside")
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_at_rest(), collector_at_rest():
        pass
    assert not gc.isenabled()


def test_rest_in_a_rest_ends_with_the_outer_one() -> None:
    with collector_at_rest():
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_rest_lasts_until_the_last_thread_has_had_it() -> None:
    """The thread that began first leaves first: the other one's rest goes on."""
    may_leave, has_begun = threading.Event(), threading.Event()

    def first() -> None:
        with collector_at_rest():
            has_begun.set()
            assert may_leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert has_begun.wait(60)
    with collector_at_rest():
        may_leave.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


_ASKING_FINALIZERS = """
import gc, weakref
from stepgraph.frames import is_running

class Cycle:
    pass

def drop_one():
    cycle = Cycle()
    cycle.itself = cycle
    weakref.finalize(cycle, is_running, frozenset())

for threshold in range(1, 60, 3):  # so that it is reached at any point
    gc.set_threshold(threshold)
    for _ in range(200):
        drop_one()
        is_running(frozenset())
print("done")
"""


@pytest.mark.slow
def test_finalizer_that_asks_what_is_running_does_not_hang() -> None:
    """Some Pythons hold a lock while they list frames, and collect garbage meanwhile (cpython#106883)."""
    done = subprocess.run([sys.executable, "-c", _ASKING_FINALIZERS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr


_READING_IN_A_COLLECTION = """
import gc
import torch
from stepgraph.collector import state_of

def read_too(phase, info):
    if reading:
        reading.clear()
        torch.default_generator.get_state()

reading, kept = [], []
gc.callbacks.append(read_too)
gc.set_threshold(1, 1, 1)
for _ in range(50):
    kept.append([])
    reading.append(True)
    kept.append(state_of(torch.default_generator))
    reading.clear()
"""


def test_state_of_a_generator_is_read_without_a_collection() -> None:
    """torch holds the generator's lock while it makes the tensor: a collection there that reads it, too, never ends."""
    program = _READING_IN_A_COLLECTION
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=100)
