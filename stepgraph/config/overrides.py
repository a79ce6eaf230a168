"""Changes to a configuration by text, as on a command line: `section.field=value`, and Megatron's flags.

    model.cuda_graph_scope=attn,mlp   train.train_iters=100   checkpoint.save=none   mixed_precision=bf16_mixed

The text is read by the type of the field. Lists are written `a,b` or `[a, b]`; an empty list is `[]` or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stepgraph.config.base import ConfigSections
from stepgraph.config.model import ModelSection
from stepgraph.config.scope import read_words
from stepgraph.config.section import Section, unknown_setting
from stepgraph.config.spellings import renamed_flag, type_as_given
from stepgraph.config.toml_file import read_toml
from stepgraph.config.values import fitted, from_text, types_of
from stepgraph.core.errors import InvalidArgument, nearest

_FLAGS = MappingProxyType(
    {
        "enable_cuda_graph": ("model.enable_cuda_graph",),
        "external_cuda_graph": ("model.external_cuda_graph",),
        "cuda_graph_use_single_mempool": ("model.cuda_graph_use_single_mempool",),
        "cuda_graph_share_io_buffers": ("model.cuda_graph_share_io_buffers",),
        "te_rng_tracker": ("model.use_te_rng_tracker", "rng.te_rng_tracker"),
        "no_check_for_nan_in_loss_and_grad": (
            "rerun_state_machine.check_for_nan_in_loss",
            "ddp.check_for_nan_in_grad",
        ),
        "cuda_graph_impl": ("model.cuda_graph_impl",),
        "cuda_graph_scope": ("model.cuda_graph_scope",),
        "cuda_graph_modules": ("model.cuda_graph_modules",),
        "cuda_graph_warmup_steps": ("model.cuda_graph_warmup_steps",),
        "cuda_graph_num_warmup_steps": ("model.cuda_graph_num_warmup_steps",),
    }
)
"""Megatron's flags, with underscores, and the settings that each changes."""
_SWITCHES = tuple(_FLAGS)[:6]
"""The flags without a value."""
CONFIG_OPTION = "config"
"""The option that names a TOML file."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line says about a configuration."""

    files: tuple[str, ...]
    """TOML files, to be read first, in this order."""
    overrides: tuple[str, ...]
    """`section.field=value` texts, among them Megatron's flags, to be applied last, in this order."""
    rest: tuple[str, ...]
    """The other arguments, in their order."""

    @classmethod
    def read(cls, arguments: Sequence[str]) -> CommandLine:
        """Separate what changes the configuration from the other arguments of a command.

        Example:
            >>> CommandLine.read(["--seed", "1", "--cuda-graph-scope", "attn", "mlp", "train.train_iters=5"]).overrides
            ('model.cuda_graph_scope=attn,mlp', 'train.train_iters=5')
        """
        files: list[str] = []
        overrides: list[str] = []
        rest: list[str] = []
        waiting = list(arguments)
        while waiting:
            word = waiting.pop(0)
            name, has_value, value = word.removeprefix("--").partition("=")
            flag = name.replace("-", "_") if word.startswith("--") else ""
            if flag in _SWITCHES:
                overrides += _switched(word, flag)
            elif flag in _FLAGS or flag == CONFIG_OPTION:
                values = [value] if has_value else _values_of(word, waiting, many=flag in _MANY)
                if flag == CONFIG_OPTION:
                    files += values
                else:
                    overrides += [f"{setting}={','.join(values)}" for setting in _FLAGS[flag]]
            elif _is_override(word):
                overrides.append(word)
            else:
                rest.append(word)
        return cls(tuple(files), tuple(overrides), tuple(rest))

    def apply_to(self, config: ConfigSections) -> None:
        """Change a configuration: files first, then overrides."""
        for file in self.files:
            config.update(read_toml(file))
        apply_overrides(config, self.overrides)


_MANY = ("cuda_graph_scope", "cuda_graph_modules")
"""The flags that take several values, with spaces between them."""


def _is_override(word: str) -> bool:
    name, separator, _ = word.partition("=")
    return bool(separator) and not word.startswith("-") and name.replace(".", "").replace("_", "").isalnum()


def _values_of(flag: str, waiting: list[str], *, many: bool) -> list[str]:
    """Take the values of a flag from the arguments after it."""
    found: list[str] = []
    while waiting and not waiting[0].startswith("-") and not _is_override(waiting[0]) and (many or not found):
        found.append(waiting.pop(0).strip(","))
    if not found:
        raise InvalidArgument(
            f"{flag} has no value",
            rule="config-value",
            why="it sets a field of the configuration.",
            fix=f"{flag} VALUE.",
        )
    return found


def _switched(word: str, flag: str) -> list[str]:
    """The settings of a flag without a value."""
    if "=" in word:
        raise InvalidArgument(
            f"{word}: this flag takes no value",
            rule="config-value",
            why="it is on where it is given.",
            fix=f"{word.partition('=')[0]}, or leave it out.",
        )
    overrides = [f"{setting}={'false' if flag.startswith('no_') else 'true'}" for setting in _FLAGS[flag]]
    renamed_flag(word, overrides)
    return overrides


def apply_overrides(config: ConfigSections, overrides: Iterable[str]) -> None:
    """Apply `section.field=value` texts to a configuration, in their order.

    Whole sections, such as `peft=lora`, come first: after a field of theirs they would undo it. A field that is
    named twice has its last value.
    """
    if isinstance(overrides, str):
        raise InvalidArgument(
            f"the overrides are one string, {overrides!r}",
            rule="config-field",
            why="its letters would be read as settings.",
            fix=f"pass a list: [{', '.join(map(repr, overrides.split()))}].",
        )
    values: dict[str, dict[str, Any]] = {}
    for text in overrides:
        name, separator, value = text.partition("=")
        section_name, dot, field = name.strip().removeprefix("--").partition(".")
        if not separator:
            raise no_override(text)
        sections = config.sections()
        if section_name not in sections:
            raise unknown_section(section_name, field, type(config))
        if not dot:
            setattr(config, section_name, None if value.strip().lower() in ("none", "null", "") else value.strip())
            continue
        hint = type_as_given(sections[section_name], field)
        if hint is None:
            raise unknown_setting(section_name, field, type(sections[section_name]))
        values.setdefault(section_name, {})[field] = from_text(f"{section_name}.{field}", value, hint)
    config.update(values)


def unknown_section(name: str, field: str, kind: type[ConfigSections]) -> InvalidArgument:
    """The error for a section that does not exist; a field alone is answered with its section."""
    homes = [
        section for section, found in types_of(kind).items() if issubclass(found, Section) and name in types_of(found)
    ]
    if not field and homes:
        return InvalidArgument(
            f"the configuration has no section `{name}`",
            rule="config-field",
            why="a setting is named with its section.",
            fix=f"did you mean `{homes[0]}.{name}`?",
        )
    near = nearest(name, types_of(kind))
    known = ", ".join(types_of(kind))
    dotted = f".{field}" if field else ""
    return InvalidArgument(
        f"the configuration has no section `{name}`",
        rule="config-field",
        why=f"the sections are {known}.",
        fix=f"did you mean `{near}{dotted}`?" if near else "use one of them: section.field=value.",
    )


def no_override(text: str) -> InvalidArgument:
    """The error for a text that is no `section.field=value`."""
    section, _, field = text.strip().partition(".")
    kind = types_of(ConfigSections).get(section)
    if kind is not None and (not field or field in types_of(kind)):
        return InvalidArgument(
            f"`{text}` has no value",
            rule="config-value",
            why="a setting is changed by its section, its name and its value.",
            fix=f"{text}=VALUE." if field else f"{text}.FIELD=VALUE.",
        )
    return InvalidArgument(
        f"{text!r} is not section.field=value",
        rule="config-field",
        why="a setting is changed by its section, its name and its value.",
        fix="model.cuda_graph_impl=local, for example.",
    )


def set_cuda_graph_overrides(recipe: Any, cuda_graph_impl: str | None = None, cuda_graph_scope: Any = None) -> Any:
    """Set what a recipe captures, and switch on the random states that graphs need; return the recipe.

    What is None stays as it is. Any object with `model` and `rng` is a recipe.

    Example:
        >>> set_cuda_graph_overrides(cfg, "transformer_engine", "attn,moe_router")
    """
    scope = None if cuda_graph_scope is None else read_words(cuda_graph_scope)
    if cuda_graph_impl is not None:
        fitted("cuda_graph_impl", cuda_graph_impl, type_as_given(ModelSection(), "cuda_graph_impl"))
        recipe.model.cuda_graph_impl = cuda_graph_impl
    if scope is not None:
        recipe.model.cuda_graph_scope = scope
    if cuda_graph_impl not in (None, "none"):
        recipe.model.use_te_rng_tracker = True
        recipe.rng.te_rng_tracker = True
    return recipe
