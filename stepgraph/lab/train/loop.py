"""The training loop: iterate, capture when the warm-up is over, evaluate, save, and stop in order.

The loop decides nothing by itself: `policy` says when, `implementations` say how an iteration runs.
Losses are read one iteration late, so that the host queues an iteration while the device still works on the last one.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from stepgraph.core.errors import NonFinite
from stepgraph.core.wording import counted
from stepgraph.engine.backends import Reading
from stepgraph.engine.step.nonfinite import FlagReader, flags_over
from stepgraph.lab.train.checkpoint import keep_most_recent, save
from stepgraph.lab.train.data import Batches
from stepgraph.lab.train.implementations import Implementation
from stepgraph.lab.train.iteration import Result, in_iteration, non_finite
from stepgraph.lab.train.journal import Journal
from stepgraph.lab.train.memory import DeviceMemory, in_mib
from stepgraph.lab.train.optimizer import Schedule
from stepgraph.lab.train.policy import (
    activation_estimate,
    capture_fits,
    capture_is_due,
    is_time,
    predicted_graph_bytes,
)
from stepgraph.lab.train.random_state import get_random_states
from stepgraph.lab.train.ranks import Ranks
from stepgraph.lab.train.run_report import RunReport
from stepgraph.lab.train.setup import Checks
from stepgraph.lab.train.signals import SignalFlag

OnEvent = Callable[[str, int], None]
"""Called before `warmup`, `capture`, `replay`, `evaluate` and `checkpoint`, with the number of iterations done."""


@dataclass(frozen=True)
class Run:
    """What a run works with, from start to end."""

    cfg: Any
    device: torch.device
    ranks: Ranks
    batches: Batches
    eval_batches: Batches
    schedule: Schedule
    checks: Checks
    memory: DeviceMemory
    journal: Journal
    on_event: OnEvent


@dataclass
class Progress:
    """What has happened so far."""

    start: int
    step: int
    losses: dict[int, float] = field(default_factory=dict)
    eval_losses: dict[int, float] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    eager_reasons: Counter[str] = field(default_factory=Counter)
    was_decided: bool = False
    """Whether the capture was decided on, for or against."""
    was_announced: bool = False
    fallback: str | None = None
    """Why the run went on in eager."""
    graphed: int = 0
    memory_before: int | None = None
    memory_after: int | None = None
    saved: int = -1
    """The iteration of the last checkpoint."""
    trained_seconds: float = 0.0
    """Time of the iterations after the capture, or of all without one."""
    trained_iterations: int = 0


@dataclass(frozen=True, slots=True)
class Pending:
    """An iteration whose loss is on its way to the host."""

    step: int
    lr: float
    loss: Reading
    seconds: float
    replays: int
    """Replays so far, this iteration's included."""


class Loop:
    """Trains from `progress.step` to the end, or until a signal."""

    def __init__(self, run: Run, implementation: Implementation, flag: SignalFlag, start: int) -> None:
        self._run, self._flag = run, flag
        self.implementation = implementation
        self.progress = Progress(start, start, saved=start)
        self._work = implementation.work
        self._pending: Pending | None = None
        self._flags = FlagReader("the training iteration")
        self._warmup = implementation.warmup_steps(run.cfg.model.cuda_graph_warmup_steps)
        self._since = self._begun = time.perf_counter()

    # -- the run

    def run(self) -> int:
        """Train; return the number of the signal that ended the run, or 0."""
        train, progress = self._run.cfg.train, self.progress
        last = progress.step if train.skip_train else train.train_iters
        if train.manual_gc:
            gc.disable()
        try:
            while progress.step < last:
                self._iterate()
                if self._after_iteration(last):
                    break
            if train.skip_train and train.eval_iters:
                self._evaluate()
            self._read_pending()
            self._flags.drain()
            signal = self._run.ranks.largest(self._flag.number)
            if self._run.cfg.checkpoint.save is not None and progress.saved < progress.step:
                self._save()
            return signal
        finally:
            if train.manual_gc:
                gc.enable()

    def _iterate(self) -> None:
        run, progress = self._run, self.progress
        is_due = capture_is_due(progress.step, progress.start, self._warmup, was_decided=progress.was_decided)
        if is_due and run.cfg.model.cuda_graph_impl != "none":
            self._decide_capture()
        if progress.step + 1 in run.cfg.train.iterations_to_skip:
            run.batches.skip_iteration()
            progress.step += 1
            progress.skipped.append(progress.step)
            run.journal.write("skipped", progress.step)
            return
        self._train()

    def _train(self) -> None:
        run, progress, implementation = self._run, self.progress, self.implementation
        run.on_event("replay" if progress.was_decided else "warmup", progress.step)
        lr = run.schedule.apply(self._work.optimizer, progress.step)
        microbatches = run.batches.next_iteration(run.device)
        self._flags.check()
        with contextlib.nullcontext() if progress.was_decided else run.memory.measured():
            result = self._trained(microbatches)
        progress.step += 1
        if not implementation.is_captured:
            reason = "warm-up" if run.cfg.model.cuda_graph_impl != "none" else "cuda_graph_impl is none"
            progress.eager_reasons[progress.fallback or reason] += 1
        self._post_flags(result)
        self._announce()
        loss, replays = self._backend.read_later(result.loss), implementation.replays
        self._read_pending()
        now = time.perf_counter()
        self._pending = Pending(progress.step, lr, loss, now - self._since, replays)
        self._since = now

    def _trained(self, microbatches: Any) -> Result:
        """Train an iteration; a value that the host found not to be finite is reported with the iteration's number."""
        try:
            return self.implementation.train(microbatches)
        except NonFinite as error:
            if self._run.ranks.size == 1:  # other ranks may be elsewhere, and a loss is the mean of all
                self._read_pending()
            if self.implementation.name.endswith("full_iteration"):
                raise  # its flag tells the iteration
            raise in_iteration(error, self.progress.step + 1) from error

    def _after_iteration(self, last: int) -> bool:
        """Evaluate and save where it is time; return True if the run ends here."""
        run, progress, train = self._run, self.progress, self._run.cfg.train
        if train.eval_iters and is_time(progress.step, train.eval_interval, last):
            self._evaluate()
        saving = run.cfg.checkpoint
        if saving.save is not None and is_time(progress.step, saving.save_interval, last):
            self._save()
        if train.manual_gc and is_time(progress.step, train.manual_gc_interval, 0):
            gc.collect()
        if run.ranks.largest(self._flag.number):
            return True
        if is_time(progress.step, train.exit_interval, 0):
            return True
        limit = train.exit_duration_in_mins
        return limit is not None and bool(run.ranks.largest(int(self._minutes() >= limit)))

    def _minutes(self) -> float:
        return (time.perf_counter() - self._begun) / 60

    @property
    def _backend(self) -> Any:
        return self._work.session.backend

    # -- capture

    def _decide_capture(self) -> None:
        """Capture if the graphs of every rank fit; otherwise every rank goes on in eager."""
        run, progress = self._run, self.progress
        progress.was_decided = True
        fits = capture_fits(self._predicted_bytes(), run.memory.free())
        if not run.ranks.smallest(int(fits.holds)):
            reason = fits.reason if not fits else "graphs do not fit on another rank"
            progress.fallback = f"memory: {reason}"
            run.journal.say(f"no graphs, training goes on in eager: {reason}")
            run.journal.write("capture", progress.step, captured=False, reason=reason)
            self.implementation.close()
            self.implementation = self.implementation.eager()
            return
        run.on_event("capture", progress.step)
        progress.memory_before = self._memory_in_use()
        self.implementation.capture()
        self._announce()

    def _predicted_bytes(self) -> int:
        cfg, memory = self._run.cfg, self._run.memory
        measured = memory.activation_bytes
        if measured is None:
            measured = activation_estimate(
                tokens=cfg.train.micro_batch_size * cfg.model.seq_length,
                hidden_size=cfg.model.hidden_size,
                num_layers=cfg.model.num_layers,
                vocab_size=cfg.model.vocab_size,
                bytes_per_element=2 if cfg.mixed_precision.bf16 else 4,
            )
        return predicted_graph_bytes(
            activation_bytes=measured,
            microbatches_in_flight=cfg.model.pipeline_model_parallel_size,
            input_bytes=16 * cfg.train.micro_batch_size * cfg.model.seq_length * self._work.num_microbatches,
            is_whole_iteration=cfg.model.captures_iteration,
        )

    def _memory_in_use(self) -> int | None:
        used = self._run.memory.used()
        if used is not None:
            return used
        report = self.implementation.report()
        return report.pool_bytes + report.static_bytes if report is not None else 0

    def _announce(self) -> None:
        """Say once, on each rank, what was captured."""
        progress, implementation = self.progress, self.implementation
        if progress.was_announced or not implementation.is_captured:
            return
        progress.was_announced = True
        progress.memory_after = self._memory_in_use()
        progress.graphed = implementation.num_graphed
        before, after = in_mib(progress.memory_before), in_mib(progress.memory_after)
        count, seconds = progress.graphed, implementation.capture_seconds
        is_whole = implementation.name.endswith("full_iteration")
        what = counted(count, "graphed iterations" if is_whole else "graphable layers")
        text = f"{what}, captured in {seconds:.2f} s, memory {before} before and {after} after"
        self._run.journal.say(text)
        self._run.journal.write(
            *("capture", progress.step),
            captured=True,
            graphable_layers=count,
            capture_seconds=round(seconds, 4),
            memory_before=progress.memory_before,
            memory_after=progress.memory_after,
        )
        progress.trained_seconds, progress.trained_iterations = 0.0, 0

    # -- results

    def _post_flags(self, result: Result) -> None:
        """Look for NaN with a flag on the device, where the graph of the iteration does not do so itself."""
        checks = self._run.checks
        if not checks.on_device or self.implementation.name.endswith("full_iteration"):
            return
        named: list[tuple[str, Any]] = [("loss", result.loss)] if checks.loss == "device" else []
        if checks.grad == "device":
            named += [(f"{name}.grad", p.grad) for name, p in self._work.core.named_parameters() if p.grad is not None]
        self._flags.post(self.progress.step, flags_over(named), self._backend)

    def _read_pending(self) -> None:
        """Record the loss of the iteration before."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        run, progress = self._run, self.progress
        loss = run.ranks.mean_loss(float(pending.loss.value()))
        progress.losses[pending.step] = loss
        progress.trained_seconds += pending.seconds
        progress.trained_iterations += 1
        tokens = run.cfg.train.global_batch_size * run.cfg.model.seq_length
        run.journal.train_row(
            pending.step,
            loss=loss,
            lr=pending.lr,
            step_ms=1e3 * pending.seconds,
            tokens_per_s=tokens / pending.seconds,
            replays=pending.replays,
        )

    def _evaluate(self) -> None:
        run, progress, work = self._run, self.progress, self._work
        self._read_pending()
        run.on_event("evaluate", progress.step)
        run.eval_batches.position = 0
        work.model.eval()
        try:
            with torch.no_grad():
                found = [
                    self.implementation.evaluate(run.eval_batches.next_iteration(run.device))
                    for _ in range(run.cfg.train.eval_iters)
                ]
        finally:
            work.model.train()
        if self.implementation.evaluates_eagerly:
            progress.eager_reasons["evaluation"] += len(found)
        loss = run.ranks.mean_loss(float(torch.stack(found).mean()))
        progress.eval_losses[progress.step] = loss
        run.journal.write("eval", progress.step, loss=loss)
        run.journal.say(f"step {progress.step}  evaluation loss {loss:.4f}")
        self._since = time.perf_counter()

    # -- checkpoints

    def _save(self) -> None:
        run, progress, work = self._run, self.progress, self._work
        if progress.saved >= progress.step:
            return
        self._read_pending()
        loss = progress.losses.get(progress.step, 0.0)
        if run.checks.loss != "off" and not loss - loss == 0.0:
            raise in_iteration(non_finite("loss", loss), progress.step)  # do not save parameters that are lost
        run.on_event("checkpoint", progress.step)
        settings = run.cfg.checkpoint
        if work.gathered is not None:
            work.gathered.gather_all()
        state = work.optimizer.state_dict() if settings.save_optim else None
        shard = {
            "model": work.core.state_dict(),
            "names": getattr(work.core, "whole_names", None),
            "optimizer": state if work.gathered is None else None,
            "schedule": asdict(run.schedule),
        }
        rank = {
            "optimizer": None if work.gathered is None else state,  # of this rank's share
            "random": get_random_states(run.device) if settings.save_rng else None,
            "data": run.batches.state_dict(),
        }
        folder = Path(settings.save)
        path = save(folder, progress.step, shard=shard, rank=rank, config=run.cfg.to_dict(), ranks=run.ranks)
        progress.saved = progress.step
        if run.ranks.is_first and settings.most_recent_k > 0:
            for text in keep_most_recent(folder, settings.most_recent_k):
                run.journal.say(text)
        run.journal.write("checkpoint", progress.step, path=str(path))
        self._since = time.perf_counter()

    # -- the end

    def report(self) -> RunReport:
        """Return what happened; call it after the implementation was closed."""
        progress, implementation = self.progress, self.implementation
        graphs = implementation.report()
        tokens = self._run.cfg.train.global_batch_size * self._run.cfg.model.seq_length * progress.trained_iterations
        return RunReport(
            implementation=implementation.name,
            start=progress.start,
            step=progress.step,
            losses=progress.losses,
            eval_losses=progress.eval_losses,
            skipped=tuple(progress.skipped),
            replays=graphs.tally()[0] if graphs is not None else 0,
            graphed=progress.graphed,
            capture_seconds=implementation.capture_seconds,
            memory_before=progress.memory_before,
            memory_after=progress.memory_after,
            eager_reasons=dict(progress.eager_reasons),
            tokens_per_s=tokens / progress.trained_seconds if progress.trained_seconds else 0.0,
            is_done=progress.start >= self._run.cfg.train.train_iters > 0,
            graphs=graphs,
        )
