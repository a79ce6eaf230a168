"""Eager calls of a step, seen from each of its modules: which calls came in, and what no replay could repeat.

An observer stands in the place of each module's forward while a step runs eagerly. Two calls are observed. The first
gives the signatures only. The second gives all that a recording needs: the geometry of arguments and of the gradients
that came back, flags and modes around the call, the operations, and the effects that no replay can repeat. A module
whose signatures differ between the two (a batch of tokens that the data chose) is not worth a graph. Of modules that
look alike (`alike`) the first is observed for all.

The second call also shows backwards that compute some gradients only (`partial`), which no graph can replay.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.frames import untraced
from stepgraph.core.tree import Structure, flatten
from stepgraph.engine.backends.random.tracker import tracker_for
from stepgraph.engine.call.backend_choice import refuse_elsewhere
from stepgraph.engine.call.messages import unsigned
from stepgraph.engine.call.session import Session
from stepgraph.engine.guards.signature import (
    Signature,
    ambient_key,
    find_differences,
    leaf_keys,
    reason_for_eager,
    refuse_arguments,
    saved_tensor_hooks,
)
from stepgraph.engine.observe.ddp import in_ddp
from stepgraph.engine.observe.finder import compilers
from stepgraph.engine.oplog import Log
from stepgraph.engine.parts.modules.manager import ModuleGraphs
from stepgraph.engine.parts.modules.options import ModuleOptions
from stepgraph.engine.parts.modules.session import ModuleSession
from stepgraph.engine.record.pair.call import EagerCall, NotedArguments
from stepgraph.engine.record.pair.eager import note_call, run_call
from stepgraph.engine.record.pair.kind import CallKind
from stepgraph.engine.record.pair.module_method import called_method, put_in_place
from stepgraph.engine.record.pair.target import PairTarget
from stepgraph.engine.record.pair.waiting import WaitingCall
from stepgraph.engine.step.fallback.alike import look_of
from stepgraph.engine.step.fallback.partial import PartialBackwards
from stepgraph.engine.step.fallback.search import Node, Refusal

_DDP = "it is a DistributedDataParallel, which must see every gradient   [ddp-callable]"
_SOMETIMES = "some of its calls come in some steps only"
_GRAPHED = "it is graphed already   [scope]"


@dataclass(frozen=True, slots=True)
class SeenCall:
    """All calls of one module with one signature."""

    kind: CallKind
    eager: EagerCall
    under_way: weakref.WeakSet[WaitingCall] = field(default_factory=weakref.WeakSet)
    """Those that wait for their backward."""


class ObservedModule:
    """One module of an observed step. It stands in the place of the module's forward."""

    def __init__(self, target: PairTarget, path: str, step: ObservedStep) -> None:
        self.target, self._step = target, step
        self.look = look_of(target.module, path)
        self.refusal = _refused_unseen(target)
        self.before: dict[Hashable, Signature] = {}
        """The signatures of the first observed call."""
        self.seen: dict[Hashable, SeenCall] = {}
        self.most_under_way = 0

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and note the call. What runs inside a backward is a recomputation of an earlier call."""
        run = functools.partial(self.target.original, *args, **kwargs)
        if self.refusal is not None or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return run()
        leaves, structure = flatten((args, kwargs))
        signature = self._sign(leaves, structure)
        if signature is None:
            return run()
        key = (signature.structure, signature.leaves, signature.ambient, signature.training, self._around())
        if not self._step.is_second:
            self.before[key] = signature
            return run()
        return self._noted(key, signature, leaves, run)

    def _around(self) -> tuple[Hashable, ...]:
        return in_ddp(), self.target.fork

    def _sign(self, leaves: Sequence[Any], structure: Structure) -> Signature | None:
        """Sign a call; None if no graph can take its arguments."""
        target, ambient = self.target, ambient_key()
        try:
            keys = leaf_keys(leaves, on=target.shared.session.backend.device.type)
            found = Signature(structure, keys, ambient, target.modes(), arguments=target.arguments)
        except (InvalidArgument, RuntimeError) as error:
            self.refusal = Refusal(unsigned(error), spreads=False)
            return None
        try:
            refuse_arguments(leaves, found.names())
            refuse_elsewhere(target.module, leaves, target.shared.session.backend)
        except InvalidArgument as error:
            self.refusal = Refusal(f"{error.what}   [{error.rule}]", spreads=False)
            return None
        reason = reason_for_eager(ambient) or saved_tensor_hooks(ambient)
        self.refusal = None if reason is None else Refusal(reason)
        return found if reason is None else None

    def _noted(self, key: Hashable, signature: Signature, leaves: Sequence[Any], run: Callable[[], Any]) -> Any:
        alike = self._step.seen.get((self.look, key))
        if alike is not None:
            known = self.seen.setdefault(key, SeenCall(alike.kind, alike.eager))
            value = run()
            self._wait(known, _again(known.eager), _tensors(value))
            return value
        return self._observed(key, signature, leaves, run)

    def _observed(self, key: Hashable, signature: Signature, leaves: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Make the first call of its kind, and note all that a recording needs."""
        kind, arguments = CallKind(signature, leaves), NotedArguments.of(leaves)
        eager = note_call(self.target, kind, arguments, signature.structure)
        made = run_call(self.target, kind, eager, leaves, arguments.tensors, run)
        self.target.shared.note_returned(made.returned)
        self.seen[key] = self._step.seen[self.look, key] = SeenCall(kind, eager)
        self._wait(self.seen[key], eager, made.outputs.tensors)
        return made.value

    def _wait(self, seen: SeenCall, call: EagerCall, results: Sequence[torch.Tensor]) -> None:
        """Note the gradients that come back to a call, and how many such calls wait at a time."""
        if call.is_differentiable:
            seen.under_way.add(self.target.shared.waiting.add(call, results, seen.under_way.discard))
            self.most_under_way = max(self.most_under_way, len(seen.under_way))

    def changed_signature(self) -> str | None:
        """Describe how the signatures of the two observed calls differ, or return None."""
        new = [seen.kind.signature for key, seen in self.seen.items() if key not in self.before]
        if not new:
            return None if len(self.seen) == len(self.before) else _SOMETIMES
        nearest = min((find_differences(old, new[0]) for old in self.before.values()), key=len, default=[])
        return "; ".join(difference.describe("before") for difference in nearest[:2]) or _SOMETIMES


def _again(call: EagerCall) -> EagerCall:
    """A further call of the same kind; its gradients are not noted with those of the first."""
    other = copy.copy(call)
    other.grads = {}
    return other


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _refused_unseen(target: PairTarget) -> Refusal | None:
    """Refuse modules that are not observed at all."""
    if isinstance(target.module, DistributedDataParallel):
        return Refusal(_DDP)
    if isinstance(vars(target.module).get(target.method), ModuleGraphs):
        return Refusal(_GRAPHED)
    return None


class ObservedStep:
    """The modules in reach of a step, each with an observer."""

    def __init__(self, roots: Mapping[str, torch.nn.Module], session: Session, options: ModuleOptions) -> None:
        """`roots` are the outermost modules, by the names that their paths begin with."""
        models = list(roots.values())
        self.model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        self.session = ModuleSession(session, self.model)
        self.session.backend_for(self.model)
        self.modules: dict[str, ObservedModule] = {}
        self.is_second = False
        self.backwards = PartialBackwards()
        self.seen: dict[Hashable, SeenCall] = {}
        """The observed calls, by the look of the module and the signature."""
        known: set[int] = set()
        self._trees = [self._tree(name, root, options, known) for name, root in roots.items()]

    def _tree(self, path: str, module: torch.nn.Module, options: ModuleOptions, known: set[int]) -> Node:
        """Make the observers of a module and of those inside it; a shared module belongs to its first place."""
        known.add(id(module))
        target = PairTarget(
            *(module, called_method(module), path or type(module).__name__, options, self.session),
            outside=self.session.outside_parameters,
        )
        target.random = tracker_for(self.session.session.backend)
        self.modules[path] = ObservedModule(target, path, self)
        parts = []
        if not _is_compiled_whole(module):
            for name, part in module.named_children():
                if id(part) not in known:
                    parts.append(self._tree(f"{path}.{name}" if path else name, part, options, known))
        return Node(path, tuple(parts))

    def tree(self) -> list[Node]:
        """The modules, marked by whether the observed calls have called them."""
        return [self._marked(node) for node in self._trees]

    def uncalled(self) -> list[str]:
        """The modules that the observed calls have not called."""
        return [path for node in self.tree() for path in node.paths() if not self._is_called(path)]

    def logs(self) -> Iterator[Log]:
        """The operations of the observed calls of modules."""
        return (seen.eager.log for seen in self.seen.values() if seen.eager.log is not None)

    def _is_called(self, path: str) -> bool:
        module = self.modules[path]
        return bool(module.refusal or module.seen or module.before)

    def _marked(self, node: Node) -> Node:
        return Node(node.path, tuple(map(self._marked, node.parts)), is_called=self._is_called(node.path))

    @contextlib.contextmanager
    def observing(self, *, second: bool) -> Iterator[None]:
        """Observe the eager call of the step in this block."""
        self.is_second = second
        with contextlib.ExitStack() as stack:
            for module in self.modules.values():
                stack.callback(put_in_place(module.target.module, module.target.method, module))
            if second:
                stack.enter_context(self.backwards.watching())
            yield

    def close(self) -> None:
        """Forget the calls; the memory of their arguments is freed."""
        self.modules.clear()
        self.seen.clear()
        self.session.close()


def _is_compiled_whole(module: torch.nn.Module) -> bool:
    """True if torch.compile runs a module: code inside must not change, or it would be compiled again."""
    return vars(module).get("_compiled_call_impl") is not None or (
        any(True for _ in compilers(module)) and type(module).__name__ == "OptimizedModule"
    )
