"""What surrounds a captured step: the memory of many signatures, and a long run with everything that loops have.

    python benchmarks/around_the_step.py

Memory: a GPT is trained at eight sequence lengths in one session, each a graph of its own, and at the longest alone.
All graphs share one pool, so the eight should take little more than the longest: the target is 1.3 times its pool.
They come longest first and, in another run, shortest first, which is the harder order for an allocator. `reserved` is
the peak of torch's allocator over the run, eager warm-up included, what was reserved before it not counted; the same
run without stepgraph tells how much of that is eager's own.

Training: a small GPT with dropout, gradients accumulated over four microbatches and clipped, a learning rate that
warms up and decays, an evaluation every 100 steps; under bf16 autocast with plain AdamW, and under fp16 autocast with a
GradScaler and fused AdamW, whose scale starts so high that steps are skipped. A learning rate that is a plain number
takes the optimizer out of the graph when it changes; as a tensor it stays inside (`fp16, one graph`). Eager and
captured train from one seed under deterministic algorithms. At the end losses, evaluations, parameters, gradients,
optimizer state, the scale and the random state are compared bit for bit: the target is no difference at all. Where
there is one, eager is run again, to show how far it differs from itself.

The memory and each way to train have a process of their own. Times are of the whole loop, until the device is done.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor
from whole_step import Job, begin, command_line, count, run_all, run_alone, run_and_report
from whole_step_report import Record, Rows, as_page, number

import stepgraph
from stepgraph.lab.bench import worker as bench_worker
from stepgraph.lab.bench.server import attempted
from stepgraph.lab.models import GPT, GPTConfig
from stepgraph.tools.measure import peaks_of, reset_peaks, wall_ms

TARGET_RATIO = 1.3
"""The most that eight signatures may take, in pools of the largest."""
ROUNDS = 6
"""How often each length comes: three times for warm-up, and then until all graphs are there."""
MICROBATCHES = 4
EVALUATE_EVERY = 100
MODES = ("bf16", "fp16", "fp16, one graph")
PASSED_ON = ("device", "steps")


# -- memory of many signatures


def memory_config(device: torch.device) -> tuple[GPTConfig, int, list[int]]:
    """The model, the batch size and the sequence lengths, longest first."""
    if device.type == "cpu":
        return replace(GPTConfig.tiny(), num_layers=1, max_seq_len=32), 2, list(range(32, 0, -8))
    return replace(GPTConfig.gpt_162m(), num_layers=2), 8, list(range(1024, 0, -128))


def signatures_memory(device: torch.device, lengths: Sequence[int], *, captured: bool = True) -> Record:
    """Train at these lengths in turn, in one session, until each has a graph that has replayed."""
    config, batch, _ = memory_config(device)
    reset_peaks(device)
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train_step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        return loss

    def train(step: Callable[[Tensor], Tensor]) -> None:
        for length in [n for _ in range(ROUNDS) for n in lengths]:
            step(torch.randint(config.vocab_size, (batch, length), device=device))

    found: Record = {"lengths": list(lengths)}
    if captured:
        with stepgraph.capture(train_step, max_graphs=len(lengths)) as step:
            train(step)
            report = step.report()
        assert report.graphs == len(lengths), "each length has a graph by now"
        found |= {
            "graphs": report.graphs,
            "captures": report.captures,
            "recaptures": report.recaptures,
            "replays": report.replays,
            "pool_bytes": report.pool_bytes,
            "static_bytes": report.static_bytes,
            "capture_seconds": report.capture_seconds,
        }
    else:
        train(train_step)
    peak = peaks_of(device).reserved
    return {**found, "reserved_bytes": None if peak is None else peak - before}


def measure_memory(device: torch.device) -> Record:
    """Several lengths in both orders against the longest alone."""
    *_, lengths = memory_config(device)
    alone = signatures_memory(device, lengths[:1])
    orders = {
        "largest_first": signatures_memory(device, lengths),
        "smallest_first": signatures_memory(device, lengths[::-1]),
    }
    eager = {
        "eager_largest_first": signatures_memory(device, lengths, captured=False),
        "eager_smallest_first": signatures_memory(device, lengths[::-1], captured=False),
    }
    for record in orders.values():
        record["pool_ratio"] = record["pool_bytes"] / alone["pool_bytes"]
    for record in (*orders.values(), *eager.values()):
        if alone["reserved_bytes"]:
            record["reserved_ratio"] = record["reserved_bytes"] / alone["reserved_bytes"]
    return {"largest_alone": alone, **orders, **eager}


# -- a long run


class Training:
    """A training program from one seed, eager or captured, with what must be equal at its end."""

    def __init__(self, device: torch.device, mode: str, steps: int) -> None:
        torch.manual_seed(0)
        self.device, self.scaled = device, mode != "bf16"
        on_gpu = device.type == "cuda"
        self.half = torch.float16 if self.scaled and on_gpu else torch.bfloat16  # the CPU's scaler works around bf16
        size = {"num_layers": 2, "max_seq_len": 64} if on_gpu else {"num_layers": 1, "max_seq_len": 8}
        self.config = replace(GPTConfig.tiny(), dropout=0.1, **size)
        with torch.device(device):
            self.model = GPT(self.config)
        lr = torch.tensor(1e-3, device=device) if mode == "fp16, one graph" else 1e-3
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=self.scaled)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: _rate(step, steps))
        too_high = 2.0**34 if on_gpu else 2.0**127
        self.scaler = torch.amp.GradScaler(device.type, init_scale=too_high, growth_interval=20, enabled=self.scaled)
        self.steps = steps
        self.losses: list[Tensor] = []
        self.evaluations: list[Tensor] = []
        self.seconds = 0.0

    def train_step(self, tokens: Tensor) -> Tensor:
        """Four microbatches, clipped, then the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for micro in tokens.unbind(0):
            with torch.autocast(self.device.type, self.half):
                loss = self.model(micro, micro) / MICROBATCHES
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

    def evaluate(self, tokens: Tensor) -> Tensor:
        """The loss without dropout."""
        with torch.no_grad(), torch.autocast(self.device.type, self.half):
            loss: Tensor = self.model(tokens, tokens)
            return loss

    def batches(self, count: int, *shape: int) -> Iterator[Tensor]:
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (*shape, 4, self.config.max_seq_len)
        for _ in range(count):
            yield torch.randint(self.config.vocab_size, shape, device=self.device, generator=generator)

    def run(self, train_step: Callable[[Tensor], Tensor], evaluate: Callable[[Tensor], Tensor]) -> None:
        """The loop, as anyone writes it."""
        held_out = list(self.batches(5))
        self.seconds = wall_ms(lambda: self._run(train_step, evaluate, held_out), self.device) / 1e3

    def _run(
        self, train_step: Callable[[Tensor], Tensor], evaluate: Callable[[Tensor], Tensor], held_out: list[Tensor]
    ) -> None:
        for index, tokens in enumerate(self.batches(self.steps, MICROBATCHES)):
            self.losses.append(train_step(tokens).detach())
            self.scheduler.step()
            if (index + 1) % EVALUATE_EVERY == 0 or index + 1 == self.steps:
                self.model.eval()
                self.evaluations += [evaluate(tokens).detach() for tokens in held_out]
                self.model.train()

    def state(self) -> dict[str, list[Any]]:
        """All that must be equal, by kind."""
        optimizer = self.optimizer.state_dict()
        random = [torch.get_rng_state()]
        if self.device.type == "cuda":
            random.append(torch.cuda.get_rng_state(self.device))
        return {
            "losses": self.losses,
            "evaluations": self.evaluations,
            "parameters": list(self.model.parameters()),
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer state": [value for state in optimizer["state"].values() for value in state.values()],
            "optimizer numbers": [
                {k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]
            ],
            "scaler": [self.scaler.state_dict()],
            "random state": random,
        }


def _rate(step: int, steps: int) -> float:
    """Warm-up over a tenth of the run, then a cosine."""
    warm = max(1, steps // 10)
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def differing(one: dict[str, list[Any]], two: dict[str, list[Any]]) -> dict[str, int]:
    """How many of each kind are not the same bits."""
    return {kind: sum(not _same(a, b) for a, b in zip(values, two[kind], strict=True)) for kind, values in one.items()}


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return bool(type(one) is type(two) and one == two)
    if (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device):
        return False
    bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, two)]
    return torch.equal(*bits)


def measure_training(device: torch.device, mode: str, steps: int) -> Record:
    """Train eager and captured, and compare."""
    eager = Training(device, mode, steps)
    eager.run(eager.train_step, eager.evaluate)
    expected = eager.state()
    captured = Training(device, mode, steps)
    with stepgraph.Session() as session:
        train_step = stepgraph.capture(captured.train_step, session=session)
        evaluate = stepgraph.capture(captured.evaluate, session=session)
        captured.run(train_step, evaluate)
        reports = {"train_step": train_step.report(), "evaluate": evaluate.report()}
        differences = differing(expected, captured.state())
    record: Record = {
        "mode": mode,
        "half": str(captured.half),
        "steps": steps,
        "bit_equal": not any(differences.values()),
        "compared": {kind: len(values) for kind, values in expected.items()},
        "differing": differences,
        "final_loss": float(captured.losses[-1]),
        "scale": captured.scaler.get_scale(),
        "skipped_steps": steps - int(_steps_taken(captured.optimizer)),
        "eager_ms": 1e3 * eager.seconds / steps,
        "captured_ms": 1e3 * captured.seconds / steps,
    }
    for name, report in reports.items():
        shown = ("replays", "captures", "recaptures", "recapture_reasons", "eager_calls", "eager_reasons", "segments")
        record[name] = {key: report.to_dict()[key] for key in shown}
    if not record["bit_equal"]:
        again = Training(device, mode, steps)
        again.run(again.train_step, again.evaluate)
        record["eager_against_eager"] = differing(expected, again.state())
    return record


def _steps_taken(optimizer: torch.optim.Optimizer) -> float:
    return max(float(state["step"]) for state in optimizer.state.values())


# -- jobs and the report


def prepare() -> None:
    """Import what the workers need, in the server that they are forked from."""
    bench_worker.prepare()


def run(request: Record) -> Record:
    """Measure the memory, or one way to train; return its record."""
    what, mode, args = request["workload"], request["variant"], argparse.Namespace(**request["options"])
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    measuring = (
        (lambda: measure_memory(device)) if what == "memory" else lambda: measure_training(device, mode, args.steps)
    )
    return attempted({"workload": what, "variant": mode}, measuring)


def targets_of(records: Sequence[Record]) -> dict[str, Record]:
    """What is to be reached, and whether it was; a run that failed has reached nothing."""
    found: dict[str, Record] = {}
    for record in [r for r in records if r["workload"] == "memory"]:
        orders = ("largest_first", "smallest_first")
        ratios = {order: record[order]["pool_ratio"] for order in orders if order in record}
        is_reached = len(ratios) == len(orders) and max(ratios.values()) < TARGET_RATIO
        found["pool_ratio"] = {"target": TARGET_RATIO, **ratios, "reached": is_reached}
    equal = [bool(record.get("bit_equal")) for record in records if record["workload"] == "training"]
    if equal:
        found["bit_equal_after_training"] = {"target": True, "reached": all(equal)}
    return found


def sections(summary: Record) -> list[tuple[str, Rows]]:
    """Return the report's tables; those without rows are left out."""
    memory = [["signatures", "graphs", "pool MiB", "pool / longest alone", "reserved / longest alone"]]
    training = [["training", "steps", "eager ms", "captured ms", "skipped", "differing from eager"]]
    targets = [["target", "wanted", "reached"]]
    for r in summary["records"]:
        if "error" in r:
            (memory if r["workload"] == "memory" else training).append([r["variant"], f"failed: {r['error']}"])
        elif r["workload"] == "memory":
            memory += [memory_row(order, found) for order, found in r.items() if isinstance(found, dict)]
        else:
            times = [number(r["eager_ms"], 2), number(r["captured_ms"], 2)]
            compared = f"{sum(r['differing'].values())} of {sum(r['compared'].values())}"
            training.append([r["mode"], str(r["steps"]), *times, str(r["skipped_steps"]), compared])
    for name, target in summary["targets"].items():
        targets.append([name, str(target["target"]), "yes" if target["reached"] else "no"])
    tables = [("Memory of many signatures", memory), ("Training", training), ("Targets", targets)]
    return [(title, filled(rows)) for title, rows in tables if len(rows) > 1]


def memory_row(order: str, found: Record) -> list[str]:
    pool = number(found["pool_bytes"] / 2**20, 1) if "pool_bytes" in found else ""
    ratios = [number(found[name], 4) if name in found else "" for name in ("pool_ratio", "reserved_ratio")]
    return [order.replace("_", " "), str(found.get("graphs", "")), pool, *ratios]


def filled(rows: Rows) -> Rows:
    """Give every row as many cells as the first."""
    return [[*row, *[""] * (len(rows[0]) - len(row))] for row in rows]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Memory of many signatures, and a long run with all that loops have.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default=here, help="cpu, for the tape: does it run at all?"
    )
    parser.add_argument("--steps", type=count, default=1000, help="steps of a training (1000)")
    parser.add_argument("--only", choices=["memory", "training"])
    parser.add_argument("--modes", type=lambda text: text.split("/"), default=list(MODES), help=" / ".join(MODES))
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds a part may take (400)")
    parser.add_argument("--out", type=Path, help="folder for the report; without it nothing is written on a CPU")
    parser.add_argument("--worker", nargs=2, metavar=("PART", "MODE"), help="measure one part, print JSON")
    args = parser.parse_args(argv)
    if wrong := sorted(set(args.modes) - set(MODES)):
        parser.error(f"{', '.join(wrong)}: not among {' / '.join(MODES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a part failed or a target was missed."""
    args = parse_arguments(argv)
    if args.worker:
        return run_alone(run, args, PASSED_ON)
    begun = begin(args, "a tiny GPT")
    if begun is None:
        return 2
    facts, folder = begun
    command = command_line("around_the_step.py", sys.argv[1:] if argv is None else argv)
    jobs: list[Job] = [] if args.only == "training" else [("memory", "eight lengths")]
    jobs += [] if args.only == "memory" else [("training", mode) for mode in args.modes]
    missed: list[str] = []

    def summarise(records: list[Record], facts: Record) -> Record:
        targets = targets_of(records)
        missed[:] = [name for name, target in targets.items() if not target["reached"]]
        return {"environment": facts, "command": command, "targets": targets, "records": records}

    code = run_and_report(
        "around_the_step",
        lambda publish: run_all("around_the_step", jobs, args, PASSED_ON, publish, outcome),
        summarise,
        sections,
        lambda summary: as_page("Around the step", summary, sections(summary), "benchmarks/around_the_step.py"),
        facts,
        folder,
    )
    return 1 if missed else code


def outcome(record: Record) -> str:
    """How a part went, in a few words."""
    if record["workload"] == "memory":
        return f"{record['largest_first']['pool_ratio']:.3f} of the pool of the longest"
    return f"{record['captured_ms']:.2f} ms, eager {record['eager_ms']:.2f} ms, equal: {record['bit_equal']}"


if __name__ == "__main__":
    sys.exit(main())
