"""A mixture of experts of which a part is graphed: attention and routing in graphs, the experts eager.

Run it as it stands: `python examples/modules.py`. The experts loop over themselves and read on the host how many tokens
each one got, which no graph can do, so the whole step cannot be captured. The parts around them can. The same training
runs eagerly and with graphs; both end with the same weights, bit for bit. Without a GPU graphs are recorded and
replayed on the CPU, which shows the same numbers and no speed.
"""

import contextlib
import os
from dataclasses import replace

import torch

import stepgraph
from stepgraph.lab.models import MoEConfig, MoEGPT

STEPS, NUM_MICROBATCHES, SEQ_LENGTH = 12, 2, 16


def train(device: str, *, graphed: bool) -> tuple[list[float], MoEGPT, stepgraph.ModuleReport | None]:
    """Train on sequences that count upwards from a random token."""
    torch.manual_seed(0)
    config = replace(MoEConfig.tiny(), num_layers=2, experts="loop", shared_ffn_size=32, bias_rate=1e-3, dropout=0.1)
    model = MoEGPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, handle = [], None

    with contextlib.ExitStack() as stack:
        if graphed:
            # The line that is new. Calls warm up, are captured and replayed by themselves from here on.
            handle = stack.enter_context(stepgraph.graph_modules(model, ["attn", "moe_router", "moe_preprocess"]))

        for _ in range(STEPS):
            optimizer.zero_grad()
            total, loads = 0.0, []
            for _ in range(NUM_MICROBATCHES):
                first = torch.randint(config.vocab_size, (4, 1))
                counting = ((first + torch.arange(SEQ_LENGTH + 1)) % config.vocab_size).to(device)
                loss, aux_loss, load = model(counting[:, :-1], counting[:, 1:])
                ((loss + 0.01 * aux_loss) / NUM_MICROBATCHES).backward()
                total += loss.item() / NUM_MICROBATCHES
                loads.append(load)
            optimizer.step()
            model.update_bias(torch.stack(loads).sum(0))
            losses.append(total)
        report = handle.report() if handle is not None else None
    return losses, model, report


def main() -> None:
    """Train twice, compare, and print what was graphed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Equality with eager means something where eager equals itself.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    expected, eager, _ = train(device, graphed=False)
    received, graphed, report = train(device, graphed=True)
    for step in range(0, STEPS, 3):
        print(f"step {step:2d}  eager {expected[step]:.6f}  graphed {received[step]:.6f}")
    assert expected == received
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), graphed.parameters(), strict=True))
    print("the same weights, bit for bit")
    assert report is not None
    print(report)
    print(f"{report.replays} replays, {report.eager_calls} eager calls")


if __name__ == "__main__":
    main()
