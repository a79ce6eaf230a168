"""Record one forward and its backward as graphs, and replay them under autograd."""
