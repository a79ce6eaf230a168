"""A GAN: two networks, two optimizers."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
discriminator = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

for step in range(8):
    real = torch.randn(32, 8, device=device) + 2
    ones, zeros = torch.ones(32, 1, device=device), torch.zeros(32, 1, device=device)

    d_optimizer.zero_grad()
    fake = generator(torch.randn(32, 16, device=device))
    d_loss = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
    d_loss.backward()
    d_optimizer.step()

    g_optimizer.zero_grad()
    g_loss = criterion(discriminator(fake), ones)
    g_loss.backward()
    g_optimizer.step()

    print(step, d_loss.item(), g_loss.item())
