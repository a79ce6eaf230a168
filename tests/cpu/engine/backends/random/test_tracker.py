"""The tracker of named random states by itself: names, forks and states in eager code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepgraph
import stepgraph.engine.backends.random.tracker as rng_tracker
from stepgraph import CudaRNGStatesTracker, InvalidArgument, get_cuda_rng_tracker
from stepgraph.engine.backends.tape.mode import TapeBackend
from tests.harness import same_bits


@pytest.fixture
def tracker() -> CudaRNGStatesTracker:
    made = CudaRNGStatesTracker(TapeBackend())
    made.add("model-parallel-rng", 1)
    made.add("other", 2)
    return made


def drawn_with(seed: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, generator=generator) for _ in range(count)]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, two, strict=True))


# -- drawing


def test_fork_draws_from_its_seed_and_keeps_the_default_sequence(tracker: CudaRNGStatesTracker) -> None:
    torch.manual_seed(7)
    named, default = [], []
    for _ in range(4):
        with tracker.fork():
            named.append(torch.rand(3))
        default.append(torch.rand(3))
    assert same(named, drawn_with(1, 4))
    assert same(default, drawn_with(7, 4))


def test_fork_without_a_name_is_the_model_parallel_one(tracker: CudaRNGStatesTracker) -> None:
    with tracker.fork():
        assert tracker.active == "model-parallel-rng"
    assert tracker.active is None


def test_fork_keeps_second_halves_of_normal_pairs_apart(tracker: CudaRNGStatesTracker) -> None:
    """The CPU generator holds back one of two normal numbers; it belongs to the state that drew the pair."""
    generator = torch.Generator().manual_seed(1)
    expected = [torch.randn(1, generator=generator) for _ in range(3)]
    received = []
    for _ in range(3):
        with tracker.fork():
            received.append(torch.randn(1))
        torch.randn(1)
    assert same(expected, received)


def test_nested_forks_go_on_with_each_state_where_it_is(tracker: CudaRNGStatesTracker) -> None:
    torch.manual_seed(7)
    default, first, second = [], [], []
    default.append(torch.rand(3))
    with tracker.fork():
        first.append(torch.rand(3))
        with tracker.fork("other"):
            second.append(torch.rand(3))
            with tracker.fork():
                first.append(torch.rand(3))
                with tracker.fork():
                    first.append(torch.rand(3))
            second.append(torch.rand(3))
        first.append(torch.rand(3))
    default.append(torch.rand(3))
    assert same(default, drawn_with(7, 2))
    assert same(first, drawn_with(1, 4))
    assert same(second, drawn_with(2, 2))


def test_fork_left_by_an_exception_gives_every_state_back(tracker: CudaRNGStatesTracker) -> None:
    torch.manual_seed(7)
    with pytest.raises(KeyError), tracker.fork(), tracker.fork("other"):
        torch.rand(3)
        raise KeyError
    assert tracker.active is None
    assert same_bits(torch.rand(3), drawn_with(7, 1)[0])
    with tracker.fork("other"):
        assert same_bits(torch.rand(3), drawn_with(2, 2)[1])


def test_fork_of_an_unknown_name_says_which_there_are(tracker: CudaRNGStatesTracker) -> None:
    with pytest.raises(InvalidArgument, match="rng-state") as caught, tracker.fork("expert"):
        pass
    assert "'expert'" in caught.value.what
    assert caught.value.details == ("names  model-parallel-rng, other",)
    assert "add('expert', seed)" in caught.value.fix


# -- names


@pytest.mark.parametrize(("name", "seed"), [("other", 3), ("third", 2)], ids=["name twice", "seed twice"])
def test_add_refuses_a_name_or_a_seed_twice(tracker: CudaRNGStatesTracker, name: str, seed: int) -> None:
    with pytest.raises(InvalidArgument, match="already") as caught:
        tracker.add(name, seed)
    assert caught.value.rule == "rng-state"
    assert tracker.states == ("model-parallel-rng", "other")


def test_reset_forgets_names_and_seeds(tracker: CudaRNGStatesTracker) -> None:
    assert tracker.is_initialized()
    tracker.reset()
    assert not tracker.is_initialized()
    assert (tracker.states, tracker.generators, tracker.get_states()) == ((), (), {})
    tracker.add("other", 2)
    assert tracker.states == ("other",)


@pytest.mark.parametrize(
    "change",
    [lambda t: t.reset(), lambda t: t.add("third", 3), lambda t: t.set_states({})],
    ids=["reset", "add", "set_states"],
)
def test_names_do_not_change_inside_a_fork(tracker: CudaRNGStatesTracker, change: Any) -> None:
    with tracker.fork(), pytest.raises(InvalidArgument, match=r"inside fork\('model-parallel-rng'\)"):
        change(tracker)
    assert tracker.states == ("model-parallel-rng", "other")


# -- states as values


def test_states_are_those_of_their_names_also_inside_a_fork(tracker: CudaRNGStatesTracker) -> None:
    generator = torch.Generator().manual_seed(1)
    with tracker.fork():
        torch.rand(3)
        torch.rand(3, generator=generator)
        states = tracker.get_states()
    assert same_bits(states["model-parallel-rng"], generator.get_state())
    assert same_bits(states["other"], torch.Generator().manual_seed(2).get_state())


def test_set_states_goes_back_in_place(tracker: CudaRNGStatesTracker) -> None:
    generators, states = tracker.generators, tracker.get_states()
    with tracker.fork("other"):
        torch.rand(3)
        tracker.set_states(dict(reversed(states.items())))
        assert same_bits(torch.rand(3), drawn_with(2, 1)[0])
    assert tracker.generators is generators


def test_set_states_makes_the_names_those_it_is_given(tracker: CudaRNGStatesTracker) -> None:
    states = {"fresh": tracker.get_states()["other"]}
    tracker.set_states(states)
    assert tracker.states == ("fresh",)
    assert len(tracker.generators) == 1
    with tracker.fork("fresh"):
        assert same_bits(torch.rand(3), drawn_with(2, 1)[0])


@pytest.mark.parametrize(
    "value", [torch.zeros(16, dtype=torch.uint8), torch.zeros(5056), None], ids=["size", "type", "no tensor"]
)
def test_set_states_that_fails_changes_nothing(tracker: CudaRNGStatesTracker, value: Any) -> None:
    before = tracker.get_states()
    moved = torch.Generator().manual_seed(9).get_state()
    with pytest.raises(InvalidArgument, match="`third`") as caught:
        tracker.set_states({"other": moved, "third": value})
    assert caught.value.rule == "rng-state"
    assert tracker.states == ("model-parallel-rng", "other")
    assert all(same_bits(before[name], state) for name, state in tracker.get_states().items())


def test_states_read_under_inference_mode_are_plain_tensors(tracker: CudaRNGStatesTracker) -> None:
    with torch.inference_mode():
        states = tracker.get_states()
    assert not any(state.is_inference() for state in states.values())


# -- the process's tracker


@pytest.fixture
def emptied() -> Iterator[CudaRNGStatesTracker]:
    made = get_cuda_rng_tracker("cpu")
    made.reset()
    yield made
    made.reset()


def test_process_has_one_tracker_a_device(emptied: CudaRNGStatesTracker) -> None:
    emptied.add("x", 1)
    assert get_cuda_rng_tracker("cpu") is emptied
    assert get_cuda_rng_tracker(torch.device("cpu")).states == ("x",)
    assert rng_tracker.tracker_for(TapeBackend()) is emptied


def test_process_tracker_is_on_the_forced_backends_device(
    emptied: CudaRNGStatesTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPGRAPH_BACKEND", "tape")
    assert get_cuda_rng_tracker() is emptied


def test_tracker_for_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no backend"):
        get_cuda_rng_tracker("meta")


# -- any nesting


NESTINGS = st.lists(
    st.recursive(
        st.just("draw"),
        lambda inner: st.tuples(st.sampled_from(["model-parallel-rng", "other"]), st.lists(inner, max_size=3)),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


def perform(tracker: CudaRNGStatesTracker, work: list[Any]) -> list[torch.Tensor]:
    drawn: list[torch.Tensor] = []
    for item in work:
        if item == "draw":
            drawn.append(torch.rand(3))
        else:
            with tracker.fork(item[0]):
                drawn += perform(tracker, item[1])
    return drawn


@settings(max_examples=30, deadline=None)
@given(NESTINGS)
def test_any_nesting_of_forks_captured_equals_eager(work: list[Any]) -> None:
    def run(capture_it: bool) -> list[torch.Tensor]:
        torch.manual_seed(7)
        tracker = CudaRNGStatesTracker(TapeBackend())
        tracker.add("model-parallel-rng", 1)
        tracker.add("other", 2)

        def step(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x, *perform(tracker, work)])

        call: Any = stepgraph.capture(step, warmup=1, generators=tracker.generators) if capture_it else step
        results = [call(torch.zeros(3)) for _ in range(3)]
        return [*results, *tracker.get_states().values(), torch.get_rng_state()]

    assert same(run(False), run(True))
