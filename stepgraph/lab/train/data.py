"""Training data by number: sample 17 is the same tensors in every run, so a position in the data is one integer.

A source is an endless sequence of samples, each computed from its number alone. `Batches` deals them out to ranks and
microbatches, and counts the samples that all ranks have consumed. A checkpoint saves that count.

| `kind` | source |
|---|---|
| `text` | a small text, made here from a few words and read byte by byte; the default |
| `synthetic` | random tokens |
| `tokens` | a file of token numbers, mapped into memory |
| `sft` | prompts and answers from a JSONL file (`instruction_data`) |

All samples of a run have one shape, because a graph has one: texts are cut, padded or packed to `seq_length`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from stepgraph.core.errors import InvalidArgument

Sample = dict[str, Tensor]
_TOKEN_BYTES = {"uint16": 2, "int32": 4}
_TEXT_BYTES, _PIECE = 1 << 16, 1 << 24
_WORDS = tuple(
    "the a every one small quiet graph step stream kernel loss batch layer model token waits learns replays records "  # noqa: SIM905
    "moves keeps follows again before after quickly slowly without with and then because while".split()
)


class Source(Protocol):
    """An endless sequence of samples."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data, with their content: a resumed run must have the same."""

    def sample(self, number: int) -> Sample:
        """Return the tensors of one sample, without a batch dimension."""


class SyntheticTokens:
    """Random tokens, a new sequence for each number."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int) -> None:
        self._vocab_size, self._seq_length, self._seed = vocab_size, seq_length, seed
        self.fingerprint = f"synthetic {vocab_size} {seq_length} {seed}"

    def sample(self, number: int) -> Sample:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        return shifted(torch.randint(self._vocab_size, (self._seq_length + 1,), generator=generator))


class TokenWindows:
    """Windows of a long row of tokens, in a new random order in each epoch."""

    def __init__(self, tokens: Tensor, seq_length: int, seed: int, name: str) -> None:
        self._tokens, self._seq_length = tokens, seq_length
        self._count = (tokens.numel() - 1) // seq_length
        if self._count < 1:
            raise InvalidArgument(
                f"{name} has {tokens.numel()} tokens, and one sample needs {seq_length + 1}",
                rule="data",
                why="each sample is a window of seq_length tokens and the one after it.",
                fix="use a longer text, or lower model.seq_length.",
            )
        self._order = Shuffled(self._count, seed)
        self._described = f"{name} {tokens.numel()} {seq_length} {seed}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """With the digest of all tokens: reads a whole file, when the first checkpoint is saved or loaded."""
        return f"{self._described} {digest_of_tokens(self._tokens)}"

    def sample(self, number: int) -> Sample:
        start = self._order[number] * self._seq_length
        return shifted(self._tokens[start : start + self._seq_length + 1].long())


def digest_of_tokens(tokens: Tensor) -> str:
    """The SHA-256 of the memory of a row of tokens, or of a file that is mapped there, read piece by piece."""
    found, size = hashlib.sha256(), tokens.numel() * tokens.element_size()
    for start in range(0, size, _PIECE):
        piece = ctypes.c_char * min(_PIECE, size - start)
        found.update(piece.from_address(tokens.data_ptr() + start))
    return found.hexdigest()


class Shuffled:
    """The numbers 0 to `count - 1` in a random order, again and again, in a new order each time."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._epoch = functools.lru_cache(maxsize=2)(functools.partial(_permutation, count, seed))

    def __getitem__(self, number: int) -> int:
        epoch, place = divmod(number, self._count)
        return int(self._epoch(epoch)[place])


def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def shifted(tokens: Tensor) -> Sample:
    """Split a row of tokens into inputs and the tokens that follow them."""
    return {"tokens": tokens[:-1], "targets": tokens[1:]}


def made_text(seed: int, num_bytes: int = _TEXT_BYTES) -> bytes:
    """Make a text with something to learn in it: sentences of known words, with repeated pairs."""
    draw = random.Random(seed)
    pairs = [f"{draw.choice(_WORDS)} {draw.choice(_WORDS)}" for _ in range(40)]
    pieces: list[str] = []
    length = 0
    while length < num_bytes:
        sentence = " ".join(draw.choice(pairs) for _ in range(draw.randint(2, 5))) + ". "
        pieces.append(sentence)
        length += len(sentence)
    return "".join(pieces).encode()[:num_bytes]


def text_tokens(text: bytes, vocab_size: int) -> Tensor:
    """Read a text byte by byte; a vocabulary of fewer than 256 tokens folds the bytes."""
    return torch.tensor(list(text), dtype=torch.int32) % vocab_size


def mapped_tokens(path: Path, dtype: str, vocab_size: int) -> Tensor:
    """Map a file of token numbers, `uint16` or `int32`, into memory."""
    if dtype not in _TOKEN_BYTES or not path.is_file() or path.stat().st_size % _TOKEN_BYTES.get(dtype, 1):
        what = "is not a file of tokens" if dtype in _TOKEN_BYTES else f"cannot be read as {dtype}"
        raise InvalidArgument(
            f"{path} {what}",
            rule="data",
            why="it must hold token numbers only, each a uint16 or an int32 in the byte order of this machine.",
            fix="write it with numpy.array(tokens, dtype='int32').tofile(path).",
        )
    count = path.stat().st_size // _TOKEN_BYTES[dtype]
    tokens = torch.from_file(str(path), shared=False, size=count, dtype=getattr(torch, dtype))
    first = tokens[: 1 << 20].int()
    if count and not 0 <= int(first.min()) <= int(first.max()) < vocab_size:
        raise InvalidArgument(
            f"{path} has tokens from {int(first.min())} to {int(first.max())}, and the vocabulary has {vocab_size}",
            rule="data",
            why="a token outside the vocabulary has no embedding.",
            fix=f"set model.vocab_size to at least {int(first.max()) + 1}, or name the type of the file's numbers.",
        )
    return tokens


class Batches:
    """Deals samples out to ranks and microbatches, and counts those that all ranks have consumed."""

    def __init__(
        self, source: Source, micro_batch_size: int, num_microbatches: int, data_rank: int = 0, data_size: int = 1
    ) -> None:
        self._source, self._size, self._num = source, micro_batch_size, num_microbatches
        self._rank, self._ranks = data_rank, data_size
        self.position = 0

    def next_iteration(self, device: torch.device) -> list[Sample]:
        """Return the microbatches of this rank's next iteration."""
        found = [self._microbatch(index) for index in range(self._num)]
        self.skip_iteration()
        return [{name: _moved(tensor, device) for name, tensor in batch.items()} for batch in found]

    def skip_iteration(self) -> None:
        """Consume the samples of an iteration without reading them."""
        self.position += self._num * self._ranks * self._size

    def _microbatch(self, index: int) -> Sample:
        start = self.position + (index * self._ranks + self._rank) * self._size
        samples = [self._source.sample(start + place) for place in range(self._size)]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "source": self._source.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position; refuse one of other data."""
        if state["source"] != self._source.fingerprint:
            raise InvalidArgument(
                f"the checkpoint was at a position in other data: {state['source']}",
                rule="data",
                details=[f"this run reads  {self._source.fingerprint}"],
                why="the position is a number of samples, which other data count differently.",
                fix="resume with the dataset, model.seq_length and seed of the first run, or start anew.",
            )
        if type(state["position"]) is not int or state["position"] < 0:
            raise ValueError(f"{state['position']!r:.40} is not a number of samples")
        self.position = state["position"]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
