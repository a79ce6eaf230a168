"""Fixtures for all suites: one body runs on each device there is; `--require-gpu` makes a missing GPU a failure."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.forked import NONE, ForkServer
from tests.pairwise import covering
from tests.seeding import seed
from tests.slow_tests import CpuTimes, SlowTests

_SLOW_SUITES = frozenset(("slow", "distributed"))
settings.register_profile("no times", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no times")  # a busy machine is no reason to fail
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.pop("COLUMNS", None)  # reports are as wide as they are by default


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, instead of leaving tests out, where there is no GPU"
    )
    parser.addoption("--cpu-times", action="store_true", help="list the processor time of each file in the end")
    parser.addoption(
        "--note-slow-tests", action="store_true", help="write the names of tests that took long to tests/slow_tests.txt"
    )


def pytest_configure(config: pytest.Config) -> None:
    writes = config.getoption("--note-slow-tests")
    if writes or config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(), "cpu-times")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(SlowTests(writes), "slow-tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = SlowTests.read()
    _mark_others_of_pairs(items)
    for item in items:
        folders = item.path.relative_to(config.rootpath).parts  # the checkout may be in a folder of any name
        if item.nodeid.split("@")[0] in slow or _SLOW_SUITES.intersection(folders):
            item.add_marker(pytest.mark.slow)
        if "distributed" in folders:  # `run_to_end` sees whether processes get on
            item.add_marker(pytest.mark.timeout(1200))
    if torch.cuda.is_available() or config.getoption("--require-gpu"):
        return
    absent = [item for item in items if item.get_closest_marker("gpu") is not None]
    if absent:  # left out as a whole: to report each of some 2,000 as skipped takes seconds
        config.hook.pytest_deselected(items=absent)
        gone = set(absent)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail, instead of running a shared fixture in every worker, if xdist does not see groups."""
    if hasattr(session.config, "workerinput") and session.config.getoption("loadgroup", False):
        lost = [
            item.nodeid for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid
        ]
        assert not lost, f"pytest-xdist does not group {lost[0]}: see constraints.txt"


def _mark_others_of_pairs(items: list[pytest.Item]) -> None:
    """Mark as long what a test marked `pairwise` has beyond each pair of values."""
    products: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise") is not None:
            test = item.nodeid.partition("[")[0], str(item.callspec.params.get("device"))
            products.setdefault(test, []).append(item)
    for product in products.values():
        rows = [{name: repr(value) for name, value in item.callspec.params.items()} for item in product]
        chosen = set(covering(rows))
        for place, item in enumerate(product):
            if place not in chosen:
                item.add_marker(pytest.mark.long)


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


@pytest.fixture(scope="session", autouse=True)
def forked_programs() -> Iterator[None]:
    """Python programs that tests start are forks of a process that has imported torch (`tests/forked.py`)."""
    with contextlib.nullcontext() if torch.cuda.is_available() else ForkServer().installed():
        yield


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python programs that the test starts are no forks: it is about what they import, or how they start and end."""
    for name, value in NONE.items():
        monkeypatch.setenv(name, value)
