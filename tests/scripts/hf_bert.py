"""Hugging Face's BERT from a config, with an attention mask of the batch."""

import torch
from transformers import BertConfig, BertForSequenceClassification

config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
    num_labels=3,
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
for step in range(5):
    batch = {
        "input_ids": torch.randint(64, (4, 16)),
        "attention_mask": torch.ones(4, 16, dtype=torch.long),
        "labels": torch.randint(3, (4,)),
    }
    loss = model(**batch).loss  # finds: host-read
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
