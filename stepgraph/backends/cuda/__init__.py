"""CUDA graphs: recording and replaying on a GPU."""
