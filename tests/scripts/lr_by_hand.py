"""The learning rate is set by hand before each step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def set_lr(value):
    for group in optimizer.param_groups:
        group["lr"] = value


for step in range(8):
    set_lr(0.1 / (1 + step))
    x = torch.rand(20, 3)
    loss = (model(x) - x.prod(1, keepdim=True)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, optimizer.param_groups[0]["lr"], loss.item())
