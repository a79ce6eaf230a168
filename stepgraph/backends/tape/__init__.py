"""The CPU tape: recording and replaying without a GPU."""
