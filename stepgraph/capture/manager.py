"""A manager: the runners of one module, or of one of its methods, and the choice among them at each call.

Calls with the same arguments, flags and modes are a site. While it warms up, its calls run eagerly and are recorded;
then its graphs are captured, and each call takes a runner that is ready. Where there is none, the call gets another
runner, up to `max_runners`; where nothing can be replayed, it runs eagerly, and is counted with the reason.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from stepgraph.capture.failure import capture_error
from stepgraph.capture.fixed_round import FixedRound
from stepgraph.capture.module_options import ModuleOptions, options_from
from stepgraph.capture.module_report import ModuleReport, report_on
from stepgraph.capture.module_session import ModuleSession
from stepgraph.capture.pair import PairCapture
from stepgraph.capture.recorder import RecordedCall
from stepgraph.capture.runner import Runner, RunnerState
from stepgraph.capture.static_result import StaticResult
from stepgraph.errors import CaptureError, InvalidArgument, SignatureMismatch, StateChanged, StepgraphError
from stepgraph.frames import warn_user
from stepgraph.signature import Signature, ambient_key, differences, is_plain, leaf_keys, refuse_opaque
from stepgraph.state.ddp import in_ddp
from stepgraph.state.guards import ModelGuard, refuse_hooks
from stepgraph.state.watch import Watch
from stepgraph.tree import CallFlattener, Structure, settled, unflatten

_training = operator.itemgetter("training")


class ModuleSite:
    """All calls of one module that look alike, and their runners."""

    def __init__(self, manager: CudaGraphManager, call: Signature) -> None:
        self.manager, self.call = manager, call
        self.runners: list[Runner] = []
        self.recorded: RecordedCall | None = None
        self.most_under_way = 0
        """Calls that were under way at a time in warm-up."""
        self.obstacle: str | None = None
        """Why calls here stay eager."""
        self.model: ModelGuard | None = None
        self.values: Watch | None = None
        self._result: tuple[Structure, list[Any]] | None = None
        self.copied: set[int] = set()
        """Results that callers were found to hold, so that they are handed out as copies."""
        self.keep_alive: list[Any] = []

    def add(self, runner: Runner) -> None:
        """Take a runner in."""
        runner.result.copy(self.copied)
        self.runners.append(runner)

    def copy_results(self, indices: Iterable[int]) -> None:
        """Hand out copies of these results."""
        self.copied.update(indices)
        for runner in self.runners:
            runner.result.copy(self.copied)

    def note_result(self, result: StaticResult) -> None:
        """Compare what no replay computes again with the call before."""
        now = (result.structure, result.plain_values)
        if self._result is not None:
            structure, values = self._result
            same = structure == now[0] and len(values) == len(now[1])
            if not same or any(a is not b and (not is_plain(a) or a != b) for a, b in zip(values, now[1], strict=True)):
                self.obstacle = "its result holds a plain value, or a structure, that is another at each call"
        self._result = now


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
        self.options = config if isinstance(config, ModuleOptions) else options_from(config)
        self.session = session if session is not None else ModuleSession()
        self.original: Callable[..., Any] = getattr(base_module, self.function_name)
        self.need_backward = need_backward
        self.eager_reasons: Counter[str] = Counter()
        self.recapture_reasons: Counter[str] = Counter()
        self.sites: dict[Hashable, ModuleSite] = {}
        self.forwards = self.backwards = 0
        """Replays of graphs that are gone."""
        self._modules = list(base_module.modules())
        self._modes = [vars(module) for module in self._modules]
        self._pair: PairCapture | None = None
        self._flatten = CallFlattener()
        self._is_capturing: Callable[[], bool] | None = None
        self.session.add(self)

    # -- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: by replay where a runner fits, eagerly where none does yet."""
        session = self.session
        if self._is_capturing is None:
            self._is_capturing = session.backend_for(self.module).capture_probe
        if session.is_closed or self._is_capturing():
            return self.original(*args, **kwargs)  # a part of a larger capture
        leaves, structure = self._flatten(args, kwargs)
        key = (structure, leaf_keys(leaves), session.ambient.read(), self._training(), in_ddp())
        site = self.sites.get(key)
        if site is not None and site.runners:
            if self._guard(site):
                runner = self._ready(site, leaves)
                if runner is not None:
                    return runner.run(leaves)
        elif site is None:
            site = self._new_site(key, leaves, structure)
        return self._without_graph(site, leaves, structure)

    def _training(self) -> tuple[bool, ...]:
        return tuple(map(_training, self._modes))

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
        runner = order.take_forward(self.name, site)
        if not runner.boundary.is_free_for(leaves):
            self._start_over("an argument is no longer another module's result")
            return None
        held = runner.lane.held_results(runner) if self.options.outputs == "guarded" else []
        if held:
            self.session.copy_results(held)
            self._start_over("results of earlier calls are held on to")
            return None
        return runner

    def _start_over(self, why: str) -> None:
        self.recapture_reasons[why] += 1
        self.session.delete_cuda_graphs()

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

    def _guard(self, site: ModuleSite) -> bool:
        """Whether nothing that the graphs have baked in has changed."""
        assert site.model is not None
        assert site.values is not None
        why = site.model.changed()
        if why is None:
            changes = site.values.changed()
            if not changes:
                return True
            why = "; ".join(map(str, changes))
            warn_user(
                f"{self.name}: a value that the module reads has changed since capture   [host-value]\n  {why}\n"
                "Its graphs are captured again.\nFix: pass it as an argument or as a tensor, or ignore it by name."
            )
        if self.options.strict:
            raise StateChanged(
                f"{self.name}: {why}",
                rule="state-changed",
                why="the captured graphs go on with what they were recorded with, and strict=True forbids else.",
                fix="call handle.reset() after the change, or leave strict=False.",
            )
        if self.session.order is not None:
            self._start_over(why)  # what others share memory with would be gone
        else:
            self.recapture_reasons[why] += 1
            self.drop()
        if self.recapture_reasons[why] > 2:
            site.obstacle = f"it keeps changing: {why}"
        return False

    def _new_site(self, key: Hashable, leaves: Sequence[Any], structure: Structure) -> ModuleSite:
        site = ModuleSite(self, Signature(settled(structure), leaf_keys(leaves), ambient_key(), self._training()))
        site.keep_alive = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        try:
            refuse_opaque(leaves)
        except InvalidArgument as error:
            site.obstacle = error.what
        if len(self.sites) >= self.options.max_signatures:
            self._refuse_signature(site)
            site.obstacle = f"past max_signatures={self.options.max_signatures}"
        else:
            self.sites[key] = site
        return site

    def _refuse_signature(self, site: ModuleSite) -> None:
        if self.options.strict:
            found = min((differences(s.call, site.call) for s in self.sites.values()), key=len)
            raise SignatureMismatch(
                f"{self.name}: a call unlike those that have graphs",
                rule="max-graphs",
                details=[str(d) for d in found[:8]],
                why="each kind of call has graphs of its own, and strict=True forbids running it eagerly.",
                fix="pad inputs to a few shapes, or raise max_signatures.",
            )

    def _without_graph(self, site: ModuleSite, leaves: Sequence[Any], structure: Structure) -> Any:
        def run() -> Any:
            args, kwargs = unflatten(structure, leaves)
            return self.original(*args, **kwargs)

        if site.runners:
            return run()  # counted where it was decided
        if self._is_blocked(site):
            return run()
        if self.session.recorder.comes_round(site):
            self.session.create_warm()
            if site.runners:
                args, kwargs = unflatten(structure, leaves)
                return self(*args, **kwargs)
            if self._is_blocked(site):
                return run()
        self.eager_reasons["warm-up"] += 1
        return self.session.warming(lambda: self.session.recorder.run(site, leaves, structure, run))

    def _is_blocked(self, site: ModuleSite) -> bool:
        """Whether calls here stay eager; counts this one if they do."""
        if site.obstacle is None:
            return False
        if self.options.strict:
            raise CaptureError(
                f"{self.name} runs eagerly: {site.obstacle}",
                rule="eager-module",
                why="strict=True forbids running a graphed module eagerly.",
                fix="mend what stands in the way, or leave the module out of the scope.",
            )
        self.eager_reasons[site.obstacle] += 1
        return True

    def report(self) -> ModuleReport:
        """What happened so far to the modules of this one's session."""
        return report_on(self.session)

    # -- capturing

    def pair(self) -> PairCapture:
        """What records this module's graphs, made when the first one is."""
        if self._pair is None:
            self._pair = PairCapture(
                self.original,
                self.module,
                self.session.session,
                self.options.generators,
                need_backward=self.need_backward,
            )
            self._pair.outside = self.session.outside_parameters(self)
        return self._pair

    def check_capturable(self) -> None:
        """Raise for what would not run at replays: hooks on modules inside this one."""
        names = {id(m): f"{self.name}.{path}" if path else self.name for path, m in self.module.named_modules()}
        inner = self._modules if self.function_name != "forward" else self._modules[1:]
        refuse_hooks(self.name, inner, self.options.safe_hooks, lambda m: names.get(id(m), type(m).__name__))

    def guard(self, site: ModuleSite) -> None:
        """Note what the graphs of a site have baked in."""
        names = {id(p): f"{self.name}.{path}" for path, p in self.module.named_parameters()}
        names |= {id(m): f"{self.name}.{path}" if path else self.name for path, m in self.module.named_modules()}
        parameters = self.pair().known_parameters()
        passed = [m for leaf in site.keep_alive if isinstance(leaf, torch.nn.Module) for m in leaf.modules()]
        site.model = ModelGuard(
            [*self._modules, *passed],
            [*parameters, *(p for m in passed for p in m._parameters.values() if p is not None)],
            lambda v: names.get(id(v), type(v).__name__),
            self.session.events,
        )
        modules = {f"{self.name}.{path}" if path else self.name: m for path, m in self.module.named_modules()}
        site.values = Watch(self.original, self.options.ignore, modules)

    def failed(self, site: ModuleSite, error: Exception) -> None:
        """A capture failed: the module stays eager for these calls."""
        raised = capture_error(self.name, error)
        if self.options.strict:
            raise raised from (None if raised is error else error)
        site.obstacle = f"capture failed: [{raised.rule}]" if isinstance(raised, StepgraphError) else str(raised)
        warn_user(f"{raised}\nThe module runs eagerly.")

    def drop(self) -> None:
        """Free this module's graphs; its calls warm up again."""
        for site in self.sites.values():
            for runner in site.runners:
                self.forwards += runner.forwards
                self.backwards += runner.backward_runs
                runner.retire()
            site.runners, site.recorded = [], None
        self._modules = list(self.module.modules())
        self._modes = [vars(module) for module in self._modules]
        self._pair = None
        self.session.recorder.forget()
