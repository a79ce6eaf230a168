"""README's blocks, as programs."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_BEFORE = """\
import torch
import torch.nn.functional as F
import stepgraph

model = torch.nn.Linear(32, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = [(torch.randn(16, 32), torch.randn(16, 1)) for _ in range(10)]

"""
"""What README's loop takes for granted."""


def block(language: str) -> str:
    """README's only block of a language."""
    (found,) = (m.group(2) for m in FENCE.finditer(README.read_text()) if m.group(1) == language)
    return found


def loop() -> str:
    """README's loop as a program, with the lines that its diff adds."""
    return _BEFORE + re.sub(r"^[+ ]", "", block("diff"), flags=re.MULTILINE)
