"""How the variants of `modules.py` are measured, inside a worker process: time, equality, the host's share."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from host_cost import median_us
from modules_report import EQUALITY, PAIR, WORKLOADS, eager_parts, merged_engine
from modules_variants import Setting, Training, build_batches, build_training
from torch import Tensor, nn
from whole_step_report import Record, State, compare
from whole_step_variants import copied, on_batches, peak_bytes, time_steps, trained_state

import stepgraph
from stepgraph.tools.measure import reset_peaks

WARM_STEPS = 6
"""Steps before the timed ones: modules are captured in the first, a whole step in the fourth."""
HOST_CALLS = 5
BATCHES = 8
PAIR_ROUNDS = 5


def measure(setting: Setting, variant: str, steps: int) -> Record:
    """Run one timed variant from the model's construction to its report."""
    batches = build_batches(setting, BATCHES)
    training = build_training(setting, variant)
    figures = time_steps(on_batches(training.step, batches), steps, WARM_STEPS, HOST_CALLS, setting.device)
    seconds = training.capture_seconds()
    found = figures | {
        "capture_s": seconds,
        "capture_s_per_layer": None if seconds is None else seconds / setting.layers,
        **peak_bytes(setting.device),
        "engine": training.report(),
    }
    training.close()
    return found


@contextlib.contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """Use deterministic algorithms for the length of a block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def train(setting: Setting, variant: str, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Training, State]:
    """Train a variant from the seed; return it with all that can be compared, as it is."""
    reset_peaks(setting.device)  # what the run before has left is freed
    training = build_training(setting, variant)
    losses = {f"step {i}": training.step(*batch).clone() for i, batch in enumerate(batches)}
    return training, trained_state(training.model, training.optimizer, losses)


@dataclass(frozen=True)
class Comparison:
    """How a variant differs from its base, and how much of it was replayed."""

    groups: dict[str, Record]
    replays: int | None
    eager_parts: dict[str, str]


def compare_with(
    reference: State, setting: Setting, variant: str, batches: Sequence[tuple[Tensor, Tensor]]
) -> Comparison:
    """Train a variant; return how it differs from the reference, and whether it replayed."""
    training, state = train(setting, variant, batches)
    report = training.report()
    found = Comparison(compare(reference, state), report.get("replays"), eager_parts(report, len(batches)))
    training.close()
    return found


def measure_equality(setting: Setting, steps: int) -> Record:
    """Train every variant and its base from one seed; compare them bit by bit.

    Where one differs its base is trained again, to show how far that differs from itself.
    """
    bases = WORKLOADS[setting.workload].bases
    found: dict[str, Comparison] = {}
    base_losses: dict[str, list[float]] = {}
    with deterministic(warn_only=setting.workload == "megatron-gpt2-small"):
        batches = build_batches(setting, steps)
        for base in dict.fromkeys(bases.values()):
            training, state = train(setting, base, batches)
            reference = copied(state)
            base_losses[base] = [loss.item() for loss in reference["losses"].values()]
            del training, state
            for variant in compared_variants(setting, bases, base):
                pair, again = f"{base} vs {variant}", f"{base} vs {base}"
                found[pair] = compare_with(reference, setting, variant, batches)
                if again not in found and any(group["differing"] for group in found[pair].groups.values()):
                    found[again] = compare_with(reference, setting, base, batches)
            del reference
    return {
        "steps": steps,
        "pairs": {pair: comparison.groups for pair, comparison in found.items()},
        "replays": {pair: comparison.replays for pair, comparison in found.items()},
        "eager_parts": {pair: comparison.eager_parts for pair, comparison in found.items()},
        "finite": all(math.isfinite(loss) for losses in base_losses.values() for loss in losses),
        "base_losses": base_losses,
    }


def compared_variants(setting: Setting, bases: Mapping[str, str], base: str) -> list[str]:
    """Return the variants to compare with a base: those that can live in one process with others, and run here."""
    apart = {"megatron-layers"} | (set() if setting.is_on_gpu else {"torch-layers"})
    return [v for v, of in bases.items() if of == base and v != base and v not in apart]


def small_module(device: torch.device) -> nn.Module:
    """Return four layers too small to hide the host's work: with the input, nine tensors."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(device)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def measure_pair(setting: Setting, calls: int) -> Record:
    """Time a forward+backward pair of a small module on the host, every way in turn."""
    device = setting.device
    x = torch.randn(4, 8, device=device, requires_grad=True)
    ways: dict[str, nn.Module] = {"identity": nn.Identity(), "eager": small_module(device)}
    if setting.is_on_gpu:
        ways["torch"] = torch.cuda.make_graphed_callables(small_module(device), (x.detach().clone().requires_grad_(),))
    handles = {}
    for way, outputs in (("ours", "copy"), ("ours, outputs='static'", "static")):
        holder = nn.ModuleDict({"layers": small_module(device)})
        handles[way] = stepgraph.graph_modules(holder, scope=["layers"], outputs=outputs)
        ways[way] = holder["layers"]

    def pair(module: nn.Module) -> Callable[[], None]:
        return lambda: module(x).sum().backward()

    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(PAIR_ROUNDS):  # in turn, so that all see the machine in the same mood
        for way, module in ways.items():
            found[way].append(median_us(pair(module), calls, drained=setting.is_on_gpu))
    medians = {way: statistics.median(rounds) for way, rounds in found.items()}
    reports = {way: merged_engine(dict(handle.report().to_dict())) for way, handle in handles.items()}
    for handle in handles.values():
        handle.close()
    if idle := [way for way, report in reports.items() if report["eager_calls"] > report["replays"]]:
        raise RuntimeError(f"{', '.join(idle)}: mostly eager, {reports[idle[0]]['eager_reasons']}")
    return {
        "calls": calls * PAIR_ROUNDS,
        "median_us": medians,
        "rounds_us": found,
        "added_us": {way: us - medians["identity"] for way, us in medians.items() if way != "identity"},
        "engine": reports["ours"],
    }


def measure_job(setting: Setting, variant: str, steps: int, equality_steps: int) -> Record:
    """Measure one variant of one workload."""
    if variant == PAIR:
        return measure_pair(setting, calls=200 if setting.is_on_gpu else 10)
    if variant == EQUALITY:
        return measure_equality(setting, equality_steps)
    return measure(setting, variant, steps)
