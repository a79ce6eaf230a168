"""Everything global in a process that a library could change, by name, to be compared before and after.

Random generators, flags and modes of torch, hooks and handlers of Python, the environment, and what stands at each name
of the modules and classes that programs patch. A name that is new (a submodule that was imported) is no change, another
value at a known name is one.
"""

from __future__ import annotations

import atexit
import builtins
import copyreg
import decimal
import faulthandler
import gc
import linecache
import locale
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
import torch.distributed
import torch.utils.checkpoint
import torch.utils.data
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

_PATCHED: tuple[Any, ...] = (
    *(builtins, os, sys, signal, subprocess, threading, warnings, random, numpy.random, time, gc, logging, linecache),
    *(traceback, copyreg, socket, subprocess.Popen, threading.Thread),
    *(torch, torch.Tensor, torch.autograd, torch.autograd.Function, torch.autograd.graph, torch.random, torch.cuda),
    *(torch.cuda.random, torch.cuda.graphs, torch.amp, torch.amp.GradScaler, torch.nn, torch.nn.Module, torch.backends),
    *(torch.nn.functional, torch.nn.utils, torch.nn.parallel.DistributedDataParallel, torch.utils.checkpoint),
    *(torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam, torch.optim.lr_scheduler.LRScheduler),
    *(torch.distributed, torch.serialization, torch.overrides, torch.utils.data.DataLoader, torch.compiler),
)
"""Modules and classes that programs patch."""
_ERROR = {("sys", name) for name in ("last_exc", "last_type", "last_value", "last_traceback")}
_HOOKS = ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "stdin", "stdout", "stderr")
_FLAGS: Mapping[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": lambda: str(torch.get_default_device()),
    "threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "deterministic algorithms": torch.get_deterministic_debug_mode,
    "uninitialized memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,
    "grad": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    "anomaly mode": lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    "multithreading": torch._C._is_multithreading_enabled,
    "matmul precision": torch.get_float32_matmul_precision,
    "denormal numbers": lambda: float(torch.tensor([1e-310], dtype=torch.float64) * 1),
    "autocast": lambda: [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in ("cpu", "cuda")],
    "autocast cache": torch.is_autocast_cache_enabled,
    "cudnn": lambda: [
        getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    ],
    "tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "attention": lambda: [
        getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "math", "mem_efficient", "cudnn")
    ],
    "mkldnn": torch._C._get_mkldnn_enabled,
    "modes": lambda: (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
    "saved-tensor hooks": lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    "print options": lambda: str(vars(torch._tensor_str.PRINT_OPTS)),
    "sharing of tensors": torch.multiprocessing.get_sharing_strategy,
    "start of processes": lambda: torch.multiprocessing.get_start_method(allow_none=True),
    "process group": torch.distributed.is_initialized,
    "CUDA": torch.cuda.is_initialized,
    "safe globals": lambda: len(torch.serialization.get_safe_globals()),
}


def state(*, with_names: bool = True) -> dict[str, Any]:
    """Return the state by name; without `with_names` only what is equal in two processes."""
    found: dict[str, Any] = {
        "random": random.getstate(),
        "numpy.random": [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()],
        "torch's generator": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "sys.path": list(sys.path),
        "folder": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)),
        "locale": locale.setlocale(locale.LC_ALL),
        "decimal": str(decimal.getcontext()),
        "faulthandler": faulthandler.is_enabled(),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "limits": [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "threads of Python": sorted(thread.name for thread in threading.enumerate()),
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "tools": [sys.monitoring.get_tool(one) for one in range(6)] if hasattr(sys, "monitoring") else [],
        "logging": (logging.root.level, len(logging.root.handlers), logging.root.manager.disable),
        "filters of warnings": [str(one) for one in warnings.filters],
        **{name: read() for name, read in _FLAGS.items()},
    }
    for module in (torch_module, torch_optimizer):
        hooks = (name for name in vars(module) if name.startswith("_global_"))
        found |= {f"{module.__name__}.{name}": _hooks_in(vars(module)[name]) for name in hooks}
    return found | (_identities() if with_names else {})


def _hooks_in(place: Any) -> Any:
    """The hooks that call something: an entry of ours without listeners may stay, while other threads iterate."""
    return [id(one) for one in place.values() if getattr(one, "calls", True)] if isinstance(place, dict) else place


def _identities() -> dict[str, Any]:
    found: dict[str, Any] = {f"sys.{name}": id(getattr(sys, name)) for name in _HOOKS}
    found |= {"threading.excepthook": id(threading.excepthook), "umask": _umask(), "atexit": atexit._ncallbacks()}
    found |= {
        f"handler of {one.name}": id(signal.getsignal(one)) for one in signal.valid_signals() if hasattr(one, "name")
    }
    found |= {f"sys.{name}": list(map(id, getattr(sys, name))) for name in ("meta_path", "path_hooks")}
    for owner in _PATCHED:
        for name, value in list(vars(owner).items()):
            if (owner.__name__, name) not in _ERROR and issubclass(type(value), _PATCHABLE):
                found[f"{owner.__name__}.{name}"] = id(value)
    return found


_PATCHABLE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, type, property),
    *(types.WrapperDescriptorType, types.GetSetDescriptorType, staticmethod, classmethod),
)


def _umask() -> int:
    before = os.umask(0o22)
    os.umask(before)
    return before


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names at which something else stands."""
    return [name for name, value in before.items() if name not in after or after[name] != value]
