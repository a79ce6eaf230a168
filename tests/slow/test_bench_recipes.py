"""`stepgraph bench -g cpu` answers for every recipe: with figures, or with a rule and a fix."""

import json

import pytest
from typer.testing import CliRunner

from stepgraph.commands.cli import app
from stepgraph.lab.recipes import RECIPES

SMALL = ["-sl", "16", "-gb", "1", "--steps", "1", "model.vocab_size=256"]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_bench_of_every_recipe_on_a_cpu(name: str) -> None:
    result = CliRunner().invoke(app, ["bench", "-mr", name, "-g", "cpu", "--fit", *SMALL, "--json"])
    values = json.loads(result.stdout)
    assert values["exit_code"] == result.exit_code
    if name == "qwen3_vl":  # its data has no images yet
        assert (result.exit_code, values["error"]["rule"]) == (2, "not-trained")
        assert "images" in values["error"]["why"]
        assert "qwen3_30b_a3b" in values["error"]["fix"]
        return
    assert result.exit_code == 0, result.stderr
    assert values["step_ms"] > 0
    assert values["replays"] > 0
    assert values["loss"] > 0
