"""How long a training takes to end in order after SIGTERM: save, free graphs, leave the process group, exit.

    python benchmarks/signal_exit.py                        # one rank on the GPU, the recipe gpt2_small
    python benchmarks/signal_exit.py --device cpu --ranks 2 # a small GPT on two gloo ranks

For each implementation it starts `stepgraph train`, waits until graphs are replayed, sends SIGTERM to all ranks, and
prints the seconds until the last one has ended. The target is 30 s. The exit status is 1 if a run ended otherwise than
with 143, or without a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

IMPLEMENTATIONS = {
    "none": ("none", "[]"),
    "local": ("local", "attn,mlp"),
    "full_iteration": ("local", "full_iteration"),
    "transformer_engine": ("transformer_engine", "attn"),
}
STEPS_BEFORE, LIMIT_S = 16, 600


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("settings", nargs="*", metavar="SECTION.FIELD=VALUE")
    options = parser.parse_args(arguments)
    failed = False
    for name in options.implementations.split(","):
        with tempfile.TemporaryDirectory() as folder:
            seconds, codes, saved = measured(Path(folder), name, options.device, options.ranks, options.settings)
        is_good = set(codes) == {143} and saved
        failed |= not is_good
        print(
            json.dumps({"implementation": name, "ranks": options.ranks, "seconds": round(seconds, 2), "codes": codes})
        )
    return int(failed)


def measured(
    folder: Path, name: str, device: str, ranks: int, settings: Sequence[str]
) -> tuple[float, list[int], bool]:
    """Return the seconds from the signal to the last exit, the exit codes, and whether a checkpoint was saved."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    impl, scope = IMPLEMENTATIONS[name]
    words = ["train", "--device", device, "--fit", f"model.cuda_graph_impl={impl}", f"model.cuda_graph_scope={scope}"]
    words += ["model.cuda_graph_warmup_steps=11", "train.train_iters=1000000", "train.global_batch_size=8"]
    words += [f"logger.log_dir={folder}", f"checkpoint.save={folder / 'saved'}", *settings]
    running = []
    for rank in range(ranks):
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | (group if ranks > 1 else {})
        command = [sys.executable, "-m", "stepgraph", *words]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        wait_for_steps(folder / "stepgraph-train.jsonl", running[0])
        begun = time.perf_counter()
        for process in running:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(LIMIT_S) for process in running]
        return time.perf_counter() - begun, codes, any((folder / "saved").glob("step_*/manifest.json"))
    finally:
        for process in running:
            process.kill()


def wait_for_steps(log: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + LIMIT_S
    while not log.exists() or log.read_text().count('"kind": "train"') < STEPS_BEFORE:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the training did not reach step {STEPS_BEFORE} (exit code {process.poll()})")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
