"""What a set of graphed callables is and has done, in numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallablesReport:
    """The graphs of one `make_graphed_callables`."""

    num_samples: int
    """Layers times microbatches; without an order, callables."""
    num_graphs: int
    """Forwards, backwards and split weight gradients."""
    num_buffers: int
    """Sets of static arguments: `plan_buffers` says which samples share one."""
    static_bytes: int
    """Memory of static arguments and of static gradients of results."""
    pool_bytes: int
    """Memory of the graphs: activations, results, gradients and what lives inside a graph."""
    capture_seconds: float
    """Warm-up and capture."""
    forwards: int
    backwards: int
    weight_grads: int
    """Replays so far."""
    eager_calls: int = 0
    """Forwards, with their backwards, that were not replayed: somebody held what a replay would have overwritten."""

    eager_reason: str | None = None
    """Why there are no graphs, where a configuration asks for none."""

    @property
    def graphs(self) -> int:
        """The same as `num_graphs`, as other reports name it."""
        return self.num_graphs

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if self.eager_reason is not None:
            return f"no graphs, all calls run eagerly: {self.eager_reason}"
        return (
            f"{self.num_samples} samples, {self.num_graphs} graphs, captured in {self.capture_seconds:.2f} s\n"
            f"static   {self.num_buffers} sets of arguments, {self.static_bytes / 2**20:.1f} MiB with gradients\n"
            f"pool     {self.pool_bytes / 2**20:.1f} MiB\n"
            f"replays  {self.forwards} forwards, {self.backwards} backwards, {self.weight_grads} weight gradients"
            + (f"\neager    {self.eager_calls} calls" if self.eager_calls else "")
        )
