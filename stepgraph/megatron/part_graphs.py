"""`PartGraphs` takes the place of a part's forward, with one graph for each microbatch in flight.

The training loop says which microbatch comes next (`set_current_microbatch`); a call of the part replays that graph.
Where one microbatch is over before the next begins, one graph serves them all. Calls that no graph was captured for run
as before: in the other mode (evaluation), without gradients, inside a larger capture. A model chunk lists its graphed
parts, so that `set_current_microbatch` does not walk through its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument, StepgraphError
from stepgraph.core.frames import untraced
from stepgraph.core.tracebacks import trim
from stepgraph.engine.backends import is_capturing
from stepgraph.engine.order.entries import is_count
from stepgraph.engine.parts.modules.scopes import Part
from stepgraph.engine.record.pair.module_method import ModuleMethod, called_method, put_in_place
from stepgraph.megatron.samples import CallForm, Sample

_PARTS = "_parts_with_graphs"
"""The attribute of a model chunk that lists its graphed parts."""


class PartGraphs:
    """Takes the place of a module's forward, or of another method, and replays its graphs."""

    def __init__(
        self, chunk: torch.nn.Module, part: Part, sample: Sample, graphs: Sequence[Any], *, one_for_all: bool
    ) -> None:
        self.part, self.graphs = part, tuple(graphs)
        self.microbatch: int | None = None
        """None before any was set."""
        self.manual_hooks: list[Callable[[], Any]] = []
        """Run before each replay, in place of hooks inside the part."""
        self._one_for_all = one_for_all
        self._modes = vars(part.module)
        self._training = part.module.training
        self._place = called_method(part.module, part.method)
        self._eager = ModuleMethod(part.module, self._place)
        self._form = CallForm(getattr(part.module, part.method))
        self._num_args, self._names = len(sample.args), frozenset(sample.kwargs)
        self._listed: dict[str, Any] = vars(chunk)
        self._listed[_PARTS] = [*graphs_in(chunk), self]
        self._take_back = put_in_place(part.module, self._place, self)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the part: by replay, or as before."""
        try:
            if self._modes["training"] is not self._training or not torch.is_grad_enabled():
                return self._eager()(*args, **kwargs)
            graph = self._of(self.microbatch)
            for hook in self.manual_hooks:
                hook()
            if len(args) != self._num_args or kwargs.keys() != self._names:
                call = self._form(args, kwargs)
                args, kwargs = call.args, call.kwargs
            return graph(*args, **kwargs)
        except StepgraphError as error:
            trim(error)
            raise

    def __reduce__(self) -> Any:
        """A copy of the module, by copy.deepcopy or by pickle, is a plain module."""
        return getattr, (self.part.module, self.part.method)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients of the current microbatch are split off and wait to be replayed."""
        index = 0 if self._one_for_all or self.microbatch is None else self.microbatch
        return index < len(self.graphs) and bool(self.graphs[index].need_backward_dw())

    def backward_dw(self, microbatch: int | None = None) -> None:
        """Replay the weight gradients of a microbatch, the current one if none is named, where they are split off."""
        try:
            self._of(self.microbatch if microbatch is None else microbatch).backward_dw()
        except StepgraphError as error:
            trim(error)
            raise

    def _of(self, microbatch: int | None) -> Any:
        if self._one_for_all:
            return self.graphs[0]
        if microbatch is not None and 0 <= microbatch < len(self.graphs):
            return self.graphs[microbatch]
        if torch.compiler.is_compiling() or is_capturing():
            return self._eager()  # a part of something larger
        if microbatch is None:
            raise InvalidArgument(
                f"`{self.part.path}` is called, and no current microbatch was set",
                rule="current-microbatch",
                why="each microbatch has graphs of its own.",
                fix="call stepgraph.set_current_microbatch(model, microbatch_id) before each forward, from 0.",
            )
        raise InvalidArgument(
            f"`{self.part.path}` is called for microbatch {microbatch}, and {len(self.graphs)} were captured",
            rule="current-microbatch",
            details=[f"captured  microbatches 0 to {len(self.graphs) - 1}", f"received  {microbatch}"],
            why="each microbatch has its own graphs; those of another one hold activations that may still be needed.",
            fix="helper.delete_cuda_graphs(), and make a helper with the larger num_microbatches.",
        )

    @property
    def is_in_place(self) -> bool:
        """Whether calls of the part come here."""
        return self._modes.get(self._place) is self

    def remove(self) -> None:
        """Free the graphs, and restore the part."""
        self._take_back()
        listed = self._listed.get(_PARTS, [])
        if self in listed:
            listed.remove(self)
        if not listed:
            self._listed.pop(_PARTS, None)
        graphs, self.graphs = self.graphs, ()
        self.manual_hooks.clear()
        for graph in graphs:
            graph.reset()


def graphs_in(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[PartGraphs]:
    """The parts of a model, or of several chunks, that have graphs of this kind."""
    found: list[PartGraphs] = []
    for chunk in [model] if isinstance(model, torch.nn.Module) else model:
        listed = vars(chunk).get(_PARTS)
        if listed is None:
            listed = [value for module in chunk.modules() for value in vars(module).values()]
        found += [each for each in listed if type(each) is PartGraphs]
    return found


def set_current_microbatch(model: torch.nn.Module | Sequence[torch.nn.Module], microbatch_id: int) -> None:
    """Say which microbatch the next forward of a model chunk is of, counted from 0 in each step.

    Example:
        >>> for index, batch in enumerate(microbatches):
        ...     stepgraph.set_current_microbatch(model, index)
        ...     model(batch)

    Where nothing has graphs it does nothing, so that a schedule may always call it.
    """
    if not is_count(microbatch_id):
        raise InvalidArgument(
            f"microbatch_id is {microbatch_id!r}",
            rule="current-microbatch",
            why="it is a whole number, counted from 0 in each step.",
            fix="set_current_microbatch(model, 0) for the first microbatch.",
        )
    for graphs in graphs_in(model):
        graphs.microbatch = int(microbatch_id)
