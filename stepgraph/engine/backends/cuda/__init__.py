"""The CUDA backend records and replays work on a GPU."""
