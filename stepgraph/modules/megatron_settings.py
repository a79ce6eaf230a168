"""`MegatronSettings` reads the CUDA graph fields of a Megatron configuration, under old and new names.

The names have changed: `enable_cuda_graph` and `external_cuda_graph` became `cuda_graph_impl`, `cuda_graph_scope`
became `cuda_graph_modules`, `cuda_graph_num_warmup_steps` became `cuda_graph_warmup_steps`, and the scope's word
`full_iteration` became an implementation. All of them are read here and nowhere else. A field that is missing or None
has no effect. A configuration with two contradicting fields is refused, with both names.

| field | read as |
|---|---|
| `cuda_graph_impl` | `none`, `local`, `transformer_engine`, `full_iteration` |
| `enable_cuda_graph=True` | `local` |
| `external_cuda_graph=True` | `transformer_engine` |
| these two without `cuda_graph_impl`, none of them True | `none` |
| `cuda_graph_modules`, `cuda_graph_scope` | the scope; empty, or Megatron's default `"full"`: whole layers |
| `full_iteration` in a scope | `cuda_graph_impl="full_iteration"` |
| `cuda_graph_warmup_steps`, `cuda_graph_num_warmup_steps` | eager steps before the capture |
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stepgraph.errors import InvalidArgument, nearest
from stepgraph.frames import warn_user
from stepgraph.modules.scopes import read_scope

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
_FULL, _FULL_ITERATION = "full", "full_iteration"
_SCOPES = ("cuda_graph_modules", "cuda_graph_scope")
_WARMUPS = ("cuda_graph_warmup_steps", "cuda_graph_num_warmup_steps")
_SWITCHES = {
    "enable_cuda_graph": ("local", _FULL_ITERATION),  # with a scope that asked for it, one graph for all
    "external_cuda_graph": ("transformer_engine",),
}
"""The older switches, and the implementations that each may stand for, the plain one first."""


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """The fields about CUDA graphs of a Megatron-like configuration object.

    Example:
        >>> MegatronSettings.of(SimpleNamespace(cuda_graph_impl="local", cuda_graph_modules="attn, mlp")).scope
        ('attn', 'mlp')
    """

    impl: str | None = None
    """One of `IMPLEMENTATIONS`; None if the configuration does not say."""
    scope: tuple[str, ...] = ()
    """Words and paths; none for whole layers."""
    warmup_steps: int | None = None
    max_runners: int | None = None
    single_mempool: bool | None = None

    @staticmethod
    def of(config: Any) -> MegatronSettings:
        """Read a configuration object, or raise for one that contradicts itself."""
        impl = _impl(config)
        scope, wants_iteration = _scope(config) if impl != "none" else ((), False)  # it says nothing then
        if wants_iteration:
            if impl == "transformer_engine":
                raise _contradiction(
                    "a scope of 'full_iteration'",
                    "cuda_graph_impl='transformer_engine'",
                    "cuda_graph_impl='full_iteration'",
                )
            impl = _FULL_ITERATION
        if impl == _FULL_ITERATION and scope:
            raise _contradiction("full_iteration", f"a scope of {', '.join(scope)}", "cuda_graph_modules=[]")
        return MegatronSettings(
            impl,
            scope,
            _warmup_steps(config),
            getattr(config, "cuda_graph_max_runners", None),
            getattr(config, "cuda_graph_use_single_mempool", None),
        )

    @property
    def reason_for_eager(self) -> str | None:
        """The reason why no layer is captured, or None."""
        if self.impl == "none":
            return "cuda_graph_impl is 'none'"
        if self.impl == _FULL_ITERATION:
            return "cuda_graph_impl is 'full_iteration', which FullCudaGraphWrapper captures"
        return None


def _impl(config: Any) -> str | None:
    """The implementation, by its own field and by the older switches."""
    given = getattr(config, "cuda_graph_impl", None)
    impl = given.name if isinstance(given, enum.Enum) else given
    if impl is not None and impl not in IMPLEMENTATIONS:
        near = nearest(str(impl), IMPLEMENTATIONS)
        listed = ", ".join(IMPLEMENTATIONS)
        raise InvalidArgument(
            f"cuda_graph_impl={given!r}",
            rule="option",
            why=f"the implementations are {listed}.",
            fix=f"did you mean {near!r}?" if near else f"use one of {listed}.",
        )
    switches = {name: value for name in _SWITCHES if (value := getattr(config, name, None)) is not None}
    on = [name for name, value in switches.items() if value]
    if len(on) > 1:
        one, other = (f"{name}=True" for name in on)
        raise _contradiction(one, other, "cuda_graph_impl='local' or cuda_graph_impl='transformer_engine'")
    for name in on:
        meant = _SWITCHES[name]
        if impl is None:
            warn_user(f"{name} is an older name   [option]\nFix: cuda_graph_impl={meant[0]!r}.")
        elif impl not in meant:
            raise _contradiction(f"{name}=True", f"cuda_graph_impl={impl!r}", f"{name}=False")
        return impl or meant[0]
    return "none" if impl is None and switches else impl


def _scope(config: Any) -> tuple[tuple[str, ...], bool]:
    """Return the scope, and True if it asks for the full iteration."""
    read = {name: _words(value) for name in _SCOPES if (value := getattr(config, name, None)) is not None}
    said = {name: words for name, words in read.items() if words != [_FULL]}  # Megatron's default gives way
    for name, words in said.items():
        for word in words:
            others = [other for other in words if other != word]
            if word in (_FULL, _FULL_ITERATION) and others:
                raise _contradiction(f"{word!r} in {name}", ", ".join(others), f"{name}={word!r}, or {name} without it")
            if word != _FULL_ITERATION and difflib.get_close_matches(word, [_FULL_ITERATION], cutoff=0.9):
                raise InvalidArgument(
                    f"{name} has {word!r}",
                    rule="scope",
                    why="a scope has no such word.",
                    fix=f"did you mean {_FULL_ITERATION!r}?",
                )
    layers = {name: [word for word in words if word != _FULL_ITERATION] for name, words in said.items()}
    if len({frozenset(words) for words in layers.values()}) > 1:
        new, old = _SCOPES
        raise _contradiction(f"{new}={said[new]!r}", f"{old}={said[old]!r}", f"{new} alone")
    wants_iteration = any(_FULL_ITERATION in words for words in said.values())
    return tuple(next(iter(layers.values()), ())), wants_iteration


def _words(value: Any) -> list[str]:
    if isinstance(value, (str, enum.Enum)):
        return read_scope(value)
    return read_scope([*value] if isinstance(value, Iterable) else [value])


def _warmup_steps(config: Any) -> int | None:
    given = {name: value for name in _WARMUPS if (value := getattr(config, name, None)) is not None}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidArgument(
                f"{name}={value!r}",
                rule="option",
                why="it is a number of steps.",
                fix=f"pass {name}=3, for example.",
            )
    new, old = _WARMUPS
    if len({*given.values()}) > 1:
        raise _contradiction(f"{new}={given[new]}", f"{old}={given[old]}", f"{new} alone")
    if new not in given and old in given:
        warn_user(f"{old} is an older name   [option]\nFix: {new}={given[old]}.")
    return next(iter(given.values()), None)


def _contradiction(one: str, other: str, fix: str) -> InvalidArgument:
    return InvalidArgument(
        f"the configuration contradicts itself: {one}, and {other}",
        rule="option",
        why="they ask for different captures.",
        fix=f"{fix}.",
    )
