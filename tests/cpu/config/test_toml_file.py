"""A configuration is the same after a round trip through dicts and TOML, whatever its values."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stepgraph
from stepgraph.config.scope import CudaGraphScope
from stepgraph.config.values import types_of


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if hint == Sequence[CudaGraphScope]:
        return st.lists(st.sampled_from(CudaGraphScope), unique=True)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is Sequence:
        return st.lists(values(get_args(hint)[0]), max_size=3)
    if get_args(hint):
        return st.one_of(*(values(each) for each in get_args(hint)))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        type(None): st.none(),
    }
    return plain[hint]


FIELDS = [
    (name, field, hint)
    for name, section in stepgraph.ConfigContainer().sections().items()
    for field, hint in types_of(type(section)).items()
]
CHANGES = st.lists(
    st.sampled_from(FIELDS).flatmap(lambda each: st.tuples(st.just(each[0]), st.just(each[1]), values(each[2]))),
    max_size=12,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=CHANGES)
def test_configuration_survives_round_trips(changes: list[tuple[str, str, Any]]) -> None:
    config = stepgraph.ConfigContainer()
    for section, field, value in changes:
        setattr(getattr(config, section), field, value)
    assert stepgraph.ConfigContainer.from_dict(config.to_dict()) == config
    assert stepgraph.ConfigContainer.from_dict(tomllib.loads(config.to_toml())) == config
    assert config.copy() == config
    assert config.frozen().copy() == config
    assert stepgraph.ConfigContainer.from_dict(config.frozen().to_dict()) == config


@settings(max_examples=30, deadline=None)
@given(
    change=st.sampled_from(FIELDS)
    .filter(lambda each: str not in (each[2], *get_args(each[2])) and Sequence[str] != each[2])
    .flatmap(lambda each: st.tuples(st.just(each[0]), st.just(each[1]), values(each[2])))
)
def test_values_survive_as_overrides(change: tuple[str, str, Any]) -> None:
    section, field, value = change
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    config, expected = stepgraph.ConfigContainer(), stepgraph.ConfigContainer()
    setattr(getattr(expected, section), field, value)
    if not (isinstance(value, list) and len(value) < 2 and field == "moe_layer_freq"):  # 1 is a number there
        assert config.override([f"{section}.{field}={text}"]) == expected


def test_toml_file_is_read_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'mixed_precision = "bf16_mixed"\n'
        '[model]\ncuda_graph_impl = "local"\ncuda_graph_scope = "attn, mlp"\n'
        "[optimizer]\nlr = 1\n[checkpoint]\nsave_interval = 10\n"
    )
    config = stepgraph.ConfigContainer.from_toml(file)
    assert config.model.cuda_graph_scope == ["attn", "mlp"]
    assert (config.optimizer.lr, config.checkpoint.save_interval, config.mixed_precision.bf16) == (1.0, 10, True)
    assert config.train.train_iters == 20
    file.write_text(config.to_toml())
    assert stepgraph.ConfigContainer.from_toml(file) == config


@pytest.mark.parametrize(
    ("text", "rule", "message"),
    [
        (None, "config-file", "No such file"),
        (None, "config-file", "correct the path"),
        ("[optimizer]\nlr = nan\n", "config-value", "optimizer.lr = nan is not a finite number"),
        ("[model\n", "config-file", "line 1"),
        (b"\xff", "config-file", "utf-8"),
        ("[modle]\n", "config-field", "did you mean `model`?"),
        ("[model]\nnum_layer = 3\n", "config-field", "did you mean `model.num_layers`?"),
        ('[model]\nnum_layers = "3"\n', "config-value", "is not int"),
        (
            "num_layers = 3\n",
            "config-field",
            "did you mean `model.num_layers`? In a TOML file it stands under `[model]`.",
        ),
        ("model = 3\n", "config-value", "is not a ModelSection"),
    ],
)
def test_toml_file_errors_name_the_place(text: str | bytes | None, rule: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(stepgraph.InvalidArgument) as raised:
        stepgraph.ConfigContainer.from_toml(file)
    assert raised.value.rule == rule
    assert message in str(raised.value)
