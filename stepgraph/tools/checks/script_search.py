"""Searches the model of a running script for the modules that can be captured, in two more of its steps.

A model in whose forward something was found is not captured whole. Which of its parts can be is tried, not guessed
(`partition`). A script that ends before has no search; then the parts without a finding are named.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stepgraph.core.errors import StepgraphError
from stepgraph.tools.checks.partition import ModuleSearch

BUDGET_S = 30.0
"""Seconds for all trials."""


class ScriptSearch:
    """One search, which is told of the script's steps."""

    def __init__(self, model: torch.nn.Module, unfit: Mapping[str, str]) -> None:
        """`unfit` are the modules that no replay can serve, by path, each with the reason: they are not tried."""
        self._search: ModuleSearch | None = ModuleSearch(model)
        self._unfit = unfit
        self.scope: list[str] | None = None
        """What `graph_modules` takes, once it is known."""
        self.failure = ""

    @property
    def is_over(self) -> bool:
        return self._search is None

    def begin_step(self) -> None:
        """Observe the step that begins, or finish if two were observed."""
        if self._search is not None and self._search.is_ready:
            self.finish()
        if self._search is not None:
            self._search.begin_step()

    def end_step(self) -> None:
        if self._search is not None:
            self._search.end_step()

    def finish(self) -> None:
        """Try the modules, if two steps were observed, and take the observers out."""
        if self._search is None:
            return
        try:
            if self._search.is_ready:
                self.scope = self._search.finish(BUDGET_S, self._unfit).scope()
        except StepgraphError as error:
            self.failure = error.what
        finally:
            self._search.close()
            self._search = None
