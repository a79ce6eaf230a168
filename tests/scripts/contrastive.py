"""SimCLR: two views of each image, and the NT-Xent loss."""

import torch
from torch import nn
from torch.nn import functional as F


def augment(x):
    return x + 0.1 * torch.randn_like(x)


def nt_xent(a, b, temperature=0.5):
    z = F.normalize(torch.cat([a, b]), dim=1)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf"))
    target = torch.arange(len(z), device=z.device).roll(len(a))
    return F.cross_entropy(similarity, target)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        return self.head(self.body(x))


encoder = Encoder()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
for step in range(6):
    images = torch.rand(12, 8, 8)
    loss = nt_xent(encoder(augment(images)), encoder(augment(images)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
