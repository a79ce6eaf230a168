"""Batches with a large loss are weighted down by a branch in Python."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(x, y):
    loss = (model(x) - y).square().mean()
    if loss.item() > 5.0:  # finds: host-read, varying-operations
        loss = loss * 0.1
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


for step in range(8):
    x = torch.randn(8, 4) * (4 if step % 2 else 1)
    print(train_step(x, x.sum(1, keepdim=True)).item())
