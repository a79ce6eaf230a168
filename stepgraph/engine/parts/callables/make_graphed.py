"""`make_graphed_callables` captures graphs before training, from sample arguments.

One function has two contracts. Without an order (torch's), each callable gets a forward and a backward graph, and a
module's forward is replaced; in the other training mode it runs eagerly. With an order (Transformer Engine's), each
layer gets graphs for each microbatch, captured in the order in which a rank of a pipeline runs them, sharing memory by
lifetime. The caller calls the returned callables in that order, and each call is checked against it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import with_article
from stepgraph.engine.backends import Backend
from stepgraph.engine.call.interrupt import interrupts_held
from stepgraph.engine.call.options import Audit, checked, reads_options, refuse_both
from stepgraph.engine.call.session import Session
from stepgraph.engine.observe.ddp import unwrapped
from stepgraph.engine.order.entries import is_count
from stepgraph.engine.parts.callables.capture_job import CaptureJob
from stepgraph.engine.parts.callables.graphed import CallablesReport, GraphedCallable
from stepgraph.engine.parts.callables.request import Request, read_request
from stepgraph.engine.parts.callables.warm_up import CaptureTimeHooks

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)


class _Fp8Keywords(TypedDict, total=False):
    fp8_enabled: Annotated[bool, "Refused: FP8 cannot be captured yet."]
    fp8_recipe: Annotated[Any, "Refused, like `fp8_enabled`."]
    fp8_group: Annotated[Any, "Refused, like `fp8_enabled`."]
    fp8_weight_caching: Annotated[bool, "Refused, like `fp8_enabled`."]


class _Keywords(_Fp8Keywords, total=False):
    """The keywords of `make_graphed_callables` besides `order`, for type checkers and `help()`."""

    sample_kwargs: Annotated[Any, "Keyword arguments of the sample calls: one dict for all, or one for each."]
    num_warmup_iters: Annotated[int, "Eager calls before the capture, 0 or more."]
    allow_unused_input: Annotated[bool, "Allow arguments that a callable does not use."]
    num_layers_per_chunk: Annotated[int | Sequence[int] | None, "With an order: callables of each chunk."]
    pool: Annotated[Session | None, "The `stepgraph.Session` to share memory with."]
    reuse_buffers: Annotated[bool, "With an order: share static arguments between microbatches by lifetime."]
    clone_param_grads: Annotated[bool, "Return gradients of parameters as copies, which are safe to keep."]
    capture_time_hooks: Annotated[Any, "Hooks that run around each capture, one entry for each callable."]
    pre_warmup_hook: Annotated[Callable[[], Any] | None, "Called before the warm-up."]
    post_warmup_hook: Annotated[Callable[[], Any] | None, "Called after the warm-up."]
    retain_graph_in_backward: Annotated[bool, "Keep the tensors that a backward needs, so that it may run again."]
    audit: Annotated[Audit, 'When to record again and compare: "auto" (rounds 1, 2, 4, ...), every N rounds, or False.']
    backend: Backend | str | None
    _order: Annotated[Sequence[float] | None, "Transformer Engine's name for `order`."]
    _num_layers_per_chunk: Annotated[int | Sequence[int] | None, "Its name for `num_layers_per_chunk`."]


def _private_names(given: dict[str, Any]) -> None:
    """Accept Transformer Engine's names for the order."""
    for name in ("order", "num_layers_per_chunk"):
        private = given.pop(f"_{name}", None)
        if private is not None:
            refuse_both(given, f"_{name}", name)
            given[name] = private


@overload
def make_graphed_callables(
    callables: Callable[..., Any] | Sequence[Callable[..., Any]],
    sample_args: Any,
    *,
    order: Sequence[float],
    **options: Unpack[_Keywords],
) -> tuple[GraphedCallable[..., Any], ...]: ...
@overload
def make_graphed_callables(callables: M, sample_args: Any, *, order: None = ..., **options: Unpack[_Keywords]) -> M: ...
@overload
def make_graphed_callables(
    callables: Callable[P, R], sample_args: Any, *, order: None = ..., **options: Unpack[_Keywords]
) -> GraphedCallable[P, R]: ...
@overload
def make_graphed_callables(
    callables: Sequence[Callable[..., Any]], sample_args: Any, *, order: None = ..., **options: Unpack[_Keywords]
) -> tuple[Any, ...]: ...
@reads_options(
    _Keywords,
    older=_private_names,
    order="Forwards and backwards of a pipeline rank, in order, as numbers of chunks: [1, 1, -1, -1].",
)
def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    *,
    sample_kwargs: Any = None,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    order: Sequence[float] | None = None,
    num_layers_per_chunk: Any = None,
    pool: Session | None = None,
    fp8_enabled: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool = False,
    reuse_buffers: bool = True,
    clone_param_grads: bool = True,
    capture_time_hooks: Any = None,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    retain_graph_in_backward: bool = False,
    audit: Audit = "auto",
    backend: Backend | str | None = None,
    _order: Sequence[float] | None = None,
    _num_layers_per_chunk: Any = None,
) -> Any:
    """Capture graphs of modules or functions from sample arguments, before training.

    Example:
        >>> layer = stepgraph.make_graphed_callables(layer, (torch.randn(4, 8, requires_grad=True),))
        >>> layer(x).sum().backward()                       # replays; layer.eval() runs the forward as it was
        >>> graphed = stepgraph.make_graphed_callables(     # 2 layers, 2 microbatches, all forwards first
        ...     (first, second), samples, order=[1, 1, -1, -1]
        ... )
        >>> hidden = graphed[0](x)                          # layer l of microbatch m at m * 2 + l

    Without an order it returns the callables; modules have their forward replaced, of DDP that of the module inside.
    With an order it returns a tuple: layer l of microbatch m in a chunk of n layers, p before it, is at p*M + m*n + l.
    """
    _refuse_fp8(fp8_enabled, fp8_recipe, fp8_group, fp8_weight_caching)
    _check_options(num_warmup_iters, audit)
    request = read_request(callables, sample_args, sample_kwargs, order, num_layers_per_chunk)
    hooks = CaptureTimeHooks(capture_time_hooks, request.callables)
    session = pool if pool is not None else Session()
    begun, retain = time.perf_counter(), retain_graph_in_backward
    with interrupts_held() as raise_held:  # its warm-up, too, puts proxies in the place of parameters
        job = CaptureJob(request, session, hooks, backend, owns_session=pool is None)
        try:
            if pre_warmup_hook is not None:
                pre_warmup_hook()
            job.warm_up(num_warmup_iters)
            if post_warmup_hook is not None:
                post_warmup_hook()
            job.capture(reuse=reuse_buffers, retain=retain, allow_unused=allow_unused_input)
            raise_held()
        except BaseException:
            job.give_up()
            raise
        made = job.graphed(begun, clone_param_grads=clone_param_grads, retain=retain, audit=audit)
        return _for_caller(made, request)


def _for_caller(made: Sequence[GraphedCallable[..., Any]], request: Request) -> Any:
    if request.order is not None:
        return tuple(made)
    found = [_put_in_place(graphed, given) for graphed, given in zip(made, request.callables, strict=True)]
    return found[0] if request.is_single else tuple(found)


def _put_in_place(graphed: GraphedCallable[..., Any], given: Callable[..., Any]) -> Any:
    """Without an order: return the module with its forward replaced, or the graphed callable of a function."""
    if not isinstance(given, torch.nn.Module):
        return graphed
    graphed.put_in_place(given)
    return given


@entry_point
def report(callables: Any) -> CallablesReport:
    """Report what was captured and replayed, for a graphed callable, a graphed module, or a tuple of them."""
    first = unwrapped(callables[0] if isinstance(callables, (tuple, list)) else callables)
    graphed = first if isinstance(first, GraphedCallable) else vars(first).get("forward")
    if not isinstance(graphed, GraphedCallable) and isinstance(first, torch.nn.Module):
        graphed = first._compiled_call_impl
    if not isinstance(graphed, GraphedCallable):
        raise InvalidArgument(
            f"{with_article(type(first))} has no graphs of make_graphed_callables",
            rule="sample-arguments",
            why="this report is about graphs captured by make_graphed_callables.",
            fix="pass what make_graphed_callables returned, before .reset().",
        )
    return graphed.report()


def _refuse_fp8(enabled: bool, recipe: Any, group: Any, weight_caching: bool) -> None:
    given = {
        "fp8_enabled": enabled,
        "fp8_recipe": recipe is not None,
        "fp8_group": group is not None,
        "fp8_weight_caching": weight_caching,
    }
    for name, is_given in given.items():
        if is_given:
            raise InvalidArgument(
                f"`{name}` is given",
                rule="fp8",
                fix=f"leave `{name}` out, and capture in bf16.",
            )


def _check_options(num_warmup_iters: Any, audit: Any) -> None:
    checked("audit", audit, Audit)
    if not is_count(num_warmup_iters):
        raise InvalidArgument(
            f"num_warmup_iters={num_warmup_iters!r} is not an integer of 0 or more",
            rule="option",
            why="it counts eager calls before the capture.",
            fix="pass an integer of 0 or more; 3 is usually enough, 11 with NCCL's DDP.",
        )
