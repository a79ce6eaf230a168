"""After a failed capture a step goes on with graphs for its modules. Loaded when a capture fails."""
