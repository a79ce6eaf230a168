"""A training step in a function, called from main()."""

import torch
from torch import nn
from torch.nn import functional as F


def train_step(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=True)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def main():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(8):
        x = torch.randn(32, 4)
        loss = train_step(model, optimizer, x, x.sum(1, keepdim=True))
        if step % 2 == 0:
            print(step, float(loss))


if __name__ == "__main__":
    main()
