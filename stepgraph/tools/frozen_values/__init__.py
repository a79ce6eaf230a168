"""Which numbers a graph has baked in: it is recorded again with one value moved, and the two logs are compared."""
