"""Scopes: which parts of a model words, paths and globs name."""

from __future__ import annotations

import enum
import sys
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import InvalidArgument, ScopeRegistry
from stepgraph.engine.parts.modules.scopes import WORDS, read_scope
from stepgraph.lab.models import GPT, GPTConfig, Mamba, MambaConfig, MoEConfig, MoEGPT
from stepgraph.lab.models.gpt import Block


def paths(model: nn.Module, *scope: str, registry: ScopeRegistry | None = None) -> list[str]:
    return [part.path for part in (registry or ScopeRegistry()).resolve(model, read_scope(scope))]


def refusal(model: nn.Module, *scope: str) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        paths(model, *scope)
    assert caught.value.rule == "scope"
    return caught.value


@pytest.fixture
def gpt() -> GPT:
    return GPT(GPTConfig.tiny())


@pytest.fixture
def moe() -> MoEGPT:
    return MoEGPT(MoEConfig.tiny())


# -- how a scope is written


@pytest.mark.parametrize(
    "scope",
    ["attn,mlp", "attn, mlp", "attn mlp", " attn ,mlp ,", ["attn", "mlp"], ("attn ", " mlp"), ["attn,mlp"]],
    ids=repr,
)
def test_scope_is_a_list_or_a_string_with_commas_or_spaces(scope: list[str] | str) -> None:
    assert read_scope(scope) == ["attn", "mlp"]


@pytest.mark.parametrize("scope", ["", [], (), ",", [""]], ids=repr)
def test_scope_without_entries_is_empty(scope: list[str] | str) -> None:
    assert read_scope(scope) == []


class CudaGraphScope(enum.Enum):
    attn = 1
    mlp = 2


def test_scope_of_enum_members_is_read_by_their_names() -> None:
    assert read_scope(list(CudaGraphScope)) == ["attn", "mlp"]
    assert read_scope(CudaGraphScope.mlp) == ["mlp"]


def test_scope_of_something_else_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the scope has 3"):
        read_scope(["attn", 3])  # type: ignore[list-item]


# -- words


def test_words_name_the_parts_of_each_layer(gpt: GPT) -> None:
    assert paths(gpt, "attn") == ["blocks.0.attn", "blocks.1.attn"]
    assert paths(gpt, "mlp", "attn") == ["blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp"]


def test_words_of_a_mixture_of_experts_are_methods(moe: MoEGPT) -> None:
    assert paths(moe, "attn", "moe") == ["blocks.0.attn", "blocks.0.moe", "blocks.1.attn", "blocks.1.moe"]
    assert paths(moe, "moe_router") == ["blocks.0.moe.route", "blocks.1.moe.route"]
    parts = ScopeRegistry().resolve(moe, ["moe_router", "moe_preprocess"])
    assert [(part.method, part.module) for part in parts[:3]] == [
        ("route", moe.blocks[0].moe),
        ("preprocess", moe.blocks[0].moe),
        ("combine", moe.blocks[0].moe),
    ]


def test_word_of_a_state_space_model() -> None:
    assert paths(Mamba(MambaConfig.tiny()), "mamba") == ["blocks.0.mixer", "blocks.1.mixer"]


def test_empty_scope_is_whole_layers(gpt: GPT, moe: MoEGPT) -> None:
    for model in (gpt, moe, Mamba(MambaConfig.tiny())):
        assert paths(model) == ["blocks.0", "blocks.1"]


def test_empty_scope_takes_the_outermost_of_layers_in_layers() -> None:
    class Layer(nn.Module):
        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Layer(Layer()), Layer())
    assert paths(model, registry=ScopeRegistry().register(Layer, attn="inner")) == ["0", "1"]


def test_scope_of_one_layer_by_itself(gpt: GPT) -> None:
    layer = gpt.blocks[0]
    assert paths(layer) == [""]
    assert paths(layer, "attn") == ["attn"]


# -- paths


def test_path_names_one_module(gpt: GPT) -> None:
    assert paths(gpt, "blocks.1.mlp") == ["blocks.1.mlp"]
    assert paths(gpt, "blocks.1.mlp", "blocks.0") == ["blocks.0", "blocks.1.mlp"]


def test_path_names_a_method(moe: MoEGPT) -> None:
    (part,) = ScopeRegistry().resolve(moe, ["blocks.1.moe.run_experts"])
    assert (part.path, part.method, part.module) == ("blocks.1.moe.run_experts", "run_experts", moe.blocks[1].moe)


def test_path_to_forward_names_the_module(gpt: GPT) -> None:
    (part,) = ScopeRegistry().resolve(gpt, ["blocks.1.mlp.forward"])
    assert (part.path, part.method) == ("blocks.1.mlp", "forward")
    (whole,) = ScopeRegistry().resolve(gpt, ["forward"])
    assert (whole.path, whole.module) == ("", gpt)


def test_glob_star_is_one_segment(gpt: GPT, moe: MoEGPT) -> None:
    assert paths(gpt, "blocks.*.attn") == ["blocks.0.attn", "blocks.1.attn"]
    assert paths(gpt, "*.*.attn") == ["blocks.0.attn", "blocks.1.attn"]
    assert paths(gpt, "blocks.*") == ["blocks.0", "blocks.1"]
    assert paths(gpt, "blocks.0.*_norm") == ["blocks.0.attn_norm", "blocks.0.mlp_norm"]
    assert paths(moe, "blocks.*.moe.route") == ["blocks.0.moe.route", "blocks.1.moe.route"]
    refusal(gpt, "*.attn")


def test_part_that_two_entries_name_is_graphed_once(gpt: GPT) -> None:
    assert paths(gpt, "attn", "blocks.*.attn", "blocks.0.attn") == ["blocks.0.attn", "blocks.1.attn"]


def test_module_in_two_places_is_graphed_once() -> None:
    shared = nn.Linear(2, 2)
    assert paths(nn.Sequential(shared, nn.ReLU(), shared), "0", "2") == ["0"]


# -- refusals


def test_typo_names_the_nearest_word(gpt: GPT) -> None:
    error = refusal(gpt, "atn")
    assert error.what == "the scope 'atn' matches nothing in GPT"
    assert error.fix.startswith("did you mean 'attn'?")


def test_typo_in_a_path_names_the_nearest_path(gpt: GPT) -> None:
    assert refusal(gpt, "blocks.0.mpl").fix.startswith("did you mean 'blocks.0.mlp'?")


@pytest.mark.parametrize(
    ("scope", "meant"),
    [
        ("block.*.attn", "blocks.*.attn"),
        ("blocks.*.atn", "blocks.*.attn"),
        ("blocks.*.mpl*", "blocks.*.mlp"),
        ("blocks.0.att?*x", "blocks.0.attn"),
    ],
)
def test_typo_in_a_glob_keeps_its_wildcards(gpt: GPT, scope: str, meant: str) -> None:
    assert refusal(gpt, scope).fix.startswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize("scope", ["blocks", "block*", "blocks.*"])
def test_container_stands_for_its_children(gpt: GPT, scope: str) -> None:
    assert paths(gpt, scope) == ["blocks.0", "blocks.1"]


def test_star_reaches_into_containers() -> None:
    inner = nn.ModuleDict({"one": nn.Linear(2, 2), "lists": nn.ModuleList([nn.ReLU(), nn.ModuleList()])})
    assert paths(nn.ModuleDict({"parts": inner, "head": nn.Linear(2, 2)}), "*") == [
        "parts.one",
        "parts.lists.0",
        "head",
    ]
    assert "did you mean 'parts'" not in refusal(nn.ModuleDict({"parts": nn.ModuleList()}), "parts").fix


@pytest.mark.parametrize(
    ("registered", "tails", "fix"),
    [("attnn", "'attnn'", "attn='attn'"), (("ffn.up", "gate"), "'ffn.up or gate'", "attn='...'")],
)
def test_registered_part_that_is_missing_is_named(gpt: GPT, registered: Any, tails: str, fix: str) -> None:
    registry = ScopeRegistry().register(Block, attn=registered, mlp="mlp")
    with pytest.raises(InvalidArgument) as caught:
        registry.resolve(gpt, ["mlp", "attn"])
    assert (
        caught.value.what == f"'attn' is registered as {tails} for Block, and a Block has no such submodule or method"
    )
    assert caught.value.fix == f"ScopeRegistry().register(Block, {fix})."
    assert [part.path for part in registry.resolve(gpt, ["mlp"])] == ["blocks.0.mlp", "blocks.1.mlp"]


def test_scope_that_matches_nothing_lists_what_the_model_has(gpt: GPT) -> None:
    words, layers, modules = refusal(gpt, "moe_router").details
    assert words == "words here  attn, mlp"
    assert layers == "layers      Block"
    assert "blocks.0.attn" in modules
    assert "..." in modules


def test_words_without_a_known_layer_say_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    error = refusal(model, "attn")
    assert list(error.details) == [
        "words here  none: no layer of a known class",
        "layers      none of a known class",
        "modules     0",
    ]
    assert "ScopeRegistry().register" in error.fix
    assert refusal(model).what == "no scope was given, and Sequential has no layer of a known class"


@pytest.mark.parametrize("scope", [("moe", "moe_router"), ("blocks.0", "attn"), ("blocks.*.moe", "blocks.1.moe.norm")])
def test_nested_parts_are_refused(moe: MoEGPT, scope: tuple[str, ...]) -> None:
    error = refusal(moe, *scope)
    assert "which is inside it" in error.what
    assert "covers" in error.fix


def test_nested_parts_are_not_mistaken_by_a_common_prefix() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)})
    assert paths(model, "a", "ab") == ["a", "ab"]


def test_attribute_that_computes_nothing_is_no_part(gpt: GPT) -> None:
    for entry in (
        "blocks.0.parameters",
        "blocks.0.train",
        "blocks.0.training",
        "blocks.0.attn.q_proj.weight",
        "nope.x",
    ):
        refusal(gpt, entry)


# -- the registry


class Parts(nn.Module):
    """A layer of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ffn = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.mix(x))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)


class Special(Parts):
    pass


def test_registered_class_and_its_subclasses_have_words() -> None:
    registry = ScopeRegistry().register(Parts, attn="mix", mlp="ffn")
    model = nn.Sequential(Parts(), Special())
    assert paths(model, "attn", "mlp", registry=registry) == ["0.mix", "0.ffn", "1.mix", "1.ffn"]
    assert paths(model, registry=registry) == ["0", "1"]


def test_registered_subclass_goes_before_its_base() -> None:
    registry = ScopeRegistry().register(Parts, mlp="ffn").register(Special, mlp=["attention", "ffn"])
    assert paths(nn.Sequential(Parts(), Special()), "mlp", registry=registry) == ["0.ffn", "1.attention", "1.ffn"]


def test_registration_does_not_reach_other_registries() -> None:
    ScopeRegistry().register(Parts, mlp="ffn")
    refusal(nn.Sequential(Parts()), "mlp")


def test_registration_with_an_unknown_word_names_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="'moe_routr' is not a scope") as caught:
        ScopeRegistry().register(Parts, moe_routr="ffn")
    assert caught.value.fix == "did you mean 'moe_router'?"
    assert "attn, mlp, moe, moe_router, moe_preprocess, mamba" in caught.value.why


def test_graph_modules_takes_a_registry_and_puts_everything_back() -> None:
    model = nn.Sequential(Parts(), Parts())
    with stepgraph.graph_modules(
        model, "attn, mlp", registry=ScopeRegistry().register(Parts, attn="mix", mlp="ffn")
    ) as h:
        assert h.paths == ["0.mix", "0.ffn", "1.mix", "1.ffn"]
        assert "mix" in vars(model[0])
    assert "mix" not in vars(model[0])
    assert "forward" not in vars(model[0].ffn)


# -- Hugging Face, by name


def fake_layer(name: str, library: str = "transformers.models", **parts: nn.Module) -> nn.Module:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    body = {"__module__": f"{library}.{name.lower()}", "forward": forward, "preprocess": forward}
    module = type(name, (nn.Module,), body)()
    for part, value in parts.items():
        module.add_module(part, value)
    return module


@pytest.fixture
def routed() -> nn.Module:
    class Routed(nn.Module):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return Routed(gate=nn.Linear(2, 2), router=nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "attention", "feed_forward", "expected"),
    [
        ("GPT2Block", "attn", "mlp", {"attn": ["0.attn"], "mlp": ["0.mlp"]}),
        ("LlamaDecoderLayer", "self_attn", "mlp", {"attn": ["0.self_attn"], "mlp": ["0.mlp"]}),
        ("Qwen3DecoderLayer", "self_attn", "mlp", {"attn": ["0.self_attn"], "mlp": ["0.mlp"]}),
        ("Qwen3MoeDecoderLayer", "self_attn", "mlp", {"moe": ["0.mlp"], "moe_router": ["0.mlp.gate"]}),
        ("MixtralDecoderLayer", "self_attn", "mlp", {"moe": ["0.mlp"], "moe_router": ["0.mlp.gate"]}),
        (
            "MixtralDecoderLayer",
            "self_attn",
            "block_sparse_moe",
            {"moe": ["0.block_sparse_moe"], "moe_router": ["0.block_sparse_moe.gate"]},
        ),
        ("GptOssDecoderLayer", "self_attn", "mlp", {"moe": ["0.mlp"], "moe_router": ["0.mlp.router"]}),
    ],
)
def test_huggingface_layers_are_known_by_name(
    name: str, attention: str, feed_forward: str, expected: dict[str, list[str]], routed: nn.Module
) -> None:
    layer = fake_layer(name, **{attention: nn.Linear(2, 2), feed_forward: routed})
    for word, found in expected.items():
        assert paths(nn.Sequential(layer), word) == found
    assert paths(nn.Sequential(layer)) == ["0"]
    subclass = type("Mine", (type(layer),), {"__module__": "mine"})()
    assert paths(nn.Sequential(subclass)) == ["0"]


def test_huggingface_names_of_other_libraries_are_not_known() -> None:
    layer = type("LlamaDecoderLayer", (nn.Linear,), {"__module__": "elsewhere"})(2, 2)
    refusal(nn.Sequential(layer))


def test_megatron_layers_are_known_by_name() -> None:
    """One class of layer for all kinds: what stands in it decides, and nothing of megatron is imported."""

    def make(name: str, **parts: nn.Module) -> nn.Module:
        return fake_layer(name, "megatron.core", **parts)

    moe = make("MoELayer", router=nn.Linear(2, 2))
    model = nn.Sequential(
        make("TransformerLayer", self_attention=nn.Linear(2, 2), mlp=nn.Linear(2, 2)),
        make("TransformerLayer", self_attention=nn.Linear(2, 2), mlp=moe),
        make("TransformerLayer", self_attention=make("IdentityOp"), mlp=nn.Linear(2, 2)),
        make("MambaLayer", mixer=nn.Linear(2, 2)),
    )
    expected = {
        "attn": ["0.self_attention", "1.self_attention"],
        "mlp": ["0.mlp", "2.mlp"],
        "moe": ["1.mlp"],
        "moe_router": ["1.mlp.router"],
        "moe_preprocess": ["1.mlp.preprocess"],
        "mamba": ["3.mixer"],
    }
    assert {word: paths(model, word) for word in expected} == expected
    assert paths(model) == ["0", "1", "2", "3"]
    assert "megatron" not in sys.modules


def test_words_are_those_of_the_field() -> None:
    assert WORDS == ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
