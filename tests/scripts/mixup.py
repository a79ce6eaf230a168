"""Mixup, with numpy's random numbers drawn in the middle of the step."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x, y):
        h = F.relu(self.stem(x))
        lam = np.random.beta(0.4, 0.4)  # finds: host-random
        order = torch.randperm(len(x), device=x.device)
        h = lam * h + (1 - lam) * h[order]  # finds: varying-number
        logits = self.head(h)
        loss = lam * F.cross_entropy(logits, y)  # finds: varying-number
        return loss + (1 - lam) * F.cross_entropy(logits, y[order])  # finds: varying-number


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    x, y = torch.randn(16, 12), torch.randint(4, (16,))
    loss = model(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
