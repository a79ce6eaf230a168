"""`python -m stepgraph`: the command line."""

from stepgraph.cli import main

main()
