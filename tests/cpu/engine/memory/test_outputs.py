"""Static results: copies of them, and what they hold."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch

from stepgraph.engine.memory.outputs import StaticOutputs, detached


@dataclasses.dataclass
class Result:
    loss: Any
    name: str = "train"


def test_outputs_are_copied_and_do_not_alias() -> None:
    loss, logits = torch.ones(()), torch.ones(2, 3).t()
    outputs = StaticOutputs({"loss": loss, "rest": [logits, 3, None]})
    first, second = outputs.copier()(), outputs.copier()()
    loss.fill_(9)
    logits.fill_(9)
    for copy in (first, second):
        assert copy["loss"].item() == 1.0
        assert torch.equal(copy["rest"][0], torch.ones(3, 2))
        assert copy["rest"][1:] == [3, None]
    assert first["loss"].data_ptr() != second["loss"].data_ptr()
    assert first["rest"][0].stride() == logits.stride()


def test_outputs_of_a_lone_tensor_and_of_none() -> None:
    tensor = torch.ones(2)
    copy = StaticOutputs(tensor).copier()()
    tensor.zero_()
    assert copy.tolist() == [1.0, 1.0]
    assert StaticOutputs(None).copier()() is None
    assert StaticOutputs(3).copier()() == 3


def test_outputs_tree_is_the_static_memory_itself() -> None:
    tensor = torch.ones(2)
    tree = StaticOutputs([tensor]).tree
    assert tree[0].data_ptr() == tensor.data_ptr()


def test_outputs_are_detached() -> None:
    x = torch.ones(2, requires_grad=True)
    outputs = StaticOutputs(detached(Result(x * 2)))
    assert not outputs.copier()().loss.requires_grad
    assert not outputs.tree.loss.requires_grad
    assert outputs.copier()().name == "train"


def test_outputs_that_share_memory_are_returned_as_equal_copies() -> None:
    base = torch.arange(4.0)
    whole, part = StaticOutputs((base, base[1:])).copier()()
    assert torch.equal(whole[1:], part)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: Result(t)], ids=["tensor", "list", "dataclass"])
def test_outputs_do_not_hold_the_autograd_graph(wrap: Any) -> None:
    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            saved = x.clone()
            ctx.kept = saved
            watch.append(weakref.ref(saved))
            return x * 2

    watch: list[weakref.ref[torch.Tensor]] = []
    outputs = StaticOutputs(detached(wrap(Watched.apply(torch.ones(2, requires_grad=True)))))
    assert outputs.tensors[0].tolist() == [2.0, 2.0]
    assert watch[0]() is None, "a step's activations live on behind its result"


def test_detached_keeps_structure_and_values() -> None:
    x = torch.ones(2, requires_grad=True)
    result = detached({"loss": x * 2, "n": 3})
    assert result["loss"].tolist() == [2.0, 2.0]
    assert not result["loss"].requires_grad
    assert result["n"] == 3


def test_plain_values_are_all_but_the_tensors() -> None:
    def static_part(tree: Any) -> tuple[Any, list[Any]]:
        outputs = StaticOutputs(tree)
        return outputs.structure, outputs.plain_values

    one, two = static_part([torch.ones(1), 3, "a"]), static_part([torch.zeros(5), 3, "a"])
    assert one == two
    assert static_part([torch.ones(1), 4, "a"]) != one
    assert static_part((torch.ones(1), 3, "a")) != one
