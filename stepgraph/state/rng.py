"""Random state on the host: what a graph cannot advance.

A graph advances the device's generators by itself. Numbers drawn on the host inside a step (`random.random()`,
numpy, torch's CPU generator in a step that runs on a GPU) are drawn once, at capture, and frozen: eager would draw new
ones at each call. Whether a step draws any is seen in warm-up, and refused before anything is captured.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class HostRandomWatch:
    """The host's random generators at one moment, to be compared with a later one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {"random": random.getstate()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            _, keys, position, *_ = numpy.random.get_state()
            states["numpy.random"] = (keys.tobytes(), position)
        if self._device.type != "cpu":
            states["torch's CPU generator"] = torch.get_rng_state().tolist()
        return states

    def advanced(self) -> list[str]:
        """The generators that were drawn from since."""
        now = self._states()
        return [name for name, state in self._before.items() if now[name] != state]
