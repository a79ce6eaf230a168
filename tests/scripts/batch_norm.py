"""A small convolutional network with BatchNorm, and a DataLoader that keeps whole batches."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(1, 12, 12, generator=generator), index % 10


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


model = nn.Sequential(block(1, 8), block(8, 16), nn.Flatten(), nn.Linear(16 * 9, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
loader = DataLoader(Digits(), batch_size=8, shuffle=True, drop_last=True)
model.train()
for images, labels in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
print(loss)
