"""stepgraph: capture a PyTorch training step as CUDA graphs, replay it, and prove that nothing changed but the time."""

from stepgraph import order
from stepgraph.backends import Backend, backend_for
from stepgraph.capture.full_iteration import FullCudaGraphWrapper
from stepgraph.capture.iteration import capture
from stepgraph.capture.report import Report
from stepgraph.capture.session import Session
from stepgraph.capture.static_loader import StaticBufferLoader
from stepgraph.capture.step import CapturedStep
from stepgraph.errors import (
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
from stepgraph.state.rng_tracker import CudaRNGStatesTracker, get_cuda_rng_tracker

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CaptureError",
    "CapturedStep",
    "ClosedError",
    "CudaRNGStatesTracker",
    "FullCudaGraphWrapper",
    "InvalidArgument",
    "NonFinite",
    "Report",
    "Session",
    "SignatureMismatch",
    "StaleMemoryError",
    "StateChanged",
    "StaticBufferLoader",
    "StepgraphError",
    "StepgraphWarning",
    "backend_for",
    "capture",
    "get_cuda_rng_tracker",
    "order",
]
