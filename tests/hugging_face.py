"""Hugging Face's Llama, BERT, ViT and models with experts as training programs.

They are small and made from configs alone; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.harness import Program

MODELS = ("llama", "bert", "vit")
WITH_EXPERTS = ("mixtral", "qwen3_moe")
"""Their experts run in a loop on the host, over those that got tokens."""
VOCABULARY, SEQUENCE, IMAGE, LABELS, BATCH = 64, 16, 16, 8, 2


def config_of(name: str, num_layers: int, hidden_size: int, *, dropout: bool) -> Any:
    """The model's config, with dropout of 0.1 (BERT's own; Llama and ViT have none of theirs) or without."""
    import transformers

    sizes: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 4,
    }
    tokens = {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * SEQUENCE, "use_cache": False}
    both = {"hidden_dropout_prob": 0.1 * dropout, "attention_probs_dropout_prob": 0.1 * dropout}
    if name == "llama":
        return transformers.LlamaConfig(**sizes, **tokens, num_key_value_heads=2, attention_dropout=0.1 * dropout)
    experts = {**sizes, **tokens, "num_key_value_heads": 2, "attention_dropout": 0.1 * dropout}
    if name == "mixtral":
        return transformers.MixtralConfig(**experts, num_local_experts=4)
    if name == "qwen3_moe":
        routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
        return transformers.Qwen3MoeConfig(**experts, **routed, head_dim=hidden_size // 4)
    if name == "bert":
        return transformers.BertConfig(**sizes, **tokens, **both)
    return transformers.ViTConfig(**sizes, **both, image_size=IMAGE, patch_size=4, num_labels=LABELS)


def model_of(name: str, num_layers: int, hidden_size: int, *, dropout: bool) -> nn.Module:
    """The model with its loss, for training."""
    import transformers

    classes = {"llama": "LlamaForCausalLM", "bert": "BertForMaskedLM", "vit": "ViTForImageClassification"}
    classes |= {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    model: nn.Module = getattr(transformers, classes[name])(config_of(name, num_layers, hidden_size, dropout=dropout))
    if name in WITH_EXPERTS and hasattr(model, "set_experts_implementation"):  # releases without it have the loop only
        model.set_experts_implementation("eager")
    return model.train()


def layers_of(model: nn.Module) -> list[str]:
    """The scope of a model's layers: transformers has kept them under other names in other versions."""
    num_layers = model.config.num_hidden_layers
    lists = (
        path for path, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers
    )
    return [f"{next(lists)}.*"]


def full_mask(name: str, device: torch.device) -> torch.Tensor:
    """What tokens may look at, in four dimensions: it is handed on as it is, and no code looks into it."""
    mask = torch.ones(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device)
    return mask if name == "bert" else mask.tril()


def program_of(
    name: str,
    calls: int,
    num_layers: int = 4,
    hidden_size: int = 128,
    *,
    dropout: bool = False,
    masked: bool = False,
) -> Callable[[torch.device], Program]:
    """A training step with fused AdamW. `masked`: the attention mask is made outside of the step."""

    def build(device: torch.device) -> Program:
        model = model_of(name, num_layers, hidden_size, dropout=dropout).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        more = {"attention_mask": full_mask(name, device)} if masked and name != "vit" else {}

        def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs, labels=labels, **more).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batches_of(name, calls, device), [model], [optimizer])

    return build


def batches_of(name: str, calls: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of each call."""
    draw = torch.Generator().manual_seed(5)
    return [tuple(part.to(device) for part in batch_of(name, draw)) for _ in range(calls)]


def batch_of(name: str, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    if name == "vit":
        return torch.randn(BATCH, 3, IMAGE, IMAGE, generator=draw), torch.randint(LABELS, (BATCH,), generator=draw)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=draw)
    return tokens, tokens
