"""Recording one graph on the tape, as a session does it but without one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from stepgraph.core.errors import CaptureRefused
from stepgraph.engine.backends.base import Graph
from stepgraph.engine.backends.tape.mode import TapeBackend, TapeWorkspace


def record(
    workspace: TapeWorkspace, function: Callable[..., Any], *args: Any, generators: Sequence[torch.Generator] = ()
) -> tuple[Graph, Any]:
    """The graph of one call, and what the call returned."""
    graph = workspace.graph(generators)
    with workspace.capturing():
        graph.begin()
        try:
            result = function(*args)
            graph.end()
        except BaseException:
            graph.abort()
            raise
    return graph, result


def refused(function: Callable[..., Any], *args: Any) -> CaptureRefused:
    """The refusal that recording the call ends in."""
    with pytest.raises(CaptureRefused) as caught:
        record(TapeBackend().workspace(), function, *args)
    return caught.value


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equality of every bit: NaN is equal to itself."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    numbers = [
        t.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
        for t in (one, two)
        if t.numel()
    ]
    return not numbers or torch.equal(*numbers)
