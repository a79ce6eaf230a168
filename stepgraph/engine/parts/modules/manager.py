"""`ModuleGraphs` owns the runners of one module, or of one of its methods, and chooses one of them at each call.

Calls with the same arguments, flags and modes are a site. While a site warms up, its calls run eagerly and are noted.
Then its graphs are captured, and each call takes a runner that is ready. If none is ready, another runner is captured,
up to `max_runners`. A call that cannot be replayed runs eagerly, and is counted with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from stepgraph.core.errors import CaptureError, InvalidArgument, StepgraphError
from stepgraph.core.frames import untraced, warn_user
from stepgraph.core.tracebacks import entry_point, trim
from stepgraph.core.tree import CallFlattener, Structure
from stepgraph.engine.backends.random.tracker import tracker_for
from stepgraph.engine.call.backend_choice import refuse_elsewhere
from stepgraph.engine.call.messages import refuse_second_thread, signature_mismatch, unsigned
from stepgraph.engine.call.report import outline
from stepgraph.engine.guards.hooks import global_hook, has_global_hooks
from stepgraph.engine.guards.signature import (
    Signature,
    ambient_key,
    leaf_keys,
    reason_for_eager,
    refuse_arguments,
    saved_tensor_hooks,
)
from stepgraph.engine.observe.ddp import in_ddp
from stepgraph.engine.oplog import is_logged
from stepgraph.engine.parts.modules.options import options_from
from stepgraph.engine.parts.modules.report import ModuleReport, report_on
from stepgraph.engine.parts.modules.round import FixedRound
from stepgraph.engine.parts.modules.session import ModuleSession
from stepgraph.engine.parts.modules.site import ManagedModule, ModuleSite
from stepgraph.engine.record.pair.in_flight import run_forward
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.runner import Runner, RunnerState
from stepgraph.engine.record.pair.target import PairTarget

_LONGEST_ROUND = 1000
"""After so many calls a new round begins, even if calls are in flight: their results may be kept for good."""


class ModuleGraphs:
    """Graphs for the calls of one module. It stands in the place of the module's forward, or of another method."""

    @entry_point
    def __init__(
        self,
        config: Any,
        module: torch.nn.Module,
        function_name: str = "forward",
        need_backward: bool = True,
        *,
        session: ModuleSession | None = None,
        name: str = "",
    ) -> None:
        self.module, self.function_name = module, function_name
        self.name = name or type(module).__name__
        self.options = options_from(config)
        self.session = session if session is not None else ModuleSession()
        self.need_backward = need_backward
        self._target = PairTarget(
            *(module, function_name, self.name, self.options, self.session),
            outside=self.session.outside_parameters,
            need_backward=need_backward,
        )
        self._managed = ManagedModule(self._target, self.options)
        self.sites, self.eager_reasons = self._managed.sites, self._managed.eager_reasons
        self._flatten = CallFlattener()
        self._is_capturing: Callable[[], bool] = bool  # until the backend is known, never
        self.session.add(self._managed)

    @property
    def original(self) -> Callable[..., Any]:
        """The function that the graphs replace."""
        return self._target.original

    def tally(self) -> tuple[int, int, int]:
        """The numbers of calls, replayed forwards and runners."""
        return self._managed.tally()

    def __reduce__(self) -> Any:
        """Let a copy of the module, by copy.deepcopy or pickle, be a plain module."""
        return getattr, (self.module, self.function_name)

    def __repr__(self) -> str:
        return outline(f"graphed {self.name}", *self.tally(), is_closed=self.session.is_closed)

    def report(self) -> ModuleReport:
        """Return the report on all modules of its session."""
        return report_on(self.session)

    # -- calling

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: replay if a runner fits, else run eagerly."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)  # a part of a larger compiled region
        calling = self.session.session.calling
        is_alone = calling.acquire(False)
        try:
            if not is_alone and self.options.eager_reason is None:
                refuse_second_thread(self.name)
            last = self._managed.last
            if last is not None and not self.session.is_closed and not has_global_hooks():
                leaves = last.fast_match.leaves_of(args, kwargs)
                is_inside = self._is_capturing() or is_logged()  # a part of a larger capture
                if leaves is not None and not is_inside and last.around == self._around():
                    return self._replay(last.site, leaves, last.structure, (args, kwargs))
            return self._look_up(args, kwargs)
        except StepgraphError as error:
            self._managed.refused[error.rule] += 1
            trim(error)
            raise
        finally:
            if is_alone:
                calling.release()

    def _replay(self, site: ModuleSite, leaves: list[Any], structure: Structure, given: tuple[Any, Any]) -> Any:
        calls = self.session.lanes.calls
        if site.runners and (not calls.num or calls.begun > _LONGEST_ROUND):
            self.session.begin_round()
        if site.runners and self.session.holds(site):
            runner = self._ready(site, leaves)
            if runner is not None:
                return run_forward(runner, leaves)
        return self._without_graph(site, leaves, structure, given)

    def _around(self) -> tuple[tuple[Hashable, ...], Hashable, Hashable, Hashable]:
        return self.session.ambient.read(), self._target.modes(), in_ddp(), self._target.fork

    def _look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that differs from the last one."""
        session, target = self.session, self._target
        if (reason := self.options.eager_reason) is not None:
            self.eager_reasons[reason] += 1
            return self.original(*args, **kwargs)
        if target.random is None:
            backend = session.backend_for(session.model, self.module, *self._flatten(args, kwargs)[0])
            self._is_capturing, target.random = backend.capture_probe, tracker_for(backend)
        if session.is_closed or self._is_capturing() or is_logged():
            return self.original(*args, **kwargs)  # a part of a larger capture
        around = self._around()
        if (reason := reason_for_eager(around[0])) is not None:
            self.eager_reasons[reason] += 1
            return self.original(*args, **kwargs)
        leaves, structure = self._flatten(args, kwargs)
        try:
            keys = leaf_keys(leaves, on=self._managed.on)
        except (InvalidArgument, RuntimeError) as error:  # an argument that no signature can be made of
            self._count_eager(unsigned(error))
            return self.original(*args, **kwargs)
        if (hooks := saved_tensor_hooks(around[0])) is not None:
            self._count_eager(hooks)
            return self.original(*args, **kwargs)
        site = self.sites.get((structure, keys, *around))
        self._managed.last = site.last_call(args, kwargs, structure, around) if site is not None else None
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
        guarded = self.options.outputs == "copy"
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
        """Copy results that a caller holds and a replay would overwrite, from now on. This call runs eagerly."""
        held = refused.lane.held_results(refused)
        self.session.copy_results(held)
        if any(id(refused) in runner.held_up for runner in held):  # since the call before this one
            self.session.start_over(self._managed, "results of earlier calls are still held")
            return
        self.eager_reasons["a result of an earlier call is still held; it is copied from now on"] += 1
        for runner in held:
            runner.held_up.add(id(refused))

    def _in_turn(self, order: FixedRound, site: ModuleSite, leaves: Sequence[Any]) -> Runner | None:
        """Return the runner whose turn it is; raise if it is another module's turn."""
        runner = order.take_forward(site)
        if not runner.boundary.is_free_for(leaves):
            self.session.start_over(self._managed, "an argument is no longer another module's result")
            return None
        held = runner.lane.held_results(runner) if self.options.outputs == "copy" else []
        if held:
            self.session.copy_results(held)
            self.session.start_over(self._managed, "results of earlier calls are still held")
            return None
        return runner

    def _another(self, site: ModuleSite) -> Runner | None:
        """Capture one more runner: all others wait for their backward, or their memory is in use."""
        if len(site.runners) >= self.options.max_runners:
            if any(runner.state is RunnerState.FWD_READY for runner in site.runners):
                self.eager_reasons["the order of calls differs from the capture, and max_runners is reached"] += 1
                return None
            self._too_many_in_flight(max(len(site.runners) + 1, site.most_under_way))
            return None
        assert site.recorded is not None
        runner = self.session.capture_one(site, site.recorded)
        if runner is None:
            self.eager_reasons["no further runner could be captured"] += 1
        return runner

    def _too_many_in_flight(self, needed: int) -> None:
        """Count a call that no runner can take, and runs eagerly; warn once, or raise under strict."""
        most = self.options.max_runners
        error = CaptureError(
            f"{self.name}: {needed} calls are in flight at once, and max_runners is {most}",
            rule="max-runners",
            fix=f"raise max_runners to {needed} or more, or call backward() sooner.",
        )
        if self.options.strict:
            raise error
        reason = f"past max_runners={most}   [max-runners]"
        if reason not in self.eager_reasons:
            warn_user(f"{error}\nFurther calls run eagerly until a backward has run.")
        self.eager_reasons[reason] += 1

    def _new_site(
        self, key: Hashable, leaves: Sequence[Any], structure: Structure, keys: tuple[Hashable, ...]
    ) -> ModuleSite:
        call = Signature(structure, keys, ambient_key(), self._target.modes(), arguments=self._target.arguments)
        kind = CallKind(call, leaves)
        kind.obstacle = self._managed.obstacle
        site = ModuleSite(self._managed, kind)
        try:
            refuse_arguments(leaves, call.names())
            refuse_elsewhere(self.module, leaves, self.session.session.backend)
        except InvalidArgument as error:
            kind.obstacle = f"{error.what}   [{error.rule}]"
        try:
            self._target.refuse_sharded()
        except CaptureError as error:
            self._target.failed(kind, error)
        if len(self.sites) >= self.options.max_graphs:
            if self.options.strict:
                raise signature_mismatch(self.name, call, [known.kind.signature for known in self.sites.values()])
            kind.obstacle = f"past max_graphs={self.options.max_graphs}"
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
        if (rebuilt := self._target.rebuilt()) is not None:
            self.session.warm_up_again(self._managed, rebuilt)
        if site.is_forgotten:
            return self._look_up(*given)  # its flags are those of other modules
        if self.session.recorder.comes_round(site):
            self.session.create_warm()
            if site.runners:
                return self._look_up(*given)
            if self._is_blocked(site):
                return run()
        changed, self._managed.rebuilt = self._managed.rebuilt, None
        self.eager_reasons["warm-up" if changed is None else f"changed: {changed}"] += 1
        return self.session.recorder.run(site, leaves, structure, run)

    def _is_blocked(self, site: ModuleSite) -> bool:
        """Return True if calls here stay eager, and count this one then."""
        obstacle = site.kind.obstacle
        if obstacle is not None:
            self._count_eager(obstacle)
        return obstacle is not None

    # -- weight gradients that backwards have left

    def need_backward_dw(self) -> bool:
        """Whether weight gradients of a call wait to be computed: replayed, or noted in the warm-up."""
        managed = self._managed
        if not managed.leaves_weights:
            return False
        return bool(managed.delayed) or self.session.recorder.left_by(managed) is not None

    def backward_dw(self) -> None:
        """Replay the weight gradients that the oldest backward has left; in the warm-up, note that layers do so now."""
        managed, recorder, calling = self._managed, self.session.recorder, self.session.session.calling
        is_alone = calling.acquire(False)
        try:
            if not is_alone:
                refuse_second_thread(self.name)
            if managed.delayed:
                if self.session.order is not None:
                    self.session.order.take_weights(managed.delayed[0].runner)
                managed.delayed.pop(0).weight_gradients()
            elif (left := recorder.left_by(managed)) is not None:
                recorder.note_weights(left)
            else:
                raise InvalidArgument(
                    f"{self.name}: no weight gradients wait to be computed",
                    rule="delayed-weights",
                    why="no backward has left any since the last backward_dw().",
                    fix="call model.backward_dw() once after each backward().",
                )
        except StepgraphError as error:
            managed.refused[error.rule] += 1
            trim(error)
            raise
        finally:
            if is_alone:
                calling.release()

    def _count_eager(self, reason: str) -> None:
        """Count a call that runs eagerly; raise under strict."""
        if self.options.strict:
            raise CaptureError(f"{self.name} runs eagerly: {reason}", rule="eager-module")
        self.eager_reasons[reason] += 1
