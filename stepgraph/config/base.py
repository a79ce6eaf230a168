"""`ConfigSections` holds the sections of a configuration; `ConfigContainer` adds what reads and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from stepgraph.config.model import ModelSection
from stepgraph.config.section import Section, is_frozen, refuse_frozen, unknown_setting, values_of
from stepgraph.config.sections import (
    CheckpointSection,
    CommOverlapSection,
    DatasetSection,
    DdpSection,
    DistSection,
    LoggerSection,
    MixedPrecisionSection,
    OptimizerSection,
    PeftSection,
    RerunStateMachineSection,
    RngSection,
    SchedulerSection,
    TrainSection,
)
from stepgraph.config.spellings import older_first, refuse_contradictions
from stepgraph.config.values import types_of
from stepgraph.core.errors import InvalidArgument
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import with_article


@dataclass(kw_only=True)
class ConfigSections:
    """The sections of a configuration."""

    model: ModelSection = field(default_factory=ModelSection)
    rng: RngSection = field(default_factory=RngSection)
    ddp: DdpSection = field(default_factory=DdpSection)
    rerun_state_machine: RerunStateMachineSection = field(default_factory=RerunStateMachineSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    train: TrainSection = field(default_factory=TrainSection)
    dataset: DatasetSection = field(default_factory=DatasetSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logger: LoggerSection = field(default_factory=LoggerSection)
    dist: DistSection = field(default_factory=DistSection)
    peft: PeftSection = field(default_factory=PeftSection)
    comm_overlap: CommOverlapSection = field(default_factory=CommOverlapSection)
    mixed_precision: MixedPrecisionSection = field(default_factory=MixedPrecisionSection)

    @entry_point
    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a section. Besides a section: None for its defaults, a mapping, or the name of a precision."""
        refuse_frozen(self, name)
        sections = types_of(type(self))
        if name not in sections:
            raise unknown_setting("", name, type(self))
        kind = sections[name]
        if name == "mixed_precision" and isinstance(value, str):
            value = MixedPrecisionSection.named(value)
        elif name == "peft" and isinstance(value, str):
            value = {"scheme": value}
        if value is None or isinstance(value, Mapping):
            given, value = value or {}, kind()
            for field_name, new in given.items():
                setattr(value, field_name, new)
        if not isinstance(value, kind):
            raise InvalidArgument(
                f"{name} = {value!r} is not {with_article(kind)}",
                rule="config-value",
                why="each section has its own settings.",
                fix=f"name one of its fields: {name}.FIELD=VALUE; in Python also cfg.{name} = {kind.__name__}(...).",
            )
        object.__setattr__(self, name, value.copy() if is_frozen(value) else value)

    def copy(self) -> Self:
        """A configuration of its own with the same values, which can be changed."""
        sections: dict[str, Any] = {name: section.copy() for name, section in self.sections().items()}
        return type(self)(**sections)

    def frozen(self) -> Self:
        """A copy that refuses changes."""
        found = self.copy()
        for name, section in found.sections().items():
            object.__setattr__(found, name, section.frozen())
        object.__setattr__(found, "_is_frozen", True)
        return found

    @property
    def is_frozen(self) -> bool:
        """True for what `validate()` returned."""
        return is_frozen(self)

    def sections(self) -> dict[str, Section]:
        """The sections by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def update(self, values: Mapping[str, Any]) -> None:
        """Change the settings that sections of values name; a section may also be given whole, as when assigned."""
        for name, value in values.items():
            if isinstance(value, Mapping) and name in types_of(type(self)):
                section = getattr(self, name)
                if name == "model":
                    refuse_contradictions(value)
                for field_name, new in older_first(value).items():
                    setattr(section, field_name, new)
            else:
                setattr(self, name, value)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """All values as plain Python: sections, and in them numbers, strings, bools, None and lists."""
        return {
            name: {
                key: [_plain(item) for item in value] if isinstance(value, (list, tuple)) else _plain(value)
                for key, value in values_of(section).items()
            }
            for name, section in self.sections().items()
        }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value
