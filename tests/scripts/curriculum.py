"""Sequences get longer as the training goes on."""

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.mix = nn.Linear(16, 30)

    def forward(self, tokens):
        return self.mix(self.embed(tokens).cumsum(1))  # finds: varying-shape


model = Reader()
optimizer = torch.optim.AdamW(model.parameters())
corpus = torch.randint(30, (400,))
for step in range(9):
    length = 8 + 4 * (step // 3)
    start = torch.randint(400 - length - 1, ()).item()
    x, y = corpus[start : start + length][None], corpus[start + 1 : start + length + 1]
    loss = nn.functional.cross_entropy(model(x)[0], y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(length, loss.item())
