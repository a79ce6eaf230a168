"""A verdict before any work is done: would graphs win here, which ones, and at what cost in memory."""
