"""Each guard compares one part of the program with what a graph was recorded with."""
