"""The configuration of a training run, and the rules that it must keep. Imports no torch."""
