"""A student learns from a teacher that runs without gradients inside the step."""

import torch
from torch import nn
from torch.nn import functional as F

teacher = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 5)).eval()
student = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 5))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
temperature, alpha = 2.0, 0.7

for step in range(6):
    x, y = torch.randn(8, 10), torch.randint(5, (8,))
    logits = student(x)
    with torch.no_grad():
        target = F.softmax(teacher(x) / temperature, dim=-1)
    soft = F.kl_div(F.log_softmax(logits / temperature, dim=-1), target, reduction="batchmean") * temperature**2
    loss = alpha * soft + (1 - alpha) * F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.3f}")
