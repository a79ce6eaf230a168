"""Graphs for the layers of a Megatron training, captured ahead of time."""
