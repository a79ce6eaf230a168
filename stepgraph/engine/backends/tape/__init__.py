"""The CPU tape records and replays work without a GPU."""
