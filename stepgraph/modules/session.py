"""A `ModuleSession` holds what the graphed modules of one model share: their order, and the moment of capture."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.backends import Backend, is_capturing
from stepgraph.buffers.reuse_pool import TensorReusePool
from stepgraph.frames import warn_user
from stepgraph.guards.hooks import is_hooked
from stepgraph.modules.memory_plan import AnyOrder, FixedOrder
from stepgraph.modules.recorder import Event, Recorder
from stepgraph.modules.round import FixedRound, RoundCapture, backward_autocast
from stepgraph.modules.site import ModuleCall, ModuleSite, SiteOwner
from stepgraph.observe.finder import devices
from stepgraph.oplog import first_difference
from stepgraph.pair.proof import AuditTurns, can_audit_now
from stepgraph.pair.runner import Runner
from stepgraph.pair.shared import PairSession, live_sessions
from stepgraph.session.backend_choice import backend_of
from stepgraph.session.session import Session


class ModuleSession(PairSession):
    """The managers of one model, the order they run in, and the moment of capture."""

    def __init__(self, session: Session | None = None, model: torch.nn.Module | None = None) -> None:
        super().__init__(session)
        self.model = model
        self.recorder = Recorder(self.lanes.busy, lambda: self.session.backend, self.logs)
        self.managers: list[SiteOwner] = []
        self.order: FixedRound | None = None
        """The calls that share memory by their order, where that is asked for."""
        self.capture_seconds = 0.0
        self.turns = AuditTurns("auto")
        self.session.when_dropped(self._dropped)

    def add(self, manager: SiteOwner) -> None:
        """Take a manager in."""
        if not self.managers:
            self.turns = AuditTurns(manager.options.audit)
        self.managers.append(manager)

    def backend_for(self, module: torch.nn.Module, leaves: Iterable[Any]) -> Backend:
        """The backend, chosen by where the model's parameters are, or what the first call is given."""
        if not self.session.has_backend:
            self.session.settle(backend_of(devices(iter((self.model, module, *leaves)))))
        return self.session.backend

    @property
    def is_warming(self) -> bool:
        """Whether a call runs eagerly to warm up, or waits for the backward of such a run."""
        return self._warming > 0 or self.recorder.is_waiting

    # -- auditing

    def begin_round(self) -> None:
        """A replay comes when no other is under way: if it is time, all kinds of calls are compared first."""
        self.lanes.calls.begun = 0
        if not self.turns.begin():
            return
        if not can_audit_now():
            self.turns.put_off()
            return
        for manager in self.managers:
            for site in list(manager.sites.values()):
                if site.runners:
                    manager.holds(site, audited=True)
        self.turns.end()

    # -- capturing

    def create_warm(self) -> None:
        """At the end of a round: capture the graphs of the calls that have warmed up."""
        ready = [e for e in self.recorder.round if self._is_warm(e.call.site)]
        for event in ready:
            self.recorder.credit.pop(id(event.call.site), None)
        if ready:
            self.create(ready, fixed=self.recorder.repeats)

    def _is_warm(self, site: ModuleSite) -> bool:
        rounds = self.recorder.rounds[id(site)]
        if site.finding is not None:
            if site.obstacle is None and rounds >= max(2, site.manager.options.warmup):
                site.manager.failed(site, site.finding)
            return False
        warm = rounds + self.recorder.credit.get(id(site), 0)
        return not site.runners and site.obstacle is None and warm >= site.manager.options.warmup

    def create_cudagraphs(self) -> None:
        """Capture all forwards and backwards of the last round, in its order, whatever the warm-up."""
        order = self.recorder.events if self.recorder.is_settled and self.recorder.events else self.recorder.round
        self.create([e for e in order if e.call.site.is_open])

    def create(self, events: Sequence[Event], *, fixed: bool = True) -> None:
        """Capture these forwards and backwards, in their order. `fixed`: it can be relied on, if that is asked for."""
        begun = time.perf_counter()
        in_order = [event for event in events if fixed and self._is_fixed(event.call)]
        if any(event.backward for event in in_order):
            self._create_fixed(in_order)
            events = [event for event in events if event not in in_order]
        if events:
            self._capture(RoundCapture(events, AnyOrder(self.lanes), self.session.backend.device))
        self.capture_seconds += time.perf_counter() - begun

    def _capture(self, captured: RoundCapture) -> None:
        with self.session.workspace.capturing():
            captured.run(lambda call, error: call.site.manager.failed(call.site, error))
        self.session.backend.synchronize()
        if captured.runners:
            self.turns.restart()

    def _is_fixed(self, call: ModuleCall) -> bool:
        """Whether a call is to share memory by the order; one order at a time can be fixed, and none of evaluations."""
        return self.order is None and call.is_differentiable and call.site.manager.options.single_mempool

    def _create_fixed(self, events: Sequence[Event]) -> None:
        device, lane = self.session.backend.device, self.lanes.exclusive()
        captured = RoundCapture(events, FixedOrder(lane, TensorReusePool(device)), device)
        self._capture(captured)
        self.order = FixedRound(events, captured.runners, lane)

    def capture_one(self, site: ModuleSite, call: ModuleCall) -> Runner | None:
        """One more runner for calls of a kind that is captured, with memory of its own."""
        begun = time.perf_counter()
        try:
            with self.session.workspace.capturing():
                pair = site.manager.pair()
                runner = pair.forward(call, self.lanes.spare())
                found = first_difference(site.runners[0].forward.log, runner.forward.log)
                if found is not None:
                    runner.free()
                    site.again = f"it would run other operations by now   [changed-operations]\n  {found}"
                    warn_user(f"{site.manager.name}: {site.again}\nIts calls warm up again.")
                    return None
                if any(meta is not None for meta in call.metas) and call.backward_ambient is not None:
                    pair.backward(runner, call.metas, {}, backward_autocast(call))
        except Exception as error:  # noqa: BLE001 (the call goes on eagerly)
            site.manager.failed(site, error)
            return None
        site.add(runner)
        self.capture_seconds += time.perf_counter() - begun
        return runner

    def copy_results(self, held: Iterable[Runner]) -> None:
        """Hand out copies of the results and gradients that callers hold on to, from now on."""
        for site in [site for manager in self.managers for site in manager.sites.values()]:
            holding = [runner for runner in site.runners if runner in held]
            site.copy_results({index for runner in holding for index in runner.result.held()})
            if any(runner.has_held_grads() for runner in holding):
                site.copy_grads()

    def outside_parameters(self, manager: SiteOwner) -> set[int]:
        """Parameters whose gradients must pass through autograd: hooks, `main_grad`, or a use outside the module."""
        own = {id(m) for m in manager.module.modules()}
        found = {id(p) for p in manager.module.parameters() if is_hooked(p)}
        elsewhere = self.model.modules() if self.model is not None else _others(self.managers, manager)
        for module in elsewhere:
            if id(module) not in own:
                found |= {id(p) for p in module._parameters.values() if p is not None}
        return found

    def note_returned(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Remember leaves that a call has returned; whether a graph accumulates the gradient of one of them by itself.

        Autograd accumulates it from now on, since it must add up all uses, inside and outside, in eager's order.
        """
        new = [tensor for tensor in tensors if tensor not in self.returned]
        for tensor in new:
            self.returned[tensor] = None
        return any(self.grads.knows(tensor) for tensor in new)

    # -- ending

    def _dropped(self) -> None:
        """The session has freed all graphs at once."""
        for runner in [r for manager in self.managers for site in manager.sites.values() for r in site.runners]:
            runner.free()
        self.drop_graphs()

    def drop_changed(self, manager: SiteOwner, why: str) -> None:
        """Free the graphs of a module that has changed; calls that had graphs need only one whole round to warm up.

        Where calls share memory by their order, the graphs of all modules go.
        """
        manager.recapture_reasons[why] += 1
        in_order = self.order is not None
        known = [site for owner in (self.managers if in_order else [manager]) for site in owner.sites.values()]
        warm = {id(site): site.manager.options.warmup - 1 for site in known if site.runners}
        if in_order:
            self.drop_graphs()
        else:
            manager.drop()
        self.recorder.credit.update(warm)

    def drop_graphs(self) -> None:
        """Free all graphs; calls warm up and are captured anew, with what was learnt about them."""
        if self.order is not None:
            self.order.end()
            self.order = None
        for manager in self.managers:
            manager.drop()

    def delete_cuda_graphs(self) -> None:
        """Free all graphs; calls warm up and are captured anew, as if they had never been."""
        self.drop_graphs()
        self.recorder.credit.clear()
        self.returned = WeakTensorKeyDictionary()
        for manager in self.managers:
            manager.forget()

    def close(self) -> None:
        """Free all graphs; the modules go on eagerly."""
        if not self.is_closed:
            self.delete_cuda_graphs()
        super().close()


def create_cudagraphs() -> None:
    """Capture all forwards and backwards that were recorded and have no graphs yet, in the order of the last round."""
    for shared in live_sessions():
        if isinstance(shared, ModuleSession):
            shared.create_cudagraphs()


def delete_cuda_graphs() -> None:
    """Free the graphs of all graphed modules; their calls warm up and are captured anew."""
    for shared in live_sessions():
        if isinstance(shared, ModuleSession):
            shared.delete_cuda_graphs()


def is_graph_capturing() -> bool:
    """Whether the calling thread records a graph right now; autograd's device threads are asked like any other."""
    return is_capturing()


def is_graph_warmup() -> bool:
    """Whether a graphed module runs eagerly to warm up, or waits for the backward of such a run."""
    return any(shared.is_warming for shared in live_sessions() if not shared.is_closed)


def _others(managers: Iterable[SiteOwner], manager: SiteOwner) -> Iterable[torch.nn.Module]:
    return (module for other in managers if other is not manager for module in other.module.modules())
