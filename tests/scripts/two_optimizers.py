"""An embedding with its own optimizer beside the rest of the model."""

import torch
from torch import nn
from torch.nn import functional as F


class Tagger(nn.Module):
    def __init__(self, vocabulary, width, tags):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.head = nn.Linear(width, tags)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


model = Tagger(100, 32, 5)
slow = torch.optim.SGD(model.embedding.parameters(), lr=1e-2)
fast = torch.optim.AdamW([*model.encoder.parameters(), *model.head.parameters()], lr=1e-3)

for step in range(6):
    tokens, tags = torch.randint(100, (4, 12)), torch.randint(5, (4, 12))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
    slow.zero_grad()
    fast.zero_grad()
    loss.backward()
    slow.step()
    fast.step()
    print(loss.item())
