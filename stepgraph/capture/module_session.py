"""What the graphed modules of one model share: a session, the order they run in, and the moment of capture."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stepgraph.backends import Backend, backend_for, is_capturing
from stepgraph.capture.ambient import other_flags
from stepgraph.capture.boundary import SharedBuffer
from stepgraph.capture.lane import Lanes
from stepgraph.capture.recorder import Event, RecordedCall, Recorder
from stepgraph.capture.runner import Runner
from stepgraph.capture.session import Session
from stepgraph.signature import AMBIENT_NAMES
from stepgraph.state.guards import RegistrationEvents
from stepgraph.state.reach import devices

if TYPE_CHECKING:
    from stepgraph.capture.manager import CudaGraphManager, ModuleSite

_CUDA, _CPU = AMBIENT_NAMES.index("autocast on cuda"), AMBIENT_NAMES.index("autocast on cpu")


_LIVE: weakref.WeakSet[ModuleSession] = weakref.WeakSet()
"""For the functions without arguments below, which Megatron's loops call at the end of a step."""


class ModuleSession:
    """The managers of one model, and all they have in common."""

    def __init__(self, session: Session | None = None, model: torch.nn.Module | None = None) -> None:
        self.session = session if session is not None else Session()
        self._owns_session = session is None
        self.model = model
        self.lanes = Lanes(self.session.lane_numbers)
        self.recorder = Recorder(self.lanes.busy)
        self.events = RegistrationEvents()
        self.managers: list[CudaGraphManager] = []
        self.capture_seconds = 0.0
        self.is_warming = False
        self.is_closed = False
        self.session.when_dropped(self._dropped)
        _LIVE.add(self)

    def add(self, manager: CudaGraphManager) -> None:
        """Take a manager in."""
        self.managers.append(manager)

    def backend_for(self, module: torch.nn.Module) -> Backend:
        """The backend, chosen by where the first module's parameters are."""
        if not self.session.has_backend:
            found = next(iter(devices(iter([module]))), None)
            self.session.settle(backend_for(found if found is not None else "cpu"))
        return self.session.backend

    def warming(self, run: Callable[[], Any]) -> Any:
        """Run an eager call of the warm-up."""
        before, self.is_warming = self.is_warming, True
        try:
            return run()
        finally:
            self.is_warming = before

    # -- capturing

    def create_warm(self) -> None:
        """At the end of a round: capture the graphs of the calls that have warmed up."""
        ready = [e for e in self.recorder.round if self._is_warm(e.call.site)]
        if ready:
            self.create(ready)

    def _is_warm(self, site: ModuleSite) -> bool:
        rounds = self.recorder.rounds[id(site)]
        return not site.runners and site.obstacle is None and rounds >= site.manager.options.warmup

    def create_cudagraphs(self) -> None:
        """Capture all forwards and backwards of the last round, in its order, whatever the warm-up."""
        order = self.recorder.events if self.recorder.is_settled and self.recorder.events else self.recorder.round
        self.create([e for e in order if not e.call.site.runners and e.call.site.obstacle is None])

    def create(self, order: list[Event]) -> None:
        """Capture these forwards and backwards, each kind of call once for each that was under way at a time."""
        begun = time.perf_counter()
        made: dict[tuple[int, int], Runner] = {}
        grads: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        shared = _shared_tensors(order)
        buffers: dict[tuple[int, int], SharedBuffer] = {}
        with self.session.workspace.capturing():
            for event in order:
                call = event.call
                slot = (id(call.site), call.slot)
                if call.site.obstacle is not None:
                    continue
                try:
                    if not event.backward and slot not in made:
                        made[slot] = self._forward(call, made, shared, buffers)
                    elif event.backward and slot in made and not made[slot].backwards:
                        self._backward(call, made, grads)
                except Exception as error:  # noqa: BLE001 (whatever broke it, the module stays eager)
                    self._give_up(call, error, made)
        for runner in made.values():
            runner.result.count_references()
        self.session.backend.synchronize()
        self.capture_seconds += time.perf_counter() - begun

    def _give_up(self, call: RecordedCall, error: Exception, made: dict[tuple[int, int], Runner]) -> None:
        for slot in [slot for slot in made if slot[0] == id(call.site)]:
            made.pop(slot).free()
        call.site.runners = []
        call.site.manager.failed(call.site, error)

    def _forward(
        self,
        call: RecordedCall,
        made: Mapping[tuple[int, int], Runner],
        shared: set[int],
        buffers: dict[tuple[int, int], SharedBuffer],
    ) -> Runner:
        site = call.site
        site.manager.check_capturable()
        different = other_flags(call.ambient)
        if different:
            raise RuntimeError(f"flags of the process have changed since the call: {', '.join(different)}")
        given = {}
        for index, (producer, result) in call.made_by.items():
            runner = made.get((id(producer.site), producer.slot)) if producer.slot == call.slot else None
            if runner is not None and runner.result.tensors[result].stride() == call.leaves[index].stride:
                given[index] = runner, runner.result.tensors[result].data
        used = {}
        for index, number in call.shared.items():
            if number in shared and not call.leaves[index].requires_grad:
                key = (call.slot, number)  # a microbatch of its own may pass another tensor
                if key not in buffers:
                    buffers[key] = SharedBuffer(call.leaves[index].empty(self.session.backend.device))
                used[index] = buffers[key]
        pair, lane = site.manager.pair(), self.lanes.at(call.slot)
        runner = pair.forward(call, given, used, lane)
        if not site.runners:
            site.manager.guard(site)
        site.add(runner)
        site.recorded = call
        return runner

    def _backward(
        self,
        call: RecordedCall,
        made: Mapping[tuple[int, int], Runner],
        grads: dict[tuple[int, int], dict[int, torch.Tensor]],
    ) -> None:
        slot = (id(call.site), call.slot)
        runner = made[slot]
        assert call.backward_ambient is not None
        metas = call.metas
        offered = grads.get(slot, {})
        given = {
            i: g
            for i, g in offered.items()
            if metas[i] is not None and metas[i].stride == g.stride()  # type: ignore[union-attr]
        }
        autocast = (call.backward_ambient[_CUDA], call.backward_ambient[_CPU])
        recorded = call.site.manager.pair().backward(runner, metas, given, autocast)
        for index, grad in zip(runner.flows, recorded.grads_out, strict=False):
            if grad is not None and index in call.made_by and call.made_by[index][0].slot == call.slot:
                producer, result = call.made_by[index]
                grads.setdefault((id(producer.site), producer.slot), {})[result] = grad

    def capture_one(self, site: ModuleSite, call: RecordedCall) -> Runner | None:
        """One more runner for calls of a kind that is captured, with memory of its own."""
        begun = time.perf_counter()
        try:
            with self.session.workspace.capturing():
                pair = site.manager.pair()
                runner = pair.forward(call, {}, {}, self.lanes.spare())
                if any(meta is not None for meta in call.metas) and call.backward_ambient is not None:
                    autocast = (call.backward_ambient[_CUDA], call.backward_ambient[_CPU])
                    pair.backward(runner, call.metas, {}, autocast)
        except Exception as error:  # noqa: BLE001 (the call goes on eagerly)
            site.manager.failed(site, error)
            return None
        runner.result.count_references()
        site.add(runner)
        self.capture_seconds += time.perf_counter() - begun
        return runner

    def copy_results(self, held: Iterable[Runner]) -> None:
        """Hand out copies of the results that callers hold on to, from now on."""
        for site in [site for manager in self.managers for site in manager.sites.values()]:
            found = {index for runner in site.runners if runner in held for index in runner.result.held()}
            if found:
                site.copy_results(found)

    def outside_parameters(self, manager: CudaGraphManager) -> set[int]:
        """Parameters whose gradients must pass through autograd: hooks, `main_grad`, or a use outside the module."""
        own = {id(m) for m in manager.module.modules()}
        found = {id(p) for p in manager.module.parameters() if _is_hooked(p)}
        elsewhere = self.model.modules() if self.model is not None else _others(self.managers, manager)
        for module in elsewhere:
            if id(module) not in own:
                found |= {id(p) for p in module._parameters.values() if p is not None}
        return found

    # -- ending

    def _dropped(self) -> None:
        """The session has freed all graphs at once."""
        for manager in self.managers:
            manager.drop()

    def delete_cuda_graphs(self) -> None:
        """Free all graphs; calls warm up and are captured anew."""
        for manager in self.managers:
            manager.drop()
        self.recorder.forget()

    def close(self) -> None:
        """Free all graphs; the modules go on eagerly."""
        if not self.is_closed:
            self.delete_cuda_graphs()
            self.is_closed = True
            self.events.close()
            if self._owns_session:
                self.session.close()


def create_cudagraphs() -> None:
    """Capture all forwards and backwards that were recorded and have no graphs yet, in the order of the last round."""
    for shared in list(_LIVE):
        shared.create_cudagraphs()


def delete_cuda_graphs() -> None:
    """Free the graphs of all graphed modules; their calls warm up and are captured anew."""
    for shared in list(_LIVE):
        shared.delete_cuda_graphs()


def is_graph_capturing() -> bool:
    """Whether the calling thread records a graph right now; autograd's device threads are asked like any other."""
    return is_capturing()


def is_graph_warmup() -> bool:
    """Whether a graphed module runs eagerly to warm up, or waits for the backward of such a run."""
    return any(shared.is_warming or not shared.recorder.is_settled for shared in list(_LIVE))


def _shared_tensors(order: Iterable[Event]) -> set[int]:
    """The tensors that calls of several sites were given, by number."""
    sites: dict[int, set[int]] = {}
    for event in order:
        for number in event.call.shared.values():
            sites.setdefault(number, set()).add(id(event.call.site))
    return {number for number, users in sites.items() if len(users) > 1}


def _is_hooked(parameter: torch.Tensor) -> bool:
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(hooks) or hasattr(parameter, "main_grad")


def _others(managers: Iterable[CudaGraphManager], manager: CudaGraphManager) -> Iterable[torch.nn.Module]:
    return (module for other in managers if other is not manager for module in other.module.modules())
