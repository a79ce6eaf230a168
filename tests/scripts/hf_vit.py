"""Hugging Face's ViT from a config."""

import torch
from transformers import ViTConfig, ViTForImageClassification

config = ViTConfig(
    image_size=16,
    patch_size=4,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    num_labels=5,
)
model = ViTForImageClassification(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    pixels, labels = torch.rand(4, 3, 16, 16), torch.randint(5, (4,))
    loss = model(pixel_values=pixels, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
