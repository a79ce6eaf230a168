"""Optimizers and gradient scalers run inside a graph or between two graphs."""
