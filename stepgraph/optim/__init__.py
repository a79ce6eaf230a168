"""Optimizers and gradient scalers under capture."""
