"""Prove that a graphed program computes what the eager one computes: verify and its probes."""
