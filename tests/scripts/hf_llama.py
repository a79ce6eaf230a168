"""Hugging Face's Llama from a config, in bfloat16 autocast, with a mask that is made once."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))


causal = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()


def train_step(tokens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=tokens, attention_mask=causal, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


for step in range(5):
    print(train_step(torch.randint(64, (2, 16))).item())
