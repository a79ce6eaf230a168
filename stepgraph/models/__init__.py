"""Models in plain torch, to train, measure and test with; they know nothing of graphs."""

from stepgraph.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
