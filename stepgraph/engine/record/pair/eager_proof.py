"""The operations of a module's graphs are compared with those of its eager calls.

Each eager call of the warm-up is logged, and so is each recording (`oplog`). The log of an eager call has its forward,
and, in place of its backward, the names of the nodes that it adds to autograd's graph: the backward itself runs inside
the user's `loss.backward()`, among other backwards. The log of a recording has forward and backward. Before a
recording is used, it is compared with the eager call that it replaces. Later it is *audited*: the call is recorded
again, forward and backwards, without effect, and compared with the recording in use. Then the new recording is dropped.
If it differs, the operations of the module have changed, and it is captured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.core.tree import flatten
from stepgraph.engine.call.proof import NeedsEagerCall, Shown, judge, next_audit, tell_other_path, varying_operations
from stepgraph.engine.observe.module_attributes import ModuleAttributes
from stepgraph.engine.observe.output import Output
from stepgraph.engine.oplog import Log, OpLog, Roles, Vocabulary, first_difference, noting_unseen
from stepgraph.engine.record.pair.cached_casts import keeps_casts
from stepgraph.engine.record.pair.uses import nodes_behind

_MAX_SURPRISES = 3
"""The number of recordings that may differ from the eager call before them, if eager calls differ too."""


class PairLogs:
    """Keeps the logs of the calls of one session's modules, which share a vocabulary, and what they write."""

    def __init__(self) -> None:
        self._vocabulary = Vocabulary()
        self.output = Output()

    def of_call(
        self, module: torch.nn.Module, leaves: Sequence[Any], ambient: Sequence[Hashable], device: torch.device
    ) -> OpLog:
        """Return a log for a call of a module with these arguments and flags."""
        keeps = keeps_casts(ambient, grad_mode=False)
        return OpLog(self._vocabulary, leaves, _roles(module), device, keeps_casts=keeps)

    def of_backward(
        self, forward: OpLog, module: torch.nn.Module, incoming: Mapping[int, torch.Tensor], memory: Mapping[str, Any]
    ) -> OpLog:
        """Return a log for the backward of a logged forward, with the gradients that come in and those it adds to."""
        roles = _roles(module)
        for index, grad in incoming.items():
            roles.add(f"the gradient of result {index}", grad)
        for name, grad in memory.items():
            roles.add(f"{name}.grad", grad)
        return forward.followed_by(roles)


@contextlib.contextmanager
def noting(log: OpLog) -> Iterator[None]:
    """Log the operations of this block."""
    with noting_unseen(), log:
        yield


def attributes_of(module: torch.nn.Module) -> ModuleAttributes:
    """The attributes of a module and those inside it, before a forward."""
    return ModuleAttributes(dict(module.named_modules()))


def note_forward(
    log: OpLog, module: torch.nn.Module, before: ModuleAttributes, result: Any, arguments: Sequence[Any]
) -> None:
    """At the end of a forward, note its result, its part of autograd's graph, and the modes and attributes it leaves.

    `before` are the attributes before it.
    """
    log.note_result(result, "modes", *(inner.training for inner in module.modules()))
    log.note_call("attributes that were set", before.changed())
    results = [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]
    stop = [a.grad_fn for a in arguments if isinstance(a, torch.Tensor) and a.grad_fn is not None]
    names = [node.name() for node in nodes_behind(results, stop)]
    log.note_call("autograd's graph", [name for name in names if not name.endswith("AccumulateGrad")])


def _roles(module: torch.nn.Module) -> Roles:
    roles = Roles()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        roles.add(name, tensor)
    return roles


class EagerProof:
    """The latest eager logs of one kind of call, and how the recording compares with them."""

    def __init__(self) -> None:
        self._logs: list[Log] = []
        self._surprises = 0
        self.shown = Shown.NOT
        self.varying_error: CaptureError | None = None
        """Error if eager calls within one round ran different operations."""

    def add(self, log: Log) -> None:
        """Add the log of an eager call."""
        self._logs = [*self._logs[-2:], log]

    @property
    def latest(self) -> Log | None:
        """The log of the last eager call."""
        return self._logs[-1] if self._logs else None

    def refuse_varying(self, name: str, whose: str) -> None:
        """Raise if the last two eager calls have run different operations."""
        between = first_difference(*self._logs[-2:])
        if between is not None:
            raise varying_operations(name, between, whose)

    def compare(
        self, name: str, eager: Log | None, recording: Log, *, strict: bool = False, whose: str = "module"
    ) -> None:
        """Compare a recording with the eager call that it stands for.

        Raise `NeedsEagerCall` if another eager call is needed, and an error if eager calls differ among themselves.
        """
        if eager is None:
            self.shown, self._surprises = Shown.NOT, 0
            return
        self._surprises += 1
        verdict = judge(self._logs, recording, eager)
        if verdict.found is None:
            self.shown, self._surprises = Shown.EQUAL, 0
            return
        if self._surprises == 1 or (verdict.between is not None and self._surprises <= _MAX_SURPRISES):
            raise NeedsEagerCall
        if verdict.between is not None:
            raise varying_operations(name, verdict.between, whose)
        tell_other_path(name, verdict.found, whose, strict=strict)
        self.shown = Shown.OTHER_PATH


class AuditTurns:
    """Counts rounds, and decides which of them are audited."""

    def __init__(self, audit: str | int) -> None:
        self._audit = audit
        self._rounds, self._due = 0, next_audit(audit, 0)
        self._agreed = 0
        self.audits = 0
        """Number of audits."""

    def restart(self) -> None:
        """Count rounds from here, after a capture."""
        self._rounds, self._agreed, self._due = 0, 0, next_audit(self._audit, 0)

    def begin(self) -> bool:
        """Begin a round. Return True if it is audited first; then call `end`. In a backward an audit is put off."""
        if self._rounds == self._due:
            if torch._C._current_graph_task_id() == -1:
                return True
            self._due += 1  # not in a backward
        self._rounds += 1
        return False

    def end(self) -> None:
        """End an audit."""
        self.audits += 1
        self._agreed, self._due = self._rounds, next_audit(self._audit, self._rounds)
        self._rounds += 1

    @property
    def since(self) -> int:
        """Rounds that have run since the last comparison."""
        return self._rounds - self._agreed
