"""Random training programs with random events between their calls, each compared with eager bit for bit.

`program` draws a program from a seed; `source` writes it as Python; `runtime` has what every program uses; `execute`
runs it with an engine and compares; `batch` runs many programs, each in a process of its own; `shrink` makes a program
that fails smaller. `python -m tests.generated --help` lists the options of the command.
"""
