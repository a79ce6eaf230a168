"""The program of the script's process, run as a file: `python stepgraph/script/start.py REQUEST`.

`python -m` would put the current folder on `sys.path`, where a file `numpy.py` hides the library from torch. A file
puts its own folder there, which is removed before anything is imported. The folder of the script is added later, by
`main_module`. This file is `__main__` until the script takes its place.
"""

import sys


def main() -> None:
    """Import the copy of stepgraph that this file belongs to, and run the request."""
    if not sys.flags.safe_path:
        del sys.path[0]
    from pathlib import Path

    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)
    import stepgraph  # noqa: F401 (modules of the package come from the same place)

    del sys.path[0]
    if root not in sys.path:
        sys.path.append(root)
    from stepgraph.script import child

    child.main(sys.argv[1])


if __name__ == "__main__":
    main()
