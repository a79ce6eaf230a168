"""A selective state space model with a scan in Python."""

import torch
from torch import nn
from torch.nn import functional as F


class SelectiveScan(nn.Module):
    def __init__(self, width, state=4):
        super().__init__()
        self.in_proj = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.params = nn.Linear(width, 2 * state + 1)
        self.log_a = nn.Parameter(torch.zeros(width, state))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        dt, b, c = self.params(u).split([1, 4, 4], dim=-1)
        dt = F.softplus(dt)
        decay = torch.exp(-torch.exp(self.log_a) * dt[..., None])
        state = torch.zeros(batch, width, 4, device=x.device)
        outputs = []
        for t in range(length):
            state = decay[:, t] * state + dt[:, t, :, None] * u[:, t, :, None] * b[:, t, None, :]
            outputs.append((state * c[:, t, None, :]).sum(-1))
        return self.out_proj(torch.stack(outputs, 1) * F.silu(gate))


class Model(nn.Module):
    def __init__(self, vocabulary=32, width=16, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(SelectiveScan(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) @ self.embed.weight.T


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    tokens = torch.randint(32, (2, 9))
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss)
