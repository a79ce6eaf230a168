"""A scope names the parts of a model that are graphed, by the field's words or by path.

A word (`attn`, `mlp`, `moe`, `moe_router`, `moe_preprocess`, `mamba`) has another meaning in each model. A registry
maps it, for each class of layer, to submodules or methods. An empty scope means whole layers. Anything else is a path
from the model: `"layers.3.mlp"`, or a glob, `"layers.*.self_attn"`, in which `*` stands for one segment, or a part of
one. A path may end in a method: `"layers.*.moe.route"`. A container that is never called itself (`nn.ModuleList`,
`nn.ModuleDict`) stands for its children: `"layers"` means the same as `"layers.*"`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from stepgraph.config.scope import read_scope as read_scope
from stepgraph.core.errors import InvalidArgument, nearest
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import with_article

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
    """A part to graph: a module, or one of its methods."""

    path: str
    module: torch.nn.Module
    method: str = "forward"


class ScopeRegistry:
    """Maps the words of a scope to parts of each class of layer. Each `graph_modules` call may have its own."""

    def __init__(self) -> None:
        self._layers: dict[type | str, Mapping[str, tuple[str, ...]]] = {}
        self._layers.update(_SHIPPED)

    @entry_point
    def register(self, layer: type[torch.nn.Module], **words: str | Sequence[str]) -> ScopeRegistry:
        """Map each word to a submodule or method of a class of layer, or to several.

        Example:
            >>> registry = stepgraph.ScopeRegistry().register(MyLayer, attn="attention", mlp="ffn")
            >>> stepgraph.graph_modules(model, scope=["attn"], registry=registry)
        """
        for word in words:
            if word not in WORDS:
                raise _unknown(word, WORDS, "a scope")
        self._layers[layer] = {w: (p,) if isinstance(p, str) else tuple(p) for w, p in words.items()}
        return self

    def copy(self) -> ScopeRegistry:
        """A registry of its own with the same words."""
        found = ScopeRegistry()
        found._layers.update(self._layers)
        return found

    def words_of(self, layer: torch.nn.Module) -> Mapping[str, tuple[str, ...]] | None:
        """Return the words of a layer, found by its class, a base class, or the class name in a known library."""
        for kind in type(layer).__mro__:
            if kind in self._layers:
                return self._layers[kind]
            name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
            if name in self._layers:
                return self._layers[name]
        return None

    def resolve(self, model: torch.nn.Module, scope: Sequence[str]) -> list[Part]:
        """Return the parts of a model that a scope names, each once, in the order of the model."""
        layers = {path: words for path, m in model.named_modules() if (words := self.words_of(m)) is not None}
        if _FULL_ITERATION in scope:
            raise InvalidArgument(
                f"the scope {_FULL_ITERATION!r} means the whole iteration, but a scope names modules",
                rule="scope",
                why="the graph of an iteration also has the backward and the optimizer in it.",
                fix="use stepgraph.capture(train_step), or, for Megatron's loop, FullCudaGraphWrapper(...).",
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
        found: dict[str, list[Part]] = {}
        for path, words in layers.items():
            tails = [f"{path}.{tail}" if path else tail for tail in words.get(word, ())]
            parts = [part for tail in tails for part in _at(model, tail)]
            found[path] = [part for part in parts if not self._is_something_else(part, word)]
        useful = {type(model.get_submodule(path)) for path, parts in found.items() if parts}
        for path, words in layers.items():
            layer = model.get_submodule(path)
            is_users = type(layer) in self._layers  # those that ship with stepgraph are known by name
            if word in words and is_users and type(layer) not in useful:
                raise _no_such_part(word, words[word], layer)
        return [part for parts in found.values() for part in parts]

    def _is_something_else(self, part: Part, word: str) -> bool:
        """Whether a part only stands where a word's part usually does.

        Megatron has one class of layer for all kinds: where a layer has experts they stand in the MLP's place, and
        where it has no attention an identity does.
        """
        if "identity" in type(part.module).__name__.lower():
            return True
        return word == "mlp" and "moe" in (self.words_of(part.module) or ())


def _at(model: torch.nn.Module, path: str) -> list[Part]:
    """The module at a path, or the method of the module before its last segment; for a container its children."""
    parent, _, last = path.rpartition(".")
    try:
        owner = model.get_submodule(parent)
    except AttributeError:
        return []
    value = getattr(owner, last, None)
    if isinstance(value, torch.nn.Module):
        if _has_forward(value):
            return [Part(path, value)]
        return [part for name, _ in value.named_children() for part in _at(model, f"{path}.{name}")]
    if last == "forward":
        return [Part(parent, owner)] if _has_forward(owner) else []
    inherited = hasattr(torch.nn.Module, last)  # parameters(), train() and so on compute nothing
    own = callable(value) and not isinstance(value, torch.Tensor) and not inherited
    return [Part(path, owner, last)] if own else []


def _has_forward(module: torch.nn.Module) -> bool:
    """True if a module can be called; a ModuleList cannot."""
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


def _of_path(model: torch.nn.Module, pattern: str) -> list[Part]:
    *heads, last = pattern.split(".")
    prefixes = [""]
    for segment in heads:
        prefixes = [path for prefix in prefixes for path in _children(model, prefix, segment)]
    found = []
    for prefix in prefixes:
        paths = _children(model, prefix, last) if "*" in last else [f"{prefix}.{last}" if prefix else last]
        found += [part for path in paths for part in _at(model, path)]
    return found


def _children(model: torch.nn.Module, prefix: str, segment: str) -> list[str]:
    """Return the paths of the children of a module that match a segment of a pattern."""
    names = [name for name, _ in model.get_submodule(prefix).named_children() if fnmatch.fnmatchcase(name, segment)]
    return [f"{prefix}.{name}" if prefix else name for name in names]


def _is_inside(path: str, other: str) -> bool:
    """True if a path leads into the module at another path."""
    return path != other and (not other or path.startswith(f"{other}."))


def _refuse_nested(parts: Iterable[Part]) -> None:
    parts = list(parts)
    for outer in parts:
        for inner in parts:
            if outer.method == "forward" and _is_inside(inner.path, outer.path):
                raise InvalidArgument(
                    f"the scope names `{outer.path or 'the model'}` and `{inner.path}`, which is inside it",
                    rule="scope",
                    why="a module is graphed as a whole, with all its submodules.",
                    fix=f"drop one of the two: {outer.path!r} covers {inner.path!r}.",
                )


def _no_layers(model: torch.nn.Module) -> InvalidArgument:
    lists = [path for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    example = f"{lists[0]}.*" if lists else next((path for path, _ in model.named_modules() if path), "")
    return InvalidArgument(
        f"no scope was given, and {type(model).__name__} has no layer of a known class",
        rule="scope",
        why="without a scope whole layers are graphed, and layers are recognised by their class.",
        fix=f"name the parts: graph_modules(model, {example!r}); or register the layer's class: "
        "ScopeRegistry().register(...).",
    )


def _nothing(
    entry: str, model: torch.nn.Module, layers: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> InvalidArgument:
    kinds = sorted({type(model.get_submodule(path)).__name__ for path in layers})
    words = sorted({word for known in layers.values() for word in known})
    names = [path for path, _ in model.named_modules() if path]
    paths = [_as_glob(entry, path) for path in names]
    near = nearest(entry, [known for known in (*words, *WORDS, *paths) if known != entry])
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return InvalidArgument(
        f"the scope {entry!r} matches nothing in {type(model).__name__}",
        rule="scope",
        details=[
            f"words here  {', '.join(words) or 'none: no layer of a known class'}",
            f"layers      {', '.join(kinds) or 'none of a known class'}",
            f"modules     {listed}",
        ],
        why="a scope is a word, for layers of a registered class, or a path or glob from the model.",
        fix=(f"did you mean {near!r}? Or " if near else "")
        + "pass a path such as 'layers.*.attn', or register the layer's class: ScopeRegistry().register(...).",
    )


def _as_glob(pattern: str, path: str) -> str:
    """A path, with the wildcards of a pattern of as many segments where they fit."""
    wanted, segments = pattern.split("."), path.split(".")
    if len(wanted) != len(segments):
        return path
    pairs = zip(wanted, segments, strict=True)
    return ".".join(want if "*" in want and fnmatch.fnmatchcase(have, want) else have for want, have in pairs)


def _no_such_part(word: str, tails: Sequence[str], layer: torch.nn.Module) -> InvalidArgument:
    kind, tail = type(layer).__name__, " or ".join(tails)
    near = nearest(tail, [path for path, _ in layer.named_modules() if path])
    return InvalidArgument(
        f"{word!r} is registered as {tail!r} for {kind}, and {with_article(kind)} has no such submodule or method",
        rule="scope",
        details=[f"submodules  {', '.join(name for name, _ in layer.named_children()) or 'none'}"],
        why=f"the scope names {word!r}, and nothing of {kind} would be graphed.",
        fix=f"ScopeRegistry().register({kind}, {word}={near or '...'!r}).",
    )


def _unknown(word: str, allowed: Sequence[str], what: str) -> InvalidArgument:
    near = nearest(word, allowed)
    return InvalidArgument(
        f"{word!r} is not {what}",
        rule="scope",
        why=f"the words are {', '.join(allowed)}.",
        fix=f"did you mean {near!r}?" if near else f"use one of {', '.join(allowed)}.",
    )
