"""stepgraph: capture a PyTorch training step as CUDA graphs, replay it, and prove that nothing changed but the time."""

from stepgraph.backends import Backend, backend_for
from stepgraph.capture.iteration import CapturedStep, capture
from stepgraph.capture.report import Report
from stepgraph.capture.session import Session
from stepgraph.errors import (
    CaptureError,
    ClosedError,
    InvalidArgument,
    SignatureMismatch,
    StaleMemoryError,
    StepgraphError,
    StepgraphWarning,
)

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CaptureError",
    "CapturedStep",
    "ClosedError",
    "InvalidArgument",
    "Report",
    "Session",
    "SignatureMismatch",
    "StaleMemoryError",
    "StepgraphError",
    "StepgraphWarning",
    "backend_for",
    "capture",
]
