"""Graphs captured ahead of training, from sample arguments and an order; pipelines that replay them.

- `callables`: `make_graphed_callables`, with torch's contract and with Transformer Engine's.
- `split_backward`: a backward in two parts, inputs first.
"""

from stepgraph.callables.graphed import CallablesReport
from stepgraph.callables.make_graphed import make_graphed_callables, report

__all__ = ["CallablesReport", "make_graphed_callables", "report"]
