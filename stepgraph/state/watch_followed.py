"""Which functions are followed, of those that a step's code can name.

Of the user's code all of them; of libraries those that were seen to run. Autograd may run a backward in a thread of its
own, where nobody looks on: what the methods of a `torch.autograd.Function` name is followed as the user's code is.

Where very many of the user's functions have not run, that is a library in a folder of its own (a checkout of a training
framework), and is taken for one. Where something is compiled, other code runs in the place of what is written, and
nothing is known to run. Both come up in the middle of a search: `Reconsider` is raised, and it begins again.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import torch

from stepgraph.ran import Ran
from stepgraph.state.reach import is_compiled
from stepgraph.state.watch_code import is_installed, is_users_code

_MANY = 256
"""Functions that can be named and have not run, past which the user's code is taken for a library."""
_MOST = 1024
"""Functions that are followed by their names alone."""


class Reconsider(Exception):
    """Other functions are to be followed from now on."""


class Followed:
    """Decides for each function whether it is followed."""

    def __init__(self, ran: Ran) -> None:
        self._ran = ran
        self._elsewhere: set[int] = set()
        """Functions that run where nobody looks on, by id."""
        self._is_elsewhere = False
        self._unseen = 0

    def admits(self, function: types.FunctionType) -> bool:
        """Whether a function that was not met before is followed."""
        code, ran = function.__code__, self._ran
        self.see(function)
        if not is_users_code(code):
            return False
        if code in ran:
            return True
        if self._is_elsewhere:
            self._elsewhere.add(id(function))
        elif ran.is_known and (ran.is_all_that_counts or is_installed(code)):
            return False
        self._unseen += 1
        if ran.is_known and not ran.is_all_that_counts and self._unseen > _MANY:
            ran.is_all_that_counts = True
            raise Reconsider
        return self._unseen <= _MOST

    def see(self, value: types.FunctionType | torch.nn.Module) -> None:
        """Take note of a function or a module: what is compiled does not run as it is written."""
        if self._ran.is_known and is_compiled(value):
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
        return self.elsewhere(id(function) in self._elsewhere)
