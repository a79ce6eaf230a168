"""Everything that stepgraph has graphed runs as the user wrote it, for a while.

The reference of a comparison is the user's own program. `running_plainly` gives it: inside the block captured steps,
graphed modules, callables and stages call the functions that they were made of, in this thread, and count nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from stepgraph.engine.backends.threads import replaced
from stepgraph.engine.parts.callables.graphed import GraphedCallable
from stepgraph.engine.parts.modules.manager import ModuleGraphs
from stepgraph.engine.parts.stages.manager import Mode
from stepgraph.engine.parts.stages.stage import GraphedStages
from stepgraph.engine.step.step import CapturedStep

__all__ = ["running_plainly"]


def _step(_: Callable[..., Any], step: CapturedStep[..., Any], *args: Any, **kwargs: Any) -> Any:
    return step.run_plainly(*args, **kwargs)


def _module(_: Callable[..., Any], graphs: ModuleGraphs, *args: Any, **kwargs: Any) -> Any:
    return graphs.original(*args, **kwargs)


def _callable(_: Callable[..., Any], graphed: GraphedCallable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return graphed.original(*args, **kwargs)


def _stages(_: Callable[..., Any], stages: GraphedStages) -> tuple[Mode, str]:
    return Mode.EAGER, "compared with graphs"


@contextlib.contextmanager
def running_plainly() -> Iterator[None]:
    """Run everything that is graphed as the user wrote it, during the block."""
    with (
        replaced(CapturedStep, "__call__", _step),
        replaced(ModuleGraphs, "__call__", _module),
        replaced(GraphedCallable, "__call__", _callable),
        replaced(GraphedStages, "_decide", _stages),
    ):
        yield
