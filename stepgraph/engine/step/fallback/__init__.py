"""What joins the engines: a step whose capture fails goes on with graphs for its modules."""
