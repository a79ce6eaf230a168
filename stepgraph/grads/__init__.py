"""Gradients under replay: where they are stored, and who adds to them."""
