"""English around values: `1 call` and `2 calls`, `a str` and `an int`.

Counts and the names of types come from programs, so a message cannot know their number or their sound beforehand.

Example:
    >>> f"{counted(1, 'calls')} with {with_article(int)}"
    '1 call with an int'
"""

from __future__ import annotations

import re

__all__ = ["counted", "quantities", "singular", "with_article"]

_ENDINGS = ((r"ies$", "y"), (r"(ss|sh|ch|x)es$", r"\1"), (r"(?<!s)s$", ""))
_LIKE_VOWELS = re.compile(
    r"[AEFHILMNORSX](?:[A-Z0-9]|$)"  # letters that are spelled out: an LSTM, an SGD
    r"|[aeioAEIO](?![A-Z0-9])(?!ne\b|uro)"
    r"|[uU](?![A-Z0-9]|i|ni|se|sa|ti|ri)"
    r"|ndarray|nn\.|8|1[18](?!\d)"
)


def counted(count: int, names: str, name: str | None = None) -> str:
    """Return a count and what is counted.

    Args:
        count: How many.
        names: The words for several, or for none, such as `calls` or `kinds of calls are equal`.
        name: The words for one, where it is not enough to take the plural off the last word of `names`.

    Example:
        >>> counted(1, "entries"), counted(2, "modules get graphs", "module gets graphs")
        ('1 entry', '2 modules get graphs')
    """
    return f"{count} {names if count != 1 else singular(names) if name is None else name}"


def singular(names: str) -> str:
    """Return the singular of a regular plural; of several words, that of the last one."""
    for ending, instead in _ENDINGS:
        shorter, found = re.subn(ending, instead, names)
        if found:
            return shorter
    return names


def quantities(**counts: int | None) -> str:
    """Join counts with their names, given in the plural; counts that are zero or unknown are left out."""
    return ", ".join(counted(count, name.replace("_", " ")) for name, count in counts.items() if count)


def with_article(name: str | type) -> str:
    """Return a name, or that of a type, with its article, by the sound of its beginning.

    Example:
        >>> with_article(int), with_article("LSTM"), with_article("UserDict")
        ('an int', 'an LSTM', 'a UserDict')
    """
    name = name.__name__ if isinstance(name, type) else name
    return f"{'an' if _LIKE_VOWELS.match(name) else 'a'} {name}"
