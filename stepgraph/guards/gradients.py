"""The gradient guard compares parameters with what a replay left: the gradient, the flag and the form of each.

Nothing in torch tells when a gradient is taken off a parameter, `requires_grad` is set, or data of another form is put
in, so these are read at each call; for a model of 150 parameters that is most of what a replay costs the
host. torch's compiler has guards in C++ that read them twice as fast as Python can. They are asked where torch has
them, in the form this module knows; they may say no without a cause, never yes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.native.row import PLAIN_TENSORS, GuardRow
from stepgraph.signature import compiler_guards

_NO_MESSAGE = [""]
"""What torch's guard would say of itself; nobody asks."""


class GradientGuard:
    """Parameters with the gradients, flags and forms that they have when nobody has touched them."""

    __slots__ = ("_check", "_expected", "_is_settled", "_parameters")

    def __init__(self, parameters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        self._parameters = list(parameters)
        flags = [p.requires_grad for p in parameters]
        forms = [(p.shape, p.stride(), p.dtype) for p in parameters]
        self._expected = list(zip(parameters, grads, flags, forms, strict=True))
        self._check: Callable[[list[torch.Tensor]], bool] | None = None
        self._is_settled = False

    def hold(self) -> bool:
        """Whether each parameter has just its gradient, its flag and its form."""
        if self._check is not None and torch.is_grad_enabled():  # without it, the guard does not see the flags
            return self._check(self._parameters)
        for parameter, grad, flag, form in self._expected:
            if parameter.grad is not grad or parameter.requires_grad is not flag:
                return False
            if (parameter.shape, parameter.stride(), parameter.dtype) != form:
                return False
        if not self._is_settled and torch.is_grad_enabled():  # all is as it should be: the moment to make the guard
            self._is_settled = True
            self._check = self._guard()
        return True

    def expect(self, row: GuardRow) -> None:
        """What `hold` comes down to with gradients enabled, but for forms: those are among the row's layouts.

        Without the library it is one call of torch's guard, once that is made; it knows the forms.
        """
        otherwise = self.hold if self._check is None else functools.partial(self._check, self._parameters)
        row.gradients(((parameter, grad, flag) for parameter, grad, flag, _ in self._expected), otherwise)

    def _guard(self) -> Callable[[list[torch.Tensor]], bool] | None:
        """torch's guard over all of them, or None where torch has none of this form."""
        # the compiler's Python half is there as soon as an optimizer was made; it is not worth its import here
        if "torch._dynamo.guards" not in sys.modules or any(type(p) not in PLAIN_TENSORS for p in self._parameters):
            return None
        for stack in ((None,), ()):  # later versions want a Python stack to tell users of
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
