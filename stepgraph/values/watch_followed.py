"""Which functions are followed, of those that a step's code can name.

Of the user's code all of them; of libraries those that were seen to run. Some code runs where nobody looks on: autograd
may run a backward later or in a thread of its own, and what a function returned from a cache was computed before. What
the methods of a `torch.autograd.Function`, a hook, and any code of the user's that was not seen to run name is followed
as the user's code is, and of a library's cached functions their own code.

Where very many of the user's functions have not run, that is a library in a folder of its own (a checkout of a training
framework), and is taken for one. Where something is compiled, other code runs in the place of what is written, and
nothing is known to run. Both come up in the middle of a search: `Reconsider` is raised, and it begins again.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch

from stepgraph.ran import ExecutedCode
from stepgraph.values.reach import is_compiled
from stepgraph.values.watch_code import is_installed, is_installed_file, is_users_code, layers_of

_MANY = 1024
"""Functions that can be named and have not run, past which the user's code is taken for a library."""


class Reconsider(Exception):
    """Other functions are to be followed from now on."""


class Followed:
    """Decides for each function whether it is followed."""

    def __init__(self, ran: ExecutedCode) -> None:
        self._ran = ran
        self._elsewhere: set[int] = set()
        """Functions that run where nobody looks on, by id."""
        self._is_elsewhere = False
        self._unseen = 0

    def admits(self, function: types.FunctionType, is_cached: bool) -> bool:
        """Whether a function that was not met before is followed. `is_cached`: it may have run long ago."""
        code, ran, is_librarys = function.__code__, self._ran, _is_librarys(function)
        self.see(function)
        if not is_users_code(code):
            return False
        if code in ran:
            if ran.is_known and not is_librarys and self._has_unseen(code):
                self._elsewhere.add(id(function))
            return True
        may_be_unseen = self._is_elsewhere or is_cached or not ran.is_known
        if not may_be_unseen and (ran.is_all_that_counts or is_librarys):
            return False
        if self._is_elsewhere or not is_librarys:
            self._elsewhere.add(id(function))  # if it runs at all
        self._unseen += 1
        if ran.is_known and not ran.is_all_that_counts and self._unseen > _MANY:
            ran.is_all_that_counts = True
            raise Reconsider
        return self._unseen <= _MANY

    def may_run(self, functions: Collection[Any]) -> bool:
        """Whether one of some functions, or what it is wrapped around, was seen to run, or that is not known."""
        layers = (layer for function in functions for layer in layers_of(function))
        codes = [layer.__code__ for layer in layers if type(layer) is types.FunctionType]
        return not self._ran.is_known or not codes or any(code in self._ran for code in codes)

    def is_elsewhere(self, function: types.FunctionType) -> bool:
        """Whether a function that is followed runs where nobody looks on, or has code inside that does."""
        return id(function) in self._elsewhere

    def _has_unseen(self, code: types.CodeType) -> bool:
        inner = [constant for constant in code.co_consts if type(constant) is types.CodeType]
        return any(each not in self._ran or self._has_unseen(each) for each in inner)

    def see(self, *values: types.FunctionType | torch.nn.Module) -> None:
        """Take note of functions or modules: what is compiled does not run as it is written."""
        if self._ran.is_known and any(map(is_compiled, values)):
            self._ran.give_up()
            raise Reconsider

    @contextlib.contextmanager
    def elsewhere(self, is_elsewhere: bool) -> Iterator[None]:
        """Whether what is met in this block runs where nobody looks on."""
        before, self._is_elsewhere = self._is_elsewhere, self._is_elsewhere or is_elsewhere
        try:
            yield
        finally:
            self._is_elsewhere = before

    def reached_from(self, function: types.FunctionType) -> contextlib.AbstractContextManager[None]:
        """What a function names runs where it does."""
        return self.elsewhere(self.is_elsewhere(function))


def _is_librarys(function: types.FunctionType) -> bool:
    """Whether a function belongs to a library that was installed, also if it was generated there."""
    code = function.__code__
    return is_installed(code) or (code.co_filename.startswith("<") and is_installed_file(function.__globals__))
