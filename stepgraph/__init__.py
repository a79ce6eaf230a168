"""stepgraph: capture a PyTorch training step as CUDA graphs, replay it, and prove that nothing changed but the time."""

from stepgraph.backends import Backend, backend_for
from stepgraph.capture.iteration import capture
from stepgraph.capture.report import Report
from stepgraph.capture.session import Session
from stepgraph.capture.step import CapturedStep
from stepgraph.errors import (
    CaptureError,
    ClosedError,
    InvalidArgument,
    SignatureMismatch,
    StaleMemoryError,
    StateChanged,
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
    "StateChanged",
    "StepgraphError",
    "StepgraphWarning",
    "backend_for",
    "capture",
]
