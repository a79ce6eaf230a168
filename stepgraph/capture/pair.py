"""Recording a module's forward and backward graphs.

Nothing runs while they are recorded, so no values are needed: arguments are buffers of the right geometry, and a
backward can be recorded at any time after its forward, whose autograd graph is kept. Both are transactions: a recording
that fails is dropped, with the module, its parameters and their gradients as before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stepgraph.backends import Graph
from stepgraph.capture.ambient import as_called, under_autocast
from stepgraph.capture.boundary import ArgMetadata, Boundary, SharedBuffer
from stepgraph.capture.lane import Lane
from stepgraph.capture.recorder import RecordedCall
from stepgraph.capture.runner import BackwardGraph, Runner, Use
from stepgraph.capture.session import Session
from stepgraph.capture.static_result import StaticResult
from stepgraph.errors import CaptureError
from stepgraph.state.module_state import leaves_behind
from stepgraph.state.param_grads import ParamGrads
from stepgraph.state.standins import StandIns
from stepgraph.tree import unflatten


class PairCapture:
    """Records the graphs of one module, or of one of its methods."""

    def __init__(
        self,
        function: Callable[..., Any],
        module: torch.nn.Module,
        session: Session,
        generators: Sequence[torch.Generator],
        *,
        need_backward: bool,
    ) -> None:
        self._function, self._module, self._session = function, module, session
        self._generators = tuple(generators)
        self._need_backward = need_backward
        self._stand_ins = StandIns(module)
        self._grads = ParamGrads(session.grads)
        self._rivals: weakref.WeakSet[Use] = weakref.WeakSet()
        self._known: list[torch.Tensor] = []
        self.outside: set[int] = set()
        """Parameters, by id, whose gradients autograd accumulates: something must happen there in Python."""

    def forward(
        self,
        call: RecordedCall,
        given: Mapping[int, tuple[Runner, torch.Tensor]],
        shared: Mapping[int, SharedBuffer],
        own: Mapping[int, torch.Tensor],
        lane: Lane,
    ) -> Runner:
        """Record a forward.

        `given` are arguments that are another runner's results, `shared` those of several calls, `own` have a buffer.
        """
        device = self._session.backend.device
        leaves = call.leaves
        tensors: dict[int, torch.Tensor] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, ArgMetadata):
                buffer = shared[index].tensor if index in shared else own.get(index)
                buffer = given[index][1] if index in given else buffer
                if buffer is None:
                    tensors[index] = leaf.empty(device)
                else:
                    tensors[index] = buffer.detach().requires_grad_(leaf.requires_grad)
        versions = {i: _version(t) for i, t in tensors.items()}
        args, kwargs = unflatten(call.structure, [tensors.get(i, leaf) for i, leaf in enumerate(leaves)])
        saved: set[int] = set()
        mode = contextlib.nullcontext() if self._need_backward else torch.no_grad()
        surroundings = self._surroundings(call.training)
        with surroundings, as_called(call.ambient), mode, _noting_saved(saved), self._recording(lane) as graph:
            result = StaticResult(self._function(*args, **kwargs), tensors)
        differentiable = any(result.differentiable)
        foreign = self._foreign_leaves(result, tensors) if differentiable else []
        routed = [p for p in self._stand_ins.parameters if call.in_ddp or id(p) in self.outside]
        outside = [*routed, *foreign] if differentiable else []
        reached = {id(leaf) for leaf in leaves_behind([t for t in result.tensors if t.requires_grad])}
        found = zip(self._stand_ins.parameters, self._stand_ins.leaves, strict=True)
        self._known = [p for p, leaf in found if id(leaf) in reached] if differentiable else self._stand_ins.parameters
        runner = Runner(
            graph,
            Boundary(tensors, shared, {i: producer.is_live for i, (producer, _) in given.items()}),
            result,
            mutated=[i for i, t in tensors.items() if _version(t) != versions[i]],
            flows=[i for i, t in tensors.items() if t.requires_grad] if differentiable else [],
            outside=outside,
            saved=frozenset(saved),
            anchor=torch.empty(0, device=device, requires_grad=differentiable),
            rivals=self._rivals,
            lane=lane,
            captured_at=lane.next_number(),
            training=call.training,
        )
        runner.capture_backward = self.backward_now
        return runner

    def known_parameters(self) -> list[torch.Tensor]:
        """The parameters that the last forward's graph rests on, frozen ones among them."""
        frozen = [p for p in self._module.parameters() if not p.requires_grad]
        return [*self._known, *frozen]

    def _foreign_leaves(self, result: StaticResult, tensors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        known = {id(t) for t in (*tensors.values(), *self._stand_ins.leaves)}
        found = leaves_behind([t for t in result.tensors if t.requires_grad])
        return list({id(leaf): leaf for leaf in found if id(leaf) not in known}.values())

    def backward_now(self, runner: Runner, metas: Sequence[ArgMetadata | None]) -> BackwardGraph:
        """Record a backward that is asked for in the middle of one."""
        with self._session.workspace.capturing(), runner.lane.counting_references():
            return self.backward(runner, metas, {}, _autocast_now())

    def backward(
        self,
        runner: Runner,
        metas: Sequence[ArgMetadata | None],
        given: Mapping[int, torch.Tensor],
        autocast: tuple[Any, Any],
    ) -> BackwardGraph:
        """Record the backward for gradients of this geometry. `given` are gradients in another graph's memory."""
        device = self._session.backend.device
        present = {i: meta for i, meta in enumerate(metas) if meta is not None}
        boundary = Boundary({i: given[i] if i in given else meta.empty(device) for i, meta in present.items()})
        results = [runner.result.tensors[i] for i in present]
        stand_ins = dict(zip(map(id, self._stand_ins.parameters), self._stand_ins.leaves, strict=True))
        outside = [stand_ins.get(id(p), p) for p in runner.outside]
        flows = [runner.boundary.tensors[i] for i in runner.flows]
        inside = [p for p in self._stand_ins.parameters if id(p) not in {id(o) for o in runner.outside}]
        sources = [*flows, *outside, *(stand_ins[id(p)] for p in inside)]
        before = [dict(p.__dict__) for p in self._stand_ins.leaves]
        reached = {id(leaf) for leaf in leaves_behind(results)}
        self._grads.part([p for p in inside if id(stand_ins[id(p)]) in reached])  # buffers are not made in the graph
        surroundings = self._surroundings(runner.training)
        with surroundings, under_autocast(*autocast), self._recording(runner.lane) as graph:
            grads = torch.autograd.grad(
                results, sources, list(boundary.tensors.values()), retain_graph=True, allow_unused=True
            )
            num_edges = len(flows) + len(outside)
            found = [(p, g) for p, g in zip(inside, grads[num_edges:], strict=True) if g is not None]
            part = self._grads.part([p for p, _ in found])
            _check_dense([g for g in grads if g is not None])
            with torch.no_grad():
                if found:
                    torch._foreach_add_(part.buffers, [g for _, g in found])
        at = runner.lane.next_number()
        made = BackwardGraph(graph, boundary, grads[:num_edges], part, self._marks(before), at)
        runner.add_backward((*metas, *autocast), made)
        return made

    def _marks(self, before: Sequence[dict[str, Any]]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Plain attributes that the backward has set on stand-ins, for the parameters they stand for."""
        found = []
        for parameter, leaf, old in zip(self._stand_ins.parameters, self._stand_ins.leaves, before, strict=True):
            new = {k: v for k, v in leaf.__dict__.items() if isinstance(v, (bool, int, str)) and old.get(k) is not v}
            if new:
                found.append((parameter, new))
        return found

    @contextlib.contextmanager
    def _surroundings(self, training: Sequence[bool]) -> Iterator[None]:
        modules = list(self._module.modules())
        before = [module.training for module in modules]
        _set_modes(modules, training)  # an evaluation is captured while the model trains, and the other way round
        try:
            with self._stand_ins.in_place():
                yield
        finally:
            _set_modes(modules, before)

    @contextlib.contextmanager
    def _recording(self, lane: Lane) -> Iterator[Graph]:
        graph = self._session.workspace.graph(self._generators, lane.number)
        graph.begin()
        try:
            yield graph
            graph.end()
        except BaseException:
            graph.abort()
            raise
        self._session.adopt(graph)


def _set_modes(modules: Sequence[torch.nn.Module], training: Sequence[bool]) -> None:
    for module, flag in zip(modules, training, strict=True):
        module.training = flag


@contextlib.contextmanager
def _noting_saved(saved: set[int]) -> Iterator[None]:
    """Note the memory that autograd keeps for the backward."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.untyped_storage()._cdata)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _check_dense(grads: Sequence[torch.Tensor]) -> None:
    for grad in grads:
        if grad.layout is not torch.strided:
            raise CaptureError(
                f"a parameter of shape {list(grad.shape)} has a sparse gradient",
                rule="sparse-grad",
                why="it has as many entries as the batch has rows: its memory differs from call to call.",
                fix="use dense gradients (nn.Embedding(..., sparse=False)).",
            )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _autocast_now() -> tuple[Any, Any]:
    cuda, cpu = (torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cuda", "cpu"))
    return cuda, cpu
