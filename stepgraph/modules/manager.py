"""A manager owns the runners of one module, or of one of its methods, and chooses one of them at each call.

Calls with the same arguments, flags and modes are a site. While it warms up, its calls run eagerly and are recorded;
then its graphs are captured, and each call takes a runner that is ready. Where there is none, the call gets another
runner, up to `max_runners`; where nothing can be replayed, it runs eagerly, and is counted with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from stepgraph.errors import CaptureError, InvalidArgument, StateChanged
from stepgraph.frames import untraced, warn_user
from stepgraph.guards.hooks import global_hook, has_global_hooks, refuse_hooks, with_hooks
from stepgraph.guards.model import ModelGuard
from stepgraph.modules.options import options_from
from stepgraph.modules.report import ModuleReport, report_on
from stepgraph.modules.round import FixedRound
from stepgraph.modules.session import ModuleSession
from stepgraph.modules.site import LastModuleCall, ModuleSite
from stepgraph.observe.ddp import in_ddp
from stepgraph.observe.warm_call import WarmCall
from stepgraph.oplog import Difference, is_logged
from stepgraph.pair.audit import differs
from stepgraph.pair.guard import Finding, SiteGuard
from stepgraph.pair.in_flight import run_forward
from stepgraph.pair.module_method import ModuleMethod
from stepgraph.pair.record import PairCapture, with_modes
from stepgraph.pair.runner import Runner, RunnerState
from stepgraph.rng.tracker import CudaRNGStatesTracker, tracker_for
from stepgraph.session.backend_choice import refuse_elsewhere
from stepgraph.session.failure import capture_error
from stepgraph.session.limits import weigh_changes
from stepgraph.session.messages import signature_mismatch, unsigned, warn_operations_changed
from stepgraph.signature import (
    Signature,
    ambient_key,
    argument_names,
    leaf_keys,
    reason_for_eager,
    refuse_arguments,
)
from stepgraph.signature.ambient import changed_flags
from stepgraph.tree import CallFlattener, Structure
from stepgraph.values.watch import Watch

_LONGEST_ROUND = 1000
"""Calls after which a round is taken to begin although others are under way: their results may be kept for good."""
_training = operator.itemgetter("training")


class CudaGraphManager:
    """Graphs for the calls of one module. `graph_modules` makes one for each module in its scope.

    Example:
        >>> layer.forward = CudaGraphManager(config, base_module=layer)
    """

    def __init__(
        self,
        config: Any = None,
        base_module: torch.nn.Module | None = None,
        function_name: str | None = None,
        need_backward: bool = True,
        *,
        session: ModuleSession | None = None,
        name: str = "",
    ) -> None:
        if base_module is None:
            raise InvalidArgument(
                "CudaGraphManager was given no base_module",
                rule="option",
                why="the module's parameters, hooks and modes belong to what a graph takes for granted.",
                fix="CudaGraphManager(config, base_module=layer).",
            )
        self.module = base_module
        self.function_name = function_name or "forward"
        self.name = name or type(base_module).__name__
        self.options = options_from(config)
        self.session = session if session is not None else ModuleSession()
        self._method = ModuleMethod(base_module, self.function_name)
        self.need_backward = need_backward
        self.eager_reasons: Counter[str] = Counter()
        self.recapture_reasons: Counter[str] = Counter()
        self.sites: dict[Hashable, ModuleSite] = {}
        self.forwards = self.backwards = 0
        """Replays of graphs that are gone."""
        self.random: CudaRNGStatesTracker | None = None
        self._changes: Counter[str] = Counter()
        self._pair: PairCapture | None = None
        self._flatten = CallFlattener()
        self._is_capturing: Callable[[], bool] = bool  # until the backend is known, never
        self._last: LastModuleCall | None = None
        """How the last call of a known kind looked."""
        self._look_at_modules()
        self.session.add(self)

    @property
    def original(self) -> Callable[..., Any]:
        """What the graphs stand in for."""
        return self._method()

    def _look_at_modules(self) -> None:
        self._arguments = argument_names(self.original)
        self._modules = list(self.module.modules())
        self._modes = [vars(module) for module in with_modes(self.module)]

    @property
    def fork(self) -> str | None:
        """The named random state that is forked right now."""
        return self.random.active if self.random is not None else None

    def __reduce__(self) -> Any:
        """A copy of the module, by copy.deepcopy or by pickle, is a plain module."""
        return getattr, (self.module, self.function_name)

    # -- calling

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: by replay where a runner fits, eagerly where none does yet."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)  # a part of a larger compiled region
        last = self._last
        if last is not None and not self.session.is_closed and not has_global_hooks():
            leaves = last.fast_match.leaves_of(args, kwargs)
            if leaves is not None and last.around == self._around() and not self._is_capturing() and not is_logged():
                return self._replay(last.site, leaves, last.structure, (args, kwargs))
        return self._look_up(args, kwargs)

    def _replay(self, site: ModuleSite, leaves: list[Any], structure: Structure, given: tuple[Any, Any]) -> Any:
        calls = self.session.lanes.calls
        if site.runners and (not calls.num or calls.begun > _LONGEST_ROUND):
            self.session.begin_round()
        if site.runners and self.holds(site):
            runner = self._ready(site, leaves)
            if runner is not None:
                return run_forward(runner, leaves)
        return self._without_graph(site, leaves, structure, given)

    def modes(self) -> tuple[bool, ...]:
        """Train or eval, for each module."""
        return tuple(map(_training, self._modes))

    def _around(self) -> tuple[tuple[Hashable, ...], Hashable, Hashable, Hashable]:
        return self.session.ambient.read(), self.modes(), in_ddp(), self.fork

    def _look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that does not look like the one before."""
        if self.options.eager_reason is not None:
            self.eager_reasons[self.options.eager_reason] += 1
            return self.original(*args, **kwargs)
        session = self.session
        if self.random is None:
            self._is_capturing = session.backend_for(self.module, self._flatten(args, kwargs)[0]).capture_probe
            self.random = tracker_for(session.session.backend)
        if session.is_closed or self._is_capturing() or is_logged():
            return self.original(*args, **kwargs)  # a part of a larger capture
        around = self._around()
        leaves, structure = self._flatten(args, kwargs)
        try:
            keys = leaf_keys(leaves)
        except (InvalidArgument, RuntimeError) as error:  # an argument that no signature can be made of
            self._count_eager(unsigned(error))
            return self.original(*args, **kwargs)
        if (reason := reason_for_eager(around[0])) is not None:
            self.eager_reasons[reason] += 1
            return self.original(*args, **kwargs)
        site = self.sites.get((structure, keys, *around))
        self._last = site.last_call(args, kwargs, structure, around) if site is not None else None
        if has_global_hooks() and (hook := global_hook(self.options.safe_hooks)) is not None:
            self._count_eager(f"a hook on all modules, `{hook}`, would not run   [module-hook]")
            return self.original(*args, **kwargs)
        if site is None:
            site = self._new_site((structure, keys, *around), leaves, structure, keys)
        return self._replay(site, leaves, structure, (args, kwargs))

    def _ready(self, site: ModuleSite, leaves: Sequence[Any]) -> Runner | None:
        order = self.session.order
        if order is not None and site in order.kinds:
            return self._in_turn(order, site, leaves)
        guarded = self.options.outputs == "guarded"
        refused: Runner | None = None
        for runner in site.runners:
            if runner.can_take(leaves):
                if not guarded or not runner.lane.held_results(runner):
                    return runner
                refused = refused or runner
        if refused is None:
            return self._another(site)
        self._keep_results(refused)
        return None

    def _keep_results(self, refused: Runner) -> None:
        """A caller holds results that a replay would overwrite: they are copied from now on, and this call is eager."""
        held = refused.lane.held_results(refused)
        self.session.copy_results(held)
        if any(id(refused) in runner.held_up for runner in held):  # since the call before this one
            self._start_over("results of earlier calls are held on to")
            return
        self.eager_reasons["a result of an earlier call is still held; it is copied from now on"] += 1
        for runner in held:
            runner.held_up.add(id(refused))

    def _in_turn(self, order: FixedRound, site: ModuleSite, leaves: Sequence[Any]) -> Runner | None:
        """The runner whose turn it is; raises if it is not this module's."""
        runner = order.take_forward(site)
        if not runner.boundary.is_free_for(leaves):
            self._start_over("an argument is no longer another module's result")
            return None
        held = runner.lane.held_results(runner) if self.options.outputs == "guarded" else []
        if held:
            self.session.copy_results(held)
            self._start_over("results of earlier calls are held on to")
            return None
        return runner

    def state_by_id(self) -> dict[int, torch.Tensor]:
        """The parameters and buffers of the module."""
        return {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}

    def note_returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """A call has returned parameters, or other leaves, themselves: autograd accumulates their gradients."""
        if self.session.note_returned(tensors):
            self._start_over("a parameter whose gradient a graph accumulates is returned as a result")

    def look_for_replays(self) -> None:
        """In the backward of an eager call: tell if it also comes to replayed calls, which share no casts with it."""
        if self.session.in_flight_of(self.module).has_more_to_come():
            for site in self.sites.values():
                if any(runner.edges.keeps_casts for runner in site.runners):
                    site.tell_several()

    def _start_over(self, why: str) -> None:
        self.recapture_reasons[why] += 1
        self.session.drop_graphs()

    def _another(self, site: ModuleSite) -> Runner | None:
        """All runners wait for their backward, or their memory is in use: one more."""
        if len(site.runners) >= self.options.max_runners:
            if any(runner.state is RunnerState.FWD_READY for runner in site.runners):
                self.eager_reasons["calls in another order than captured, and max_runners is reached"] += 1
                return None
            needed = max(len(site.runners) + 1, site.most_under_way)
            raise CaptureError(
                f"{self.name}: {needed} calls are under way at once, and max_runners is {self.options.max_runners}",
                rule="max-runners",
                why="each call keeps its activations in a runner until its backward has run.",
                fix=f"raise max_runners to {needed} or more, or call backward() sooner.",
            )
        assert site.recorded is not None
        runner = self.session.capture_one(site, site.recorded)
        if runner is None:
            self.eager_reasons["no further runner could be captured"] += 1
        return runner

    def holds(self, site: ModuleSite, *, audited: bool = False) -> bool:
        """Whether nothing that the graphs have baked in has changed; `audited`, by a new recording, too."""
        assert site.guard is not None
        if site.again is not None:
            why, site.again = site.again, None
            self._start_over(why)
            return False
        if audited and site.recorded is not None and changed_flags(site.recorded.ambient):
            return True  # no call of this kind comes before they are as they were
        if not audited and site.guard.holds():
            return True
        found = self.look(site.guard, functools.partial(self._differs, site, audited), audited=audited)
        if found is None:
            return True
        self.raise_if_strict(found.why)
        since = self.session.turns.since
        often = self._recapture(site, found.why, found.names)  # eager in this round, and captured again after it
        if found.difference is not None:
            warn_operations_changed(
                *(self.name, found.difference, found.changes, since),
                stays_eager=bool(often),
                whose="module",
                counted="rounds",
            )
        return False

    def look(self, guard: SiteGuard, differs: Callable[[], Difference | None], *, audited: bool) -> Finding | None:
        """A reason not to replay the graphs that a guard belongs to."""
        try:
            return guard.look(differs, audited=audited)
        except Exception as error:  # noqa: BLE001 (as in a capture: whatever it is, the graphs are of no use)
            raised = capture_error(self.name, error)
            if self.options.strict:
                raise raised from (None if raised is error else error)
            return Finding(f"it can no longer be recorded as it was   [{raised.rule}]", (raised.rule,))

    def _differs(self, site: ModuleSite, audited: bool) -> Difference | None:
        """Where a recording of such a call would differ by now from the one that is replayed."""
        assert site.recorded is not None
        self.session.turns.audits += not audited  # those in their turn are counted by the round
        return differs(self.pair(), site.recorded, site.runners[0])

    def raise_if_strict(self, why: str) -> None:
        """Under strict a change is an error, before anything runs."""
        if self.options.strict:
            raise StateChanged(
                f"{self.name}: {why}",
                rule="state-changed",
                why="the captured graphs go on with what they were recorded with, and strict=True forbids else.",
                fix="call handle.reset() after the change, or leave strict=False.",
            )

    def _recapture(self, site: ModuleSite, why: str, names: Sequence[str]) -> list[str]:
        """Drop the graphs, to be captured anew; those of these names that change too often for that."""
        replays = max(runner.forwards for runner in site.runners)
        self._changes, often = weigh_changes(self._changes, names, replays)
        self.session.drop_changed(self, why)
        if often:
            for other in self.sites.values():
                other.obstacle = f"it keeps changing: {', '.join(often)}"
        return often

    def _new_site(
        self, key: Hashable, leaves: Sequence[Any], structure: Structure, keys: tuple[Hashable, ...]
    ) -> ModuleSite:
        call = Signature(structure, keys, ambient_key(), self.modes(), arguments=self._arguments)
        site = ModuleSite(self, call)
        site.keep_alive = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        try:
            refuse_arguments(leaves, call.names())
            refuse_elsewhere(self.module, leaves, self.session.session.backend)
        except InvalidArgument as error:
            site.obstacle = f"{error.what}   [{error.rule}]"
        if len(self.sites) >= self.options.max_signatures:
            if self.options.strict:
                raise signature_mismatch(self.name, call, [known.call for known in self.sites.values()])
            site.obstacle = f"past max_signatures={self.options.max_signatures}"
        else:
            self.sites[key] = site
        return site

    def _without_graph(
        self, site: ModuleSite, leaves: Sequence[Any], structure: Structure, given: tuple[Any, Any]
    ) -> Any:
        def run() -> Any:
            with contextlib.nullcontext() if self.need_backward else torch.no_grad():
                return self.original(*given[0], **given[1])

        if site.runners:
            return run()  # counted where it was decided
        if self._is_blocked(site):
            return run()
        if self.session.recorder.comes_round(site):
            self.session.create_warm()
            if site.runners:
                return self(*given[0], **given[1])
            if self._is_blocked(site):
                return run()
        self.eager_reasons["warm-up"] += 1
        device = self.session.session.backend.device
        watched = WarmCall(self.original, self._named(), self.options.ignore, device, site.ran)
        result = self.session.warming(lambda: self.session.recorder.run(site, leaves, structure, watched.noting(run)))
        site.seen = watched.finding() or site.results.varies
        return result

    def _is_blocked(self, site: ModuleSite) -> bool:
        """Whether calls here stay eager; counts this one if they do."""
        if site.obstacle is not None:
            self._count_eager(site.obstacle)
        return site.obstacle is not None

    def _count_eager(self, reason: str) -> None:
        """A call runs eagerly."""
        if self.options.strict:
            raise CaptureError(
                f"{self.name} runs eagerly: {reason}",
                rule="eager-module",
                why="strict=True forbids running a graphed module eagerly.",
                fix="mend what stands in the way, or leave the module out of the scope.",
            )
        self.eager_reasons[reason] += 1

    def report(self) -> ModuleReport:
        """What happened so far to the modules of this one's session."""
        return report_on(self.session)

    # -- capturing

    def pair(self) -> PairCapture:
        """What records this module's graphs, made when the first one is."""
        if self._pair is None:
            outside = self.session.outside_parameters(self)
            self._pair = PairCapture(
                *(self._method, self.module, self.session, outside, self.options.generators),
                need_backward=self.need_backward,
            )
        return self._pair

    def _named(self) -> dict[str, torch.nn.Module]:
        """The modules by their paths from the model."""
        return {f"{self.name}.{path}" if path else self.name: module for path, module in self.module.named_modules()}

    def _called_inside(self) -> list[torch.nn.Module]:
        """The modules whose hooks run inside what is recorded; this one's own run around it."""
        return self._modules[1:] if self.function_name == "forward" else self._modules

    def check_capturable(self) -> None:
        """Raise for what would not run at replays: hooks on modules inside this one."""
        names = {id(module): name for name, module in self._named().items()}
        refuse_hooks(self.name, self._called_inside(), self.options.safe_hooks, lambda m: names[id(m)])

    def guard(self, site: ModuleSite, runner: Runner) -> None:
        """Note what the graphs of a site have baked in."""
        modules = self._named()
        names = {id(p): f"{self.name}.{path}" for path, p in self.module.named_parameters()}
        names |= {id(module): name for name, module in modules.items()}
        passed = [m for leaf in site.keep_alive if isinstance(leaf, torch.nn.Module) for m in leaf.modules()]
        own = self.module.parameters() if self.function_name == "forward" else self.pair().known_parameters()
        model = ModelGuard(
            [*self._modules, *passed],
            [*own, *(p for m in passed for p in m._parameters.values() if p is not None)],
            lambda v: names.get(id(v), type(v).__name__),
            self.session.events,
            hooked=[*self._called_inside(), *passed],
        )
        values = Watch(with_hooks(self.original, self._called_inside()), self.options.ignore, modules, ran=site.ran)
        inside = self.pair().inside()
        site.guard = SiteGuard(model, values, inside, runner.forward.names, lambda p: names[id(p)], before=site.guard)

    def failed(self, site: ModuleSite, error: Exception) -> None:
        """A capture failed: the module stays eager for these calls."""
        raised = capture_error(self.name, error)
        site.obstacle = f"capture failed: [{raised.rule}]"
        if self.options.strict:
            raise raised from (None if raised is error else error)
        whose = "" if raised.what.startswith(self.name) else f"{self.name}: "
        warn_user(f"{whose}{raised}\nThe module runs eagerly.")

    def drop(self) -> None:
        """Free this module's graphs; its calls warm up again."""
        for site in self.sites.values():
            for runner in site.runners:
                self.forwards += runner.forwards
                self.backwards += runner.backward_runs
                runner.retire()
            site.runners, site.recorded = [], None
        self._look_at_modules()
        if self._pair is not None:
            self.session.grads.forget(self._pair.proxies.parameters)
        self._pair = None
        self.session.recorder.forget()

    def forget(self) -> None:
        """Free this module's graphs, and forget what was in the way of others."""
        self.drop()
        self._last = None
        self.sites.clear()
        self._changes.clear()
