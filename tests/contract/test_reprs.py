"""The `repr` of what the public functions return: calls, replays and graphs."""

import torch

import stepgraph


def test_repr_of_a_captured_step(device: torch.device) -> None:
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    step = stepgraph.capture(train_step)
    assert repr(step) == "<captured train_step: 0 calls, 0 replays, 0 graphs>"
    for _ in range(5):
        step(torch.ones(2, device=device))
    assert repr(step) == "<captured train_step: 5 calls, 2 replays, 1 graph>"
    step.close()
    assert repr(step) == "<captured train_step: 5 calls, 2 replays, 0 graphs, closed>"


def test_repr_of_graphed_modules(device: torch.device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(device)
    handle = stepgraph.graph_modules(model, ["0", "1"])
    assert repr(handle) == "<2 graphed modules: 0 calls, 0 replays, 0 graphs>"
    for _ in range(5):
        model(torch.ones(2, 4, device=device)).sum().backward()
    assert repr(handle) == "<2 graphed modules: 10 calls, 4 replays, 2 graphs>"
    assert repr(model[0].forward) == "<graphed 0: 5 calls, 2 replays, 1 graph>"
    handle.close()
    assert repr(handle).endswith("0 graphs, closed>")


def test_repr_of_graphed_callables(device: torch.device) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    graphed = stepgraph.make_graphed_callables(double, (torch.ones(2, device=device, requires_grad=True),))
    ones = torch.ones(2, device=device)
    graphed(ones.clone().requires_grad_()).backward(ones)
    assert repr(graphed).startswith("<graphed callables[0] (")
    assert repr(graphed).endswith("double), sample 0: 1 call, 1 replay, 2 graphs>")
    graphed.reset()
    assert repr(graphed).endswith(": 1 call, 1 replay, 0 graphs, closed>")
