"""Clipped gradients, whose norm is logged."""

import torch
from torch import nn

model = nn.LSTM(6, 12, batch_first=True)
head = nn.Linear(12, 1)
parameters = [*model.parameters(), *head.parameters()]
optimizer = torch.optim.RMSprop(parameters, lr=1e-3)
norms = []
for step in range(6):
    x = torch.randn(3, 9, 6)
    hidden, _ = model(x)
    loss = (head(hidden[:, -1]) - x.mean((1, 2))[:, None]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm=0.5)
    optimizer.step()
    norms.append(norm.item())
print(norms)
