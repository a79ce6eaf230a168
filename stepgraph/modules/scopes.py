"""A scope names the parts of a model that are graphed, by the field's words or by path.

A word (`attn`, `mlp`, `moe`, `moe_router`, `moe_preprocess`, `mamba`) means something else in each model, so a registry
says for each class of layer which of its submodules or methods a word stands for. Without words, whole layers are
meant. Anything else is a path from the model: `"layers.3.mlp"`, or a glob, `"layers.*.self_attn"`, in which `*` stands
for one segment, or a part of one. A path may end in a method: `"layers.*.moe.route"`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from stepgraph.config.scope import read_scope as read_scope
from stepgraph.errors import InvalidArgument, nearest
from stepgraph.tracebacks import entry_point

WORDS = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
_FULL_ITERATION = "full_iteration"
_LLAMA = MappingProxyType({"attn": ("self_attn",), "mlp": ("mlp",)})
_ROUTED = {"attn": ("self_attn",), "moe": ("mlp",), "moe_router": ("mlp.gate",)}
_SHIPPED: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "stepgraph.Block": {"attn": ("attn",), "mlp": ("mlp",)},
        "stepgraph.MoEBlock": {
            "attn": ("attn",),
            "moe": ("moe",),
            "moe_router": ("moe.route",),
            "moe_preprocess": ("moe.preprocess", "moe.combine"),
        },
        "stepgraph.MambaBlock": {"mamba": ("mixer",)},
        "stepgraph.AttentionBlock": {"attn": ("attn",)},
        "stepgraph.MLPBlock": {"mlp": ("mlp",)},
        "stepgraph.VisionBlock": {"attn": ("attn",), "mlp": ("mlp",)},
        "transformers.GPT2Block": {"attn": ("attn",), "mlp": ("mlp",)},
        "transformers.LlamaDecoderLayer": _LLAMA,
        "transformers.Qwen3DecoderLayer": _LLAMA,
        "transformers.Qwen3MoeDecoderLayer": _ROUTED,
        "transformers.MixtralDecoderLayer": {
            "attn": ("self_attn",),
            "moe": ("mlp", "block_sparse_moe"),  # as later and earlier releases call it
            "moe_router": ("mlp.gate", "block_sparse_moe.gate"),
        },
        "transformers.GptOssDecoderLayer": {**_ROUTED, "moe_router": ("mlp.router",)},
        "megatron.TransformerLayer": {"attn": ("self_attention",), "mlp": ("mlp",)},
        "megatron.MoELayer": {"moe": ("forward",), "moe_router": ("router",), "moe_preprocess": ("preprocess",)},
        "megatron.MambaLayer": {"mamba": ("mixer",)},
        "transformer_engine.TransformerLayer": {"attn": ("self_attention",), "mlp": ("layernorm_mlp",)},
    }
)


@dataclass(frozen=True, slots=True)
class Part:
    """Something to graph: a module, or one of its methods."""

    path: str
    module: torch.nn.Module
    method: str = "forward"


class ScopeRegistry:
    """What the words of a scope mean for each class of layer. Each `graph_modules` call may be given its own."""

    def __init__(self) -> None:
        self._layers: dict[type | str, Mapping[str, tuple[str, ...]]] = {}
        self._layers.update(_SHIPPED)

    @entry_point
    def register(self, layer: type[torch.nn.Module], **words: str | Sequence[str]) -> ScopeRegistry:
        """Say which submodule or method of a class of layer each word stands for.

        Example:
            >>> registry = stepgraph.ScopeRegistry().register(MyLayer, attn="attention", mlp="ffn")
            >>> stepgraph.graph_modules(model, scope=["attn"], registry=registry)
        """
        for word in words:
            if word not in WORDS:
                raise _unknown(word, WORDS, "a scope")
        self._layers[layer] = {w: (p,) if isinstance(p, str) else tuple(p) for w, p in words.items()}
        return self

    def words_of(self, layer: torch.nn.Module) -> Mapping[str, tuple[str, ...]] | None:
        """The words of a layer, by its class, one of its bases, or its name in a known library."""
        for kind in type(layer).__mro__:
            if kind in self._layers:
                return self._layers[kind]
            name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
            if name in self._layers:
                return self._layers[name]
        return None

    def resolve(self, model: torch.nn.Module, scope: Sequence[str]) -> list[Part]:
        """The parts of a model that a scope names, each once, in the order of the model."""
        layers = {path: words for path, m in model.named_modules() if (words := self.words_of(m)) is not None}
        if _FULL_ITERATION in scope:
            raise InvalidArgument(
                f"the scope {_FULL_ITERATION!r} names the whole iteration, and a scope names modules",
                rule="scope",
                why="the iteration is a function: its graph has the backward and the optimizer in it, too.",
                fix="stepgraph.capture(train_step), or, of Megatron's loop, FullCudaGraphWrapper(...).",
            )
        if not scope:
            if not layers:
                raise _no_layers(model)
            outer = [path for path in layers if not any(_is_inside(path, other) for other in layers)]
            return [Part(path, model.get_submodule(path)) for path in outer]
        found: dict[tuple[int, str], Part] = {}
        for entry in scope:
            parts = self._of_word(model, entry, layers) if entry in WORDS else _of_path(model, entry)
            if not parts:
                raise _nothing(entry, model, layers)
            for part in parts:
                found.setdefault((id(part.module), part.method), part)
        _refuse_nested(found.values())
        order = {id(module): index for index, module in enumerate(model.modules())}
        return sorted(found.values(), key=lambda part: order[id(part.module)])

    def _of_word(
        self, model: torch.nn.Module, word: str, layers: Mapping[str, Mapping[str, tuple[str, ...]]]
    ) -> list[Part]:
        found = []
        for path, words in layers.items():
            for tail in words.get(word, ()):
                part = _at(model, f"{path}.{tail}" if path else tail)
                if part is not None and not self._is_something_else(part, word):
                    found.append(part)
        return found

    def _is_something_else(self, part: Part, word: str) -> bool:
        """Whether a part only stands where a word's part usually does.

        Megatron has one class of layer for all kinds: where a layer has experts they stand in the MLP's place, and
        where it has no attention an identity does.
        """
        if "identity" in type(part.module).__name__.lower():
            return True
        return word == "mlp" and "moe" in (self.words_of(part.module) or ())


def _at(model: torch.nn.Module, path: str) -> Part | None:
    """The module at a path, or the method of the module before its last segment."""
    parent, _, last = path.rpartition(".")
    try:
        owner = model.get_submodule(parent)
    except AttributeError:
        return None
    value = getattr(owner, last, None)
    if isinstance(value, torch.nn.Module):
        return Part(path, value) if _has_forward(value) else None
    if last == "forward":
        return Part(parent, owner) if _has_forward(owner) else None
    inherited = hasattr(torch.nn.Module, last)  # parameters(), train() and so on compute nothing
    own = callable(value) and not isinstance(value, torch.Tensor) and not inherited
    return Part(path, owner, last) if own else None


def _has_forward(module: torch.nn.Module) -> bool:
    """Whether a module can be called: a ModuleList cannot."""
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


def _of_path(model: torch.nn.Module, pattern: str) -> list[Part]:
    *heads, last = pattern.split(".")
    prefixes = [""]
    for segment in heads:
        prefixes = [path for prefix in prefixes for path in _children(model, prefix, segment)]
    found = []
    for prefix in prefixes:
        paths = _children(model, prefix, last) if "*" in last else [f"{prefix}.{last}" if prefix else last]
        found += [part for path in paths if (part := _at(model, path)) is not None]
    return found


def _children(model: torch.nn.Module, prefix: str, segment: str) -> list[str]:
    """The children of a module whose name a segment of a pattern fits, by their paths."""
    names = [name for name, _ in model.get_submodule(prefix).named_children() if fnmatch.fnmatchcase(name, segment)]
    return [f"{prefix}.{name}" if prefix else name for name in names]


def _is_inside(path: str, other: str) -> bool:
    """Whether a path leads into what another one leads to."""
    return path != other and (not other or path.startswith(f"{other}."))


def _refuse_nested(parts: Iterable[Part]) -> None:
    parts = list(parts)
    for outer in parts:
        for inner in parts:
            if outer.method == "forward" and _is_inside(inner.path, outer.path):
                raise InvalidArgument(
                    f"the scope names `{outer.path or 'the model'}` and `{inner.path}`, which is inside it",
                    rule="scope",
                    why="a module is graphed as a whole, with all that is in it.",
                    fix=f"drop one of the two: {outer.path!r} covers {inner.path!r}.",
                )


def _no_layers(model: torch.nn.Module) -> InvalidArgument:
    lists = [path for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    example = f"{lists[0]}.*" if lists else next((path for path, _ in model.named_modules() if path), "")
    return InvalidArgument(
        f"{type(model).__name__} has no layer of a known class, and no scope was given",
        rule="scope",
        why="without a scope whole layers are graphed, and a layer is known by its class.",
        fix=f"name the parts: graph_modules(model, {example!r}); or register the layer's class: "
        "ScopeRegistry().register(...).",
    )


def _nothing(
    entry: str, model: torch.nn.Module, layers: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> InvalidArgument:
    kinds = sorted({type(model.get_submodule(path)).__name__ for path in layers})
    words = sorted({word for known in layers.values() for word in known})
    names = [path for path, _ in model.named_modules() if path]
    near = nearest(entry, [*words, *WORDS, *names])
    if entry in names:
        near = f"{entry}.*"  # a container, which is never called
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return InvalidArgument(
        f"the scope {entry!r} matches nothing in {type(model).__name__}",
        rule="scope",
        details=[
            f"words here  {', '.join(words) or 'none: no layer of a known class'}",
            f"layers      {', '.join(kinds) or 'none of a known class'}",
            f"modules     {listed}",
        ],
        why="a scope is one of the words, for layers whose class is registered, or a path or glob from the model.",
        fix=(f"did you mean {near!r}? Or " if near else "")
        + "give a path such as 'layers.*.attn', or register the layer's class: ScopeRegistry().register(...).",
    )


def _unknown(word: str, allowed: Sequence[str], what: str) -> InvalidArgument:
    near = nearest(word, allowed)
    return InvalidArgument(
        f"{word!r} is not {what}",
        rule="scope",
        why=f"the words are {', '.join(allowed)}.",
        fix=f"did you mean {near!r}?" if near else f"use one of {', '.join(allowed)}.",
    )
