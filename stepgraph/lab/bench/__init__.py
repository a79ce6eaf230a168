"""Measurements of the library on small, self-contained workloads."""
