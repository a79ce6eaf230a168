"""The loop of the PyTorch tutorial, at module level."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()
data = [(torch.randn(16, 8), torch.randint(2, (16,))) for _ in range(6)]

for epoch in range(2):
    running = 0.0
    for i, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(f"epoch {epoch}: {running / len(data):.3f}")
