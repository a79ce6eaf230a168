"""The modules room captures parts of a model while it trains: `graph_modules`."""
