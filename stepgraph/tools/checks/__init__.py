"""Find what keeps a script or a step from being captured, line by line."""
