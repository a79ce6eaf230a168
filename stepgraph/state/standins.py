"""Stand-ins for a module's parameters while its graphs are recorded.

A graph of a module's backward must compute gradients and not hand them out: the parameter's own accumulator belongs to
the stream of some earlier eager pass, which no capture may touch, and its hooks would run once, at capture. So for the
time of a recording each parameter's place in its module is taken by a fresh leaf over the same memory. Gradients of the
stand-ins are what the graph computes; where they go from there is decided outside. The parameters themselves never see
the recording. A parameter that has two places in the module has one stand-in in both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class StandIns:
    """The stand-ins of one module's trainable parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self._made: dict[int, torch.Tensor] = {}
        self.parameters: list[torch.Tensor] = []
        """The parameters, each once."""
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    self._places.append((owner._parameters, name, parameter, self._stand_in(parameter)))

    def _stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        found = self._made.get(id(parameter))
        if found is None:
            found = parameter.detach().requires_grad_()
            if isinstance(parameter, torch.nn.Parameter) and type(found) is torch.Tensor:
                found = torch.nn.Parameter(found)
            found.__dict__.update(parameter.__dict__)  # main_grad and what else code has hung on it
            found._backward_hooks = None
            self._made[id(parameter)] = found
            self.parameters.append(parameter)
        return found

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The stand-ins, in the order of `parameters`."""
        return [self._made[id(parameter)] for parameter in self.parameters]

    def original(self, leaf: torch.Tensor) -> torch.Tensor:
        """The parameter that a leaf stands for, or the leaf itself."""
        return next((p for p in self.parameters if self._made[id(p)] is leaf), leaf)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the stand-ins into the module for the length of a block."""
        for where, name, _, stand_in in self._places:
            where[name] = stand_in
        try:
            yield
        finally:
            for where, name, parameter, _ in self._places:
                where[name] = parameter
