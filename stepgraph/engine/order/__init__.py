"""Pipeline orders: which forward and which backward of which model chunk a rank runs, one after the other.

A graph replays fixed addresses, so a pipeline with several microbatches in flight needs static memory for each of
them. How much, and what may share it, follows from the order in which the rank works. This room makes orders, checks
them and reads lifetimes off them. It is arithmetic on lists: nothing here imports torch or knows of graphs.

- `entries`: one entry; `Order`, an order that names its microbatches.
- `schedules`: orders from a schedule table (1F1B, interleaved).
- `overlap`: an order of chunks made into one of layers, forward and backward interleaved.
- `pipelining`: orders of the schedules of `torch.distributed.pipelining`.
- `validate`: malformed orders are errors that point at the entry.
- `cursor`: the next turn in a round; any other call is refused.
- `lifetimes`: order -> which static buffer each sample uses.
"""

from stepgraph.engine.order.entries import Entry, Kind, Order
from stepgraph.engine.order.lifetimes import plan_buffers, samples_of
from stepgraph.engine.order.overlap import get_overlap_moe_expert_parallel_comm_order
from stepgraph.engine.order.pipelining import order_from_pipelining
from stepgraph.engine.order.schedules import (
    convert_schedule_table_to_order,
    get_schedule_table,
    num_warmup_microbatches,
)
from stepgraph.engine.order.validate import count_microbatches, read_order, validate_order

__all__ = [
    "Entry",
    "Kind",
    "Order",
    "convert_schedule_table_to_order",
    "count_microbatches",
    "get_overlap_moe_expert_parallel_comm_order",
    "get_schedule_table",
    "num_warmup_microbatches",
    "order_from_pipelining",
    "plan_buffers",
    "read_order",
    "samples_of",
    "validate_order",
]
