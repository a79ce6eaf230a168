"""Graphs for parts of a model, captured while it trains: `graph_modules` and `CudaGraphManager`."""
