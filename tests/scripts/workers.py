"""A DataLoader with worker processes, and random augmentation in the dataset."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        phase = random.random()
        t = torch.linspace(0, 6.28, 16)
        return torch.sin(t * (index % 4 + 1) + phase), index % 4


def main():
    loader = DataLoader(Waves(), batch_size=8, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
