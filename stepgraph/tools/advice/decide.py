"""Decide from measurements whether graphs pay, and from the kind of program which interface to use.

Everything here is pure: measurements in, (choice, reason) out. Nothing is run or measured.

A graph removes the time in which the GPU waits for the host, and nothing else. So a step is judged by its *busy*
fraction: the time in which at least one kernel runs, divided by the time of the step. What is predicted:

    gpu = busy + 0.3 us * kernels + 5 us * launches of graphs, and of what runs between them
    replay = 0.03 ms + 0.6 us * parameters + 0.1 us * kernels + 0.05 ms * calls between graphs
    whole step = max(gpu, replay + optimizers between graphs + host work between steps)
    whole step, if the host waits between steps = replay + max(gpu, optimizers between graphs) + host work between steps
    scope = max(busy + 0.3 us * kernels, host - host time in the scope + 0.12 ms * calls + host work between steps)
    memory, whole step = 1.03 * eager's peak + 4 MiB
    memory, scope = 1.1 * eager's peak

An optimizer that a captured step leaves between its graphs costs its launches as before, beside the GPU's work. The
numbers were measured on H200s (benchmarks/results); the tests of this module compare the formulas with them.

The rules about interfaces and scopes are those of NVIDIA's guides for Megatron Bridge, Megatron Core, Transformer
Engine and PyTorch; each row of those guides is a case in the tests of this module.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stepgraph.tools.timeline import WORTHWHILE

LAUNCH_BOUND = 0.80
"""Below this busy fraction a step waits for launches."""
GPU_BOUND = 0.95
"""Above this busy fraction there is next to nothing to win."""
MEMORY_WARNING = 0.88
"""The used fraction of the device's memory, before capture, from which a capture may not fit."""
GIB = 2**30
WHOLE_STEP = "whole step"
STAGE = "stage"
"""The scope that is all of the model in a stage of `torch.distributed.pipelining`."""
DO_NOT = "do not"
GUIDES_MEMORY = (
    "0 to 2 GB for scopes, 10 GB and more with pipelines, and 1.5 to 2 times eager's peak for a whole iteration"
)
"""The memory that NVIDIA's guides name for graphs, in one sentence."""
MEASURED_MEMORY = "up to 1.23 times eager's peak for scopes and 1.17 times for whole steps"
"""The memory that was measured under benchmarks/results, in one sentence; the tests compare it with the files."""

_GAP_US = 0.30
"""Time between two kernels of a replayed graph."""
_LAUNCH_US = 5.0
"""Time on the GPU from the end of a graph to what follows it."""
_REPLAY_MS, _TENSOR_US, _NODE_US, _CUT_MS = 0.03, 0.6, 0.1, 0.05
"""Host time of one replay of a whole step: in any case, for each parameter that the guards compare (in Python), for
each kernel of the graph, and for each call between two graphs."""
_PAIR_MS = 0.12
"""Host time of the forward and backward replay of one module."""
_POOL_SHARE, _POOL_BYTES = 0.03, 4 * 2**20
"""What the pool of a whole step takes beside what eager needs: a part of eager's peak, and its first segments."""
_SCOPE_SHARE = 0.10
"""What graphs of modules take beside what eager needs, as a part of its peak: 2 to 21 % were measured."""


class Bound(enum.Enum):
    """What limits the speed of a step."""

    LAUNCHES = "launch-bound"
    MIXED = "in between"
    GPU = "GPU-bound"


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice, and the reason for it in one sentence."""

    choice: str
    reason: str


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a step that one scope would capture: all modules of that kind, forward and backward."""

    scope: str
    num_modules: int
    """Forward calls of such modules in a step."""
    host_ms: float
    """Time that the host spends in them."""
    kernels: int
    forbidden: tuple[str, ...] = ()
    """What keeps it from being captured: rule ids, or a sentence."""


@dataclass(frozen=True, slots=True)
class EagerPart:
    """An optimizer that a captured step leaves between its graphs."""

    name: str
    calls: int
    host_ms: float
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """An eager step, as `advise` measures it on a GPU."""

    step_ms: float
    busy_ms: float
    host_ms: float
    """Time until the host has queued the step, without waiting for the GPU."""
    kernels: int
    small_kernels: int = 0
    activation_bytes: int = 0
    """The most that a step has allocated beside what it found."""
    used_bytes: int = 0
    """Peak of the reserved memory, in eager."""
    total_bytes: int = 0
    outside_ms: float = 0.0
    """Time that the host spends between two steps: loading data, logging."""
    outside_syncs: int = 0
    """Times that the host waits for the GPU between two steps."""
    num_tensors: int = 0
    """Parameters of the models: each replay compares them with those of the capture."""
    eager_parts: tuple[EagerPart, ...] = ()
    regions: tuple[Region, ...] = ()
    whole_step_forbidden: tuple[str, ...] = ()

    @property
    def busy_fraction(self) -> float:
        """The fraction of the step in which the GPU works, at most 1."""
        return min(1.0, self.busy_ms / self.step_ms) if self.step_ms > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a scope is expected to bring."""

    scope: str
    step_ms: float
    extra_bytes: int
    gain: float
    """Fraction of the eager step time that is saved."""
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """The verdict on a measured step."""

    bound: Bound
    choice: Decision
    predictions: tuple[Prediction, ...]
    warnings: tuple[str, ...] = ()


def bound_of(busy_fraction: float) -> Bound:
    """Classify a step by its busy fraction: launch-bound under 80 %, GPU-bound over 95 %.

    Example:
        >>> bound_of(0.21)
        <Bound.LAUNCHES: 'launch-bound'>
    """
    if busy_fraction < LAUNCH_BOUND:
        return Bound.LAUNCHES
    return Bound.GPU if busy_fraction > GPU_BOUND else Bound.MIXED


def predict(measured: Measured) -> tuple[Prediction, ...]:
    """Predict step time and memory of each scope that was measured, and of the whole step, the fastest first."""
    found = [predict_region(measured, region) for region in measured.regions]
    found.append(predict_whole_step(measured))
    return tuple(sorted(found, key=lambda prediction: (bool(prediction.forbidden), prediction.step_ms)))


def predict_whole_step(measured: Measured) -> Prediction:
    """Predict a step that is one graph, or several with optimizers between them."""
    step_ms = whole_step_ms(measured)
    extra_bytes = whole_step_bytes(measured.used_bytes)
    return _prediction(WHOLE_STEP, measured, step_ms, extra_bytes, measured.whole_step_forbidden)


def whole_step_ms(measured: Measured) -> float:
    """Return the time of an iteration whose step is replayed, by the formula at the head of this file.

    What the host does runs beside the GPU's work. If it waits for the GPU between steps, the replay and what comes
    between steps run after it.

    Example:
        >>> round(whole_step_ms(Measured(step_ms=120.7, busy_ms=21.7, host_ms=113.6, kernels=4180)), 1)
        23.0
    """
    cuts = sum(part.calls for part in measured.eager_parts)
    gpu_ms = _kernels_ms(measured) + (1 + 2 * cuts) * _LAUNCH_US / 1e3
    replay_ms = _REPLAY_MS + (measured.num_tensors * _TENSOR_US + measured.kernels * _NODE_US) / 1e3 + cuts * _CUT_MS
    eager_ms = sum(part.host_ms for part in measured.eager_parts)
    if measured.outside_syncs:
        return replay_ms + max(gpu_ms, eager_ms) + measured.outside_ms
    return max(gpu_ms, replay_ms + eager_ms + measured.outside_ms)


def whole_step_bytes(eager_peak_bytes: int) -> int:
    """Return the bytes that a captured step reserves beside eager's peak.

    The pool takes the place of the allocator's blocks, so activations and gradients count once.

    Example:
        >>> whole_step_bytes(2000 * 2**20) // 2**20
        64
    """
    return int(_POOL_SHARE * eager_peak_bytes) + _POOL_BYTES


def predict_region(measured: Measured, region: Region) -> Prediction:
    """Predict a step of which some modules are graphs: the host saves what it spends in them, less the replays."""
    host_ms = max(0.0, measured.host_ms - region.host_ms) + region.num_modules * _PAIR_MS
    if measured.outside_syncs:
        step_ms = max(_kernels_ms(measured), host_ms) + measured.outside_ms
    else:
        step_ms = max(_kernels_ms(measured), host_ms + measured.outside_ms)
    return _prediction(region.scope, measured, step_ms, scope_bytes(measured.used_bytes), region.forbidden)


def scope_bytes(eager_peak_bytes: int) -> int:
    """Return the bytes that graphs of modules reserve beside eager's peak."""
    return int(_SCOPE_SHARE * eager_peak_bytes)


def _kernels_ms(measured: Measured) -> float:
    """The time of the kernels one after the other, without waiting for the host."""
    return measured.busy_ms + measured.kernels * _GAP_US / 1e3


def _prediction(
    scope: str, measured: Measured, step_ms: float, extra_bytes: int, forbidden: Sequence[str]
) -> Prediction:
    step_ms = min(step_ms, measured.step_ms)
    gain = 1 - step_ms / measured.step_ms if measured.step_ms > 0 else 0.0
    return Prediction(scope, step_ms, extra_bytes, gain, (*forbidden, *_too_large(measured, extra_bytes)))


def _too_large(measured: Measured, extra_bytes: int) -> tuple[str, ...]:
    """The sentence that forbids a capture for which the device has too little memory."""
    needed, total = measured.used_bytes + extra_bytes, measured.total_bytes
    if not total or needed <= total:
        return ()
    return (f"does not fit: needs {needed / GIB:.1f} of {total / GIB:.1f} GiB",)


def advise_on(measured: Measured) -> Advice:
    """Decide whether to capture a measured step, and what of it.

    Example:
        >>> advise_on(Measured(step_ms=124.8, busy_ms=26.5, host_ms=124.0, kernels=5000)).choice.choice
        'whole step'
    """
    bound = bound_of(measured.busy_fraction)
    predictions = predict(measured)
    allowed = [prediction for prediction in predictions if not prediction.forbidden]
    best = max(allowed, key=lambda prediction: prediction.gain, default=None)
    percent = f"{100 * measured.busy_fraction:.0f} %"
    if best is None:
        reasons = "; ".join(dict.fromkeys(why for p in predictions for why in p.forbidden))
        choice = Decision(DO_NOT, f"nothing of the step can be captured as it is: {reasons}")
    elif best.gain < WORTHWHILE:
        choice = Decision(
            DO_NOT,
            f"the GPU is busy {percent} of the step, so the best capture would save "
            f"{100 * max(best.gain, 0):.1f} % of it, less than {100 * WORTHWHILE:.0f} %",
        )
    else:
        choice = Decision(
            best.scope,
            f"the GPU is busy {percent} of the step; this leaves {best.step_ms:.2f} ms of {measured.step_ms:.2f} ms",
        )
    pays = [prediction for prediction in allowed if prediction.gain >= WORTHWHILE]
    return Advice(bound, choice, predictions, memory_warnings(measured, pays))


def memory_warnings(measured: Measured, pays: Sequence[Prediction]) -> tuple[str, ...]:
    """Return what the used memory says about the captures that would pay, before one is tried."""
    if not measured.total_bytes or measured.used_bytes < MEMORY_WARNING * measured.total_bytes:
        return ()
    used, total = measured.used_bytes / GIB, measured.total_bytes / GIB
    warning = (
        f"{used:.1f} of {total:.1f} GiB are in use before any capture: from {100 * MEMORY_WARNING:.0f} % on a capture "
        "may not fit. Free memory first (a smaller microbatch, recomputation)"
    )
    least = min(pays, key=lambda one: one.extra_bytes, default=None)
    if least is None:
        return (f"{warning}.",)
    return (
        f"{warning}, or begin with what is predicted to need least: {least.scope}, +{least.extra_bytes / GIB:.1f} GiB.",
    )


def documented_memory(scope: str, eager_peak_bytes: int, pipeline_stages: int = 1) -> tuple[int, int | None]:
    """Return the range of additional bytes that NVIDIA's guides name (`GUIDES_MEMORY`); None means "and more".

    Example:
        >>> documented_memory("attn", 40 * 2**30)
        (0, 2147483648)
    """
    if scope in ("full_iteration", WHOLE_STEP):
        return eager_peak_bytes // 2, eager_peak_bytes
    return (0, 2 * GIB) if pipeline_stages <= 1 else (10 * GIB, None)


# ---------------------------------------------------------------------------------------------------------------------
# Which interface, and which scope


class Api(enum.StrEnum):
    """The interfaces of stepgraph, each with the one of NVIDIA's stack that it stands for."""

    CAPTURE = "stepgraph.capture"
    """`torch.cuda.graph` around a whole step, or `torch.compile(mode="reduce-overhead")`."""
    GRAPH_MODULES = "stepgraph.graph_modules"
    """Megatron Core's `CudaGraphManager`, for any model."""
    CALLABLES = "stepgraph.make_graphed_callables"
    """`make_graphed_callables` of torch and of Transformer Engine."""
    MANAGER = "stepgraph.CudaGraphManager"
    """Megatron Core's class of that name."""
    FULL_ITERATION = "stepgraph.FullCudaGraphWrapper"
    """Megatron Core's class of that name."""
    STAGE = "stepgraph.graph_stage"
    """No counterpart: stages of `torch.distributed.pipelining`."""


Framework = Literal["torch", "transformer_engine", "megatron"]
Wish = Literal["least effort", "training", "per layer", "most speed", "control"]
Tried = Literal["reduce-overhead", "make_graphed_callables"]
ModelKind = Literal["dense", "moe", "moe, padded experts", "mamba", "vision-language"]
Recompute = Literal["none", "selective", "moe", "full"]


@dataclass(frozen=True, slots=True)
class Program:
    """What decides which interface fits."""

    framework: Framework = "torch"
    """The library whose loop runs the step (Megatron), or whose layers the model has (Transformer Engine)."""
    wish: Wish = "training"
    has_fp8: bool = False
    has_pipeline: bool = False
    has_torch_pipelining: bool = False
    """The pipeline is a schedule of `torch.distributed.pipelining`."""
    has_static_shapes: bool = True
    has_dynamic_part: bool = False
    """A part of the step stays eager: it reads data on the host, or its shapes depend on data."""
    tried: tuple[Tried, ...] = ()
    """What was tried and did not suffice."""


def choose_api(program: Program) -> Decision:
    """Choose the interface for a program.

    Example:
        >>> choose_api(Program(framework="megatron", wish="most speed")).choice
        'stepgraph.FullCudaGraphWrapper'
    """
    if program.has_dynamic_part:
        return _use(Api.GRAPH_MODULES, "only these modules become graphs; the rest of the step stays eager")
    if program.framework == "megatron":
        return _choose_megatron_api(program)
    if program.wish == "most speed":
        return _choose_capture(program)
    if program.has_torch_pipelining:
        return _use(Api.STAGE, "the schedule of torch.distributed.pipelining gives the order of the graphs")
    if program.has_pipeline:
        return _use(Api.CALLABLES, "a pipeline needs graphs captured ahead, in the order of its schedule")
    if program.has_fp8:
        return _use(
            Api.CALLABLES,
            "FP8 needs the contract of Transformer Engine's graphs; until its FP8 options are implemented they are "
            "refused, so capture in bf16",
        )
    if program.wish == "per layer":
        return _use(Api.GRAPH_MODULES, "each layer is a graph of its own; begin with one and add more")
    return _choose_capture(program)


def _choose_megatron_api(program: Program) -> Decision:
    if program.wish == "control":
        return _use(Api.CALLABLES, "you choose the callables, their order and their microbatches yourself")
    if program.wish != "most speed":
        return _use(Api.MANAGER, "layers are captured one by one, automatically, with pipelines and FP8")
    if not program.has_static_shapes:
        return _use(
            Api.MANAGER, "shapes vary, which a full iteration does not allow: layers have a graph for each shape"
        )
    return _use(
        Api.FULL_ITERATION,
        "the largest gain for a static workload: one graph for all microbatches, and with optimizers= for those too",
    )


def _choose_capture(program: Program) -> Decision:
    """The reason for a graph of the whole step, by what is known of the program."""
    if not program.has_static_shapes:
        return _use(Api.CAPTURE, "shapes vary: give it buckets=, and each size has a graph of its own")
    if "reduce-overhead" in program.tried:
        return _use(
            Api.CAPTURE, "torch.compile makes many small graphs of a step; this makes one, and takes compiled code"
        )
    if "make_graphed_callables" in program.tried:
        return _use(Api.CAPTURE, "callables leave loss and optimizer eager; this captures them too")
    if program.wish == "control":
        return _use(Api.CAPTURE, "any function of tensors is captured as it is written, optimizer included")
    return _use(Api.CAPTURE, "one line around the step you have; it captures forward, backward and optimizer together")


def api_for(choice: str, program: Program) -> Decision:
    """Return the interface for what is to be captured: the whole step, the stages of a schedule, or a scope.

    Example:
        >>> api_for("attn", Program(framework="megatron")).choice
        'stepgraph.graph_modules'
    """
    if choice == DO_NOT:
        return Decision("none", "the step is best left as it is")
    if choice == WHOLE_STEP:
        return choose_api(replace(program, wish="most speed"))
    if choice == STAGE:
        return choose_api(replace(program, has_torch_pipelining=True))
    return choose_api(replace(program, has_dynamic_part=True))


def _use(api: Api, reason: str) -> Decision:
    return Decision(str(api), reason)


@dataclass(frozen=True, slots=True)
class Workload:
    """What decides whether, and with which scope, a configured training is captured."""

    model: ModelKind = "dense"
    recompute: Recompute = "none"
    """`moe`: only experts are recomputed."""
    has_static_shapes: bool = True
    has_cpu_offloading: bool = False
    has_packed_sequences: bool = False
    """With metadata that is no tensor."""
    has_stable_data: bool = True
    """The path of real data is known to work: images and text have the same shapes at every step."""
    has_settled_objective: bool = True
    """Loss, data and batch size stay as they are: only the speed is to change."""
    needs_nan_checks: bool = False
    """The host reads the loss or gradients to check them."""
    memory_used: float = 0.0
    """Fraction of the device's memory in use before capture."""
    pipeline_stages: int = 1
    busy_fraction: float | None = None
    wished_scope: tuple[str, ...] = ()
    """The scope that the user needs, if it must be that one: `("full_iteration",)` for all of an iteration."""


@dataclass(frozen=True, slots=True)
class ScopeChoice:
    """An implementation and its scope, in Megatron's words."""

    impl: str
    scope: tuple[str, ...] = ()
    reason: str = ""
    then: tuple[str, ...] = ()
    """The scope to try after this one works."""


_FULL_ITERATION = ("full_iteration",)
_AROUND_EXPERTS = ("attn", "moe_router", "moe_preprocess")


def choose_scope(workload: Workload) -> ScopeChoice:
    """Choose `cuda_graph_impl` and `cuda_graph_scope` for a workload, or `none` with the first reason against them.

    Example:
        >>> choose_scope(Workload(model="moe")).scope
        ('attn', 'moe_router', 'moe_preprocess')
    """
    choice = _scope_that_fits(workload)
    against = reasons_against(workload, choice.scope)
    return ScopeChoice("none", (), against[0]) if against else choice


def _scope_that_fits(workload: Workload) -> ScopeChoice:
    """The scope for a workload if nothing speaks against it."""
    if workload.wished_scope == _FULL_ITERATION:
        return ScopeChoice("local", _FULL_ITERATION, "the largest gain, under the strictest rules")
    if workload.wished_scope:
        return ScopeChoice("transformer_engine", workload.wished_scope, "the scope that was asked for")
    if workload.recompute == "full":
        return ScopeChoice("local", _FULL_ITERATION, "full recomputation runs only with a graph of the full iteration")
    if workload.has_packed_sequences:
        return ScopeChoice(
            "local", _FULL_ITERATION, "scoped graphs take tensors only, and packed sequences pass other metadata"
        )
    match workload.model:
        case "dense":
            return ScopeChoice("transformer_engine", ("attn",), "attention of a dense model first", ("attn", "mlp"))
        case "moe, padded experts":
            return ScopeChoice("transformer_engine", ("attn", "moe"), "experts of fixed capacity have static shapes")
        case "mamba":
            return ScopeChoice("transformer_engine", ("mamba", "attn"), "both kinds of layers are static")
        case _:
            return ScopeChoice(
                "transformer_engine",
                _AROUND_EXPERTS,
                "without dropped tokens the experts' shapes depend on data, so only what is around them is captured",
            )


def reasons_against(workload: Workload, scope: Sequence[str]) -> tuple[str, ...]:
    """Return the reasons not to capture a scope of a workload; none means that nothing speaks against it."""
    is_full, words = tuple(scope) == _FULL_ITERATION, set(scope)
    rules = (
        (
            not workload.has_static_shapes,
            "sequence length or batch size varies from step to step: pad to a few lengths first",
        ),
        (workload.has_cpu_offloading, "CPU offloading moves tensors by the host, which no replay repeats"),
        (
            workload.busy_fraction is not None and workload.busy_fraction > GPU_BOUND,
            "the GPU is busy already: a graph removes waiting and makes no kernel faster",
        ),
        (
            workload.memory_used >= MEMORY_WARNING,
            "memory is tight, and graphs keep their buffers: free some first"
            + (", the more so as each pipeline stage keeps its own" if workload.pipeline_stages > 1 else ""),
        ),
        (
            not workload.has_settled_objective,
            "a graph changes the speed of a training only: settle its objective in eager first",
        ),
        (
            workload.model == "vision-language" and not workload.has_stable_data,
            "the data of a model that reads images must have fixed shapes before anything is captured",
        ),
        (
            workload.needs_nan_checks and is_full,
            "checks for NaN on the host cannot run inside a full iteration: use the flag on the device "
            '(rerun_state_machine.check_for_nan_in_loss="device"), or a scope',
        ),
        ({"moe", "moe_router"} <= words, "the scopes moe and moe_router exclude each other: moe has the router in it"),
        (
            "moe_preprocess" in words and "moe_router" not in words,
            "the scope moe_preprocess needs moe_router, whose result it reads",
        ),
        (
            workload.recompute == "moe" and "moe_router" in words,
            "experts that are recomputed run the router again, so moe_router cannot be a graph of its own",
        ),
        (
            workload.recompute == "full" and not is_full,
            "full recomputation runs with a graph of the full iteration only, not with scopes",
        ),
        (
            workload.has_packed_sequences and not is_full,
            "packed sequences pass metadata that is no tensor, which scoped graphs do not take",
        ),
    )
    return tuple(reason for holds, reason in rules if holds)


def useful_scopes(advice: Advice, paths: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the scopes to begin with: those inside the choice that are allowed and gain enough, the least gain first.

    Args:
        advice: The verdict; it must not be "do not".
        paths: The modules of each scope. The whole step has all of them inside.
    """
    choice = advice.choice.choice
    outer = ("",) if choice == WHOLE_STEP else paths.get(choice, ())
    useful = [
        one
        for one in advice.predictions
        if one.scope != WHOLE_STEP
        and not one.forbidden
        and one.gain >= WORTHWHILE
        and all(any(is_part(path, of) for of in outer) for path in paths[one.scope])
    ]
    return tuple(one.scope for one in sorted(useful, key=lambda one: one.gain))


def is_part(path: str, of: str) -> bool:
    """Whether a module is another one, or a part of it, by their paths; the empty path is the model.

    Example:
        >>> is_part("layers.1.attn", "layers.1"), is_part("layers.10", "layers.1")
        (True, False)
    """
    return not of or path == of or path.startswith(f"{of}.")


@dataclass(frozen=True, slots=True)
class Barrier:
    """Something in the step that cannot be captured."""

    rule: str
    where: str = ""
    """The line, as file:line."""
    scopes: tuple[str, ...] = ()
    """The scopes that it is in; the whole step always is."""

    def __str__(self) -> str:
        return f"{self.rule} at {self.where}" if self.where else self.rule


def with_barriers(measured: Measured, barriers: Sequence[Barrier]) -> Measured:
    """Return the measurement with what forbids each scope."""

    def against(scope: str | None) -> tuple[str, ...]:
        found = (str(one) for one in barriers if scope is None or scope in one.scopes)
        return tuple(dict.fromkeys(found))

    regions = tuple(replace(one, forbidden=(*one.forbidden, *against(one.scope))) for one in measured.regions)
    return replace(measured, regions=regions, whole_step_forbidden=(*measured.whole_step_forbidden, *against(None)))
