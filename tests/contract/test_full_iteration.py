"""Whole iterations by Megatron's contract: all microbatches in one graph, equal to eager bit for bit."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from tests.harness import Program, assert_same_history, snapshot

VOCABULARY, HIDDEN = 16, 8


# -- an eager forward_backward_func, as a training framework has it


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
) -> list[dict[str, torch.Tensor]]:
    """One chunk: forward and backward of each microbatch in turn, gradients added up."""
    (chunk,) = model if isinstance(model, list) else [model]
    (iterator,) = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    stored = []
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(iterator, chunk)
        loss, reduced = loss_func(output)
        stored.append(reduced)
        if not forward_only:
            (loss / num_microbatches).backward()
    return stored


def forward_backward_interleaved(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: list[Any],
    model: list[nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    **rest: Any,
) -> list[dict[str, torch.Tensor]]:
    """Two chunks: all forwards of the first, then of the second, then the backwards, last microbatch first."""
    hidden = [forward_step_func(data_iterator[0], model[0])[0] for _ in range(num_microbatches)]
    stored, losses = [], []
    for received in hidden:
        output, loss_func = forward_step_func(data_iterator[1], model[1], received)
        loss, reduced = loss_func(output)
        stored.append(reduced)
        losses.append(loss / num_microbatches)
    if not forward_only:
        for loss in reversed(losses):
            loss.backward()
    return stored


class First(nn.Module):
    """Embeds tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.dropout = nn.Dropout(0.25)

    def forward(self, tokens: torch.Tensor, received: torch.Tensor | None = None) -> torch.Tensor:
        return self.dropout(self.embedding(tokens))


class Last(nn.Module):
    """Adds this chunk's own tokens to what the chunk before hands on, and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.dropout = nn.Dropout(0.25)

    def forward(self, tokens: torch.Tensor, received: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(self.dropout(torch.tanh(hidden if received is None else hidden + received)))


def forward_step(data_iterator: Iterator[Any], model: nn.Module, received: torch.Tensor | None = None) -> Any:
    """Takes one microbatch; returns the output and the function that makes a loss of it."""
    batch = next(data_iterator)
    device = next(model.parameters()).device
    tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = F.cross_entropy(output.flatten(0, 1), labels.flatten())
        return loss, {"lm loss": loss.detach().clone()}

    return model(tokens, received), loss_func


class Source:
    """An endless data iterator with random numbers of its own; the sequence length may be changed at any time."""

    def __init__(self, seed: int, place: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.place = place
        self.seq_length = 6
        self.num_read = 0

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        self.num_read += 1
        drawn = torch.randint(VOCABULARY, (2, 2, self.seq_length), generator=self.generator)
        return {"tokens": drawn[0].to(self.place), "labels": drawn[1].to(self.place)}


# -- a training program, eager or wrapped


@dataclass
class Training:
    """Chunks, their optimizer and their data."""

    chunks: list[nn.Module]
    optimizer: torch.optim.Optimizer
    sources: list[Source]

    @property
    def program(self) -> Program:
        return Program(lambda: None, [], self.chunks, [self.optimizer])


def build(device: torch.device, num_chunks: int = 1, *, fused: bool = False, on_device: bool = False) -> Training:
    torch.manual_seed(7)
    chunks: list[nn.Module] = [Last()] if num_chunks == 1 else [First(), Last()]
    chunks = [chunk.to(device) for chunk in chunks]
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=fused)
    place = device if on_device else torch.device("cpu")
    return Training(chunks, optimizer, [Source(i, place) for i in range(num_chunks)])


class Call(NamedTuple):
    """One iteration."""

    num_microbatches: int = 3
    seq_length: int = 6
    forward_only: bool = False


TRAIN, VALIDATE = Call(), Call(forward_only=True)
BYTES_OF_THREE = 3 * 2 * 2 * 6 * 8
"""Of three microbatches: tensors, samples, tokens, bytes of each."""


def iterate(made: Training, function: Callable[..., Any], call: Call, *, steps_inside: bool = False) -> Any:
    """One iteration as a training loop makes it; with `steps_inside` the function zeroes and steps by itself."""
    for source in made.sources:
        source.seq_length = call.seq_length
    single = len(made.chunks) == 1
    for chunk in made.chunks:
        chunk.train(not call.forward_only)
    own_steps = not steps_inside and not call.forward_only
    if own_steps:
        made.optimizer.zero_grad()
    with torch.set_grad_enabled(not call.forward_only):
        results = function(
            forward_step_func=forward_step,
            data_iterator=made.sources[0] if single else list(made.sources),
            model=made.chunks[0] if single else list(made.chunks),
            num_microbatches=call.num_microbatches,
            seq_length=call.seq_length,
            micro_batch_size=2,
            forward_only=call.forward_only,
        )
    if own_steps:
        made.optimizer.step()
    return results


def history_of(
    made: Training, function: Callable[..., Any], calls: Sequence[Call], device: torch.device, **kwargs: Any
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Results and a snapshot after each iteration."""
    torch.manual_seed(11)
    found = []
    for call in calls:
        results = iterate(made, function, call, **kwargs)
        leaves = [(key, loss.clone()) for microbatch in results for key, loss in microbatch.items()]
        found.append(([part for leaf in leaves for part in leaf], snapshot(made.program, device)))
    return found


def function_for(num_chunks: int) -> Callable[..., Any]:
    return forward_backward if num_chunks == 1 else forward_backward_interleaved


def assert_wrapped_equals_eager(
    device: torch.device, calls: Sequence[Call], num_chunks: int = 1, *, inside: bool = False, **options: Any
) -> stepgraph.Report:
    """Build the training twice from one seed and compare after every iteration."""
    kept = {key: options.pop(key) for key in ("fused", "on_device") if key in options}
    function = function_for(num_chunks)
    expected = history_of(build(device, num_chunks, **kept), function, calls, device)
    made = build(device, num_chunks, **kept)
    optimizers = [made.optimizer] if inside else []
    with stepgraph.FullCudaGraphWrapper(function, optimizers=optimizers, **options) as wrapped:
        received = history_of(made, wrapped, calls, device, steps_inside=inside)
        report = wrapped.report()
    assert_same_history(expected, received, "wrapped differs from eager")
    assert report.replays > 0, "nothing was replayed"
    assert [source.num_read for source in made.sources] == [sum(call.num_microbatches for call in calls)] * num_chunks
    return report


def wrap(function: Callable[..., Any], device: torch.device, **options: Any) -> stepgraph.FullCudaGraphWrapper:
    """For a function without a model, which would tell the device."""
    return stepgraph.FullCudaGraphWrapper(function, backend=stepgraph.backend_for(device), **options)


# -- equal to eager


@pytest.mark.parametrize("on_device", [False, True], ids=["host data", "device data"])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_wrapper_is_equal_to_eager(num_chunks: int, on_device: bool, device: torch.device) -> None:
    report = assert_wrapped_equals_eager(device, [TRAIN] * 6, num_chunks, on_device=on_device)
    assert report.eager_reasons == {"warm-up": 2}  # what the second one runs is compared with the capture
    assert (report.graphs, report.captures, report.replays) == (1, 1, 4)
    assert report.segments == 1
    assert report.optimizers == {}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_wrapper_optimizer_inside_is_equal_to_eager(num_chunks: int, fused: bool, device: torch.device) -> None:
    calls = [TRAIN, TRAIN, TRAIN, VALIDATE, VALIDATE, VALIDATE, TRAIN, TRAIN]
    report = assert_wrapped_equals_eager(device, calls, num_chunks, inside=True, fused=fused)
    assert report.optimizers["AdamW"].startswith("inside the graph" if fused else "eager, between graphs")
    assert [chain.count("AdamW.step") for chain in report.chains] == ([0, 0] if fused else [1, 0])


def test_wrapper_warms_up_as_often_as_configured(device: torch.device) -> None:
    report = assert_wrapped_equals_eager(device, [TRAIN] * 6, cuda_graph_warmup_steps=3)
    assert report.eager_reasons == {"warm-up": 3}
    assert report.replays == 3


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_wrapper_validation_never_replays_the_training_graph(num_chunks: int, device: torch.device) -> None:
    """Dropout is on in training and off in validation; each has a graph of its own, with the same shapes."""
    calls = [TRAIN, TRAIN, TRAIN, VALIDATE, VALIDATE, VALIDATE, TRAIN, VALIDATE, TRAIN, TRAIN]
    report = assert_wrapped_equals_eager(device, calls, num_chunks)
    assert report.eager_reasons == {"warm-up": 4}
    assert report.graphs == 2
    assert sorted("forward_only=True" in signature for signature in report.signatures) == [False, True]


def test_wrapper_inference_mode_shares_buffers_with_training(device: torch.device) -> None:
    def validating(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*, forward_only: bool, **rest: Any) -> Any:
            with torch.inference_mode(forward_only):
                return function(forward_only=forward_only, **rest)

        return call

    calls = [VALIDATE, VALIDATE, VALIDATE, TRAIN, TRAIN, TRAIN, TRAIN, VALIDATE, VALIDATE, TRAIN, TRAIN]
    expected = history_of(build(device), validating(forward_backward), calls, device)
    with stepgraph.FullCudaGraphWrapper(forward_backward) as wrapped:
        received = history_of(build(device), validating(wrapped), calls, device)
        report = wrapped.report()
    assert_same_history(expected, received, "wrapped differs from eager")
    assert report.static_bytes == BYTES_OF_THREE
    assert report.replays == 6


@pytest.mark.parametrize(
    "other", [Call(num_microbatches=2), Call(seq_length=4)], ids=["num_microbatches", "seq_length"]
)
def test_wrapper_changed_sizes_are_captured_as_another_graph(other: Call, device: torch.device) -> None:
    calls = [TRAIN, TRAIN, TRAIN, other, other, other, TRAIN, other, TRAIN]
    report = assert_wrapped_equals_eager(device, calls)
    assert report.eager_reasons == {"warm-up": 4}
    assert report.graphs == report.captures == 2
    assert report.recaptures == 0


def test_wrapper_changed_numbers_of_a_call_have_their_own_graph(device: torch.device) -> None:
    """The microbatches look the same; the number alone decides what is computed."""

    def scaled(*, data_iterator: Any, seq_length: int, micro_batch_size: int, **rest: Any) -> list[torch.Tensor]:
        return [next(data_iterator) * seq_length * micro_batch_size for _ in range(rest["num_microbatches"])]

    source = itertools.repeat(torch.ones(2, device=device))
    with wrap(scaled, device) as wrapped:
        for seq_length, micro_batch_size in [(3, 1), (3, 1), (3, 1), (5, 1), (5, 1), (3, 1), (3, 2), (3, 2), (5, 1)]:
            results = wrapped(
                forward_step_func=None,
                data_iterator=source,
                model=None,
                num_microbatches=2,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
            )
            assert [result.tolist() for result in results] == [[float(seq_length * micro_batch_size)] * 2] * 2
        assert wrapped.report().graphs == 3


def test_wrapper_extra_keywords_belong_to_the_signature(device: torch.device) -> None:
    def scaled(*, data_iterator: Any, factor: float, offset: torch.Tensor, **rest: Any) -> torch.Tensor:
        return next(data_iterator) * factor + offset

    source = itertools.repeat(torch.ones((), device=device))
    with wrap(scaled, device) as wrapped:
        for i, factor in enumerate([2.0, 2.0, 2.0, 3.0, 3.0, 2.0]):
            offset = torch.tensor(float(i), device=device)  # a tensor is copied in
            result = wrapped(
                forward_step_func=None,
                data_iterator=source,
                model=None,
                num_microbatches=1,
                factor=factor,
                offset=offset,
            )
            assert result.item() == factor + i
        assert wrapped.report().graphs == 2


# -- chunks and their buffers


def test_wrapper_later_chunks_do_not_overwrite_earlier_buffers(device: torch.device) -> None:
    """All chunks' microbatches have one shape, and are alive at once."""

    def gather(*, data_iterator: list[Any], num_microbatches: int, **rest: Any) -> list[torch.Tensor]:
        return [next(iterator) * 1 for _ in range(num_microbatches) for iterator in data_iterator]

    sources = [itertools.count(0.0), itertools.count(100.0), itertools.count(200.0)]
    iterators = [(torch.full((2,), value, device=device) for value in source) for source in sources]
    with wrap(gather, device) as wrapped:
        for call in range(4):
            results = wrapped(forward_step_func=None, data_iterator=iterators, model=None, num_microbatches=2)
            expected = [first + 2 * call + m for m in range(2) for first in (0, 100, 200)]
            assert [result[0].item() for result in results] == expected
        assert wrapped.report().replays == 3


def test_wrapper_chunk_without_data_gets_none(device: torch.device) -> None:
    seen = []

    def gather(*, data_iterator: list[Any], num_microbatches: int, **rest: Any) -> list[torch.Tensor]:
        seen.append([iterator is None for iterator in data_iterator])
        return [next(data_iterator[1]) + 1 for _ in range(num_microbatches)]

    source = (torch.full((2,), value, device=device) for value in itertools.count(0.0))
    with wrap(gather, device, ignore=["seen", "len(seen)"]) as wrapped:
        for call in range(4):
            results = wrapped(
                forward_step_func=None, data_iterator=[None, source, None], model=None, num_microbatches=2
            )
            assert [result[0].item() for result in results] == [2 * call + 1, 2 * call + 2]
        assert wrapped.report().replays == 3
    assert set(map(tuple, seen)) == {(True, False, True)}


def test_wrapper_without_any_data_runs(device: torch.device) -> None:
    """A stage in the middle of a pipeline has no data iterator at all."""
    weight = torch.ones(3, device=device)

    def middle(*, data_iterator: Any, num_microbatches: int, **rest: Any) -> torch.Tensor:
        assert data_iterator is None
        return weight * num_microbatches

    with wrap(middle, device) as wrapped:
        for _ in range(3):
            result = wrapped(forward_step_func=None, data_iterator=None, model=None, num_microbatches=2)
            assert result.tolist() == [2.0] * 3
        assert wrapped.report().replays == 2


@dataclass
class Packed:
    """A nested part of a microbatch."""

    lengths: torch.Tensor
    kind: str = "thd"
    mask: torch.Tensor | None = None


def test_wrapper_nested_microbatches_arrive_as_they_were(device: torch.device) -> None:
    def microbatch(value: float) -> Any:
        lengths = torch.full((2,), value, device=device)
        return (
            {"x": torch.full((2,), value), "none": None},
            (lengths, [torch.full((1,), value)]),
            Packed(lengths * 2),
            7,
        )

    def use(*, data_iterator: Any, num_microbatches: int, **rest: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(num_microbatches):
            named, (lengths, (inner,)), packed, number = next(data_iterator)
            assert named.pop("none") is None  # a step may change the containers
            assert (type(packed), packed.kind, packed.mask) == (Packed, "thd", None)
            found.append(named.pop("x").to(device) + lengths + inner.to(device) + packed.lengths + number)
        return found

    source = map(microbatch, itertools.count(0.0))
    with wrap(use, device) as wrapped:
        for call in range(4):
            results = wrapped(forward_step_func=None, data_iterator=source, model=None, num_microbatches=2)
            assert [result.tolist() for result in results] == [[5 * (2.0 * call + m) + 7] * 2 for m in range(2)]
        assert wrapped.report().replays == 3


def test_wrapper_host_number_in_a_microbatch_is_never_frozen(device: torch.device) -> None:
    def use(*, data_iterator: Any, **rest: Any) -> torch.Tensor:
        batch = next(data_iterator)
        return batch["x"].to(device) * batch["scale"]

    def call(wrapped: Any, scale: float) -> float:
        source = iter([{"x": torch.ones(()), "scale": scale}])
        return float(wrapped(forward_step_func=None, data_iterator=source, model=None, num_microbatches=1))

    with wrap(use, device, max_graphs=2) as wrapped:
        for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 2.0, 3.0):
            assert call(wrapped, scale) == scale
        assert wrapped.report().graphs == 2
        with pytest.warns(stepgraph.StepgraphWarning, match="max-graphs") as caught:
            assert call(wrapped, 4.0) == 4.0
        told = str(caught[0].message)
        assert "microbatch['scale']=4.0" in told
        assert wrapped.report().eager_reasons["past max_graphs=2"] == 1
        kept = wrapped.report().static_bytes
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            assert [call(wrapped, scale) for scale in (5.0, 6.0, 2.0, 3.0)] == [5.0, 6.0, 2.0, 3.0]
        assert wrapped.report().static_bytes == kept  # buffers past the limit are not kept


def test_wrapper_strict_refuses_one_layout_too_many(device: torch.device) -> None:
    made = build(device)
    with stepgraph.FullCudaGraphWrapper(forward_backward, max_graphs=1, strict=True) as wrapped:
        for _ in range(3):
            iterate(made, wrapped, TRAIN)
        with pytest.raises(stepgraph.SignatureMismatch, match="max-graphs") as caught:
            iterate(made, wrapped, Call(seq_length=4))
        assert "seq_length: value changed (captured 6, received 4)" in caught.value.details
        iterate(made, wrapped, TRAIN)


def test_wrapper_iterator_may_refill_the_memory_it_handed_out(device: torch.device) -> None:
    """In eager a microbatch is used before the next one is read."""
    memory = torch.zeros(2)
    seen = itertools.count(0.0)

    def refill() -> Iterator[torch.Tensor]:
        for value in seen:
            yield memory.fill_(value)

    def use(*, data_iterator: Any, num_microbatches: int, **rest: Any) -> list[torch.Tensor]:
        return [next(data_iterator).to(device) + 1 for _ in range(num_microbatches)]

    source = refill()
    with wrap(use, device) as wrapped:
        for call in range(4):
            results = wrapped(forward_step_func=None, data_iterator=source, model=None, num_microbatches=3)
            assert [result[0].item() for result in results] == [3 * call + m + 1 for m in range(3)]


def test_wrapper_results_that_are_microbatches_may_be_kept(device: torch.device) -> None:
    def hand_back(*, data_iterator: Any, **rest: Any) -> dict[str, torch.Tensor]:
        x = next(data_iterator)
        return {"input": x, "view": x[:1], "double": x * 2}

    source = (torch.full((2,), value, device=device) for value in itertools.count(0.0))
    with wrap(hand_back, device, cuda_graph_warmup_steps=2) as wrapped:
        call = {"forward_step_func": None, "data_iterator": source, "model": None, "num_microbatches": 1}
        kept = [wrapped(**call) for _ in range(5)]
    assert [result["input"].tolist() for result in kept] == [[float(i)] * 2 for i in range(5)]
    assert [result["view"].item() for result in kept] == [0, 1, 2, 3, 4]
    assert [result["double"][0].item() for result in kept] == [0, 2, 4, 6, 8]


def test_wrapper_microbatch_writes_reach_the_callers_tensors(device: torch.device) -> None:
    def count_up(*, data_iterator: Any, num_microbatches: int, **rest: Any) -> torch.Tensor:
        return sum(next(data_iterator).add_(1).sum() for _ in range(num_microbatches))

    mine = torch.zeros(2, device=device)
    with wrap(count_up, device) as wrapped:
        for i in range(1, 6):
            result = wrapped(
                forward_step_func=None, data_iterator=itertools.repeat(mine), model=None, num_microbatches=1
            )
            assert result.item() == 2 * i
            assert mine.tolist() == [float(i)] * 2
        with pytest.raises(stepgraph.CaptureError, match="shared-input"):
            wrapped(forward_step_func=None, data_iterator=itertools.repeat(mine), model=None, num_microbatches=2)


def test_wrapper_microbatch_gradients_reach_the_callers_tensors(device: torch.device) -> None:
    def square(*, data_iterator: Any, num_microbatches: int, **rest: Any) -> None:
        for _ in range(num_microbatches):
            next(data_iterator).square().sum().backward()

    leaves = [torch.full((2,), float(i + 1), device=device, requires_grad=True) for i in range(2)]
    with wrap(square, device) as wrapped:
        call = {"forward_step_func": None, "model": None, "num_microbatches": 2}
        for i in range(1, 6):
            wrapped(data_iterator=iter(leaves), **call)
            assert [leaf.grad.tolist() for leaf in leaves] == [[2.0 * i] * 2, [4.0 * i] * 2]
        assert wrapped.report().replays == 3
        with pytest.raises(stepgraph.CaptureError, match="outer-graph"):
            wrapped(data_iterator=iter([leaf * 1 for leaf in leaves]), **call)


def test_wrapper_training_and_validation_keep_their_own_writes(device: torch.device) -> None:
    """They fill the same buffers: what one writes, and the gradients it leaves, is not the other's."""

    def iterate(*, data_iterator: Any, num_microbatches: int, forward_only: bool, **rest: Any) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for _ in range(num_microbatches):
            batch = next(data_iterator)
            if not forward_only:
                batch["count"].add_(1)
                batch["x"].square().sum().backward()
            total = total + batch["x"].detach().sum()
        return total

    with wrap(iterate, device) as wrapped:
        call = {"forward_step_func": None, "model": None, "num_microbatches": 2}
        for forward_only in (False, True, False, False, True, True, True, False, False, True):
            rows = torch.zeros(2, 3, device=device).unbind()  # which share memory
            batches = [
                {
                    "x": torch.full((2,), i + 1.0, device=device, requires_grad=True),
                    "count": row if forward_only else row.clone(),
                }
                for i, row in enumerate(rows)
            ]
            assert wrapped(data_iterator=iter(batches), forward_only=forward_only, **call).item() == 6
            for i, batch in enumerate(batches):
                grad = batch["x"].grad
                assert (grad is None) if forward_only else (grad.tolist() == [2.0 * (i + 1)] * 2)
                assert batch["count"].tolist() == [0.0 if forward_only else 1.0] * 3
        assert wrapped.report().graphs == 2


# -- what is guarded


def test_wrapper_host_values_of_forward_step_are_never_frozen(device: torch.device) -> None:
    """The functions come as arguments, and what they read is watched as in any captured step."""
    weight = 2.0

    @dataclass
    class Settings:
        offset: float = 1.0

    settings = Settings()

    class Step:
        def __init__(self) -> None:
            self.settings, self.factor = settings, 1.0

        def __call__(self, data_iterator: Any, model: Any) -> torch.Tensor:
            return next(data_iterator) * weight * self.factor + settings.offset

    def run(*, forward_step_func: Any, data_iterator: Any, model: Any, **rest: Any) -> torch.Tensor:
        return forward_step_func(data_iterator, model) * scale

    scale = 1.0
    step = Step()
    with wrap(run, device) as wrapped:

        def call() -> float:
            source = iter([torch.ones((), device=device)])
            return float(wrapped(forward_step_func=step, data_iterator=source, model=None, num_microbatches=1))

        assert [call() for _ in range(3)] == [3.0] * 3
        weight = 4.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"weight: 2.0 -> 4.0"):
            assert call() == 5.0
        call()
        settings.offset = 2.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"settings.offset: 1.0 -> 2.0"):
            assert call() == 6.0
        call()
        step.factor = 0.5
        with pytest.warns(stepgraph.StepgraphWarning, match=r"factor: 1.0 -> 0.5"):
            assert call() == 4.0
        call()
        scale = 10.0
        with pytest.warns(stepgraph.StepgraphWarning, match=r"scale: 1.0 -> 10.0"):
            assert call() == 40.0
        assert wrapped.report().recaptures == 4


def test_wrapper_changed_model_is_noticed(device: torch.device) -> None:
    def changed(made: Training, function: Any, **kwargs: Any) -> list[Any]:
        torch.manual_seed(11)
        found = []
        for index in range(8):
            if index == 4:
                made.chunks[0].head.weight.data = made.chunks[0].head.weight.data * 0.5
            if index == 6:
                made.chunks[0].dropout.p = 0.75
            results = iterate(made, function, TRAIN)
            found.append(([r["lm loss"] for r in results], snapshot(made.program, device)))
        return found

    expected = changed(build(device), forward_backward)
    with stepgraph.FullCudaGraphWrapper(forward_backward) as wrapped, warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        assert_same_history(expected, changed(build(device), wrapped), "wrapped differs from eager")
        assert wrapped.report().recaptures == 2


def test_wrapper_changed_learning_rate_inside_is_never_frozen(device: torch.device) -> None:
    def scheduled(made: Training, function: Any, **kwargs: Any) -> list[Any]:
        torch.manual_seed(11)
        found = []
        for index in range(8):
            made.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index // 4)
            results = iterate(made, function, TRAIN, **kwargs)
            found.append(([r["lm loss"] for r in results], snapshot(made.program, device)))
        return found

    expected = scheduled(build(device, fused=True), forward_backward)
    made = build(device, fused=True)
    with stepgraph.FullCudaGraphWrapper(forward_backward, optimizers=[made.optimizer]) as wrapped:
        assert_same_history(expected, scheduled(made, wrapped, steps_inside=True), "wrapped differs from eager")


def test_wrapper_steps_several_optimizers(device: torch.device) -> None:
    def trained(wraps: bool) -> list[torch.Tensor]:
        made = build(device)
        parameters = list(made.chunks[0].parameters())
        optimizers = [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.SGD(parameters[1:], lr=0.01)]
        if wraps:
            with stepgraph.FullCudaGraphWrapper(forward_backward, optimizers=optimizers) as wrapped:
                for _ in range(4):
                    iterate(made, wrapped, TRAIN, steps_inside=True)
                assert wrapped.report().replays > 0
            return parameters
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            iterate(made, forward_backward, TRAIN, steps_inside=True)
            for optimizer in optimizers:
                optimizer.step()
        return parameters

    assert all(map(torch.equal, trained(wraps=True), trained(wraps=False)))


def test_wrapper_method_as_forward_step_is_the_same_at_each_call(device: torch.device) -> None:
    """`trainer.forward_step` is a new object at each look-up."""

    class Trainer:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def forward_step(self, data_iterator: Any, model: Any) -> torch.Tensor:
            return next(data_iterator) * self.factor

    def run(*, forward_step_func: Any, data_iterator: Any, model: Any, **rest: Any) -> torch.Tensor:
        return forward_step_func(data_iterator, model)

    source = itertools.repeat(torch.ones((), device=device))
    one, two = Trainer(2.0), Trainer(3.0)
    with wrap(run, device) as wrapped:
        for trainer in (one, one, one, two, two, one, two):
            result = wrapped(
                forward_step_func=trainer.forward_step, data_iterator=source, model=None, num_microbatches=1
            )
            assert result.item() == trainer.factor
        assert wrapped.report().graphs == 2


# -- several wrappers, and their end


def test_wrapper_deletion_leaves_a_second_wrapper_working(device: torch.device) -> None:
    expected = history_of(build(device), forward_backward, [TRAIN] * 8, device)
    other, twin = stepgraph.FullCudaGraphWrapper(forward_backward), build(device)
    for _ in range(5):
        iterate(twin, other, TRAIN)
    wrapped, made = stepgraph.FullCudaGraphWrapper(forward_backward), build(device)
    torch.manual_seed(11)
    received = []
    for index in range(8):
        results = iterate(made, wrapped, TRAIN)
        leaves = [part for r in results for part in ("lm loss", r["lm loss"])]
        received.append((leaves, snapshot(made.program, device)))
        if index == 4:
            assert other.report().replays == 3
            del other
            gc.collect()
    assert_same_history(expected, received, "the wrapper that stays")
    assert wrapped.report().replays == 6
    wrapped.close()


def test_wrapper_two_take_turns_on_one_model(device: torch.device) -> None:
    calls = [TRAIN, TRAIN, TRAIN, VALIDATE, VALIDATE, TRAIN, VALIDATE, TRAIN, TRAIN]
    expected = history_of(build(device), forward_backward, calls, device)
    made = build(device)
    with (
        stepgraph.Session() as session,
        stepgraph.FullCudaGraphWrapper(forward_backward, session=session) as train,
        stepgraph.FullCudaGraphWrapper(forward_backward, session=session) as validate,
    ):

        def turn(*, forward_only: bool, **call: Any) -> Any:
            return (validate if forward_only else train)(forward_only=forward_only, **call)

        assert_same_history(expected, history_of(made, turn, calls, device), "two wrappers")
        assert (train.report().graphs, validate.report().graphs) == (1, 1)
        validate.close()
        assert not session.closed
        iterate(made, train, TRAIN)
        assert train.report().replays == 5  # whatever the order of its keywords


def test_wrapper_reset_frees_graphs_and_static_buffers(device: torch.device) -> None:
    made = build(device)
    buffers: dict[int, weakref.ref[torch.Tensor]] = {}

    def remembering(*, data_iterator: Iterator[Any], **rest: Any) -> Any:
        microbatches = list(data_iterator)
        buffers.update({id(t): weakref.ref(t) for microbatch in microbatches for t in microbatch.values()})
        return forward_backward(data_iterator=iter(microbatches), **rest)

    with stepgraph.FullCudaGraphWrapper(remembering, ignore=["buffers"]) as wrapped:
        for call in (TRAIN, TRAIN, TRAIN, VALIDATE, VALIDATE, VALIDATE):
            iterate(made, wrapped, call)
        report = wrapped.report()
        assert report.graphs == 2
        assert report.static_bytes == BYTES_OF_THREE
        assert len(buffers) == 6  # shared by both graphs
        wrapped.reset()
        gc.collect()
        assert [buffer() for buffer in buffers.values()] == [None] * 6
        assert (wrapped.report().graphs, wrapped.report().static_bytes) == (0, 0)


def test_wrapper_reset_then_recapture_is_equal_to_eager(device: torch.device) -> None:
    calls = [TRAIN, TRAIN, TRAIN, VALIDATE, VALIDATE, VALIDATE, TRAIN]
    made = build(device)
    expected = history_of(made, forward_backward, calls, device) + history_of(made, forward_backward, calls, device)
    made = build(device)
    with stepgraph.FullCudaGraphWrapper(forward_backward) as wrapped:
        received = history_of(made, wrapped, calls, device)
        wrapped.reset()
        received += history_of(made, wrapped, calls, device)
        assert_same_history(expected, received, "captured again")
        report = wrapped.report()
    assert (report.captures, report.graphs, report.recaptures) == (4, 2, 0)
    assert report.eager_reasons == {"warm-up": 8}


def test_wrapper_nan_check_works_as_in_a_captured_step(device: torch.device) -> None:
    def halve(*, data_iterator: Any, num_microbatches: int, **rest: Any) -> list[dict[str, torch.Tensor]]:
        return [{"loss": next(data_iterator) / 2} for _ in range(num_microbatches)]

    call = {"forward_step_func": None, "model": None, "num_microbatches": 2}
    with pytest.raises(stepgraph.NonFinite, match="loss"):  # noqa: SIM117
        with wrap(halve, device, nan_check="device") as wrapped:
            for value in (1.0, 1.0, 1.0, float("nan")):
                wrapped(data_iterator=iter([torch.ones((), device=device), torch.tensor(value)]), **call)
    with pytest.raises(stepgraph.ClosedError):
        wrapped(data_iterator=iter([]), **call)


def test_wrapper_closed_says_so(device: torch.device) -> None:
    made = build(device)
    with stepgraph.FullCudaGraphWrapper(forward_backward) as wrapped:
        iterate(made, wrapped, TRAIN)
    wrapped.close()
    with pytest.raises(stepgraph.ClosedError, match="FullCudaGraphWrapper was closed"):
        iterate(made, wrapped, TRAIN)


# -- failures


def failing(where: str) -> tuple[Callable[..., Any], list[bool]]:
    """A forward step that fails while the switch is on: with an error, or with what no capture can record."""
    switch: list[bool] = [False]
    seen: list[str] = []

    def step(data_iterator: Any, model: nn.Module) -> Any:
        output, loss_func = forward_step(data_iterator, model)
        if switch[0]:
            if where == "capture":
                output.sum().item()
            elif seen:
                raise ValueError("on purpose")
            else:
                seen.append("the first microbatch")
        return output, loss_func

    return step, switch


def call_with(made: Training, function: Any, step: Any, **changes: Any) -> Any:
    call = {
        "forward_step_func": step,
        "data_iterator": made.sources[0],
        "model": made.chunks[0],
        "num_microbatches": 2,
        "seq_length": 6,
        "micro_batch_size": 2,
    }
    return function(**(call | changes))


def test_wrapper_failed_capture_keeps_the_state_and_continues(device: torch.device) -> None:
    """What the capture recorded has no effect, nothing is left in capture mode, the next call is captured."""
    made = build(device)
    step, switch = failing("capture")
    with stepgraph.FullCudaGraphWrapper(forward_backward, ignore=["switch[0]"]) as wrapped:
        for _ in range(2):
            call_with(made, wrapped, step)
        before = snapshot(made.program, device)
        switch[0] = True
        for _ in range(2):
            with pytest.raises(stepgraph.CaptureError, match="host-read"):
                call_with(made, wrapped, step)
            assert not stepgraph.backend_for(device).is_capturing()
            after = snapshot(made.program, device)
            assert_same_history([([], before)], [([], after)], "after a failed capture")
        switch[0] = False
        assert wrapped.report().captures == 0
        for _ in range(3):
            call_with(made, wrapped, step)
        assert (wrapped.report().captures, wrapped.report().replays) == (1, 3)


def test_wrapper_failed_eager_call_leaves_it_usable(device: torch.device) -> None:
    """Eager raises as eager does; what follows is equal to a program that failed the same way."""

    def program(made: Training, function: Any) -> list[Any]:
        torch.manual_seed(11)
        step, switch = failing("second microbatch")
        found = []
        for index in range(7):
            switch[0] = index == 0
            made.optimizer.zero_grad()
            if switch[0]:
                with pytest.raises(ValueError, match="on purpose"):
                    call_with(made, function, step)
                made.optimizer.zero_grad()
                continue
            results = call_with(made, function, step)
            made.optimizer.step()
            found.append(([r["lm loss"] for r in results], snapshot(made.program, device)))
        return found

    expected = program(build(device), forward_backward)
    assert len(expected) == 6
    with stepgraph.FullCudaGraphWrapper(forward_backward, ignore=["switch[0]"]) as wrapped:
        assert_same_history(expected, program(build(device), wrapped), "after a failed call")
        assert wrapped.report().replays == 5


def test_wrapper_on_error_eager_goes_on(device: torch.device) -> None:
    def run(made: Training, function: Any) -> list[Any]:
        torch.manual_seed(11)
        step, switch = failing("capture")
        switch[0] = True
        found = []
        for _ in range(4):
            made.optimizer.zero_grad()
            results = call_with(made, function, step)
            made.optimizer.step()
            found.append(([r["lm loss"] for r in results], snapshot(made.program, device)))
        return found

    expected = run(build(device), forward_backward)
    with stepgraph.FullCudaGraphWrapper(forward_backward, on_error="eager") as wrapped:
        with pytest.warns(stepgraph.StepgraphWarning, match="goes on in eager"):
            assert_same_history(expected, run(build(device), wrapped), "in eager")
        assert wrapped.report().eager_reasons == {"warm-up": 2, "capture failed: [host-read]": 2}


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_wrapper_iterator_that_ends_early_is_named(num_chunks: int, device: torch.device) -> None:
    made = build(device, num_chunks)
    function = function_for(num_chunks)
    with stepgraph.FullCudaGraphWrapper(function) as wrapped:
        for _ in range(4):
            iterate(made, wrapped, TRAIN)
        short = [*made.sources[:-1], itertools.islice(made.sources[-1], 2)]
        with pytest.raises(stepgraph.InvalidArgument, match="microbatches") as caught:
            wrapped(
                forward_step_func=forward_step,
                data_iterator=short if num_chunks > 1 else short[0],
                model=made.chunks,
                num_microbatches=3,
                seq_length=6,
                micro_batch_size=2,
            )
        assert caught.value.what == f"the data iterator of chunk {num_chunks - 1} ended after 2 of 3 microbatches"
        iterate(made, wrapped, TRAIN)
        assert wrapped.report().replays == 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda made: torch.utils.data.DataLoader([1, 2]), "is a DataLoader, which is not an iterator"),
        (lambda made: [made.sources[0]] * 2, "two model chunks got the same data iterator"),
    ],
    ids=["no iterator", "one for two"],
)
def test_wrapper_refuses_iterators_that_cannot_work(
    given: Callable[[Training], Any], told: str, device: torch.device
) -> None:
    made = build(device)
    with stepgraph.FullCudaGraphWrapper(forward_backward) as wrapped:
        with pytest.raises(stepgraph.InvalidArgument, match=told):
            call_with(made, wrapped, forward_step, data_iterator=given(made))
        with pytest.raises(stepgraph.InvalidArgument, match="num_microbatches=0 is not"):
            call_with(made, wrapped, forward_step, num_microbatches=0)
        assert made.sources[0].num_read == 0
        call_with(made, wrapped, forward_step)


@pytest.mark.parametrize(("times", "told"), [(2, "takes more than 2"), (0.5, "takes 1 of 2")])
def test_wrapper_step_that_reads_another_number_is_refused(times: float, told: str, device: torch.device) -> None:
    made = build(device)

    def run(*, data_iterator: Any, num_microbatches: int, **rest: Any) -> list[torch.Tensor]:
        return [next(data_iterator)["tokens"] for _ in range(int(num_microbatches * times))]

    with wrap(run, device) as wrapped:
        for _ in range(2):
            with pytest.raises(stepgraph.InvalidArgument, match=told):
                call_with(made, wrapped, forward_step)


def test_wrapper_refuses_what_it_cannot_look_into(device: torch.device) -> None:
    class Batch:
        def __init__(self) -> None:
            self.tokens = torch.ones(2)

    made = build(device)
    with stepgraph.FullCudaGraphWrapper(forward_backward) as wrapped:
        with pytest.raises(stepgraph.InvalidArgument, match=r"`microbatches\[0\]\['b'\]` is a Batch"):
            call_with(made, wrapped, forward_step, data_iterator=iter([{"b": Batch()}] * 2))
        with pytest.raises(stepgraph.InvalidArgument, match="host-data"):
            call_with(made, wrapped, forward_step, data_iterator=iter([torch.ones(2).numpy()] * 2))


def test_wrapper_inside_a_captured_step_is_refused(device: torch.device) -> None:
    made = build(device)
    with stepgraph.FullCudaGraphWrapper(forward_backward) as wrapped:

        def step(x: torch.Tensor) -> torch.Tensor:
            if stepgraph.backend_for(device).is_capturing():
                call_with(made, wrapped, forward_step)
            return x + 1

        with stepgraph.capture(step, warmup=1, ignore=["made", "wrapped"]) as outer:
            for _ in range(2):
                outer(torch.ones((), device=device))
            with pytest.raises(stepgraph.CaptureError, match="host-data"):
                outer(torch.ones((), device=device))
        call_with(made, wrapped, forward_step)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"forward_backward_func": 3}, "an int, which cannot be called"),
        ({"cuda_graph_warmup_steps": -1}, "cuda_graph_warmup_steps=-1"),
        ({"optimizers": ["auto"]}, "optimizers: a str"),
        ({"optimizer": "in"}, "optimizer='in'"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_wrapper_refuses_bad_options(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(stepgraph.InvalidArgument, match=told) as caught:
        stepgraph.FullCudaGraphWrapper(**({"forward_backward_func": forward_backward} | arguments))
    assert caught.value.rule == "option"


def test_wrapper_report_names_what_each_graph_serves(device: torch.device) -> None:
    made = build(device)
    with stepgraph.FullCudaGraphWrapper(forward_backward) as wrapped:
        assert wrapped.report().static_bytes == 0
        for _ in range(3):
            iterate(made, wrapped, TRAIN)
        report = wrapped.report()
    assert report.step == "forward_backward"
    where = next(made.chunks[0].parameters()).device
    buffers = f"3 x (microbatch['tokens']=int64[2, 6] {where}, microbatch['labels']=int64[2, 6] {where})"
    assert f"microbatches={buffers}" in report.signatures[0]
    assert "num_microbatches=3" in report.signatures[0]


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"warmup": 3}, "cuda_graph_warmup_steps"),
        ({"buckets": {"x": {0: [8]}}}, "pad microbatches in the data iterator"),
    ],
    ids=["warmup", "buckets"],
)
def test_wrapper_refuses_options_that_are_not_its_own(option: dict[str, Any], instead: str) -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="is not an option of FullCudaGraphWrapper") as caught:
        stepgraph.FullCudaGraphWrapper(lambda **_: [], **option)
    assert instead in caught.value.fix
