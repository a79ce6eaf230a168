"""`OptimizerCudaGraphWrapper` captures the step of an optimizer by itself, by Megatron's contract.

It is a captured step (`stepgraph.capture`) without arguments. The optimizer decides where it runs: one whose captured
form has eager's bits runs inside the graph, with a learning rate that may change; another one runs between graphs.
`report().optimizers` says which, and why.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from stepgraph.config.spellings import at_least_one_step
from stepgraph.core.errors import InvalidArgument, StepgraphError
from stepgraph.core.frames import untraced
from stepgraph.core.tracebacks import entry_point, trim
from stepgraph.core.wording import with_article
from stepgraph.engine.call.options import checked
from stepgraph.engine.call.session import Session
from stepgraph.engine.optim.optimizer import OptimizerMode
from stepgraph.engine.step.options import StepOptions
from stepgraph.engine.step.refusals import refuse_no_step
from stepgraph.engine.step.report import Report
from stepgraph.engine.step.step import CapturedStep


class OptimizerCudaGraphWrapper:
    """Wraps an optimizer's step and captures it after some eager steps.

    A learning rate may change at each step, and gradients may be new tensors. Make schedulers before the wrapper takes
    the place of `optimizer.step`. `use_single_mempool` has no effect: wrappers with one `session` share a pool.

    Example:
        >>> optimizer.step = stepgraph.OptimizerCudaGraphWrapper(optimizer.step, cuda_graph_warmup_steps=1)
        >>> loss.backward()
        >>> optimizer.step()
    """

    @entry_point
    def __init__(
        self,
        optimizer_step_func: Callable[[], Any],
        cuda_graph_warmup_steps: int = 1,
        use_single_mempool: bool = False,
        *,
        optimizer: OptimizerMode = "auto",
        session: Session | None = None,
    ) -> None:
        checked("use_single_mempool", use_single_mempool, bool)
        is_zero = cuda_graph_warmup_steps == 0 and not isinstance(cuda_graph_warmup_steps, bool)
        steps = at_least_one_step(0) if is_zero else checked("cuda_graph_warmup_steps", cuda_graph_warmup_steps, int)
        self._owner, self._name = _owner_of(optimizer_step_func), getattr(optimizer_step_func, "__name__", "step")
        self._before: dict[str, Any] = {}
        """The owner's own attribute of this name, if it has one: a scheduler's wrapper."""
        functools.update_wrapper(self, optimizer_step_func)
        step_func: Callable[[], Any] = optimizer_step_func
        if self._owner is not None:
            attributes = vars(self._owner)
            self._before = {self._name: attributes[self._name]} if self._name in attributes else {}
            step_func = _looked_up(self._owner, self._name)
        refuse_no_step(step_func)
        self._step: Any = CapturedStep(step_func, StepOptions(warmup=steps, optimizer=optimizer), session, None)

    def __repr__(self) -> str:
        return repr(self._step)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step once."""
        try:
            if args or kwargs:
                given = ", ".join([*(type(arg).__name__ for arg in args), *(f"{name}=" for name in kwargs)])
                raise InvalidArgument(
                    f"the captured optimizer step was called with arguments: {given}",
                    rule="option",
                    why="it is captured as a call without arguments; a closure would run on the host.",
                    fix="call optimizer_step() and compute the loss before it.",
                )
            return self._as_before(self._step)
        except StepgraphError as error:
            trim(error)
            raise

    def _as_before(self, call: Callable[[], Any]) -> Any:
        """Call with the original in its place, if the wrapper stands there: `optimizer.step = wrapper`."""
        attributes = {} if self._owner is None else vars(self._owner)
        if attributes.get(self._name) is not self:
            return call()
        del attributes[self._name]
        attributes.update(self._before)
        try:
            return call()
        finally:
            attributes[self._name] = self

    def report(self) -> Report:
        """Return the report of the captured step."""
        found: Report = self._as_before(self._step.report)
        return found

    def reset(self) -> None:
        """Free the graphs. The next calls warm up and capture again."""
        self._step.reset()

    def close(self) -> None:
        """Free the graphs, and the session if the wrapper made it."""
        self._step.close()


def _owner_of(function: Any) -> Any:
    """The object whose method this is; also of an optimizer's step that a learning rate scheduler has wrapped."""
    if not callable(function):
        raise InvalidArgument(
            f"optimizer_step_func is {with_article(type(function))}, which cannot be called",
            rule="option",
            why="it must be the function that steps the optimizer.",
            fix="pass OptimizerCudaGraphWrapper(optimizer.step), without the brackets of a call.",
        )
    if inspect.ismethod(function):
        return function.__self__
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        owner = held() if isinstance(held, weakref.ref) else held
        if isinstance(owner, Optimizer) and vars(owner).get("step") is function:
            return owner
    return None


def _looked_up(owner: Any, name: str) -> Callable[[], Any]:
    """A method is looked up at each call, so that an optimizer can be cut out of a recording."""

    def optimizer_step() -> Any:
        return getattr(owner, name)()

    return optimizer_step
