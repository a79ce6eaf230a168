"""The commands of the command line, one module each. `cli.py` lists them; none imports torch before it runs."""
