"""Fixtures for the suites on the tape."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Each capture collects garbage first; objects of before are set apart so that it costs little."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
