"""The observe room sees what an eager call touches: objects, its own changes, escaped tensors, NaN, DDP."""
