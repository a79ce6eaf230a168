"""An exponential moving average of the weights, written in place after each step."""

import copy

import torch
from torch import nn

model = nn.Sequential(nn.Linear(6, 32), nn.Mish(), nn.Linear(32, 6))
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


@torch.no_grad()
def update_average(decay=0.99):
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)


def train_step(x):
    noise = torch.randn_like(x)
    loss = (model(x + noise) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_average()
    return loss


for step in range(6):
    loss = train_step(torch.randn(16, 6))
print(loss.item())
