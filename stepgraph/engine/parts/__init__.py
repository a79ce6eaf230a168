"""Graphs for parts of a step: `modules` from their calls, `callables` from samples, `stages` from a schedule."""
