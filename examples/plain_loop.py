"""A plain training loop, graphed by one line.

Run it as it stands: `python examples/plain_loop.py`. On a GPU the step is replayed as CUDA graphs; without one it is
recorded and replayed on the CPU, which shows the same numbers and no speed.
"""

import torch
from torch import nn

import stepgraph


def main() -> None:
    """Fit a small regression and print the loss and what was captured."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Dropout(0.05), nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    direction = torch.randn(16, 1) / 4

    # An ordinary training step. The one rule: nothing in it may read a tensor on the host, as `loss.item()` does.
    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    # The line that is new. The first calls run eagerly to warm up, then the step is captured, then replayed;
    # N calls are N training steps throughout.
    with stepgraph.capture(train_step) as step:
        for i in range(100):
            x = torch.randn(64, 16)
            batch = {"x": x.to(device), "y": torch.sin(x @ direction).to(device)}
            loss = step(batch)
            if i % 20 == 0 or i == 99:
                print(f"step {i:3d}  loss {loss.item():.4f}")  # outside the step, reading is fine
        print(step.report())


if __name__ == "__main__":
    main()
