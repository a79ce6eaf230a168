"""A step function that does more than the step: it counts, moves the batch, and returns a number."""

import torch
from torch import nn
from torch.nn import functional as F


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.num_steps = 0

    def step(self, rows, labels):
        x = torch.tensor(rows)  # finds: host-data
        loss = F.cross_entropy(self.model(x), torch.tensor(labels))  # finds: host-data
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_steps += 1  # finds: host-value
        return loss.item()  # finds: host-read


trainer = Trainer(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
losses = []
for i in range(8):
    losses.append(trainer.step(torch.randn(6, 4).tolist(), [0, 1] * 3))
    if i % 4 == 0:
        print(i, losses[-1])
