"""The names that other generations of Megatron have for the settings of CUDA graphs, read here and nowhere else.

The names have changed: `enable_cuda_graph` and `external_cuda_graph` became `cuda_graph_impl`, `cuda_graph_scope`
became `cuda_graph_modules`, `cuda_graph_num_warmup_steps` became `cuda_graph_warmup_steps`, and the scope's word
`full_iteration` became an implementation. There are two readers:

- `older_setting` reads one assignment to a `ConfigContainer`, with a warning that names the field to use.
- `GraphSettings.of` reads a whole configuration object of Megatron, or of ours. A field that is missing or None has
  no effect. A configuration with two contradicting fields is refused, with both names.

| field | read as |
|---|---|
| `cuda_graph_impl` | `none`, `local`, `transformer_engine`, `full_iteration` |
| `enable_cuda_graph=True` | `local` |
| `external_cuda_graph=True` | `transformer_engine` |
| these two without `cuda_graph_impl`, none of them True | `none` |
| `cuda_graph_modules`, `cuda_graph_scope` | the scope; empty, or Megatron's default `"full"`: whole layers |
| `full_iteration` in a scope | `cuda_graph_impl="full_iteration"` |
| `cuda_graph_warmup_steps`, `cuda_graph_num_warmup_steps` | eager steps before the capture |
| `cuda_graph_share_io_buffers` | nothing: a graph's output is always the next graph's input, without a copy |
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from stepgraph.config.scope import WHOLE_LAYERS, read_scope
from stepgraph.config.values import fitted, types_of
from stepgraph.core.errors import InvalidArgument, nearest

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
_FULL, _FULL_ITERATION = WHOLE_LAYERS, "full_iteration"
_SCOPES = ("cuda_graph_modules", "cuda_graph_scope")
_WARMUPS = ("cuda_graph_warmup_steps", "cuda_graph_num_warmup_steps")
_SWITCHES = {
    "enable_cuda_graph": ("local", _FULL_ITERATION),  # with a scope that asked for it, one graph for all
    "external_cuda_graph": ("transformer_engine",),
}
"""The older switches, and the implementations that each may stand for, the plain one first."""

_RENAMED = {
    ("model", "cuda_graph_num_warmup_steps"): "cuda_graph_warmup_steps",
    ("model", "cuda_graph_modules"): "cuda_graph_scope",
    ("dataset", "sequence_length"): "seq_length",
}
"""Fields of a `ConfigContainer` under another name."""


def older_setting(section: Any, name: str, value: Any) -> dict[str, Any] | None:
    """The fields that an assignment in another generation's words stands for; None if it is no such assignment.

    `section` is the part of a `ConfigContainer` that is assigned to. None says nothing, and changes nothing.
    """
    spelling = value.name if isinstance(value, enum.Enum) else value
    where = f"{section.section_name}.{name}"
    if (section.section_name, name, spelling) == ("model", "cuda_graph_impl", _FULL_ITERATION):
        return _warned(f"{where}={spelling!r}", {"cuda_graph_impl": "local", "cuda_graph_scope": [_FULL_ITERATION]})
    if section.section_name == "model" and name in _SWITCHES:
        fitted(where, value, bool | None)
        impl = _SWITCHES[name][0]
        off = {"cuda_graph_impl": "none"} if section.cuda_graph_impl == impl and value is not None else {}
        return _warned(where, {"cuda_graph_impl": impl} if value else off)
    if (section.section_name, name) == ("model", "cuda_graph_share_io_buffers"):
        _warn(f"{where} has no effect   [option]\nFix: leave it out; buffers are always shared between graphs.")
        return {}
    new = _RENAMED.get((section.section_name, name))
    if new is None:
        return None
    is_iteration = name == "cuda_graph_modules" and [*section.cuda_graph_scope] == [_FULL_ITERATION]
    if value is None or (is_iteration and not value):  # an empty list of modules goes with the full iteration
        return {}
    return _warned(where, {new: value})


def type_as_given(section: Any, name: str) -> Any:
    """The type of a field of a section, also under another generation's name or with its words; None for no field."""
    types = types_of(type(section))
    if section.section_name == "model":
        if name in (*_SWITCHES, "cuda_graph_share_io_buffers"):
            return bool
        if name == "cuda_graph_impl":
            return types[name] | Literal["full_iteration"]
    return types.get(_RENAMED.get((section.section_name, name), name))


def renamed_flag(flag: str, overrides: Sequence[str]) -> None:
    """Warn of a flag of Megatron's command line that stands for settings with other names."""
    name = flag.removeprefix("--").replace("-", "_")
    if not any(override.partition("=")[0].endswith(f".{name}") for override in overrides) or name == "te_rng_tracker":
        _warn(f"{flag} is Megatron's name   [option]\nFix: {' '.join(overrides)}.")


def refuse_contradictions(values: Mapping[str, Any]) -> None:
    """Refuse a model's settings, given together, of which several names contradict each other."""
    given = SimpleNamespace(**{name: value for name, value in values.items() if value is not None})
    _impl(given, is_asked=False)
    for names, read in ((_SCOPES, _scope), (_WARMUPS, _given_warmup)):
        if all(hasattr(given, name) for name in names):
            read(given)


def older_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the order in which they are to be assigned: a switch that is off says less than the newer name."""
    return dict(sorted(values.items(), key=lambda item: item[0] not in _SWITCHES))


def _warned(where: str, fields: dict[str, Any]) -> dict[str, Any]:
    section = where.partition(".")[0]
    listed = ", ".join(f"{section}.{name}={value!r}" for name, value in fields.items())
    _warn(f"{where} is another generation's name   [option]\nFix: {listed or 'leave it out'}.")
    return fields


def _warn(message: str) -> None:
    from stepgraph.core.frames import warn_user  # it imports torch, which a configuration needs for nothing else

    warn_user(message)


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What a configuration object says about CUDA graphs, in any generation's words.

    Example:
        >>> GraphSettings.of(SimpleNamespace(cuda_graph_impl="local", cuda_graph_modules="attn, mlp")).scope
        ('attn', 'mlp')
    """

    impl: str | None = None
    """One of `IMPLEMENTATIONS`; None if the configuration does not say."""
    scope: tuple[str, ...] = ()
    """Words and paths; none for whole layers."""
    warmup_steps: int | None = None
    max_runners: int | None = None
    single_mempool: bool | None = None
    num_microbatches: int = 1
    """Microbatches of a step that run one after the other, as far as the configuration says."""

    @staticmethod
    def of(config: Any) -> GraphSettings:
        """Read a configuration object, ours or Megatron's, or raise for one that contradicts itself."""
        config = model_of(config)
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
        return GraphSettings(
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


def model_of(config: Any) -> Any:
    """The part of a configuration that says what is captured: its `model` section, if it has one."""
    model = getattr(config, "model", None)
    return model if hasattr(model, "cuda_graph_impl") else config


def at_least_one_step(steps: int) -> int:
    """The warm-up of what is captured from a recorded call: 0 steps are read as 1, with a warning."""
    if steps == 0:
        _warn(
            "cuda_graph_warmup_steps=0 is read as 1   [option]\n"
            "Why: this graph is captured from a step that has run eagerly once.\n"
            "Fix: cuda_graph_warmup_steps=1."
        )
    return max(1, steps)


def _impl(config: Any, *, is_asked: bool = True) -> str | None:
    """The implementation, by its own field and by the older switches; these with a warning where it is asked for."""
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
        if impl is None and is_asked:
            _warn(f"{name} is an older name   [option]\nFix: cuda_graph_impl={meant[0]!r}.")
        if impl is not None and impl not in meant:
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


def _given_warmup(config: Any) -> dict[str, int]:
    """The warm-up by each name that is given; they agree."""
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
    return given


def _warmup_steps(config: Any) -> int | None:
    given, (new, old) = _given_warmup(config), _WARMUPS
    if new not in given and old in given:
        _warn(f"{old} is an older name   [option]\nFix: {new}={given[old]}.")
    return next(iter(given.values()), None)


def _contradiction(one: str, other: str, fix: str) -> InvalidArgument:
    return InvalidArgument(
        f"the configuration contradicts itself: {one}, and {other}",
        rule="option",
        why="they ask for different captures.",
        fix=f"{fix}.",
    )
