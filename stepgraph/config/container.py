"""`ConfigContainer` is a whole configuration: one attribute for each section, with Megatron Bridge's names.

    cfg = ConfigContainer()
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_scope = ["attn"]
    cfg = cfg.validate()            # all broken rules at once, or a frozen copy that runs use

While it is being written it may hold anything of the right type. `validate` fills in what depends on other settings,
applies the rules, and returns a copy that can no longer change.

This package stands before the engines, which read configurations too, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Self

from stepgraph.config.base import ConfigSections
from stepgraph.config.environment import Environment
from stepgraph.config.overrides import apply_overrides
from stepgraph.config.rules import broken_rules, finalised
from stepgraph.config.toml_file import as_toml, read_toml
from stepgraph.core.errors import ConfigError
from stepgraph.core.tracebacks import entry_point


@dataclass(kw_only=True)
class ConfigContainer(ConfigSections):
    """A configuration of a training run, section by section.

    Example:
        >>> cfg = stepgraph.ConfigContainer()
        >>> cfg.model.cuda_graph_impl = "local"
        >>> cfg.model.cuda_graph_scope = "attn, mlp"
        >>> cfg.train.train_iters = 100
        >>> cfg = cfg.validate()
    """

    @entry_point
    def validate(self, environment: Environment | None = None, *, run: bool = False) -> Self:
        """Return a frozen copy with all settings filled in, or raise a `ConfigError` that lists every broken rule.

        `environment` is this process's by default. With `run=True` the rules of a run are applied too: what this
        program and this machine can run.
        """
        known = Environment.read() if environment is None else environment
        found = finalised(self, known)
        violations = broken_rules(found, known, ("config", "run") if run else ("config",))
        if violations:
            raise ConfigError(violations)
        assert isinstance(found, type(self))
        return found.frozen()

    @entry_point
    def override(self, overrides: Iterable[str]) -> Self:
        """Apply `section.field=value` texts, in place; return the configuration.

        Example:
            >>> cfg.override(["model.cuda_graph_scope=attn,mlp", "optimizer.lr=1e-4", "mixed_precision=bf16_mixed"])
        """
        apply_overrides(self, overrides)
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A configuration from sections of values; what is not named keeps its default."""
        found = cls()
        found.update(values)
        return found

    @classmethod
    @entry_point
    def from_toml(cls, file: str | PathLike[str]) -> Self:
        """A configuration from a TOML file; what is not named keeps its default."""
        return cls.from_dict(read_toml(file))

    def to_toml(self) -> str:
        """The configuration as a TOML file. Settings that are None are left out: None is their default."""
        return as_toml(self.to_dict())
