"""Steps with a part that reads on the host, on the GPU: bit for bit as in eager, with graphs for the other modules."""

from __future__ import annotations

import warnings

import pytest
import torch

import stepgraph
from stepgraph.tools.checks.partition import partition
from tests.contract.test_on_error_modules import Model, program_of
from tests.harness import Program, assert_same_history, run
from tests.hugging_face import WITH_EXPERTS
from tests.hugging_face import program_of as hugging_face_program
from tests.seeding import seed

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CALLS = 16


def built(name: str) -> Program:
    seed(7)
    program = hugging_face_program(name, CALLS, num_layers=3, hidden_size=64, dropout=True)(DEVICE)
    seed(11)
    return program


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_in_a_host_loop_equal_eager(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    eager = built(name)
    expected = run(eager, eager.step, DEVICE)
    again = built(name)
    assert_same_history(expected, run(again, again.step, DEVICE), "eager differs from eager")
    program = built(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        with stepgraph.capture(program.step, on_error="modules") as step:
            received = run(program, step, DEVICE)
            report = step.report()
    assert_same_history(expected, received, f"{name}: graphs for modules differ from eager")
    assert report.modules is not None
    replayed = [row.path for row in report.modules.rows if row.forwards and row.backwards]
    assert sum(path.endswith("self_attn") for path in replayed) == 3
    assert any("[host-read]" in why for why in report.modules.left_out.values())


def test_partition_uses_real_captures() -> None:
    seed(0)
    model = Model().to(DEVICE)
    before = torch.cuda.get_rng_state(DEVICE)

    def step() -> None:
        model.zero_grad()
        model(torch.randn(6, 8, device=DEVICE)).pow(2).mean().backward()

    found = partition(model, step)
    assert {"embed", "layers.*.attn", "layers.*.moe.gate", "head"} <= set(found.scope())
    assert "[host-read]" in found.refused["layers.0.moe"]
    assert not torch.equal(before, torch.cuda.get_rng_state(DEVICE))  # the two steps draw, the trials do not
    drawn = torch.cuda.get_rng_state(DEVICE)
    seed(0)
    model = Model().to(DEVICE)
    for _ in range(2):
        step()
    assert torch.equal(drawn, torch.cuda.get_rng_state(DEVICE))


def test_memory_of_the_search_is_freed() -> None:
    program = program_of("plain")(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stepgraph.StepgraphWarning)
        with stepgraph.Session() as session:
            step = stepgraph.capture(program.step, on_error="modules", session=session)
            for batch in program.batches:
                step(*batch)
            graphs = session.num_graphs
            runners = step.report().modules.graphs
            assert 0 < graphs <= 2 * runners, "graphs of trials are left"
            step.close()
            assert session.num_graphs == 0
