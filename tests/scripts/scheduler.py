"""Warm-up and cosine decay of the learning rate."""

import math

import torch
from torch import nn


def factor(step, warmup=3, total=12):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


model = nn.Linear(5, 5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
for step in range(12):
    x = torch.randn(10, 5)
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, scheduler.get_last_lr()[0], loss.item())
