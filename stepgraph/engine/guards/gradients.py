"""The gradient guard compares parameters with what a replay left: the gradient, `requires_grad` and the form of each.

torch has no event for a gradient that is removed, a `requires_grad` that is set, or data of another form. So these are
read at each call; for a model of 150 parameters that is most of the host time of a replay. The guards of torch's
compiler read them in C++, twice as fast as Python. They are used if torch has them in the form that this module knows.
They may fail without a change, but never pass despite one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.core.storage import refuse_lazy
from stepgraph.engine.backends.native.row import PLAIN_TENSORS, GuardRow
from stepgraph.engine.guards.signature import compiler_guards

_NO_MESSAGE = [""]
"""The message of torch's guards, which is not used."""


class GradientGuard:
    """Parameters with their expected gradients, `requires_grad` flags and forms."""

    __slots__ = ("_check", "_expected", "_is_settled", "_parameters")

    def __init__(self, parameters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        self._parameters = list(parameters)
        flags = [p.requires_grad for p in parameters]
        refuse_lazy([(f"parameter {index}", parameter) for index, parameter in enumerate(parameters)], "the model")
        forms = [(p.shape, p.stride(), p.dtype) for p in parameters]
        self._expected = list(zip(parameters, grads, flags, forms, strict=True))
        self._check: Callable[[list[torch.Tensor]], bool] | None = None
        self._is_settled = False

    def hold(self) -> bool:
        """Check that each parameter has the expected gradient, flag and form."""
        if self._check is not None and torch.is_grad_enabled():  # under no_grad torch's guard does not see the flags
            return self._check(self._parameters)
        for parameter, grad, flag, form in self._expected:
            if parameter.grad is not grad or parameter.requires_grad is not flag:
                return False
            if (parameter.shape, parameter.stride(), parameter.dtype) != form:
                return False
        if not self._is_settled and torch.is_grad_enabled():  # nothing changed: torch's guard can be made now
            self._is_settled = True
            self._check = self._guard()
        return True

    def expect(self, row: GuardRow) -> None:
        """Add the check of `hold` to a row, with gradients enabled. Forms are left out: the row has them as layouts.

        Without the C++ library it is one call of torch's guard, once that is made, which includes the forms.
        """
        otherwise = self.hold if self._check is None else functools.partial(self._check, self._parameters)
        row.gradients(((parameter, grad, flag) for parameter, grad, flag, _ in self._expected), otherwise)

    def _guard(self) -> Callable[[list[torch.Tensor]], bool] | None:
        """Make torch's guard over all parameters, or return None if torch has none of this form."""
        # the compiler's Python part is imported as soon as an optimizer is made; importing it here is too slow
        if "torch._dynamo.guards" not in sys.modules or any(type(p) not in PLAIN_TENSORS for p in self._parameters):
            return None
        for stack in ((None,), ()):  # later versions take a Python stack for their messages
            try:
                root = compiler_guards.RootGuardManager()
                for index, (parameter, grad, _, _) in enumerate(self._expected):
                    self._add(root.list_getitem_manager(index, "", parameter, None), parameter, grad, stack)
                check: Callable[[list[torch.Tensor]], bool] = root.check
                if check(self._parameters):
                    return check
            except (AttributeError, TypeError, RuntimeError, ValueError):
                continue
        return None

    @staticmethod
    def _add(manager: Any, parameter: torch.Tensor, grad: torch.Tensor | None, stack: tuple[None, ...]) -> None:
        shape, strides = list(parameter.shape), list(parameter.stride())
        manager.add_tensor_match_guard(
            parameter, shape, strides, "", _NO_MESSAGE, *stack, type(parameter), torch._C._dispatch_keys(parameter)
        )
        manager.grad_manager("", grad, None).add_id_match_guard(id(grad), _NO_MESSAGE, *stack)
