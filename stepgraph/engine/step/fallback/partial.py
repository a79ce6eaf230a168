"""Backwards of an observed step that compute some gradients only, or gradients of gradients.

These are `torch.autograd.grad`, and a backward with `create_graph=True` or `inputs=`. A recorded backward computes all
gradients once. So no module that such a backward may reach can be graphed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgraph.engine.backends.threads import replaced

_ARGUMENTS = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
"""The arguments of `torch.autograd.backward` after the tensors."""


class PartialBackwards:
    """Finds such backwards."""

    def __init__(self) -> None:
        self.call: str | None = None
        """The last one that was found, as the step has written it."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See the backwards of this block."""

        def backward(below: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            for name in ("create_graph", "inputs"):
                if given.get(name):
                    self.call = f"backward({name}=...)"
            below(tensors, *args, **kwargs)

        def grad(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.call = "torch.autograd.grad"
            return below(*args, **kwargs)

        with replaced(torch.autograd, "backward", backward), replaced(torch.autograd, "grad", grad):
            yield
