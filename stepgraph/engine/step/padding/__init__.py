"""Buckets: batches of many lengths on a few graphs.

A graph has one shape. With buckets a batch is padded up to the next of a few sizes, and each size has its graph.
`Buckets` and `BoundBuckets` decide which dimensions belong together and which size they get, `ResultDims` which
dimensions of the results grow with them and are cut back. Nothing here knows of graphs.

A call costs a look at the bucketed sizes, and one fill and one copy for each tensor that is not at its bucket's size
yet. The step computes on the padded batch: a loss that counts the padding in, counts it in eager too.
"""

from stepgraph.engine.step.padding.bound import BoundBuckets, Padded
from stepgraph.engine.step.padding.buckets import Buckets, Choice
from stepgraph.engine.step.padding.results import ResultDims, named_shapes, result_dims, result_names

__all__ = ["BoundBuckets", "Buckets", "Choice", "Padded", "ResultDims", "named_shapes", "result_dims", "result_names"]
