"""Text changes a configuration: overrides, Megatron's flags, and other generations' names, each with one warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stepgraph
from stepgraph.config.overrides import CommandLine


def setting(config: stepgraph.ConfigContainer, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("model.cuda_graph_impl=local", "local"),
        ("model.cuda_graph_scope=attn,mlp", ["attn", "mlp"]),
        ("model.cuda_graph_scope=[attn, moe_router]", ["attn", "moe_router"]),
        ("model.cuda_graph_scope=['attn','mlp']", ["attn", "mlp"]),
        ("model.cuda_graph_scope=attn mlp", ["attn", "mlp"]),
        ("model.cuda_graph_scope=", []),
        ("model.cuda_graph_scope=[]", []),
        ("model.num_layers=4", 4),
        ("model.num_layers = 4", 4),
        ("--model.num_layers=4", 4),
        ("model.vocab_size=50_304", 50304),
        ("model.ffn_hidden_size=none", None),
        ("model.ffn_hidden_size=3072", 3072),
        ("model.moe_layer_freq=2", 2),
        ("model.moe_layer_freq=[0,1,1]", [0, 1, 1]),
        ("model.recompute_modules=core_attn,mlp", ["core_attn", "mlp"]),
        ("model.recompute_granularity=None", None),
        ("optimizer.lr=1e-4", 1e-4),
        ("optimizer.lr=1", 1.0),
        ("model.cpu_offloading=True", True),
        ("model.cpu_offloading=off", False),
        ("model.use_te_rng_tracker=null", None),
        ("ddp.check_for_nan_in_grad=device", "device"),
        ("ddp.check_for_nan_in_grad=false", False),
        ("ddp.check_for_nan_in_grad=none", None),
        ("checkpoint.save=runs/a=b", "runs/a=b"),
        ("checkpoint.save='none'", "none"),
        ("checkpoint.save=none", None),
        ("dataset.data_path=a.bin", "a.bin"),
        ("dataset.data_path=[a.bin, b.bin]", ["a.bin", "b.bin"]),
        ("dataset.split=949,50,1", "949,50,1"),
        ("train.rampup_batch_size=1,2,3", [1, 2, 3]),
    ],
)
def test_overrides_are_read_by_the_type_of_the_field(text: str, value: Any) -> None:
    config = stepgraph.ConfigContainer().override([text])
    name = text.partition("=")[0].strip().removeprefix("--")
    assert (setting(config, name), type(setting(config, name))) == (value, type(value))


def test_overrides_replace_whole_sections() -> None:
    config = stepgraph.ConfigContainer().override(["mixed_precision=bf16_mixed", "peft=lora", "peft.dim=8"])
    assert (config.mixed_precision.bf16, config.peft.scheme, config.peft.dim) == (True, "lora", 8)
    config.override(["peft=none"])
    assert (config.peft.scheme, config.peft.dim) == (None, 32)


@pytest.mark.parametrize(
    ("text", "rule", "fix"),
    [
        ("model.cuda_graph_imp=local", "config-field", "did you mean `model.cuda_graph_impl`?"),
        ("modle.num_layers=4", "config-field", "did you mean `model.num_layers`?"),
        ("num_layers=4", "config-field", "did you mean `model.num_layers`?"),
        ("xyz.num_layers=4", "config-field", "use one of them"),
        ("model.num_layers", "config-value", "model.num_layers=VALUE."),
        ("model", "config-value", "model.FIELD=VALUE."),
        ("layers", "config-field", "model.cuda_graph_impl=local, for example."),
        ("model.num_layers=four", "config-value", "of type int"),
        ("model.num_layers=4.5", "config-value", "of type int"),
        ("model.num_layers=none", "config-value", "of type int"),
        ("optimizer.lr=nan", "config-value", "give optimizer.lr a finite value"),
        ("optimizer.lr=-inf", "config-value", "give optimizer.lr a finite value"),
        ("model.cpu_offloading=maybe", "config-value", "of type bool"),
        ("model.cuda_graph_impl=transformer-engine", "config-value", "did you mean 'transformer_engine'?"),
        ("model.cuda_graph_scope=attn,moe_routr", "scope", "did you mean 'moe_router'?"),
        ("train.rampup_batch_size=1,b", "config-value", "list of int"),
        ("mixed_precision=bf61_mixed", "config-value", "did you mean 'bf16_mixed'?"),
        ("model=3", "config-value", "cfg.model = ModelSection(...)"),
    ],
)
def test_overrides_refuse_typos_with_the_nearest_name(text: str, rule: str, fix: str) -> None:
    with pytest.raises(stepgraph.InvalidArgument) as raised:
        stepgraph.ConfigContainer().override([text])
    assert raised.value.rule == rule
    assert fix in raised.value.fix


GENERATIONS = [
    ("enable_cuda_graph", True, {"cuda_graph_impl": "local"}),
    ("external_cuda_graph", True, {"cuda_graph_impl": "transformer_engine"}),
    ("cuda_graph_num_warmup_steps", 7, {"cuda_graph_warmup_steps": 7}),
    ("cuda_graph_modules", ["attn", "mlp"], {"cuda_graph_scope": ["attn", "mlp"]}),
    ("cuda_graph_modules", "attn, mlp", {"cuda_graph_scope": ["attn", "mlp"]}),
    ("cuda_graph_impl", "full_iteration", {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}),
    ("cuda_graph_share_io_buffers", True, {}),
]


@pytest.mark.parametrize(("name", "value", "fields"), GENERATIONS)
def test_cuda_graph_older_names_warn_once(name: str, value: Any, fields: dict[str, Any]) -> None:
    config, expected = stepgraph.ConfigContainer(), stepgraph.ConfigContainer()
    with pytest.warns(stepgraph.StepgraphWarning) as warned:
        setattr(config.model, name, value)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert f"model.{name}" in str(warned[0].message)
    for field, new in fields.items():
        setattr(expected.model, field, new)
        assert f"model.{field}=" in str(warned[0].message)
    assert config == expected


@pytest.mark.parametrize(("name", "value", "fields"), GENERATIONS)
def test_cuda_graph_older_names_are_read_as_text(name: str, value: Any, fields: dict[str, Any]) -> None:
    text = ",".join(value) if isinstance(value, list) else str(value)
    config = stepgraph.ConfigContainer()
    with pytest.warns(stepgraph.StepgraphWarning):
        config.override([f"model.{name}={text}"])
    assert {field: getattr(config.model, field) for field in fields} == fields


@pytest.mark.filterwarnings("ignore::stepgraph.StepgraphWarning")
def test_cuda_graph_older_switches_turn_off_their_own() -> None:
    config = stepgraph.ConfigContainer()
    config.model.enable_cuda_graph = True  # type: ignore[attr-defined]
    config.model.external_cuda_graph = False  # type: ignore[attr-defined]
    assert config.model.cuda_graph_impl == "local"
    config.model.enable_cuda_graph = False  # type: ignore[attr-defined]
    assert config.model.cuda_graph_impl == "none"
    newer = {"model": {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}}
    assert stepgraph.ConfigContainer.from_dict(newer).model.captures_iteration


@pytest.mark.parametrize(
    ("line", "settings", "warned"),
    [
        (
            "--enable-cuda-graph --cuda-graph-num-warmup-steps 3",
            {"model.cuda_graph_impl": "local", "model.cuda_graph_warmup_steps": 3},
            2,
        ),
        (
            "--enable-cuda-graph --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 1 --te-rng-tracker "
            "--no-check-for-nan-in-loss-and-grad",
            {
                "model.cuda_graph_impl": "local",
                "model.cuda_graph_scope": ["full_iteration"],
                "model.cuda_graph_warmup_steps": 1,
                "model.use_te_rng_tracker": True,
                "rng.te_rng_tracker": True,
                "rerun_state_machine.check_for_nan_in_loss": False,
                "ddp.check_for_nan_in_grad": False,
            },
            3,
        ),
        (
            "--cuda_graph_impl transformer_engine --cuda_graph_scope attn,moe_router,moe_preprocess",
            {
                "model.cuda_graph_impl": "transformer_engine",
                "model.cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"],
            },
            0,
        ),
        (
            "--cuda-graph-impl=local --cuda-graph-scope attn, mlp --cuda-graph-use-single-mempool",
            {
                "model.cuda_graph_impl": "local",
                "model.cuda_graph_scope": ["attn", "mlp"],
                "model.cuda_graph_use_single_mempool": True,
            },
            0,
        ),
        ("--external-cuda-graph", {"model.cuda_graph_impl": "transformer_engine"}, 1),
    ],
)
def test_cuda_graph_flags_of_megatron_are_read(line: str, settings: dict[str, Any], warned: int) -> None:
    config = stepgraph.ConfigContainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CommandLine.read(line.split()).apply_to(config)
    assert {name: setting(config, name) for name in settings} == settings
    assert len(caught) == warned, [str(each.message) for each in caught]
    config.model.num_moe_experts = 8 if "moe_router" in line else None
    config.validate(stepgraph.Environment())


def test_command_line_leaves_other_arguments_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[train]\ntrain_iters = 5\nglobal_batch_size = 4\n")
    line = CommandLine.read(
        ["--recipe", "llama3_8b", "--config", str(file), "--seed=3", "train.train_iters=7", "-g", "h200", "run.py"]
    )
    assert line.rest == ("--recipe", "llama3_8b", "--seed=3", "-g", "h200", "run.py")
    config = stepgraph.ConfigContainer()
    line.apply_to(config)
    assert (config.train.train_iters, config.train.global_batch_size) == (7, 4), "overrides come after files"


@pytest.mark.parametrize("words", [["--cuda-graph-scope"], ["--cuda-graph-impl", "--seed"], ["--te-rng-tracker=yes"]])
def test_cuda_graph_flags_refuse_wrong_numbers_of_values(words: list[str]) -> None:
    with pytest.raises(stepgraph.InvalidArgument) as raised:
        CommandLine.read(words)
    assert raised.value.rule == "config-value"


@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.parametrize(
    ("impl", "scope", "expected"),
    [
        ("transformer_engine", "attn,moe_router", ("transformer_engine", ["attn", "moe_router"], True, True)),
        ("local", None, ("local", ["mlp"], True, True)),
        ("none", None, ("none", ["mlp"], None, None)),
        (None, "attn", ("none", ["attn"], None, None)),
        (None, None, ("none", ["mlp"], None, None)),
    ],
)
def test_set_cuda_graph_overrides(kind: str, impl: str | None, scope: Any, expected: tuple[Any, ...]) -> None:
    recipe: Any = stepgraph.ConfigContainer()
    if kind == "theirs":
        model = SimpleNamespace(cuda_graph_impl="none", cuda_graph_scope=[], use_te_rng_tracker=None)
        recipe = SimpleNamespace(model=model, rng=SimpleNamespace(te_rng_tracker=None))
    recipe.model.cuda_graph_scope = ["mlp"]
    assert stepgraph.set_cuda_graph_overrides(recipe, cuda_graph_impl=impl, cuda_graph_scope=scope) is recipe
    found = recipe.model.cuda_graph_impl, recipe.model.cuda_graph_scope, recipe.model.use_te_rng_tracker
    assert (*found, recipe.rng.te_rng_tracker) == expected


def test_one_string_of_overrides_is_refused_with_a_list() -> None:
    with pytest.raises(stepgraph.InvalidArgument) as raised:
        stepgraph.ConfigContainer().override("model.num_layers=4 train.train_iters=2")
    assert "['model.num_layers=4', 'train.train_iters=2']" in raised.value.fix


def test_set_cuda_graph_overrides_refuses_typos() -> None:
    for kind, recipe in (
        ("ours", stepgraph.ConfigContainer()),
        ("theirs", SimpleNamespace(model=SimpleNamespace(), rng=SimpleNamespace())),
    ):
        with pytest.raises(stepgraph.InvalidArgument, match="locl"):
            stepgraph.set_cuda_graph_overrides(recipe, "locl")
        with pytest.raises(stepgraph.InvalidArgument, match="atn"):
            stepgraph.set_cuda_graph_overrides(recipe, "local", "atn")
        assert getattr(recipe.model, "cuda_graph_impl", "none") in ("none",), kind
