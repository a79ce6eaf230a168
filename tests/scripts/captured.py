"""A training with a captured step, for commands that run scripts."""

import torch

import stepgraph

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


@stepgraph.capture
def train_step(x: torch.Tensor) -> torch.Tensor:
    """Train one step."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


for _ in range(12):
    train_step(torch.randn(4, 8))
