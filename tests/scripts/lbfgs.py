"""LBFGS, which calls a closure several times in each step."""

import torch
from torch import nn

x = torch.linspace(-1, 1, 40)[:, None]
y = torch.sin(3 * x)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(6):
    loss = optimizer.step(closure)  # finds: optimizer-closure
    print(step, loss.item())
