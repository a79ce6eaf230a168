"""Seeds for the suites."""

from __future__ import annotations

import torch


def seed(number: int) -> None:
    """Seed the default generators of the devices there are.

    `torch.manual_seed` formats the whole stack for each kind of accelerator that it finds absent, in case one is
    initialized later: two milliseconds a call below pytest's frames, several calls a test.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)
