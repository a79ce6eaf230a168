"""stepgraph: capture a PyTorch training step as CUDA graphs, replay it, and prove that nothing changed but the time.

The public names load on first use: `import stepgraph` and `stepgraph --help` do not import torch.
"""

import importlib
import importlib.util
import random
import sys
from typing import TYPE_CHECKING, Any

from stepgraph.core.torch_import import importing_torch

if TYPE_CHECKING:
    from stepgraph.config.container import ConfigContainer
    from stepgraph.config.environment import Environment
    from stepgraph.config.overrides import set_cuda_graph_overrides
    from stepgraph.config.scope import VALID_CUDA_GRAPH_IMPLS, VALID_CUDA_GRAPH_SCOPES, CudaGraphScope
    from stepgraph.core.errors import (
        BuildError,
        CaptureError,
        ClosedError,
        ConfigError,
        InvalidArgument,
        NonFinite,
        NoStepError,
        ScriptError,
        SignatureMismatch,
        StaleMemoryError,
        StateChanged,
        StepgraphError,
        StepgraphWarning,
    )
    from stepgraph.core.tree import tree_map
    from stepgraph.engine import order
    from stepgraph.engine.backends import Backend, backend_for
    from stepgraph.engine.backends.random.tracker import CudaRNGStatesTracker, get_cuda_rng_tracker
    from stepgraph.engine.call.session import Session
    from stepgraph.engine.memory.inputs import ArgMetadata
    from stepgraph.engine.memory.reuse_pool import TensorReusePool
    from stepgraph.engine.parts.callables.graphed import CallablesReport
    from stepgraph.engine.parts.callables.make_graphed import make_graphed_callables
    from stepgraph.engine.parts.modules.graph_modules import GraphedModules, graph_modules
    from stepgraph.engine.parts.modules.mismatch import get_mismatch_errors
    from stepgraph.engine.parts.modules.report import ModuleReport
    from stepgraph.engine.parts.modules.scopes import ScopeRegistry
    from stepgraph.engine.parts.modules.session import (
        create_cudagraphs,
        delete_cuda_graphs,
        is_graph_capturing,
        is_graph_warmup,
    )
    from stepgraph.engine.parts.modules.static_buffers import CudagraphBufferMetadata
    from stepgraph.engine.parts.stages.stage import GraphedStages, graph_stage
    from stepgraph.engine.step.capture import capture
    from stepgraph.engine.step.full_iteration import FullCudaGraphWrapper
    from stepgraph.engine.step.report import Report
    from stepgraph.engine.step.static_loader import StaticBufferLoader
    from stepgraph.engine.step.step import CapturedStep
    from stepgraph.lab.bench.run import BenchResult, benchmark
    from stepgraph.megatron.layers_helper import TECudaGraphHelper
    from stepgraph.megatron.manager import CudaGraphManager
    from stepgraph.megatron.optimizer_wrapper import OptimizerCudaGraphWrapper
    from stepgraph.megatron.part_graphs import set_current_microbatch
    from stepgraph.megatron.vision_helper import VisionTECudaGraphHelper, get_vision_cuda_graph_seq_length
    from stepgraph.tools.advice.advise import AdviceReport, advise
    from stepgraph.tools.checks.check import CheckReport, check
    from stepgraph.tools.doctor import DoctorReport, doctor
    from stepgraph.tools.explain import Explanation, explain
    from stepgraph.tools.frozen_values.frozen import frozen
    from stepgraph.tools.frozen_values.frozen_report import FrozenReport
    from stepgraph.tools.verification.report import VerifyReport
    from stepgraph.tools.verification.verify import verify

__version__ = "0.1.0"

__all__ = [
    "VALID_CUDA_GRAPH_IMPLS",
    "VALID_CUDA_GRAPH_SCOPES",
    "AdviceReport",
    "ArgMetadata",
    "Backend",
    "BenchResult",
    "BuildError",
    "CallablesReport",
    "CaptureError",
    "CapturedStep",
    "CheckReport",
    "ClosedError",
    "ConfigContainer",
    "ConfigError",
    "CudaGraphManager",
    "CudaGraphScope",
    "CudaRNGStatesTracker",
    "CudagraphBufferMetadata",
    "DoctorReport",
    "Environment",
    "Explanation",
    "FrozenReport",
    "FullCudaGraphWrapper",
    "GraphedModules",
    "GraphedStages",
    "InvalidArgument",
    "ModuleReport",
    "NoStepError",
    "NonFinite",
    "OptimizerCudaGraphWrapper",
    "Report",
    "ScopeRegistry",
    "ScriptError",
    "Session",
    "SignatureMismatch",
    "StaleMemoryError",
    "StateChanged",
    "StaticBufferLoader",
    "StepgraphError",
    "StepgraphWarning",
    "TECudaGraphHelper",
    "TensorReusePool",
    "VerifyReport",
    "VisionTECudaGraphHelper",
    "advise",
    "backend_for",
    "benchmark",
    "capture",
    "check",
    "create_cudagraphs",
    "delete_cuda_graphs",
    "doctor",
    "explain",
    "frozen",
    "get_cuda_rng_tracker",
    "get_mismatch_errors",
    "get_vision_cuda_graph_seq_length",
    "graph_modules",
    "graph_stage",
    "is_graph_capturing",
    "is_graph_warmup",
    "make_graphed_callables",
    "order",
    "set_cuda_graph_overrides",
    "set_current_microbatch",
    "tree_map",
    "verify",
]

_HOMES = {
    name: home
    for home, names in {
        "tools.advice.advise": "AdviceReport advise",
        "engine.backends": "Backend backend_for",
        "lab.bench.run": "BenchResult benchmark",
        "engine.memory.inputs": "ArgMetadata",
        "engine.memory.reuse_pool": "TensorReusePool",
        "engine.parts.callables.graphed": "CallablesReport",
        "engine.parts.callables.make_graphed": "make_graphed_callables",
        "config.container": "ConfigContainer",
        "config.environment": "Environment",
        "config.overrides": "set_cuda_graph_overrides",
        "config.scope": "CudaGraphScope VALID_CUDA_GRAPH_IMPLS VALID_CUDA_GRAPH_SCOPES",
        "core.errors": "BuildError CaptureError ClosedError ConfigError InvalidArgument NoStepError NonFinite "
        "ScriptError SignatureMismatch StaleMemoryError StateChanged StepgraphError StepgraphWarning",
        "engine.step.capture": "capture",
        "tools.doctor": "DoctorReport doctor",
        "tools.explain": "Explanation explain",
        "tools.frozen_values.frozen": "frozen",
        "tools.frozen_values.frozen_report": "FrozenReport",
        "tools.checks.check": "CheckReport check",
        "megatron.layers_helper": "TECudaGraphHelper",
        "megatron.manager": "CudaGraphManager",
        "megatron.optimizer_wrapper": "OptimizerCudaGraphWrapper",
        "megatron.part_graphs": "set_current_microbatch",
        "megatron.vision_helper": "VisionTECudaGraphHelper get_vision_cuda_graph_seq_length",
        "engine.parts.modules.graph_modules": "GraphedModules graph_modules",
        "engine.parts.modules.mismatch": "get_mismatch_errors",
        "engine.parts.modules.report": "ModuleReport",
        "engine.parts.modules.scopes": "ScopeRegistry",
        "engine.parts.modules.session": "create_cudagraphs delete_cuda_graphs is_graph_capturing is_graph_warmup",
        "engine.parts.modules.static_buffers": "CudagraphBufferMetadata",
        "engine.parts.stages.stage": "GraphedStages graph_stage",
        "tools.verification.report": "VerifyReport",
        "tools.verification.verify": "verify",
        "engine.backends.random.tracker": "CudaRNGStatesTracker get_cuda_rng_tracker",
        "engine.call.session": "Session",
        "engine.step.full_iteration": "FullCudaGraphWrapper",
        "engine.step.report": "Report",
        "engine.step.static_loader": "StaticBufferLoader",
        "engine.step.step": "CapturedStep",
        "core.tree": "tree_map",
    }.items()
    for name in names.split()
}
"""The module that defines each public name."""
_MODULES = {"order": "engine.order"}
"""Public names that are modules."""


def _import_rich() -> None:
    """Import what of rich draws from Python's global random generator when it is imported, and put the state back.

    This is the only place: every import of stepgraph comes here first, and a module is imported once.
    """
    state = random.getstate()
    importlib.import_module("rich.style")
    random.setstate(state)


_import_rich()


if not TYPE_CHECKING:  # a type checker reads the imports above, and refuses names that do not exist

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, when it is first asked for."""
        if name in _HOMES:
            with importing_torch():
                value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
            globals()[name] = value
            return value
        module = f"{__name__}.{_MODULES.get(name, name)}"
        if not name.startswith("_") and importlib.util.find_spec(module) is not None:
            with importing_torch():
                return importlib.import_module(module)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
