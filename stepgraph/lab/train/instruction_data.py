"""Prompts and answers for supervised fine-tuning: the loss is on the answers only, and every sample has one shape.

Each line of a JSONL file is one example, in any of these forms:

    {"prompt": "2 + 2 =", "completion": " 4"}            also "input"/"output", "instruction"/"response"
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt_tokens": [5, 9], "completion_tokens": [7]}   tokenised before

Text is read byte by byte. The targets of prompt tokens are -100, which the loss leaves out; the model is trained to
begin the answer and to end it (token 0).

An example that is longer than a sequence is cut, with one warning that counts such lines: a prompt loses its beginning,
an answer that is too long by itself its end. A line without an answer is refused: it would train the model to say
nothing.

*Padded*: one example a sample, filled up with token 0 and targets of -100. *Packed*: as many whole examples as fit.
`cu_seqlens` says where they begin. It is a tensor of fixed length whose unused end repeats `seq_length`: another number
of examples is other values, not another shape, so one graph serves all samples.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepgraph.core.errors import InvalidArgument
from stepgraph.core.frames import warn_user
from stepgraph.lab.train.data import Sample, Shuffled

IGNORED = -100
"""The target that a loss leaves out."""
END = 0
_PAIRS = (("prompt", "completion"), ("input", "output"), ("instruction", "response"))
_FIX = '{"prompt": "2 + 2 =", "completion": " 4"}, or "messages", or "prompt_tokens" and "completion_tokens".'
_MADE = 64
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of a prompt followed by its answer; targets are shifted, those of the prompt are -100."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


def read_examples(path: Path, vocab_size: int, seq_length: int) -> list[Example]:
    """Read all examples of a JSONL file; the first bad line is refused by its number."""
    if not path.is_file():
        raise InvalidArgument(
            f"{path} is not a file",
            rule="data",
            why="it names the examples to train on.",
            fix="dataset.data_path=FILE.",
        )
    found = []
    cut: list[int] = []
    """Lines of examples that are longer than a sequence."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                prompt, answer = _parts(json.loads(line), vocab_size)
                if not answer:
                    raise ValueError("the answer is empty")
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(
                    f"{path}, line {number}: not an example ({error})",
                    rule="data",
                    why="each line must be a JSON object with a prompt and an answer.",
                    fix=f"write {_FIX}",
                ) from error
            if len(prompt) + len(answer) > seq_length:
                cut.append(number)
            found.append(example_of(prompt, answer, seq_length))
    if cut:
        _warn_of_cut(path, cut, len(found), seq_length)
    if not found:
        raise InvalidArgument(
            f"{path} has no examples", rule="data", why="an empty file trains nothing.", fix=f"write {_FIX}"
        )
    return found


def _warn_of_cut(path: Path, lines: Sequence[int], count: int, seq_length: int) -> None:
    named = ", ".join(map(str, lines[:_MAX_NAMED])) + (", ..." if len(lines) > _MAX_NAMED else "")
    warn_user(
        f"{path}: {len(lines)} of {count} examples are longer than {seq_length} tokens and are cut   [data]\n"
        f"  lines {named}\n"
        "Why: all samples have one length. A prompt loses its beginning, an answer that is too long its end.\n"
        "Fix: a larger model.seq_length, or shorter examples."
    )


def made_examples(vocab_size: int, seq_length: int) -> list[Example]:
    """Sums of small numbers, for a run without a file."""
    sums = [(f"{i} + {i * 7 % 10} = ", str(i + i * 7 % 10)) for i in range(_MADE)]
    return [example_of(_text(p, vocab_size), _text(a, vocab_size), seq_length) for p, a in sums]


def example_of(prompt: Sequence[int], answer: Sequence[int], seq_length: int) -> Example:
    """Join a prompt and its answer; a long prompt loses its beginning, a long answer its end."""
    answer = [*answer, END][:seq_length]
    prompt = list(prompt)[max(0, len(prompt) + len(answer) - 1 - seq_length) :] or [END]
    tokens = [*prompt, *answer]
    targets = [IGNORED] * (len(prompt) - 1) + answer
    return Example(tuple(tokens[:-1])[:seq_length], tuple(targets)[:seq_length])


def _text(text: str, vocab_size: int) -> list[int]:
    return [byte % vocab_size for byte in text.encode()]


def _parts(row: Any, vocab_size: int) -> tuple[list[int], list[int]]:
    if not isinstance(row, dict):
        raise ValueError("the line is not a JSON object")
    if "prompt_tokens" in row:
        return _tokens(row, "prompt_tokens", vocab_size), _tokens(row, "completion_tokens", vocab_size)
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise ValueError('"messages" is not a list of messages')
        *before, last = messages
        if _string(last, "role") != "assistant":
            raise ValueError("the last message is not the assistant's")
        prompt = "".join(f"{_string(message, 'role')}: {_string(message, 'content')}\n" for message in before)
        return _text(f"{prompt}assistant: ", vocab_size), _text(_string(last, "content"), vocab_size)
    for prompt_name, answer_name in _PAIRS:
        if prompt_name in row and answer_name in row:
            return _text(_string(row, prompt_name), vocab_size), _text(_string(row, answer_name), vocab_size)
    raise ValueError("no prompt and answer")


def _string(row: dict[str, Any], name: str) -> str:
    if not isinstance(row.get(name), str):
        raise ValueError(f'"{name}" is {json.dumps(row.get(name))[:40]}, not a text')
    return str(row[name])


def _tokens(row: dict[str, Any], name: str, vocab_size: int) -> list[int]:
    found = row.get(name)
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise ValueError(f'"{name}" is {json.dumps(found)[:40]}, not a list of token numbers')
    outside = [token for token in found if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
    return found


class Instructions:
    """Examples as samples of one shape, padded, or packed with `cu_seqlens`."""

    def __init__(
        self,
        examples: Sequence[Example],
        seq_length: int,
        seed: int,
        *,
        packed: bool,
        name: str,
        max_packed: int | None = None,
    ) -> None:
        self._seq_length, self._packed = seq_length, packed
        limit = max_packed or len(examples)
        self._rows = pack(examples, seq_length, limit) if packed else [[example] for example in examples]
        self._order = Shuffled(len(self._rows), seed)
        self._longest = max_packed or max(len(row) for row in self._rows)
        self._described = f"{name} {len(examples)} {seq_length} {seed} {'packed' if packed else 'padded'}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """With the digest of all samples."""
        found = hashlib.sha256()
        for row in self._rows:
            found.update(repr([(example.tokens, example.targets) for example in row]).encode())
        return f"{self._described} {found.hexdigest()}"

    def sample(self, number: int) -> Sample:
        row = self._rows[self._order[number]]
        tokens = _filled((token for example in row for token in example.tokens), END, self._seq_length)
        targets = _filled((target for example in row for target in example.targets), IGNORED, self._seq_length)
        if not self._packed:
            return {"tokens": tokens, "targets": targets}
        ends = [0]
        for example in row:
            ends.append(ends[-1] + len(example.tokens))
        # the padding behind the last example is one more segment, so that nothing attends to it
        bounds = _filled(ends, self._seq_length, self._longest + 2).int()
        return {"tokens": tokens, "targets": targets, "cu_seqlens": bounds}


def pack(examples: Iterable[Example], seq_length: int, max_packed: int) -> list[list[Example]]:
    """Put whole examples into rows, each into the first row with room for it, the longest first."""
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda one: -len(one.tokens)):
        size = len(example.tokens)
        fits = (index for index, left in enumerate(room) if left >= size and len(rows[index]) < max_packed)
        place = next(fits, None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(seq_length)
        rows[place].append(example)
        room[place] -= size
    return rows


def _filled(values: Iterable[int], value: int, size: int) -> torch.Tensor:
    given = list(values)[:size]
    return torch.tensor(given + [value] * (size - len(given)), dtype=torch.int64)
