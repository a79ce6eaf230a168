"""The pair room records one forward and its backward as graphs, and replays them under autograd."""
