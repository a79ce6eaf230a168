"""Starts a program of stepgraph in a process of its own, run as a file: `python start.py MODULE ...`.

`python -m` would put the current folder on `sys.path`, where a file `numpy.py` hides the library from torch. A file
puts its own folder there, which is removed before anything is imported. The module's `main` gets the other arguments.
This file is `__main__` until a script takes its place, whose folder `main_module` adds.
"""

import sys


def main() -> None:
    """Import the copy of stepgraph that this file belongs to, and run the module."""
    if not sys.flags.safe_path:
        del sys.path[0]
    import importlib
    from pathlib import Path

    root = str(Path(__file__).parents[3])
    sys.path.insert(0, root)
    import stepgraph  # noqa: F401 (modules of the package come from the same place)

    del sys.path[0]
    if root not in sys.path:
        sys.path.append(root)
    importlib.import_module(sys.argv[1]).main(*sys.argv[2:])


if __name__ == "__main__":
    main()
