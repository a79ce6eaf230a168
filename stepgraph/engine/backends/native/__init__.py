"""The part of stepgraph in C++, which is optional: see `library`."""
