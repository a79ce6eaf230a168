"""`python -m stepgraph`: the command line."""

from stepgraph.commands.cli import main

main()
