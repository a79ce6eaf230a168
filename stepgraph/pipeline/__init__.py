"""Graphs for the stages of `torch.distributed.pipelining`."""
