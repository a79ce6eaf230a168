"""Explains an error, a CUDA code, a rule id or a symptom from the catalogue: cause, fix, and page.

A message of CUDA names neither the line nor the remedy, and a pasted log has many messages. Five kinds of evidence lead
from a text to entries of the catalogue, from the surest to the weakest:

| evidence | example |
|---|---|
| the id of a rule, typed or as an error of stepgraph prints it | `host-read`, `...   [host-read]` |
| a piece of a message of torch, Megatron or Transformer Engine | `param_groups' capturable is False` |
| a message of CUDA, or a code or name beside the word CUDA | `capturing stream has unjoined work`, `CUDA error 904` |
| words of a description, if the text is no error message | `hangs at exit` |
| an entry that another one found names as a possible cause | |

Of two pieces of one kind the first in the text counts more: later errors of a log often follow from the first one.
Pieces are compared without regard to case, colours, line breaks, and prefixes of ranks (`[rank0]:`). Nothing here
imports torch.

Example:
    >>> explain("RuntimeError: CUDA error: capturing stream has unjoined work").rules
    ('unjoined-stream',)
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stepgraph.core import catalogue
from stepgraph.core.catalogue import Entry

__all__ = ["Candidate", "Evidence", "Explanation", "explain"]

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^(?:\[(?:\w*rank ?)?\d+\]:?|\d{1,5}:) ", re.MULTILINE)
_SHORTEST_PIECE = 12
"""Shorter pieces (`MAGMA`) say enough about a failed capture, and too little about any text."""
_IDS = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)*)\]")
_CUDA_NUMBER = re.compile(
    r"\bcuda(?:rt)?(?: driver| runtime)?[ _]?(?:api )?(?:error|failure)(?: code)?[ :=(#]*(\d{1,3})\b"
    r"|\breturning (\d{1,3}) \(cuda_error"
)
_ENDINGS = re.compile(r"(?<=\w{4})(?:ing|ed|es|er|s|e)$")
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Warning)\b\s*:|Traceback|\berror:", re.MULTILINE)
_MOST_WORDS = 30
"""A longer text is a log, and would match descriptions by chance."""
_MOST_CANDIDATES = 5
_LONGEST_NAME = 60


class Evidence(enum.IntEnum):
    """What led to an entry; a smaller number is surer."""

    RULE = 0
    MESSAGE = 1
    CUDA = 2
    WORDS = 3
    RELATED = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry of the catalogue that may explain the text."""

    entry: Entry
    evidence: Evidence
    matched: str
    """The piece that was found in the text, or the id of the entry that names this one as related."""
    line: int
    """The line of the text in which it begins, counted from 1."""

    @property
    def reason(self) -> str:
        """What led to it, in words."""
        if self.evidence is Evidence.RELATED:
            return f"another possible cause beside {self.matched}"
        names = ("rule id", "message", "CUDA", "words")
        return f"{names[self.evidence]} `{self.matched}`, line {self.line}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a text means: the candidates, the likeliest first, or for an unknown one the nearest rule ids.

    Example:
        >>> explain("901").found
        True
    """

    candidates: tuple[Candidate, ...]
    nearest: tuple[str, ...] = ()
    """Ids that a misspelt one may stand for; only where nothing was found."""

    @property
    def found(self) -> bool:
        """True if the catalogue knows the text."""
        return bool(self.candidates)

    @property
    def rules(self) -> tuple[str, ...]:
        """The ids of all candidates."""
        return tuple(candidate.entry.id for candidate in self.candidates)

    def __str__(self) -> str:
        if not self.found:
            near = f" Did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
            return f"not in the catalogue of stepgraph.{near}"
        parts = []
        for candidate in self.candidates:
            entry = candidate.entry
            why, fix = entry.reason_and_fix()
            lines = [f"{entry.id}   ({candidate.reason})", f"What: {entry.what}.", f"Why: {why}", f"Fix: {fix}"]
            parts.append("\n".join([*lines, f"Docs: {entry.page}"]))
        return "\n\n".join(parts)


def explain(text: str) -> Explanation:
    """Explain an error message, a whole log, a CUDA code or name, a rule id, or a symptom in words.

    Example:
        >>> stepgraph.explain("the process hangs at exit").rules
        ('hang-at-exit',)
    """
    alone = re.sub(r"[\[\]`'\"]", "", text.strip()).strip()
    by_id = {entry.id: entry for entry in catalogue.entries()}
    typed = by_id.get(alone.replace("_", "-").lower())
    if typed is not None:
        return Explanation(_with_related([Candidate(typed, Evidence.RULE, typed.id, 1)]))
    log = _Log(text)
    found = [*_rules_in(log, by_id), *_pieces_in(log), *_codes_in(log, alone)]
    if not found:
        found = _described(text)
    first: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda each: (each.evidence, each.line)):
        first.setdefault(candidate.entry.id, candidate)
    if first:
        return Explanation(_with_related(list(first.values())[:_MOST_CANDIDATES]))
    is_name = len(alone.split()) == 1 and len(alone) <= _LONGEST_NAME
    return Explanation(
        (), tuple(difflib.get_close_matches(alone.replace("_", "-").lower(), by_id, 3)) if is_name else ()
    )


class _Log:
    """A text in one line: folded, without colours, prefixes and line breaks. Made for logs of some megabytes."""

    def __init__(self, text: str) -> None:
        plain = _COLOURS.sub("", text) if "\x1b" in text else text
        self.plain = _PREFIX.sub("", plain)
        self.text = _folded(self.plain)

    def line_of(self, place: int) -> int:
        """The line of the text that has this place of the folded one, counted from 1."""
        before = place - self.text.count(" ", 0, place)  # what is no space stands in both, in the same order
        for number, line in enumerate(self.plain.split("\n"), 1):
            before -= len("".join(line.split()))
            if before < 0:
                return number
        return 1


def _folded(text: str) -> str:
    return " ".join(text.replace("’", "'").lower().split())


def _rules_in(log: _Log, by_id: dict[str, Entry]) -> Iterator[Candidate]:
    """Rule ids in brackets: an id of one word only where an error has it, behind three spaces."""
    for match in _IDS.finditer(log.plain):
        entry, start = by_id.get(match[1]), match.start()
        if entry is not None and ("-" in match[1] or log.plain[start - 3 : start] == "   "):
            yield Candidate(entry, Evidence.RULE, match[1], log.plain.count("\n", 0, start) + 1)


def _pieces_in(log: _Log) -> Iterator[Candidate]:
    """Pieces of messages; those of an entry with a CUDA code are CUDA's."""
    for entry in catalogue.entries():
        for pieces, is_peer in ((entry.texts, False), (entry.peers, True)):
            for piece in pieces:
                place = log.text.find(_folded(piece)) if len(piece) >= _SHORTEST_PIECE else -1
                if place >= 0:
                    evidence = Evidence.CUDA if entry.code is not None and not is_peer else Evidence.MESSAGE
                    yield Candidate(entry, evidence, piece, log.line_of(place))


def _codes_in(log: _Log, alone: str) -> Iterator[Candidate]:
    """Codes and names of CUDA: a code alone, or beside the word CUDA; a name of the runtime or of the driver."""
    numbers = [(match[1] or match[2], match) for match in _CUDA_NUMBER.finditer(log.text)]
    for entry in catalogue.entries():
        if entry.code is None:
            continue
        if alone == str(entry.code):
            yield Candidate(entry, Evidence.CUDA, alone, 1)
        for number, match in numbers:
            if number == str(entry.code):
                yield Candidate(entry, Evidence.CUDA, match[0], log.line_of(match.start()))
        for name in (entry.name, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", entry.name).upper()):  # CUDA_ERROR_CAPTURED_EVENT
            place = log.text.find(name.lower())
            if place >= 0:
                yield Candidate(entry, Evidence.CUDA, name, log.line_of(place))


def _described(text: str) -> list[Candidate]:
    """Entries whose words are all in a short description; those with most words first."""
    if len(text.split(None, _MOST_WORDS)) > _MOST_WORDS or _ERROR.search(text):
        return []
    words = {_stem(word): word for word in re.findall(r"[a-z0-9_]+", text.lower())}
    found = []
    for entry in catalogue.entries():
        hits = [_hits(phrase, words) for phrase in entry.words]
        most = max(hits, key=len, default=())
        if most:
            found.append(Candidate(entry, Evidence.WORDS, " ".join(most), 1))
    return sorted(found, key=lambda each: -len(each.matched.split()))


def _hits(phrase: str, words: dict[str, str]) -> tuple[str, ...]:
    """The words that a phrase found, one for each of its places, or nothing."""
    places = [[_stem(word) for word in place.split("|")] for place in phrase.split()]
    found = [next((words[stem] for stem in place if stem in words), "") for place in places]
    return tuple(found) if all(found) else ()


def _stem(word: str) -> str:
    """A word without its endings, so that `hangs` is `hang` and `captured` is `capture`."""
    shorter = _ENDINGS.sub("", word)
    return word if shorter == word else _stem(shorter)


def _with_related(found: list[Candidate]) -> tuple[Candidate, ...]:
    """Add what the likeliest candidate names as another possible cause. An error of stepgraph says its own."""
    if found[0].evidence is Evidence.RULE:
        return tuple(found)
    known = {candidate.entry.id for candidate in found}
    first = found[0]
    more = [
        Candidate(catalogue.entry(id), Evidence.RELATED, first.entry.id, first.line)
        for id in first.entry.related
        if id not in known
    ]
    return (*found, *more)
