"""A call site: all graphs for calls that look alike from outside, told apart by the state they were captured in.

The arguments and the process's flags find the site by one dictionary look-up. Within it, graphs differ by what the
step's own modules and gradients are like: train or eval, `.grad` None or not. Which modules those are is only known
once the step has run, and may differ between train and eval, so each graph carries its own list and is asked whether
it fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from stepgraph.buffers import StaticInputs, StaticOutputs
from stepgraph.capture.chain import Chain
from stepgraph.signature import Signature
from stepgraph.state.grads import carry_in
from stepgraph.state.module_state import Touched
from stepgraph.state.optimizer import HostCounters, NumbersGuard


class CapturedCall:
    """One captured signature: static inputs, the chain, static outputs, and what must hold for a replay."""

    def __init__(
        self,
        signature: Signature,
        modules: Sequence[torch.nn.Module],
        parameters: Sequence[torch.Tensor],
        inputs: StaticInputs,
        chain: Chain,
        outputs: StaticOutputs,
        carried_in: Sequence[tuple[torch.Tensor, torch.Tensor]],
        guards: Sequence[NumbersGuard],
        counters: HostCounters,
    ) -> None:
        self.signature = signature
        self.inputs, self.chain, self.outputs = inputs, chain, outputs
        self.guards = tuple(guards)
        self._modules, self._parameters = tuple(modules), tuple(parameters)
        self._training, self._no_grad = list(signature.training), list(signature.no_grad)
        self._carried_in = tuple(carried_in)
        self._counters = counters

    def fits(self) -> bool:
        """Whether modules and gradients are as they were before the capture."""
        return [m.training for m in self._modules] == self._training and [
            p.grad is None for p in self._parameters
        ] == self._no_grad

    def replay(self, leaves: Sequence[object]) -> None:
        """Run the captured step once on these inputs."""
        self.inputs.load(leaves)
        carry_in(self._carried_in)
        self._counters.advance()
        self.chain.replay()
        self.inputs.store(leaves)


class Site:
    """The graphs and the warm-up of calls with the same arguments and flags."""

    def __init__(self) -> None:
        self.signature: Signature | None = None
        """The latest signature seen here, to tell others from."""
        self.touched = Touched()
        self.calls: list[CapturedCall] = []
        self.failure: str | None = None
        self.hold_grads = False
        """Whether a recording has shown that the step uses the gradients it finds."""
        self.obstacles: dict[str, str] = {}
        """What warm-up found that no replay could repeat: rule -> description."""
        self.results: tuple[object, list[object]] | None = None
        """The static part of an earlier call's results."""
        self.keep_alive: list[object] = []
        """Arguments that are told by identity, kept so that no other object takes their identity."""
        self._warm: Counter[frozenset[int]] = Counter()

    def find(self) -> CapturedCall | None:
        """The graph for the state of this moment."""
        for call in self.calls:
            if call.fits():
                return call
        return None

    def _mode(self) -> frozenset[int]:
        return frozenset(id(m) for m in self.touched.modules if m.training)

    @property
    def warm_calls(self) -> int:
        """Eager calls so far with the modules in their present modes."""
        return self._warm[self._mode()]

    @property
    def is_warming(self) -> bool:
        """Whether nothing is captured yet."""
        return not self.calls

    def count_warm_call(self) -> None:
        self._warm[self._mode()] += 1
