"""Which code has run: a library is looked through as far as that, and no further.

What a recorded call does is decided by the code that ran and by the values which that code has read. A function that
did not run has read none. Of the user's own code this makes little difference. A library is another matter: a layer of
Hugging Face's can name thousands of functions, down to those that download weights and draw progress bars, and runs
twenty.

Where a profiler has taken Python's only place for one, or code is compiled, it is not known what runs, and everything
counts.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch


class ExecutedCode:
    """The code that was seen to run in some calls."""

    def __init__(self) -> None:
        self._codes: dict[int, types.CodeType] = {}
        """By id; kept, so that no other code takes the id of one."""
        self._is_whole = True
        self._is_elsewhere = False
        self.is_all_that_counts = False
        """Whether there is so much else that nothing else is looked at, not even of the user's code."""

    @property
    def is_known(self) -> bool:
        """Whether a call was looked on at, and all of them were."""
        return self._is_whole and bool(self._codes)

    def __contains__(self, code: types.CodeType) -> bool:
        return id(code) in self._codes

    def give_up(self) -> None:
        """What runs cannot be seen."""
        self._is_whole = False

    @contextlib.contextmanager
    def noting(self, backwards_on: torch.device | None = None) -> Iterator[None]:
        """Note what runs in this block, in this thread, and in that of backwards on a device."""
        found = sys.getprofile()
        outer = getattr(found, "__self__", None)
        if found is not None and type(outer) is not ExecutedCode:
            self.give_up()
            yield
            return
        sys.setprofile(self._note)
        try:
            if backwards_on is not None:
                _in_a_backward(backwards_on, self._begin)
            yield
        finally:
            if backwards_on is not None:
                _in_a_backward(backwards_on, self._end)
            if sys.getprofile() == self._note:
                sys.setprofile(found)
            else:  # the block has used a profiler, or ended one that it found
                self.give_up()
            if type(outer) is ExecutedCode:
                outer._codes |= self._codes
                outer._is_whole = outer._is_whole and self._is_whole

    def _begin(self) -> None:
        self._is_elsewhere = sys.getprofile() is None  # else autograd uses this very thread, or has a profiler
        if self._is_elsewhere:
            sys.setprofile(self._note)

    def _end(self) -> None:
        if self._is_elsewhere and sys.getprofile() == self._note:
            sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            self._codes[id(code)] = code


class Unnoted:
    """A block of which nothing is noted: there are many, and what runs in them is known."""

    __slots__ = ("_found",)

    def __enter__(self) -> None:
        self._found: Any = None
        found = sys.getprofile()
        if type(getattr(found, "__self__", None)) is ExecutedCode:
            self._found = found
            sys.setprofile(None)

    def __exit__(self, *error: object) -> None:
        if self._found is not None:
            sys.setprofile(self._found)


def _in_a_backward(device: torch.device, call: Callable[[], None]) -> None:
    """Call something in the thread in which autograd runs backwards on a device, where that is not this one."""
    if device.type == "cpu":
        return
    plain = torch.autocast(device.type, enabled=False)
    with contextlib.suppress(RuntimeError), torch.inference_mode(False), torch.enable_grad(), plain:
        # a device that is out of memory or broken: that is the step's own error to tell
        result = torch.zeros((), device=device, requires_grad=True).neg()
        result.register_hook(lambda _: call())
        torch.autograd.backward(result)
