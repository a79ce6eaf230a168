"""Every field of a configuration is read by the training loop, refused, or known to change nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import stepgraph
from stepgraph.config.container import ConfigContainer
from stepgraph.core.errors import StepgraphError
from stepgraph.lab.train.settings import (
    NOT_CARRIED_OUT,
    REFUSED_BY_A_RULE,
    SOMETIMES,
    WITHOUT_EFFECT,
    refuse_untrained,
)

ROOT = Path(stepgraph.__file__).parent
CFG = ConfigContainer()
SECTIONS = {section.name: [field.name for field in fields(getattr(CFG, section.name))] for section in fields(CFG)}
FIELDS = [f"{section}.{name}" for section, names in SECTIONS.items() for name in names]
READERS = [
    *(path for path in (ROOT / "lab" / "train").glob("*.py") if path.name not in ("settings.py", "__init__.py")),
    ROOT / "lab" / "recipes" / "build.py",
]
PARAMETERS = {"model": "model", "model_config": "model", "logger": "logger"}
"""Names of parameters that are a section."""


def reads_of(path: Path) -> Iterator[str]:
    """The fields that a file reads: `cfg.section.field`, or `name.field` where `name` was assigned a section."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    aliases: dict[str, set[str]] = {name: {section} for name, section in PARAMETERS.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            is_row = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if is_row else [(target, value)]  # type: ignore[attr-defined]
            for name, found in pairs:
                if isinstance(name, ast.Name) and isinstance(found, ast.Attribute) and found.attr in SECTIONS:
                    aliases.setdefault(name.id, set()).add(found.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            yield f"{node.value.attr}.{node.attr}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from (f"{section}.{node.attr}" for section in aliases.get(node.value.id, ()))


def test_no_field_is_ignored_in_silence() -> None:
    read = {name for path in READERS for name in reads_of(path)}
    tables = {*NOT_CARRIED_OUT, *REFUSED_BY_A_RULE, *WITHOUT_EFFECT}
    known = tables | {name.split("=")[0].split()[0] for name in SOMETIMES}
    assert known <= set(FIELDS), "the tables name fields that exist"
    assert [name for name in FIELDS if name not in read | known] == []
    assert sorted(tables & read) == [], "what is read is not in a table of what is not"


OTHER: dict[str, Any] = {
    "ddp.bucket_size": 3,
    "train.rampup_batch_size": [1, 1, 1],
    "scheduler.start_weight_decay": 0.5,
    "scheduler.end_weight_decay": 0.5,
    "scheduler.weight_decay_incr_style": "linear",
    "model.microbatch_group_size_per_vp_stage": 2,
    "model.expert_tensor_parallel_size": 2,
    "comm_overlap.overlap_p2p_comm": True,
    "comm_overlap.batch_p2p_comm": True,
    "mixed_precision.loss_scale": 128.0,
}


@pytest.mark.parametrize("name", [*NOT_CARRIED_OUT, *REFUSED_BY_A_RULE])
def test_other_values_than_the_default_are_refused(name: str) -> None:
    cfg = ConfigContainer()
    section, field = name.split(".")
    value = getattr(getattr(cfg, section), field)
    setattr(
        getattr(cfg, section),
        field,
        OTHER[name] if name in OTHER else (not value if value in (0, 1) and isinstance(value, bool) else value + 1),
    )
    with pytest.raises(StepgraphError) as caught:
        refuse_untrained(cfg.validate(run=True))
    assert name in str(caught.value)
    assert ("[not-trained]" in str(caught.value)) == (name in NOT_CARRIED_OUT)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("ddp.overlap_param_gather", "ddp.overlap_param_gather=true optimizer.optimizer=sgd"),
        ("peft.dropout_position", "peft.scheme=lora peft.dropout_position=post"),
        ("dataset.pad_to_max_length", "dataset.pad_to_max_length=false"),
        ("dataset.packed_sequence without examples", "dataset.packed_sequence=true dataset.pad_cu_seqlens=true"),
        ("model.kind=vision_language", "model.kind=vision_language"),
        ("model.delay_wgrad_compute with LoRA", "model.delay_wgrad_compute=true peft.scheme=lora"),
        (
            "model.virtual_pipeline_model_parallel_size without a pipeline",
            "model.virtual_pipeline_model_parallel_size=2",
        ),
        (
            "model.moe_router_load_balancing_type",
            "model.moe_router_load_balancing_type=seq_aux_loss model.moe_aux_loss_coeff=0.1",
        ),
        ("mixed_precision.bf16 without params_dtype", "mixed_precision.bf16=true"),
    ],
)
def test_settings_refused_together_with_others(name: str, overrides: str) -> None:
    cfg = ConfigContainer().override(overrides.split())
    assert name in SOMETIMES
    with pytest.raises(StepgraphError, match="not-trained") as caught:
        refuse_untrained(cfg.validate(run=True))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "what", "why"),
    [
        ("model.pipeline_model_parallel_size=2", "in a pipeline", "schedules run the whole backward of a microbatch"),
        ("peft.scheme=lora", "with LoRA", "LoRA freezes the weights whose gradients could be delayed"),
    ],
)
def test_delayed_gradients_are_refused_with_the_reason(overrides: str, what: str, why: str) -> None:
    cfg = ConfigContainer().override(["model.delay_wgrad_compute=true", *overrides.split()])
    with pytest.raises(StepgraphError, match=rf"model\.delay_wgrad_compute {what}.*\[not-trained\]") as caught:
        refuse_untrained(cfg)
    assert why in str(caught.value)
    assert "Fix: model.delay_wgrad_compute=false" in str(caught.value)


@pytest.mark.parametrize("mix", ["fp32", "bf16_mixed", "bf16_autocast"])
def test_known_mixes_of_formats_are_trained(mix: str) -> None:
    cfg = ConfigContainer()
    cfg.mixed_precision = mix  # type: ignore[assignment]
    refuse_untrained(cfg.validate(run=True))
