"""One table has the range of every number of a configuration: what torch would refuse is refused before a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import stepgraph
from stepgraph.config.bounds import BOUNDS, Bounds
from stepgraph.config.environment import Environment
from stepgraph.config.overrides import apply_overrides
from stepgraph.config.values import types_of
from stepgraph.core.errors import StepgraphError


def numbers() -> Iterator[str]:
    """The numeric fields, and those that are lists of numbers, with their names in the table."""
    for section, kind in types_of(stepgraph.ConfigContainer).items():
        for field, hint in types_of(kind).items():
            choices = (hint,) if get_origin(hint) is Sequence else get_args(hint) or (hint,)
            if {int, float} & {*choices}:
                yield f"{section}.{field}"
            if any(get_origin(choice) is Sequence and int in get_args(choice) for choice in choices):
                yield f"{section}.{field}[]"


def set_to(name: str, value: Any) -> stepgraph.ConfigContainer:
    cfg = stepgraph.ConfigContainer()
    section, _, field = name.removesuffix("[]").partition(".")
    setattr(getattr(cfg, section), field, [value] if name.endswith("[]") else value)
    return cfg


def refusal(name: str, value: Any) -> str:
    """The text of the refusal of a value; empty if it is taken."""
    try:
        set_to(name, value).validate(Environment())
    except StepgraphError as error:
        return str(error)
    return ""


def test_bounds_has_every_number_of_a_configuration() -> None:
    assert set(BOUNDS) == set(numbers())


@pytest.mark.parametrize("value", [10**20, -(10**20), 10**400, 10**5000], ids=["large", "negative", "huge", "longest"])
def test_bounds_refuse_huge_numbers_of_anything(value: int) -> None:
    for name in BOUNDS:
        assert name.removesuffix("[]") in refusal(name, value), name


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("optimizer.adam_beta1", 1.0, "from 0 to less than 1"),
        ("optimizer.adam_beta2", -0.1, "from 0 to less than 1"),
        ("optimizer.adam_eps", -1e-8, "at least 0"),
        ("optimizer.sgd_momentum", -0.9, "at least 0"),
        ("model.init_method_std", -0.02, "at least 0"),
        ("model.layernorm_epsilon", -1e-5, "at least 0"),
        ("model.rotary_base", 0.0, "more than 0"),
        ("model.moe_layer_freq", 0, "at least 1"),
        ("model.moe_layer_freq[]", 2, "from 0 to 1"),
        ("peft.dropout", 1.0, "from 0 to less than 1"),
        ("rng.seed", 2**63 - 1, f"to {2**32}"),
        ("dataset.random_seed", -(2**62), f"from {-(2**32)}"),
        ("dist.distributed_timeout_minutes", 2**31 - 1, "from 1 to 527040"),
    ],
)
def test_bounds_refuse_what_torch_refuses(name: str, value: Any, text: str) -> None:
    found = refusal(name, value)
    assert "[config-value]" in found
    assert f"{name.removesuffix('[]')}={value}" in found
    assert text in found


def test_bounds_take_their_ends() -> None:
    for name, bounds in BOUNDS.items():
        kind = types_of(type(getattr(stepgraph.ConfigContainer(), name.partition(".")[0])))
        is_float = "float" in str(kind[name.removesuffix("[]").partition(".")[2]])
        for end, is_open in ((bounds.least, bounds.is_open_below), (bounds.most, bounds.is_open_above)):
            value = float(end) if is_float else int(end)
            assert (f"{name.removesuffix('[]')}={value}: {bounds}" in refusal(name, value)) == is_open, (name, value)


def test_bounds_are_spelled_out() -> None:
    assert str(Bounds(1, 2**31 - 1)) == "at least 1, and at most 2147483647"
    assert str(Bounds(0, 1, is_open_above=True)) == "from 0 to less than 1"


def test_toml_integer_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nnum_layers = " + "9" * 5000)
    with pytest.raises(stepgraph.InvalidArgument) as caught:
        stepgraph.ConfigContainer.from_toml(file)
    assert caught.value.rule == "config-file"


@pytest.mark.parametrize("text", ["123456789012345678901", "-123456789012345678901"])
def test_typed_number_of_many_digits_is_out_of_range(text: str) -> None:
    with pytest.raises(StepgraphError, match="more than 64 bits"):
        apply_overrides(stepgraph.ConfigContainer(), [f"train.train_iters={text}"])
