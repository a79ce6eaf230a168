"""Small configurations and models for tests of the training loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from stepgraph.config.container import ConfigContainer
from stepgraph.lab.models import GPT, GPTConfig, Mamba, MambaConfig, MoEConfig, MoEGPT

IMPLEMENTATIONS: dict[str, tuple[str, list[str]]] = {
    "eager": ("none", []),
    "scopes": ("local", ["attn", "mlp"]),
    "layers": ("local", []),
    "iteration": ("local", ["full_iteration"]),
    "te": ("transformer_engine", ["attn"]),
}


def tiny(folder: Path, implementation: str = "eager", **settings: Any) -> ConfigContainer:
    """Two layers of width 32 and six iterations; settings are `section__field=value`, or `section=value`."""
    cfg = ConfigContainer()
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = IMPLEMENTATIONS[implementation]
    cfg.model.cuda_graph_warmup_steps = 2
    cfg.model.num_layers, cfg.model.hidden_size, cfg.model.num_attention_heads = 2, 32, 4
    cfg.model.vocab_size, cfg.model.seq_length, cfg.model.ffn_hidden_size = 128, 16, 64
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 6, 4, 2
    cfg.optimizer.lr = 1e-2
    cfg.scheduler.lr_warmup_iters = 2
    cfg.logger.log_dir = str(folder)
    for name, value in settings.items():
        section, _, field = name.partition("__")
        setattr(getattr(cfg, section) if field else cfg, field or section, value)
    return cfg


def gpt(cfg: Any, **changes: Any) -> nn.Module:
    tied = cfg.model.share_embeddings_and_output_weights
    return GPT(_sized(GPTConfig.tiny(), cfg, ffn_size=64, dropout=0.1, tie_embeddings=tied, **changes))


def moe(cfg: Any) -> nn.Module:
    return MoEGPT(_sized(MoEConfig.tiny(), cfg, ffn_size=32))


def mamba(cfg: Any) -> nn.Module:
    config = MambaConfig.tiny()
    return Mamba(replace(config, num_layers=2, vocab_size=cfg.model.vocab_size))


def _sized(config: Any, cfg: Any, **changes: Any) -> Any:
    model = cfg.model
    return replace(
        config,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_attention_heads,
        vocab_size=model.vocab_size,
        max_seq_len=model.seq_length,
        delay_wgrad_compute=model.delay_wgrad_compute,
        gradient_accumulation_fusion=model.gradient_accumulation_fusion,
        **changes,
    )
