"""A captured step is a chain of segments: graphs, and eager calls between them.

Where a call must stay on the host (an optimizer whose captured form is not bit-equal), the recording is cut: the graph
so far ends, the host call is noted, the next graph begins. Neither the graphs nor the noted calls run during the
recording; a chain takes effect only when it is replayed, from its first link to its last. That makes a capture a
transaction: if it fails, only Python references have to be restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.core.errors import CaptureError, StateChanged
from stepgraph.engine.backends import Graph
from stepgraph.engine.backends.random.tracker import STEP_FIX, state_of_another_graph, tracker_for
from stepgraph.engine.call.report import sum_known
from stepgraph.engine.call.session import Session
from stepgraph.engine.grads.step_grads import Attachment, GradCapture, attach
from stepgraph.engine.oplog import left_out


@dataclass(frozen=True, slots=True)
class GraphLink:
    """A segment that is replayed."""

    graph: Graph


@dataclass(frozen=True, slots=True)
class EagerLink:
    """A segment that is called eagerly. `grads` is each `.grad` that it finds, left by a graph or by Python."""

    name: str
    call: Callable[[], Any]
    grads: Attachment
    left: Attachment
    """Each `.grad` after the call, as the recording has assumed."""


class Chain:
    """The links of one captured step, in order."""

    def __init__(self, links: Sequence[GraphLink | EagerLink], final: Attachment, session: Session) -> None:
        self.links = tuple(links)
        self.final = final
        """Each `.grad` after the step."""
        self._session = session
        self._in_turn = self._plan({id(parameter): grad for parameter, grad in final})
        self._in_full = self._plan({})

    def _plan(self, now: dict[int, torch.Tensor | None]) -> list[tuple[Attachment, Callable[[], Any]]]:
        """List the work of each link, and the gradients to set before it. `now` are the gradients that the step finds.

        Gradients left by an eager link stay, except where the step's own Python changed them afterwards. A graph after
        an eager link refuses gradients that it was not recorded with.
        """

        def changes(grads: Attachment) -> Attachment:
            found = [(p, g) for p, g in grads if now.get(id(p), _UNKNOWN) is not g]
            now.update({id(p): g for p, g in found})
            return found

        plan: list[tuple[Attachment, Callable[[], Any]]] = []
        before: GraphLink | EagerLink | None = None
        for link in self.links:
            if isinstance(link, EagerLink):
                plan.append((changes(link.grads), link.call))
                now.update({id(p): grad for p, grad in link.left})
            else:
                if isinstance(before, EagerLink):
                    plan.append(([], functools.partial(_refuse_others, before.name, before.left)))
                plan.append(([], link.graph.launch))
            before = link
        last = changes(self.final)
        return [*plan, (last, _nothing)] if last else plan

    @functools.cached_property
    def single_launch(self) -> Callable[[], Any] | None:
        """The launch of the only graph, if a steady replay needs no more; else None."""
        changes, run = self._in_turn[0] if len(self._in_turn) == 1 else ((), None)
        return None if changes else run

    def replay(self, *, steady: bool = False) -> None:
        """Run the step once. `steady`: every `.grad` is the one that this chain left at its last replay."""
        for changes, run in self._in_turn if steady else self._in_full:
            if changes:
                attach(changes)
            run()

    @functools.cached_property
    def note_loaded(self) -> Callable[[torch.Tensor], None] | None:
        """Called when eager code writes to memory of the graphs, if the pool needs to know."""
        return next((link.graph.note_loaded for link in self.links if isinstance(link, GraphLink)), None)

    @functools.cached_property
    def follow(self) -> Callable[[], None] | None:
        """Called first at each replay, if the backend needs it."""
        return next((link.graph.follow for link in self.links if isinstance(link, GraphLink)), None)

    @property
    def nodes(self) -> int | None:
        """Nodes of all graphs, or None if they cannot be counted."""
        return sum_known([link.graph.nodes for link in self.links if isinstance(link, GraphLink)])

    def describe(self) -> str:
        """Describe the chain in one line: `graph (120 nodes) > AdamW.step`."""
        return " > ".join(
            link.name if isinstance(link, EagerLink) else f"graph ({link.graph.nodes or '?'} nodes)"
            for link in self.links
        )

    def free(self) -> None:
        """Give the graphs back."""
        for link in self.links:
            if isinstance(link, GraphLink):
                self._session.release(link.graph)


_UNKNOWN = object()


def _nothing() -> None:
    return


def _refuse_others(name: str, left: Attachment) -> None:
    """Refuse to run the next graph with other gradients than it was recorded with."""
    if not all(parameter.grad is grad for parameter, grad in left):
        raise StateChanged(
            f"{name} replaced or cleared gradients, and the step goes on after it",
            rule="optimizer-gradients",
            why="it runs between graphs, and the next graph was recorded with the gradients that it left during "
            "warm-up. It has run; the rest of the step has not.",
        )


class ChainRecorder:
    """Records a chain, and cuts it at each call of `cut`."""

    def __init__(self, session: Session, generators: Sequence[torch.Generator]) -> None:
        self._session = session
        self._random = tracker_for(session.backend)
        self._generators = tuple(dict.fromkeys((*generators, *self._random.generators)))
        self._links: list[GraphLink | EagerLink] = []
        self._graph: Graph | None = None
        self._grads: GradCapture | None = None

    def recorded_anything(self) -> bool:
        """Check whether anything was recorded so far that could have read memory."""
        return bool(self._links) or (self._graph is not None and self._graph.recorded_anything)

    def begin(self, grads: GradCapture) -> None:
        """Start the first segment."""
        self._grads = grads
        self._begin_graph()

    def cut(self, name: str, call: Callable[[], Any], imitate: Callable[[], Any] | None = None) -> Any:
        """End the segment, note a call to make between segments, and start the next segment.

        `imitate` stands in for the call during the recording: it changes gradients and returns a result as the call
        would.
        """
        if self._graph is None:
            raise CaptureError(
                f"{name} was called outside the recording",
                rule="cut",
                why="there is no segment to end here.",
                fix="call it from the thread that runs the step, before the step returns.",
            )
        with left_out(), self._random.left() as forked:  # each graph has all random states in place
            grads = self._end_graph()
            result = imitate() if imitate is not None else None
            assert self._grads is not None
            self._links.append(EagerLink(name, self._random.under(forked, call), grads, self._grads.left()))
            self._begin_graph()
        return result

    def finish(self) -> Chain:
        """End the last segment."""
        final = self._end_graph(last=True)
        return Chain(self._links, final, self._session)

    def abort(self) -> None:
        """Drop everything recorded."""
        if self._graph is not None:
            self._graph.abort()
            self._graph = None
        for link in self._links:
            if isinstance(link, GraphLink):
                self._session.release(link.graph)
        self._links.clear()

    def _begin_graph(self) -> None:
        self._random.begin_segment()
        self._graph = self._session.workspace.graph(self._generators)
        self._graph.begin()

    def _end_graph(self, *, last: bool = False) -> Attachment:
        """End the current graph, and drop it if it is empty. Return each `.grad` from here on."""
        assert self._graph is not None
        assert self._grads is not None
        grads = self._grads.end_segment(last=last)
        if self._graph.random.rewinds_to:
            raise state_of_another_graph("the step sets the random state", STEP_FIX)
        self._graph.end()
        graph, self._graph = self._graph, None
        if graph.nodes == 0:
            graph.free()
        else:
            self._session.adopt(graph)
            self._links.append(GraphLink(graph))
        return grads
