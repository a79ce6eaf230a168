"""Run a user's own script, unchanged, in a process of its own, with a probe that watches its training steps."""
