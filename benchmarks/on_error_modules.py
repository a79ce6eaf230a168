"""A step that cannot be captured: eager against `capture(on_error="modules")`, for models with experts in a host loop.

    python benchmarks/on_error_modules.py                            # Mixtral and Qwen3-MoE, small, from configs
    python benchmarks/on_error_modules.py --layers 4 --hidden 256 --out results.json
    python benchmarks/on_error_modules.py --device cpu --steps 2     # does it run at all? No GPU needed

The models are Hugging Face's, their experts a loop over those that got tokens, which reads on the host. The step is
zero_grad, forward, backward and fused AdamW. What the columns mean:

- eager_ms, modules_ms: median time of a step; the two run in turn, in blocks, on the same batches.
- speed_up: the first by the second.
- graphed: the modules with graphs, as a scope. left_out: the modules that stayed eager, with the reason.
- search_s: seconds from the failed capture to the first call that replays, with the search.
- equal: whether losses and parameters of the measured steps have eager's bits. Where eager differs from itself, false.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import stepgraph

MODELS = ("mixtral", "qwen3_moe")
VOCABULARY, EXPERTS = 1024, 8


def build(name: str, options: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the model, always with the same weights, and its step."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "intermediate_size": 2 * options.hidden,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": options.sequence,
        "use_cache": False,
    }
    if name == "mixtral":
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=EXPERTS))
    else:
        routed = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": options.hidden}
        config = transformers.Qwen3MoeConfig(**sizes, **routed, head_dim=options.hidden // 8)
        made = transformers.Qwen3MoeForCausalLM(config)
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model: torch.nn.Module = made.to(options.device, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train two equal models, one eager and one with graphs for modules, and time them in turn."""
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    draw = torch.Generator().manual_seed(1)
    shape = (options.batch, options.sequence)
    batches = [torch.randint(VOCABULARY, shape, generator=draw).to(options.device) for _ in range(8)]
    (eager_model, eager), (model, plain) = build(name, options), build(name, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        with stepgraph.capture(plain, on_error="modules") as graphed:
            begun, calls = time.perf_counter(), 0
            while (found := graphed.report().modules) is None or (found.replays == 0 and calls < 20):
                equal = torch.equal(eager(batches[calls % 8]), graphed(batches[calls % 8]))
                calls += 1
            wait()
            search_s = time.perf_counter() - begun
            times: dict[str, list[float]] = {"eager": [], "modules": []}
            for number in range(options.blocks):
                losses: dict[str, list[torch.Tensor]] = {}
                for way, step in (("eager", eager), ("modules", graphed)):
                    wait()
                    start = time.perf_counter()
                    losses[way] = [step(batches[(number + index) % 8]) for index in range(options.steps)]
                    wait()
                    times[way].append((time.perf_counter() - start) / options.steps * 1e3)
                equal = equal and all(map(torch.equal, losses["eager"], losses["modules"]))
            pairs = zip(eager_model.parameters(), model.parameters(), strict=True)
            equal = equal and all(torch.equal(one, two) for one, two in pairs)
            report = graphed.report().modules
    eager_ms, modules_ms = statistics.median(times["eager"]), statistics.median(times["modules"])
    return {
        "model": name,
        "eager_ms": round(eager_ms, 4),
        "modules_ms": round(modules_ms, 4),
        "speed_up": round(eager_ms / modules_ms, 3),
        "blocks_ms": {way: [round(value, 4) for value in found] for way, found in times.items()},
        "graphed": [row.path for row in report.rows if row.forwards],
        "replays": report.replays,
        "left_out": report.left_out,
        "search_s": round(search_s, 3),
        "equal": bool(equal),
    }


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print the record as JSON, and write it to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    for name, default in (
        ("layers", 4),
        ("hidden", 256),
        ("sequence", 256),
        ("batch", 2),
        ("steps", 20),
        ("blocks", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    record = {
        "command": " ".join(["python benchmarks/on_error_modules.py", *(sys.argv[1:] if given is None else given)]),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "settings": {k: v for k, v in vars(options).items() if isinstance(v, (int, str))},
        "results": [measure(name, options) for name in options.models.split(",")],
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
