"""A recording is compared whole with the step that it stands for, before its graph is used and while it is used.

The log of a call (`oplog`) holds its operations, and the events between them: what each cut calls, the gradients, modes
and results that the call leaves (`left_behind`). Logs are compared twice. Before a graph is used, the recording must be
the last eager call of the same kind. Code that checks whether it is being captured may take another path; then a
warning names the place. While a graph is used, often at first and later at long intervals (`next_audit`), the call is
recorded once more, which has no effect, and compared with the recording in use (the *audit*). A difference means that
the step's Python would now do something else, whatever the cause: the new recording replaces the old one.

Calls are of the same kind if they have the same signature, modes and gradient pattern. An eager call that creates
optimizer state does more than later ones, and is not compared.
"""

from __future__ import annotations

import contextlib
import enum
import math
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from stepgraph.core.errors import CaptureError
from stepgraph.core.frames import warn_user
from stepgraph.engine.call.left_behind import LeftBehind
from stepgraph.engine.guards.protocol import Change
from stepgraph.engine.observe.step_objects import StepObjects, numbered
from stepgraph.engine.oplog import Difference, Effects, Log, OpLog, Roles, Vocabulary, first_difference, noting_unseen
from stepgraph.engine.oplog.optimizer_steps import at_optimizer_steps
from stepgraph.engine.optim.optimizer import note_step
from stepgraph.engine.optim.scaler import noting_scalers

_MANY_UNTIL = 64
"""Replays up to which the next audit comes after 1.6 times as many, and then after four times as many."""
_LONGEST_PERIOD = 50_000
"""Most replays between two audits. The cost of an audit is small beside that many steps."""
NEVER = -1
_FREE_AUDITS = 8
_CALLS_PER_AUDIT = 16
"""Audits that changes of one value may cause: so many, and one more for each so many calls. More cost more than a graph
gains."""


def next_audit(audit: str | int, replays: int) -> int:
    """Return the number of replays at which the next audit is due, given the `replays` since the capture.

    A condition that holds at every second or third call, and that no guard sees, must not fall between all audits. So
    neighbouring counts share no factor, and odd and even ones alternate: 1, 2, 3, 4, 7, 12, 19, 30, 49, 78, 313, ...
    With `audit=n` audits are n and n - 1 replays apart in turn.

    Example:
        >>> next_audit("auto", 7), next_audit(10, 10), next_audit(10, 19)
        (12, 19, 29)
    """
    if audit is False:
        return NEVER
    if audit != "auto":
        every = int(audit)
        begin = replays - replays % (2 * every - 1)
        return begin + every if replays < begin + every else begin + 2 * every - 1
    growth = 8 if replays < _MANY_UNTIL else 20
    due = max(replays + 1, min(growth * replays // 5, replays + _LONGEST_PERIOD))
    while replays and (due % 2 == replays % 2 or math.gcd(due, replays) > 1):
        due += 1
    return due


class Shown(enum.Enum):
    """The outcome of comparing a recording with eager calls of its kind."""

    EQUAL = "equal"
    OTHER_PATH = "other path"
    """Eager calls agree with each other, and the recording differs."""
    LATER = "later"
    """The graph was recorded ahead: the first call of its kind runs eagerly and is compared."""
    NOT = "not"
    """There is no eager call to compare with: each creates new state."""


@dataclass(slots=True)
class CallProof:
    """The operations of a captured call, and how they compare with those of the step."""

    log: Log
    shown: Shown
    due: int
    """Number of replays at the next audit."""
    other_path: Difference | None = None
    """The first difference from eager calls, if the recording took another path."""
    agreed: int = 0
    """Number of replays at the last audit that agreed."""
    between: Sequence[Any] = ()
    """Optimizers and scalers that run between graphs: an eager log has their work, and the recording has not."""


class Restless:
    """Counts the audits that changes of a value have caused, though its changes had no effect so far.

    That proves nothing about the next change, and what the step does with the value could not be traced
    (`values.decisions`). So each change is audited. Where that costs more than a graph gains, calls stay eager for a
    while: the value is not dropped.
    """

    def __init__(self) -> None:
        self._changes: Counter[str] = Counter()
        self._calls = 0
        self.names: list[str] = []
        """The values that change too often, as of the last comparison."""
        self.told: set[str] = set()
        self.paused: set[str] = set()
        """Values that a warning has named: because an answer was another one, and because calls rest."""

    def add(self, changes: Iterable[Change], calls: int = 0) -> None:
        """Add values that changed while the recording did not. `calls` have run since the last comparison."""
        names = {change.name for change in changes}
        self._changes.update(names)
        self._calls += calls
        most = _FREE_AUDITS + self._calls // _CALLS_PER_AUDIT
        self.names = sorted(name for name in names if self._changes[name] > most)


class NeedsEagerCall(Exception):
    """One more eager call is needed before a capture: there was none, or the recording differs from it."""

    def __init__(self, rebuilt: str | None = None, values: Sequence[Change] = ()) -> None:
        super().__init__(rebuilt, values)
        self.rebuilt, self.values = rebuilt, values
        """What changed since that call: in the model (in words), or which host values."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A recording compared with eager calls of its kind."""

    found: Difference | None
    """The first difference between the recording and the eager call that it stands for."""
    between: Difference | None = None
    """The first difference between eager calls, if the recording differs: then neither stands for the other."""


def judge(eager: Sequence[Log], recording: Log, stands_for: Log | None = None) -> Verdict:
    """Compare a recording with the latest eager call, or with the one that it `stands_for`.

    Raise `NeedsEagerCall` if they differ and a single eager call cannot say why.
    """
    found = first_difference(eager[-1] if stands_for is None else stands_for, recording)
    if found is None:
        return Verdict(None)
    if len(eager) < 2:
        raise NeedsEagerCall
    compared = (first_difference(one, eager[-1]) for one in eager[:-1])
    return Verdict(found, next((between for between in compared if between is not None), None))


class EagerLogs:
    """The logs of a site's eager calls: the last two of each kind."""

    def __init__(self) -> None:
        self._logs: dict[Hashable, list[Log]] = {}

    def add(self, kind: Hashable, log: Log) -> None:
        self._logs[kind] = [*self._logs.get(kind, [])[-1:], log]

    def of(self, kind: Hashable) -> list[Log]:
        """Return the logs of this kind, the latest last."""
        return self._logs.get(kind, [])

    def clear(self) -> None:
        self._logs.clear()


class StepLogs:
    """Keeps the logs of one step's calls, which share a vocabulary."""

    def __init__(self) -> None:
        self._vocabulary = Vocabulary()

    @contextlib.contextmanager
    def noting(
        self,
        leaves: Sequence[Any],
        touched: StepObjects,
        device: torch.device,
        ignored: Iterable[tuple[str, torch.Tensor]] = (),
        arguments: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> Iterator[OpLog]:
        """Log the operations and events of a call on these leaves.

        `ignored` are named tensors that may differ each time. `arguments` are leaves of autograd that may be left with
        another gradient.
        """
        roles = roles_of(touched)
        for name, tensor in ignored:
            roles.add(name, tensor)
        for index, leaf in enumerate(leaves):
            if issubclass(type(leaf), torch.Tensor) and leaf.is_leaf and leaf.grad is not None:
                roles.add(f"the gradient of argument {index}", leaf.grad)
        log = OpLog(self._vocabulary, leaves, roles, device, objects=touched.known())
        log.effects = LeftBehind(touched, log, arguments)

        def begin(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            note_step(log, optimizer, args, kwargs)
            log.begin_section(id(optimizer), type(optimizer).__name__)

        def end(optimizer: Optimizer, _: Any) -> None:
            log.end_section(id(optimizer))
            log.effects.forgive(optimizer)

        with noting_unseen(), at_optimizer_steps(after=end, called=begin), noting_scalers(log), log:
            try:
                yield log
            finally:
                log.effects = Effects()  # it refers to the log, and to what ends with the call

    def agree(self, eager: Log, recording: Log, outside: Iterable[Any]) -> bool:
        """Check that a recording is the eager call, but for the work between graphs."""
        left_out = list(map(id, outside))
        return first_difference(eager.without(left_out), recording.without(left_out)) is None

    def judge(self, eager: Sequence[Log], recording: Log, outside: Iterable[Any]) -> Verdict:
        """Compare a recording with eager calls, without the work of the optimizers and scalers between graphs."""
        left_out = list(map(id, outside))
        return judge([log.without(left_out) for log in eager], recording.without(left_out))


def varying_operations(name: str, between: Difference, whose: str = "step") -> CaptureError:
    """Make the error for equal eager calls that ran different operations: no graph fits both."""
    instead = "; or graph the parts that stay the same: stepgraph.graph_modules" if whose == "step" else ""
    return CaptureError(
        f"{name}: the operations of the {whose} change from call to call",
        rule="varying-operations",
        details=[str(between)],
        why="a graph replays one sequence of operations. Two equal eager calls had different ones: they depend on "
        "something that changes (data read on the host, Python's randomness, time).",
        fix=f"decide on the device (torch.where), outside the {whose}, or by an argument{instead}.",
    )


def other_path(name: str, found: Difference, whose: str = "step") -> CaptureError:
    """Make the error for a recording that differs from eager calls, which agree with each other."""
    return CaptureError(
        f"{name}: the {whose} runs other operations during capture than in eager calls",
        rule="other-path",
        details=[str(found)],
        why=_OTHER_PATH,
        fix=_SAME_PATH,
    )


def tell_other_path(name: str, found: Difference, whose: str = "step", *, strict: bool) -> None:
    """Warn of `other_path`, or raise it under strict."""
    error = other_path(name, found, whose)
    if strict:
        raise error
    warn_user(str(error))


_OTHER_PATH = (
    "eager calls agree with each other, and the recording differs: some code checks whether it is being captured. The "
    "graph computes what that path computes, which may differ from eager in some bits."
)
_SAME_PATH = "let the code at this line do the same in both cases, or compare the results yourself (docs/equality.md)."


_BUCKETS = "DDP's gradients"


def roles_of(touched: StepObjects) -> Roles:
    """Name the parameters, gradients and buffers of a step, and the state of its optimizers."""
    roles = Roles()
    names: dict[int, str] = {}
    taken: set[str] = set()
    replicas = (m for m in touched.all_modules if isinstance(m, DistributedDataParallel) and m.gradient_as_bucket_view)
    in_buckets = {id(p) for ddp in replicas for p in ddp.parameters()}
    """Parameters with gradients in DDP's buckets: one tensor to DDP, many to the step, elsewhere in a recording."""
    for parameter in touched.all_parameters:
        name = names[id(parameter)] = numbered(touched.name(parameter), taken)
        taken.add(name)
        roles.add(name, parameter)
        if parameter.grad is not None and id(parameter) in in_buckets:
            touched.buckets[id(parameter.grad)] = weakref.ref(parameter.grad)
        elif parameter.grad is not None:
            roles.add(f"{name}.grad", parameter.grad)
    touched.buckets = {key: ref for key, ref in touched.buckets.items() if ref() is not None}
    for grad in (ref() for ref in touched.buckets.values()):
        if grad is not None:
            roles.add_all(_BUCKETS, grad)
    for module in touched.all_modules:
        for key, buffer in module._buffers.items():
            if buffer is not None:
                roles.add(f"{touched.name(module)}.{key}", buffer)
    for optimizer in touched.optimizers:
        kind = numbered(type(optimizer).__name__, taken)
        taken.add(kind)
        for parameter, state in dict.items(optimizer.state):  # past the subclass that notes reads
            for key, value in state.items() if issubclass(type(state), dict) else ():
                if issubclass(type(value), torch.Tensor):
                    roles.add(f"{kind}.state[{names.get(id(parameter), '...')}][{key!r}]", value)
    return roles


def num_states(optimizers: Iterable[Optimizer]) -> int:
    """Count the entries in the states of optimizers."""
    return sum(
        len(state) for optimizer in optimizers for state in optimizer.state.values() if issubclass(type(state), dict)
    )
