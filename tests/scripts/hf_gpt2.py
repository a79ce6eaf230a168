"""Hugging Face's GPT-2 from a config."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

device = "cuda" if torch.cuda.is_available() else "cpu"
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
model = GPT2LMHeadModel(config).to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    batch = torch.randint(64, (2, 16), device=device)
    output = model(input_ids=batch, labels=batch)  # finds: host-read
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, output.loss.item())
