"""Whole training steps: `stepgraph.capture`, and Megatron's full iteration."""
