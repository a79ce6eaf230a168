"""Models in plain torch, to train, measure and test with; they know nothing of graphs."""

from stepgraph.models.attention import LatentShape
from stepgraph.models.gpt import GPT, GPTConfig
from stepgraph.models.hybrid import Hybrid, HybridConfig
from stepgraph.models.mamba import Mamba, MambaConfig
from stepgraph.models.moe import MoEConfig, MoEGPT, MoEOutput
from stepgraph.models.vision import (
    VisionConfig,
    VisionEncoder,
    VisionLanguageConfig,
    VisionLanguageModel,
    VisionMoE,
    VisionMoEConfig,
)

__all__ = [
    "GPT",
    "GPTConfig",
    "Hybrid",
    "HybridConfig",
    "LatentShape",
    "Mamba",
    "MambaConfig",
    "MoEConfig",
    "MoEGPT",
    "MoEOutput",
    "VisionConfig",
    "VisionEncoder",
    "VisionLanguageConfig",
    "VisionLanguageModel",
    "VisionMoE",
    "VisionMoEConfig",
]
