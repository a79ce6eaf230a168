"""Makes a script `__main__`, as Python itself does, and marks the function whose calls are the steps.

`--step NAME` names a function of the script, `Class.method`, or `module:function`. A function of the script is wrapped
where it is defined: its definition gets one decorator more, before the code is compiled, so that it is wrapped before
anything can call it. A function of another module is wrapped when that module has been imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stepgraph.core.errors import InvalidArgument
from stepgraph.tools.script.request import Script

__all__ = ["MainModule", "NamedStep", "refuse_unknown_step"]

_MARK = "__stepgraph_step__"
_KINDS_OF_METHODS = ("staticmethod", "classmethod", "property")


def refuse_unknown_step(script: Script) -> None:
    """Raise if `--step` names a function that the script's file does not define: before anything runs.

    Names in other modules, and files that cannot be read, are left to the run.
    """
    if script.step is None or ":" in script.step or script.is_module:
        return
    try:
        tree = ast.parse(Path(script.target).read_bytes(), script.target)
    except (OSError, SyntaxError, ValueError):
        return
    step = NamedStep(script.step, lambda function: function)
    if not any(_definitions(tree.body, step.parts)):
        raise step.not_found(script.target)


class NamedStep:
    """The function that `--step` names. `wrap` is put around it."""

    def __init__(self, name: str, wrap: Callable[[Any], Any]) -> None:
        module, colon, path = name.rpartition(":")
        self.name, self.module, self.parts = name, module if colon else "__main__", path.split(".")
        self.wrap = wrap
        self.is_found = False

    def not_found(self, where: str) -> InvalidArgument:
        return InvalidArgument(f"--step {self.name}: {where} has no function {'.'.join(self.parts)}", rule="step-name")

    def mark(self, tree: ast.Module, where: str) -> None:
        """Put the decorator on the definitions of the function."""
        found = list(_definitions(tree.body, self.parts))
        if not found:
            raise self.not_found(where)
        self.is_found = True
        for function in found:
            mark = ast.copy_location(ast.Name(_MARK, ast.Load()), function)
            is_bound_later = any(
                isinstance(one, ast.Name) and one.id in _KINDS_OF_METHODS for one in function.decorator_list
            )
            function.decorator_list.insert(len(function.decorator_list) if is_bound_later else 0, mark)

    def wrap_in(self, module: types.ModuleType) -> None:
        """Wrap the function in a module that has been imported."""
        owner: Any = module
        for part in self.parts[:-1]:
            owner = getattr(owner, part, None)
        last = self.parts[-1]
        if owner is None or not hasattr(owner, last):
            raise self.not_found(module.__name__)
        self.is_found = True
        raw = vars(owner).get(last, getattr(owner, last))
        if isinstance(raw, (staticmethod, classmethod)):
            setattr(owner, last, type(raw)(self.wrap(raw.__func__)))
        else:
            setattr(owner, last, self.wrap(raw))


def _definitions(body: Sequence[ast.stmt], parts: Sequence[str]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The definitions of a dotted name, those under `if`, `try` and `with` too."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name != parts[0]:
                continue
            if len(parts) > 1:
                yield from _definitions(node.body, parts[1:])
            elif not isinstance(node, ast.ClassDef):
                yield node
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(node, name, []), parts)
            for handler in getattr(node, "handlers", []):
                yield from _definitions(handler.body, parts)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Wraps the named function as soon as its module has been imported."""

    def __init__(self, step: NamedStep) -> None:
        self._step = step

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._step.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        original = loader.exec_module

        @functools.wraps(original)
        def exec_module(module: types.ModuleType) -> None:
            original(module)
            self._step.wrap_in(module)

        loader.exec_module = exec_module
        return spec


class MainModule:
    """A script that is about to become `__main__`."""

    def __init__(self, script: Script, step: NamedStep | None = None) -> None:
        self._step = step
        _add_folder(script)  # where Python looks for the module, too
        self._spec = _module_spec(script.target) if script.is_module else None
        loader: Any
        if self._spec is None:
            self._path = os.path.abspath(script.target)
            loader = importlib.machinery.SourceFileLoader("__main__", self._path)
            argv0 = script.target
        else:
            self._path, loader = str(self._spec.origin), self._spec.loader
            argv0 = self._path
        self._loader = loader
        sys.argv[:] = [argv0, *script.args]
        if step is not None and step.module in (script.target if script.is_module else "", "__main__"):
            step.module = "__main__"

    def run(self) -> None:
        """Run the script."""
        main = types.ModuleType("__main__")
        is_module = self._spec is not None
        names = {
            "__file__": self._path,
            "__loader__": self._loader,
            "__spec__": self._spec,
            "__package__": self._spec.parent if self._spec is not None else None,
            "__cached__": self._spec.cached if self._spec is not None else None,
            "__builtins__": sys.modules["builtins"],
        }
        vars(main).update(names)
        if not is_module:
            del vars(main)["__package__"]
            vars(main)["__package__"] = None
        code = self._compiled(main)
        sys.modules["__main__"] = main
        exec(code, vars(main))

    def _compiled(self, main: types.ModuleType) -> types.CodeType:
        source = Path(self._path).read_bytes()
        step = self._step
        if step is None or step.module != "__main__":
            if step is not None:
                if step.module in sys.modules:
                    step.wrap_in(sys.modules[step.module])
                sys.meta_path.insert(0, _AfterImport(step))
            return compile(source, self._path, "exec", dont_inherit=True)
        tree = ast.parse(source, self._path)
        step.mark(tree, self._path)
        vars(main)[_MARK] = step.wrap
        return compile(tree, self._path, "exec", dont_inherit=True)


def _add_folder(script: Script) -> None:
    """Make `sys.path[0]` the script's folder, or with `-m` the current one; Python's safe path has neither."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.target)))


def _module_spec(name: str) -> importlib.machinery.ModuleSpec:
    """The spec of a module, or of a package's `__main__`, as `python -m` finds it."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidArgument(f"-m {name}: Python finds no module of that name", rule="script-missing")
    return spec
