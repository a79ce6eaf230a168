"""stepgraph: capture a PyTorch training step as CUDA graphs, replay it, and prove that nothing changed but the time."""

from stepgraph import order
from stepgraph.backends import Backend, backend_for
from stepgraph.buffers.boundary import ArgMetadata
from stepgraph.callables.callables import make_graphed_callables
from stepgraph.callables.callables_report import CallablesReport
from stepgraph.callables.layers_helper import TECudaGraphHelper
from stepgraph.callables.part_graphs import set_current_microbatch
from stepgraph.callables.stage import GraphedStages, graph_stage
from stepgraph.callables.vision_helper import VisionTECudaGraphHelper, get_vision_cuda_graph_seq_length
from stepgraph.capture.full_iteration import FullCudaGraphWrapper
from stepgraph.capture.graph_modules import GraphedModules, graph_modules
from stepgraph.capture.iteration import capture
from stepgraph.capture.manager import CudaGraphManager
from stepgraph.capture.mismatch import get_mismatch_errors
from stepgraph.capture.module_report import ModuleReport
from stepgraph.capture.module_session import (
    create_cudagraphs,
    delete_cuda_graphs,
    is_graph_capturing,
    is_graph_warmup,
)
from stepgraph.capture.report import Report
from stepgraph.capture.scopes import ScopeRegistry
from stepgraph.capture.session import Session
from stepgraph.capture.static_loader import StaticBufferLoader
from stepgraph.capture.step import CapturedStep
from stepgraph.errors import (
    BuildError,
    CaptureError,
    ClosedError,
    InvalidArgument,
    NonFinite,
    SignatureMismatch,
    StaleMemoryError,
    StateChanged,
    StepgraphError,
    StepgraphWarning,
)
from stepgraph.rng.tracker import CudaRNGStatesTracker, get_cuda_rng_tracker

__version__ = "0.1.0"

__all__ = [
    "ArgMetadata",
    "Backend",
    "BuildError",
    "CallablesReport",
    "CaptureError",
    "CapturedStep",
    "ClosedError",
    "CudaGraphManager",
    "CudaRNGStatesTracker",
    "FullCudaGraphWrapper",
    "GraphedModules",
    "GraphedStages",
    "InvalidArgument",
    "ModuleReport",
    "NonFinite",
    "Report",
    "ScopeRegistry",
    "Session",
    "SignatureMismatch",
    "StaleMemoryError",
    "StateChanged",
    "StaticBufferLoader",
    "StepgraphError",
    "StepgraphWarning",
    "TECudaGraphHelper",
    "VisionTECudaGraphHelper",
    "backend_for",
    "capture",
    "create_cudagraphs",
    "delete_cuda_graphs",
    "get_cuda_rng_tracker",
    "get_mismatch_errors",
    "get_vision_cuda_graph_seq_length",
    "graph_modules",
    "graph_stage",
    "is_graph_capturing",
    "is_graph_warmup",
    "make_graphed_callables",
    "order",
    "set_current_microbatch",
]
