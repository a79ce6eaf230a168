"""A character model with a GRU; the hidden state starts at zero for each batch."""

import torch
from torch import nn

text = "the quick brown fox jumps over the lazy dog " * 20
letters = sorted(set(text))
ids = torch.tensor([letters.index(c) for c in text])


class CharModel(nn.Module):
    def __init__(self, size, width=32):
        super().__init__()
        self.embed = nn.Embedding(size, width)
        self.rnn = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, size)

    def forward(self, x, hidden=None):
        y, hidden = self.rnn(self.embed(x), hidden)
        return self.out(y), hidden


model = CharModel(len(letters))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
length, batch = 16, 4
for step in range(8):
    starts = torch.randint(len(ids) - length - 1, (batch,))
    x = torch.stack([ids[s : s + length] for s in starts])
    y = torch.stack([ids[s + 1 : s + length + 1] for s in starts])
    logits, _ = model(x)
    loss = nn.functional.cross_entropy(logits.reshape(-1, len(letters)), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"{step}: {loss.item():.3f}")
