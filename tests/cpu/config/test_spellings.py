"""A Megatron configuration of any generation says the same thing in other words, or contradicts itself by name."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stepgraph
from stepgraph.config.overrides import CommandLine
from stepgraph.config.spellings import GraphSettings
from stepgraph.engine.parts.modules.options import ModuleOptions, options_from


class CudaGraphScope(enum.Enum):
    """As Megatron spells it: members with numbers."""

    attn = 1
    moe_router = 2
    full_iteration = 3


def read(**fields: Any) -> GraphSettings:
    return GraphSettings.of(SimpleNamespace(**fields))


@pytest.mark.parametrize("name", ["cuda_graph_scope", "cuda_graph_modules"])
@pytest.mark.parametrize(
    ("value", "scope"),
    [
        (None, ()),
        ([], ()),
        ("", ()),
        ("full", ()),
        (["full"], ()),
        ("attn", ("attn",)),
        ("attn, mlp,moe_router", ("attn", "mlp", "moe_router")),
        (["attn", "layers.*.mlp"], ("attn", "layers.*.mlp")),
        (("attn",), ("attn",)),
        (CudaGraphScope.attn, ("attn",)),
        ([CudaGraphScope.attn, CudaGraphScope.moe_router], ("attn", "moe_router")),
    ],
)
def test_settings_read_every_form_of_a_scope(name: str, value: Any, scope: tuple[str, ...]) -> None:
    settings = read(**{name: value})
    assert settings == GraphSettings(scope=scope)
    assert settings.reason_for_eager is None


@pytest.mark.parametrize(
    ("fields", "impl"),
    [
        ({}, None),
        ({"cuda_graph_impl": None}, None),
        ({"cuda_graph_impl": "none", "cuda_graph_scope": ["attn"]}, "none"),
        ({"cuda_graph_impl": "local"}, "local"),
        ({"cuda_graph_impl": "transformer_engine"}, "transformer_engine"),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "full_iteration"),
        ({"cuda_graph_scope": [CudaGraphScope.full_iteration]}, "full_iteration"),
        ({"enable_cuda_graph": True}, "local"),
        ({"external_cuda_graph": True, "enable_cuda_graph": False}, "transformer_engine"),
        ({"external_cuda_graph": False, "enable_cuda_graph": False}, "none"),
        ({"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_impl": "local"}, "local"),
        ({"enable_cuda_graph": True, "cuda_graph_impl": "local"}, "local"),
        ({"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}, "full_iteration"),
        # what Megatron itself makes of the one above, all fields left standing
        (
            {
                "enable_cuda_graph": True,
                "cuda_graph_scope": ["full_iteration"],
                "cuda_graph_modules": [],
                "cuda_graph_impl": "full_iteration",
            },
            "full_iteration",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_settings_read_every_name_of_an_implementation(fields: dict[str, Any], impl: str | None) -> None:
    settings = read(**fields)
    assert (settings.impl, settings.scope) == (impl, ())
    reason = settings.reason_for_eager
    assert (reason is not None) == (impl in ("none", "full_iteration"))
    assert options_from(SimpleNamespace(use_te_rng_tracker=True, **fields)).eager_reason == reason


@pytest.mark.parametrize("fields", [{"cuda_graph_modules": "full"}, {"cuda_graph_modules": ["mlp", "attn"]}])
def test_settings_both_names_of_a_scope_may_agree(fields: dict[str, Any]) -> None:
    """The default of the new name says nothing against the old one."""
    assert {*read(cuda_graph_scope="attn,mlp", **fields).scope} == {"attn", "mlp"}


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, 3),
        ({"cuda_graph_warmup_steps": 7}, 7),
        ({"cuda_graph_num_warmup_steps": 7}, 7),
        ({"cuda_graph_num_warmup_steps": 7, "cuda_graph_warmup_steps": 7}, 7),
    ],
)
@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_settings_read_both_names_of_the_warm_up(fields: dict[str, Any], steps: int) -> None:
    assert options_from(SimpleNamespace(**fields)) == ModuleOptions(warmup=steps)


@pytest.mark.parametrize(
    ("fields", "new"),
    [
        ({"enable_cuda_graph": True}, "cuda_graph_impl='local'"),
        ({"external_cuda_graph": True}, "cuda_graph_impl='transformer_engine'"),
        ({"cuda_graph_num_warmup_steps": 7}, "cuda_graph_warmup_steps=7"),
    ],
)
def test_settings_older_names_are_reported_with_the_new_one(fields: dict[str, Any], new: str) -> None:
    with pytest.warns(stepgraph.StepgraphWarning, match=f"(?s){next(iter(fields))} is an older name.*{new}"):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"cuda_graph_scope": ["attn"], "cuda_graph_modules": ["mlp"]}, ["cuda_graph_scope", "cuda_graph_modules"]),
        ({"cuda_graph_scope": ["attn"], "cuda_graph_modules": []}, ["cuda_graph_scope", "cuda_graph_modules"]),
        ({"cuda_graph_scope": ["full", "attn"]}, ["'full' in cuda_graph_scope", "attn"]),
        ({"cuda_graph_modules": "full_iteration,attn"}, ["'full_iteration' in cuda_graph_modules", "attn"]),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["attn"]}, ["full_iteration", "attn"]),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full_iteration"},
            ["full_iteration", "cuda_graph_impl='transformer_engine'"],
        ),
        ({"enable_cuda_graph": True, "external_cuda_graph": True}, ["enable_cuda_graph", "external_cuda_graph"]),
        ({"enable_cuda_graph": True, "cuda_graph_impl": "none"}, ["enable_cuda_graph=True", "cuda_graph_impl='none'"]),
        (
            {"external_cuda_graph": True, "cuda_graph_impl": "local"},
            ["external_cuda_graph=True", "cuda_graph_impl='local'"],
        ),
        (
            {"cuda_graph_warmup_steps": 3, "cuda_graph_num_warmup_steps": 7},
            ["cuda_graph_warmup_steps=3", "cuda_graph_num_warmup_steps=7"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(stepgraph.InvalidArgument, match="contradicts itself") as raised:
        read(**fields)
    assert raised.value.rule == "option"
    assert all(name in raised.value.what for name in names)


@pytest.mark.parametrize(
    ("fields", "rule", "fix"),
    [
        ({"cuda_graph_impl": "locl"}, "option", "did you mean 'local'?"),
        ({"cuda_graph_impl": "transformer-engine"}, "option", "did you mean 'transformer_engine'?"),
        ({"cuda_graph_impl": 3}, "option", "use one of none, local, transformer_engine, full_iteration."),
        ({"cuda_graph_modules": "full_iteraton"}, "scope", "did you mean 'full_iteration'?"),
        ({"cuda_graph_modules": 3}, "scope", "pass strings"),
        ({"cuda_graph_warmup_steps": "3"}, "option", "pass cuda_graph_warmup_steps=3"),
        ({"cuda_graph_num_warmup_steps": True}, "option", "pass cuda_graph_num_warmup_steps=3"),
        ({"cuda_graph_warmup_steps": -1}, "option", "pass cuda_graph_warmup_steps=3"),
    ],
)
def test_settings_name_the_nearest_word(fields: dict[str, Any], rule: str, fix: str) -> None:
    with pytest.raises(stepgraph.InvalidArgument) as raised:
        read(**fields)
    assert raised.value.rule == rule
    assert raised.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("line", "one", "other"),
    [
        ("--enable-cuda-graph --cuda-graph-impl none", "enable_cuda_graph=True", "cuda_graph_impl='none'"),
        ("--cuda-graph-impl none --enable-cuda-graph", "enable_cuda_graph=True", "cuda_graph_impl='none'"),
        ("--external-cuda-graph --cuda-graph-impl local", "external_cuda_graph=True", "cuda_graph_impl='local'"),
        ("--enable-cuda-graph --external-cuda-graph", "enable_cuda_graph=True", "external_cuda_graph=True"),
        ("--cuda-graph-scope attn --cuda-graph-modules mlp", "cuda_graph_modules=['mlp']", "cuda_graph_scope=['attn']"),
        (
            "--cuda-graph-warmup-steps 3 --cuda-graph-num-warmup-steps 4",
            "cuda_graph_warmup_steps=3",
            "cuda_graph_num_warmup_steps=4",
        ),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_flags_that_contradict_each_other_are_refused(
    line: str, one: str, other: str, is_file: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    read = CommandLine.read(line.split())
    if is_file:  # the same settings in one file
        lines = [text.partition("=")[::2] for text in read.overrides]
        values = [f"{n.partition('.')[2]} = {v if v == 'true' or v.isdigit() else repr(v)}" for n, v in lines]
        (tmp_path / "run.toml").write_text("\n".join(["[model]", *values]))
        read = CommandLine.read(["--config", str(tmp_path / "run.toml")])
    config = stepgraph.ConfigContainer()
    with pytest.raises(stepgraph.InvalidArgument) as caught:
        read.apply_to(config)
    assert caught.value.rule == "option"
    assert one in str(caught.value)
    assert other in str(caught.value)
    assert config == stepgraph.ConfigContainer()


@pytest.mark.parametrize(
    ("line", "impl"),
    [
        ("--enable-cuda-graph --cuda-graph-impl local", "local"),
        ("--cuda-graph-impl local --external-cuda-graph --cuda-graph-impl transformer_engine", "transformer_engine"),
        ("model.enable_cuda_graph=false model.cuda_graph_impl=local", "local"),
        ("model.cuda_graph_impl=local model.enable_cuda_graph=false", "local"),
        ("--cuda-graph-impl none --cuda-graph-impl local", "local"),
    ],
)
@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_flags_that_agree_are_read_in_any_order(line: str, impl: str) -> None:
    config = stepgraph.ConfigContainer()
    CommandLine.read(line.split()).apply_to(config)
    assert config.model.cuda_graph_impl == impl


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_command_line_may_undo_a_switch_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model]\nenable_cuda_graph = true")
    config = stepgraph.ConfigContainer()
    CommandLine.read(["--config", str(tmp_path / "run.toml"), "--cuda-graph-impl", "none"]).apply_to(config)
    assert config.model.cuda_graph_impl == "none"


@pytest.mark.parametrize("value", ["false", "true", 1, 0.0])
def test_older_switch_of_another_type_is_refused(value: Any) -> None:
    config = stepgraph.ConfigContainer()
    with pytest.raises(stepgraph.InvalidArgument) as caught:
        config.model.enable_cuda_graph = value  # type: ignore[attr-defined]
    assert caught.value.rule == "config-value"
