"""Graphs read and write static memory: inputs, results, tensors lent to callers, and a pool that shares them."""
