"""Replays draw the random numbers that eager would draw: named states, recomputation, refusals."""
