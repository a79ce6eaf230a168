"""torch.compile around the model."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


model = torch.compile(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    x = torch.randn(4, 8)
    loss = (model(x) - x.flip(1)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
