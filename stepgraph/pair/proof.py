"""What replays of a module is what its call would do: the operations of its calls are compared.

Each eager call of the warm-up is logged, and so is each recording (`oplog`). Of an eager call that is the forward, and
as the sign for its backward the nodes that the call adds to autograd's graph, by name: the backward itself runs inside
the user's one `loss.backward()`, among the backwards of everything else. Of a recording forward and backward are
logged. A recording that is used agrees with the eager call that it stands for. Later it is *audited*: the call is
recorded again, forward and backwards, without effect, and compared with the recording that is replayed. The new one is
dropped. If it differs, the module would do something else by now, and is captured anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stepgraph.errors import CaptureError
from stepgraph.oplog import Log, OpLog, Roles, Vocabulary, first_difference, noting_unseen
from stepgraph.pair.cached_casts import keeps_casts
from stepgraph.pair.differentiate import nodes_behind
from stepgraph.session.proof import NotWarm, Shown, judge, next_audit, tell_other_path, varying_operations
from stepgraph.tree import flatten

_MAX_SURPRISES = 3
"""Recordings that may differ from the eager call before them, where eager calls differ among themselves."""


class PairLogs:
    """Keeps the logs of the calls of one session's modules, which share a vocabulary."""

    def __init__(self) -> None:
        self._vocabulary = Vocabulary()

    def of_call(
        self, module: torch.nn.Module, leaves: Sequence[Any], ambient: Sequence[Hashable], device: torch.device
    ) -> OpLog:
        """A log for a call of a module on these arguments, under these flags."""
        keeps = keeps_casts(ambient, grad_mode=False)
        return OpLog(self._vocabulary, leaves, _roles(module), device, keeps_casts=keeps)

    def of_backward(
        self, forward: OpLog, module: torch.nn.Module, incoming: Mapping[int, torch.Tensor], memory: Mapping[str, Any]
    ) -> OpLog:
        """A log for a backward of what was logged; `incoming` gradients of results, `memory` of those it adds to."""
        roles = _roles(module)
        for index, grad in incoming.items():
            roles.add(f"the gradient of result {index}", grad)
        for name, grad in memory.items():
            roles.add(f"{name}.grad", grad)
        return forward.followed_by(roles)


@contextlib.contextmanager
def noting(log: OpLog) -> Iterator[None]:
    """Note what runs in this block."""
    with noting_unseen(), log:
        yield


def note_forward(log: OpLog, result: Any, arguments: Sequence[Any]) -> None:
    """At the end of a forward: note what it returns, and its part of autograd's graph."""
    results = [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]
    log.note_result(results)
    stop = [a.grad_fn for a in arguments if isinstance(a, torch.Tensor) and a.grad_fn is not None]
    names = [node.name() for node in nodes_behind(results, stop)]
    log.note_call("autograd's graph", [name for name in names if not name.endswith("AccumulateGrad")])


def _roles(module: torch.nn.Module) -> Roles:
    roles = Roles()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        roles.add(name, tensor)
    return roles


class EagerProof:
    """What is known of one kind of call: its latest eager logs, and how the recording agreed with them."""

    def __init__(self) -> None:
        self._logs: list[Log] = []
        self._surprises = 0
        self.shown = Shown.NOT
        self.wavers: CaptureError | None = None
        """How eager calls of one round differ."""

    def add(self, log: Log) -> None:
        """An eager call was logged."""
        self._logs = [*self._logs[-2:], log]

    @property
    def latest(self) -> Log | None:
        """The log of the last eager call."""
        return self._logs[-1] if self._logs else None

    def refuse_varying(self, name: str, whose: str) -> None:
        """Raise if the last two eager calls, which followed one on the other, have run different operations."""
        between = first_difference(*self._logs[-2:])
        if between is not None:
            raise varying_operations(name, between, whose)

    def compare(
        self, name: str, eager: Log | None, recording: Log, *, strict: bool = False, whose: str = "module"
    ) -> None:
        """Compare a recording with the eager call that it stands for.

        Raises `NotWarm` if there should be another eager call, and an error if eager calls differ among themselves.
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
            raise NotWarm
        if verdict.between is not None:
            raise varying_operations(name, verdict.between, whose)
        tell_other_path(name, verdict.found, whose, strict=strict)
        self.shown = Shown.OTHER_PATH


class AuditTurns:
    """Counts rounds, and tells at which of them graphs are audited."""

    def __init__(self, audit: str | int) -> None:
        self._audit = audit
        self._rounds, self._due = 0, next_audit(audit, 0)
        self._agreed = 0
        self.audits = 0
        """How many there were."""

    def restart(self) -> None:
        """Graphs were captured: rounds count from here."""
        self._rounds, self._agreed, self._due = 0, 0, next_audit(self._audit, 0)

    def begin(self) -> bool:
        """A round begins; whether it is audited first, and `end` follows. One that cannot be is put off."""
        if self._rounds == self._due:
            if torch._C._current_graph_task_id() == -1:
                return True
            self._due += 1  # not in a backward
        self._rounds += 1
        return False

    def end(self) -> None:
        """The audit is over."""
        self.audits += 1
        self._agreed, self._due = self._rounds, next_audit(self._audit, self._rounds)
        self._rounds += 1

    @property
    def since(self) -> int:
        """Rounds that have run since the last comparison."""
        return self._rounds - self._agreed
