"""What trains and measures: reference models, recipes, the training loop, benchmarks."""
