"""What capture must protect and replay must refresh: gradients, optimizers, modules, random state."""
