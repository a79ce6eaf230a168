"""Watched values in objects of C and of the standard library: a change is noticed at the very next call."""

from __future__ import annotations

import array
import configparser
import contextvars
import ctypes
import functools
import itertools
import logging
import mmap
import multiprocessing
import queue
import threading
import types
import warnings
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

import pytest
import torch

import stepgraph
from tests.harness import assert_change_is_noticed

Step = Callable[[torch.Tensor], torch.Tensor]
Built = tuple[Step, Callable[[], object], str]
"""A step, a change of something that it reads, and how the change is told."""


# -- the standard library's Python


def user_dict() -> Built:
    cfg = UserDict(w=1.0)
    return lambda x: x * cfg["w"], lambda: cfg.update(w=2.0), "cfg.data['w']: 1.0 -> 2.0"


def user_dicts_in_each_other() -> Built:
    cfg = UserDict(loss=UserDict(w=1.0))
    return lambda x: x * cfg["loss"]["w"], lambda: cfg["loss"].update(w=2.0), "cfg.data['loss'].data['w']: 1.0 -> 2.0"


def user_list() -> Built:
    cfg = UserList([1.0])
    return lambda x: x * cfg[0], lambda: cfg.__setitem__(0, 2.0), "cfg.data[0]: 1.0 -> 2.0"


def chain_map() -> Built:
    given: dict[str, float] = {}
    defaults = {"w": 1.0}
    cfg = ChainMap(given, defaults)
    return lambda x: x * cfg["w"], lambda: defaults.update(w=2.0), "cfg.maps[1]['w']: 1.0 -> 2.0"


def chain_map_with_a_new_key() -> Built:
    cfg = ChainMap({}, {"w": 1.0})
    return lambda x: x * cfg["w"], lambda: cfg.update(w=2.0), "len(cfg.maps[0]): 0 -> 1"


def config_parser() -> Built:
    cfg = configparser.ConfigParser()
    cfg.read_dict({"loss": {"w": "1.0"}})
    told = "cfg._sections['loss']['w']: '1.0' -> '2.0'"
    return lambda x: x * cfg.getfloat("loss", "w"), lambda: cfg.set("loss", "w", "2.0"), told


def attribute_that_the_code_spells() -> Built:
    waiting: queue.Queue[float] = queue.Queue()
    waiting.put(1.0)
    return lambda x: x * waiting.queue[0], lambda: waiting.queue.__setitem__(0, 2.0), "waiting.queue[0]: 1.0 -> 2.0"


# -- methods and containers of C


def method_of_a_dict() -> Built:
    cfg = {"w": 1.0}
    get = cfg.get
    return lambda x: x * get("w", 0.0), lambda: cfg.update(w=2.0), "get.__self__['w']: 1.0 -> 2.0"


def method_of_a_list() -> Built:
    cfg = [1.0]
    get = cfg.__getitem__
    return lambda x: x * get(0), lambda: cfg.__setitem__(0, 2.0), "get.__self__[0]: 1.0 -> 2.0"


def method_of_a_deque() -> Built:
    cfg = deque([1.0])
    get = cfg.__getitem__
    return lambda x: x * get(0), lambda: cfg.__setitem__(0, 2.0), "get.__self__[0]: 1.0 -> 2.0"


def method_of_an_object() -> Built:
    cfg = types.SimpleNamespace(w=1.0)
    get = cfg.__getattribute__
    return lambda x: x * get("w"), lambda: setattr(cfg, "w", 2.0), "get.__self__.w: 1.0 -> 2.0"


def method_of_a_context_variable() -> Built:
    variable = contextvars.ContextVar("variable", default=1.0)
    get = variable.get
    return lambda x: x * get(), lambda: variable.set(2.0), "get.__self__.get(): 1.0 -> 2.0"


def method_in_a_partial() -> Built:
    cfg = {"w": 1.0}
    get = functools.partial(cfg.get, "w", 0.0)
    return lambda x: x * get(), lambda: cfg.update(w=2.0), "get.__self__['w']: 1.0 -> 2.0"


def method_as_a_default() -> Built:
    cfg = {"w": 1.0}

    def step(x: torch.Tensor, get: Callable[..., Any] = cfg.get) -> torch.Tensor:
        return x * get("w")

    return step, lambda: cfg.update(w=2.0), "get.__self__['w']: 1.0 -> 2.0"


def method_of_the_standard_library() -> Built:
    cfg = UserDict(w=1.0)
    get = cfg.get
    return lambda x: x * get("w"), lambda: cfg.update(w=2.0), "self.data['w']: 1.0 -> 2.0"


def view_of_a_dict() -> Built:
    cfg = {"w": 1.0}
    values = cfg.values()
    return lambda x: x * sum(values), lambda: cfg.update(w=2.0), "values['w']: 1.0 -> 2.0"


# -- memory


def memory_of_an_array() -> Built:
    cfg = array.array("d", [1.0])
    told = "cfg: an array -> the same array with other contents"
    return lambda x: x * cfg[0], lambda: cfg.__setitem__(0, 2.0), told


def memory_of_an_array_seen_by_a_view() -> Built:
    behind = array.array("d", [1.0])
    cfg = memoryview(behind).toreadonly()
    told = "cfg: a memoryview -> the same memoryview with other contents"
    return lambda x: x * cfg[0], lambda: behind.__setitem__(0, 2.0), told


def memory_of_a_map() -> Built:
    cfg = mmap.mmap(-1, 16)
    cfg[0] = 1
    return lambda x: x * cfg[0], lambda: cfg.__setitem__(0, 2), "cfg: a mmap -> the same mmap with other contents"


def memory_of_a_bytearray() -> Built:
    cfg = bytearray([1])
    told = "cfg: a bytearray -> the same bytearray with other contents"
    return lambda x: x * cfg[0], lambda: cfg.__setitem__(0, 2), told


def number_of_ctypes() -> Built:
    cfg = ctypes.c_double(1.0)
    told = "cfg: a c_double -> the same c_double with other contents"
    return lambda x: x * cfg.value, lambda: setattr(cfg, "value", 2.0), told


def structure_of_ctypes() -> Built:
    class Config(ctypes.Structure):
        _fields_ = (("w", ctypes.c_double),)

    cfg = Config(1.0)
    told = "cfg: a Config -> the same Config with other contents"
    return lambda x: x * cfg.w, lambda: setattr(cfg, "w", 2.0), told


def number_shared_by_processes() -> Built:
    cfg = multiprocessing.Value("d", 1.0)
    told = "cfg._obj: a c_double -> the same c_double with other contents"
    return lambda x: x * cfg.value, lambda: setattr(cfg, "value", 2.0), told


def numbers_shared_by_processes() -> Built:
    cfg = RawArray("d", [1.0])
    told = "cfg: a c_double_Array_1 -> the same c_double_Array_1 with other contents"
    return lambda x: x * cfg[0], lambda: cfg.__setitem__(0, 2.0), told


# -- attributes that C keeps elsewhere


def variable_of_this_thread() -> Built:
    cfg = threading.local()
    cfg.w = 1.0
    return lambda x: x * cfg.w, lambda: setattr(cfg, "w", 2.0), "cfg.w: 1.0 -> 2.0"


def variable_of_this_thread_in_an_own_class() -> Built:
    class Config(threading.local):
        w = 1.0

    cfg = Config()
    cfg.w = 1.0
    return lambda x: x * cfg.w, lambda: setattr(cfg, "w", 2.0), "cfg.w: 1.0 -> 2.0"


PLACES = (
    *(user_dict, user_dicts_in_each_other, user_list, chain_map, chain_map_with_a_new_key, config_parser),
    *(attribute_that_the_code_spells, method_of_a_dict, method_of_a_list, method_of_a_deque, method_of_an_object),
    *(method_of_a_context_variable, method_in_a_partial, method_as_a_default, method_of_the_standard_library),
    *(view_of_a_dict, memory_of_an_array, memory_of_an_array_seen_by_a_view, memory_of_a_map, memory_of_a_bytearray),
    *(number_of_ctypes, structure_of_ctypes, number_shared_by_processes, numbers_shared_by_processes),
    *(variable_of_this_thread, variable_of_this_thread_in_an_own_class),
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_value_in_a_container_is_noticed(place: Callable[[], Built], device: torch.device) -> None:
    assert_change_is_noticed(*place(), device)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_frozen_reports_value_in_a_container(place: Callable[[], Built], device: torch.device) -> None:
    """It is in the graph, its place is named, and nothing is a finding."""
    step, _, told = place()
    report = stepgraph.frozen(step, torch.ones(2, device=device))
    name = told.partition(": ")[0]
    assert any(value.name == name or name.startswith("len(") for value in report.values), report
    assert report.findings == ()


# -- what is not read


def counting_handler() -> tuple[Step, Any]:
    class Counting(logging.Handler):
        count = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.count += 1

    logger = logging.Logger("step", logging.INFO)
    logger.addHandler(Counting())

    def step(x: torch.Tensor) -> torch.Tensor:
        logger.info("a step")
        return x * 2

    return step, logger


def test_logger_is_not_searched(device: torch.device) -> None:
    """A logger refers to all others, and to handlers, which no operation depends on."""
    step, logger = counting_handler()
    x = torch.ones(2, device=device)
    with stepgraph.capture(step) as captured, warnings.catch_warnings():
        warnings.simplefilter("error")
        for level in range(12):
            assert torch.equal(captured(x), x * 2)
            logger.setLevel(level)
        assert captured.report().replays == 9


def test_step_that_counts_in_a_user_dict_is_refused(device: torch.device) -> None:
    cfg = UserDict(calls=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        cfg["calls"] += 1
        return x * cfg["calls"]

    with stepgraph.capture(step) as captured:
        for _ in range(3):
            captured(torch.ones(2, device=device))
        with pytest.raises(stepgraph.CaptureError, match=r"cfg\.data\['calls'\]: 2 -> 3"):
            captured(torch.ones(2, device=device))


def test_endless_iterator_is_no_obstacle(device: torch.device) -> None:
    twos = itertools.repeat(2.0)
    x = torch.ones(2, device=device)
    with stepgraph.capture(lambda x: x * next(twos)) as captured:
        for _ in range(8):
            assert torch.equal(captured(x), x * 2)
        assert captured.report().replays == 5
