"""`StepOptions` are the options of `stepgraph.capture`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.call.options import Options
from stepgraph.engine.optim.optimizer import OptimizerMode
from stepgraph.engine.step.padding import Buckets

NanCheck = Literal["off", "device"]


@dataclass(frozen=True, slots=True)
class StepOptions(Options):
    """How a whole step is captured."""

    optimizer: Annotated[
        OptimizerMode, 'Where optimizers run: "auto", "inside", "outside", or "capturable" to switch them to that form.'
    ] = "auto"
    nan_check: Annotated[NanCheck, '"device": watch losses and gradients for NaN and inf, without a host read.'] = "off"
    buckets: Annotated[
        Buckets | None, "Sizes that batches are padded to, each a graph: {'batch': {1: [128, 256]}}."
    ] = None

    def __post_init__(self) -> None:
        _refuse_host_read(self.nan_check)
        Options.__post_init__(self)
        if self.buckets is not None:
            self.buckets.check_limit(self.max_graphs)


def _refuse_host_read(nan_check: object) -> None:
    if nan_check is True:
        raise InvalidArgument(
            "nan_check=True would read the loss on the host at each step",
            rule="option",
            why="a host read waits for the device and cannot be captured.",
            fix="pass nan_check='device': it keeps a flag on the device and reads it one call later.",
        )
