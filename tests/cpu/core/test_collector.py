"""The garbage collector: one switch of the process, for all who want it off, and the objects that it tracks."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepgraph.core.collector import address, addresses, collector_at_rest, objects_of

ROOT = Path(__file__).parents[3]


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
from stepgraph.core.frames import is_running

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
from stepgraph.core.collector import state_of

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


class Kind:
    pass


class SubKind(Kind):
    pass


class Proxy:
    """Says that it is of another class, by code of its own."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise AssertionError("code of a class has run")


def test_objects_of_a_type_are_those_of_its_subclasses_too() -> None:
    gc.collect()
    one, two, proxy = Kind(), SubKind(), Proxy()
    assert {id(found) for found in objects_of(Kind)} == {id(one), id(two)}
    assert objects_of(SubKind, generation=0) == [two]
    assert objects_of(SubKind, generation=1) == []
    assert objects_of(Proxy) == [proxy]


def test_addresses_are_those_of_one_generation() -> None:
    gc.collect()
    young, held = [Kind()], (Kind(),)
    assert address(young) in addresses(0)
    assert address(held) in addresses(0), "tuples too"
    gc.collect(0)
    assert address(held) not in addresses(0)
    assert address(held) in addresses(1)


def test_objects_that_were_not_asked_for_are_not_held() -> None:
    """No cycle keeps them until the next collection."""
    other = (Kind(), [])
    count = sys.getrefcount(other)
    with collector_at_rest():
        for generation in (None, 0):
            objects_of(SubKind, generation)
        addresses(0)
        assert sys.getrefcount(other) == count


_TUPLES_BESIDE_A_LOOK = """
import sys, threading, time
from stepgraph.core.collector import addresses, objects_of

class Kind:
    pass

def fill():
    while time.monotonic() < end:
        try:
            tuple(number for number in range(50))
        except SystemError as error:
            errors.append(error)

def ignore(*event):
    pass

sys.addaudithook(ignore)  # Python code at each `id`, among others
sys.setprofile(ignore)  # and after each call of C code
sys.setswitchinterval(1e-5)
errors, end = [], time.monotonic() + 2
threads = [threading.Thread(target=fill) for _ in range(2)]
for thread in threads:
    thread.start()
while time.monotonic() < end:
    for _ in range(20):
        objects_of(Kind, generation=0)
        addresses(0)
    objects_of(Kind)
for thread in threads:
    thread.join()
print(len(errors), errors[:1])
"""


def test_objects_of_leaves_tuples_that_other_threads_fill() -> None:
    """A reference to a tuple that is being filled makes Python raise SystemError in the thread that fills it."""
    command = [sys.executable, "-c", _TUPLES_BESIDE_A_LOOK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "0 []\n", done.stdout + done.stderr
