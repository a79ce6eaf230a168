"""Compiled code and Triton's kernels bypass torch's dispatcher, and are noted by hooks of their own.

A call of compiled code is noted by the compiler's key for it, a hash of the code and of what it was compiled for, and
by its arguments; what runs within is not noted. A launch of a Triton kernel is noted by the kernel and its arguments,
the grid among them. Kernels of other extensions that bypass the dispatcher are not seen, nor are futures' callbacks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.oplog.log import current_log, left_out


@contextlib.contextmanager
def noting_unseen() -> Iterator[None]:
    """While a log is kept: note these calls, too."""
    with contextlib.ExitStack() as stack:
        compiled = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
        if compiled is not None:
            stack.enter_context(replaced(compiled, "__call__", _compiled))
        kernel = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
        if kernel is not None:
            stack.enter_context(replaced(kernel, "run", _launched))
        for method in ("then", "add_done_callback"):
            stack.enter_context(replaced(torch._C.Future, method, _called_back))
        yield


def _called_back(register: Callable[..., Any], future: Any, callback: Callable[..., Any]) -> Any:
    """A future calls back in any thread, mostly in one that no log sees: so none notes it."""

    def called(done: Any) -> Any:
        with left_out():
            return callback(done)

    return register(future, called)


def _compiled(call: Callable[..., Any], graph: Any, inputs: Any) -> Any:
    log = current_log()
    if log is None or log.is_hiding:
        return call(graph, inputs)
    name = f"compiled code {getattr(graph, '_fx_graph_cache_key', None) or id(graph)}"
    return log.note_call(name, inputs, lambda: call(graph, inputs))


def _launched(call: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
    log = current_log()
    if log is None or log.is_hiding:
        return call(kernel, *args, **kwargs)
    name = f"Triton kernel {getattr(kernel, '__name__', None) or kernel.fn.__name__}"
    grid = kwargs.get("grid")
    known = {key: value for key, value in kwargs.items() if key != "grid"}
    shown = (*args, *(item for pair in sorted(known.items()) for item in pair))
    return log.note_call(name, (*shown, None if callable(grid) else grid), lambda: call(kernel, *args, **kwargs))
