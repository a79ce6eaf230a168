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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from stepgraph.bench.timeline import WORTHWHILE

LAUNCH_BOUND = 0.80
"""Below this busy fraction a step waits for launches."""
GPU_BOUND = 0.95
"""Above this busy fraction there is next to nothing to win."""
MEMORY_WARNING = 0.88
"""The used fraction of the device's memory, before capture, from which a capture may not fit."""
GIB = 2**30
WHOLE_STEP = "whole step"
DO_NOT = "do not"

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
    return Prediction(scope, step_ms, extra_bytes, gain, tuple(forbidden))


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
    return Advice(bound, choice, predictions, memory_warnings(measured))


def memory_warnings(measured: Measured) -> tuple[str, ...]:
    """Return what the used memory says about a capture, before it is tried."""
    if not measured.total_bytes or measured.used_bytes < MEMORY_WARNING * measured.total_bytes:
        return ()
    used, total = measured.used_bytes / GIB, measured.total_bytes / GIB
    return (
        f"{used:.1f} of {total:.1f} GiB are in use before any capture: from {100 * MEMORY_WARNING:.0f} % on a capture "
        "may not fit. Capture the narrowest scope first, or free memory (a smaller microbatch, recomputation).",
    )


def documented_memory(scope: str, eager_peak_bytes: int, pipeline_stages: int = 1) -> tuple[int, int]:
    """Return the range of additional bytes that NVIDIA's guides name: 0 to 2 GB for scopes, 10 GB and more with
    pipelines, and a peak of 1.5 to 2 times eager's for a full iteration.

    Example:
        >>> documented_memory("attn", 40 * 2**30)
        (0, 2147483648)
    """
    if scope in ("full_iteration", WHOLE_STEP):
        return eager_peak_bytes // 2, eager_peak_bytes
    return (0, 2 * GIB) if pipeline_stages <= 1 else (2 * GIB, 10 * GIB)


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
ModelKind = Literal["dense", "moe", "moe, padded experts", "mamba", "vision-language"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Program:
    """What decides which interface fits."""

    framework: Framework = "torch"
    wish: Wish = "training"
    has_fp8: bool = False
    has_pipeline: bool = False
    has_torch_pipelining: bool = False
    """The pipeline is a schedule of `torch.distributed.pipelining`."""
    has_static_shapes: bool = True
    has_dynamic_part: bool = False
    """A part reads data on the host, or its shapes depend on data."""
    tried: tuple[str, ...] = ()
    """What was tried and did not suffice: `reduce-overhead`, `make_graphed_callables`."""


def choose_api(program: Program) -> Decision:
    """Choose the interface for a program.

    Example:
        >>> choose_api(Program(framework="megatron", wish="most speed")).choice
        'stepgraph.FullCudaGraphWrapper'
    """
    wish = program.wish
    if program.has_dynamic_part:
        return _use(
            Api.GRAPH_MODULES,
            "a part of the step cannot be captured: capture the modules that can, and leave the rest eager",
        )
    if program.framework == "megatron":
        if wish == "most speed":
            return _use(Api.FULL_ITERATION, "the largest gain for a static workload: one graph for the iteration")
        if wish == "control":
            return _use(Api.CALLABLES, "you choose the callables, their order and their microbatches yourself")
        return _use(Api.MANAGER, "layers are captured one by one, automatically, with pipelines and FP8")
    if program.has_torch_pipelining:
        return _use(Api.STAGE, "the schedule of torch.distributed.pipelining gives the order of the graphs")
    if program.has_fp8 or program.has_pipeline or "make_graphed_callables" in program.tried:
        return _use(Api.CALLABLES, "FP8 and pipelines need graphs captured ahead, in the order of the schedule")
    if wish == "per layer":
        return _use(Api.GRAPH_MODULES, "each layer is a graph of its own; begin with one and add more")
    if wish == "control":
        return _use(Api.CAPTURE, "any function of tensors is captured as it is written, optimizer included")
    return _use(Api.CAPTURE, "one line around the step you have; it captures forward, backward and optimizer together")


def _use(api: Api, reason: str) -> Decision:
    return Decision(str(api), reason)


@dataclass(frozen=True, slots=True)
class Workload:
    """What decides whether, and with which scope, a configured training is captured."""

    model: ModelKind = "dense"
    recompute: Recompute = "none"
    has_static_shapes: bool = True
    has_cpu_offloading: bool = False
    has_packed_sequences: bool = False
    """With metadata that is no tensor."""
    has_stable_data: bool = True
    """The path of real data is known to work: images and text have the same shapes at every step."""
    needs_nan_checks: bool = False
    wants_full_iteration: bool = False
    memory_used: float = 0.0
    """Fraction of the device's memory in use before capture."""
    pipeline_stages: int = 1
    busy_fraction: float | None = None
    wished_scope: tuple[str, ...] = ()
    """The scope that the user needs, if it must be that one."""


@dataclass(frozen=True, slots=True)
class ScopeChoice:
    """An implementation and its scope, in Megatron's words."""

    impl: str
    scope: tuple[str, ...] = ()
    reason: str = ""
    then: tuple[str, ...] = field(default=())
    """The scope to try after this one works."""


def choose_scope(workload: Workload) -> ScopeChoice:
    """Choose `cuda_graph_impl` and `cuda_graph_scope` for a workload.

    Example:
        >>> choose_scope(Workload(model="moe")).scope
        ('attn', 'moe_router', 'moe_preprocess')
    """
    against = reasons_against(workload)
    if against:
        return ScopeChoice("none", (), against[0])
    if workload.recompute == "full":
        return ScopeChoice(
            "local", ("full_iteration",), "full recomputation runs only with a graph of the full iteration"
        )
    if workload.has_packed_sequences:
        return ScopeChoice(
            "local", ("full_iteration",), "scoped graphs take tensors only, and packed sequences pass other metadata"
        )
    if workload.wants_full_iteration:
        return ScopeChoice("local", ("full_iteration",), "the largest gain, under the strictest rules")
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
                ("attn", "moe_router", "moe_preprocess"),
                "without dropped tokens the experts' shapes depend on data, so only what is around them is captured",
            )


def reasons_against(workload: Workload) -> tuple[str, ...]:
    """Return the reasons not to use graphs for a workload; none means that nothing speaks against them."""
    found = []
    if not workload.has_static_shapes:
        found.append("sequence length or batch size varies from step to step: pad to a few lengths first")
    if workload.has_cpu_offloading:
        found.append("CPU offloading moves tensors by the host, which no replay repeats")
    if workload.busy_fraction is not None and workload.busy_fraction > GPU_BOUND:
        found.append("the GPU is busy already: a graph removes waiting and makes no kernel faster")
    if workload.memory_used >= MEMORY_WARNING and (workload.pipeline_stages > 1 or workload.wants_full_iteration):
        found.append("memory is tight, and each pipeline stage, or the full iteration, keeps its buffers")
    if workload.model == "vision-language" and not workload.has_stable_data:
        found.append("the data of a model that reads images must have fixed shapes before anything is captured")
    if workload.needs_nan_checks and (workload.wants_full_iteration or workload.recompute == "full"):
        found.append(
            "checks for NaN on the host cannot run inside a full iteration: use the flag on the device "
            '(rerun_state_machine.check_for_nan_in_loss="device"), or a scope'
        )
    if {"moe", "moe_router"} <= set(workload.wished_scope):
        found.append("the scopes moe and moe_router exclude each other: moe has the router in it")
    if "moe_preprocess" in workload.wished_scope and "moe_router" not in workload.wished_scope:
        found.append("the scope moe_preprocess needs moe_router, whose result it reads")
    if workload.recompute == "full" and workload.wished_scope not in ((), ("full_iteration",)):
        found.append("full recomputation runs with a graph of the full iteration only, not with scopes")
    return tuple(found)


LADDER = (
    ("Make the eager run stable.", "{run}"),
    ("Fix the sequence length and the microbatch size.", "stepgraph check {script}"),
    ("Capture the narrowest useful scope.", "{narrow}"),
    ("Confirm that replays happen and that memory suffices.", "print({graphs}.report())"),
    ("Compare eager with replays, without warm-up and capture.", "{verify}"),
    ("Only then widen the scope.", "{wide}"),
)
"""The order in which graphs are brought up, each step with its command."""
_WHOLE = "Capture the whole step."


@dataclass(frozen=True, slots=True)
class Names:
    """The user's own names, for commands and code to paste."""

    script: str
    """The script and its arguments, as a command of stepgraph takes them: `train.py -- --epochs 1`."""
    run: str
    """The command that runs it: `python train.py --epochs 1`."""
    model: str = "model"
    step: str = ""
    """The function that is one step, if there is one."""


def ladder(names: Names, words: Sequence[str] = ()) -> tuple[tuple[str, str], ...]:
    """Return the steps, with the user's names in their commands; `words` is the narrowest scope.

    Without one the whole step is captured at once, and nothing is left to widen. A step that is not captured in the
    script yet is named to `verify`.

    Example:
        >>> ladder(Names("train.py", "python train.py"), ["attn"])[2][1]
        'graphs = stepgraph.graph_modules(model, scope=["attn"])'
    """
    wide = _capture_line(names) or "step = stepgraph.capture(train_step)  # your loop's body, as a function"
    narrow = wide if not words else "graphs = " + _modules_line(names, words)
    graphs = wide.partition(" = ")[0] if not words else "graphs"
    target, dashes, args = names.script.partition(" -- ")
    named = f" --step {names.step}" if names.step and not words else ""
    verify = f"stepgraph verify {target}{named}{dashes}{args}"
    filled = tuple(
        (what, how.format(run=names.run, script=names.script, narrow=narrow, wide=wide, graphs=graphs, verify=verify))
        for what, how in LADDER
    )
    return filled if words else (*filled[:2], (_WHOLE, narrow), *filled[3:-1])


def snippet(choice: str, names: Names, words: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the lines to paste for a choice; none for "do not"."""
    if choice == DO_NOT:
        return ()
    if choice != WHOLE_STEP:
        return ("import stepgraph", "", "graphs = " + _modules_line(names, words) + "  # before the loop")
    line = _capture_line(names)
    if line:
        return ("import stepgraph", "", f"{line}  # before the loop")
    return (
        "import stepgraph",
        "",
        "@stepgraph.capture",
        "def train_step(batch):  # the body of your loop, from the forward to optimizer.step()",
        "    ...",
        "    return loss",
    )


def _capture_line(names: Names) -> str:
    owner, dot, name = names.step.rpartition(":")[2].rpartition(".")
    if not name:
        return ""
    path = f"{owner[:1].lower()}{owner[1:]}{dot}{name}"
    return f"{path} = stepgraph.capture({path})"


def _modules_line(names: Names, words: Sequence[str]) -> str:
    scope = ", ".join(f'"{word}"' for word in words)
    return (
        f"stepgraph.graph_modules({names.model}, scope=[{scope}])"
        if words
        else (f"stepgraph.graph_modules({names.model})")
    )


def narrowest(advice: Advice) -> str | None:
    """Return the allowed scope that captures least and still gains enough; None if only the whole step does."""
    useful = [
        one for one in advice.predictions if one.scope != WHOLE_STEP and not one.forbidden and one.gain >= WORTHWHILE
    ]
    return min(useful, key=lambda one: one.gain).scope if useful else None


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


def api_for(advice: Advice, program: Program) -> Decision:
    """Return the interface for what is to be captured."""
    if advice.choice.choice == DO_NOT:
        return Decision("none", "the step is best left as it is")
    if advice.choice.choice != WHOLE_STEP:
        return choose_api(replace(program, has_dynamic_part=True))
    return choose_api(program)
