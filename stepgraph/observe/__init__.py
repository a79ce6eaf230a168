"""What an eager call touches: objects, changes of its own, escaped tensors, NaN, DDP."""
