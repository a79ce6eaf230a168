"""The names that code looks up, gathered by whose code has them: which of them are looked for on what.

A name in a function may be about anything that the function is handed, and one in a method mostly about `self`. So
names in functions and methods are looked for on every object that is found. Those in the code of modules (`self.scale`,
`x.mean()`) are about the module itself, as a rule, and only sometimes about another one (`self.encoder.encode(x)`) or
about an object that the module is given. They are looked for elsewhere as well, but code that they lead to counts only
if it was seen to run.
"""

from __future__ import annotations

from collections.abc import Collection


class Names:
    """What all the code has named, so far."""

    def __init__(self) -> None:
        self.in_functions: set[str] = set()
        """Names in plain functions."""
        self.in_all: set[str] = set()
        """Names in all code but that of modules."""
        self.in_modules: set[str] = set()
        """Names in the code of modules."""
        self.anywhere: set[str] = set()
        """Names in all code that is followed, that of libraries included."""
        self.unread: set[str] = set()
        """Names that no code spells, but getters ask for."""
        self.anyones = (id(self.in_all), id(self.in_functions), id(self.in_modules))
        """Sets of names, by id, that are about one object as much as about another."""
        self._elsewhere: set[int] = set()

    def gather(self, names: set[str], into: Collection[set[str]], *, is_installed: bool = False) -> None:
        """Add the names in some code to sets of names; `is_installed`: it is a library's, and names little of ours."""
        self.anywhere |= names
        for gathered in into:
            is_theirs = gathered is self.in_all or gathered is self.in_functions
            if not is_theirs or not is_installed:
                gathered |= names

    def mark_elsewhere(self, *sets: set[str]) -> None:
        """These names are in code that runs where nobody looks on."""
        self._elsewhere |= set(map(id, sets)).difference(self.anyones)

    def is_elsewhere(self, *sets: set[str]) -> bool:
        """Whether one of these has names in such code."""
        return not self._elsewhere.isdisjoint(map(id, sets))
