"""A configuration takes the names and types that it has, refuses others with the nearest name, and freezes."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import stepgraph
from stepgraph.config.model import ModelSection
from stepgraph.config.scope import CudaGraphScope, read_words
from stepgraph.config.section import Section
from stepgraph.config.values import sentences_of, types_of

SECTIONS = [
    *("model", "rng", "ddp", "rerun_state_machine", "optimizer", "scheduler", "train", "dataset", "checkpoint"),
    *("logger", "dist", "peft", "comm_overlap", "mixed_precision"),
]


class MegatronScope(enum.Enum):
    """As Megatron spells it: members with numbers."""

    attn = 1
    moe_router = 2


def container(**model: Any) -> stepgraph.ConfigContainer:
    config = stepgraph.ConfigContainer()
    for name, value in model.items():
        setattr(config.model, name, value)
    return config


def test_container_has_the_sections_of_megatron_bridge() -> None:
    config = stepgraph.ConfigContainer()
    assert [*config.sections()] == SECTIONS
    for name, section in config.sections().items():
        assert section.section_name == name
        assert sentences_of(type(section)).keys() == types_of(type(section)).keys()
        assert all(sentence.endswith(".") for sentence in sentences_of(type(section)).values())
    assert config.validate() == stepgraph.ConfigContainer().validate()


@pytest.mark.parametrize(
    "names",
    [
        "train.train_iters train.global_batch_size train.micro_batch_size train.eval_interval train.eval_iters",
        "optimizer.lr optimizer.min_lr scheduler.lr_warmup_iters scheduler.lr_decay_iters",
        "checkpoint.save checkpoint.load checkpoint.save_interval dataset.packed_sequence model.seq_length",
        "model.tensor_model_parallel_size model.pipeline_model_parallel_size model.expert_model_parallel_size",
        "model.virtual_pipeline_model_parallel_size model.context_parallel_size comm_overlap.delay_wgrad_compute",
        "model.delay_wgrad_compute model.add_bias_linear model.add_qkv_bias model.gradient_accumulation_fusion",
        "rng.seed rng.data_parallel_random_init rng.inference_rng_tracker rng.te_rng_tracker",
        "model.use_te_rng_tracker rerun_state_machine.check_for_nan_in_loss ddp.check_for_nan_in_grad",
        "model.recompute_granularity model.recompute_modules model.recompute_num_layers model.cpu_offloading",
    ],
)
def test_container_has_the_fields_that_users_know(names: str) -> None:
    config = stepgraph.ConfigContainer()
    for name in names.split():
        section, _, field = name.partition(".")
        assert field in types_of(type(getattr(config, section))), name


def test_fields_that_may_be_none_are_none_by_default() -> None:
    """So a TOML file, which has no None, can leave them out."""
    for name, section in stepgraph.ConfigContainer().sections().items():
        for field, hint in types_of(type(section)).items():
            if type(None) in get_args(hint):
                assert getattr(section, field) is None, f"{name}.{field}"


@pytest.mark.parametrize(
    "spelling", ["attn, moe_router", "attn moe_router", ["attn", "moe_router"], ("attn,moe_router",)]
)
def test_cuda_graph_scope_is_read_from_lists_and_text(spelling: Any) -> None:
    scope = container(cuda_graph_scope=spelling).model.cuda_graph_scope
    assert scope == ["attn", "moe_router"] == [CudaGraphScope.attn, CudaGraphScope.moe_router]
    assert "attn" in scope
    assert CudaGraphScope.attn in scope


@pytest.mark.parametrize(
    "spelling", [[*MegatronScope], [CudaGraphScope.attn, CudaGraphScope.moe_router], [MegatronScope.attn, "moe_router"]]
)
def test_cuda_graph_scope_is_read_from_enums(spelling: Any) -> None:
    assert container(cuda_graph_scope=spelling).model.cuda_graph_scope == ["attn", "moe_router"]


@pytest.mark.parametrize(("spelling", "words"), [(None, []), ("", []), ("full", []), ([], []), ("mlp,mlp", ["mlp"])])
def test_cuda_graph_scope_may_be_empty(spelling: Any, words: list[str]) -> None:
    assert read_words(spelling) == words


@pytest.mark.parametrize(
    ("spelling", "fix"),
    [
        ("atn", "did you mean 'attn'?"),
        ("moe-router", "did you mean 'moe_router'?"),
        (["attn", "full_iteraton"], "did you mean 'full_iteration'?"),
        ("xyz", "use one of full_iteration, attn, mlp, moe, moe_router, moe_preprocess, mamba."),
    ],
)
def test_cuda_graph_scope_typo_names_the_nearest_word(spelling: Any, fix: str) -> None:
    with pytest.raises(stepgraph.InvalidArgument) as raised:
        container(cuda_graph_scope=spelling)
    assert raised.value.rule == "scope"
    assert fix in raised.value.fix


def test_cuda_graph_words_are_public() -> None:
    assert stepgraph.VALID_CUDA_GRAPH_IMPLS == ["none", "local", "transformer_engine"]
    words = ["full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]
    assert words == stepgraph.VALID_CUDA_GRAPH_SCOPES
    assert [*stepgraph.CudaGraphScope] == stepgraph.VALID_CUDA_GRAPH_SCOPES
    assert {type(word) for word in stepgraph.VALID_CUDA_GRAPH_SCOPES} == {str}


@pytest.mark.parametrize(
    ("assign", "rule", "fix"),
    [
        (
            lambda c: setattr(c.model, "cuda_graph_imp", "local"),
            "config-field",
            "did you mean `model.cuda_graph_impl`?",
        ),
        (lambda c: setattr(c.train, "train_iter", 3), "config-field", "did you mean `train.train_iters`?"),
        (lambda c: setattr(c, "modle", None), "config-field", "did you mean `model`?"),
        (lambda c: setattr(c, "train", {"train_iter": 3}), "config-field", "did you mean `train.train_iters`?"),
        (lambda c: setattr(c.rng, "xyz", 3), "config-field", "the names are seed, te_rng_tracker"),
        (lambda c: delattr(c.rng, "seed"), "config-field", "assign None, or the default."),
        (lambda c: setattr(c.model, "cuda_graph_impl", "locl"), "config-value", "did you mean 'local'?"),
        (lambda c: setattr(c.model, "cuda_graph_impl", True), "config-value", "'none' or 'local'"),
        (lambda c: setattr(c.model, "num_layers", "3"), "config-value", "of type int"),
        (lambda c: setattr(c.model, "num_layers", True), "config-value", "of type int"),
        (lambda c: setattr(c.model, "num_layers", 3.0), "config-value", "of type int"),
        (lambda c: setattr(c.model, "num_layers", None), "config-value", "of type int"),
        (lambda c: setattr(c.optimizer, "lr", float("nan")), "config-value", "a finite value"),
        (lambda c: setattr(c.model, "cpu_offloading", "no"), "config-value", "of type bool"),
        (lambda c: setattr(c.model, "recompute_modules", "mlp"), "config-value", "list of str"),
        (lambda c: setattr(c.ddp, "check_for_nan_in_grad", "devise"), "config-value", "did you mean 'device'?"),
        (lambda c: setattr(c, "model", 3), "config-value", "cfg.model = ModelSection(...)"),
        (lambda c: setattr(c, "mixed_precision", "bf16_mixd"), "config-value", "did you mean 'bf16_mixed'?"),
    ],
)
def test_assignment_refuses_wrong_names_and_types(
    assign: Callable[[stepgraph.ConfigContainer], None], rule: str, fix: str
) -> None:
    config = stepgraph.ConfigContainer()
    with pytest.raises(stepgraph.InvalidArgument) as raised:
        assign(config)
    assert raised.value.rule == rule
    assert fix in raised.value.fix
    assert raised.traceback[-1].path == Path(__file__), "the traceback ends at the user's line"
    assert config == stepgraph.ConfigContainer(), "nothing is changed"


def test_assignment_stores_values_by_type() -> None:
    config = stepgraph.ConfigContainer()
    config.optimizer.lr = 1
    config.checkpoint.save = Path("runs") / "a"  # type: ignore[assignment]
    config.model.recompute_modules = ("mlp",)
    config.model.moe_layer_freq = [0, 1]
    config.mixed_precision = "bf16_mixed"  # type: ignore[assignment]
    config.peft = "lora"  # type: ignore[assignment]
    config.train = {"train_iters": 7}  # type: ignore[assignment]
    assert (config.optimizer.lr, type(config.optimizer.lr)) == (1.0, float)
    assert config.checkpoint.save == str(Path("runs") / "a")
    assert config.model.recompute_modules == ["mlp"]
    assert config.model.moe_layer_freq == [0, 1]
    assert (config.mixed_precision.bf16, config.mixed_precision.params_dtype) == (True, "bf16")
    assert (config.peft.scheme, config.train.train_iters) == ("lora", 7)
    config.peft = None  # type: ignore[assignment]
    assert config.peft.scheme is None


def test_copies_are_independent() -> None:
    config = container(cuda_graph_scope=["attn"])
    other = config.copy()
    other.model.cuda_graph_scope.append(CudaGraphScope.mlp)  # type: ignore[attr-defined]
    other.train.train_iters = 5
    assert config.model.cuda_graph_scope == ["attn"]
    assert config.train.train_iters == 20


def test_frozen_configuration_refuses_every_change() -> None:
    config = container(cuda_graph_impl="local", cuda_graph_scope=["attn"])
    frozen = config.validate()
    assert frozen.is_frozen
    assert not config.is_frozen
    for change in (
        lambda: setattr(frozen.model, "num_layers", 3),
        lambda: setattr(frozen, "model", ModelSection()),
        lambda: frozen.override(["model.num_layers=3"]),
        lambda: setattr(frozen.model, "enable_cuda_graph", True),
    ):
        with pytest.raises(stepgraph.InvalidArgument, match="validated configuration") as raised:
            change()
        assert raised.value.rule == "config-frozen"
    assert frozen.model.cuda_graph_scope == ("attn",)
    again = frozen.copy()
    again.model.num_layers = 3
    assert again.validate().model.num_layers == 3
    config.model = frozen.model
    config.model.num_layers = 3


def test_container_is_copied_and_pickled_as_any_dataclass() -> None:
    config = container(cuda_graph_impl="local", cuda_graph_scope=["attn"])
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert dataclasses.replace(config) == config
    assert copy.deepcopy(config.validate()).is_frozen


def test_fields_are_added_by_one_line() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Wider(ModelSection):
        extra_width: int = 3

    config = stepgraph.ConfigContainer(model=Wider())
    config.model.extra_width = 4  # type: ignore[attr-defined]
    config.override(["model.extra_width=5"])
    assert config.to_dict()["model"]["extra_width"] == 5
    assert config.copy().validate().model.extra_width == 5  # type: ignore[attr-defined]


def test_every_annotation_is_one_that_is_checked() -> None:
    """No field has a type that `fitted` would pass without a look."""

    def is_known(hint: Any) -> bool:
        if get_origin(hint) is Literal:
            return True
        if get_origin(hint) is Sequence:
            return is_known(get_args(hint)[0])
        if get_args(hint):
            return all(is_known(each) for each in get_args(hint))
        return hint in (int, float, bool, str, type(None), CudaGraphScope)

    for section in stepgraph.ConfigContainer().sections().values():
        assert isinstance(section, Section)
        assert all(is_known(hint) for hint in types_of(type(section)).values())
