"""Random state under replay: named states, recomputation, and what may not be drawn from."""
