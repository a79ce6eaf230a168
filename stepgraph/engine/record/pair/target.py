"""A `PairTarget` is the code that graphs replace, with the guards of what the graphs assume about it.

It is a method of a module, or a function with the modules that it reaches. Graphed modules, graphed callables and
pipeline stages share it. Each engine decides when to capture, and which graph a call replays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch

from stepgraph.core.ambient import changed_flags
from stepgraph.core.errors import CaptureError, StateChanged
from stepgraph.core.frames import warn_user
from stepgraph.engine.backends.random.tracker import CudaRNGStatesTracker
from stepgraph.engine.call.failure import capture_error, cause_of
from stepgraph.engine.call.options import PairOptions
from stepgraph.engine.guards.hooks import refuse_hooks, with_hooks
from stepgraph.engine.guards.host_values.watch import Watch
from stepgraph.engine.guards.model import ModelGuard
from stepgraph.engine.guards.outside_memory import OutsideMemory
from stepgraph.engine.guards.signature import argument_names, saved_tensor_hooks
from stepgraph.engine.observe.sharding import refuse_sharded
from stepgraph.engine.oplog import Difference
from stepgraph.engine.record.pair.guard import Finding, SiteGuard
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.module_method import ModuleMethod
from stepgraph.engine.record.pair.record import PairCapture, with_modes
from stepgraph.engine.record.pair.runner import Runner
from stepgraph.engine.record.pair.shared import PairSession

_training = operator.itemgetter("training")


class PairTarget:
    """One method of a module, or a function around a module, that graphs replace."""

    def __init__(
        self,
        module: torch.nn.Module,
        method: str,
        name: str,
        options: PairOptions,
        shared: PairSession,
        outside: Callable[[torch.nn.Module], set[int]],
        *,
        function: Callable[..., Any] | None = None,
        runs_own_hooks: bool = True,
        need_backward: bool = True,
    ) -> None:
        """`outside` finds the parameters that autograd gives their gradients to.

        `function` is called in place of the method. `runs_own_hooks`: the module's own hooks run around the graphs.
        """
        self.module, self.method, self.name = module, method, name
        self.options, self.shared, self.need_backward = options, shared, need_backward
        self.random: CudaRNGStatesTracker | None = None
        """Known when the backend is."""
        self._original: Callable[[], Callable[..., Any]] = ModuleMethod(module, method)
        if function is not None:
            self._original = lambda: function
        self._is_whole = function is None and method == "forward"
        self._runs_own_hooks = runs_own_hooks
        self._outside = outside
        self._pair: PairCapture | None = None
        self._look_at_modules()

    def _look_at_modules(self) -> None:
        self.arguments = argument_names(self.original)
        self._named = self.named_modules()
        self._modes = [vars(module) for module in with_modes(self.module)]

    @property
    def _modules(self) -> list[torch.nn.Module]:
        """The modules as they were last looked at."""
        return list(self._named.values())

    @property
    def original(self) -> Callable[..., Any]:
        """The function that the graphs replace."""
        return self._original()

    def modes(self) -> tuple[bool, ...]:
        """Train or eval, for each module."""
        return tuple(map(_training, self._modes))

    @property
    def fork(self) -> str | None:
        """The named random state that is forked right now."""
        return self.random.active if self.random is not None else None

    def named_modules(self) -> dict[str, torch.nn.Module]:
        """The modules by their paths from the model."""
        return {f"{self.name}.{path}" if path else self.name: module for path, module in self.module.named_modules()}

    def state_by_id(self) -> dict[int, torch.Tensor]:
        """The parameters and buffers of the module."""
        return {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}

    def _called_inside(self) -> list[torch.nn.Module]:
        """The modules whose hooks run inside the recorded code; hooks of this one usually run around its forward."""
        return self._modules[1:] if self._is_whole and self._runs_own_hooks else self._modules

    def rebuilt(self) -> str | None:
        """Describe how the modules inside have changed since they were last looked at, or return None.

        Calls noted until then have flags of other modules: no graph may be made of them.
        """
        before, now = self._named, self.named_modules()
        for path in {**before, **now}:
            if before.get(path) is not now.get(path):
                how = "was added" if path not in before else "was removed" if path not in now else "was replaced"
                return f"`{path}` {how}"
        return None if list(before) == list(now) else f"`{self.name}` has a new order of its parts"

    # -- capturing

    def pair(self) -> PairCapture:
        """The recorder of its graphs; it is made for the first one."""
        if self._pair is None:
            self._pair = PairCapture(
                *(self._original, self.module, self.shared, self._outside(self.module), self.options.generators),
                need_backward=self.need_backward,
            )
        return self._pair

    def drop_pair(self) -> None:
        """Forget the recorder after the graphs were freed: modules and gradients may change before the next one."""
        self._look_at_modules()
        if self._pair is not None:
            self.shared.grads.forget(self._pair.proxies.parameters)
        self._pair = None

    def renew_pair(self) -> None:
        """Before a capture without other graphs in use, drop a recorder that has proxies for tensors of earlier."""
        if self._pair is not None and not self._pair.proxies.are_current:
            self.drop_pair()

    def refuse_sharded(self) -> None:
        """Raise if FSDP manages parameters of the module."""
        refuse_sharded(self.name, self._modules, "module")

    def check_capturable(self, ambient: tuple[Hashable, ...]) -> None:
        """Raise for FSDP, for hooks on modules inside and on saved tensors, and for flags that have changed."""
        self.refuse_sharded()
        names = {id(module): name for name, module in self.named_modules().items()}
        refuse_hooks(self.name, self._called_inside(), self.options.safe_hooks, lambda m: names[id(m)])
        if (hooks := saved_tensor_hooks(ambient)) is not None:
            raise CaptureError(f"{self.name}: {hooks.partition('   ')[0]}", rule="saved-tensor-hooks")
        different = changed_flags(ambient)
        if different:
            raise RuntimeError(f"flags of the process have changed since the call: {', '.join(different)}")

    def failed(self, kind: CallKind, error: Exception) -> None:
        """Raise or warn after a failed capture; the module stays eager for these calls."""
        raised = capture_error(self.name, error, self.shared.session.backend)
        kind.obstacle = f"capture failed: [{raised.rule}]"
        if not self.options.goes_on_eagerly:
            raise raised from cause_of(raised, error)
        whose = "" if raised.what.startswith(self.name) else f"{self.name}: "
        warn_user(f"{whose}{raised}\nThe module runs eagerly.")

    # -- guards

    def guard(self, kind: CallKind, runner: Runner) -> None:
        """Make the guard of the values that the graphs of a kind of call have baked in."""
        modules, pair = self.named_modules(), self.pair()
        names = {id(p): f"{self.name}.{path}" for path, p in self.module.named_parameters()}
        names |= {id(module): name for name, module in modules.items()}
        passed = [m for leaf in kind.keep_alive if issubclass(type(leaf), torch.nn.Module) for m in leaf.modules()]
        own = self.module.parameters() if self._is_whole else pair.known_parameters()
        model = ModelGuard(
            [*self._modules, *passed],
            [*own, *(p for m in passed for p in m._parameters.values() if p is not None)],
            lambda v: names.get(id(v), type(v).__name__),
            self.shared.events,
            hooked=[*self._called_inside(), *passed],
        )
        values = Watch(with_hooks(self.original, self._called_inside()), self.options.ignore, modules, ran=kind.ran)
        kind.guard = SiteGuard(
            *(model, values, pair.inside(), runner.forward.names, OutsideMemory(runner.forward.log, values.tensors)),
            lambda p: names[id(p)],
            before=kind.guard,
        )

    def look(self, guard: SiteGuard, differs: Callable[[], Difference | None], *, audited: bool) -> Finding | None:
        """Return a reason not to replay the graphs of a guard, or None."""
        try:
            return guard.look(differs, audited=audited)
        except Exception as error:  # noqa: BLE001 (as in a capture: whatever it is, the graphs are of no use)
            raised = capture_error(self.name, error, self.shared.session.backend)
            if not self.options.goes_on_eagerly:
                raise raised from cause_of(raised, error)
            return Finding(f"it can no longer be recorded as it was   [{raised.rule}]", (raised.rule,))

    def raise_if_strict(self, why: str) -> None:
        """Under strict, raise for a change, before anything runs."""
        if self.options.strict:
            raise StateChanged(
                f"{self.name}: {why}",
                rule="state-changed",
                why="the graphs keep the state of their capture, and strict=True forbids to capture again.",
                fix="call handle.reset() after the change, or leave strict=False.",
            )
