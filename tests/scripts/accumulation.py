"""Gradient accumulation over a DataLoader, with logging for each batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(96, 6), torch.randn(96, 1)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
accumulate = 4
total, seen = 0.0, 0

for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y) / accumulate
    loss.backward()
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
    total += loss.item()
    seen += len(x)
    if i % 3 == 0:
        print(i, total / seen)
