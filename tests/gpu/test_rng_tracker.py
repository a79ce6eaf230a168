"""Random states on a GPU: graphs of others that know the same generators, and inference mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph import get_cuda_rng_tracker
from stepgraph.engine.backends.random.host_random import GeneratorWatch
from tests.harness import same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_names_left() -> Iterator[None]:
    get_cuda_rng_tracker().reset()
    yield
    get_cuda_rng_tracker().reset()


def test_process_tracker_is_the_current_gpus() -> None:
    tracker = get_cuda_rng_tracker()
    assert tracker is get_cuda_rng_tracker("cuda")
    assert tracker is get_cuda_rng_tracker(torch.device("cuda", torch.cuda.current_device()))
    assert tracker is not get_cuda_rng_tracker("cpu")
    tracker.add("x", 1)
    assert tracker.generators[0].device.type == "cuda"


def test_fork_leaves_the_cpu_generator() -> None:
    tracker = get_cuda_rng_tracker()
    tracker.add("model-parallel-rng", 1)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    with tracker.fork():
        torch.rand(3, device="cuda")
        assert same_bits(torch.rand(3), expected)


def test_step_is_captured_beside_a_live_inference_mode_graph() -> None:
    """That graph's tensors for seed and offset are inference tensors, and every graph of the generator has them."""
    x, stream = torch.ones(64, device="cuda"), torch.cuda.Stream()
    foreign = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.graph(foreign, stream=stream):
        y = F.dropout(x, 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)

    def run(call: object) -> list[torch.Tensor]:
        drawn = []
        torch.manual_seed(3)
        for _ in range(6):
            drawn.append(call(x).clone())  # type: ignore[operator]
            with torch.inference_mode():
                foreign.replay()
            drawn.append(y.clone())
        return drawn

    expected = run(step)
    with stepgraph.capture(step, warmup=1) as captured:
        received = run(captured)
        assert captured.report().replays == 5
    assert all(same_bits(one, two) for one, two in zip(expected, received, strict=True))


def test_names_differ_in_what_they_draw_from_one_graph() -> None:
    tracker = get_cuda_rng_tracker()
    tracker.add("a", 1)
    tracker.add("b", 2)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = []
        for name in ("a", "b"):
            with tracker.fork(name):
                drawn.append(x + torch.rand(64, device="cuda"))
        return (*drawn, x + torch.rand(64, device="cuda"))

    with stepgraph.capture(step, warmup=1) as captured:
        calls = [captured(torch.zeros(64, device="cuda")) for _ in range(4)]
    values = [one for call in calls for one in call]
    assert not any(same_bits(one, two) for i, one in enumerate(values) for two in values[:i])


def test_generator_that_went_back_was_set() -> None:
    """The tape sees by itself that a step sets a generator; on a GPU its state tells."""
    generator = torch.Generator("cuda").manual_seed(5)
    torch.rand(4, generator=generator, device="cuda")
    watch = GeneratorWatch([generator])
    torch.rand(4, generator=generator, device="cuda")
    assert not watch.was_set()
    generator.manual_seed(5)
    assert watch.was_set()
    generator.manual_seed(6)
    torch.rand(64, generator=generator, device="cuda")
    assert watch.was_set()
