"""Fixtures for all suites: one body runs on each device there is; `--require-gpu` makes a missing GPU a failure."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator

import pytest
import torch

from tests.seeding import seed
from tests.slow_tests import SlowTests

_SLOW_SUITES = frozenset(("slow", "distributed"))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.pop("COLUMNS", None)  # reports are as wide as they are by default


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, instead of leaving tests out, where there is no GPU"
    )
    parser.addoption(
        "--note-slow-tests", action="store_true", help="write the names of tests that took long to tests/slow_tests.txt"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--note-slow-tests") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowTests(), "slow-tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = SlowTests.read()
    for item in items:
        if item.nodeid in slow or _SLOW_SUITES.intersection(item.path.parts):
            item.add_marker(pytest.mark.slow)
        if "distributed" in item.path.parts:  # `run_to_end` sees whether processes get on
            item.add_marker(pytest.mark.timeout(1200))
    if torch.cuda.is_available() or config.getoption("--require-gpu"):
        return
    absent = [item for item in items if item.get_closest_marker("gpu") is not None]
    if absent:  # left out as a whole: to report each of some 2,000 as skipped takes seconds
        config.hook.pytest_deselected(items=absent)
        gone = set(absent)
        items[:] = [item for item in items if item not in gone]


def pytest_report_header(config: pytest.Config) -> str | None:
    if torch.cuda.is_available() or config.getoption("--require-gpu"):
        return None
    return "torch sees no GPU: tests that need one are left out (counted as deselected)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.fail("--require-gpu was given and torch sees no GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that has a backend."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """Eager equal to itself: one CPU thread, deterministic algorithms, a fixed seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        torch.use_deterministic_algorithms(True)  # stays on: half a millisecond, each time that it is set
    torch.utils.deterministic.fill_uninitialized_memory = False
    seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Each capture on the tape collects garbage first; objects of before are set apart so that it costs little."""
    importlib.import_module("torch._dynamo")  # most of these objects; the first capture would bring them
    gc.collect()
    gc.freeze()  # for good: to look through all of them again for each file would take longer than many a file
