"""A loss over the masked positions only, selected by indexing with the mask."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class MaskedModel(nn.Module):
    def __init__(self, vocabulary=50, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 64, batch_first=True), 2, enable_nested_tensor=False
        )
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.out(self.encoder(self.embed(tokens)))


model = MaskedModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    tokens = torch.randint(1, 50, (4, 16))
    mask = torch.rand(tokens.shape) < 0.15
    logits = model(tokens.masked_fill(mask, 0))
    loss = F.cross_entropy(logits[mask], tokens[mask])  # finds: host-read
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss)
