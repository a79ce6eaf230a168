"""A `WarmCall` observes one eager call of a module for what no replay could repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from stepgraph.errors import CaptureError
from stepgraph.observe.module_attributes import ModuleAttributes
from stepgraph.ran import ExecutedCode
from stepgraph.rng.host_random import HostRandomWatch
from stepgraph.values.watch import Watch


class WarmCall:
    """Watches one eager call."""

    def __init__(
        self,
        function: Callable[..., Any],
        modules: dict[str, torch.nn.Module],
        ignore: Iterable[str],
        device: torch.device,
        ran: ExecutedCode,
    ) -> None:
        self._names = {id(module): name for name, module in modules.items()}
        self._ignore = frozenset(ignore)
        self._attributes = ModuleAttributes(list(modules.values()))
        self._values = Watch(function, self._ignore, modules, ran=ran)
        self._ran = ran
        self._random = HostRandomWatch(device)

    def noting(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call, with a look at the code that runs."""

        def noted() -> Any:
            with self._ran.noting():
                return call()

        return noted

    def finding(self) -> CaptureError | None:
        """What the call did that no replay could repeat."""
        for source in self._random.advanced():
            return CaptureError(
                f"the module draws from {source}",
                rule="host-random",
                why="it would be drawn once, at capture, and frozen.",
                fix="draw on the module's device (torch.rand(..., device=x.device)), or draw outside and pass it as a "
                "tensor argument (a plain number gets a graph for each value).",
            )
        for name in self._attributes.changed(lambda module: self._names[id(module)]):
            if not {name, name.rpartition(".")[2]} & self._ignore:
                return CaptureError(
                    f"the module sets `{name}` to something else at each call",
                    rule="module-attribute",
                    why="a replay runs no Python; whoever reads the attribute would find that of the capture.",
                    fix="return the tensor, or change a buffer in place. If nothing depends on the attribute, "
                    f"ignore=[{name!r}].",
                )
        for change in self._values.changed():
            if not change.is_users:
                continue  # a library's own: where eager calls run the same operations, nothing depends on it
            return CaptureError(
                f"the module itself changes {change}",
                rule="host-value",
                why="Python code runs only at capture, not at replay: the value would stand still.",
                fix="change it outside the module, make it a tensor that is changed in place, or, if nothing depends "
                f"on it, ignore=[{change.name!r}].",
            )
        return None
