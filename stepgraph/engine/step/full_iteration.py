"""`FullCudaGraphWrapper` runs Megatron's full iteration, all microbatches forward and backward, as one graph.

A `forward_backward_func` reads its data from iterators, which a graph cannot do. So the wrapper first reads all
microbatches into static buffers (`static_loader`), and the function runs over iterators that yield those buffers. This
is a captured step like any other (`step`): everything the caller passes belongs to its signature, training and
validation are two signatures, and guards watch what `forward_step_func`, the model and the optimizer hold. The buffers
are not copied again: the graph reads them where the loader fills them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from stepgraph.config.objects import checked_settings
from stepgraph.config.spellings import GraphSettings, at_least_one_step
from stepgraph.core.errors import ClosedError, InvalidArgument, StepgraphError, nearest
from stepgraph.core.frames import untraced, warn_user
from stepgraph.core.tracebacks import entry_point, trim
from stepgraph.core.tree import flatten
from stepgraph.core.wording import counted, with_article
from stepgraph.engine.backends import Backend
from stepgraph.engine.call.backend_choice import choose_backend
from stepgraph.engine.call.options import Audit, Hook, Outputs, PairOnError, checked, reads_options
from stepgraph.engine.call.session import Session
from stepgraph.engine.observe.finder import reachable
from stepgraph.engine.optim.optimizer import OptimizerMode
from stepgraph.engine.step.options import NanCheck, StepOptions
from stepgraph.engine.step.report import Report
from stepgraph.engine.step.static_loader import StaticBufferLoader, StaticMicrobatches
from stepgraph.engine.step.step import CapturedStep

_STAGES = ("training", "validation")
"""The stages of a run, without and with `forward_only`."""


def _older_names(given: dict[str, Any]) -> None:
    """Accept older names: `optimizer` was the optimizer, `optimizer_mode` its place. Refuse options without a use."""
    others = {
        "warmup": "pass cuda_graph_warmup_steps= instead.",
        "buckets": "pad microbatches in the data iterator: its items have no names to give sizes for.",
        "pad_values": "pad microbatches in the data iterator.",
    }
    for name in others.keys() & given.keys():
        raise InvalidArgument(
            f"{name}= is not an option of FullCudaGraphWrapper",
            rule="option",
            why="the wrapper captures its own step, with all microbatches in it.",
            fix=others[name],
        )
    if "optimizer_mode" in given or not isinstance(given.get("optimizer", ""), str):
        optimizer, mode = given.pop("optimizer", None), given.pop("optimizer_mode", "auto")
        warn_user(
            "`optimizer` and `optimizer_mode` are older names of `optimizers` and `optimizer`   [option]\n"
            f"Fix: optimizers=[optimizer], optimizer={mode!r}."
        )
        given.update(optimizer=mode, **({} if optimizer is None else {"optimizers": [optimizer]}))


class FullCudaGraphWrapper:
    """Wraps a forward_backward_func and captures it: all microbatches of an iteration are one graph.

    Example:
        >>> forward_backward_func = stepgraph.FullCudaGraphWrapper(forward_backward_func, cuda_graph_warmup_steps=1)
        >>> losses = forward_backward_func(
        ...     forward_step_func=forward_step, data_iterator=data_iterator, model=model,
        ...     num_microbatches=4, seq_length=1024, micro_batch_size=1, forward_only=False)

    Each new kind of call (another number of microbatches, other shapes, `forward_only`, `seq_length`, ...) runs
    eagerly `cuda_graph_warmup_steps` times, is captured, and is replayed from then on. Kinds past `max_graphs` stay
    eager, with a warning. `use_single_mempool` has no effect: the graphs of a wrapper always have one pool, and
    wrappers with one `session` share it. By default the optimizer runs in the caller's loop. With `optimizers=`, a
    training call runs `zero_grad()` of all of them, all microbatches, and `step()` of all of them. The other options
    are those of `stepgraph.capture`; `optimizer` says where optimizers run.
    """

    @reads_options(
        StepOptions,
        older=_older_names,
        optimizers="Optimizers to zero and step in each training call.",
        config="A ConfigContainer, or Megatron's configuration: checked, and read for the number of warm-up steps.",
    )
    def __init__(
        self,
        forward_backward_func: Callable[..., Any],
        cuda_graph_warmup_steps: int | None = None,
        use_single_mempool: bool = False,
        *,
        config: Any = None,
        optimizers: Sequence[Any] = (),
        optimizer: OptimizerMode = "auto",
        max_graphs: int = 8,
        strict: bool = False,
        on_error: PairOnError = "raise",
        outputs: Outputs = "copy",
        generators: Sequence[torch.Generator] = (),
        ignore: Sequence[str] = (),
        safe_hooks: Sequence[Hook] = (),
        audit: Audit = "auto",
        nan_check: NanCheck = "off",
        session: Session | None = None,
        backend: Backend | str | None = None,
    ) -> None:
        _check(forward_backward_func, optimizers)
        checked("use_single_mempool", use_single_mempool, bool)
        checked("on_error", on_error, PairOnError)
        self._forward_backward_func, self._optimizers = forward_backward_func, tuple(optimizers)
        self._name = getattr(forward_backward_func, "__name__", type(forward_backward_func).__name__)
        self._session = session if session is not None else Session()
        self._owns_session = session is None
        self._wanted = backend
        self._max_graphs = max_graphs
        read = StepOptions(
            warmup=_warmup_steps(cuda_graph_warmup_steps, config),
            optimizer=optimizer,
            max_graphs=max_graphs,
            strict=strict,
            on_error=on_error,
            outputs=outputs,
            generators=generators,
            ignore=ignore,
            safe_hooks=safe_hooks,
            audit=audit,
            nan_check=nan_check,
        )
        self._step = CapturedStep(_iteration(self._name), read, self._session, None)
        self._loader: StaticBufferLoader | None = None
        self._closed = False

    def __repr__(self) -> str:
        return repr(self._step)

    @untraced
    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        **call: Any,
    ) -> Any:
        """Run one iteration, with the arguments of the forward_backward_func; further keywords are passed on to it."""
        try:
            self._check_open()
            call |= {"forward_step_func": forward_step_func, "model": model, "num_microbatches": num_microbatches}
            call = dict(sorted(call.items()))  # the order of keywords must not make a new signature
            if self._loader is None:
                self._loader = self._make_loader(call)
            loader = self._loader
            microbatches = loader.load(data_iterator, num_microbatches)
            try:
                results = self._step(microbatches, self._forward_backward_func, self._optimizers, **call)
                results = microbatches.write_back(results)
            except StopIteration as error:
                raise _read_otherwise(f"more than {num_microbatches}", num_microbatches) from error
            finally:
                loader.release(microbatches)
            return results
        except StepgraphError as error:
            trim(error)
            raise

    def _make_loader(self, call: dict[str, Any]) -> StaticBufferLoader:
        """Choose the backend from what the iteration uses, at the first call."""
        leaves, _ = flatten((self._optimizers, call))
        seen = functools.partial(self._forward_backward_func, *leaves)
        self._session.settle(choose_backend(reachable(seen), leaves, self._wanted, self._session))
        return StaticBufferLoader(self._session, max_layouts=self._max_graphs)

    def _check_open(self) -> None:
        if self._closed or self._session.closed:
            raise ClosedError(
                f"{self._name}: this FullCudaGraphWrapper was closed",
                rule="closed",
                why="close() freed its graphs and buffers.",
                fix="make a new wrapper. To drop the graphs and go on, call reset() instead of close().",
            )

    @property
    def replays(self) -> int:
        """Replayed calls so far; cheaper than a report."""
        return self._step.replays

    @property
    def audits(self) -> int:
        """Audits so far; cheaper than a report."""
        return self._step.audits

    def report(self) -> Report:
        """Return the report of the captured step; `static_bytes` includes the buffers of the microbatches."""
        report = self._step.report()
        held = self._loader.num_bytes if self._loader is not None else 0
        return dataclasses.replace(report, static_bytes=report.static_bytes + held)

    def reset(self) -> None:
        """Free all graphs and all static buffers. The next calls warm up and capture again."""
        self._step.reset()
        if self._loader is not None:
            self._loader.reset()

    @entry_point
    def reset_cuda_graph(self, stage: str | None = None) -> None:
        """Free the graphs of a stage, "training" or "validation", or of both. Its next calls warm up and capture again.

        The stage of a call follows from `forward_only`. Static buffers that the other stage reads stay.
        """
        if stage is None:
            self.reset()
            return
        if stage not in _STAGES:
            near = nearest(str(stage), _STAGES)
            raise InvalidArgument(
                f"reset_cuda_graph got stage={stage!r}",
                rule="option",
                why="the stages are 'training' and 'validation'; None stands for both.",
                fix=f"did you mean {near!r}?" if near else "pass stage='training', for example.",
            )
        rest = self._step.reset_where(lambda call: _STAGES[bool(call.get("forward_only", False))] == stage)
        if self._loader is not None:
            values = [value for call in rest for value in call.values()]
            self._loader.reset([value for value in values if isinstance(value, StaticMicrobatches)])

    def close(self) -> None:
        """Free the graphs and buffers, and the session if the wrapper made it. A second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> FullCudaGraphWrapper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._step.__exit__(kind, error, trace)  # frees the graphs; `nan_check` may raise here
        finally:
            if self._loader is not None:
                self._loader.reset()
            if self._owns_session:
                self._session.__exit__(kind, error, trace)


def _iteration(name: str) -> Callable[..., Any]:
    """Make the function to capture. It gets all that it uses as arguments, so that all of it is watched by guards."""

    def iteration(
        microbatches: StaticMicrobatches,
        forward_backward_func: Callable[..., Any],
        optimizers: Sequence[Any],
        /,
        **call: Any,
    ) -> Any:
        stepped = () if call.get("forward_only", False) else optimizers
        for optimizer in stepped:
            optimizer.zero_grad()
        data_iterator = microbatches.data_iterator()
        results = forward_backward_func(data_iterator=data_iterator, **call)
        _check_read(data_iterator, call["num_microbatches"])
        for optimizer in stepped:
            optimizer.step()
        return microbatches.noting_writes(microbatches.without_aliases(results))

    iteration.__name__ = name
    return iteration


def _check_read(data_iterator: Any, num_microbatches: int) -> None:
    """Refuse an iterator that was read in part. A stage that needs no data does not read at all."""
    for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
        left = operator.length_hint(iterator) if iterator is not None else 0
        if 0 < left < num_microbatches:
            raise _read_otherwise(f"{num_microbatches - left}", num_microbatches)


def _read_otherwise(received: str, num_microbatches: int) -> InvalidArgument:
    return InvalidArgument(
        f"the iteration takes {received} of {counted(num_microbatches, 'microbatches')} from a data iterator",
        rule="microbatches",
        why="stepgraph reads exactly num_microbatches items from it before the iteration runs.",
        fix="call next(data_iterator) once a microbatch, and put all that a microbatch needs into one item.",
    )


def _warmup_steps(given: int | None, config: Any) -> int:
    """The eager steps before the capture: as given, else the configuration's, else 1."""
    settings = checked_settings(config) if config is not None else GraphSettings("full_iteration")
    if settings.impl != "full_iteration":
        raise InvalidArgument(
            f"the configuration has cuda_graph_impl={settings.impl!r} without the scope 'full_iteration'",
            rule="option",
            why="FullCudaGraphWrapper captures the full iteration.",
            fix="cuda_graph_impl='local' and cuda_graph_scope=['full_iteration'], or leave the wrapper out.",
        )
    steps = settings.warmup_steps if given is None else given
    if steps is None:
        return 1
    if steps == 0 and not isinstance(steps, bool):
        return at_least_one_step(steps)
    return int(checked("cuda_graph_warmup_steps", steps, int))


def _check(forward_backward_func: Any, optimizers: Any) -> None:
    if not callable(forward_backward_func):
        raise InvalidArgument(
            f"forward_backward_func is {with_article(type(forward_backward_func))}, which cannot be called",
            rule="option",
            why="it must be the function that runs all microbatches of an iteration.",
            fix="pass FullCudaGraphWrapper(get_forward_backward_func(), ...), with the brackets of the call.",
        )
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
        if not isinstance(optimizers, (list, tuple)) or not _can_step(optimizer):
            raise InvalidArgument(
                f"optimizers: {with_article(type(optimizer))} is not a list of objects with zero_grad() and step()",
                rule="option",
                why="each training iteration calls both.",
                fix="pass the optimizer itself, optimizers=[optimizer]. The option optimizer= says where it runs.",
            )


def _can_step(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("zero_grad", "step"))
