"""One forward and its backward as graphs: recording, replaying under autograd, sharing memory."""
