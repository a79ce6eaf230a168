"""The recipes as plain records, for tables and JSON. Imports no torch."""

from __future__ import annotations

import inspect
from typing import Any

from stepgraph.config.container import ConfigContainer
from stepgraph.lab.recipes.published import RECIPES, find_recipe


def records() -> list[dict[str, Any]]:
    """One record for each recipe: its size, what is captured, and why."""
    return [record(name) for name in RECIPES]


def record(name: str) -> dict[str, Any]:
    """The record of one recipe."""
    found = find_recipe(name)
    model = found.make().model
    return {
        "name": found.name,
        "description": (inspect.getdoc(found.make) or "").partition("\n")[0],
        "task": found.task,
        "parameters": found.parameters,
        "built_parameters": found.parameters if found.built is None else found.built,
        "size": in_words(found.parameters),
        "num_layers": model.num_layers,
        "seq_length": model.seq_length,
        "impl": model.cuda_graph_impl,
        "scope": [str(word) for word in model.cuda_graph_scope],
        "reason": found.reason,
        "is_trained": model.kind != "vision_language",
        "source": found.source,
    }


def settings(name: str) -> dict[str, Any]:
    """The settings of a recipe that are not the defaults, as `section.field`."""
    given, default = find_recipe(name).make().to_dict(), ConfigContainer().to_dict()
    return {
        f"{section}.{field}": value
        for section, fields in given.items()
        for field, value in fields.items()
        if value != default[section][field]
    }


def in_words(parameters: int) -> str:
    """A number of parameters in three digits: `124 M`, `8.03 B`."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if parameters >= size:
            number = parameters / size
            return f"{number:.{max(0, 3 - len(str(int(number))))}f} {unit}"
    return str(parameters)
