"""A trainer class with evaluation between the epochs."""

import torch
from torch import nn
from torch.nn import functional as F


class Trainer:
    def __init__(self, model, lr=1e-3):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.history = []
        self.global_step = 0

    def training_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        right = sum((self.model(x).argmax(1) == y).sum().item() for x, y in batches)
        self.model.train()
        return right

    def fit(self, batches, epochs):
        for _ in range(epochs):
            for batch in batches:
                loss = self.training_step(batch)
                self.global_step += 1
                self.history.append(loss.item())
            print("right:", self.evaluate(batches), "last loss:", self.history[-1])


batches = [(torch.randn(8, 10), torch.randint(3, (8,))) for _ in range(4)]
Trainer(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3))).fit(batches, 3)
