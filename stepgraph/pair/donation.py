"""Compiled code that uses up what it has saved: its backward may write results where the activations were.

torch.compile lets a backward reuse the memory of activations that nobody else can see, and in return refuses a backward
that is to be run again. A recorded backward is replayed once for each replayed forward, which fills those activations
anew, so recording it is fine although the recording keeps autograd's graph. A caller who asks for a second backward of
one forward is refused as eager refuses them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stepgraph.pair.differentiate import nodes_behind


def uses_up_saved(results: Sequence[torch.Tensor]) -> bool:
    """Whether compiled code behind these tensors can run its backward only once."""
    if not getattr(_config(), "donated_buffer", False):
        return False
    for node in nodes_behind(results):
        if type(node).__name__ == "CompiledFunctionBackward":
            metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
            if getattr(metadata, "bw_donated_idxs", None) != []:  # None: it is not known yet
                return True
    return False


@contextlib.contextmanager
def recording_compiled_backwards() -> Iterator[None]:
    """Let compiled code run a backward that keeps autograd's graph."""
    config = _config()
    if not getattr(config, "donated_buffer", False):
        yield
        return
    with config.patch(donated_buffer=False):
        yield


def refuse_second_backward() -> RuntimeError:
    """The error of a backward that is to be run again."""
    return RuntimeError(
        "A backward with retain_graph=True reached a graphed module that is compiled. Compiled code uses up its "
        "activations in the first backward. Call backward() without retain_graph, or set "
        "torch._functorch.config.donated_buffer=False before the module is compiled."
    )


def _config() -> Any:
    return sys.modules.get("torch._functorch.config")
