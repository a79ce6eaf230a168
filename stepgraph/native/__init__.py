"""The one part of stepgraph in C++, for those who build it: see `library`."""
