"""Models in plain torch, to train, measure and test with; they know nothing of graphs."""

from stepgraph.lab.models.attention import LatentShape
from stepgraph.lab.models.gpt import GPT, GPTConfig
from stepgraph.lab.models.hybrid import Hybrid, HybridConfig
from stepgraph.lab.models.mamba import Mamba, MambaConfig
from stepgraph.lab.models.moe import MoEConfig, MoEGPT, MoEOutput
from stepgraph.lab.models.vision import (
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
