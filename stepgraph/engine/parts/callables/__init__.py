"""Graphs captured ahead of training, from sample arguments and an order.

`make_graphed_callables` has torch's contract without an order, and Transformer Engine's with one.
"""

from stepgraph.engine.parts.callables.graphed import CallablesReport
from stepgraph.engine.parts.callables.make_graphed import make_graphed_callables, report

__all__ = ["CallablesReport", "make_graphed_callables", "report"]
