"""A `ModuleSession` holds the state that the graphed modules of one model share, and decides when to capture."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Collection, Hashable, Sequence

import torch

from stepgraph.core.ambient import changed_flags
from stepgraph.core.frames import warn_user
from stepgraph.core.tracebacks import entry_point
from stepgraph.engine.backends import is_capturing
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.call.limits import weigh_changes
from stepgraph.engine.call.messages import warn_misspelt, warn_operations_changed, warn_other_answer
from stepgraph.engine.call.session import Session
from stepgraph.engine.guards.hooks import is_hooked
from stepgraph.engine.oplog import Difference, first_difference
from stepgraph.engine.order import Kind
from stepgraph.engine.parts.modules.delayed import leaves_weights, record_inputs, record_weights
from stepgraph.engine.parts.modules.memory_plan import AnyOrder, FixedOrder, MemoryPlan
from stepgraph.engine.parts.modules.recorder import Event, Recorder
from stepgraph.engine.parts.modules.round import FixedRound, RoundCapture
from stepgraph.engine.parts.modules.site import ManagedModule, ModuleCall, ModuleSite
from stepgraph.engine.record.pair.audit import differs
from stepgraph.engine.record.pair.call import EagerCall
from stepgraph.engine.record.pair.eager_proof import AuditTurns
from stepgraph.engine.record.pair.guard import SiteGuard
from stepgraph.engine.record.pair.lanes import Tenant
from stepgraph.engine.record.pair.runner import Runner
from stepgraph.engine.record.pair.shared import PairSession, live_sessions


class ModuleSession(PairSession):
    """The managers of one model, the order of their calls, and the time of capture."""

    def __init__(self, session: Session | None = None, model: torch.nn.Module | None = None) -> None:
        super().__init__(session, self._forget_graphs)
        self.model = model
        self.recorder = Recorder(self, self.start_over)
        self.managers: list[ManagedModule] = []
        """The state of each manager's module."""
        self.grads.other_uses.when_found = weakref.WeakMethod(self._found_other_use)
        self.order: FixedRound | None = None
        """The calls that share memory by their order, if `single_mempool` is set."""
        self.session.when_dropped(self._dropped)

    def add(self, manager: ManagedModule) -> None:
        """Add a module."""
        if not self.managers:
            self.turns = AuditTurns(manager.options.audit)
        self.grads.other_uses.is_strict |= manager.options.strict
        self.managers.append(manager)

    @property
    def _sites(self) -> list[ModuleSite]:
        return [site for manager in self.managers for site in manager.sites.values()]

    def _warn_misspelt(self) -> None:
        """After the first capture, warn of names in `ignore` that no watched value has."""
        guards = [site.kind.guard for site in self._sites if site.kind.guard is not None]
        if guards:
            warn_misspelt(self.managers[0].options.ignore, set().union(*(guard.labels for guard in guards)))

    # -- auditing

    def begin_round(self) -> None:
        """Begin a round of replays. If an audit is due, compare all kinds of calls first."""
        self.lanes.calls.begun = 0
        if self.begins_audit():
            with interrupts_held():  # it is compared whole, or not at all
                for site in self._sites:
                    if site.runners:
                        self.holds(site, audited=True)
                self.turns.end()

    def holds(self, site: ModuleSite, *, audited: bool = False) -> bool:
        """True if no value that the graphs have baked in has changed. `audited`: also record again and compare."""
        guard = site.kind.guard
        assert guard is not None
        if site.again is not None:
            why, site.again = site.again, None
            self.start_over(site.manager, why)
            return False
        if audited and site.recorded is not None and changed_flags(site.recorded.ambient):
            return True  # no call of this kind comes before they are as they were
        if not audited and guard.holds():
            return True
        with interrupts_held():  # until what was found has its effect, too
            return self._is_as_recorded(site, guard, audited=audited)

    def _is_as_recorded(self, site: ModuleSite, guard: SiteGuard, *, audited: bool) -> bool:
        target = site.manager.target
        found = target.look(guard, functools.partial(self._differs, site, audited), audited=audited)
        if found is None:
            return True
        target.raise_if_strict(found.why)
        if found.is_answer:  # eager this time: the graphs may be right again at the next call
            site.manager.eager_reasons[f"another answer to what it asks of {', '.join(found.names)}"] += 1
            if found.difference is not None:
                warn_other_answer(target.name, found.changes, "module", "run eagerly")
            return False
        since = self.turns.since
        often = self._recapture(site, found.why, found.names)  # eager in this round, and captured again after it
        if found.difference is not None:
            warn_operations_changed(
                *(target.name, found.difference, found.changes, since),
                stays_eager=bool(often),
                whose="module",
                names="rounds",
            )
        return False

    def _differs(self, site: ModuleSite, audited: bool) -> Difference | None:
        """Record such a call again; return the first difference from the recording in use."""
        assert site.recorded is not None
        self.turns.audits += not audited  # those in their turn are counted by the round
        return differs(site.manager.target.pair(), site.recorded, site.runners[0])

    def _recapture(self, site: ModuleSite, why: str, names: Sequence[str]) -> list[str]:
        """Free a module's graphs, to be captured again. Return those of these names that change too often for that.

        Calls that had graphs need only one whole round to warm up. If calls share memory by their order, the graphs of
        all modules are freed.
        """
        manager = site.manager
        replays = max(runner.forwards for runner in site.runners)
        manager.changes, often = weigh_changes(manager.changes, names, replays)
        manager.recapture_reasons[why] += 1
        in_order = self.order is not None
        dropped = self._sites if in_order else manager.sites.values()
        warm = {id(other): other.manager.options.warmup - 1 for other in dropped if other.runners}
        if in_order:
            self.drop_graphs()
        else:
            manager.drop()
            self.recorder.forget()
        self.recorder.credit.update(warm)
        if often:
            manager.obstacle = f"it keeps changing: {', '.join(often)}"
            for other in manager.sites.values():
                other.kind.obstacle = manager.obstacle
        return often

    def warm_up_again(self, manager: ManagedModule, why: str) -> None:
        """Forget the noted calls of a module that was rebuilt since; `why` says how. It warms up again.

        Other modules that warm up need one more whole round.
        """
        if any(site.runners for site in manager.sites.values()):
            manager.target.raise_if_strict(why)
            manager.recapture_reasons[why] += 1
        if self.order is not None:
            self.drop_graphs()
        others = [site for site in self._sites if site.manager is not manager]
        credit = {id(site): self._rounds_of(site) for site in others}
        most = {id(site): site.manager.options.warmup - 1 for site in others}
        manager.forget()
        manager.rebuilt = why
        self.recorder.forget()
        self.recorder.credit = {key: min(rounds, most[key]) for key, rounds in credit.items()}

    def _rounds_of(self, site: ModuleSite) -> int:
        return self.recorder.rounds[id(site)] + self.recorder.credit.get(id(site), 0)

    def _is_as_noted(self, managers: Collection[ManagedModule]) -> bool:
        """Before a capture, look for changes of these modules since their calls; those that changed warm up again."""
        is_noted = True
        for manager in managers:
            graphed = [site for site in manager.sites.values() if site.runners]
            guards = [site.kind.guard for site in graphed if site.kind.guard is not None]
            if (rebuilt := manager.target.rebuilt()) is not None:
                self.warm_up_again(manager, rebuilt)
                is_noted = False
            elif not graphed:
                manager.target.renew_pair()
            elif (changed := next((why for g in guards if (why := g.changed_model()) is not None), None)) is not None:
                manager.target.raise_if_strict(changed)
                self._recapture(graphed[0], changed, (changed,))
                is_noted = False
        return is_noted

    # -- capturing

    def create_warm(self) -> None:
        """At the end of a round, capture the graphs of the calls that have warmed up."""
        for event in self.recorder.round:
            event.call.site.uses.settle()
        ready = [e for e in self.recorder.round if self._is_warm(e.call.site)]
        for event in ready:
            self.recorder.credit.pop(id(event.call.site), None)
        if ready:
            self.create(ready, fixed=self.recorder.repeats)

    def _is_warm(self, site: ModuleSite) -> bool:
        rounds = self.recorder.rounds[id(site)]
        if site.finding is not None:
            if site.kind.obstacle is None and rounds >= max(2, site.manager.options.warmup):
                site.manager.target.failed(site.kind, site.finding)
            return False
        warm = self._rounds_of(site)
        return not site.runners and site.kind.obstacle is None and warm >= site.manager.options.warmup

    def create_cudagraphs(self) -> None:
        """Capture all forwards and backwards of the last round, in its order, even before the warm-up ends."""
        for site in self._sites:
            site.uses.settle()
        order = self.recorder.events if self.recorder.is_settled and self.recorder.events else self.recorder.round
        self.create([e for e in order if e.call.site.is_open])

    def create(self, events: Sequence[Event], *, fixed: bool = True) -> None:
        """Capture these forwards and backwards in their order. `fixed`: the order may be used to share memory."""
        if not self._is_as_noted({id(m): m for m in (event.call.site.manager for event in events)}.values()):
            return  # the next round is captured
        with interrupts_held():
            self._create(events, fixed=fixed)

    def _create(self, events: Sequence[Event], *, fixed: bool) -> None:
        begun = time.perf_counter()
        in_order = [event for event in events if fixed and self._is_fixed(event.call)]
        if any(event.kind is not Kind.FORWARD for event in in_order):
            lane = self.lanes.exclusive()
            runners = self._capture(in_order, FixedOrder(lane, self.session.backend.device))
            self.order = FixedRound(in_order, runners, lane, self.session.backend.device)
            events = [event for event in events if event not in in_order]
        if events:
            self._capture(events, AnyOrder(self.lanes))
        if not self.capture_seconds:
            self._warn_misspelt()
        self.capture_seconds += time.perf_counter() - begun

    def _capture(self, events: Sequence[Event], plan: MemoryPlan) -> dict[Hashable, Runner]:
        captured = RoundCapture(events, plan, self.session.backend.device)
        try:
            with self.session.workspace.capturing():
                captured.run()
        except (KeyboardInterrupt, SystemExit):  # a second Ctrl-C does not wait: a half-captured round is of no use
            self.drop_graphs()
            raise
        self.session.backend.synchronize()
        if captured.runners:
            self.turns.restart()
        return captured.runners

    def _is_fixed(self, call: ModuleCall) -> bool:
        """True if a call shares memory by the order; only one order can be fixed, and none of evaluations."""
        return self.order is None and call.eager.is_differentiable and call.site.manager.options.single_mempool

    def capture_one(self, site: ModuleSite, call: EagerCall) -> Runner | None:
        """Capture one more runner, with its own memory, for a kind of call that has runners."""
        with interrupts_held():
            return self._capture_one(site, call)

    def _capture_one(self, site: ModuleSite, call: EagerCall) -> Runner | None:
        begun = time.perf_counter()
        try:
            with self.session.workspace.capturing():
                pair = site.manager.target.pair()
                site.uses.describe(call)
                runner = pair.forward(call, self.lanes.spare())
                found = first_difference(site.runners[0].forward.log, runner.forward.log)
                if found is not None:
                    runner.free()
                    site.again = f"its operations have changed since capture   [changed-operations]\n  {found}"
                    warn_user(f"{site.manager.name}: {site.again}\nIts calls warm up again.")
                    return None
                if any(meta is not None for meta in call.metas) and call.backward_ambient is not None:
                    self._capture_backward(site, runner, call)
        except Exception as error:  # noqa: BLE001 (the call goes on eagerly)
            site.manager.target.failed(site.kind, error)
            return None
        site.add(runner)
        self.capture_seconds += time.perf_counter() - begun
        return runner

    def _capture_backward(self, site: ModuleSite, runner: Runner, call: EagerCall) -> None:
        if leaves_weights(site, runner, call):
            part = record_inputs(site, runner, call, {})
            record_weights(site, runner, call, part, may_repeat=True)
        else:
            site.manager.target.pair().backward(runner, call.metas, {}, call.backward_autocast)

    def copy_results(self, held: Collection[Tenant]) -> None:
        """From now on return copies of the results and gradients that callers hold."""
        for site in self._sites:
            site.copy_held(held)

    def outside_parameters(self, graphed: torch.nn.Module) -> set[int]:
        """Parameters whose gradients must pass through autograd: hooks, `main_grad`, or a use outside the module."""
        own = {id(m) for m in graphed.modules()}
        found = {id(p) for p in graphed.parameters() if is_hooked(p)}
        found |= self.grads.other_uses.found(list(graphed.parameters()))
        for outer in [self.model] if self.model is not None else [manager.module for manager in self.managers]:
            for module in outer.modules():
                if id(module) not in own:
                    found |= {id(p) for p in module._parameters.values() if p is not None}
        return found

    def _found_other_use(self, parameter: torch.Tensor) -> None:
        """Capture again the graphs that add up several uses of a parameter, which other code has begun to use."""
        for site in self._sites:
            if site.again is None and any(id(parameter) in runner.edges.summed for runner in site.runners):
                site.again = "a parameter that it uses several times is used by other code too   [gradient-order]"

    # -- ending

    def _dropped(self) -> None:
        """Free all runners after the session has freed its graphs."""
        for runner in [runner for site in self._sites for runner in site.runners]:
            runner.free()
        self.drop_graphs()

    def start_over(self, manager: ManagedModule, why: str) -> None:
        """Free all graphs; the reason is counted for one module."""
        manager.recapture_reasons[why] += 1
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Free all graphs; calls warm up and are captured again, and keep the facts learnt about them."""
        if self.order is not None:
            self.order.end()
            self.order = None
        for manager in self.managers:
            manager.drop()
        self.recorder.forget()

    def _forget_graphs(self) -> None:
        self.drop_graphs()
        self.recorder.credit.clear()
        for manager in self.managers:
            manager.forget()


@entry_point
def create_cudagraphs() -> None:
    """Capture all forwards and backwards that were recorded and have no graphs yet, in the order of the last round."""
    for shared in live_sessions():
        if isinstance(shared, ModuleSession):
            shared.create_cudagraphs()


def delete_cuda_graphs() -> None:
    """Free the graphs of all graphed modules; their calls warm up and are captured again."""
    for shared in live_sessions():
        shared.delete_cuda_graphs()


def is_graph_capturing() -> bool:
    """Return True if the calling thread is recording a graph; it also works in autograd's device threads."""
    return is_capturing()


def is_graph_warmup() -> bool:
    """Return True if a graphed module runs eagerly to warm up, or waits for the backward of such a run."""
    return any(shared.is_warming for shared in live_sessions() if not shared.is_closed)
