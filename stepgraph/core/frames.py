"""Finds the user's frames and classes among torch's and our own.

A refusal names the innermost line that is neither torch's nor this engine's. The reference models and benchmarks that
ship with the package count as user code: they know nothing of graphs.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable, Collection, Container, Iterator
from typing import Any, TypeVar

import torch

from stepgraph.core.collector import collector_at_rest
from stepgraph.core.errors import Location, StepgraphWarning

_Function = TypeVar("_Function", bound=Callable[..., Any])
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = f"-packages{os.sep}"
_PROMPTS = ("<stdin>", "<string>", "<console>", "<input>", "<python-input-", "<ipython-input-", "<doctest ")
_USER_ROOMS = tuple(_HERE + os.path.join("lab", room, "") for room in ("models", "bench"))
_USER_MODULES = ("stepgraph.lab.models", "stepgraph.lab.bench")
_PLATFORM = frozenset((*sys.stdlib_module_names, "torch", "numpy", "stepgraph", "triton", "pybind11_builtins"))
_NAMESPACES = ("argparse", "types")
_DISPATCH = ("utils/_python_dispatch.py", "overrides.py", "_ops.py", "_compile.py", "_dynamo", "utils/_contextlib.py")
_LIBRARY = tuple(_TORCH + name for name in ("_ops.py", "library.py", f"_library{os.sep}"))
_KERNELS = _HERE + os.path.join("engine", "backends", "kernels.py")
_PLUMBING = tuple(_TORCH + name for name in _DISPATCH)
_OPERATORS = tuple(_TORCH + name for name in ("_tensor.py", "_tensor_str.py", "autograd", "nn/modules/module.py"))


def is_engine(file: str) -> bool:
    """Whether a file is part of stepgraph's engine."""
    return file.startswith(_HERE) and not file.startswith(_USER_ROOMS)


def is_user(file: str) -> bool:
    """Whether a file is the user's: not torch, not the engine, not generated code."""
    return not (file.startswith((_TORCH, "<")) or is_engine(file) or file.endswith("contextlib.py"))


def is_of_python(file: str) -> bool:
    """Whether a file belongs to Python's own library."""
    return file.startswith(_STANDARD) and not is_installed(file)


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed library."""
    return _INSTALLED in file


def is_users_code(code: types.CodeType) -> bool:
    """Whether code is the user's or a library's, typed at a prompt or in a file; not torch's or Python's own."""
    file = code.co_filename
    if file.startswith("<"):
        return file.startswith(_PROMPTS)
    return is_user(file) and (not file.startswith(_STANDARD) or is_installed(file))


def is_users(kind: type) -> bool:
    """Whether a class is the user's, a library's or a namespace; not torch's or a standard one."""
    return any(is_users_module(str(base.__module__)) for base in kind.__mro__)


def is_standard(kind: type) -> bool:
    """Whether a class is of Python's standard library."""
    return kind is not object and str(kind.__module__).partition(".")[0] in sys.stdlib_module_names


def is_own(kind: type) -> bool:
    """Whether a class is the user's own, not an installed library's."""
    names = [str(base.__module__) for base in kind.__mro__]
    return any(is_users_module(name) and not is_installed_module(name) for name in names)


def is_users_module(name: str) -> bool:
    """Whether the Python module of this name is the user's or a library's."""
    root = name.partition(".")[0]
    return root not in _PLATFORM or root in _NAMESPACES or name.startswith(_USER_MODULES)


def is_installed_module(name: str) -> bool:
    """Whether the Python module of this name belongs to an installed library."""
    module = None if name.startswith(_USER_MODULES) else sys.modules.get(name)
    return module is not None and is_installed(str(getattr(module, "__file__", "")))


def is_engines(value: Any) -> bool:
    """Whether a value is stepgraph's own, such as a graphed forward that it has put into a module."""
    value = value.__func__ if type(value) is types.MethodType else value
    if type(value) is types.FunctionType:
        return is_engine(value.__code__.co_filename)
    name = str(type(value).__module__)
    return name.startswith("stepgraph.") and not name.startswith(_USER_MODULES)


def caller_is_torch() -> bool:
    """Whether the innermost frame above the dispatch plumbing is torch's own Python code."""
    return _calling_file().startswith(_TORCH)


def caller_is_autograd() -> bool:
    """Whether autograd's engine called, with no Python code between it and the operator."""
    return _calling_file() == _TORCH + os.path.join("autograd", "graph.py")


def is_called_for_an_operator(frame: types.FrameType) -> bool:
    """Whether torch has called this frame's function for an operator, with no code of the user in between."""
    for caller in _stack(frame.f_back):
        file = caller.f_code.co_filename
        if file.startswith(_LIBRARY) or file == _KERNELS:
            return True
        if not file.startswith(_TORCH):
            return False
    return False


def _calling_file() -> str:
    files = (frame.f_code.co_filename for frame in _stack(sys._getframe(1)))
    return next((file for file in files if not (is_engine(file) or file.startswith((*_PLUMBING, "<")))), "")


def _stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame and those around it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def called_from_torch(file: str) -> bool:
    """Whether a function of this file of torch, such as `utils/checkpoint.py`, is on the stack."""
    return any(frame.f_code.co_filename == _TORCH + file for frame in _stack(sys._getframe(1)))


def warn_user(message: str) -> None:
    """Warn at the user's innermost line, or, where there is none, at the line that called stepgraph."""
    codes = [frame.f_code for frame in _stack(sys._getframe(0))]
    outside = next((level for level, code in enumerate(codes, 1) if not is_engine(code.co_filename)), len(codes))
    level = next((level for level, code in enumerate(codes, 1) if is_users_code(code)), outside)
    warnings.warn(message, StepgraphWarning, stacklevel=level)


def is_running(functions: Container[types.CodeType]) -> bool:
    """Whether code of one of these functions runs now, in any thread."""
    # the frames have no name here: a frame that knows its own frame would live on
    return any(frame.f_code in functions for innermost in _innermost_frames() for frame in _stack(innermost))


def _innermost_frames() -> Collection[types.FrameType]:
    """One frame of each thread.

    Some Pythons hold a lock while they list them, and collect garbage meanwhile (cpython#106883): a finalizer that asks
    the same would wait for that lock forever.
    """
    with collector_at_rest():
        return sys._current_frames().values()


def user_location() -> Location | None:
    """The user's innermost line on the current stack."""
    for frame in _stack(sys._getframe(1)):
        if is_user(frame.f_code.co_filename):
            return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    return None


def torch_function(error: BaseException) -> Location | None:
    """The function of torch, by its path within torch, that the user's innermost line called and that raised an error.

    None where the user's line raised it itself; operators (`print(x)`, `x.backward()`) do not count.
    """
    found = None
    for place in _traceback(error):
        if is_user(place.file):
            found = None
        elif place.file.startswith(_TORCH) and not place.file.startswith((*_PLUMBING, *_OPERATORS)):
            found = Location(place.file.removeprefix(_TORCH), place.line, place.function)
    return found


def error_location(error: BaseException) -> Location | None:
    """The user's innermost line in an error's traceback."""
    return next((place for place in reversed(_traceback(error)) if is_user(place.file)), None)


def _traceback(error: BaseException) -> list[Location]:
    found, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(Location(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return found


def untraced(function: _Function) -> _Function:
    """Keep torch.compile out of a function and of all that it calls: compiled code breaks off there and goes on after.

    `torch.compiler.disable` does the same by a wrapper, which costs each call some microseconds. Here the function is
    only marked: by the attribute that the compiler reads before it inlines a function, and by the flag of a code object
    that is read before a frame is compiled.
    """
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = "stepgraph replays graphs here"
    evaluation: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(evaluation, "set_code_exec_strategy"):  # torch's own, not public; it has no public one without a wrapper
        skip = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(function.__code__, evaluation._FrameExecStrategy(skip, skip))
    return function
