"""The models, optimizers and functions of a running script, and the user's names for them."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stepgraph.core.collector import objects_of
from stepgraph.core.errors import Location
from stepgraph.core.frames import is_engines
from stepgraph.engine.observe.step_objects import StepObjects
from stepgraph.tools.checks.findings import Seen
from stepgraph.tools.checks.places import stack_of
from stepgraph.tools.checks.step_functions import StepFunctions

__all__ = ["ScriptObjects", "calls_from_engine", "clean_parts"]

_MODULE_CODE = "<module>"
_ENGINES = tuple(str(Path(__file__).parents[2] / "engine" / room) + "/" for room in ("step", "parts"))


class ScriptObjects:
    """What is alive in the script, and which modules ran in its steps."""

    def __init__(self) -> None:
        self.touched = StepObjects()
        self.called: dict[str, torch.nn.Module] = {}
        """The modules that ran in a step, by name."""
        self.is_graphed = False
        """Whether the script uses stepgraph already."""
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}

    def look_around(self) -> None:
        """Find the models and optimizers that are alive; whole models first, since their parts are named by them."""
        for optimizer in objects_of(Optimizer):
            if "param_groups" in vars(optimizer):  # else a wrapper around another one
                self.touched.add_optimizer(optimizer)
        modules = {id(module): module for module in objects_of(torch.nn.Module) if "_modules" in vars(module)}
        parts = {id(part) for module in modules.values() for part in module.children()}
        for key, module in modules.items():
            if key not in parts:
                self.touched.add_reachable(module)

    def notice_graphs(self, frame: types.FrameType) -> bool:
        """Look whether stepgraph runs the step, or a module of it, in this frame."""
        has_graphs = any(is_engines(vars(module).get("forward")) for module in self.touched.all_modules)
        self.is_graphed = self.is_graphed or has_graphs or calls_from_engine(frame)
        return self.is_graphed

    def add_call(self, module: torch.nn.Module) -> None:
        """A module runs."""
        self.touched.add_module(module)
        self.called.setdefault(self.touched.name(module), module)

    def functions_of(self, codes: Iterable[types.CodeType]) -> list[types.FunctionType]:
        """The functions with this code, as they were when it was first asked for.

        One look at all objects finds those of all new code.
        """
        wanted = {code for code in codes if code.co_name != _MODULE_CODE}
        new = wanted - self._functions.keys()
        self._functions |= {code: [] for code in new}
        for function in objects_of(types.FunctionType) if new else ():
            if function.__code__ in new:
                self._functions[function.__code__].append(function)
        return [function for code in wanted for function in self._functions[code]]

    @property
    def device(self) -> torch.device:
        """The device of the step."""
        found = {parameter.device.type for parameter in self.touched.all_parameters}
        return torch.device("cuda" if "cuda" in found else "cpu")

    def name_of(self, module: torch.nn.Module | None) -> str:
        return self.touched.name(module) if module is not None else ""

    def module_at(self, where: Location | None) -> str:
        """The first module that ran whose `forward` has this line, by name."""
        if where is None:
            return ""
        for name, module in self.called.items():
            code = getattr(type(module).forward, "__code__", None)
            if code is not None and code.co_filename == where.file:
                lines = [line for _, _, line in code.co_lines() if line is not None]
                if min(lines) <= where.line <= max(lines):
                    return name
        return ""

    def models(
        self, inside: Sequence[Seen], functions: StepFunctions, unfit: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """The models that ran, each with the parts that ran without a finding, and those that no replay can serve."""
        dirty = {one.module for one in inside if one.module} | unfit.keys()
        roots = [name for name in self.called if not any(name.startswith(f"{other}.") for other in self.called)]
        return [
            {
                "name": functions.name_of(self.called[root]),
                "class": root,
                "clean": clean_parts(root, self.called, dirty),
                "unfit": {
                    name.removeprefix(root).removeprefix("."): rule
                    for name, rule in unfit.items()
                    if name == root or name.startswith(f"{root}.")
                },
            }
            for root in roots
            if next(self.called[root].parameters(), None) is not None
        ]


def calls_from_engine(frame: types.FrameType) -> bool:
    """Whether stepgraph's engines are among the callers of a frame."""
    return any(one.f_code.co_filename.startswith(_ENGINES) for one in stack_of(frame))


def clean_parts(root: str, called: Iterable[str], dirty: Iterable[str]) -> list[str]:
    """The outermost modules below a root, by path, in which nothing was found; an empty path is the root itself."""
    found_in = list(dirty)

    def is_clean(path: str) -> bool:
        return not any(one == path or one.startswith(f"{path}.") for one in found_in)

    if is_clean(root):
        return [""]
    found: list[str] = []
    for path in sorted(called):
        if path.startswith(f"{root}.") and is_clean(path) and not any(path.startswith(f"{one}.") for one in found):
            found.append(path)
    return [path.removeprefix(f"{root}.") for path in found]
